"""Local files under allowed folders: links are resolved, then checked, then opened step by step without following any."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason, invalid

ROOTS_KNOB = "media.sources.roots"
_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LAST = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MOVED = frozenset({errno.ELOOP, errno.ENOTDIR})


def open_under(roots: Sequence[Path], path: str) -> int:
    """A descriptor of a regular file that is really under one of `roots`; the caller closes it.

    A link is as good as its target. A folder that becomes a link between the check and the opening is refused, since
    no step follows one. Outside the roots the answer is the same whether or not the file is there.
    Raises OmnifleetError: INVALID_REQUEST outside the roots, INVALID_MEDIA for a file that cannot be read.
    """
    if not roots:
        raise invalid("local paths are not read by this service", knob=ROOTS_KNOB)
    if "\0" in path or not os.path.isabs(path):
        raise _outside(path)
    real = Path(os.path.realpath(path))
    for root in roots:
        base = Path(os.path.realpath(root))
        if real != base and real.is_relative_to(base):
            return _open_steps(base, real.relative_to(base).parts, path)
    raise _outside(path)


def _open_steps(base: Path, parts: Sequence[str], path: str) -> int:
    try:
        at = os.open(base, _STEP)
        try:
            for part in parts[:-1]:
                at, above = os.open(part, _STEP, dir_fd=at), at
                os.close(above)
            fd = os.open(parts[-1], _LAST, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        if error.errno in _MOVED:
            raise _outside(path) from None
        raise _unreadable(path, os.strerror(error.errno or 0)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _unreadable(path, "not a regular file")
    return fd


def _outside(path: str) -> OmnifleetError:
    return invalid(f"{path[:200]!r} is not under an allowed folder", knob=ROOTS_KNOB)


def _unreadable(path: str, why: str) -> OmnifleetError:
    return OmnifleetError(Reason.INVALID_MEDIA, f"{path[:200]!r} cannot be read: {why}")
