"""The delta payload: a safetensors file with a few streams, for all codecs.

metadata  format, codec, schema (digest)
table     int64 [E, 4]   per entry: place, mode (0 raw, 1 fast, 2 tight, 3 whole), count of elements, bytes of `data`
sums      uint64 [E, 4]  Σmix(old) and Σmix(new) over the entry's elements, two keys each: a, b, a, b
index     int32, index64 int64: indices of raw entries; value1/2/4/8: their new bits, and tensors sent whole
data      uint8: the other entries' bytes, in order

An entry is a segment of the schema's layout (`sync/pieces.py`), or with the codec `raw` a tensor. Its place is its
number there, and places rise. raw needs no base. fast and tight need the old bits at the changed places, tight all of
the segment's. An entry is sent whole where that is not larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..digest import PieceSums, change_sums_of, element_sums
from ..errors import InvalidRequest
from ..pieces import Piece, Segment, layout_of
from ..safetensors_io import pack
from ..tensors import Bits, Schema, State, TensorSpec, bits
from ..threads import grouped, in_order
from . import gaps, values
from .patch import MAX_INT32, TensorPatch, compared

CODECS = ("raw", "fast", "tight")
BATCH = 1 << 20
"""Elements of small segments that one thread takes together."""
OBJECT_BYTES = 512 * 1024**2
FORMAT = "deltawire-delta-2"
RAW, FAST, TIGHT, WHOLE = range(4)
VALUE = {1: "value1", 2: "value2", 4: "value4", 8: "value8"}
STREAMS = {
    "table": "I64", "sums": "U64", "index64": "I64", "value8": "U64", "index": "I32", "value4": "U32", "value2": "U16",
    "value1": "U8", "data": "U8",
}  # fmt: skip


class Encoded(NamedTuple):
    """Payloads (one object each), and what they add to the sums of the state's pieces."""

    objects: list[bytes]
    change: PieceSums


_Parts = list[tuple[int, Piece, TensorPatch]]
"""The changes in pieces of a segment: (the piece's number, the piece, its patch in indices of the tensor)."""


class _Entry(NamedTuple):
    place: int
    mode: int
    elements: int
    streams: tuple[tuple[str, bytes], ...]
    sums: list[int]
    pieces: list[int]
    change: PieceSums

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.streams)


def encode(
    patch: Mapping[str, TensorPatch], schema: Schema, codec: str, base: State, *,
    limit: int = OBJECT_BYTES, sparse: bool = False, threads: int | None = None,
) -> Encoded:  # fmt: skip
    """Write `patch` as payloads of at most `limit` bytes (one entry at least); none for an empty patch.

    base: the complete old state; read by `tight` and for what is smaller sent whole, which `sparse` forbids. Raises
    InvalidRequest for an unknown codec.
    """

    def parts_of(segment: Segment) -> _Parts:
        numbered = enumerate(segment.pieces, segment.first)
        return [(n, piece, patch[piece.name].within(piece)) for n, piece in numbered if piece.name in patch]

    return _encode(parts_of, schema, codec, base, limit=limit, sparse=sparse, threads=threads)


def encode_states(
    old: State, new: State, schema: Schema, codec: str, *, limit: int = OBJECT_BYTES, threads: int | None = None
) -> Encoded:
    """`encode` of what differs between two states, one segment after the other: the difference is never held whole."""

    def parts_of(segment: Segment) -> _Parts:
        numbered = enumerate(segment.pieces, segment.first)
        return [(n, piece, compared(old, new, schema, piece)) for n, piece in numbered]

    return _encode(parts_of, schema, codec, old, limit=limit, sparse=False, threads=threads)


def _encode(
    parts_of: Callable[[Segment], _Parts], schema: Schema, codec: str, base: State, *,
    limit: int, sparse: bool, threads: int | None,
) -> Encoded:  # fmt: skip
    if codec not in CODECS:
        raise InvalidRequest(f"unknown codec {codec!r}; known: {', '.join(CODECS)}")
    layout = layout_of(schema)
    change = np.zeros((len(layout.pieces), 2), np.uint64)
    places = layout.tensors if codec == "raw" else layout.segments

    def work(batch: list[tuple[int, Segment]]) -> list[_Entry]:
        return [
            entry
            for number, segment in batch
            for entry in _entries(number, segment, parts_of(segment), schema, codec, base, limit=limit, sparse=sparse)
        ]

    objects: list[list[_Entry]] = []
    room = 0
    batches = grouped(list(enumerate(places)), [segment.size for segment in places], BATCH)
    for entry in (e for found in in_order(work, batches, threads) for e in found):
        if not objects or entry.size > room or entry.place == objects[-1][-1].place:
            objects.append([])
            room = limit
        objects[-1].append(entry)
        room -= entry.size
        change[entry.pieces] += entry.change
    return Encoded([_pack(entries, codec, layout.digest) for entries in objects], change)


def empty(codec: str, schema: Schema) -> bytes:
    """The payload that says that nothing changed."""
    return _pack([], codec, layout_of(schema).digest)


def _entries(
    number: int, segment: Segment, parts: _Parts, schema: Schema, codec: str, base: State, *,
    limit: int, sparse: bool,
) -> list[_Entry]:  # fmt: skip
    parts = [(n, piece, part) for n, piece, part in parts if len(part.index)]
    count = sum(len(part.index) for _, _, part in parts)
    if not count:
        return []
    width = schema[segment.pieces[0].name].width
    whole = segment.size * width
    if codec == "raw":
        spec = schema[segment.pieces[0].name]
        if sparse or count * (_index_width(spec) + width) < whole:
            return list(_raw(number, parts, spec, limit))
    else:
        mode, found = FAST if codec == "fast" else TIGHT, _joined(parts)
        data = _coded(segment, [n - segment.first for n, _, _ in parts], found, mode, base)
        if sparse or len(data) < whole:
            return [_entry(number, mode, count, (("data", data),), parts, found)]
    return [_whole(number, segment, parts, base, "data" if codec != "raw" else VALUE[width])]


