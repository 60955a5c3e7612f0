"""The difference found by torch, against the one found by numpy, on CPU tensors: any dtype, layout and density."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.states import State, edited, pairs, random_bits, random_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sync.codec import TensorPatch, changes, diff
from sync.digest import state_digest
from sync.errors import BaseMismatch, InvalidRequest, SchemaChanged
from sync.tensors import EXPONENT_SHIFT, WIDTH, Bits, Schema, TensorSpec, bits, unsigned
from trainer_node import device_diff as dd
from trainer_node.device_diff import (
    TORCH,
    DeviceBase,
    UlpCounts,
    changed,
    device_diff,
    distances,
    global_index,
    ulp_counts,
)
from trainer_node.model import published_bits

pytestmark = pytest.mark.unit
Pair = tuple[dict[str, TensorSpec], State, State]
LAYOUTS = ("contiguous", "transposed", "every second", "reversed axes of a slice")
CPU = torch.device("cpu")


def tensor_of(array: NDArray[Any], spec: TensorSpec) -> Tensor:
    raw = bits(array).copy().view(f"i{spec.width}")
    return torch.from_numpy(raw).view(TORCH[spec.dtype]).reshape(spec.shape)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same elements, shape and dtype with other strides."""
    if layout == "contiguous" or tensor.ndim == 0:
        return tensor
    if layout == "transposed":
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    if layout == "every second":
        room = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        room[..., ::2] = tensor
        return room[..., ::2]
    axes = tuple(reversed(range(tensor.ndim)))
    room = torch.zeros([n + 1 for n in reversed(tensor.shape)], dtype=tensor.dtype)[tuple([slice(1, None)] * len(axes))]
    room.copy_(tensor.permute(axes))
    return room.permute(axes)


def tensors_of(state: State, schema: Schema, layout: str = "contiguous") -> dict[str, Tensor]:
    return {name: laid_out(tensor_of(state[name], spec), layout) for name, spec in schema.items()}


def assert_same(found: TensorPatch, wanted: TensorPatch) -> None:
    for field in ("index", "old", "new"):
        one, other = getattr(found, field), getattr(wanted, field)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other), field


def assert_same_patches(found: Iterator[tuple[str, TensorPatch]], wanted: Iterator[tuple[str, TensorPatch]]) -> None:
    for (name, one), (other_name, other) in zip(found, wanted, strict=True):
        assert name == other_name
        assert_same(one, other)


@pytest.fixture(params=[1, 5, 64, dd.BLOCK])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(dd, "BLOCK", request.param)
    size: int = request.param
    return size


# --- the difference


@pytest.mark.property
@settings(max_examples=200, deadline=None)
@given(pairs(), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from([1, 5, 64, dd.BLOCK]))
def test_the_difference_is_the_one_numpy_finds(pair: Pair, one: str, other: str, size: int) -> None:
    schema, old, new = pair
    before, after = tensors_of(old, schema, one), tensors_of(new, schema, other)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(dd, "BLOCK", size)
        assert_same_patches(device_diff(before, after), changes(old, new, schema))
        wanted = diff(old, new, schema)
        for name, spec in schema.items():
            none = np.empty(0, unsigned(spec.width))
            whole = wanted.get(name, TensorPatch(np.empty(0, np.int32), none, none))
            assert_same(changed(before[name], after[name]), whole)


def test_every_dtype_of_the_wire_is_compared() -> None:
    assert TORCH.keys() == WIDTH.keys()
    rng = np.random.default_rng(3)
    schema = {f"{dtype}.w": TensorSpec(dtype, (9, 4)) for dtype in WIDTH}
    old = random_state(rng, schema, native=False)
    new = {name: array ^ np.array(1, array.dtype) for name, array in old.items()}
    found = dict(device_diff(tensors_of(old, schema), tensors_of(new, schema)))
    assert found.keys() == schema.keys()
    assert all(len(patch.index) == 36 for patch in found.values())


