"""The codec: bit for bit for any state, small for any density, and unmoved by hostile bytes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import State, edited, pairs, random_state, same_bits, schemas

from sync import apply_delta, decode_delta, encode_delta, state_digest
from sync.codec import CODECS, decode, diff, encode, patched
from sync.codec.streams import max_gap_bytes, pack_gaps, unpack_gaps
from sync.digest import ZERO, Sums, element_sums, state_sums
from sync.errors import BaseMismatch, DeltawireError, InvalidPatch, InvalidRequest, SchemaChanged
from sync.safetensors_io import MappedState, pack, pack_state, parse_header, view
from sync.tensors import TensorSpec, bits, schema_digest

pytestmark = pytest.mark.property
Pair = tuple[dict[str, TensorSpec], State, State]
codecs = st.sampled_from(CODECS)


def copied(state: State) -> State:
    return {name: array.copy() for name, array in state.items()}


@settings(max_examples=150, deadline=None)
@given(pairs(), codecs)
def test_round_trip_bit_for_bit(pair: Pair, codec: str) -> None:
    schema, old, new = pair
    before = copied(old)
    payload = encode_delta(old, new, codec, schema)
    assert same_bits(old, before)
    state = copied(old)
    apply_delta(state, payload, schema)
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


def test_fast_without_a_base_is_refused() -> None:
    old = {"w": np.zeros(1000, np.uint16)}
    new = {"w": old["w"].copy()}
    new["w"][3] = 5
    schema = {"w": ("BF16", (1000,))}
    with pytest.raises(BaseMismatch, match="none was given"):
        decode_delta(encode_delta(old, new, "fast"), None, schema)
    with pytest.raises(InvalidRequest, match="schema"):
        decode_delta(encode_delta(old, new, "raw"), None)


@settings(max_examples=80, deadline=None)
@given(pairs(), codecs)
def test_incremental_digest_equals_the_full_one(pair: Pair, codec: str) -> None:
    schema, old, new = pair
    patch = diff(old, new, schema)
    encoded = encode(patch, schema, codec, lambda n: patched(bits(old[n]), patch[n]), old)
    decoded = decode(encoded.data, schema, old)
    assert (decoded.removed, decoded.added) == (encoded.removed, encoded.added)
    moved = state_sums(old, schema).minus(encoded.removed).plus(encoded.added)
    assert moved.text() == state_digest(new, schema)
    assert (moved.text() == state_digest(old, schema)) == same_bits(old, new)
    assert Sums.parse(moved.text()) == moved


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
        flat[at] ^= np.array(1, flat.dtype)
        before = copied(wrong)
        with pytest.raises((BaseMismatch, InvalidPatch)) as caught:
            apply_delta(wrong, payload, schema)
        assert caught.type is BaseMismatch
        assert same_bits(wrong, before)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32), st.floats(0, 1))
def test_gaps_round_trip_within_their_bound(size: int, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    index = np.flatnonzero(rng.random(size) < density)
    raw = pack_gaps(index)
    assert len(raw) <= max_gap_bytes(len(index), size)
    assert np.array_equal(unpack_gaps(raw, len(index), size), index)


def test_many_tiny_tensors_stay_within_the_bound() -> None:
    rng = np.random.default_rng(5)
    for dtype, shape in (("BF16", (8,)), ("F32", ()), ("F64", (20,)), ("U8", (40,))):
        schema = {f"model.layers.{i}.self_attn.norm.weight": TensorSpec(dtype, shape) for i in range(400)}
        old = random_state(rng, schema, native=False)
        for density in (0.1, 1.0):
            new = edited(rng, old, schema, density)
            for codec in CODECS:
                payload = encode_delta(old, new, codec, schema)
                assert len(payload) <= len(pack_state(new, schema)) * 1.01 + 4096


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
    return schema, old, new, encode_delta(old, new, codec, schema)


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
    {"format": "deltawire-delta-2"},
    {"format": "deltawire-delta-1"},
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


@pytest.mark.parametrize("codec", CODECS)
def test_hostile_payloads_give_a_typed_error_or_the_right_result_and_leave_the_state(codec: str) -> None:
    schema, old, new, payload = _sample(codec)
    state = copied(old)
    refused = accepted = 0
    tracemalloc.start()
    try:
        for mutate in (_stream_mutations, _header_mutations, lambda p: _byte_mutations(p, 700)):
            for bad in mutate(payload):
                tracemalloc.reset_peak()
                held = tracemalloc.get_traced_memory()[0]
                try:
                    apply_delta(state, bad, schema)
                except DeltawireError:
                    refused += 1
                else:  # the mutation says the same (a flipped bit of padding, a codec's name)
                    accepted += 1
                    assert same_bits(state, new)
                    state = copied(old)
                peak = tracemalloc.get_traced_memory()[1] - held
                assert peak < 40 * len(bad) + 16 * sum(s.nbytes for s in schema.values()) + (1 << 20)
                assert same_bits(state, old)
    finally:
        tracemalloc.stop()
    assert refused >= 1_300
    assert accepted <= refused / 20


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_left_over_in_a_stream_is_refused(codec: str) -> None:
    schema, old, _, payload = _sample(codec)
    metadata, streams = _streams(payload)
    for name, (spec, data) in streams.items():
        if name not in ("entries", "sums"):
            more = (TensorSpec(spec.dtype, (spec.size + 1,)), data + data[: spec.width])
            with pytest.raises(InvalidPatch, match=f"{name}.*too many"):
                decode_delta(pack({**streams, name: more}, metadata), old, schema)
    extra = (TensorSpec("I64", (1,)), bytes(8))
    with pytest.raises(InvalidPatch, match=r"index64.*too many"):
        decode_delta(pack({**streams, "index64": extra}, metadata), old, schema)


def _fast_entry(gaps: bytes, raw_gaps: int, count: int, planes: list[bytes], size: int = 1000) -> tuple[bytes, State]:
    """A payload of one fast entry of a U16-wide tensor, every field as given."""
    schema = {"w": TensorSpec("BF16", (size,))}
    lens = np.array([raw_gaps, len(gaps), *map(len, planes)], "<i8").tobytes()
    data = b"".join([gaps, *planes])
    streams: dict[str, tuple[TensorSpec, bytes | memoryview]] = {
        "entries": (TensorSpec("I64", (1, 3)), np.array([0, 1, count], "<i8").tobytes()),
        "sums": (TensorSpec("U64", (1, 4)), bytes(32)),
        "lens": (TensorSpec("I64", (len(lens) // 8,)), lens),
        "data": (TensorSpec("U8", (len(data),)), data),
    }
    meta = {"format": "deltawire-delta-1", "codec": "fast", "schema": schema_digest(schema)}
    return pack(streams, meta), {"w": np.zeros(size, np.uint16)}


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    for gaps, raw in ((bomb, 256 << 20), (bomb, 10), (bomb, 1003), (unknown, 1003), (bomb, 2**62), (b"\0", -1)):
        payload, state = _fast_entry(gaps, raw, 10, [bytes(10), bytes(10)])
        tracemalloc.start()
        try:
            with pytest.raises(InvalidPatch):
                apply_delta(state, payload)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(payload) + (1 << 20)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("gaps", "count", "text"),
    [
        (b"\xff\xff\xff\xff", 4, "gap stream gives 0"),
        (b"\xff\xff\xff\xeb", 1, "index 1000 is outside"),
        (b"\x01\x01\x01\xff", 3, "gap stream gives 3"),
        (b"\xff" * 4 + b"\x00" * 3, 3, "cannot hold 3 indices"),
    ],
)
def test_gap_streams_out_of_range_are_refused(gaps: bytes, count: int, text: str) -> None:
    payload, state = _fast_entry(gaps, len(gaps), count, [bytes(count), bytes(count)])
    with pytest.raises(InvalidPatch, match=text):
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
            "entries": (TensorSpec("I64", (1, 3)), np.array([0, 0, 2], "<i8").tobytes()),
            "sums": (TensorSpec("U64", (1, 4)), sums.tobytes()),
            "index": (TensorSpec("I32", (2,)), np.array(index, "<i4").tobytes()),
            "value2": (TensorSpec("U16", (2,)), values.tobytes()),
        },
        {"format": "deltawire-delta-1", "codec": "raw", "schema": schema_digest(schema)},
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
