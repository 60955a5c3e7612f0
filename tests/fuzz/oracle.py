"""A second reader of payloads, in plain Python integers, written from the format alone. It says what a payload does to
a state, or refuses it. Slow; shares with the codec only the layout of a schema and zstd."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import zstandard

from sync.pieces import Layout, Piece, Segment
from sync.tensors import EXPONENT_SHIFT, WIDTH, Schema

STREAM_WIDTH = {"table": 8, "sums": 8, "index64": 8, "value8": 8, "index": 4, "value4": 4, "value2": 2, "value1": 1,
                "data": 1}  # fmt: skip
RAW, FAST, TIGHT, WHOLE = range(4)
_FULL = (1 << 64) - 1


class Refused(Exception):
    """The payload breaks the format, or does not fit the state."""


def need(condition: object, what: str) -> None:
    """Raise Refused unless `condition`."""
    if not condition:
        raise Refused(what)


class Bytes:
    """Reads from the front."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        need(0 <= size <= len(self.raw) - self.at, "ends early")
        self.at += size
        return self.raw[self.at - size : self.at]

    def number(self, most: int) -> int:
        """The next varint."""
        value = 0
        for n in range(10):
            byte = self.take(1)[0]
            value += (byte % 128) << (7 * n)
            if byte < 128:
                need(value <= most, "number too large")
                return value
        raise Refused("varint too long")


class BitReader:
    """Reads bits from the low end of each byte."""

    def __init__(self, raw: bytes) -> None:
        self.value, self.left = int.from_bytes(raw, "little"), 8 * len(raw)

    def take(self, count: int) -> int:
        """The next bits as a number."""
        need(count <= self.left, "bits end early")
        found = self.value & ((1 << count) - 1)
        self.value >>= count
        self.left -= count
        return found

    def rice(self, k: int) -> int:
        """The next Rice code."""
        for quotient in range(24):
            if self.take(1):
                return quotient << k | self.take(k)
        return self.take(64)

    def finish(self) -> None:
        """Only padding to a whole byte may be left."""
        need(self.left < 8 and self.value == 0, "bits left over")


class Change(NamedTuple):
    """One entry's effect on one tensor: flat index → (old bits, new bits)."""

    name: str
    bits: dict[int, tuple[int, int]]


class _Entry(NamedTuple):
    place: int
    mode: int
    elements: int
    size: int
    sums: list[int]


