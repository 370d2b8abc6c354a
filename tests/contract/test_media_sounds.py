"""Model-ready segments of sounds: made once per track and processor, counted as the engine counts, mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from omnifleet.address import processor_fingerprint, segment_key
from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import read_sound_processor
from omnifleet.sounds import sound_tokens
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet_media.segment.sound import features_of
from tests.contract.media_world import png, running
from tests.sounds import sound_model, tone, wav


async def test_segments_of_sounds(tmp_path: Path) -> None:
    """One service for all of it, since its processor process takes seconds to start."""
    spec = read_sound_processor(sound_model(tmp_path))
    async with (
        running(tmp_path / "media", processors=(spec.class_name,)) as service,
        MediaClient.open(service.grpc, deadline_s=120) as near,
        MediaClient.open(service.grpc, same_host=False, deadline_s=120) as far,
    ):
        reply = await near.put(wav(tone(20_000)), "run", kind=MediaKind.AUDIO)
        ref = MediaRef(MediaKind.AUDIO, Digest(reply.ref.digest))
        mapped, streamed = [await client.segment(ref, spec, "run") for client in (near, far)]
        assert (await near.status()).counters["segments_computed"] == 1
        library = f"transformers {transformers.__version__}"
        fingerprint = processor_fingerprint(spec.class_name, spec.config, library, "track")
        expected = features_of(np.array(await near.track(ref)), spec.config)
        for segment in (mapped, streamed):
            for name, tensor in expected.items():
                assert (segment.tensors[name] == tensor.numpy()).all()
            assert segment.grid == expected["input_features"].shape == (1, 126, 32)
            assert segment.token_count == sound_tokens(spec.config, 20_000) == 16 and segment.times_s == ()
            assert segment.key == segment_key(ref.digest, fingerprint)
        contract = media_pb2.DecodeContract(sampling="audio@1", sample_rate=8000)
        slow = await near.put(wav(tone(20_000)), "run", kind=MediaKind.AUDIO, contract=contract)
        for asked, reason in (
            (MediaRef(MediaKind.AUDIO, Digest(slow.ref.digest)), Reason.INVALID_REQUEST),
            (await near.put_image(png(), "run"), Reason.UNSUPPORTED),
        ):
            with pytest.raises(OmnifleetError) as caught:
                await near.segment(asked, spec, "run")
            assert caught.value.reason is reason
