"""Sounds through gateway and worker, over HTTP and gRPC, with a fake engine: by digest, expanded, counted, refused by name."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from blake3 import blake3
from tokenizers import AddedToken, Tokenizer

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind, MediaRef, Sampling
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.gateway.renderer import Renderer, RendererLoader
from tests.contract.gateway_world import PICTURE, TEMPLATE, WHO, World, world, write_tokenizer
from tests.contract.test_gateway_extras import joined

IMAGE, SOUND, START, END = 258, 260, 261, 262
FEATURES = {MediaKind.IMAGE: 4, MediaKind.AUDIO: 13}
BYTES = b"RIFF: the media service decodes"
REF = MediaRef(MediaKind.AUDIO, Digest(blake3(BYTES).hexdigest()))
INLINE = {"type": "input_audio", "input_audio": {"data": base64.b64encode(BYTES).decode(), "format": "wav"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of gateway tests with a placeholder of sounds, which the template writes alone."""
    folder = write_tokenizer(tmp_path_factory.mktemp("checkpoint"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<so_embedding>", "<so_start>", "<so_end>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace(
        "{% else %}{{ p.text }}", "{% elif p.type == 'audio' %}<so_embedding>{% else %}{{ p.text }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sound_context_token_id": SOUND}))
    return folder


async def count(ref: MediaRef, run: str) -> int:
    return FEATURES[ref.kind]


@asynccontextmanager
async def hearing(
    path: Path, checkpoint: Path, *, audio_token: int | None = SOUND, max_model_len: int = 2048
) -> AsyncIterator[tuple[World, openai.AsyncOpenAI]]:
    engine = FakeEngine(
        image_token=IMAGE, audio_token=audio_token, count_features=count, max_model_len=max_model_len
    )
    async with world(path, renderer=RendererLoader(checkpoint)) as here, joined(here, "w-1", engine):
        address = f"{here.http}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=120, max_retries=0) as client:
            yield here, client


def chat(*content: Any) -> Any:
    return [{"role": "user", "content": list(content)}]


ASKED = {"return_token_ids": True, "return_media": True, "return_provenance": True}


async def test_every_dialect_sends_a_sound_by_its_digest(tmp_path: Path, checkpoint: Path) -> None:
    """Inline, as a data URL and as a digest it is the same one; a picture between them keeps its place."""
    data_url = f"data:audio/wav;base64,{base64.b64encode(BYTES).decode()}"
    parts: list[Any] = [
        INLINE,
        {"type": "image_url", "image_url": {"url": PICTURE.url}},
        {"type": "audio_url", "audio_url": {"url": data_url}},
        {"type": "text", "text": "what?"},
        {"type": "audio_url", "audio_url": REF.url},
    ]
    async with hearing(tmp_path, checkpoint) as (_, client):
        said = await client.chat.completions.create(
            model="policy", messages=chat(*parts), max_tokens=2, extra_body=ASKED
        )
        items: list[Any] = [
            {
                **part,
                "type": {"text": "input_text", "image_url": "input_image"}.get(part["type"], part["type"]),
            }
            for part in parts
        ]
        items[1]["image_url"] = PICTURE.url
        said_by_user: Any = [{"role": "user", "content": items}]
        answered = await client.responses.create(
            model="policy", input=said_by_user, max_output_tokens=16, extra_body=ASKED
        )
    first, second = said.to_dict(), answered.to_dict()
    block: Any = first["omnifleet"]
    assert [media["digest"] for media in block["media"]] == [
        REF.digest,
        PICTURE.digest,
        REF.digest,
        REF.digest,
    ]
    assert [media["kind"] for media in block["media"]] == ["audio", "image", "audio", "audio"]
    message: Any = first["choices"][0]["message"]  # type: ignore[index]
    marks = [id for id in message["prompt_token_ids"] if id in (SOUND, IMAGE)]
    assert marks == [SOUND] * 13 + [IMAGE] * 4 + [SOUND] * 26
    again: Any = second["omnifleet"]
    assert again["media"] == block["media"] and again["prompt_hash"] == block["prompt_hash"]


async def test_token_prompts_have_one_placeholder_a_sound(tmp_path: Path, checkpoint: Path) -> None:
    async with hearing(tmp_path, checkpoint) as (here, _):

        async def ask(ids: list[int]) -> Any:
            return await here.client.generate(
                prompt_token_ids=ids,
                media=[REF],
                sampling=Sampling(max_tokens=1),
                identity=WHO,
                deadline_s=60,
            )

        reply = await ask([10, SOUND, 12])
        assert reply.prompt_token_ids == [10, *[SOUND] * 13, 12]
        for wrong in ([10, 12], [10, IMAGE, 12], [10, SOUND, SOUND, 12]):
            with pytest.raises(OmnifleetError) as refused:
                await ask(wrong)
            assert refused.value.reason is Reason.INVALID_REQUEST


async def test_an_engine_without_sounds_refuses_them_and_names_the_setting(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with hearing(tmp_path, checkpoint, audio_token=None) as (here, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="policy", messages=chat(INLINE), max_tokens=1)
        body: Any = caught.value.body
        assert caught.value.status_code == 501 and body["code"] == "unsupported"
        assert body["knob"] == "rollout.engine.sounds_per_prompt" and not body["retryable"]
        with pytest.raises(OmnifleetError) as refused:
            await here.client.generate(
                prompt_token_ids=[SOUND],
                media=[REF],
                sampling=Sampling(max_tokens=1),
                identity=WHO,
                deadline_s=60,
            )
        assert refused.value.reason is Reason.UNSUPPORTED and refused.value.knob == body["knob"]


async def test_a_reply_is_capped_to_what_fits_after_the_sound(tmp_path: Path, checkpoint: Path) -> None:
    async with hearing(tmp_path, checkpoint, max_model_len=64) as (_, client):
        said = await client.chat.completions.create(model="policy", messages=chat(INLINE), max_tokens=2000)
        usage: Any = said.usage
        assert (
            said.choices[0].finish_reason == "length" and usage.prompt_tokens + usage.completion_tokens == 64
        )
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="policy", messages=chat(*[INLINE] * 5), max_tokens=1)
        body: Any = caught.value.body
        assert caught.value.status_code == 400 and body["code"] == "prompt_too_long"


@pytest.mark.parametrize("format", ["wav;x", "../wav", "WAV ", 7])
async def test_the_name_of_a_format_is_a_name(tmp_path: Path, checkpoint: Path, format: Any) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": format}}
    async with hearing(tmp_path, checkpoint) as (_, client):
        with pytest.raises(openai.BadRequestError, match="format"):
            await client.chat.completions.create(model="policy", messages=chat(part), max_tokens=1)


def test_expanded_ids_that_come_back_lose_what_the_engine_put_around_a_sound(checkpoint: Path) -> None:
    renderer = Renderer.load(checkpoint)
    expanded = [10, START, SOUND, SOUND, END, START, SOUND, END, 11, START, 12, IMAGE, IMAGE]
    assert renderer.unexpanded(expanded) == [10, SOUND, SOUND, 11, START, 12, IMAGE]
