"""Read a payload against a base: everything is checked before it is returned, and nothing is written anywhere."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..digest import PieceSums, Sums, change_sums_of, element_sums
from ..errors import BaseMismatch, InvalidPatch, SchemaChanged
from ..pieces import Layout, Piece, Segment, layout_of
from ..safetensors_io import parse_header, view
from ..tensors import Bits, Schema, State, TensorSpec, bits, require_fit, unsigned
from ..threads import grouped, in_order
from . import gaps, values
from .patch import MAX_INT32, index_type
from .payload import BATCH, FAST, FORMAT, RAW, STREAMS, TIGHT, VALUE, WHOLE, segment_bits
from .varint import Cursor

Index = NDArray[np.integer[Any]]


class Decoded(NamedTuple):
    """What a payload says: name → (flat indices, new bits), ready to scatter (index None: the whole tensor), and what
    it adds to the sums of the state's pieces (without a base: all of it at one piece of each entry)."""

    patches: dict[str, tuple[Index | None, Bits]]
    change: PieceSums


class _Entry(NamedTuple):
    segment: Segment
    mode: int
    elements: int
    places: Index | None  # raw entries: their indices
    data: Bits  # raw entries and tensors of `raw` sent whole: their values; else bytes
    sums: tuple[Sums, Sums]


class Part(NamedTuple):
    """The decoded changes of one entry. Those of piece k of the segment are cuts[k] to cuts[k + 1]: flat indices into
    its tensor (None: all of the segment), new bits; change[k] is what they add to its sums. `held` is the tensors as
    they were read."""

    segment: Segment
    held: Held | None
    cuts: NDArray[np.int64]
    places: Index | None
    new: Bits
    change: PieceSums


class Held(NamedTuple):
    """The tensors of a segment's pieces, flat bits, with their addresses for kernels."""

    tensors: list[Bits]
    addresses: NDArray[np.uint64]

    @classmethod
    def of(cls, segment: Segment, state: State) -> Held:
        """Of a state that is known to fit."""
        from .. import kernels

        tensors = [bits(state[piece.name]) for piece in segment.pieces]
        return cls(tensors, np.array([kernels.address(tensor) for tensor in tensors], np.uint64))

    def read(self, segment: Segment, index: Index, cuts: NDArray[np.int64], width: int) -> Bits:
        """The bits of `width` bytes at index[cuts[k] : cuts[k + 1]] of the k-th tensor, which are in range."""
        from .. import kernels

        found = np.empty(len(index), unsigned(width))
        kernels.read(self.addresses, segment.tensors, index, cuts, found)
        return found


def decode(
    payload: bytes | mmap.mmap, schema: Schema, base: State | None, *, threads: int | None = None
) -> Decoded:  # fmt: skip
    """Read a payload against `base` (raw payloads may be read without) and check all of it.

    Raises SchemaChanged when it was made for another schema or `base` has one, BaseMismatch when the base differs at a
    touched place, InvalidPatch for anything malformed. Memory: what it returns, and one segment per thread.
    """
    if base is not None:
        require_fit(base, schema)  # kernels trust the lengths of its arrays
    layout = layout_of(schema)
    change = np.zeros((len(layout.pieces), 2), np.uint64)
    parts = decode_parts(payload, schema, base, threads=threads)
    for part in parts:
        change[part.segment.first : part.segment.first + len(part.change)] += part.change
    return Decoded(_by_tensor(parts, schema, layout), change)


def decode_parts(
    payload: bytes | mmap.mmap, schema: Schema, base: State | None, *, threads: int | None = None
) -> list[Part]:  # fmt: skip
    """`decode`, by entries; `base` is known to fit `schema`."""
    entries = _read_entries(payload, schema)

    def work(batch: list[_Entry]) -> list[Part]:
        return [_decode_entry(entry, schema, base) for entry in batch]

    batches = grouped(entries, [entry.segment.size for entry in entries], BATCH)
    return [part for found in in_order(work, batches, threads) for part in found]


