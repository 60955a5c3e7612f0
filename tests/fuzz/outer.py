"""Mutations of the container: bytes, header, streams, tables, sums, indices, and splices of payloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from .container import DTYPE, Parts, Row, packed, parts_of, streams_of
from .oracle import RAW
from .samples import Sample

Mutate = Callable[[Random, Sample], bytes | None]


class Kind(NamedTuple):
    """A kind of mutation: `make` returns None where the sample has nothing of the kind. `same`: a mutated payload that
    is accepted as it is must do what the original does (others may carry what another payload says, checked)."""

    make: Mutate
    same: bool


KINDS: dict[str, Kind] = {}
AWKWARD = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 22, 23, 24, 31, 32, 33, 63, 64, 65, 127, 128, 254, 255, 256, 2**14, 2**16,
           2**22, 2**22 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 2,
           2**64 - 1)  # fmt: skip


def kind(name: str, *, same: bool = True) -> Callable[[Mutate], Mutate]:
    """Register a mutation under a name."""

    def register(make: Mutate) -> Mutate:
        KINDS[name] = Kind(make, same)
        return make

    return register


def awkward(rng: Random, here: int) -> int:
    """Another number: near, doubled, or one that arithmetic stumbles over; below 2^64."""
    pick, other = rng.random(), here
    while other == here:
        if pick < 0.5:
            other = max(0, here + rng.choice((-2, -1, 1, 2)))
        elif pick < 0.6 and here:
            other = (here * 2) % 2**64
        else:
            other = rng.choice(AWKWARD)
    return other


def flipped(rng: Random, data: bytes, most: int = 3) -> bytes:
    """The bytes with one to `most` bits flipped."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def resized(rng: Random, data: bytes, unit: int = 1) -> bytes:
    """The bytes cut, grown by zeros or by what they hold, or emptied; by whole units."""
    have = len(data) // unit
    size = unit * rng.choice((0, max(0, have - 1), have + 1, have + 2, rng.randint(0, have), 2 * have))
    return (data + (data if rng.random() < 0.5 else b"") + bytes(size))[:size]


@kind("bits flipped")
def _(rng: Random, sample: Sample) -> bytes:
    return flipped(rng, sample.payload)


@kind("bytes overwritten")
def _(rng: Random, sample: Sample) -> bytes:
    at, size = rng.randrange(len(sample.payload)), rng.randint(1, 16)
    filling = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * size if rng.random() < 0.5 else rng.randbytes(size)
    return (sample.payload[:at] + filling + sample.payload[at + size :])[: len(sample.payload)]


@kind("truncated")
def _(rng: Random, sample: Sample) -> bytes:
    return sample.payload[: rng.choice((rng.randrange(64), rng.randrange(len(sample.payload)), -1, -8))]


@kind("extended")
def _(rng: Random, sample: Sample) -> bytes:
    return sample.payload + rng.choice((b"\0", bytes(8), rng.randbytes(5), sample.payload))


@kind("cut or repeated")
def _(rng: Random, sample: Sample) -> bytes:
    a, b = sorted(rng.choices(range(len(sample.payload) + 1), k=2))
    return sample.payload[:a] + sample.payload[a:b] * rng.choice((0, 2)) + sample.payload[b:]


@kind("bytes spliced", same=False)
def _(rng: Random, sample: Sample) -> bytes | None:
    if not sample.others:
        return None
    other = rng.choice(sample.others)
    at = rng.randrange(len(sample.payload))
    return sample.payload[:at] + other[at if rng.random() < 0.5 else rng.randrange(len(other)) :]


@kind("header length")
def _(rng: Random, sample: Sample) -> bytes:
    length = awkward(rng, int.from_bytes(sample.payload[:8], "little"))
    return length.to_bytes(8, "little") + sample.payload[8:]


_SHAPES: tuple[object, ...] = ([1] * 65, [0] * 70, [2**53, 2**53, 0], [2**53] * 40, [-1], [True], "x", None, [1.0],
                               [2**70], [], [0], [2**31], [[1]])  # fmt: skip
_OFFSETS: tuple[object, ...] = ([0, 2**62], [5, 1], [-8, 8], [0], "x", None, [0.0, 8.0], [0, 0], [2**64, 2**64 + 8])
_DTYPES: tuple[object, ...] = (*sorted(set(DTYPE.values())), "F64", "BF16", "I4", "", None, [], {}, 7)
_METADATA: tuple[object, ...] = (None, 3, [], {}, {"format": 1}, {"format": "deltawire-delta-1"}, "x")
_TEXTS = (b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000, b"1" * 5_000, b'{"x": NaN}', b"{}",
          b'{"\\ud800": 1}')  # fmt: skip


