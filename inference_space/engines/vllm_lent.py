"""Arrays that a process lends to its workers: anonymous memory, so that nothing is left when a process is killed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
_ALIGN = 64


class Handle(NamedTuple):
    """Where lent arrays are: a file of another process, its size, and (offset, count, dtype) of each array."""

    pid: int
    fd: int
    size: int
    parts: tuple[tuple[int, int, str], ...]


Borrowed: TypeAlias = Handle | list[Array]
"""What a worker gets: a handle, or the arrays themselves in one process."""


class Lent:
    """Flat arrays that workers write and read too: made by `of`, or with room for `shapes` (count, dtype). `handle`
    goes to a worker, which calls `borrow`. close ends new borrowing; memory goes with the last array. Linux only."""

    def __init__(self, shapes: Sequence[tuple[int, Any]]) -> None:
        parts, at = [], 0
        for count, kind in shapes:
            parts.append((at, count, np.dtype(kind).str))
            at += -(-count * np.dtype(kind).itemsize // _ALIGN) * _ALIGN
        size = max(at, mmap.PAGESIZE)
        self._fd = os.memfd_create("deltawire", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.handle = Handle(os.getpid(), self._fd, size, tuple(parts))
        self.arrays = _views(mmap.mmap(self._fd, size), self.handle)

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Lent:
        """Copies of flat arrays."""
        lent = cls([(len(array), array.dtype) for array in arrays])
        for own, array in zip(lent.arrays, arrays, strict=True):
            own[...] = array
        return lent

    def close(self) -> None:
        """Give it back."""
        os.close(self._fd)
        self.arrays = []


def borrow(lent: Borrowed) -> list[Array]:
    """The arrays behind a handle, as long as the lender lives and has not closed them."""
    if isinstance(lent, list):
        return lent
    fd = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _views(mmap.mmap(fd, lent.size), lent)
    finally:
        os.close(fd)


def _views(memory: mmap.mmap, handle: Handle) -> list[Array]:
    return [np.frombuffer(memory, np.dtype(kind), count, at) for at, count, kind in handle.parts]