def _containers(payload: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    try:
        length = int.from_bytes(payload[:8], "little")
        need(8 + length <= len(payload), "header")
        header = json.loads(payload[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        streams, covered = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            need(start == covered and name in STREAM_WIDTH, "offsets")
            elements = 1
            for n in entry["shape"]:
                elements *= n
            need(elements * STREAM_WIDTH[name] == stop - start, "shape")
            streams[name], covered = payload[8 + length + start : 8 + length + stop], stop
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"header: {error}") from None
    need(8 + length + covered == len(payload), "rest")
    return metadata, streams


def _numbers(raw: bytes, width: int, *, signed: bool = False) -> list[int]:
    return [int.from_bytes(raw[at : at + width], "little", signed=signed) for at in range(0, len(raw), width)]


def read(payload: bytes, schema: Schema, layout: Layout, state: Mapping[str, list[int]]) -> Iterator[Change]:
    """What `payload` says about `state` (name → flat bits). Raises Refused, possibly after some changes."""
    metadata, streams = _containers(payload)
    need(metadata.get("format") == "deltawire-delta-2", "format")
    left = {name: Bytes(raw) for name, raw in streams.items()}
    table = _numbers(left.pop("table", Bytes(b"")).raw, 8, signed=True)
    sums = _numbers(left.pop("sums", Bytes(b"")).raw, 8)
    need(len(table) == len(sums) and len(table) % 4 == 0, "table")
    raw = metadata.get("codec") == "raw"
    places = layout.tensors if raw else layout.segments
    before = -1
    for at in range(0, len(table), 4):
        place, mode, elements, size = table[at : at + 4]
        entry = _Entry(place, mode, elements, size, sums[at : at + 4])
        need(before < entry.place < len(places), "place")
        before = entry.place
        segment = places[entry.place]
        need(0 < entry.elements <= segment.size, "count")
        found = _raw(left, entry, segment, schema) if raw else _coded(left, entry, segment, schema, state)
        yield from _checked(entry, segment, found, state)
    need(all(stream.at == len(stream.raw) for stream in left.values()), "left over")


def _stream(left: dict[str, Bytes], name: str, size: int) -> bytes:
    need(name in left, "no such stream")
    return left[name].take(size)


def _raw(left: dict[str, Bytes], entry: _Entry, segment: Segment, schema: Schema) -> dict[int, int]:
    spec = schema[segment.pieces[0].name]
    need(entry.size == 0 and entry.mode in (RAW, WHOLE), "mode")
    index = list(range(segment.size))
    if entry.mode == RAW:
        index = _numbers(_stream(left, "index", 4 * entry.elements), 4, signed=True)
    new = _numbers(_stream(left, f"value{spec.width}", spec.width * entry.elements), spec.width)
    need(len(index) == len(new), "whole of another size")
    need(all(a < b for a, b in pairwise(index)), "order")
    need(index[0] >= 0 and index[-1] < segment.size, "range")
    return dict(zip(index, new, strict=True))


def _coded(
    left: dict[str, Bytes], entry: _Entry, segment: Segment, schema: Schema, state: Mapping[str, list[int]]
) -> dict[int, int]:
    raw = Bytes(_stream(left, "data", entry.size))
    width = WIDTH[segment.dtype]
    old = [bits for piece in segment.pieces for bits in state[piece.name][piece.start : piece.stop]]
    need(entry.mode in (FAST, TIGHT, WHOLE), "mode")
    if entry.mode == WHOLE:
        need(entry.elements == segment.size and entry.size == width * entry.elements, "whole")
        return dict(enumerate(_numbers(raw.take(entry.size), width)))
    index = (
        _fast(raw, entry.elements, segment.size) if entry.mode == FAST else _tight(raw, entry.elements, old, segment)
    )
    new = _values(raw, [old[i] for i in index], segment)
    need(raw.at == len(raw.raw), "left over in an entry")
    return dict(zip(index, new, strict=True))


def _fast(raw: Bytes, count: int, size: int) -> list[int]:
    shift = raw.number(22)
    used = raw.number(count + (size >> shift) // 255)
    frame = raw.take(raw.number(_FULL))
    low = BitReader(raw.take(-(-count * shift // 8)))
    gaps = frame
    if len(frame) != used:
        try:
            need(len(frame) < used and zstandard.frame_content_size(frame) == used, "announced")
            gaps = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError:
            raise Refused("zstd") from None
    at = Bytes(gaps)
    index, last = [], -1
    for _ in range(count):
        high = byte = 255
        high = 0
        while byte == 255:
            byte = at.take(1)[0]
            high += byte
        last += 1 + (high << shift | low.take(shift))
        need(last < size, "beyond the segment")
        index.append(last)
    need(at.at == len(gaps) == used, "gaps left over")
    low.finish()
    return index


def _class(bits: int, dtype: str) -> int:
    if dtype not in EXPONENT_SHIFT:
        return 0
    return (bits & ((1 << (8 * WIDTH[dtype] - 1)) - 1)) >> EXPONENT_SHIFT[dtype]


def _classes(dtype: str) -> int:
    return 1 << (8 * WIDTH[dtype] - 1 - EXPONENT_SHIFT[dtype]) if dtype in EXPONENT_SHIFT else 1


def _table(raw: Bytes, classes: int, columns: int) -> list[tuple[int, int, list[int]]]:
    """(class, the count told, further numbers) of each row."""
    rows, last = [], -1
    for _ in range(raw.number(classes)):
        last += 1 + raw.number(classes)
        need(last < classes, "class")
        rows.append((last, raw.number(_FULL), [raw.number(255) for _ in range(columns)]))
    return rows


def _codes(codes: BitReader, k: int, count: int) -> list[int]:
    """`count` Rice codes, the last one first."""
    need(k <= 32, "k")
    return [codes.rice(k) for _ in range(count)][::-1]


def _tight(raw: Bytes, count: int, old: list[int], segment: Segment) -> list[int]:
    rows = _table(raw, _classes(segment.dtype), 1)
    codes = BitReader(raw.take(raw.number(_FULL)))
    gaps, flipped = {}, {c for c, _, [column] in rows if column % 2}
    for c, told, [column] in rows:
        gaps[c] = _codes(codes, column // 2, told + (c not in flipped))
    codes.finish()
    index = []
    for i, bits in enumerate(old):
        c = _class(bits, segment.dtype)
        wait, ends = gaps.get(c), False
        if wait:
            ends = wait[-1] == 0  # of the run before the next element of the other sort
            wait[-1] -= 1
            if ends:
                wait.pop()
        if ends != (c in flipped):
            index.append(i)
    need(len(index) == count and not any(gaps.values()), "classes end early or late")
    return index


def _values(raw: Bytes, old: list[int], segment: Segment) -> list[int]:
    width, count = 8 * WIDTH[segment.dtype], len(old)
    signs = BitReader(raw.take(-(-count // 8)))
    rows = _table(raw, _classes(segment.dtype), 3)
    need(sum(n for _, n, _ in rows) <= count, "counts")
    usual = {c: columns[0] for c, _, columns in rows}
    need(all(0 < step <= min(64, 1 << (width - 1)) for step in usual.values()), "usual step")
    codes = BitReader(raw.take(raw.number(_FULL)))
    runs = {c: _codes(codes, columns[1], n) for c, n, columns in rows}
    folds = {c: _codes(codes, columns[2], n) for c, n, columns in rows}
    codes.finish()
    new = []
    for bits in old:
        c = _class(bits, segment.dtype)
        step = usual.get(c, 1)
        if runs.get(c):
            if runs[c][-1] == 0:
                runs[c].pop()
                step = _unfolded(folds[c].pop(), step)
                need(step <= 1 << (width - 1), "step")
            else:
                runs[c][-1] -= 1
        step = -step if signs.take(1) else step
        new.append(_moved(bits, step, width, floats=segment.dtype in EXPONENT_SHIFT))
    need(not any(runs.values()), "exceptions left over")
    signs.finish()
    return new


def _unfolded(fold: int, usual: int) -> int:
    """The step that is `fold`-th by its distance from the usual one: above, below, above, … while there is a below."""
    above, below = range(usual + 1, usual + fold + 2), range(usual - 1, 0, -1)
    if fold >= 2 * len(below):
        return above[fold - len(below)]
    return (below if fold % 2 else above)[fold // 2]


def _moved(bits: int, step: int, width: int, *, floats: bool) -> int:
    """`step` points up the line of a dtype of `width` bits."""
    full, top = (1 << width) - 1, 1 << (width - 1)
    if not floats:
        return (bits + step) & full
    point = (full - bits if bits & top else bits + top) + step & full
    return point - top if point & top else full - point


def _checked(
    entry: _Entry, segment: Segment, found: dict[int, int], state: Mapping[str, list[int]]
) -> Iterator[Change]:
    totals, start = [0] * 4, 0
    for piece in segment.pieces:
        here = {i - start + piece.start: new for i, new in found.items() if start <= i < start + piece.size}
        start += piece.size
        if here:
            change = Change(piece.name, {i: (state[piece.name][i], new) for i, new in here.items()})
            totals = [(a + b) & _FULL for a, b in zip(totals, sums_of(piece, change), strict=True)]
            yield change
    need(totals == entry.sums, "sums")


def _finalize(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _FULL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _FULL
    return x ^ x >> 31


def mix(key: int, index: int, bits: int) -> int:
    """The mix of one element."""
    return _finalize(_finalize(index * 0x9E3779B97F4A7C15 + key & _FULL) + bits * 0xD6E8FEB86659FD93 & _FULL)


def sums_of(piece: Piece, change: Change) -> list[int]:
    """Sums over old and over new bits, two keys each."""
    raw = hashlib.blake2b(piece.name.encode(), digest_size=16, person=b"deltawire-sd1").digest()
    keys = _numbers(raw, 8)
    return [sum(mix(key, i, pair[side]) for i, pair in change.bits.items()) & _FULL for side in (0, 1) for key in keys]