def test_bits_are_compared_and_not_values() -> None:
    old = torch.tensor([0x7F800001, 0x00000000, 0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    new = torch.tensor([0x7F800002, -0x80000000, 0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    patch = changed(old, new)
    assert patch.index.tolist() == [0, 1]
    assert patch.old.tolist() == [0x7F800001, 0]
    assert patch.new.tolist() == [0x7F800002, 0x80000000]


def test_lazily_conjugated_and_negated_tensors_are_compared_as_what_they_are() -> None:
    values = torch.tensor([1 + 2j, 3 - 0.5j, -1 + 1j], dtype=torch.complex64)
    assert values.conj().is_conj()
    assert_same(changed(values, values.conj()), changed(values, values.conj().resolve_conj().clone()))
    imaginary = values.conj().imag
    assert imaginary.is_neg()
    assert_same(changed(values.imag, imaginary), changed(values.imag.clone(), imaginary.resolve_neg().clone()))


def test_trained_parameters_are_compared_without_their_graph() -> None:
    old, new = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    assert changed(old, new).index.tolist() == [0, 1, 2, 3]


def test_indices_of_giant_tensors_have_64_bits() -> None:
    rows, row = 512, 1 << 22
    old, new = torch.zeros(row, dtype=torch.int8), torch.zeros(row, dtype=torch.int8)
    new[row - 1] = 3
    patch = changed(old.expand(rows, row), new.expand(rows, row))  # 2^31 elements in 4 MiB
    assert patch.index.dtype == np.int64
    assert np.array_equal(patch.index, np.arange(1, rows + 1) * row - 1)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements of any memory that an operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        self.operations += 1
        return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(40_000,), (7, 5_000), (3, 2, 6_001), (1_000, 40), (1, 1, 40_000), (10, 10, 10, 40)])
@pytest.mark.parametrize("master", [True, False])
def test_no_operation_makes_more_than_a_block(
    shape: tuple[int, ...], layout: str, master: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dd, "BLOCK", 1024)
    rng = np.random.default_rng(5)
    new = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    old = new.to(torch.bfloat16) if master else new.clone()
    new = laid_out(new * torch.from_numpy((1 + (rng.random(shape) < 0.3)).astype(np.float32)), layout)
    with Largest() as seen:
        patch = changed(old, new)
        counts = ulp_counts({"": old}, {"": new})
    assert seen.operations > 10
    assert seen.elements <= 1024
    assert counts.changed == len(patch.index) > 0.2 * new.numel()


# --- masters


def test_masters_are_rounded_to_nearest_even() -> None:
    ulp = 2.0**-7  # of bf16 at 1
    masters = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2**-20, 1 + ulp / 2 - 2**-20, -1 - ulp / 2])
    old = torch.zeros(5, dtype=torch.bfloat16)
    patch = changed(old, masters)
    assert patch.new.dtype == np.uint16
    assert patch.new.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]


@pytest.mark.property
@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32), st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), st.sampled_from(LAYOUTS),
    st.sampled_from([1, 5, 64, dd.BLOCK]), st.sampled_from([0.0, 0.02, 0.5]),
)  # fmt: skip
def test_masters_are_published_as_the_host_path_publishes_them(
    seed: int, shape: tuple[int, ...], layout: str, size: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    schema = {"w": TensorSpec("F32", shape), "n": TensorSpec("I32", shape)}
    old = random_state(rng, schema)
    new = edited(rng, old, schema, share)
    for state in (old, new):
        state["w"] = np.where(np.isnan(state["w"]), np.float32(0.5), state["w"])  # torch decides the bits of these
    masters = [tensors_of(state, schema, layout) for state in (old, new)]
    held = {name: t.to(torch.bfloat16) if t.dtype == torch.float32 else t for name, t in masters[0].items()}
    wire = {"w": TensorSpec("BF16", shape), "n": TensorSpec("I32", shape)}
    wanted = changes(published_bits(masters[0]), published_bits(masters[1]), wire)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(dd, "BLOCK", size)
        assert_same_patches(device_diff(held, masters[1]), wanted)


def test_a_nan_in_a_master_stays_a_nan() -> None:
    patch = changed(torch.zeros(2, dtype=torch.bfloat16), torch.tensor([float("nan"), 0.0]))
    assert patch.index.tolist() == [0]
    assert int(patch.new[0]) & 0x7FFF > 0x7F80


# --- what does not fit


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"a": torch.zeros(3)}, r"tensor names differ from the base's, first 'b' of 1; publish an anchor"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "first 'c' of 1"),
        ({"a": torch.zeros(3, 1), "b": torch.zeros(2)}, r"tensor 'a' is float32\[3, 1\], the base has F32\[3\]"),
        ({"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2)}, r"float64\[3\], the base has F32\[3\]"),
        ({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float16)}, r"float16\[2\], the base has BF16\[2\]"),
        ({"a": torch.zeros(3, dtype=torch.complex128), "b": torch.zeros(2)}, r"'a' is complex128\[3\]"),
    ],
)  # fmt: skip
def test_other_tensors_are_a_change_of_schema(new: Mapping[str, Tensor], message: str) -> None:
    old = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(SchemaChanged, match=message):
        device_diff(old, new)  # at the call, before anything is read
    with pytest.raises(SchemaChanged, match=message):
        ulp_counts(old, new)


