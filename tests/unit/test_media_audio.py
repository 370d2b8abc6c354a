"""Sound to tracks: one channel of float32 at the contract's rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnifleet.address import track_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet.wire import media_pb2
from omnifleet_media.address.contract import STILL, TRACK, track
from omnifleet_media.address.manifest import MediaObject, is_track
from omnifleet_media.decode.track import decode_track
from omnifleet_media.ingest.slot import contract_for
from omnifleet_media.ingest.sniff import sniff
from tests.media_files import clip, greys, h264, sound


def tone(seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    """440 Hz at half volume; channel k is k octaves higher."""
    t = np.arange(round(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * 440 * 2**k * t) for k in range(channels)]).astype(np.float32)


def decoded(data: bytes, rate: int = 16_000, seconds: float = 60.0) -> tuple[np.ndarray, dict[str, Any]]:
    answer, (body,) = decode_track({"sample_rate": rate, "seconds": seconds}, data)
    samples = np.frombuffer(body, "<f4")
    assert len(samples) == answer["samples"]
    return samples, answer["facts"]


def test_a_wave_file_keeps_its_samples() -> None:
    wave = tone(0.5, 16_000)
    samples, facts = decoded(sound(wave, 16_000))
    assert (samples.dtype, samples.shape) == (np.float32, (8_000,))
    assert abs(samples - wave[0]).max() < 2 / 32_768
    assert facts == {"channels": "1", "source_rate": "16000"}


def test_channels_are_averaged() -> None:
    wave = tone(0.25, 16_000, 2)
    samples, facts = decoded(sound(wave, 16_000))
    assert abs(samples - wave.mean(axis=0)).max() < 2 / 32_768
    assert facts["channels"] == "2"


@pytest.mark.parametrize(("source", "rate"), [(44_100, 16_000), (8_000, 16_000), (16_000, 24_000)])
def test_rates_are_converted(source: int, rate: int) -> None:
    samples, _ = decoded(sound(tone(1.0, source), source), rate)
    assert len(samples) == pytest.approx(rate, abs=64)
    spectrum = abs(np.fft.rfft(samples[:rate]))
    assert np.argmax(spectrum) == pytest.approx(440, abs=2)
    assert abs(samples).max() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("codec", "container"), [("flac", "flac"), ("aac", "mp4"), ("libmp3lame", "mp3")])
def test_usual_codecs(codec: str, container: str) -> None:
    data = sound(tone(1.0, 44_100), 44_100, codec=codec, container=container)
    samples, _ = decoded(data)
    assert len(samples) == pytest.approx(16_000, rel=0.08)
    assert abs(np.argmax(abs(np.fft.rfft(samples[:16_000]))) - 440) <= 2


def test_the_same_sound_at_another_rate_is_another_track() -> None:
    one, other = (decoded(sound(tone(0.1, rate), rate), rate)[0] for rate in (8_000, 16_000))
    assert track_digest(one, 8_000) != track_digest(other, 16_000)
    again, _ = decoded(sound(tone(0.1, 8_000), 8_000, codec="flac", container="flac"), 8_000)
    assert track_digest(again, 8_000) == track_digest(one, 8_000)  # another file, the same samples


def test_a_clip_without_sound_has_no_track() -> None:
    for data in (h264(greys(3)), clip(greys(3))):
        with pytest.raises(OmnifleetError, match="no_audio_stream") as caught:
            decoded(data)
        assert caught.value.reason is Reason.INVALID_MEDIA


@pytest.mark.parametrize("data", [b"", b"RIFF\x24\0\0\0WAVEfmt ", sound(tone(0.1, 16_000), 16_000)[:44]])
def test_broken_files_are_refused(data: bytes) -> None:
    with pytest.raises(OmnifleetError) as caught:
        decoded(data)
    assert caught.value.reason is Reason.INVALID_MEDIA


def test_length_is_limited() -> None:
    with pytest.raises(OmnifleetError) as caught:
        decoded(sound(tone(1.0, 8_000), 8_000), seconds=0.9)
    assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.seconds")


@pytest.mark.parametrize("rate", [1, 3_999, 1 << 20])
def test_rates_that_no_processor_has_are_refused(rate: int) -> None:
    with pytest.raises(OmnifleetError) as caught:
        track(rate)
    assert caught.value.knob == "contract.sample_rate"


def test_an_audio_object_has_one_track() -> None:
    digest = track_digest(np.zeros(8_000, np.float32), 16_000)
    item = MediaObject(MediaKind.AUDIO, (digest,), 8_000, 16_000)
    assert item.manifest == b'{"frames":["' + digest.encode() + b'"],"kind":"audio","v":1}'
    assert item.bytes == item.frame_bytes == 32_000
    assert is_track(item.height, item.width, item.frame_bytes)
    assert not is_track(48, 64, 48 * 64 * 3)


AAC = sound(np.zeros((1, 4_410), np.float32), 44_100, codec="aac", container="mp4")
WAV = sound(np.zeros((1, 1_600), np.float32), 16_000)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("data", "slot", "sampling"),
    [
        (WAV, MediaKind.AUDIO, TRACK),
        (WAV, MediaKind.IMAGE, TRACK),
        (AAC, MediaKind.AUDIO, TRACK),
        (AAC, MediaKind.VIDEO, "uniform@1"),
        (WAV, MediaKind.VIDEO, "uniform@1"),
        (PNG, MediaKind.AUDIO, STILL),
        (PNG, MediaKind.VIDEO, STILL),
        (b"GIF89a", MediaKind.VIDEO, "uniform@1"),
        (b"GIF89a", MediaKind.IMAGE, STILL),
    ],
)
def test_the_slot_decides_where_bytes_leave_a_choice(data: bytes, slot: MediaKind, sampling: str) -> None:
    asked = media_pb2.DecodeContract(sampling="uniform@1")
    assert contract_for(asked, slot, sniff(data)).sampling == sampling


def test_a_track_may_be_asked_for_by_its_contract() -> None:
    asked = media_pb2.DecodeContract(sampling=TRACK, sample_rate=8_000)
    assert contract_for(asked, MediaKind.IMAGE, sniff(AAC)) == track(8_000)