def _header(payload: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + length]), payload[8 + length :]


@kind("header fields")
def _(rng: Random, sample: Sample) -> bytes:
    header, rest = _header(sample.payload)
    name = rng.choice(list(header))
    if name == "__metadata__" or rng.random() < 0.1:
        pick = rng.random()
        if pick < 0.5:
            header["__metadata__"] = rng.choice(_METADATA)
        else:
            header["__metadata__"][rng.choice(("format", "codec", "schema", "more"))] = rng.choice(
                ("", "raw", "fast", 1)
            )
    elif rng.random() < 0.15:
        header[name] = rng.choice((None, 3, [], "x", {}))
    else:
        field, values = rng.choice((("shape", _SHAPES), ("data_offsets", _OFFSETS), ("dtype", _DTYPES)))
        header[name][field] = rng.choice(values)
        if field != "dtype" and rng.random() < 0.5:
            here = _header(sample.payload)[0][name][field]
            here[rng.randrange(len(here))] = awkward(rng, here[0])
            header[name][field] = here
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


@kind("header text")
def _(rng: Random, sample: Sample) -> bytes:
    text = rng.choice(_TEXTS)
    if rng.random() < 0.5:
        length = int.from_bytes(sample.payload[:8], "little")
        text = flipped(rng, sample.payload[8 : 8 + length])
        return sample.payload[:8] + text + sample.payload[8 + length :]
    return len(text).to_bytes(8, "little") + text + sample.payload[-rng.randint(1, 300) :]


@kind("header moved")
def _(rng: Random, sample: Sample) -> bytes:
    """The same streams in another order, at odd places, or with a stream that holds nothing."""
    metadata, streams = streams_of(sample.payload)
    names = list(streams)
    rng.shuffle(names)
    order = {name: streams[name] for name in names}
    if rng.random() < 0.3:
        order[rng.choice([*DTYPE, "more"])] = b""
        order = {**order, **streams}
    payload = packed(order, metadata)
    if rng.random() < 0.5:
        header, rest = _header(payload)
        text = json.dumps(header).encode() + b" " * rng.randrange(8)
        payload = len(text).to_bytes(8, "little") + text + rest
    return payload


@kind("streams dropped or swapped")
def _(rng: Random, sample: Sample) -> bytes:
    metadata, streams = streams_of(sample.payload)
    one, other = rng.choice(list(streams)), rng.choice(list(streams))
    if one == other or rng.random() < 0.3:
        del streams[one]
    else:
        streams[one], streams[other] = streams[other], streams[one]
    return packed(streams, metadata)


@kind("streams resized")
def _(rng: Random, sample: Sample) -> bytes:
    metadata, streams = streams_of(sample.payload)
    name = rng.choice([*streams, *DTYPE])
    streams[name] = resized(rng, streams.get(name, bytes(8)), rng.choice((1, 4, 8, 32)))
    return packed(streams, metadata)


@kind("stream bits")
def _(rng: Random, sample: Sample) -> bytes:
    metadata, streams = streams_of(sample.payload)
    name = rng.choice(list(streams))
    streams[name] = flipped(rng, streams[name])
    return packed(streams, metadata)


@kind("metadata")
def _(rng: Random, sample: Sample) -> bytes:
    parts = parts_of(sample.payload, sample)
    what = rng.choice(("codec", "schema", "format"))
    texts = {"codec": ("raw", "fast", "tight", "", "x"), "schema": ("", "0" * 64), "format": ("", "deltawire-delta-1")}
    parts.metadata[what] = rng.choice(texts[what])
    if rng.random() < 0.1:
        del parts.metadata[what]
    return parts.packed()


@kind("table fields")
def _(rng: Random, sample: Sample) -> bytes:
    parts = parts_of(sample.payload, sample)
    row = rng.choice(parts.rows)
    what = rng.choice(("place", "mode", "count", "size"))
    here = getattr(row, what)
    setattr(row, what, awkward(rng, len(row.streams.get("data", b"")) if here is None else here))
    return parts.packed()


