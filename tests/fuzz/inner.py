"""Mutations of what an entry of the codecs fast and tight holds: gaps, frames, class tables, Rice codes, directions."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import NamedTuple

import zstandard

from .container import Field, Parts, Row, fields_of, joined, numbers, parts_of, rice_bits
from .oracle import FAST, TIGHT, WHOLE, BitReader
from .outer import awkward, flipped, kind, resized
from .samples import Sample


class _Opened(NamedTuple):
    """A payload with one entry opened."""

    parts: Parts
    row: Row
    fields: list[Field]

    def closed(self) -> bytes:
        """The payload with the entry's fields as they are now."""
        self.row.streams = {"data": joined(self.fields)}
        return self.parts.packed()

    def having(self, name: str) -> list[int]:
        """The places of the fields called `name`."""
        return [at for at, field in enumerate(self.fields) if field.name == name]

    def bytes_of(self, name: str) -> bytes:
        """The one field of bytes called `name`."""
        value = self.fields[self.having(name)[0]].value
        assert isinstance(value, bytes)
        return value

    def put(self, rng: Random, length: str, name: str, value: bytes) -> None:
        """Replace sized bytes; their length is told as it is, seldom not."""
        self.fields[self.having(name)[0]].value = value
        if rng.random() < 0.9:
            self.fields[self.having(length)[0]].value = len(value)


def _open(rng: Random, sample: Sample, *modes: int) -> _Opened | None:
    parts = parts_of(sample.payload, sample)
    rows = [row for row in parts.rows if "data" in row.streams and row.mode in modes]
    if not rows:
        return None
    row = rng.choice(rows)
    return _Opened(parts, row, fields_of(row, sample.layout.segments[row.place]))


def _number_kind(name: str, *fields: str) -> None:
    """A kind that sets one of the numbers called `fields` to an awkward one."""

    @kind(name)
    def _(rng: Random, sample: Sample) -> bytes | None:
        opened = _open(rng, sample, FAST, TIGHT)
        places = [] if opened is None else [at for field in fields for at in opened.having(field)]
        if opened is None or not places:
            return None
        field = opened.fields[rng.choice(places)]
        field.value = awkward(rng, int(field.value))
        return opened.closed()


_number_kind("gap shift", "shift")
_number_kind("gap bytes told", "used")
_number_kind("lengths told", "gap length", "where length", "what length")
_number_kind("class numbers", "where class", "what class")
_number_kind("class counts", "where count", "what count")
_number_kind("class rows", "where rows", "what rows")
_number_kind("usual steps", "usual step")
_number_kind("rice parameters", "where k", "what k")


@kind("varint form")
def _(rng: Random, sample: Sample) -> bytes | None:
    """Numbers longer than need be, up to one that never ends."""
    opened = _open(rng, sample, FAST, TIGHT)
    if opened is None:
        return None
    field = rng.choice([field for field in opened.fields if isinstance(field.value, int)])
    field.pad = rng.choice((1, 2, 8, 9, 10, 300))
    return opened.closed()


