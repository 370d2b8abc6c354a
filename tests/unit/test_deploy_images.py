"""Dockerfiles: pinned bases, locked packages, sources that exist, no root, and the entry point of their service."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ["media", "reward", "gateway", "rollout", "trainer"]
DISTRIBUTION = {"gateway": "rollout"}
OURS = {"omnifleet", "omnifleet-refit"}
EXTRAS = {"media": {"segments", "video", "redis"}, "rollout": {"cuda"}, "trainer": {"automodel"}}
KNOWN = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
# Two services that talk, or that compare fingerprints, need the same of these.
SHARED = ["grpcio", "protobuf", "pydantic", "safetensors", "blake3", "transformers"]


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continuation lines joined."""
    text = (ROOT / f"deploy/docker/{image}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def arguments(image: str, instruction: str) -> list[str]:
    return [rest for word, rest in instructions(image) if word == instruction]


def pins(image: str) -> dict[str, str]:
    """package -> version of the image's lock."""
    text = (ROOT / f"deploy/docker/locks/{image}.lock").read_text()
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==([^ ;\\]+)", text, re.M)
    }


def wanted(image: str) -> Iterator[Requirement]:
    """What the core and the image's distribution, with the image's extras, declare."""
    service = ROOT / "services" / DISTRIBUTION.get(image, image) / "pyproject.toml"
    for path, extras in ((ROOT / "pyproject.toml", set()), (service, EXTRAS.get(image, set()))):
        project = tomllib.loads(path.read_text())["project"]
        lines = project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]
        yield from (r for line in lines if (r := Requirement(line)).name not in OURS)


@pytest.mark.parametrize("image", IMAGES)
def test_dockerfile_is_understood(image: str) -> None:
    words = [word for word, _ in instructions(image)]
    assert set(words) <= KNOWN
    assert words[0] == "FROM" and words[-2:] == ["ENTRYPOINT", "CMD"]


@pytest.mark.parametrize("image", IMAGES)
def test_bases_are_pinned(image: str) -> None:
    for base in arguments(image, "FROM"):
        assert re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+\.\d+[a-z0-9.-]*( AS [a-z]+)?", base), base


@pytest.mark.parametrize("image", IMAGES)
def test_it_starts_its_service_without_root(image: str) -> None:
    (entry,) = arguments(image, "ENTRYPOINT")
    assert json.loads(entry) == ["omnifleet", image]
    words = [word for word, _ in instructions(image)]
    assert arguments(image, "USER") == ["omnifleet"]
    last_stage = len(words) - 1 - words[::-1].index("FROM")
    assert any("useradd" in rest for word, rest in instructions(image)[last_stage:] if word == "RUN")


@pytest.mark.parametrize("image", IMAGES)
def test_sources_exist_and_reach_the_build(image: str) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for copy in arguments(image, "COPY"):
        if "--from=" in copy:
            continue
        *sources, _ = copy.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source.rstrip("/") == keep or source.startswith(f"{keep}/") for keep in kept), source


@pytest.mark.parametrize("image", IMAGES)
def test_the_lock_is_exact_and_holds_what_is_declared(image: str) -> None:
    text = (ROOT / f"deploy/docker/locks/{image}.lock").read_text()
    assert any("--require-hashes" in run and f"-r {image}.lock" in run for run in arguments(image, "RUN"))
    assert len(re.findall(r"^[\w.-]+(\[[\w,]+\])?==", text, re.M)) == len(re.findall(r"^[\w.-]", text, re.M))
    assert "--hash=sha256:" in text and "://" not in text
    held = pins(image)
    for requirement in wanted(image):
        name = canonicalize_name(requirement.name)
        if name == "torch" and image == "media":  # a step of its own
            assert "requirements/torch.txt" in " ".join(arguments(image, "RUN"))
            continue
        assert name in held, f"{name} is not in {image}.lock: run deploy/docker/lock.sh {image}"
        assert requirement.specifier.contains(held[name], prereleases=True), (name, held[name])


@pytest.mark.parametrize("package", SHARED)
def test_images_that_talk_hold_the_same_versions(package: str) -> None:
    held = {version for image in IMAGES if (version := pins(image).get(package))}
    assert len(held) == 1, held
