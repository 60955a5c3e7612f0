"""Read and write the safetensors container with numpy alone, for every dtype (BF16 and fp8 included).

Layout (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, JSON header mapping names
to {dtype, shape, data_offsets}, then the tensors' bytes without holes. The reader treats a file as hostile.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .errors import CorruptObject, DeltawireError
from .tensors import WIDTH, Bits, Schema, State, TensorSpec, bits, unsigned

MAX_HEADER = 64 * 1024 * 1024
_MAX_ELEMENTS = 2**53
_MAX_DIMS = 64  # numpy's own limit


class Entry(NamedTuple):
    """Where one tensor's bytes are: spec, and [start, end) in the file."""

    spec: TensorSpec
    start: int
    end: int


def pack(tensors: Mapping[str, tuple[TensorSpec, bytes | memoryview]], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file holding `tensors` in the given order, and string metadata."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (spec, data) in tensors.items():
        size = memoryview(data).nbytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(bytes(data) for _, data in tensors.values())])


def pack_state(state: State, schema: Schema) -> bytes:
    """Return a checkpoint file of a state; `format: pt` lets transformers load it."""
    order = sorted(schema, key=lambda name: (-schema[name].width, name))  # widest first: every tensor is aligned
    tensors = {name: (schema[name], bits(state[name]).tobytes()) for name in order}
    return pack(tensors, {"format": "pt"})


def parse_header(
    data: bytes | memoryview | mmap.mmap, where: str, error: type[DeltawireError] = CorruptObject
) -> tuple[dict[str, str], dict[str, Entry]]:
    """Parse and check a container: returns (metadata, entries). Raises `error` naming `where` for any breach.

    Checked: the header's length, JSON form, dtypes, shapes, that sizes match shapes, and that the entries cover the
    data exactly, without hole, overlap or rest.
    """
    total = len(data)
    length = int.from_bytes(data[:8], "little") if total >= 8 else 0
    if total < 8 or length > min(MAX_HEADER, total - 8):
        raise error(f"{where}: {total} bytes are not a safetensors file (header of {length} bytes announced)")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(raw, 8 + length) for name, raw in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise error(f"{where}: bad safetensors header ({type(cause).__name__}: {cause})") from None
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at or entry.end - entry.start != entry.spec.nbytes:
            raise error(f"{where}: tensor {name!r} has {entry.end - entry.start} bytes at {entry.start}, expected "
                        f"{entry.spec.nbytes} at {at}")  # fmt: skip
        at = entry.end
    if at != total:
        raise error(f"{where}: {total - at} bytes after the last tensor")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise error(f"{where}: __metadata__ must map strings to strings")
    return metadata, entries


def _entry(raw: dict[str, object], base: int) -> Entry:
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if dtype not in WIDTH:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in shape):
        raise ValueError(f"bad shape {shape!r:.200}")
    if len(shape) > _MAX_DIMS or prod(n or 1 for n in shape) > _MAX_ELEMENTS:
        raise ValueError(f"a shape of {len(shape)} dimensions that no array can have")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError(f"bad data_offsets {offsets!r}")
    return Entry(TensorSpec(str(dtype), tuple(shape)), base + offsets[0], base + offsets[1])


def view(data: bytes | memoryview | mmap.mmap, entry: Entry) -> Bits:
    """The bits of one tensor, shaped, as a view of `data`."""
    kind = np.dtype(unsigned(entry.spec.width)).newbyteorder("<")
    flat = np.frombuffer(data, dtype=np.uint8, count=entry.end - entry.start, offset=entry.start)
    return flat.view(kind).reshape(entry.spec.shape)


class MappedState:
    """A safetensors file mapped into memory: `state` (name → shaped bits) and `schema`.

    With `writable`, writes to the arrays go to the file; `flush` brings them to the disk. Raises CorruptObject when
    the file is not a well-formed container.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        with path.open("r+b" if writable else "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
            except ValueError:
                raise CorruptObject(f"{path.name}: an empty file is not a checkpoint") from None
        _, entries = parse_header(self._map, path.name)
        self.state: dict[str, Bits] = {name: view(self._map, entry) for name, entry in entries.items()}
        self.schema: dict[str, TensorSpec] = {name: entry.spec for name, entry in entries.items()}

    def flush(self) -> None:
        """Write changed pages to the disk and wait for it."""
        self._map.flush()
