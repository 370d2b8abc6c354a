"""A checkpoint's own words: headers read without torch, damage told apart."""

import json
from pathlib import Path

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine.checkpoint import read_config, read_table


def write_safetensors(path: Path, header: dict[str, object], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_the_table_is_read_from_all_files_in_order_of_names(tmp_path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    write_safetensors(tmp_path / "b.safetensors", {"__metadata__": {"format": "pt"}, "b": entry})
    write_safetensors(tmp_path / "a.safetensors", {"z": entry, "a": entry})
    table = read_table(tmp_path)
    assert [(t.name, t.dtype, list(t.shape), t.bytes) for t in table] == [
        (name, "BF16", [2, 3], 12) for name in ("a", "b", "z")
    ]


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"[1,2"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(OmnifleetError, match=r"model\.safetensors") as refused:
        read_table(tmp_path)
    assert refused.value.reason is Reason.MODEL_MISSING


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    for read in (read_table, read_config):
        with pytest.raises(OmnifleetError) as refused:
            read(tmp_path)
        assert refused.value.reason is Reason.MODEL_MISSING and refused.value.knob == "model.path"
