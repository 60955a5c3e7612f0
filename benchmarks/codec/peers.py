"""Other systems' layouts of a delta, written from their descriptions, so that bytes are compared on the same changes.

Each is a pair of functions on one state: `encode(base, patch)` → the bytes on the wire, `decode(data, state)` → patches
the state in place. What lies around a layout (manifests, checksums, uploads) is left out for everyone but us, whose
payloads hold checks and the schema's digest. Values have the tensor's width; indices are those of a tensor below 2^31.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from sync.codec import TensorPatch
from sync.tensors import State, bits

Patch = Mapping[str, TensorPatch]
Encode = Callable[[State, Patch], bytes]
Decode = Callable[[bytes, State], None]
Rows = list[list[Any]]

_CONTAINED = {"I32": "<i4", "U16": "<u2", "U32": "<u4", "U8": "u1", "BF16": "<u2", "F32": "<u4", "F64": "<u8"}
_VALUE = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


class Peer(NamedTuple):
    """A layout: what it is, and both ways."""

    text: str
    encode: Encode
    decode: Decode


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _container(tensors: Mapping[str, tuple[str, NDArray[Any]]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of named (dtype, flat array)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, array) in tensors.items():
        span = [at, at + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(array.tobytes() for _, array in tensors.values())])


def _contained(data: bytes) -> dict[str, NDArray[Any]]:
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], _CONTAINED[entry["dtype"]])
        for name, entry in header.items()
    }


def _gaps(index: NDArray[Any]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.subtract(index, np.concatenate(([-1], index[:-1])), dtype=np.int64)
    return found - 1


def _from_gaps(gaps: NDArray[Any]) -> NDArray[np.int64]:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def _table(data: bytes) -> tuple[Rows, bytes]:
    """A JSON table before the streams."""
    (size,) = struct.unpack("<I", data[:4])
    return json.loads(data[4 : 4 + size]), data[4 + size :]


def _with_table(rows: Rows, data: bytes) -> bytes:
    text = json.dumps(rows, separators=(",", ":")).encode()
    return struct.pack("<I", len(text)) + text + data


class _Reader:
    """Arrays of a stream, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, kind: str | np.dtype[Any], count: int) -> NDArray[Any]:
        found = np.frombuffer(self._data, kind, count, self._at)
        self._at += found.nbytes
        return found


# --- TRL's branches: raw, and u16 gaps with a u32 fallback per tensor; two arrays per tensor, no compression


def _trl(encoding: str, places: Callable[[NDArray[Any]], tuple[str, NDArray[Any]]], patch: Patch) -> bytes:
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, one in patch.items():
        tensors[f"{name}.idx"] = places(one.index)
        tensors[f"{name}.val"] = (_VALUE[one.new.itemsize], one.new)
    count = str(sum(len(one.index) for one in patch.values()))
    return _container(
        tensors, {"format": "sparse", "version": "1", "sparse": "true", "encoding": encoding, "count": count}
    )


def _trl_raw(_: State, patch: Patch) -> bytes:
    return _trl("raw", lambda index: ("I32", index.astype("<i4")), patch)


def _trl_gaps(_: State, patch: Patch) -> bytes:
    def places(index: NDArray[Any]) -> tuple[str, NDArray[Any]]:
        gaps = _gaps(index)
        return ("U16", gaps.astype("<u2")) if gaps.max() < 1 << 16 else ("U32", gaps.astype("<u4"))

    return _trl("gap_delta", places, patch)


def _trl_decode(data: bytes, state: State) -> None:
    found = _contained(data)
    for name in [name.removesuffix(".idx") for name in found if name.endswith(".idx")]:
        index = found[f"{name}.idx"]
        bits(state[name])[index if index.dtype.kind == "i" else _from_gaps(index)] = found[f"{name}.val"]


# --- NeMo-RL: gaps u16 with wider fallbacks per tensor, values overwritten or xored, zstd-1 over all of it


def _nemo(*, xor: bool) -> tuple[Encode, Decode]:
    def encode(_: State, patch: Patch) -> bytes:
        rows: Rows = []
        parts: list[bytes] = []
        for name, one in patch.items():
            gaps = _gaps(one.index)
            width = 2 if gaps.max() < 1 << 16 else 4
            rows.append([name, len(gaps), width])
            parts += [gaps.astype(f"<u{width}").tobytes(), (one.new ^ one.old if xor else one.new).tobytes()]
        return _zstd(_with_table(rows, b"".join(parts)))

    def decode(data: bytes, state: State) -> None:
        rows, rest = _table(_unzstd(data))
        reader = _Reader(rest)
        for name, count, width in rows:
            flat = bits(state[name])
            index = _from_gaps(reader.take(f"<u{width}", count))
            values = reader.take(flat.dtype, count)
            flat[index] = flat[index] ^ values if xor else values

    return encode, decode


# --- slime: bytes of the checkpoint, changed ones listed or xored whole, zstd-1 per tensor


def _slime_overwrite(_: State, patch: Patch) -> bytes:
    rows: Rows = []
    parts: list[bytes] = []
    for name, one in patch.items():
        width = one.old.itemsize
        old, new = (a.view(np.uint8).reshape(-1, width) for a in (one.old, one.new))
        element, byte = np.nonzero(old != new)
        places = width * one.index[element].astype(np.int64) + byte
        packed = _zstd(struct.pack("<I", len(places)) + places.astype("<u4").tobytes() + new[element, byte].tobytes())
        rows.append([name, len(packed)])
        parts.append(packed)
    return _with_table(rows, b"".join(parts))