def _read_entries(payload: bytes | mmap.mmap, schema: Schema) -> list[_Entry]:
    """The entries with their bytes, still coded; every stream is used up exactly."""
    metadata, found = parse_header(payload, "delta payload", InvalidPatch)
    if metadata.get("format") != FORMAT:
        raise InvalidPatch(f"payload format is {metadata.get('format')!r}, this build reads {FORMAT}")
    layout = layout_of(schema)
    if metadata.get("schema") != layout.digest:
        raise SchemaChanged("the delta was made for other tensor names, shapes or dtypes than the base has")
    for name, entry in found.items():
        if STREAMS.get(name) != entry.spec.dtype:
            raise InvalidPatch(f"unexpected stream {name!r} of {entry.spec.dtype}")
    streams = _Streams({name: view(payload, entry).reshape(-1) for name, entry in found.items()})
    raw = metadata.get("codec") == "raw"
    places = layout.tensors if raw else layout.segments
    table, sums = streams.table(len(places))
    entries, last = [], -1
    for (place, mode, count, size), declared in zip(table, sums, strict=True):
        if not last < place < len(places):
            raise InvalidPatch(f"place {place} is out of order or range")
        last = place
        segment = places[place]
        spec = schema[segment.pieces[0].name]
        if not 0 < count <= segment.size or (mode == WHOLE and count != segment.size):
            raise InvalidPatch(f"place {place}: mode {mode} with {count} of {segment.size} elements")
        index = None
        if raw and size == 0 and mode in (RAW, WHOLE):
            if mode == RAW:
                small = spec.size < MAX_INT32
                index = streams.take("index" if small else "index64", count).view("<i4" if small else "<i8")
            data = streams.take(VALUE[spec.width], count).astype(unsigned(spec.width))
        elif not raw and mode in (FAST, TIGHT, WHOLE) and 8 * size >= count:
            data = streams.take("data", size)
        else:
            raise InvalidPatch(f"place {place}: mode {mode} with {size} bytes for {count} elements")
        entries.append(_Entry(segment, mode, count, index, data, (Sums(*declared[:2]), Sums(*declared[2:]))))
    streams.finish()
    return entries


class _Streams:
    """Hands out streams in order; every byte must be used exactly once."""

    def __init__(self, streams: dict[str, Bits]) -> None:
        self._streams = streams
        self._at = dict.fromkeys(STREAMS, 0)

    def table(self, places: int) -> tuple[list[list[int]], list[list[int]]]:
        """The rows of `table` and of `sums`."""
        table = self._streams.pop("table", np.empty(0, np.uint64)).view("<i8")
        sums = self._streams.pop("sums", np.empty(0, np.uint64))
        if len(table) % 4 or len(table) != len(sums) or len(table) // 4 > places:
            raise InvalidPatch(f"payload has {len(table)} table fields and {len(sums)} sums for {places} places")
        return table.reshape(-1, 4).tolist(), sums.reshape(-1, 4).tolist()

    def take(self, stream: str, count: int) -> Bits:
        """The next `count` elements of a stream."""
        at, have = self._at[stream], self._streams.get(stream)
        if count < 0 or have is None or at + count > len(have):
            raise InvalidPatch(f"stream {stream!r} ends before {count} more elements")
        self._at[stream] = at + count
        return have[at : at + count]

    def finish(self) -> None:
        """Every stream must be consumed exactly."""
        for name, data in self._streams.items():
            if self._at[name] != len(data):
                raise InvalidPatch(f"stream {name!r} has {len(data) - self._at[name]} elements too many")


def _decode_entry(entry: _Entry, schema: Schema, base: State | None) -> Part:
    from .. import kernels

    segment = entry.segment
    held = None if base is None else Held.of(segment, base)
    if entry.mode == WHOLE:
        return _whole(entry, schema, held)
    if entry.mode == RAW:
        return _raw(entry, held)
    if base is None or held is None:
        raise BaseMismatch(f"tensor {segment.pieces[0].name!r} is coded against a base, and none was given")
    line, cursor = values.line_of(segment.dtype), Cursor(entry.data.data)
    old: Bits | None = None
    if entry.mode == FAST:
        within = gaps.unpack_fast(cursor, entry.elements, segment.size)
    else:
        within, old = gaps.unpack_tight(cursor, entry.elements, segment_bits(segment, base), line)
    cuts = _cuts(segment, within)
    index: Index = within.astype(index_type(int(segment.tensors.max())), copy=False)
    kernels.shift(index, cuts, segment.offsets)
    old = held.read(segment, index, cuts, line.width) if old is None else old
    try:
        new = values.unpack(cursor, old, line)
        cursor.finish()
    except InvalidPatch:  # read by the old bits: where they are other ones, they are what is wrong
        _compare(entry, _sums(segment, cuts, index, old, old)[0], entry.sums[1])
        raise
    return _checked(entry, held, cuts, index, old, new)


def _cuts(segment: Segment, index: Index) -> NDArray[np.int64]:
    """Where the indices of each piece of a segment begin, and their number."""
    return np.concatenate([[0], np.searchsorted(index, segment.ends.astype(index.dtype))])


def _sums(
    segment: Segment, cuts: NDArray[np.int64], index: Index, old: Bits, new: Bits
) -> tuple[Sums, Sums, PieceSums]:  # fmt: skip
    """Sums of the old and of the new bits, and what each piece's change by."""
    each = change_sums_of([piece.name for piece in segment.pieces], cuts, index, old, new)
    totals = [int(n) for n in each.sum(axis=0, dtype=np.uint64)]
    return Sums(*totals[:2]), Sums(*totals[2:]), each[:, 2:] - each[:, :2]


