"""The contract explains itself: every service, call, message, field and enum value in proto/ has a comment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[2] / "proto"
INCLUDES = [f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]


def described(folder: Path, out: Path) -> list[FileDescriptorProto]:
    """Every proto file under `folder` as protoc reads it, comments included."""
    sources = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.proto"))]
    arguments = [f"-I{folder}", *INCLUDES, "--include_source_info", f"--descriptor_set_out={out}"]
    assert protoc.main(["protoc", *arguments, *sources]) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def elements(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """(place in the file, name) of all that needs a comment. Places are field numbers of descriptor.proto."""
    for i, message in enumerate(file.message_type):
        yield from of_message((4, i), message.name, message)
    for i, enum in enumerate(file.enum_type):
        yield from of_enum((5, i), enum.name, enum)
    for i, service in enumerate(file.service):
        yield (6, i), service.name
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), f"{service.name}.{method.name}"


def of_message(
    place: tuple[int, ...], name: str, message: DescriptorProto
) -> Iterator[tuple[tuple[int, ...], str]]:
    yield place, name
    for i, field in enumerate(message.field):
        yield (*place, 2, i), f"{name}.{field.name}"
    for i, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from of_message((*place, 3, i), f"{name}.{inner.name}", inner)
    for i, enum in enumerate(message.enum_type):
        yield from of_enum((*place, 4, i), f"{name}.{enum.name}", enum)


def of_enum(
    place: tuple[int, ...], name: str, enum: EnumDescriptorProto
) -> Iterator[tuple[tuple[int, ...], str]]:
    yield place, name
    for i, value in enumerate(enum.value):
        if value.number:  # 0 is "unspecified" in proto3, and says so
            yield (*place, 2, i), f"{name}.{value.name}"


def silent(files: list[FileDescriptorProto]) -> list[str]:
    """What nobody says a word about."""
    found = []
    for file in files:
        told = {
            tuple(location.path)
            for location in file.source_code_info.location
            if (location.leading_comments + location.trailing_comments).strip()
        }
        found += [f"{file.name}: {name}" for place, name in elements(file) if place not in told]
    return found


def test_the_whole_contract_is_commented(tmp_path: Path) -> None:
    files = described(PROTO, tmp_path / "set")
    assert len(files) == 8
    assert silent(files) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("message A { string b = 1; }", ["A", "A.b"]),
        ("// a\nmessage A { string b = 1; }", ["A.b"]),
        ("// a\nmessage A {\n  string b = 1;  // b\n  map<string, double> c = 2;\n}", ["A.c"]),
        ("// a\nenum A {\n  A_NONE = 0;\n  A_ONE = 1;\n  A_TWO = 2;  // two\n}", ["A.A_ONE"]),
        ("// e\nmessage E {}\n// s\nservice S {\n  rpc Go(E) returns (E);\n}", ["S.Go"]),
        ("// a\nmessage A {\n  // b\n  message B {\n    string c = 1;\n  }\n}", ["A.B.c"]),
    ],
)
def test_what_has_no_comment_is_found(tmp_path: Path, text: str, missing: list[str]) -> None:
    folder = tmp_path / "proto"
    folder.mkdir()
    (folder / "x.proto").write_text(f'syntax = "proto3";\n\n{text}\n')
    assert silent(described(folder, tmp_path / "set")) == [f"x.proto: {name}" for name in missing]
