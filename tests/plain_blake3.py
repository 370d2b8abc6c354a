"""BLAKE3-256 from its paper in plain Python: slow, and independent of the library that the product uses."""

from __future__ import annotations

import struct

_IV = (
    0x6A09E667,
    0xBB67AE85,
    0x3C6EF372,
    0xA54FF53A,
    0x510E527F,
    0x9B05688C,
    0x1F83D9AB,
    0x5BE0CD19,
)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_COLUMNS_AND_DIAGONALS = (
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)
_CHUNK, _BLOCK = 1024, 64
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_WORD = 0xFFFFFFFF

Words = tuple[int, ...]


def blake3_hex(data: bytes) -> str:
    """The 64 hex characters of BLAKE3-256 without a key."""
    return struct.pack("<8I", *_subtree(data, 0, _ROOT)).hex()


def _subtree(data: bytes, first_chunk: int, root: int) -> Words:
    if len(data) <= _CHUNK:
        return _chunk(data, first_chunk, root)
    left_chunks = 1 << ((len(data) - 1) // _CHUNK).bit_length() - 1
    left = _subtree(data[: left_chunks * _CHUNK], first_chunk, 0)
    right = _subtree(data[left_chunks * _CHUNK :], first_chunk + left_chunks, 0)
    return _compress(_IV, left + right, 0, _BLOCK, _PARENT | root)


def _chunk(data: bytes, number: int, root: int) -> Words:
    blocks = [data[i : i + _BLOCK] for i in range(0, len(data), _BLOCK)] or [b""]
    value: Words = _IV
    for i, block in enumerate(blocks):
        flags = _CHUNK_START if i == 0 else 0
        if i == len(blocks) - 1:
            flags |= _CHUNK_END | root
        value = _compress(value, struct.unpack("<16I", block.ljust(_BLOCK, b"\0")), number, len(block), flags)
    return value


def _compress(value: Words, message: Words, counter: int, length: int, flags: int) -> Words:
    state = [*value, *_IV[:4], counter & _WORD, counter >> 32, length, flags]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(_COLUMNS_AND_DIAGONALS):
            _mix(state, a, b, c, d, message[2 * i], message[2 * i + 1])
        message = tuple(message[i] for i in _PERMUTATION)
    return tuple(state[i] ^ state[i + 8] for i in range(8))


def _mix(s: list[int], a: int, b: int, c: int, d: int, x: int, y: int) -> None:
    s[a] = (s[a] + s[b] + x) & _WORD
    s[d] = _turn(s[d] ^ s[a], 16)
    s[c] = (s[c] + s[d]) & _WORD
    s[b] = _turn(s[b] ^ s[c], 12)
    s[a] = (s[a] + s[b] + y) & _WORD
    s[d] = _turn(s[d] ^ s[a], 8)
    s[c] = (s[c] + s[d]) & _WORD
    s[b] = _turn(s[b] ^ s[c], 7)


def _turn(word: int, bits: int) -> int:
    return (word >> bits | word << 32 - bits) & _WORD