@kind("table rows", same=False)
def _(rng: Random, sample: Sample) -> bytes:
    """Rows dropped, doubled or swapped, with their bytes or without."""
    parts = parts_of(sample.payload, sample)
    rows, at = parts.rows, rng.randrange(len(parts.rows))
    pick = rng.random()
    if pick < 0.3:
        del rows[at]
    elif pick < 0.5:
        rows.insert(rng.randint(0, len(rows)), rows[at])
    elif pick < 0.7:
        rng.shuffle(rows)
    elif pick < 0.85:
        rows[at] = Row(rows[at].place, rows[at].mode, rows[at].count, rows[at].sums, {}, rng.choice((None, 0, 8)))
    else:
        few = rng.choice(rows)
        rows += [
            Row(few.place + n, few.mode, few.count, few.sums, few.streams) for n in range(1, rng.choice((2, 40, 400)))
        ]
    return parts.packed()


@kind("entries exchanged", same=False)
def _(rng: Random, sample: Sample) -> bytes | None:
    """Bytes, sums or fields of two entries of one payload exchanged."""
    parts = parts_of(sample.payload, sample)
    if len(parts.rows) < 2:
        return None
    one, other = rng.sample(parts.rows, 2)
    for what in rng.sample(("place", "mode", "count", "sums", "streams"), rng.randint(1, 3)):
        here, there = getattr(one, what), getattr(other, what)
        setattr(one, what, there)
        setattr(other, what, here)
    return parts.packed()


@kind("sums")
def _(rng: Random, sample: Sample) -> bytes:
    parts = parts_of(sample.payload, sample)
    sums = rng.choice(parts.rows).sums
    at = rng.randrange(4)
    sums[at] = awkward(rng, sums[at]) if rng.random() < 0.7 else sums[at] ^ 1 << rng.randrange(64)
    if rng.random() < 0.2:
        sums[:2], sums[2:] = sums[2:], sums[:2]
    return parts.packed()


@kind("splice of entries", same=False)
def _(rng: Random, sample: Sample) -> bytes | None:
    """Entries of two payloads in one."""
    if not sample.others:
        return None
    parts, other = parts_of(sample.payload, sample), parts_of(rng.choice(sample.others), sample)
    rows = [rng.choice(parts.rows) for _ in parts.rows] + [rng.choice(other.rows) for _ in other.rows]
    rows = list({row.place: row for row in rng.sample(rows, len(rows))}.values())
    rows.sort(key=lambda row: row.place)
    if rng.random() < 0.3:
        rng.choice(rows).sums = rng.choice(other.rows).sums
    return Parts(rng.choice((parts, other)).metadata, rows).packed()


@kind("splice of streams", same=False)
def _(rng: Random, sample: Sample) -> bytes | None:
    if not sample.others:
        return None
    metadata, streams = streams_of(sample.payload)
    other = streams_of(rng.choice(sample.others))[1]
    for name in rng.sample(list(other), rng.randint(1, len(other))):
        streams[name] = other[name]
    return packed(streams, metadata)


def _raw_row(rng: Random, parts: Parts) -> Row | None:
    rows = [row for row in parts.rows if row.mode == RAW]
    return rng.choice(rows) if rows else None


@kind("raw indices")
def _(rng: Random, sample: Sample) -> bytes | None:
    parts = parts_of(sample.payload, sample)
    row = _raw_row(rng, parts)
    if row is None:
        return None
    index = memoryview(bytearray(row.streams["index"])).cast("i")
    at, pick = rng.randrange(len(index)), rng.random()
    if pick < 0.2:
        index[at], index[0] = index[0], index[at]
    elif pick < 0.4:
        index[at] = index[at - 1]
    elif pick < 0.8:
        index[at] = (awkward(rng, index[at]) + 2**31) % 2**32 - 2**31
    else:
        index[at] = rng.choice((-1, -(2**31), 2**31 - 1))
    row.streams["index"] = index.tobytes()
    return parts.packed()


@kind("raw values")
def _(rng: Random, sample: Sample) -> bytes | None:
    parts = parts_of(sample.payload, sample)
    rows = [row for row in parts.rows if "data" not in row.streams]
    if not rows:
        return None
    row = rng.choice(rows)
    name = next(name for name in row.streams if name.startswith("value"))
    data = row.streams[name]
    row.streams[name] = flipped(rng, data) if rng.random() < 0.5 else resized(rng, data, int(name[-1]))
    return parts.packed()
