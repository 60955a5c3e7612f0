"""Payloads taken apart into rows and fields, and put together again, also into what no encoder would write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sync.errors import InvalidPatch
from sync.pieces import Segment
from sync.safetensors_io import pack, parse_header
from sync.tensors import WIDTH, TensorSpec

from .oracle import FAST, RAW, STREAM_WIDTH, TIGHT, WHOLE, Bytes
from .samples import Sample

DTYPE = {"table": "I64", "sums": "U64", "index64": "I64", "value8": "U64", "index": "I32", "value4": "U32",
         "value2": "U16", "value1": "U8", "data": "U8"}  # fmt: skip


@dataclass
class Row:
    """One entry: its table fields, its sums, its bytes per stream. size None: as many as `data` has."""

    place: int
    mode: int
    count: int
    sums: list[int]
    streams: dict[str, bytes]
    size: int | None = None


@dataclass
class Field:
    """A number (a varint, `pad` bytes longer than need be) or bytes of an entry. `name` says what it is."""

    name: str
    value: int | bytes
    pad: int = 0

    def packed(self) -> bytes:
        """As it stands in the entry."""
        if isinstance(self.value, bytes):
            return self.value
        groups = [self.value >> at & 127 for at in range(0, max(7, self.value.bit_length()), 7)] + [0] * self.pad
        return bytes([*(g | 128 for g in groups[:-1]), groups[-1]])


@dataclass
class Parts:
    """A payload as rows. `extra`: streams beside theirs."""

    metadata: dict[str, str]
    rows: list[Row]
    extra: dict[str, bytes] = field(default_factory=dict)

    def packed(self) -> bytes:
        """The payload, with a header that is true."""
        streams: dict[str, bytes] = dict.fromkeys(DTYPE, b"")
        for row in self.rows:
            size = len(row.streams.get("data", b"")) if row.size is None else row.size
            fields = (row.place, row.mode, row.count, size)
            streams["table"] += b"".join((n % 2**64).to_bytes(8, "little") for n in fields)
            streams["sums"] += b"".join((n % 2**64).to_bytes(8, "little") for n in row.sums)
            for name, data in row.streams.items():
                streams[name] += data
        for name, data in self.extra.items():
            streams[name] += data
        return packed({name: data for name, data in streams.items() if data}, self.metadata)


def packed(streams: dict[str, bytes], metadata: dict[str, str]) -> bytes:
    """A container of streams."""
    found: dict[str, tuple[TensorSpec, bytes | memoryview]] = {}
    for name, data in streams.items():
        dtype, width = (DTYPE[name], STREAM_WIDTH[name]) if name in DTYPE else ("U8", 1)
        count = len(data) // width
        shape = (count // 4, 4) if name in ("table", "sums") and count % 4 == 0 else (count,)
        found[name] = (TensorSpec(dtype, shape), data[: count * width])
    return pack(found, metadata)


def streams_of(payload: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """Metadata and streams of a well-formed payload."""
    metadata, entries = parse_header(payload, "sample", InvalidPatch)
    return metadata, {name: payload[entry.start : entry.end] for name, entry in entries.items()}


def parts_of(payload: bytes, sample: Sample) -> Parts:
    """A well-formed payload as rows."""
    metadata, streams = streams_of(payload)
    left = {name: Bytes(data) for name, data in streams.items()}
    raw = metadata["codec"] == "raw"
    places = sample.layout.tensors if raw else sample.layout.segments
    rows = []
    for _ in range(len(streams.get("table", b"")) // 32):
        place, mode, count, size = (int.from_bytes(left["table"].take(8), "little") for _ in range(4))
        sums = [int.from_bytes(left["sums"].take(8), "little") for _ in range(4)]
        own: dict[str, bytes] = {}
        if raw:
            width = WIDTH[places[place].dtype]
            if mode == RAW:
                own["index"] = left["index"].take(4 * count)
            own[f"value{width}"] = left[f"value{width}"].take(width * count)
        else:
            own["data"] = left["data"].take(size)
        rows.append(Row(place, mode, count, sums, own))
    return Parts(metadata, rows)


def fields_of(row: Row, segment: Segment) -> list[Field]:
    """The bytes of a well-formed entry that is not `raw`, as fields."""
    raw = Bytes(row.streams["data"])
    if row.mode == WHOLE:
        return [Field("whole", raw.raw)]
    found: list[Field] = []
    if row.mode == FAST:
        found += [
            Field("shift", raw.number(22)),
            Field("used", raw.number(1 << 30)),
            *_sized(raw, "gap length", "frame"),
        ]
        found.append(Field("low", raw.take(-(-row.count * int(found[0].value) // 8))))
    elif row.mode == TIGHT:
        found += [*_table(raw, "where", 1), *_sized(raw, "where length", "where bits")]
    found.append(Field("signs", raw.take(-(-row.count // 8))))
    found += [*_table(raw, "what", 3), *_sized(raw, "what length", "what bits")]
    assert raw.at == len(raw.raw), (row.mode, segment)
    return found


def _sized(raw: Bytes, length: str, name: str) -> list[Field]:
    size = raw.number(1 << 40)
    return [Field(length, size), Field(name, raw.take(size))]


def _table(raw: Bytes, name: str, columns: int) -> Iterator[Field]:
    rows = Field(f"{name} rows", raw.number(1 << 20))
    yield rows
    for _ in range(int(rows.value)):
        yield Field(f"{name} class", raw.number(1 << 20))
        yield Field(f"{name} count", raw.number(1 << 30))
        for column in range(columns):
            yield Field("usual step" if columns == 3 and column == 0 else f"{name} k", raw.number(255))


def joined(fields: list[Field]) -> bytes:
    """An entry's bytes."""
    return b"".join(one.packed() for one in fields)


def numbers(fields: list[Field], name: str) -> list[int]:
    """The numbers called `name`, in order."""
    return [int(one.value) for one in fields if one.name == name]


def rice_bits(groups: list[tuple[int, list[int]]], *, escape: int = -1) -> bytes:
    """Rice codes of (k, numbers) groups; the number at place `escape` is written with the long form though it need
    not be."""
    value = at = place = 0
    for k, listed in groups:
        for number in listed:
            quotient = number >> k
            if quotient < 24 and place != escape:
                value |= (1 | (number & ((1 << k) - 1)) << 1) << at + quotient
                at += quotient + 1 + k
            else:
                value |= (number % 2**64) << at + 24
                at += 88
            place += 1
    return value.to_bytes(-(-at // 8), "little")
