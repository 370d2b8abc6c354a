"""docker-compose.gpu.yml says only things that are there: files, services, ports, volumes, and commands the CLI parses."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft202012Validator

from omnifleet.config import load_recipe

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.gpu.yml"
TEXT = FILE.read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
LONG_RUNNING = {name: service for name, service in OURS.items() if name != "prepare"}
SPECIFICATION = ROOT / "tests/schemas/compose-spec.json"
"""As compose-spec/compose-spec on GitHub publishes it (schema/compose-spec.json, Apache-2.0), unchanged."""


def entrypoint(service: dict[str, Any]) -> list[str]:
    """ENTRYPOINT of the service's image."""
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    words = re.findall(r'"([^"]*)"', dockerfile.split("\nENTRYPOINT ")[1].splitlines()[0])
    return list(words)


def command_line() -> Any:
    """The `omnifleet` command with every service that pyproject.toml files declare, installed or not."""
    app = typer.Typer()
    for project in sorted(ROOT.glob("services/*/pyproject.toml")):
        points = tomllib.loads(project.read_text())["project"]["entry-points"]["omnifleet.services"]
        for name, target in points.items():
            module, _, attribute = target.partition(":")
            app.add_typer(getattr(import_module(module), attribute), name=name)
    return typer.main.get_command(app)


def parsed(words: list[str]) -> dict[str, Any]:
    """Options of `omnifleet …` as the real parser reads them, without running anything."""
    assert words[0] == "omnifleet"
    command: Any = command_line()  # typer brings its own copy of click: no class to name here
    rest, context = words[1:], None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name or "omnifleet", list(rest), parent=context)
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
    return dict(command.make_context(command.name or "", list(rest), parent=context).params)


def listens() -> dict[str, str]:
    """service -> its gRPC address."""
    return {name: parsed(entrypoint(s) + s["command"])["listen"] for name, s in LONG_RUNNING.items()}


def test_the_parser_used_here_refuses_what_is_wrong() -> None:
    with pytest.raises(Exception, match="Missing parameter: run_dir"):
        parsed(["omnifleet", "reward", "serve"])
    with pytest.raises(Exception, match="No such option"):
        parsed(["omnifleet", "reward", "serve", "--run-dir", "/r", "--lisen", "x"])


def test_the_services_are_those_of_the_design() -> None:
    expected = {"prepare", "redis", "media", "reward", "gateway", "worker-0", "worker-1", "trainer"}
    assert set(SERVICES) == expected
    assert set(COMPOSE) - {"name", "services", "volumes"} == {"x-service", "x-health"}


def faults(compose: dict[str, Any]) -> list[str]:
    """Where a file breaks the Compose specification."""
    validator = Draft202012Validator(json.loads(SPECIFICATION.read_text()))
    return [error.json_path for error in validator.iter_errors(compose)]


def test_the_specification_allows_the_file() -> None:
    assert faults(COMPOSE) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"helthcheck": {}}, "$.services.gateway"),
        ({"healthcheck": {"test": "true", "retires": 3}}, "$.services.gateway.healthcheck"),
        ({"depends_on": {"media": {"condition": "healthy"}}}, "$.services.gateway.depends_on"),
        ({"restart": 1}, "$.services.gateway.restart"),
    ],
)
def test_the_specification_finds_faults(change: dict[str, Any], where: str) -> None:
    wrong = {**COMPOSE, "services": {**SERVICES, "gateway": {**SERVICES["gateway"], **change}}}
    assert where in faults(wrong)