def _slime_overwrite_decode(data: bytes, state: State) -> None:
    rows, rest = _table(data)
    whole = _Reader(rest)
    for name, size in rows:
        reader = _Reader(_unzstd(whole.take("u1", size).tobytes()))
        count = int(reader.take("<u4", 1)[0])
        places = reader.take("<u4", count)
        bits(state[name]).view(np.uint8)[places] = reader.take("u1", count)


def _dense_xor(*, split: bool) -> tuple[Encode, Decode]:
    """Every changed tensor whole; split: its bytes in planes, the low ones first."""

    def encode(base: State, patch: Patch) -> bytes:
        rows: Rows = []
        parts: list[bytes] = []
        for name, one in patch.items():
            dense = np.zeros(base[name].size, one.old.dtype)
            dense[one.index] = one.old ^ one.new
            raw = dense.view(np.uint8).reshape(-1, one.old.itemsize)
            packed = _zstd((raw.T if split else raw).tobytes())
            rows.append([name, len(packed)])
            parts.append(packed)
        return _with_table(rows, b"".join(parts))

    def decode(data: bytes, state: State) -> None:
        rows, rest = _table(data)
        whole = _Reader(rest)
        for name, size in rows:
            raw = np.frombuffer(_unzstd(whole.take("u1", size).tobytes()), np.uint8)
            flat = bits(state[name])
            dense = np.ascontiguousarray(raw.reshape(flat.itemsize, -1).T) if split else raw
            flat ^= dense.reshape(-1).view(flat.dtype)

    return encode, decode


# --- PULSE / grail v3.1: rows as deltas in a byte, columns as deltas within a row in two, new values, one zstd-1 frame


def _pulse(base: State, patch: Patch) -> bytes:
    rows: Rows = []
    parts: list[bytes] = []
    for name, one in patch.items():
        columns = base[name].shape[-1] if base[name].ndim > 1 else base[name].size
        row, column = np.divmod(one.index.astype(np.int64), columns)
        steps = np.diff(row, prepend=0)
        within = np.where(steps == 0, np.diff(column, prepend=0), column)
        row_kind, column_kind = "u1" if steps.max() < 1 << 8 else "<i4", "<u2" if within.max() < 1 << 16 else "<i4"
        rows.append([name, len(row), columns, row_kind, column_kind])
        parts += [steps.astype(row_kind).tobytes(), within.astype(column_kind).tobytes(), one.new.tobytes()]
    return _zstd(_with_table(rows, b"".join(parts)))


def _pulse_decode(data: bytes, state: State) -> None:
    rows, rest = _table(_unzstd(data))
    reader = _Reader(rest)
    for name, count, columns, row_kind, column_kind in rows:
        steps = reader.take(row_kind, count).astype(np.int64)
        within = reader.take(column_kind, count).astype(np.int64)
        flat = bits(state[name])
        starts = np.flatnonzero((steps != 0) | (np.arange(count) == 0))
        total = np.cumsum(within)
        column = total - np.repeat(total[starts] - within[starts], np.diff(starts, append=count))
        flat[np.cumsum(steps) * columns + column] = reader.take(flat.dtype, count)


# --- PULSEPT1: gaps in 16 bits with an escape, so one long gap does not widen a tensor; new values; one zstd-1 frame


def _pulsept(_: State, patch: Patch) -> bytes:
    rows: Rows = []
    parts: list[bytes] = []
    for name, one in patch.items():
        gaps = _gaps(one.index)
        long = gaps[gaps >= 0xFFFF].astype("<u4")
        rows.append([name, len(gaps), len(long)])
        parts += [np.minimum(gaps, 0xFFFF).astype("<u2").tobytes(), long.tobytes(), one.new.tobytes()]
    return _zstd(_with_table(rows, b"".join(parts)))


def _pulsept_decode(data: bytes, state: State) -> None:
    rows, rest = _table(_unzstd(data))
    reader = _Reader(rest)
    for name, count, long in rows:
        gaps = reader.take("<u2", count).astype(np.int64)
        gaps[gaps == 0xFFFF] = reader.take("<u4", long)
        flat = bits(state[name])
        flat[_from_gaps(gaps)] = reader.take(flat.dtype, count)


PEERS = {
    "TRL raw": Peer("int32 index, value; safetensors", _trl_raw, _trl_decode),
    "TRL raw + zstd": Peer(
        "the same under zstd-1", lambda b, p: _zstd(_trl_raw(b, p)), lambda d, s: _trl_decode(_unzstd(d), s)
    ),
    "TRL gap_delta": Peer("u16 gaps or u32, value; safetensors", _trl_gaps, _trl_decode),
    "slime overwrite": Peer("u32 byte positions, bytes; zstd-1 per tensor", _slime_overwrite, _slime_overwrite_decode),
    "slime xor": Peer("dense xor; zstd-1 per tensor", *_dense_xor(split=False)),
    "dense xor, split": Peer("dense xor in byte planes; zstd-1 per tensor", *_dense_xor(split=True)),
    "PULSE": Peer("row delta u8, column delta u16, value; one zstd-1 frame", _pulse, _pulse_decode),
    "PULSEPT1": Peer("u16 gaps with escapes, value; one zstd-1 frame", _pulsept, _pulsept_decode),
    "NeMo overwrite": Peer("u16 gaps or u32, value; one zstd-1 frame", *_nemo(xor=False)),
    "NeMo xor": Peer("u16 gaps or u32, xor of the value; one zstd-1 frame", *_nemo(xor=True)),
}  # fmt: skip