def test_casts_are_only_those_that_are_allowed() -> None:
    old, new = {"a": torch.zeros(3, dtype=torch.float16)}, {"a": torch.ones(3)}
    with pytest.raises(SchemaChanged, match="float32"):
        device_diff(old, new)
    found = dict(device_diff(old, new, cast=[(torch.float32, torch.float16)]))
    assert found["a"].new.tolist() == [0x3C00] * 3
    with pytest.raises(SchemaChanged, match="float32"):
        device_diff({"a": torch.zeros(3, dtype=torch.bfloat16)}, new, cast=())
    with pytest.raises(SchemaChanged, match="bfloat16"):  # never back: fp32 on the wire stays fp32
        device_diff({"a": torch.zeros(3)}, {"a": torch.zeros(3, dtype=torch.bfloat16)})


def test_a_dtype_that_nobody_can_carry_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a' has dtype complex128"):
        device_diff({"a": torch.zeros(1, dtype=torch.complex128)}, {"a": torch.zeros(1, dtype=torch.complex128)})


# --- distances


def line(raw: Bits, dtype: str) -> list[int]:
    """Where bit patterns lie on the line, as Python integers, by the definition of sign and magnitude."""
    if dtype not in EXPONENT_SHIFT:
        return [int(b) for b in raw]
    sign = 1 << (8 * WIDTH[dtype] - 1)
    return [int(b) if b < sign else sign - 1 - int(b) for b in raw.tolist()]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_neighbours_in_value_are_one_ulp_apart(dtype: str) -> None:
    width = WIDTH[dtype]
    every = torch.arange(2 ** (8 * width), dtype=torch.int64).to({1: torch.uint8, 2: torch.int16}[width])
    values = every.view(TORCH[dtype])
    number, negative = values.to(torch.float64), torch.signbit(values.to(torch.float64))
    finite = torch.isfinite(number)
    order = sorted(torch.nonzero(finite).view(-1).tolist(), key=lambda i: (float(number[i]), not negative[i]))
    ordered = every[torch.tensor(order)].view(TORCH[dtype])
    steps = distances(ordered[:-1], ordered[1:])
    assert len(order) > 100
    assert bool((steps == 1).all())
    assert bool((distances(ordered[1:], ordered[:-1]) == -1).all())


@pytest.mark.property
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(WIDTH)), st.integers(0, 2**32), st.sampled_from(LAYOUTS))
def test_distances_are_those_of_the_line_mod_2_to_the_width(dtype: str, seed: int, layout: str) -> None:
    spec, top = TensorSpec(dtype, (5, 8)), 1 << (8 * WIDTH[dtype] - 1)
    rng = np.random.default_rng(seed)
    old, new = random_bits(rng, spec, 40), random_bits(rng, spec, 40)
    found = distances(laid_out(tensor_of(old, spec), layout), tensor_of(new, spec))
    assert found.shape == (5, 8)
    assert found.element_size() == spec.width
    wanted = [(b - a + top) % (2 * top) - top for a, b in zip(line(old, dtype), line(new, dtype), strict=True)]
    assert found.reshape(-1).tolist() == wanted


def bf16(*patterns: int) -> Tensor:
    return torch.from_numpy(np.array(patterns, np.uint16).view(np.int16)).view(torch.bfloat16)


def test_ulp_counts_of_a_hand_worked_state(block: int) -> None:
    old = {
        "w": bf16(0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x0000, 0x0001, 0x3F80),
        "m": torch.zeros(3, dtype=torch.int32),
    }
    new = {
        "w": bf16(0x3F80, 0x3F81, 0x3F7F, 0x3F82, 0x3F83, 0x3F79, 0x3F88, 0x8000, 0x8001, 0xBF80),
        "m": torch.ones(3, dtype=torch.int32),
    }
    # same, +1, -1, +2, +3, -7, +8, -1 over zero, -3 over zero, far over zero; integers are not counted
    assert ulp_counts(old, new) == UlpCounts(10, 9, one=3, two=1, three_to_seven=3, eight_or_more=2, crossings=3)
    assert ulp_counts({}, {}) == UlpCounts(0, 0, 0, 0, 0, 0, 0)


@pytest.mark.property
@settings(max_examples=100, deadline=None)
@given(pairs(), st.sampled_from([1, 64, dd.BLOCK]))
def test_ulp_counts_are_the_sums_over_what_changed(pair: Pair, size: int) -> None:
    schema, old, new = pair
    sizes: list[int] = []
    crossings = 0
    for name, patch in diff(old, new, schema).items():
        spec = schema[name]
        if spec.dtype in EXPONENT_SHIFT:
            modulus = 1 << (8 * spec.width)
            steps = zip(line(patch.old, spec.dtype), line(patch.new, spec.dtype), strict=True)
            sizes += [min((b - a) % modulus, (a - b) % modulus) for a, b in steps]
            crossings += int(((patch.old ^ patch.new) >> np.array(8 * spec.width - 1, patch.old.dtype)).sum())
    elements = sum(spec.size for spec in schema.values() if spec.dtype in EXPONENT_SHIFT)
    found = sizes.count
    few, many = sum(3 <= n <= 7 for n in sizes), sum(n >= 8 for n in sizes)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(dd, "BLOCK", size)
        counts = ulp_counts(tensors_of(old, schema), tensors_of(new, schema, "every second"))
    assert counts == UlpCounts(elements, len(sizes), found(1), found(2), few, many, crossings)


