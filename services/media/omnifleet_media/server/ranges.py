"""Byte ranges of RFC 9110, sections 13 and 14: single ranges, and when a copy that the caller has still holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]{0,40})\s*-\s*([0-9]{0,40})\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes [start, end) of a representation of `whole` bytes. partial: a 206; an empty partial slice is a 416."""

    start: int
    end: int
    whole: int
    partial: bool = True

    @property
    def satisfiable(self) -> bool:
        """False: answer 416."""
        return self.end > self.start or not self.partial

    @property
    def content_range(self) -> str:
        """Value of the Content-Range header of a 206 or a 416."""
        if not self.satisfiable:
            return f"bytes */{self.whole}"
        return f"bytes {self.start}-{self.end - 1}/{self.whole}"


def requested_slice(header: str, if_range: str, etag: str, whole: int) -> Slice:
    """What a GET with these headers ("" if absent) is answered with.

    As the RFC allows, other units, several ranges and malformed ranges are ignored: the answer is everything. So it is
    if `if_range` is not this very `etag` (a date never is: content here has no dates).
    """
    everything = Slice(0, whole, whole, partial=False)
    found = _RANGE.fullmatch(header)
    if found is None or (if_range and if_range.strip() != etag):
        return everything
    first, last = found[1], found[2]
    if not first and not last:
        return everything
    if not first:
        return Slice(max(whole - int(last), 0), whole, whole) if int(last) else Slice(whole, whole, whole)
    if last and int(last) < int(first):
        return everything
    end = min(int(last) + 1, whole) if last else whole
    return Slice(min(int(first), whole), end, whole)


def still_holds(if_none_match: str, etag: str) -> bool:
    """Whether a conditional request is answered with 304 (weak comparison)."""
    if if_none_match.strip() == "*":
        return True
    return etag in {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
