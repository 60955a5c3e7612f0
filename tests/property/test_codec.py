"""The codec: bit for bit for any state, small for any density, and unmoved by hostile bytes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import State, edited, pairs, random_bits, random_state, same_bits, schemas

from sync import apply_delta, decode_delta, encode_delta, state_digest
from sync.codec import CODECS, decode, diff, encode, gaps, rice, varint
from sync.codec.values import line_of, pack_table, unpack_table
from sync.digest import ZERO, Sums, element_sums, moved, piece_sums, state_sums, total
from sync.errors import BaseMismatch, DeltawireError, InvalidPatch, InvalidRequest, SchemaChanged
from sync.safetensors_io import MappedState, pack, pack_state, parse_header, view
from sync.tensors import WIDTH, TensorSpec, bits, schema_digest

pytestmark = pytest.mark.property
Pair = tuple[dict[str, TensorSpec], State, State]
codecs = st.sampled_from(CODECS)
ROWS = st.tuples(st.integers(0, 300), st.integers(1, 9), st.integers(0, 255))


def copied(state: State) -> State:
    return {name: array.copy() for name, array in state.items()}


@settings(max_examples=150, deadline=None)
@given(pairs(), codecs, st.sampled_from([1, 2]))
def test_round_trip_bit_for_bit(pair: Pair, codec: str, threads: int) -> None:
    schema, old, new = pair
    before = copied(old)
    payload = encode_delta(old, new, codec, schema, threads=threads)
    assert same_bits(old, before)
    state = copied(old)
    apply_delta(state, payload, schema, threads=threads)
    assert same_bits(state, new)
    assert {n: a.dtype for n, a in state.items()} == {n: a.dtype for n, a in old.items()}
    full = len(pack_state(new, schema))
    assert len(payload) <= full * 1.01 + 4096


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_raw_decodes_without_a_base(pair: Pair) -> None:
    schema, old, new = pair
    state = copied(old)
    for name, (index, values) in decode_delta(encode_delta(old, new, "raw", schema), None, schema).items():
        flat = state[name].reshape(-1).view(values.dtype)
        flat[slice(None) if index is None else index] = values
    assert same_bits(state, new)


@pytest.mark.parametrize("codec", ["fast", "tight"])
def test_what_needs_a_base_is_refused_without_one(codec: str) -> None:
    old = {"w": np.zeros(1000, np.uint16)}
    new = {"w": old["w"].copy()}
    new["w"][3] = 5
    schema = {"w": ("BF16", (1000,))}
    with pytest.raises(BaseMismatch, match="none was given"):
        decode_delta(encode_delta(old, new, codec), None, schema)
    with pytest.raises(InvalidRequest, match="schema"):
        decode_delta(encode_delta(old, new, "raw"), None)


@settings(max_examples=80, deadline=None)
@given(pairs(), codecs)
def test_incremental_digest_equals_the_full_one(pair: Pair, codec: str) -> None:
    schema, old, new = pair
    encoded = encode(diff(old, new, schema), schema, codec, old)
    assert len(encoded.objects) <= 1
    for data in encoded.objects:
        assert np.array_equal(decode(data, schema, old).change, encoded.change)
    sums = piece_sums(old, schema)
    assert total(sums + encoded.change, schema) == state_sums(new, schema)
    assert np.array_equal(sums + encoded.change, piece_sums(new, schema))
    after = moved(state_sums(old, schema), encoded.change)
    assert after.text() == state_digest(new, schema)
    assert (after.text() == state_digest(old, schema)) == same_bits(old, new)
    assert Sums.parse(after.text()) == after


@settings(max_examples=60, deadline=None)
@given(schemas(), st.integers(0, 2**32), st.integers(1, 5))
def test_digest_is_free_of_order_and_additive_over_shards(
    schema: dict[str, TensorSpec], seed: int, shards: int
) -> None:
    rng = np.random.default_rng(seed)
    state = random_state(rng, schema)
    whole = state_sums(state, schema)
    assert state_sums(dict(reversed(state.items())), dict(reversed(schema.items()))) == whole
    for name, spec in schema.items():
        flat = bits(state[name])
        cuts = [0, *np.sort(rng.integers(0, spec.size + 1, shards - 1)).tolist(), spec.size]
        parts = ZERO
        for a, b in pairwise(cuts):
            parts = parts.plus(element_sums(name, None, flat[a:b], start=a))
        order = rng.permutation(spec.size)
        assert parts == element_sums(name, None, flat) == element_sums(name, order, flat[order])


def test_digest_sees_names_shapes_dtypes_and_places() -> None:
    a = np.arange(6, dtype=np.uint16)
    states: list[tuple[State, dict[str, TensorSpec]]] = [
        ({"w": a}, {"w": TensorSpec("BF16", (6,))}),
        ({"w": a}, {"w": TensorSpec("F16", (6,))}),
        ({"w": a.reshape(2, 3)}, {"w": TensorSpec("BF16", (2, 3))}),
        ({"v": a}, {"v": TensorSpec("BF16", (6,))}),
        ({"w": a[::-1].copy()}, {"w": TensorSpec("BF16", (6,))}),
        ({"w": a, "e": a[:0]}, {"w": TensorSpec("BF16", (6,)), "e": TensorSpec("BF16", (0,))}),
    ]
    digests = [state_digest(s, sc) for s, sc in states]
    assert len(set(digests)) == len(digests)


@settings(max_examples=60, deadline=None)
@given(pairs(), codecs, st.integers(0, 2**32))
def test_a_wrong_base_at_a_touched_place_is_an_error_and_nothing_is_written(pair: Pair, codec: str, seed: int) -> None:
    schema, old, new = pair
    payload = encode_delta(old, new, codec, schema)
    touched = decode_delta(payload, old, schema)
    rng = np.random.default_rng(seed)
    for name, (index, values) in touched.items():
        wrong = copied(old)
        flat = bits(wrong[name])
        at = rng.integers(len(values)) if index is None else index[rng.integers(len(index))]
        flat[at] ^= np.array(1 << int(rng.integers(8 * flat.itemsize)), flat.dtype)
        before = copied(wrong)
        with pytest.raises(BaseMismatch):
            apply_delta(wrong, payload, schema)
        assert same_bits(wrong, before)


def read_gaps(raw: bytes, count: int, size: int) -> None:
    cursor = varint.Cursor(memoryview(raw))
    gaps.unpack_fast(cursor, count, size)
    cursor.finish()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32), st.sampled_from([1e-4, 0.003, 0.05, 0.4, 1.0]))
def test_gaps_round_trip_and_are_used_up(size: int, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    index = np.flatnonzero(rng.random(size) < density).astype(np.int32)
    index = index if len(index) else np.array([size - 1], np.int32)
    raw = gaps.pack_fast(index, size)
    cursor = varint.Cursor(memoryview(raw))
    assert np.array_equal(gaps.unpack_fast(cursor, len(index), size), index)
    cursor.finish()
    with pytest.raises(InvalidPatch):
        gaps.unpack_fast(varint.Cursor(memoryview(raw)), len(index), int(index[-1]))
    for bad in (raw[:-1], raw + b"\0"):
        with pytest.raises(InvalidPatch):
            read_gaps(bad, len(index), size)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WIDTH)), st.integers(1, 3000), st.integers(0, 2**32), st.floats(0.001, 1))
def test_gaps_within_classes_round_trip_over_pieces(dtype: str, size: int, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, TensorSpec(dtype, (size,)), size)
    index = np.flatnonzero(rng.random(size) < density).astype(np.int32)
    index = index if len(index) else np.array([0], np.int32)
    cuts = np.sort(rng.integers(0, size + 1, rng.integers(0, 4)))
    pieces, line = [part for part in np.split(old, cuts) if len(part)], line_of(dtype)
    raw = gaps.pack_tight(index, pieces, line)
    cursor = varint.Cursor(memoryview(raw))
    found, values = gaps.unpack_tight(cursor, len(index), pieces, line)
    cursor.finish()
    assert np.array_equal(found, index)
    assert np.array_equal(values, old[index])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)), max_size=20), max_size=6))
def test_rice_codes_round_trip_and_are_used_up(groups: list[list[int]]) -> None:
    values = np.array([n for group in groups for n in group], np.uint64)
    offsets = np.cumsum([0, *map(len, groups)]).astype(np.int64)
    ks, raw = rice.write(values, offsets)
    most = max(values.tolist(), default=0)
    assert np.array_equal(rice.read(raw, ks, offsets, np.uint64, most), values)
    coded = [(n, int(k)) for group, k in zip(groups, ks, strict=True) for n in group]
    used = sum((n >> k) + 1 + k if n >> k < rice.ESCAPE else rice.ESCAPE + 64 for n, k in coded)
    assert len(raw) == -(-used // 8)
    bad = [raw + b"\0", raw[:-1]] if raw else [b"\0"]
    bad += [raw[:-1] + bytes([raw[-1] | 1 << bit]) for bit in range(used % 8, 8) if used % 8]
    for data in bad:
        with pytest.raises(InvalidPatch):
            rice.read(data, ks, offsets, np.uint64, most)
    if most:
        with pytest.raises(InvalidPatch):
            rice.read(raw, ks, offsets, np.uint64, most - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=40), st.integers(0, 99))
def test_class_tables_round_trip_and_count_no_more_than_there_is(rows: list[tuple[int, int, int]], more: int) -> None:
    rows = sorted({row[0]: row for row in rows}.values())
    used, counts, column = np.array(rows, np.int64).reshape(-1, 3).T
    raw = memoryview(pack_table(used, counts, column))
    most = int(counts.sum()) + more
    cursor = varint.Cursor(raw)
    classes, many, columns = unpack_table(cursor, 301, most, columns=1)
    cursor.finish()
    assert np.array_equal(classes, used)
    assert np.array_equal(many, counts)
    assert np.array_equal(columns, column.reshape(1, -1))
    if rows:
        with pytest.raises(InvalidPatch):
            unpack_table(varint.Cursor(raw), 301, most - more - 1, columns=1)
        with pytest.raises(InvalidPatch):
            unpack_table(varint.Cursor(raw), int(used[-1]), most, columns=1)


def test_changed_names_shapes_and_dtypes_are_schema_changes() -> None:
    old: State = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float16)}
    changes: list[State] = [
        {"w": old["w"]},
        {**old, "c": old["b"]},
        {**old, "w": np.zeros((3, 2), np.float32)},
        {**old, "w": np.zeros((2, 3), np.float64)},
        {**old, "w": np.zeros((2, 3), np.int32)},
        {**old, "b": np.zeros(2, np.int16)},
    ]
    for new in changes:
        with pytest.raises(SchemaChanged, match="publish an anchor"):
            encode_delta(old, new)
    payload = encode_delta(old, {**old, "b": np.ones(2, np.float16)})
    others: list[State] = [{"w": old["w"]}, {**old, "w": np.zeros((3, 2), np.float32)}]
    for other in others:
        before = copied(other)
        with pytest.raises(SchemaChanged):
            apply_delta(other, payload)
        assert same_bits(other, before)


def test_ties_are_left_out_and_read_only_arrays_refused() -> None:
    w = np.arange(40, dtype=np.uint16)
    old: State = {"embed": w, "head": w}
    changed = w.copy()
    changed[7] = 9
    payload = encode_delta(old, {"embed": changed, "head": changed}, ties={"head": "embed"})
    state: State = {"embed": w.copy()}
    apply_delta(state, payload)
    assert np.array_equal(state["embed"], changed)
    frozen: State = {"embed": w.copy()}
    frozen["embed"].flags.writeable = False
    strided: State = {"embed": np.repeat(w, 2)[::2]}
    for bad in (frozen, strided):
        with pytest.raises(InvalidRequest, match="contiguous"):
            apply_delta(bad, payload)
        assert np.array_equal(bad["embed"], w)


def test_unknown_codecs_and_dtypes_are_refused() -> None:
    state: State = {"w": np.zeros(3, np.float32)}
    with pytest.raises(InvalidRequest, match="unknown codec"):
        encode_delta(state, state, "tightest")
    with pytest.raises(InvalidRequest, match="complex128"):
        state_digest({"w": np.zeros(3, np.complex128)})


# --- hostile payloads


def _sample(codec: str) -> tuple[dict[str, TensorSpec], State, State, bytes]:
    rng = np.random.default_rng(11)
    schema = {
        "a": TensorSpec("BF16", (40, 50)), "b": TensorSpec("F32", (600,)), "c": TensorSpec("BOOL", (9,)),
        "d": TensorSpec("I64", ()), "e": TensorSpec("F8_E4M3", (500,)), "f": TensorSpec("F64", (0,)),
    }  # fmt: skip
    old = random_state(rng, schema)
    new = edited(rng, old, schema, 0.05)
    new["d"] = old["d"] + 1
    payload = encode_delta(old, new, codec, schema, threads=1)
    return schema, old, new, payload


def _with_header(payload: bytes, name: str, value: object, field: str = "") -> bytes:
    """The payload with one header entry, or one field of it, replaced."""
    length = int.from_bytes(payload[:8], "little")
    header: dict[str, Any] = json.loads(payload[8 : 8 + length])
    if field:
        header[name][field] = value
    else:
        header[name] = value
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload[8 + length :]


def _streams(payload: bytes) -> tuple[dict[str, str], dict[str, tuple[TensorSpec, bytes]]]:
    metadata, entries = parse_header(payload, "test", InvalidPatch)
    return metadata, {n: (e.spec, payload[e.start : e.end]) for n, e in entries.items()}


def _stream_mutations(payload: bytes) -> Iterator[bytes]:
    """Every 64-bit field of the tables set to awkward numbers; whole streams cut, grown, swapped, dropped, doubled."""
    metadata, streams = _streams(payload)
    for name, (spec, data) in streams.items():
        if spec.width == 8:
            for at in range(0, len(data), 8):
                here = int.from_bytes(data[at : at + 8], "little")
                for value in (0, 1, here + 1, here - 1, here * 2, 2**31, 2**40, 2**63, 2**64 - 1):
                    if value % 2**64 != here:
                        changed = data[:at] + (value % 2**64).to_bytes(8, "little") + data[at + 8 :]
                        yield pack({**streams, name: (spec, changed)}, metadata)
        for size in {0, len(data) - spec.width, len(data) + spec.width, 2 * len(data)} - {len(data)}:
            changed = (data * 2)[:size] if data else bytes(size)
            yield pack({**streams, name: (TensorSpec(spec.dtype, (size // spec.width,)), changed)}, metadata)
        yield pack({n: s for n, s in streams.items() if n != name}, metadata)
        for other, (other_spec, other_data) in streams.items():
            if other != name and other_data != data:
                yield pack({**streams, name: (other_spec, other_data), other: (spec, data)}, metadata)
        yield pack({**streams, name: (spec, bytes(reversed(data)))}, metadata)
        yield pack({**streams, f"{name}x": (spec, data)}, metadata)


SHAPES = ([1] * 65, [0] * 70, [2**53, 2**53, 0], [2**53] * 40, [-1], [True], "x", None, [1.0], [2**70])
OFFSETS = ([0, 2**62], [5, 1], [-8, 8], [0], "x", None, [0.0, 8.0], [0, 0])
DTYPES: tuple[object, ...] = ("U8", "F64", "I4", "", None, [], {}, 7)
METADATA: tuple[object, ...] = (
    None,
    3,
    [],
    {},
    {"format": 1},
    {"format": "deltawire-delta-1"},
    {"format": "deltawire-delta-2"},
)


def _header_mutations(payload: bytes) -> Iterator[bytes]:
    for name in _streams(payload)[1]:
        for field, values in (("shape", SHAPES), ("data_offsets", OFFSETS), ("dtype", DTYPES)):
            for value in values:
                yield _with_header(payload, name, value, field)
        for value in (None, 3, [], "x", {}):
            yield _with_header(payload, name, value)
    for metadata in METADATA:
        yield _with_header(payload, "__metadata__", metadata)
    for text in (b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000, b"1" * 5_000, b'{"x": NaN}'):
        yield len(text).to_bytes(8, "little") + text + payload[-200:]
    for length in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield length.to_bytes(8, "little") + payload[8:]


def _byte_mutations(payload: bytes, count: int) -> Iterator[bytes]:
    rng = np.random.default_rng(3)
    for _ in range(count):
        changed = bytearray(payload)
        for at in rng.integers(0, len(payload), rng.choice([1, 1, 1, 3])):
            changed[at] ^= 1 << int(rng.integers(8))
        yield bytes(changed)
    for size in (*range(64), *np.sort(rng.integers(64, len(payload), 150)).tolist()):
        yield payload[:size]
    for extra in (b"\0", b"\0" * 8, payload):
        yield payload + extra
    for _ in range(60):
        a, b = sorted(rng.integers(0, len(payload), 2).tolist())
        yield payload[:a] + payload[b:]
        yield payload[:a] + payload[a:b] * 2 + payload[b:]


def _peak(payload: bytes, state: State, schema: dict[str, TensorSpec]) -> int:
    """The most memory that applying `payload` takes; nothing but a typed error may come of it."""
    tracemalloc.start()
    try:
        with suppress(DeltawireError):
            apply_delta(state, payload, schema, threads=1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS)
def test_hostile_payloads_give_a_typed_error_or_the_right_result_and_leave_the_state(codec: str) -> None:
    schema, old, new, payload = _sample(codec)
    state = copied(old)
    refused = accepted = 0
    for mutate in (_stream_mutations, _header_mutations, lambda p: _byte_mutations(p, 700)):
        for bad in mutate(payload):
            limit = 40 * len(bad) + 16 * sum(s.nbytes for s in schema.values()) + (1 << 20)
            if _peak(bad, state, schema) > limit:  # a kernel may have been compiled meanwhile
                assert _peak(bad, copied(old), schema) <= limit
            if same_bits(state, old):
                refused += 1
            else:  # the mutation says the same (a flipped bit of padding, a codec's name)
                accepted += 1
                assert same_bits(state, new)
                state = copied(old)
    assert refused >= 1_300
    assert accepted <= refused / 20


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_left_over_in_a_stream_is_refused(codec: str) -> None:
    schema, old, _, payload = _sample(codec)
    metadata, streams = _streams(payload)
    for name, (spec, data) in streams.items():
        if name not in ("table", "sums"):
            more = (TensorSpec(spec.dtype, (spec.size + 1,)), data + data[: spec.width])
            with pytest.raises(InvalidPatch, match=f"{name}.*too many"):
                decode_delta(pack({**streams, name: more}, metadata), old, schema)
    extra = (TensorSpec("I64", (1,)), bytes(8))
    with pytest.raises(InvalidPatch, match=r"index64.*too many"):
        decode_delta(pack({**streams, "index64": extra}, metadata), old, schema)


def _entry(mode: int, data: bytes, index: list[int], size: int = 1000) -> tuple[bytes, State]:
    """A payload of one entry of a BF16 tensor of zeros with changes at `index`; the sums of new bits are those of
    none."""
    schema = {"w": TensorSpec("BF16", (size,))}
    old = element_sums("w", np.array(index), np.zeros(len(index), np.uint16))
    streams: dict[str, tuple[TensorSpec, bytes | memoryview]] = {
        "table": (TensorSpec("I64", (1, 4)), np.array([0, mode, len(index), len(data)], "<i8").tobytes()),
        "sums": (TensorSpec("U64", (1, 4)), np.array([*old, 0, 0], "<u8").tobytes()),
        "data": (TensorSpec("U8", (len(data),)), data),
    }
    meta = {"format": "deltawire-delta-2", "codec": "fast", "schema": schema_digest(schema)}
    return pack(streams, meta), {"w": np.zeros(size, np.uint16)}


def _fast(gap_bytes: bytes, used: int, count: int, *, shift: int = 0, low: bytes = b"") -> tuple[bytes, State]:
    """One entry of gap bytes as given, in which every change goes one step up."""
    head = varint.pack([shift, used, len(gap_bytes)])
    return _entry(1, head + gap_bytes + low + bytes(-(-count // 8)) + varint.pack([0, 0]), list(range(count)))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    for frame, used in ((bomb, 256 << 20), (bomb, 10), (bomb, 13), (unknown, 13), (bomb, 2**62), (b"\0", 2**64 - 1)):
        payload, state = _fast(frame, used, 10)
        tracemalloc.start()
        try:
            with pytest.raises(InvalidPatch):
                apply_delta(state, payload, threads=1)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(payload) + (1 << 20)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("gap_bytes", "count", "text"),
    [
        (b"\xff\xff\xff\xff", 4, "gaps that do not give 4 indices below 1000"),
        (b"\xff\xff\xff\xeb", 1, "gaps that do not give 1 indices below 1000"),
        (b"\x01\x01\x01\xff", 3, "gaps that do not give 3"),
        (b"\x01\x01", 3, "2 gap bytes for 3 indices"),
        (b"\xff" * 4 + b"\x00" * 3, 3, "a table says 7 where at most 6"),
        (b"\x01" * 4, 3, "gaps that do not give 3"),
        (b"\xff" * 3 + b"\xea", 1, "decoded values fail|base differs"),
    ],
)
def test_gap_streams_out_of_range_are_refused(gap_bytes: bytes, count: int, text: str) -> None:
    payload, state = _fast(gap_bytes, len(gap_bytes), count)
    with pytest.raises((InvalidPatch, BaseMismatch), match=text):
        apply_delta(state, payload)
    assert not state["w"].any()


@pytest.mark.parametrize(
    ("low", "shift", "text"),
    [
        (b"\x01\x80", 5, "low bits of gaps that are not there"),
        (b"\x01\x20", 4, "low bits of gaps that are not there"),
        (b"\xff\xff\x00", 8, "gaps that do not give"),
        (b"\x01", 23, "at most 22"),
    ],
)
def test_low_bits_of_gaps_are_used_up_and_stay_in_range(low: bytes, shift: int, text: str) -> None:
    payload, state = _fast(b"\x01" * 3, 3, 3, shift=shift, low=low)
    with pytest.raises(InvalidPatch, match=text):
        apply_delta(state, payload)
    assert not state["w"].any()


@pytest.mark.parametrize("k", [33, 64, 127, 255])
def test_rice_parameters_beyond_the_format_are_refused(k: int) -> None:
    exceptions = varint.pack([1, 0, 1, 1, k, k, 8]) + b"\xff" * 8
    payload, state = _entry(1, varint.pack([0, 3, 3]) + b"\x01" * 3 + b"\0" + exceptions, [1, 3, 5])
    with pytest.raises(InvalidPatch, match="Rice codes"):
        apply_delta(state, payload)


@pytest.mark.parametrize("index", [[5, 5], [5, 4], [-1, 4], [4, 100], [4, 2**31 - 1], [-(2**31), 99]])
def test_raw_indices_out_of_order_or_range_are_refused(index: list[int]) -> None:
    schema = {"w": TensorSpec("BF16", (100,))}
    state: State = {"w": np.zeros(100, np.uint16)}
    values = np.array([1, 2], np.uint16)
    good = [i % 100 for i in index]
    old = element_sums("w", np.array(good), state["w"][good])
    sums = np.array([*old, *element_sums("w", np.array(index, np.int64), values)], "<u8")
    payload = pack(
        {
            "table": (TensorSpec("I64", (1, 4)), np.array([0, 0, 2, 0], "<i8").tobytes()),
            "sums": (TensorSpec("U64", (1, 4)), sums.tobytes()),
            "index": (TensorSpec("I32", (2,)), np.array(index, "<i4").tobytes()),
            "value2": (TensorSpec("U16", (2,)), values.tobytes()),
        },
        {"format": "deltawire-delta-2", "codec": "raw", "schema": schema_digest(schema)},
    )
    with pytest.raises(InvalidPatch, match="strictly increasing"):
        apply_delta(state, payload)
    with pytest.raises(InvalidPatch, match="strictly increasing"):
        decode_delta(payload, None, schema)
    assert not state["w"].any()


# --- the container is everyone's safetensors


@pytest.mark.parametrize("codec", CODECS)
def test_safetensors_opens_payloads_and_anchors(codec: str, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    schema, _, new, payload = _sample(codec)
    (tmp_path / "delta.safetensors").write_bytes(payload)
    metadata, entries = parse_header(payload, "delta")
    for framework in ("np", "pt"):
        with safe_open(tmp_path / "delta.safetensors", framework=framework) as file:
            assert file.metadata() == metadata
            assert set(file.keys()) == set(entries)
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                assert np.asarray(file.get_tensor(name)).tobytes() == view(payload, entries[name]).tobytes()
    schema = {n: s for n, s in schema.items() if s.dtype not in ("U16", "U32", "U64")}
    anchor = tmp_path / "model.safetensors"
    anchor.write_bytes(pack_state({n: new[n] for n in schema}, schema))
    with safe_open(anchor, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, spec in schema.items():
            tensor = file.get_tensor(name)
            assert tuple(tensor.shape) == spec.shape
            flat = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            assert flat == bits(new[name]).tobytes()
    mapped = MappedState(anchor)
    assert mapped.schema == schema
    assert same_bits(mapped.state, {n: bits(new[n]).reshape(schema[n].shape) for n in schema})
