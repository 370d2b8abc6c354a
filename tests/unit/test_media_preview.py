"""What people see of stored media."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from omnifleet_media.console import parse_size, show_size
from omnifleet_media.server.preview import cell_of, contact_sheet, frame_png, sheet_positions, waveform


def shown(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_frames_are_lossless_unless_they_are_shrunk() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), np.uint8)
    assert (shown(frame_png(pixels)) == pixels).all()
    assert shown(frame_png(pixels, 25)).shape == (15, 25, 3)
    assert shown(frame_png(pixels, 500)).shape == (30, 50, 3)  # never enlarged
    assert shown(frame_png(np.zeros((1, 4000, 3), np.uint8), 64)).shape == (1, 64, 3)


@pytest.mark.parametrize("count", [1, 2, 23, 24, 25, 100, 2048])
def test_a_sheet_shows_first_and_last_and_no_frame_twice(count: int) -> None:
    shown_ = sheet_positions(count)
    assert shown_[0] == 0
    assert shown_[-1] == count - 1
    assert len(shown_) == len(set(shown_)) == min(count, 24)
    assert shown_ == sorted(shown_)


def test_a_sheet_of_one_frame_is_one_cell() -> None:
    cell = cell_of(np.full((300, 600, 3), 200, np.uint8))
    sheet = shown(contact_sheet([cell], ["0.00 s"]))
    assert cell.size == (192, 96)
    assert sheet.shape == (4 + 96 + 16 + 4, 4 + 192 + 4, 3)
    assert (sheet[10, 10] == 200).all()


def test_a_waveform_is_as_high_as_its_samples() -> None:
    samples = np.concatenate([np.zeros(5000, np.float32), np.tile(np.float32([1, -1]), 2500)])
    picture = shown(waveform(samples, 100, 64)).astype(int)
    lit = (picture != picture[0, 0]).any(axis=2).sum(axis=0)
    assert (lit[:50] == 1).all()
    assert (lit[50:] >= 62).all()
    for odd in (np.zeros(0, np.float32), np.float32([np.nan, np.inf, -np.inf]), np.float32([9])):
        assert shown(waveform(odd, 100, 64)).shape == (64, 100, 3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("12", 12),
        ("20MB", 20_000_000),
        ("1.5GiB", 3 << 29),
        ("2 k", 2000),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1XB", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    shown_ = [show_size(size) for size in (0, 999, 1000, 24_772_608, 1.59e9, 3e12)]
    assert shown_ == ["0 B", "999 B", "1.0 kB", "24.8 MB", "1.6 GB", "3.0 TB"]
