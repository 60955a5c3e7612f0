"""The delta payload: a safetensors file with a few streams, written and read for all codecs by one path.

metadata  format, codec, schema (digest; tensors are numbered by their place in the schema's sorted names)
entries   int64 [T, 3]   tensor number (strictly increasing), mode (0 raw, 1 fast, 2 whole), count
sums      uint64 [T, 4]  Σmix(old) and Σmix(new) over the changed elements (whole: all), two keys each: a,b,a,b
index     int32, index64 int64: indices of raw entries, in order; value1/2/4/8: their new bits and whole tensors
lens      int64: per fast entry: raw gap bytes, packed gap bytes, then each packed plane's bytes
data      uint8: the packed streams of fast entries, in order

raw needs no base; fast needs the old bits at the changed places. The mode is chosen per tensor by size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..digest import ZERO, Sums, element_sums
from ..errors import BaseMismatch, InvalidPatch, InvalidRequest, SchemaChanged
from ..safetensors_io import pack, parse_header, view
from ..tensors import Bits, Schema, State, TensorSpec, bits, schema_digest, unsigned
from . import streams
from .patch import MAX_INT32, Patch, TensorPatch

CODECS = ("raw", "fast")
FORMAT = "deltawire-delta-1"
RAW, FAST, WHOLE = 0, 1, 2
_VALUE = {1: "value1", 2: "value2", 4: "value4", 8: "value8"}
_STREAMS = {
    "entries": "I64", "sums": "U64", "index": "I32", "index64": "I64", "lens": "I64", "data": "U8",
    "value1": "U8", "value2": "U16", "value4": "U32", "value8": "U64",
}  # fmt: skip


class Encoded(NamedTuple):
    """A payload, and how it changes the state digest's sums."""

    data: bytes
    removed: Sums
    added: Sums


class Decoded(NamedTuple):
    """What a payload says: absolute values ready to scatter (index None: the whole tensor), and the digest's change."""

    patches: dict[str, tuple[NDArray[np.integer[Any]] | None, Bits]]
    removed: Sums
    added: Sums


def encode(patch: Patch, schema: Schema, codec: str, whole: Callable[[str], Bits], base: State) -> Encoded:
    """Write a payload for `patch`.

    whole(name) gives a tensor's complete new flat bits, base the complete old state; both are read only for tensors
    that are smaller sent whole. Raises InvalidRequest for an unknown codec.
    """
    if codec not in CODECS:
        raise InvalidRequest(f"unknown codec {codec!r}; known: {', '.join(CODECS)}")
    out = _Writer()
    for number, name in enumerate(sorted(schema)):
        if name in patch:
            out.add(number, name, patch[name], schema[name], codec, whole, base)
    return Encoded(out.finish(codec, schema_digest(schema)), out.removed, out.added)


