"""Folders that belong to a living process. A lock, not a process id, tells the dead: it also works between containers."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path

log = logging.getLogger("omnifleet.media")

_LOCK = "lock"


class HeldFolder:
    """BASE/PREFIX-ID, made for this process; folders that dead processes of this user left under BASE are removed first."""

    def __init__(self, base: Path, prefix: str, mode: int = 0o700) -> None:
        """Raises OSError if `base` can't be used."""
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base, prefix)
        self.path, self._hold = _make(base, prefix, mode)

    def close(self) -> None:
        """Remove the folder; maps of its files stay whole."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._hold)


def _make(base: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """A locked folder appears under its name only once it is locked: a sweep never takes it for a dead one."""
    scratch = base / f".{prefix}{uuid.uuid4().hex}"
    scratch.mkdir(mode=0o700)
    fd = os.open(scratch / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    scratch.chmod(mode)
    root = base / f"{prefix}{uuid.uuid4().hex[:12]}"
    scratch.rename(root)
    return root, fd


def _sweep(base: Path, prefix: str) -> None:
    for folder in base.glob(f"{prefix}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another sweep was faster
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed %s, left by a service that was killed", folder)
        finally:
            os.close(fd)
