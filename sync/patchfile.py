"""Patches on the local disk, mapped instead of held in memory: what changed from one version to another.

A file is the arrays of each tensor (index, old, new; each at a multiple of 8 bytes), then a JSON table of where they
are, then the table's length. It is scratch of one publisher, never sent: whoever opens it compares the digests.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codec import TensorPatch
from .errors import CorruptObject


def write_patch(path: Path, patches: Iterator[tuple[str, TensorPatch]]) -> PatchFile:
    """Write the patches one tensor at a time and map them."""
    table: dict[str, list[list[Any]]] = {}
    try:
        with path.open("wb") as file:
            for name, patch in patches:
                table[name] = []
                for array in patch.index, patch.old, patch.new:
                    file.write(b"\0" * (-file.tell() % 8))
                    table[name].append([file.tell(), len(array), array.dtype.str])
                    file.write(np.ascontiguousarray(array).data)
            text = json.dumps(table).encode()
            file.write(text + len(text).to_bytes(8, "little"))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return PatchFile(path)


class PatchFile(Mapping[str, TensorPatch]):
    """A patch on disk as a mapping of tensor name → TensorPatch of mapped arrays. Raises CorruptObject when torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                size = int.from_bytes(self._map[-8:], "little")
                self._table: dict[str, list[list[Any]]] = json.loads(self._map[-8 - size : -8])
            except ValueError as error:
                raise CorruptObject(f"{path.name}: not a whole patch file ({type(error).__name__})") from None

    def __getitem__(self, name: str) -> TensorPatch:
        index, old, new = (self._array(*where) for where in self._table[name])
        return TensorPatch(index, old, new)

    def _array(self, start: int, count: int, dtype: str) -> NDArray[Any]:
        return np.frombuffer(self._map, dtype=np.dtype(dtype), count=count, offset=start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def changes(self) -> int:
        """Changed elements of all tensors together."""
        return sum(index[1] for index, _, _ in self._table.values())

    def checksum(self) -> int:
        """CRC-32 of the whole file."""
        return zlib.crc32(self._map)

    def move(self, path: Path) -> PatchFile:
        """This patch under another name."""
        if path != self.path:
            self.path = self.path.rename(path)
        return self

    def remove(self) -> None:
        """Delete the file. Arrays that are in use stay valid."""
        self.path.unlink(missing_ok=True)