def _checked(entry: _Entry, held: Held, cuts: NDArray[np.int64], index: Index, old: Bits, new: Bits) -> Part:
    """The part, once the sums over old and new bits are the declared ones."""
    removed, added, change = _sums(entry.segment, cuts, index, old, new)
    _compare(entry, removed, added)
    return Part(entry.segment, held, cuts, index, new, change)


def _compare(entry: _Entry, removed: Sums | None, added: Sums) -> None:
    if removed is not None and removed != entry.sums[0]:
        raise BaseMismatch(f"{_names(entry.segment)}: the base differs from the one this delta was made for")
    if added != entry.sums[1]:
        raise InvalidPatch(f"{_names(entry.segment)}: the decoded values fail their check")


def _names(segment: Segment) -> str:
    first, last = segment.pieces[0].name, segment.pieces[-1].name
    return f"tensor {first!r}" if first == last else f"tensors {first!r} to {last!r}"


def _whole(entry: _Entry, schema: Schema, held: Held | None) -> Part:
    segment = entry.segment
    spec = schema[segment.pieces[0].name]
    data = entry.data
    if data.dtype.itemsize != spec.width or len(data) != entry.elements:
        if len(data) != entry.elements * spec.width:
            raise InvalidPatch(f"{len(data)} bytes for {entry.elements} elements of {spec.width}")
        data = np.frombuffer(data.tobytes(), unsigned(spec.width))
    cuts = np.concatenate([[0], segment.ends])
    removed, added, change = None if held is None else Sums(0, 0), Sums(0, 0), []
    for k, piece in enumerate(segment.pieces):
        after = element_sums(piece.name, None, data[cuts[k] : cuts[k + 1]], start=piece.start)
        before = entry.sums[0] if k == 0 else Sums(0, 0)
        if held is not None and removed is not None:
            before = element_sums(piece.name, None, held.tensors[k][piece.start : piece.stop], start=piece.start)
            removed = removed.plus(before)
        added = added.plus(after)
        change.append(after.minus(before))
    _compare(entry, removed, added)
    return Part(segment, held, cuts, None, data, np.array(change, np.uint64))


def _raw(entry: _Entry, held: Held | None) -> Part:
    index, new, segment = entry.places, entry.data, entry.segment
    assert index is not None
    size, name = segment.size, segment.pieces[0].name
    if index[0] < 0 or index[-1] >= size or not bool((index[1:] > index[:-1]).all()):
        raise InvalidPatch(f"tensor {name!r}: indices are not strictly increasing within {size}")
    cuts = _cuts(segment, index)
    if held is not None:
        return _checked(entry, held, cuts, index, held.read(segment, index, cuts, new.itemsize), new)
    added = element_sums(name, index, new)
    _compare(entry, None, added)
    change = np.zeros((len(cuts) - 1, 2), np.uint64)
    change[0] = added.minus(entry.sums[0])
    return Part(segment, None, cuts, index, new, change)


def _by_tensor(parts: list[Part], schema: Schema, layout: Layout) -> dict[str, tuple[Index | None, Bits]]:
    """The parts of each tensor joined; a piece sent whole beside others gets its indices written out."""
    pieces_of = {segment.pieces[0].name: len(segment.pieces) for segment in layout.tensors}
    found: dict[str, list[tuple[Piece, Index | None, Bits]]] = {}
    for part in parts:
        cuts = part.cuts.tolist()
        for piece, first, last in zip(part.segment.pieces, cuts[:-1], cuts[1:], strict=True):
            if first < last:
                index = None if part.places is None else part.places[first:last]
                found.setdefault(piece.name, []).append((piece, index, part.new[first:last]))
    return {name: _joined(group, schema[name], pieces_of[name]) for name, group in found.items()}


def _joined(group: list[tuple[Piece, Index | None, Bits]], spec: TensorSpec, pieces: int) -> tuple[Index | None, Bits]:
    """The changes of a tensor from those of some of its pieces."""
    new = group[0][2] if len(group) == 1 else np.concatenate([new for _, _, new in group])
    if len(group) == pieces and all(index is None for _, index, _ in group):
        return None, new
    kind = index_type(spec.size)
    indices: list[Index] = [
        np.arange(piece.start, piece.stop, dtype=kind) if index is None else index.astype(kind, copy=False)
        for piece, index, _ in group
    ]
    return indices[0] if len(indices) == 1 else np.concatenate(indices), new


def join(
    first: Mapping[str, tuple[Index | None, Bits]], second: Mapping[str, tuple[Index | None, Bits]]
) -> dict[str, tuple[Index | None, Bits]]:
    """The patches of two objects of a version. Raises InvalidPatch where a place is in both, or comes too late."""
    joined = dict(first)
    for name, (index, new) in second.items():
        if name not in joined:
            joined[name] = (index, new)
            continue
        before, early = joined[name]
        if before is None or index is None or index[0] <= before[-1]:
            raise InvalidPatch(f"tensor {name!r} is twice in the objects of the version")
        joined[name] = (np.concatenate([before, index]), np.concatenate([early, new]))
    return joined
