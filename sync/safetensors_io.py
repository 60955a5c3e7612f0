"""Read and write the safetensors container with numpy alone, for every dtype (BF16 and fp8 included).

Layout (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, JSON header mapping names
to {dtype, shape, data_offsets}, then the tensors' bytes without holes. The reader treats a file as hostile.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .canonical import canonical_json
from .errors import CorruptObject, DeltawireError
from .layout import INDEX, MODEL
from .tensors import WIDTH, Bits, Schema, State, TensorSpec, bits, state_bytes, unsigned

MAX_HEADER = 64 * 1024 * 1024
SHARD_BYTES = 4 * 1024**3
_MAX_ELEMENTS = 2**53
_MAX_DIMS = 64  # numpy's own limit
_INTEGER = {"int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"}


class Entry(NamedTuple):
    """Where one tensor's bytes are: spec, and [start, end) in the file."""

    spec: TensorSpec
    start: int
    end: int


def pack(tensors: Mapping[str, tuple[TensorSpec, bytes | memoryview]], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file holding `tensors` in the given order, and string metadata."""
    return b"".join([_header({n: s for n, (s, _) in tensors.items()}, metadata), *(d for _, d in tensors.values())])


def _header(schema: Schema, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, spec in schema.items():
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write flat integer arrays, widest first, as a container that is whole and on the disk, or absent, under `path`.
    `read_arrays` reads it. Nothing is copied in memory."""
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    specs = {name: TensorSpec(_INTEGER[str(arrays[name].dtype)], arrays[name].shape) for name in order}
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(_header(specs, metadata))
        for name in order:
            file.write(np.ascontiguousarray(arrays[name]).data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Map a file of `write_arrays`: (arrays in their own dtypes, metadata). Raises CorruptObject."""
    mapped = MappedState(path)
    dtypes = {safe: name for name, safe in _INTEGER.items()}
    if odd := [n for n, s in mapped.schema.items() if s.dtype not in dtypes]:
        raise CorruptObject(f"{path.name}: {odd[0]!r} is not an integer array")
    arrays = {n: mapped.state[n].reshape(-1).view(dtypes[s.dtype]) for n, s in mapped.schema.items()}
    return arrays, mapped.metadata


def pack_state(state: State, schema: Schema) -> bytes:
    """Return a checkpoint file of a state; `format: pt` lets transformers load it."""
    tensors = {name: (schema[name], bits(state[name]).tobytes()) for name in _aligned(schema)}
    return pack(tensors, {"format": "pt"})


def _aligned(schema: Schema) -> list[str]:
    return sorted(schema, key=lambda name: (-schema[name].width, name))  # widest first: every tensor is aligned


def write_checkpoint(
    folder: Path, state: State, schema: Schema, *, shard_bytes: int = SHARD_BYTES, file: str = MODEL
) -> None:  # fmt: skip
    """Write a state as `file`; as `model.safetensors` it may be shards of at most `shard_bytes` (one tensor at least),
    with the index that transformers and vLLM read. One tensor at a time is in memory; the files are on the disk when
    this returns."""
    shards: list[dict[str, TensorSpec]] = [{}]
    for name in _aligned(schema):
        if shards[-1] and file == MODEL and state_bytes(shards[-1]) + schema[name].nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = schema[name]
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [file]
    for file_name, shard in zip(names, shards, strict=True):
        with (folder / file_name).open("wb") as out:
            out.write(_header(shard, {"format": "pt"}))
            for name in shard:
                out.write(bits(state[name]).data)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        where = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": state_bytes(schema)}, "weight_map": where}
        (folder / INDEX).write_bytes(canonical_json(index))


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
        "".join(header).encode()  # a lone surrogate is no name that a digest can be taken of
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
    """A safetensors file mapped into memory: `state` (name → shaped bits), `schema` and `metadata`.

    With `writable`, writes to the arrays go to the file; `flush` brings them to the disk. Raises CorruptObject when
    the file is not a well-formed container.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        with path.open("r+b" if writable else "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
            except ValueError:
                raise CorruptObject(f"{path.name}: an empty file is not a checkpoint") from None
        self.metadata, entries = parse_header(self._map, path.name)
        self.state: dict[str, Bits] = {name: view(self._map, entry) for name, entry in entries.items()}
        self.schema: dict[str, TensorSpec] = {name: entry.spec for name, entry in entries.items()}

    def flush(self) -> None:
        """Write changed pages to the disk and wait for it."""
        self._map.flush()


class MappedCheckpoint:
    """The `*.safetensors` files of a checkpoint folder mapped into memory, as one `state` and `schema`.

    With `writable`, writes to the arrays go to the files; `flush` brings them to the disk. Raises CorruptObject when
    there is no such file, one is not a well-formed container, or a tensor is in two of them.
    """

    def __init__(self, folder: Path, *, writable: bool = False) -> None:
        self.folder = folder
        self._files = [MappedState(path, writable=writable) for path in sorted(folder.glob("*.safetensors"))]
        if not self._files:
            raise CorruptObject("the checkpoint folder holds no .safetensors file")
        self.state: dict[str, Bits] = {}
        self.schema: dict[str, TensorSpec] = {}
        for file in self._files:
            if twice := self.schema.keys() & file.schema.keys():
                raise CorruptObject(f"tensor {min(twice)!r} is in two files of the checkpoint")
            self.state |= file.state
            self.schema |= file.schema

    def flush(self) -> None:
        """Write changed pages to the disk and wait for it."""
        for file in self._files:
            file.flush()
