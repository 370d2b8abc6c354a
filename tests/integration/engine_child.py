"""Child process of a test: the vLLM adapter alone, so that its engine process can be made to forget. Prints JSON lines."""

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from omnifleet.config.services import EngineConfig, RolloutConfig
from omnifleet.types import Digest, LogprobsMode, MediaKind, MediaRef, Sampling
from omnifleet_rollout.engine.port import EngineRequest
from omnifleet_rollout.engine.vllm_engine import VllmEngine

_EMBEDDINGS = ("embed_tokens.weight", "backbone.embeddings.weight")


class Asked:
    """One engine and its requests."""

    def __init__(self, engine: VllmEngine, prompt: list[int]) -> None:
        self.engine, self.prompt, self.count = engine, prompt, 0

    async def __call__(self, what: str, media: list[MediaRef], **sampling: Any) -> None:
        """Generate, and print tokens, logprobs and the counters so far."""
        self.count += 1
        prompt = await self.engine.prepare(self.prompt if media else [40, 42, 43, 44], media, "test")
        request = EngineRequest(f"r{self.count}", prompt, Sampling(**sampling), salt=f"salt {self.count}")
        tokens: list[int] = []
        logprobs: list[float] = []
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                logprobs += delta.logprobs
        counters = dict(self.engine.stats().counters)
        line = {
            "what": what,
            "prompt": prompt.token_ids,
            "tokens": tokens,
            "logprobs": logprobs,
            "counters": counters,
        }
        print(json.dumps(line), flush=True)


async def main(
    model: str, media: str, secret: str, kind: str, mark: int, digests: list[str], settings: str
) -> None:
    async def find_media() -> str:
        return media

    engine_config = EngineConfig(**json.loads(settings), media_tokens="ban")
    config = RolloutConfig(engine=engine_config, logprobs_mode=LogprobsMode.RAW)
    engine = VllmEngine(Path(model), config, find_media=find_media, secret=secret)
    first, second = (MediaRef(MediaKind(kind), Digest(digest)) for digest in digests)
    await engine.start()
    try:
        ask = Asked(engine, [40, mark, 41, 42, 43, 44])
        greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
        await ask("first", [first], **greedy)
        await ask("again", [first], **greedy)
        # The engine process forgets pixels and features; the front end still believes that it has them.
        await engine._llm.engine_core.reset_mm_cache_async()
        await engine._llm.reset_encoder_cache()
        await ask("after the engine forgot", [first], **greedy)
        await ask("once more", [first], **greedy)
        # Both forget, as vLLM's own reset does.
        await engine._llm.reset_mm_cache()
        await engine._llm.reset_encoder_cache()
        await ask("after both forgot", [first], **greedy)
        await ask("another picture", [second], **greedy)
        await ask("raw", [], temperature=0.6, max_tokens=12, seed=3, ignore_eos=True)
        vocabulary = next(t.shape[0] for t in engine.facts.tensors if t.name.endswith(_EMBEDDINGS))
        others = tuple(token for token in range(vocabulary) if token not in (mark, 50))
        await ask("banned", [], max_tokens=3, ignore_eos=True, banned_token_ids=others)
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    model, media, secret, kind, mark, first, second, settings = sys.argv[1:]
    asyncio.run(main(model, media, secret, kind, int(mark), [first, second], settings))
