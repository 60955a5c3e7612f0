"""The codec over pieces and segments: small ones, so that small states have what large ones have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import State, divided, edited, pairs, placed, random_state, same_bits, schemas

from sync import apply_delta, encode_delta, state_digest
from sync.codec import CODECS, Encoded, Patch, compose, decode, diff, encode, join, reading, scatter
from sync.codec import patch as codec_patch
from sync.codec import payload as payload_
from sync.codec.payload import WHOLE
from sync.digest import ZERO, element_sums, moved, piece_sums, state_sums
from sync.errors import BaseMismatch, InvalidPatch, SchemaChanged
from sync.pieces import layout_of
from sync.safetensors_io import pack_state, parse_header, view
from sync.tensors import WIDTH, TensorSpec, bits

pytestmark = pytest.mark.property
Pair = tuple[dict[str, TensorSpec], State, State]
codecs = st.sampled_from(CODECS)
DIVISIONS = ((8, 2), (64, 32), (512, 128), (1 << 22, 1 << 12))
divisions = st.sampled_from(DIVISIONS)
limits = st.sampled_from([1, 300, 4000, 1 << 62])
threads_ = st.sampled_from([1, 2])


def copied(state: State) -> State:
    return {name: array.copy() for name, array in state.items()}


@contextmanager
def frozen(state: State) -> Iterator[State]:
    """The state as arrays that cannot be written."""
    found = {name: array.view() for name, array in state.items()}
    for array in found.values():
        array.flags.writeable = False
    yield found


def modes(encoded: Encoded) -> list[int]:
    """The mode of every entry."""
    found: list[int] = []
    for data in encoded.objects:
        entries = parse_header(data, "delta")[1]
        found += view(data, entries["table"]).view(np.int64).reshape(-1, 4)[:, 1].tolist()
    return found


def applied(
    encoded: Encoded, schema: dict[str, TensorSpec], old: State, *, threads: int = 1, wide: int = 2**31
) -> State:
    """What the objects together make of `old`, each decoded alone and checked against what `encoded` says."""
    patches: dict[str, Any] = {}
    change = np.zeros_like(encoded.change)
    for data in encoded.objects:
        decoded = decode(data, schema, old, threads=threads)
        patches = join(patches, decoded.patches)
        change += decoded.change
    assert np.array_equal(change, encoded.change)
    state = copied(old)
    for name, (index, values) in patches.items():
        if index is not None:
            assert bool((np.diff(index) > 0).all())
            assert index.dtype == (np.int32 if schema[name].size < wide else np.int64)
        scatter(state[name], index, values)
    return state


@settings(max_examples=200, deadline=None)
@given(pairs(), codecs, divisions, limits, threads_, st.booleans())
def test_any_division_limit_and_threads_give_the_same_bits_and_sums(
    pair: Pair, codec: str, division: tuple[int, int], limit: int, threads: int, sparse: bool
) -> None:
    schema, old, new = pair
    with divided(*division, batch=20):
        changed = diff(old, new, schema, threads=threads)
        encoded = encode(changed, schema, codec, old, limit=limit, sparse=sparse, threads=threads)
        assert same_bits(applied(encoded, schema, old, threads=threads), new)
        assert WHOLE not in modes(encoded) or not sparse
        before = piece_sums(old, schema, threads=threads)
        assert np.array_equal(before + encoded.change, piece_sums(new, schema, threads=threads))
        assert len(layout_of(schema).pieces) == len(before)
        payload = encode_delta(old, new, codec, schema, threads=threads)
        state = copied(old)
        apply_delta(state, payload, schema, threads=threads)
        assert same_bits(state, new)
        assert len(payload) <= 1.01 * len(pack_state(new, schema)) + 4096 + 64 * len(layout_of(schema).segments)


@settings(max_examples=30, deadline=None)
@given(pairs(), codecs, divisions, limits)
def test_tensors_of_many_elements_have_wide_indices(
    pair: Pair, codec: str, division: tuple[int, int], limit: int
) -> None:
    schema, old, new = pair
    with ExitStack() as stack:
        stack.enter_context(divided(*division))
        for module in (codec_patch, payload_, reading):
            stack.enter_context(patch.object(module, "MAX_INT32", 50))
        encoded = encode(diff(old, new, schema), schema, codec, old, limit=limit)
        assert same_bits(applied(encoded, schema, old, wide=50), new)


@pytest.mark.parametrize("codec", CODECS)
def test_states_larger_than_a_segment(codec: str) -> None:
    schema = {"a": TensorSpec("BF16", (3000, 3000)), "b": TensorSpec("F32", (100,)), "c": TensorSpec("BF16", (9,))}
    rng = np.random.default_rng(7)
    old = {n: rng.integers(0, 2 ** (8 * s.width), s.shape, np.uint64).astype(f"u{s.width}") for n, s in schema.items()}
    new = copied(old)
    flat = new["a"].reshape(-1)
    flat[rng.random(flat.size) < 0.01] ^= 1
    flat[4_000_000:4_600_000] = 7
    new["b"][3] += 9
    encoded = encode(diff(old, new, schema, threads=2), schema, codec, old, threads=2)
    assert same_bits(applied(encoded, schema, old, threads=2), new)
    assert len(layout_of(schema).segments) == 4
    assert np.array_equal(piece_sums(old, schema) + encoded.change, piece_sums(new, schema))
    wrong = copied(old)
    wrong["a"].reshape(-1)[int(np.flatnonzero(bits(old["a"]) != flat)[-1])] ^= 1 << 14
    with pytest.raises(BaseMismatch):
        apply_delta(wrong, encoded.objects[0], schema, threads=2)


@settings(max_examples=60, deadline=None)
@given(schemas(), st.integers(0, 2**32), divisions, threads_)
def test_the_digest_knows_nothing_of_pieces(
    schema: dict[str, TensorSpec], seed: int, division: tuple[int, int], threads: int
) -> None:
    state = random_state(np.random.default_rng(seed), schema)
    whole = state_digest(state, schema, threads=1)
    with divided(*division, batch=10):
        assert state_digest(state, schema, threads=threads) == whole
        assert sum(piece.size for piece in layout_of(schema).pieces) == sum(spec.size for spec in schema.values())
        for name, spec in schema.items():
            parts = ZERO
            for piece in layout_of(schema).pieces:
                if piece.name == name:
                    flat = bits(state[name])[piece.start : piece.stop]
                    parts = parts.plus(element_sums(name, None, flat, start=piece.start))
            assert parts == element_sums(name, np.arange(spec.size), bits(state[name]))


@settings(max_examples=60, deadline=None)
@given(schemas(), divisions)
def test_a_layout_covers_every_element_once_in_segments_of_one_dtype(
    schema: dict[str, TensorSpec], division: tuple[int, int]
) -> None:
    with divided(*division):
        layout = layout_of(schema)
    seen: dict[str, int] = {}
    for piece in layout.pieces:
        assert seen.get(piece.name, 0) == piece.start < piece.stop
        assert piece.size <= division[0]
        seen[piece.name] = piece.stop
    assert seen == {name: spec.size for name, spec in schema.items() if spec.size}
    for segments in (layout.segments, layout.tensors):
        assert [piece for segment in segments for piece in segment.pieces] == list(layout.pieces)
        for segment in segments:
            assert layout.pieces[segment.first] == segment.pieces[0]
            assert {schema[piece.name].dtype for piece in segment.pieces} == {segment.dtype}
            assert segment.ends.tolist() == np.cumsum([piece.size for piece in segment.pieces]).tolist()
            assert segment.size == segment.ends[-1]
    assert all(segment.size <= division[0] for segment in layout.segments)
    assert all(len({piece.name for piece in segment.pieces}) == 1 for segment in layout.tensors)


@pytest.mark.parametrize("codec", ["fast", "tight"])
def test_pieces_sent_whole_stand_beside_sparse_ones_of_the_same_tensor(codec: str) -> None:
    schema = {"a": TensorSpec("BF16", (700,)), "b": TensorSpec("BF16", (5,)), "c": TensorSpec("F32", (90,))}
    rng = np.random.default_rng(4)
    with divided(128, 32):
        old = random_state(rng, schema, native=False)
        new = copied(old)
        new["a"][:128] = rng.integers(0, 2**16, 128, np.uint16)
        new["a"][130::90] ^= 1
        new["c"][:] = rng.integers(0, 2**32, 90, np.uint32)
        encoded = encode(diff(old, new, schema), schema, codec, old)
        assert set(modes(encoded)) == {WHOLE, CODECS.index(codec)}
        assert same_bits(applied(encoded, schema, old), new)
        index, values = decode(encoded.objects[0], schema, old).patches["a"]
        assert index is not None
        assert index[:117].tolist() == list(range(117))  # as far as the first piece
        assert np.array_equal(values, new["a"][index])
        assert decode(encoded.objects[0], schema, old).patches["c"][0] is None


@settings(max_examples=60, deadline=None)
@given(pairs(), divisions, limits, st.integers(2, 4), st.integers(0, 2**32))
def test_a_composed_patch_does_what_its_parts_do_one_after_the_other(
    pair: Pair, division: tuple[int, int], limit: int, steps: int, seed: int
) -> None:
    schema, old, last = pair
    rng = np.random.default_rng(seed)
    states = [old, *(edited(rng, old, schema, d) for d in rng.choice([0.0, 0.01, 0.2], steps - 1)), last]
    with divided(*division, batch=20):
        whole: Patch = {}
        for one, other in pairwise(states):
            for name, part in diff(one, other, schema).items():
                whole[name] = compose(whole[name], part) if name in whole else part
        direct = diff(old, last, schema)
        assert {n for n, p in whole.items() if len(p.index)} == direct.keys()
        for name, part in direct.items():
            for field in ("index", "old", "new"):
                assert np.array_equal(getattr(whole[name], field), getattr(part, field))
        encoded = encode(whole, schema, "fast", {}, sparse=True, limit=limit)
        assert same_bits(applied(encoded, schema, old), last)
        assert moved(state_sums(old, schema), encoded.change) == state_sums(last, schema)


@settings(max_examples=80, deadline=None)
@given(pairs(), codecs, divisions, st.booleans())
def test_arrays_at_odd_addresses_read_only_or_strided_are_read_as_any_other(
    pair: Pair, codec: str, division: tuple[int, int], odd: bool
) -> None:
    schema, old, new = pair
    with divided(*division):
        payload = encode_delta(old, new, codec, schema)
        there, buffer = placed(old, odd=odd)
        assert not odd or all(a.size == 0 or a.ctypes.data % 8 == 1 for a in there.values())
        goal, _ = placed(new, odd=not odd)
        strided = {
            n: np.stack([a, a])[0] if a.ndim == 0 else np.repeat(a, 2, axis=-1)[..., ::2] for n, a in new.items()
        }
        with frozen(there) as locked, frozen(goal) as target:
            assert encode_delta(locked, target, codec, schema) == payload
            assert encode_delta(old, strided, codec, schema) == payload
            decoded = decode(payload, schema, locked)
            assert state_digest(locked, schema) == state_digest(old, schema)
        held = bytes(buffer)
        outcome = {name: array.copy() for name, array in there.items()}
        for name, (index, values) in decoded.patches.items():
            scatter(outcome[name], index, values)
        assert same_bits({n: bits(a) for n, a in outcome.items()}, {n: bits(a) for n, a in new.items()})
        assert bytes(buffer) == held
        apply_delta(there, payload, schema)
        assert same_bits(there, outcome)


@pytest.mark.parametrize("dtype", sorted(WIDTH))
@pytest.mark.parametrize("codec", CODECS)
def test_no_density_makes_a_payload_larger_than_the_state(dtype: str, codec: str) -> None:
    rng = np.random.default_rng(8)
    many = {f"model.layers.{i}.self_attn.norm.weight": TensorSpec(dtype, (8,)) for i in range(300)}
    shapes: list[dict[str, TensorSpec]] = [
        {"w": TensorSpec(dtype, ())}, {"w": TensorSpec(dtype, (3,))}, {"w": TensorSpec(dtype, (70_001,))}, many,
    ]  # fmt: skip
    for schema in shapes:
        old = random_state(rng, schema)
        full = len(pack_state(old, schema))
        for density in (0.0, 0.0005, 0.3, 1.0):
            new = edited(rng, old, schema, density)
            payload = encode_delta(old, new, codec, schema)
            assert len(payload) <= full * 1.01 + 4096
            state = copied(old)
            apply_delta(state, payload, schema)
            assert same_bits(state, new)


@settings(max_examples=80, deadline=None)
@given(pairs(), codecs, divisions, st.integers(0, 2**32))
def test_another_base_at_a_touched_place_is_a_mismatch_whatever_differs(
    pair: Pair, codec: str, division: tuple[int, int], seed: int
) -> None:
    schema, old, new = pair
    rng = np.random.default_rng(seed)
    with divided(*division):
        payload = encode_delta(old, new, codec, schema)
        wrong = copied(old)
        for name, part in diff(old, new, schema).items():
            flat = wrong[name].reshape(-1).view(part.old.dtype)
            at = part.index[rng.integers(len(part.index), size=rng.integers(1, 4))]
            flat[at] = ~part.old[np.searchsorted(part.index, at)] if rng.random() < 0.5 else flat[at] ^ 1
            before = copied(wrong)
            with pytest.raises(BaseMismatch):
                apply_delta(wrong, payload, schema)
            assert same_bits(wrong, before)


@pytest.mark.parametrize("codec", CODECS)
def test_exchanged_elements_and_missing_tensors_are_refused(codec: str) -> None:
    rng = np.random.default_rng(2)
    schema = {"a": TensorSpec("BF16", (40, 25)), "b": TensorSpec("F32", (900,))}
    old = random_state(rng, schema)
    new = edited(rng, old, schema, 0.05)
    payload = encode_delta(old, new, codec, schema)
    for name, part in diff(old, new, schema).items():
        swapped = copied(old)
        flat = swapped[name].reshape(-1)
        one = int(part.index[0])
        other = next(int(i) for i in part.index if bits(old[name])[i] != bits(old[name])[one])
        flat[[one, other]] = flat[[other, one]]
        before = copied(swapped)
        with pytest.raises(BaseMismatch):
            apply_delta(swapped, payload, schema)
        assert same_bits(swapped, before)
    with pytest.raises(SchemaChanged):
        apply_delta({"a": old["a"].copy()}, payload)
    with pytest.raises(SchemaChanged):
        apply_delta({"a": old["a"].copy()}, payload, schema)


@pytest.mark.parametrize("codec", CODECS)
def test_a_base_of_another_size_is_refused_before_a_kernel_reads_it(codec: str) -> None:
    rng = np.random.default_rng(2)
    schema = {"a": TensorSpec("BF16", (400,)), "b": TensorSpec("BF16", (60,))}
    old = random_state(rng, schema)
    (payload,) = encode(diff(old, edited(rng, old, schema, 0.1), schema), schema, codec, old).objects
    short, wide = {**old, "b": old["b"][:20]}, {**old, "b": old["b"].astype(np.uint32)}
    for base in (short, wide, {"a": old["a"]}, {**old, "c": old["b"]}):
        with pytest.raises(SchemaChanged):
            decode(payload, schema, base)


@pytest.mark.parametrize("codec", CODECS)
def test_objects_of_one_version_twice_or_out_of_order_are_refused(codec: str) -> None:
    rng = np.random.default_rng(6)
    schema = {"w": TensorSpec("BF16", (4000,))}
    with divided(512, 128):
        old = random_state(rng, schema)
        encoded = encode(diff(old, edited(rng, old, schema, 0.05), schema), schema, codec, old, limit=100)
        assert len(encoded.objects) > 3
        parts = [decode(data, schema, old).patches for data in encoded.objects]
        joined = join(parts[0], parts[1])
        for wrong in (parts[0], parts[1]):
            with pytest.raises(InvalidPatch, match="twice"):
                join(joined, wrong)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("limit", [1, 2000, 1 << 62])
def test_safetensors_opens_every_object(codec: str, limit: int, tmp_path: Path) -> None:
    from safetensors import safe_open

    rng = np.random.default_rng(3)
    schema = {f"layers.{i}": TensorSpec(dtype, (300,)) for i, dtype in enumerate(sorted(WIDTH))}
    with divided(256, 64):
        old = random_state(rng, schema)
        new = edited(rng, old, schema, 0.2)
        encoded = encode(diff(old, new, schema), schema, codec, old, limit=limit)
        assert same_bits(applied(encoded, schema, old), new)
    assert limit > 2000 or len(encoded.objects) > 1
    for data in encoded.objects:
        (tmp_path / "delta.safetensors").write_bytes(data)
        metadata, entries = parse_header(data, "delta")
        with safe_open(tmp_path / "delta.safetensors", framework="np") as file:
            assert file.metadata() == metadata
            assert set(file.keys()) == set(entries)
            for name, entry in entries.items():
                assert file.get_tensor(name).tobytes() == view(data, entry).tobytes()


FORKED = """
import os, sys
import numpy as np
from support.states import divided, edited, random_state, same_bits
from sync import apply_delta, encode_delta, state_digest
from sync.tensors import TensorSpec