def _index_width(spec: TensorSpec) -> int:
    return 4 if spec.size < MAX_INT32 else 8


def _raw(number: int, parts: _Parts, spec: TensorSpec, limit: int) -> Iterator[_Entry]:
    """One tensor's changes, in as many entries as the limit asks for."""
    name = "index" if spec.size < MAX_INT32 else "index64"
    most = max(1, limit // (_index_width(spec) + spec.width))
    index, new = (np.concatenate([getattr(part, field) for _, _, part in parts]) for field in ("index", "new"))
    for at in range(0, len(index), most):
        cut = slice(at, at + most)
        first, last = int(index[cut][0]), int(index[cut][-1]) + 1
        inside = [(n, p, part.within(Piece(p.name, first, last))) for n, p, part in parts]
        streams = ((name, index[cut].tobytes()), (VALUE[spec.width], new[cut].tobytes()))
        inside = [part for part in inside if len(part[2].index)]
        yield _entry(number, RAW, len(index[cut]), streams, inside, _joined(inside))


class _Joined(NamedTuple):
    """The changes of some pieces of a segment one after the other, those of the k-th from cuts[k] to cuts[k + 1]."""

    cuts: NDArray[np.int64]
    places: NDArray[np.integer[Any]]
    old: Bits
    new: Bits


def _joined(parts: _Parts) -> _Joined:
    columns = ([getattr(part, name) for _, _, part in parts] for name in ("index", "old", "new"))
    cuts = np.cumsum([0, *(len(part.index) for _, _, part in parts)])
    return _Joined(cuts, *(column[0] if len(column) == 1 else np.concatenate(column) for column in columns))


def _coded(segment: Segment, inside: list[int], found: _Joined, mode: int, base: State) -> bytes:
    from .. import kernels

    shifted = found.places.copy()
    kernels.shift(shifted, found.cuts, -segment.offsets[inside])
    index = shifted.astype(np.int32, copy=False)
    line = values.line_of(segment.dtype)
    if mode == FAST:
        where = gaps.pack_fast(index, segment.size)
    else:
        where = gaps.pack_tight(index, segment_bits(segment, base), line)
    return where + values.pack(found.old, found.new, line)


def segment_bits(segment: Segment, state: State) -> list[Bits]:
    """The bits of a segment's pieces, flat views."""
    return [bits(state[piece.name])[piece.start : piece.stop] for piece in segment.pieces]


def _entry(
    place: int, mode: int, count: int, streams: tuple[tuple[str, bytes], ...], parts: _Parts, found: _Joined
) -> _Entry:  # fmt: skip
    each = change_sums_of([piece.name for _, piece, _ in parts], *found)
    return _summed(place, mode, count, streams, [n for n, _, _ in parts], each)


def _whole(number: int, segment: Segment, parts: _Parts, base: State, stream: str) -> _Entry:
    changed = {n: part for n, _, part in parts}
    each, blobs = [], []
    for n, (piece, old) in enumerate(zip(segment.pieces, segment_bits(segment, base), strict=True), segment.first):
        new = old.copy()
        if n in changed:
            new[changed[n].index - piece.start] = changed[n].new
        before, after = (element_sums(piece.name, None, flat, start=piece.start) for flat in (old, new))
        each.append((*before, *after))
        blobs.append(new.tobytes())
    numbers = list(range(segment.first, segment.first + len(each)))
    streams = ((stream, b"".join(blobs)),)
    return _summed(number, WHOLE, segment.size, streams, numbers, np.array(each, np.uint64))


def _summed(
    place: int, mode: int, count: int, streams: tuple[tuple[str, bytes], ...], pieces: list[int],
    each: NDArray[np.uint64],
) -> _Entry:  # fmt: skip
    """An entry of pieces with these sums over their old and new bits, [pieces, 4]."""
    totals: list[int] = each.sum(axis=0, dtype=np.uint64).tolist()
    return _Entry(place, mode, count, streams, totals, pieces, each[:, 2:] - each[:, :2])


def _pack(entries: list[_Entry], codec: str, schema: str) -> bytes:
    parts: dict[str, list[bytes]] = {name: [] for name in STREAMS}
    rows = []
    for entry in entries:
        rows.append((entry.place, entry.mode, entry.elements, sum(len(d) for n, d in entry.streams if n == "data")))
        for name, data in entry.streams:
            parts[name].append(data)
    parts["table"] = [np.array(rows, "<i8").tobytes()]
    parts["sums"] = [np.array([entry.sums for entry in entries], "<u8").tobytes()]
    tensors: dict[str, tuple[TensorSpec, bytes | memoryview]] = {}
    for name, dtype in STREAMS.items():
        raw = parts[name][0] if len(parts[name]) == 1 else b"".join(parts[name])
        if raw:
            width = TensorSpec(dtype, ()).width
            shape = (len(entries), 4) if name in ("table", "sums") else (len(raw) // width,)
            tensors[name] = (TensorSpec(dtype, shape), raw)
    return pack(tensors, {"format": FORMAT, "codec": codec, "schema": schema})