@kind("shift with its bits")
def _(rng: Random, sample: Sample) -> bytes | None:
    """Another shift with as many low bits as it asks for."""
    opened = _open(rng, sample, FAST)
    if opened is None:
        return None
    shift, low = opened.fields[0], opened.fields[opened.having("low")[0]]
    shift.value = rng.randint(0, 23)
    size = -(-opened.row.count * shift.value // 8)
    low.value = (opened.bytes_of("low") + (rng.randbytes(size) if rng.random() < 0.5 else bytes(size)))[:size]
    return opened.closed()


@kind("low bits")
def _(rng: Random, sample: Sample) -> bytes | None:
    return _bytes_changed(rng, _open(rng, sample, FAST), "low")


@kind("directions")
def _(rng: Random, sample: Sample) -> bytes | None:
    return _bytes_changed(rng, _open(rng, sample, FAST, TIGHT), "signs")


@kind("whole values")
def _(rng: Random, sample: Sample) -> bytes | None:
    return _bytes_changed(rng, _open(rng, sample, WHOLE), "whole")


def _bytes_changed(rng: Random, opened: _Opened | None, name: str) -> bytes | None:
    if opened is None or not opened.bytes_of(name):
        return None
    value = opened.bytes_of(name)
    opened.fields[opened.having(name)[0]].value = flipped(rng, value) if rng.random() < 0.7 else resized(rng, value)
    return opened.closed()


@kind("mode")
def _(rng: Random, sample: Sample) -> bytes | None:
    """An entry read as another mode."""
    opened = _open(rng, sample, FAST, TIGHT, WHOLE)
    if opened is None:
        return None
    opened.row.mode = rng.choice([mode for mode in (0, 1, 2, 3, 4, -1) if mode != opened.row.mode])
    if opened.row.mode == WHOLE and rng.random() < 0.5:
        opened.row.count = sample.layout.segments[opened.row.place].size
    return opened.closed()


@kind("gap bytes")
def _(rng: Random, sample: Sample) -> bytes | None:
    """The bytes below the frame changed, framed again."""
    opened = _open(rng, sample, FAST)
    if opened is None:
        return None
    gaps, at = bytearray(_unframed(opened)), 0
    for _ in range(rng.randint(1, 3)):
        at, pick = rng.randrange(len(gaps) + 1), rng.random()
        if pick < 0.3:
            gaps[at:at] = b"\xff" * rng.choice((1, 1, 2, 20))
        elif pick < 0.5:
            gaps[at : at + 1] = bytes([rng.choice((0, 1, 254, 255, rng.randrange(256)))])
        elif pick < 0.6:
            gaps += bytes([rng.choice((0, 255))])
        elif pick < 0.7:
            del gaps[-1:]
        elif at < len(gaps):
            gaps[at] = (gaps[at] + rng.choice((1, 255))) % 256
        if not gaps:
            gaps += b"\0"
    used = opened.fields[opened.having("used")[0]]
    used.value = len(gaps) if rng.random() < 0.9 else used.value
    framed = zstandard.ZstdCompressor(level=rng.choice((1, 19))).compress(bytes(gaps))
    opened.put(rng, "gap length", "frame", framed if len(framed) < len(gaps) or rng.random() < 0.2 else bytes(gaps))
    return opened.closed()


def _unframed(opened: _Opened) -> bytes:
    frame, used = opened.bytes_of("frame"), numbers(opened.fields, "used")[0]
    return frame if len(frame) == used else zstandard.ZstdDecompressor().decompress(frame)


@cache
def _bomb(size: int, *, told: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=told).compress(bytes(size))


def _announcing(frame: bytes, size: int) -> bytes:
    """A frame whose header announces another content size (where its field can hold it)."""
    flag, single = frame[4] >> 6, frame[4] >> 5 & 1
    at = 5 + (1 - single) + (0, 1, 2, 4)[frame[4] & 3]
    width = (single, 2, 4, 8)[flag]
    told = max(0, size - 256 * (flag == 1)) % 256**width if width else 0
    return frame[:at] + told.to_bytes(width, "little") + frame[at + width :]


def _window(gaps: bytes, log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=log, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(gaps) + packer.flush()


def _of_content(rng: Random, gaps: bytes) -> bytes:
    """Frames of the right bytes, or as many zeros, in other forms."""
    half = rng.randrange(len(gaps) + 1)
    pack = zstandard.ZstdCompressor
    checked = pack(write_checksum=True).compress(gaps)
    made = {
        "bomb": _bomb(rng.choice((8 << 20, 64 << 20)), told=rng.random() < 0.5),
        "bomb that lies": _announcing(_bomb(8 << 20, told=True), len(gaps)),
        "untold": pack(write_content_size=False).compress(gaps),
        "checksum": checked,
        "wrong checksum": checked[:-1] + bytes([checked[-1] ^ 1]),
        "two halves": pack().compress(gaps[:half]) + pack().compress(gaps[half:]),
        "wide window": _window(gaps, rng.choice((10, 27, 30))),
        "plain": gaps,
        "other level": pack(level=19).compress(gaps),
        "of nothing": pack().compress(b""),
    }
    return rng.choice(list(made.values()))


def _of_frame(rng: Random, frame: bytes, size: int) -> bytes:
    """The right frame damaged, or with something beside it."""
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    made = {
        "lie": _announcing(frame, awkward(rng, size)),
        "twice": frame + frame,
        "skippable first": skippable + frame,
        "skippable last": frame + skippable,
        "skippable alone": b"\x50\x2a\x4d\x18\xff\xff\xff\x7f",
        "other magic": flipped(rng, frame[:4]) + frame[4:],
        "header flipped": frame[:4] + flipped(rng, frame[4:14]) + frame[14:],
        "flipped": flipped(rng, frame),
        "cut": frame[: rng.randrange(len(frame))],
        "grown": frame + rng.randbytes(rng.randint(1, 9)),
        "nothing": b"",
    }
    return rng.choice(list(made.values()))


@kind("frames")
def _(rng: Random, sample: Sample) -> bytes | None:
    opened = _open(rng, sample, FAST)
    if opened is None:
        return None
    gaps = _unframed(opened)
    if rng.random() < 0.5:
        made = _of_content(rng, gaps)
    else:
        made = _of_frame(rng, zstandard.ZstdCompressor(level=1).compress(gaps), len(gaps))
    opened.put(rng, "gap length", "frame", made)
    if rng.random() < 0.2:
        opened.fields[opened.having("used")[0]].value = rng.choice((len(made), 8 << 20, 64 << 20, 2**40))
    return opened.closed()


@kind("class table")
def _(rng: Random, sample: Sample) -> bytes | None:
    """Rows of a class table dropped, doubled, swapped, or a count moved from one to another."""
    opened = _open(rng, sample, FAST, TIGHT)
    name = rng.choice(("where", "what"))
    starts = [] if opened is None else opened.having(f"{name} class")
    if opened is None or not starts:
        return None
    width, first, last = 3 if name == "where" else 5, starts[0], starts[-1]
    rows = [opened.fields[at : at + width] for at in starts]
    pick = rng.random()
    if pick < 0.5 and len(rows) > 1:
        one, other = rng.sample(rows, 2)
        few = rng.randint(0, int(one[1].value))
        one[1].value, other[1].value = int(one[1].value) - few, int(other[1].value) + few
    elif pick < 0.7:
        del rows[rng.randrange(len(rows))]
    elif pick < 0.85:
        rows.insert(rng.randrange(len(rows) + 1), rng.choice(rows))
    else:
        rng.shuffle(rows)
    told = opened.fields[first - 1]
    told.value = len(rows) if rng.random() < 0.9 else told.value
    opened.fields[first : last + width] = [field for row in rows for field in row]
    return opened.closed()


@kind("rice bits")
def _(rng: Random, sample: Sample) -> bytes | None:
    opened = _open(rng, sample, FAST, TIGHT)
    name = rng.choice(("where", "what"))
    if opened is None or not opened.having(f"{name} bits") or not opened.bytes_of(f"{name} bits"):
        return None
    bits, pick = opened.bytes_of(f"{name} bits"), rng.random()
    if pick < 0.4:
        bits = flipped(rng, bits)
    elif pick < 0.6:
        bits = resized(rng, bits)
    elif pick < 0.7:  # what is behind the last code, within its byte
        bits = bits[:-1] + bytes([bits[-1] | 1 << rng.randrange(4, 8)])
    else:
        at = rng.randrange(len(bits))
        bits = bits[:at] + rng.choice((bytes(12), b"\xff" * 12, b"")) + bits[at + rng.choice((0, 12)) :]
    opened.put(rng, f"{name} length", f"{name} bits", bits)
    return opened.closed()


@kind("rice numbers")
def _(rng: Random, sample: Sample) -> bytes | None:
    """Gaps, run lengths and steps changed as numbers and coded again, also in forms that the encoder never takes."""
    opened = _open(rng, sample, FAST, TIGHT)
    name = rng.choice(("where", "what"))
    if opened is None or not opened.having(f"{name} bits") or not opened.bytes_of(f"{name} bits"):
        return None
    counts, ks, columns = numbers(opened.fields, f"{name} count"), numbers(opened.fields, f"{name} k"), 2
    if name == "where":
        counts, ks, columns = [n + 1 - k % 2 for n, k in zip(counts, ks, strict=True)], [k // 2 for k in ks], 1
    order = [ks[column::columns] for column in range(columns)]
    reader = BitReader(opened.bytes_of(f"{name} bits"))
    groups = [(k, [reader.rice(k) for _ in range(n)]) for column in order for k, n in zip(column, counts, strict=True)]
    if rng.random() < 0.9:
        listed = rng.choice([listed for _, listed in groups if listed])
        at = rng.randrange(len(listed))
        limits = (opened.row.count, sample.layout.segments[opened.row.place].size, listed[at])
        listed[at] = awkward(rng, rng.choice(limits))
        if rng.random() < 0.2:
            listed[rng.randrange(len(listed))] += 1
    escape = rng.randrange(columns * sum(counts)) if rng.random() < 0.3 else -1
    opened.put(rng, f"{name} length", f"{name} bits", rice_bits(groups, escape=escape))
    return opened.closed()


@kind("classes exchanged")
def _(rng: Random, sample: Sample) -> bytes | None:
    """tight: classes exchanged, so that gaps walk through elements that they were not made for."""
    opened = _open(rng, sample, TIGHT)
    if opened is None:
        return None
    starts = opened.having("where class")
    if len(starts) < 2:
        return None
    one, other = rng.sample(starts, 2)
    opened.fields[one + 1].value, opened.fields[other + 1].value = (
        opened.fields[other + 1].value,
        opened.fields[one + 1].value,
    )
    if rng.random() < 0.5:
        at = rng.choice(starts)
        opened.fields[at].value = int(opened.fields[at].value) + 1
    return opened.closed()
