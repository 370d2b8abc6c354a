"""NeMo Gym's own servers and tool, in the environment of its own that scripts/setup_gyms.sh makes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support_run import until

ROOT = Path(__file__).resolve().parents[2]
SERVERS = (
    "responses_api_models/openai_model",
    "responses_api_agents/simple_agent",
    "resources_servers/mcqa",
    "resources_servers/math_with_judge",
)
CONFIGS = (
    "resources_servers/mcqa/configs/mcqa.yaml",
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
    "responses_api_models/openai_model/configs/openai_model.yaml",
)


def environment_folder(lock: str = "gyms") -> Path:
    """The virtual environment; made if it is not there. Fails with what the set-up says."""
    done = subprocess.run(
        [ROOT / "scripts" / "setup_gyms.sh", lock], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    return Path(done.stdout.strip())


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NemoGymWorld:
    """One NeMo Gym. head: address of its head server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.head = folder, f"http://127.0.0.1:{port}"
        self._venv = environment_folder()
        self._port = port
        self._ray = Path(tempfile.mkdtemp(prefix="ray-"))  # short: it will hold sockets
        for server in SERVERS:  # all servers in the one environment, instead of one that each would make
            place = folder / "venvs" / server
            place.mkdir(parents=True)
            (place / ".venv").symlink_to(self._venv)

    @contextmanager
    def started(self, base_url: str, key: str, model: str) -> Iterator[None]:
        """Its head, model, agent and resources servers. base_url: of the gateway, with /v1."""
        log = self.folder / "gym.log"
        command = [
            "env", "start", f"+config_paths=[{','.join(CONFIGS)}]",
            f"+policy_base_url={base_url}", f"+policy_api_key={key}", f"+policy_model_name={model}",
            "++policy_model.responses_api_models.openai_model.extra_body={return_provenance: true}",
            "+skip_venv_if_present=true", f"+uv_venv_dir={self.folder / 'venvs'}",
        ]  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._command(*command), cwd=self.folder, env=self._env(), stdout=out, stderr=out
            )
        try:

            def ready() -> bool:
                assert process.poll() is None, log.read_text()[-3000:]
                return "servers ready! Polling" in log.read_text()

            until(ready, 300, lambda: log.read_text()[-3000:])
            yield
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()  # at once: asked to end it gives each server a second, and Ray ten
            process.wait()
            for child in family:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(family, timeout=20)
            shutil.rmtree(self._ray, ignore_errors=True)

    def collect(self, rows: Path, out: Path, agent: str, repeats: int) -> str:
        """Run the tool that collects rollouts; what it printed."""
        command = [
            "eval", "run", "--no-serve", f"+agent_name={agent}", f"+input_jsonl_fpath={rows}",
            f"+output_jsonl_fpath={out}", f"+num_repeats={repeats}", "+upload_rollouts_to_wandb=false",
        ]  # fmt: skip
        done = subprocess.run(
            self._command(*command), cwd=self.folder, env=self._env(), capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def _command(self, *arguments: str) -> Sequence[str]:
        head = f"++head_server={{host: 127.0.0.1, port: {self._port}}}"
        return [str(self._venv / "bin" / "gym"), *arguments, head]

    def _env(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        path = f"{self._venv / 'bin'}:{os.environ['PATH']}"
        return {
            **kept,
            "PATH": path,
            "RAY_TMPDIR": str(self._ray),
            "RAY_AUTH_MODE": "disabled",
            "WANDB_MODE": "disabled",
        }