# --- the committed state


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(0, 2**32), st.booleans(), st.sampled_from([1, 64, dd.BLOCK]))
def test_the_base_goes_where_the_patches_lead(pair: Pair, seed: int, on_host: bool, size: int) -> None:
    schema, first, second = pair
    third = edited(np.random.default_rng(seed), second, schema, 0.1)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(dd, "BLOCK", size)
        base = DeviceBase(first, schema, CPU, on_host=on_host)
        for old, new in ((first, second), (second, third)):
            assert base.matches(state_digest(old, schema))
            tensors = tensors_of(new, schema)
            patch = dict(base.diff(tensors))
            assert_same_patches(iter(patch.items()), changes(old, new, schema))
            assert base.matches(state_digest(old, schema))  # a difference moves nothing (I7)
            base.advance(patch)
            assert base.matches(state_digest(new, schema))
            assert not patch or not base.matches(state_digest(old, schema))
            assert list(base.diff(tensors)) == []


def small_base() -> tuple[DeviceBase, State, Schema]:
    schema = {"a": TensorSpec("BF16", (6,)), "b": TensorSpec("F32", (2, 2))}
    state = random_state(np.random.default_rng(1), schema, native=False)
    return DeviceBase(state, schema, CPU), state, schema


def one_change(state: State, name: str, at: int) -> TensorPatch:
    old = bits(state[name])[[at]]
    return TensorPatch(np.array([at], np.int32), old, old ^ np.array(1, old.dtype))


def test_the_base_is_a_copy() -> None:
    base, state, schema = small_base()
    digest = state_digest(state, schema)
    state["a"][2] ^= 1
    assert base.matches(digest)
    assert not base.matches(state_digest(state, schema))


def test_the_base_takes_arrays_that_may_not_be_written() -> None:
    _, state, schema = small_base()
    for array in state.values():
        array.flags.writeable = False
    assert DeviceBase(state, schema, CPU).matches(state_digest(state, schema))


@pytest.mark.parametrize("wrong", ["old bits", "place", "negative place", "name", "width"])
def test_a_patch_of_another_state_changes_nothing(wrong: str) -> None:
    base, state, schema = small_base()
    good, bad = one_change(state, "a", 1), one_change(state, "b", 3)
    name = "c" if wrong == "name" else "b"
    if wrong == "old bits":
        bad = TensorPatch(bad.index, bad.old ^ np.uint32(4), bad.new)
    elif wrong == "place":
        bad = TensorPatch(np.array([4], np.int32), bad.old, bad.new)
    elif wrong == "negative place":
        bad = TensorPatch(np.array([-1], np.int32), bad.old, bad.new)
    elif wrong == "width":
        bad = TensorPatch(bad.index, bad.old.astype(np.uint64), bad.new.astype(np.uint64))
    with pytest.raises(BaseMismatch, match=f"'{name}' was taken against another state"):
        base.advance({"a": good, name: bad})
    assert base.matches(state_digest(state, schema))
    base.advance({"a": good, "b": one_change(state, "b", 3)})
    assert not base.matches(state_digest(state, schema))


def test_the_base_refuses_other_tensors() -> None:
    base, state, schema = small_base()
    tensors = tensors_of(state, schema)
    with pytest.raises(SchemaChanged, match="first 'b' of 1"):
        base.diff({"a": tensors["a"]})
    with pytest.raises(SchemaChanged, match=r"'a' is bfloat16\[2, 3\], the base has BF16\[6\]"):
        base.diff(tensors | {"a": tensors["a"].view(2, 3)})


# --- shards


@st.composite
def shards(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[range, ...]]]:
    """A shape and for each dimension the rows of a shard, in one run or several."""
    shape, runs = [], []
    for _ in range(draw(st.integers(0, 3))):
        edges = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=6)))
        runs.append(tuple(range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)))
        shape.append(edges[-1] + draw(st.integers(0, 2)))
    return tuple(shape), runs


@pytest.mark.property
@settings(max_examples=150, deadline=None)
@given(shards())
def test_places_in_a_shard_are_places_in_the_whole(shard: tuple[tuple[int, ...], list[tuple[range, ...]]]) -> None:
    shape, runs = shard
    whole = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    rows = [np.concatenate([np.asarray(run) for run in dimension]) for dimension in runs]
    wanted = whole[np.ix_(*rows)].reshape(-1) if rows else whole.reshape(-1)
    found = global_index(torch.arange(len(wanted)), runs, shape)
    assert found.dtype == torch.int64
    assert np.array_equal(found.numpy(), wanted)