@pytest.mark.parametrize("name", SERVICES)
def test_restarts_are_chosen_and_foreign_images_pinned(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] in ("no", "on-failure")
    if name not in OURS:
        assert re.search(r":\d+\.\d+\.\d+", service["image"])


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_commands_parse_and_addresses_agree(name: str) -> None:
    service = LONG_RUNNING[name]
    options = parsed(entrypoint(service) + service["command"])
    assert str(options["run_dir"]) == str(load_recipe("deploy/compose/recipe.yaml").run_dir)
    assert (
        options["listen"].partition(":")[0]
        == options["http_listen"].partition(":")[0]
        == service["hostname"]
        == name
    )
    assert service["environment"]["READY_URL"] == f"http://{options['http_listen']}/readyz"
    for peer in {"media", "gateway", "reward"} & set(options):
        assert options[peer] == listens()[peer]
    assert options.get("name", name) == name


def test_ports_do_not_clash() -> None:
    assert len({address for address in listens().values()}) == len(LONG_RUNNING)
    (published,) = SERVICES["gateway"]["ports"]
    assert published.startswith("127.0.0.1:") and published.endswith(":8003")


@pytest.mark.parametrize("name", OURS)
def test_files_and_volumes_exist(name: str) -> None:
    service = OURS[name]
    assert (ROOT / service["build"]["context"]).is_dir()
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    for volume in service["volumes"]:
        source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
        if source.startswith("./"):
            assert (ROOT / source).is_file()
        elif not source.startswith("$"):
            assert source in COMPOSE["volumes"]
    assert "runs:/runs" in service["volumes"]


def test_every_variable_is_explained_at_the_top() -> None:
    head = TEXT.split("\nname:")[0]
    variables = set(re.findall(r"\$\{(\w+)", TEXT))
    assert variables and all(variable in head for variable in variables)


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_start_order(name: str) -> None:
    """Nothing waits for what cannot become healthy, and nothing starts before the run's folder is made."""
    waits = LONG_RUNNING[name]["depends_on"]
    assert waits["prepare"]["condition"] == "service_completed_successfully"
    for other, wait in waits.items():
        assert other in SERVICES
        assert wait["condition"] != "service_healthy" or "healthcheck" in SERVICES[other]
        if other in LONG_RUNNING:
            assert name not in LONG_RUNNING[other]["depends_on"]


def test_services_of_a_host_share_its_shared_memory() -> None:
    assert SERVICES["media"]["ipc"] == "shareable" and "shm_size" in SERVICES["media"]
    for name in ("worker-0", "worker-1", "trainer"):
        assert SERVICES[name]["ipc"] == "service:media" and "media" in SERVICES[name]["depends_on"]


def test_each_gpu_service_has_a_gpu_of_its_own() -> None:
    devices = []
    for name in ("worker-0", "worker-1", "trainer"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        devices += [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", number) for number in device["device_ids"]]
    assert sorted(devices) == ["0", "1", "2"]


def test_the_recipe_fits_the_file() -> None:
    recipe = load_recipe("deploy/compose/recipe.yaml")
    workers = [name for name in SERVICES if name.startswith("worker-")]
    assert recipe.rollout.workers == len(workers)
    assert any(volume.endswith(f":{recipe.model.path}:ro") for volume in SERVICES["trainer"]["volumes"])


def test_the_run_folder_is_prepared_once(tmp_path: Path) -> None:
    """prepare.py, run as compose runs it, but into a folder of this test."""
    prepare = SERVICES["prepare"]
    assert prepare["entrypoint"] == ["python", "/prepare.py"] and prepare["command"] == ["/recipe.yaml"]
    script, recipe = ROOT / "deploy/compose/prepare.py", ROOT / "deploy/compose/recipe.yaml"
    command = [sys.executable, str(script), str(recipe), f"run.root={tmp_path}"]
    subprocess.run(command, check=True, capture_output=True)
    tokens = (tmp_path / "gpu/tokens.json").read_text()
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "gpu/tokens.json").read_text() == tokens
    assert (tmp_path / "gpu/recipe.yaml").is_file()


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="docker has no compose plugin here; the checks above stand in",
)
def test_docker_compose_accepts_it() -> None:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "MODEL": "/models"}
    command = ["docker", "compose", "-f", str(FILE), "config", "-q"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
