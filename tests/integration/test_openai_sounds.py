"""Sounds by the official `openai` client against gateway, media service and a real engine that hears, each a process of its own.

On a CPU; `tests/gpu/test_audio_gpu.py` runs the same tests with the engine on a GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import yaml
from safetensors.torch import load_file

from omnifleet.auth import Scope
from omnifleet.client.rollout import RolloutClient
from omnifleet.service import load_tokens, read_records
from omnifleet.sounds import read_sound_config, sound_token_id, sound_tokens
from omnifleet.types import Identity
from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.integration.sound_world import RATE, gap, reference, tone
from tests.integration.test_openai_client import Device, Stack, chat, extra, shown

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": False,
    "processor_cache_gb": 0.05,
    "images_per_prompt": 2,
    "sounds_per_prompt": 2,
}
CPU = Device({"dtype": "bfloat16", "kv_cache_memory_bytes": 128 << 20, "threads": 1}, tolerance=0.05)
"""bfloat16, since the tower of pictures takes nothing else; sounds to 1e-3 in float32: `test_worker_sounds.py`."""
FULL: Any = {"x-omnifleet-provenance": "full"}


@pytest.fixture(scope="module")
def device() -> Device:
    return CPU


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hears")
    write_hybrid(folder / "model", sound=True)
    stack = Stack(folder / "run", folder / "model", device)
    stack.run_dir.mkdir()
    recipe = {
        "model": {"path": str(stack.model)},
        "sampling": {"max_tokens": 6},
        "gateway": {"suspect_after_s": 100.0, "dead_after_s": 200.0, "hung_after_s": 300.0},
        "rollout": {"engine": {**ENGINE, **device.engine}},
    }
    (stack.run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    load_tokens(stack.run_dir)
    try:
        stack.up()
        yield stack
    finally:
        stack.close()


def heard(seconds: float, hertz: float) -> dict[str, Any]:
    data = base64.b64encode(tone(seconds, hertz)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


async def counters(stack: Stack) -> dict[str, float]:
    address = read_records(stack.run_dir)["worker-0"].grpc
    async with RolloutClient.open(address, stack.secret(Scope.TRAINER)) as worker:
        return {c.name: c.value for c in (await worker.status()).counters}


async def test_a_sound_changes_the_reply_and_is_what_transformers_hears(hearing: Stack) -> None:
    """Scored as sampled; as transformers computes it; the digest and the extractor are told; a second time nothing is encoded."""
    weights = load_file(hearing.model / "model.safetensors")
    seen: list[list[float]] = []
    async with (
        hearing.client() as client,
        RolloutClient.open(hearing.address, hearing.secret(Scope.TRAINER)) as rollout,
    ):
        for hertz in (3000, 300):
            asked = chat(heard(1.0, hertz), "what?", logprobs=True)
            reply = await client.chat.completions.create(**asked, extra_headers=FULL)
            origin, message = extra(reply)["omnifleet"], extra(reply.choices[0].message)
            [media] = origin["media"]
            assert media["kind"] == "audio" and len(media["processor_fingerprint"]) == 64
            ids, said = message["prompt_token_ids"], message["generation_token_ids"]
            wanted = sound_tokens(read_sound_config(hearing.model), RATE)
            assert ids.count(sound_token_id(hearing.model)) == wanted == 13
            rendered = await rollout.render(asked["messages"], identity=Identity("default"))
            assert [ref.digest for ref in rendered.media] == [media["digest"]]
            scored, _ = await rollout.score_tokens(rendered.token_ids, said, rendered.media)
            found = message["generation_log_probs"]
            assert gap(scored, np.array(found)) < hearing.device.tolerance
            samples = np.frombuffer(tone(1.0, hertz)[44:], "<i2").astype(np.float32) / 32_768
            expected = reference(hearing.model, weights, [samples], ids, said)
            print(f"\n{origin['engine']}: {gap(found, expected):.1e} from transformers at {hertz} Hz")
            assert gap(found, expected) < hearing.device.tolerance
            seen.append(found)
        assert np.abs(np.array(seen[0]) - np.array(seen[1])).max() > 4 * hearing.device.tolerance
        before = await counters(hearing)
        again = await client.chat.completions.create(**chat(heard(1.0, 300), "what?"), extra_headers=FULL)
        after = await counters(hearing)
        assert after["encoder_items"] == before["encoder_items"]
        labels = "0.32" in extra(again)["omnifleet"]["engine"]
        assert after["sounds_sent"] - before["sounds_sent"] == (0 if labels else 1), (
            "0.25.1 wants data each time"
        )
        assert (
            gap(extra(again.choices[0].message)["generation_log_probs"], np.array(seen[1]))
            < hearing.device.tolerance
        )


async def test_pictures_and_sounds_share_a_prompt_in_chat_and_responses(hearing: Stack) -> None:
    async with hearing.client() as client:
        parts = [heard(0.4, 800), shown("red"), "what?", heard(0.4, 900)]
        reply = await client.chat.completions.create(**chat(*parts), extra_headers=FULL)
        origin = extra(reply)["omnifleet"]
        assert [media["kind"] for media in origin["media"]] == ["audio", "image", "audio"]
        items: Any = [
            heard(0.4, 800),
            {"type": "input_image", "image_url": shown("red")["image_url"]["url"]},
            {"type": "input_text", "text": "what?"},
            heard(0.4, 900),
        ]
        answer = await client.responses.create(
            model="policy",
            input=[{"role": "user", "content": items}],
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        first = extra(reply.choices[0].message)
        last = extra(answer.output[-1])
        assert last["prompt_token_ids"] == first["prompt_token_ids"]
        assert (
            gap(last["generation_log_probs"], np.array(first["generation_log_probs"]))
            < hearing.device.tolerance
        )


async def test_what_is_no_sound_and_what_does_not_fit_is_refused(hearing: Stack) -> None:
    async with hearing.client() as client:
        broken = {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(b"no sound").decode(), "format": "mp3"},
        }
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**chat(broken))
        assert caught.value.code == "invalid_media"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**chat(heard(90.0, 100)))
        assert caught.value.code == "prompt_too_long"
        with pytest.raises(openai.BadRequestError, match="3 audio items"):
            await client.chat.completions.create(**chat(*[heard(0.2, 100 + i) for i in range(3)]))
