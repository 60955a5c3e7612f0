"""Small tables of small numbers, as LEB128 varints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidPatch
from ..kernels import compiled

_MOST_BYTES = 10


@compiled
def _numbers(raw: NDArray[Any], start: int, out: NDArray[Any]) -> Any:
    """Fill `out` from raw[start:]; returns where it ends, -1 when that is behind the end or a number is too long."""
    at = start
    for j in range(len(out)):
        value = shift = np.uint64(0)
        byte = np.uint64(128)
        while byte >= np.uint64(128):
            if at >= len(raw) or shift >= np.uint64(7 * _MOST_BYTES):
                return -1
            byte = np.uint64(raw[at])
            at += 1
            value |= (byte & np.uint64(127)) << shift
            shift += np.uint64(7)
        out[j] = value
    return at


@compiled
def _write(numbers: NDArray[Any], out: NDArray[Any]) -> Any:
    """Fill `out`, which has room for the longest; returns how many bytes."""
    at = 0
    for j in range(len(numbers)):
        left = np.uint64(numbers[j])
        while left > np.uint64(127):
            out[at] = np.uint8(left & np.uint64(127)) | np.uint8(128)
            at += 1
            left >>= np.uint64(7)
        out[at] = left
        at += 1
    return at


def pack(numbers: Sequence[int] | NDArray[Any]) -> bytes:
    """Non-negative integers below 2^64, seven bits per byte, low ones first."""
    found = np.asarray(numbers, np.uint64)
    out = np.empty(_MOST_BYTES * len(found), np.uint8)
    return out[: int(_write(found, out))].tobytes()


class Cursor:
    """Reads one segment's bytes from the front. Every method raises InvalidPatch when they end early."""

    def __init__(self, raw: memoryview) -> None:
        self._raw, self._at = raw, 0

    def number(self, most: int) -> int:
        """The next varint, at most `most`."""
        value = 0
        for n, byte in enumerate(self._raw[self._at : self._at + _MOST_BYTES]):
            value |= (byte & 127) << (7 * n)
            if byte < 128:
                if value > most:
                    raise InvalidPatch(f"a table says {value} where at most {most} is possible")
                self._at += n + 1
                return value
        raise InvalidPatch("a table ends early")

    def numbers(self, count: int) -> NDArray[np.uint64]:
        """The next `count` varints."""
        if count > self.left:
            raise InvalidPatch(f"a table of {count} numbers in {self.left} bytes")
        out = np.empty(count, np.uint64)
        end = int(_numbers(np.frombuffer(self._raw, np.uint8), self._at, out))
        if end < 0:
            raise InvalidPatch("a table ends early")
        self._at = end
        return out

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        part = self._raw[self._at : self._at + size]
        if len(part) != size:
            raise InvalidPatch(f"a segment ends before {size} more bytes")
        self._at += size
        return part

    @property
    def left(self) -> int:
        """Bytes that were not read."""
        return len(self._raw) - self._at

    def finish(self) -> None:
        """Raise InvalidPatch unless all was read."""
        if self.left:
            raise InvalidPatch(f"a segment has {self.left} bytes too many")
