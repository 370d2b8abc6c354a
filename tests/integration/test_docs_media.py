"""The examples of docs/api/media.md, run in order beside a real service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from omnifleet.service import read_records

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "media.md"
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
RUN = "RUN"


@pytest.fixture(scope="module")
def beside_a_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as the page imagines it: RUN with a service that is up, cat.png, pictures/dog.png."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / RUN).mkdir()
    (folder / "pictures").mkdir()
    Image.linear_gradient("L").convert("RGB").save(folder / "cat.png")
    Image.radial_gradient("L").convert("RGB").save(folder / "pictures" / "dog.png")
    media = {
        "shared_memory": str(folder / "shm"),
        "processors": [],
        "sources": {"roots": [str(folder / "pictures")]},
    }
    (folder / RUN / "recipe.yaml").write_text(yaml.safe_dump({"media": media}))
    command = [sys.executable, "-m", "omnifleet_media", "serve", "--run-dir", RUN]
    service = subprocess.Popen(command, cwd=folder)
    try:
        end = time.monotonic() + 120
        while "media" not in read_records(folder / RUN):
            assert service.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield folder
    finally:
        service.terminate()
        service.wait(60)


def run(language: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = (
        [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_page_has_examples_of_all_faces() -> None:
    assert [language for language, _ in BLOCKS] == ["sh", "python", "python", "sh"]


@pytest.mark.parametrize(("language", "text"), BLOCKS, ids=["command-line", "asyncio", "blocking", "http"])
def test_an_example_runs(language: str, text: str, beside_a_service: Path) -> None:
    done = run(language, text, beside_a_service)
    assert done.returncode == 0, done.stdout + done.stderr
    if "curl" in text:
        assert (beside_a_service / "first-100-bytes").stat().st_size == 100
        assert Image.open(beside_a_service / "small.png").size == (128, 128)
    elif language == "sh":
        assert re.search(r"^[0-9a-f]{64}  256x256  cat\.png$", done.stdout, re.MULTILINE)
        assert re.search(r"^http://\S+/login\?ticket=", done.stdout, re.MULTILINE)
        assert Image.open(beside_a_service / "frame.png").size == (256, 256)
    else:
        assert "256" in done.stdout or "0.5" in done.stdout