class _Writer:
    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int]] = []
        self.sums: list[tuple[int, int, int, int]] = []
        self.parts: dict[str, list[bytes]] = {name: [] for name in _STREAMS}
        self.lens: list[int] = []
        self.removed = self.added = ZERO

    def add(
        self, number: int, name: str, patch: TensorPatch, spec: TensorSpec, codec: str,
        whole: Callable[[str], Bits], base: State,
    ) -> None:  # fmt: skip
        mode, packed = self._choose(patch, spec, codec)
        value = _VALUE[spec.width]
        if mode == WHOLE:
            new = whole(name)
            old_sums, new_sums = element_sums(name, None, bits(base[name])), element_sums(name, None, new)
            self.parts[value].append(new.tobytes())
            count = spec.size
        else:
            old_sums = element_sums(name, patch.index, patch.old)
            new_sums = element_sums(name, patch.index, patch.new)
            count = len(patch.index)
            if mode == RAW:
                self.parts["index" if spec.size < MAX_INT32 else "index64"].append(patch.index.tobytes())
                self.parts[value].append(patch.new.tobytes())
            else:
                self.lens.append(packed[0][0])
                self.lens.extend(len(part) for _, part in packed)
                self.parts["data"].extend(part for _, part in packed)
        self.entries.append((number, mode, count))
        self.sums.append((*old_sums, *new_sums))
        self.removed, self.added = self.removed.plus(old_sums), self.added.plus(new_sums)

    def _choose(self, patch: TensorPatch, spec: TensorSpec, codec: str) -> tuple[int, list[tuple[int, bytes]]]:
        if codec == "raw":
            sparse = len(patch.index) * (patch.index.itemsize + spec.width)
            return (RAW if sparse < spec.nbytes else WHOLE), []
        packed = _pack_fast(patch, spec.dtype)
        return (FAST if sum(len(part) for _, part in packed) < spec.nbytes else WHOLE), packed

    def finish(self, codec: str, schema: str) -> bytes:
        self.parts["entries"] = [np.array(self.entries, dtype="<i8").tobytes()]
        self.parts["sums"] = [np.array(self.sums, dtype="<u8").tobytes()]
        self.parts["lens"] = [np.array(self.lens, dtype="<i8").tobytes()]
        shapes = {"entries": (len(self.entries), 3), "sums": (len(self.sums), 4)}
        tensors: dict[str, tuple[TensorSpec, bytes | memoryview]] = {}
        for name, dtype in sorted(_STREAMS.items(), key=lambda item: item[1][-2:] != "64"):
            raw = b"".join(self.parts[name])
            spec = TensorSpec(dtype, ())
            if raw or name in shapes:
                tensors[name] = (spec._replace(shape=shapes.get(name, (len(raw) // spec.width,))), raw)
        return pack(tensors, {"format": FORMAT, "codec": codec, "schema": schema})


def _pack_fast(patch: TensorPatch, dtype: str) -> list[tuple[int, bytes]]:
    """(raw size, packed bytes) of the gap stream and of each plane."""
    zigzag = streams.distances(patch.old, patch.new, dtype)
    order = streams.exponent_order(patch.old, dtype)
    raws = [streams.pack_gaps(patch.index), *streams.planes(zigzag if order is None else zigzag[order])]
    return [(len(raw), streams.compress(raw)) for raw in raws]


def decode(payload: bytes, schema: Schema, base: State | None) -> Decoded:
    """Read a payload against `base` (raw payloads may be read without) and check all of it.

    Raises SchemaChanged when it was made for another schema, BaseMismatch when the base differs at a touched place,
    InvalidPatch for anything malformed. Nothing is written anywhere.
    """
    reader = _Reader(payload, schema)
    patches: dict[str, tuple[NDArray[np.integer[Any]] | None, Bits]] = {}
    removed = added = ZERO
    for row, declared in zip(reader.entries, reader.sums, strict=True):
        name, spec = reader.tensor(int(row[0]))
        index, new, old = reader.read(name, spec, int(row[1]), int(row[2]), base)
        old_sums, new_sums = Sums(*declared[:2]), Sums(*declared[2:])
        if old is not None and element_sums(name, index, old) != old_sums:
            raise BaseMismatch(f"tensor {name!r}: the base differs from the one this delta was made for")
        if element_sums(name, index, new) != new_sums:
            raise InvalidPatch(f"tensor {name!r}: the decoded values fail their check")
        patches[name] = (index, new)
        removed, added = removed.plus(old_sums), added.plus(new_sums)
    reader.finish()
    return Decoded(patches, removed, added)


class _Reader:
    """Hands out streams in order; every byte must be used exactly once."""

    def __init__(self, payload: bytes, schema: Schema) -> None:
        metadata, found = parse_header(payload, "delta payload", InvalidPatch)
        if metadata.get("format") != FORMAT:
            raise InvalidPatch(f"payload format is {metadata.get('format')!r}, this build reads {FORMAT}")
        if metadata.get("schema") != schema_digest(schema):
            raise SchemaChanged("the delta was made for other tensor names, shapes or dtypes than the base has")
        for name, entry in found.items():
            if _STREAMS.get(name) != entry.spec.dtype:
                raise InvalidPatch(f"unexpected stream {name!r} of {entry.spec.dtype}")
        self._streams = {name: view(payload, entry).reshape(-1) for name, entry in found.items()}
        self._at = dict.fromkeys(_STREAMS, 0)
        self._schema, self._names = schema, sorted(schema)
        self._last = -1
        entries = self._streams.pop("entries", np.empty(0, np.uint64)).view("<i8")
        sums = self._streams.pop("sums", np.empty(0, np.uint64))
        if len(entries) % 3 or len(sums) % 4 or len(entries) // 3 != len(sums) // 4 or len(entries) // 3 > len(schema):
            raise InvalidPatch(
                f"payload has {len(entries)} entry fields and {len(sums)} sums for {len(schema)} tensors"
            )
        self.entries: list[list[int]] = entries.reshape(-1, 3).tolist()
        self.sums: list[list[int]] = sums.reshape(-1, 4).tolist()

    def tensor(self, number: int) -> tuple[str, TensorSpec]:
        """The tensor of an entry; numbers must rise."""
        if not self._last < number < len(self._names):
            raise InvalidPatch(f"tensor number {number} is out of order or range")
        self._last = number
        name = self._names[number]
        return name, self._schema[name]

    def take(self, stream: str, count: int) -> Bits:
        """The next `count` elements of a stream."""
        at, have = self._at[stream], self._streams.get(stream)
        if count < 0 or have is None or at + count > len(have):
            if count == 0:
                return np.empty(0, np.uint8)
            raise InvalidPatch(f"stream {stream!r} ends before {count} more elements")
        self._at[stream] = at + count
        return have[at : at + count]

    def read(
        self, name: str, spec: TensorSpec, mode: int, count: int, base: State | None
    ) -> tuple[NDArray[np.integer[Any]] | None, Bits, Bits | None]:
        """(index, new bits, old bits or None without a base) of one entry."""
        if mode not in (RAW, FAST, WHOLE) or not 0 < count <= spec.size or (mode == WHOLE and count != spec.size):
            raise InvalidPatch(f"tensor {name!r}: mode {mode} with {count} of {spec.size} elements")
        old_all = None if base is None else bits(base[name])
        if mode == WHOLE:
            return None, self._values(spec, count), old_all
        if mode == RAW:
            small = spec.size < MAX_INT32
            index: NDArray[Any] = self.take("index" if small else "index64", count).view("<i4" if small else "<i8")
            if index[0] < 0 or index[-1] >= spec.size or not bool((index[1:] > index[:-1]).all()):
                raise InvalidPatch(f"tensor {name!r}: indices are not strictly increasing within {spec.size}")
            return index, self._values(spec, count), None if old_all is None else old_all[index]
        if old_all is None:
            raise BaseMismatch(f"tensor {name!r} is coded against a base, and none was given")
        return self._fast(spec, count, old_all)

    def _values(self, spec: TensorSpec, count: int) -> Bits:
        return self.take(_VALUE[spec.width], count).astype(unsigned(spec.width))

    def _fast(self, spec: TensorSpec, count: int, old_all: Bits) -> tuple[NDArray[np.integer[Any]], Bits, Bits]:
        raw_gaps, *packed = (int(n) for n in self.take("lens", 2 + spec.width).view("<i8"))
        if not count <= raw_gaps <= streams.max_gap_bytes(count, spec.size):
            raise InvalidPatch(f"a gap stream of {raw_gaps} bytes cannot hold {count} indices below {spec.size}")
        if any(n < 0 for n in packed):
            raise InvalidPatch("a stream has a negative length")
        blobs = [self.take("data", n).tobytes() for n in packed]
        index = streams.unpack_gaps(streams.decompress(blobs[0], raw_gaps), count, spec.size)
        old = old_all[index]
        values = streams.join_planes([streams.decompress(b, count) for b in blobs[1:]], count)
        order = streams.exponent_order(old, spec.dtype)
        if order is not None:
            unsorted = np.empty_like(values)
            unsorted[order] = values
            values = unsorted
        return index, streams.from_distances(old, values, spec.dtype), old

    def finish(self) -> None:
        """Every stream must be consumed exactly."""
        for name, data in self._streams.items():
            if self._at[name] != len(data):
                raise InvalidPatch(f"stream {name!r} has {len(data) - self._at[name]} elements too many")