rng = np.random.default_rng(0)
schema = {f"layers.{i}": TensorSpec("BF16", (300,)) for i in range(20)}
old = random_state(rng, schema, native=False)
new = edited(rng, old, schema, 0.1)
with divided(128, 32, batch=200):
    payload = encode_delta(old, new, sys.argv[1], schema, threads=2)  # starts the threads
    child = os.fork()
    state = {name: array.copy() for name, array in old.items()}
    apply_delta(state, payload, schema, threads=2)
    good = same_bits(state, new) and encode_delta(old, new, sys.argv[1], schema, threads=2) == payload
    good = good and state_digest(state, schema, threads=2) == state_digest(new, schema, threads=1)
    if child:
        good = os.waitpid(child, 0)[1] == 0 and good
sys.exit(0 if good else 1)
"""


@pytest.mark.parametrize("codec", CODECS)
def test_a_forked_child_decodes_though_its_parent_had_threads(codec: str) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tests.parent), str(tests)))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, codec],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("batch", [None, 100])
def test_an_error_in_a_thread_reaches_the_caller_and_leaves_the_state(batch: int | None) -> None:
    rng = np.random.default_rng(1)
    schema = {f"layers.{i}": TensorSpec("BF16", (300,)) for i in range(20)}
    with divided(128, 32, batch=batch) if batch else nullcontext():
        old = random_state(rng, schema, native=False)
        payload = encode_delta(old, edited(rng, old, schema, 0.2), "fast", schema, threads=2)
        old["layers.13"] ^= 1
        before = copied(old)
        with pytest.raises(BaseMismatch):
            apply_delta(old, payload, schema, threads=2)
        assert same_bits(old, before)
