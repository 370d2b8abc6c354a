"""Generate `omnifleet/wire/omnifleet/v1alpha` from `proto/`. Usage: generate_wire.py [OUT_DIR].

The stubs are committed; tests/contract/test_wire.py runs this into a scratch folder and compares.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
IMPORT = re.compile(r"^from omnifleet\.v1alpha import ", re.M)
MODULE = re.compile(r"(?<![\w.])omnifleet\.v1alpha\.(\w+_pb2)")


def generate(out: Path) -> list[Path]:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py for every proto file into `out`; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sources = [str(p.relative_to(PROTO)) for p in sorted(PROTO.rglob("*.proto"))]
        includes = [f"-I{PROTO}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        outputs = [f"--python_out={scratch}", f"--pyi_out={scratch}", f"--grpc_python_out={scratch}"]
        if protoc.main(["protoc", *includes, *outputs, *sources]) != 0:
            raise SystemExit("protoc failed")
        written = []
        for source in sorted(Path(scratch).rglob("*.py*")):
            # protoc imports by proto package; ours live in omnifleet.wire, so that `omnifleet` stays our package.
            text = IMPORT.sub("from omnifleet.wire import ", source.read_text())
            text = MODULE.sub(r"omnifleet.wire.\1", text)
            target = out / source.name
            target.write_text(text)
            written.append(target)
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "omnifleet" / "wire"
    for stale in target.glob("*_pb2*"):
        stale.unlink()
    print(f"{len(generate(target))} files in {target}")
    shutil.rmtree(target / "__pycache__", ignore_errors=True)
