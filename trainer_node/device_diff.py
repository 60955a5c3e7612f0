"""What changed, found where the tensors are: comparison, compaction and ULP distances as torch operations.

Only changed elements leave the device. Work is done block by block, so temporaries on the device stay below a few times
`BLOCK` elements whatever the size of a tensor. Bits are compared as signed integers of the dtype's width, since torch
has few operations on the unsigned ones. The same code serves every device; it was exercised on CPU tensors and on
DTensors over gloo, not on CUDA.

Which bits a NaN gets when a master is cast to a narrower dtype is torch's choice, and differs with device and strides:
a NaN in a master may show as a change from one NaN to another. Every other value is cast the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from sync.codec import TensorPatch
from sync.codec.patch import index_type
from sync.digest import ZERO, element_sums, tensor_term
from sync.errors import BaseMismatch, InvalidRequest, SchemaChanged
from sync.tensors import EXPONENT_SHIFT, Bits, Schema, State, TensorSpec, bits, unsigned

BLOCK = 1 << 22
"""The most elements that are worked on at once."""
TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""The torch dtype of each safetensors dtype."""
Casts: TypeAlias = Collection[tuple[torch.dtype, torch.dtype]]
MASTERS: Casts = ((torch.float32, torch.bfloat16),)
"""Casts (from, to) that publishing makes: fp32 masters to the bf16 that is on the wire, to nearest even."""
Runs: TypeAlias = tuple[range, ...]
"""Increasing rows of one dimension of an unsharded tensor, as runs that do not touch."""

_NAME = {dtype: name for name, dtype in TORCH.items()}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- one tensor


def changed(old: Tensor, new: Tensor, *, cast: Casts = MASTERS) -> TensorPatch:
    """Where two tensors of one shape differ in bits, found on `new`'s device: what `sync.codec.diff` finds in their
    host copies; an empty patch for equal ones.

    The flat order is that of the C-contiguous tensor, whatever the strides. `new` has `old`'s dtype or is cast to it,
    which `cast` must allow. An `old` that lies elsewhere crosses block by block. Raises SchemaChanged when the tensors
    do not fit, InvalidRequest for a dtype that safetensors cannot carry and for DTensors.
    """
    _require_fit({"": new}, {"": _spec("", old)}, cast)
    return _compare(old, new, old.numel())


def distances(old: Tensor, new: Tensor) -> Tensor:
    """The signed distance from old to new, mod 2^width, as integers of their width: on the line that the codecs use
    (`sync/codec/values.py`), so for floats in ULP, 1 from -0 to +0 too, and for other dtypes between the bits.

    Both have one dtype, shape and device.
    """
    name = _spec("", old).dtype
    return _ordered(_as_signed(new), name) - _ordered(_as_signed(old), name)


def _compare(
    old: Tensor, new: Tensor, size: int, place: Callable[[Tensor], Tensor] | None = None
) -> TensorPatch:  # fmt: skip
    """The patch between two fitting tensors; place maps flat indices (int64, on the device) into a tensor of `size`
    elements."""
    kind = index_type(size)
    on_device = torch.int32 if kind is np.int32 else torch.int64
    found: list[list[Tensor]] = []
    for start, (before, after) in _blocks(old, new):
        at = torch.nonzero(before != after).view(-1)  # waits for the device: the count decides the size
        if at.numel():
            index = at + start if place is None else place(at + start)
            found.append([_to_host(part) for part in (index.to(on_device), before[at], after[at])])
    if not found:
        none = np.empty(0, unsigned(old.element_size()))
        return TensorPatch(np.empty(0, kind), none, none.copy())
    _wait(new.device)
    whole = [np.concatenate([part.numpy() for part in parts]) for parts in zip(*found, strict=True)]
    return TensorPatch(whole[0], bits(whole[1]), bits(whole[2]))


def _blocks(old: Tensor, new: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """(flat start, bits of both as flat signed integers on `new`'s device), at most BLOCK elements each, in C order."""
    if isinstance(old, DTensor) or isinstance(new, DTensor):
        raise InvalidRequest("a DTensor cannot be read as one tensor; use shard_changes, or its local shards")
    for start, (one, other) in _cut((old.detach(), new.detach()), 0):
        before = one.to(
            new.device, non_blocking=one.device.type == "cpu"
        )  # towards the host it would not be waited for
        yield start, (_as_signed(before), _as_signed(other.to(old.dtype)))


def _cut(tensors: tuple[Tensor, Tensor], start: int) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Cuts that follow from the shape alone unless both are contiguous; a tensor with strides is never copied whole."""
    if all(t.is_contiguous() for t in tensors):
        tensors = (tensors[0].view(-1), tensors[1].view(-1))
    one, other = tensors
    row = prod(one.shape[1:])
    if row > BLOCK:
        for i in range(one.shape[0]):
            yield from _cut((one[i], other[i]), start + i * row)
        return
    step = BLOCK // row if row else 1
    for i in range(0, one.shape[0], step):
        yield start + i * row, (one[i : i + step].reshape(-1), other[i : i + step].reshape(-1))


def _as_signed(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().view(_SIGNED[tensor.element_size()])


def _ordered(signed: Tensor, name: str) -> Tensor:
    if name not in EXPONENT_SHIFT:
        return signed
    top = 8 * signed.element_size() - 1
    return signed ^ ((signed >> top) & ((1 << top) - 1))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that is complete after `_wait`; a host tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


# --- states


def device_diff(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, cast: Casts = MASTERS,
    holders: Collection[int] | None = None,
) -> Iterator[tuple[str, TensorPatch]]:  # fmt: skip
    """The tensors that differ, one at a time, in the order of `sync.codec.changes`; see `changed`, and for DTensors
    (and `holders`) `shard_changes`. `old`'s dtypes are those on the wire.

    Raises SchemaChanged at the call when names, shapes or dtypes are other ones. `new` is read while the result is
    iterated, and must not change until then.
    """
    schema = {name: _spec(name, tensor) for name, tensor in old.items()}
    _require_fit(new, schema, cast)

    def compare(one: Tensor, other: Tensor) -> TensorPatch:
        if isinstance(one, DTensor) or isinstance(other, DTensor):
            return shard_changes(one, other, cast=cast, holders=holders)
        return _compare(one, other, one.numel())

    names = sorted(schema, key=lambda name: (schema[name].dtype, name))
    found = ((name, compare(old[name], new[name])) for name in names)
    return ((name, patch) for name, patch in found if len(patch.index))


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    if tensor.dtype not in _NAME:
        raise InvalidRequest(f"tensor {name!r} has dtype {_short(tensor.dtype)}, which safetensors cannot carry")
    return TensorSpec(_NAME[tensor.dtype], tuple(tensor.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_fit(new: Mapping[str, Tensor], schema: Schema, cast: Casts) -> None:
    """Raise SchemaChanged naming the first tensor whose presence, shape or dtype (after a cast) differs."""
    if new.keys() != schema.keys():
        odd = sorted(new.keys() ^ schema.keys())
        raise SchemaChanged(f"tensor names differ from the base's, first {odd[0]!r} of {len(odd)}; publish an anchor")
    for name, spec in schema.items():
        tensor, wire = new[name], TORCH[spec.dtype]
        if tuple(tensor.shape) != spec.shape or (tensor.dtype != wire and (tensor.dtype, wire) not in cast):
            raise SchemaChanged(
                f"tensor {name!r} is {_short(tensor.dtype)}{list(tensor.shape)}, the base has "
                f"{spec.dtype}{list(spec.shape)}; publish an anchor"
            )


class UlpCounts(NamedTuple):
    """Elements compared, those whose bits changed, by how many ULP (`distances`), and those that changed sign (counted
    by their distance too)."""

    elements: int
    changed: int
    one: int
    two: int
    three_to_seven: int
    eight_or_more: int
    crossings: int


def ulp_counts(old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, cast: Casts = MASTERS) -> UlpCounts:
    """How far the floating tensors of two states moved; other dtypes are not counted.

    Counted on the tensors' devices; five numbers cross to the host. Raises what `device_diff` raises, and
    InvalidRequest for DTensors.
    """
    schema = {name: _spec(name, tensor) for name, tensor in old.items()}
    _require_fit(new, schema, cast)
    floats = [name for name in schema if schema[name].dtype in EXPONENT_SHIFT]
    total: Tensor | None = None
    for name in floats:
        for _, (before, after) in _blocks(old[name], new[name]):
            counts = _block_counts(before, after, schema[name].dtype)
            total = counts if total is None else total + counts.to(total.device)
    differ, one, two, few, crossings = [0] * 5 if total is None else total.tolist()
    elements = sum(schema[name].size for name in floats)
    return UlpCounts(elements, differ, one, two, few, differ - one - two - few, crossings)


def _block_counts(before: Tensor, after: Tensor, name: str) -> Tensor:
    delta = _ordered(after, name) - _ordered(before, name)
    size = torch.where(delta < 0, -delta, delta)  # the least integer stays negative: it is in none of the classes below
    classes = (delta != 0, size == 1, size == 2, (size >= 3) & (size <= 7), (before ^ after) < 0)
    return torch.stack([torch.count_nonzero(members) for members in classes])


# --- the committed state


class DeviceBase:
    """The last committed state, held as tensors beside the trainer's, so that a difference needs no host copy.

    state and schema: what was committed (`sync.base.Base.state`), copied. device: where the trainer's tensors are.
    on_host: hold the copy in host memory, pinned where there is an accelerator; blocks then cross for each difference.
    It costs as many bytes as the state. Not for calls from two threads at once.
    """

    def __init__(self, state: State, schema: Schema, device: torch.device, *, on_host: bool = False) -> None:
        self._schema = dict(schema)
        self._held = {name: _held(bits(state[name]), spec, device, on_host) for name, spec in schema.items()}

    def diff(self, tensors: Mapping[str, Tensor], *, cast: Casts = MASTERS) -> Iterator[tuple[str, TensorPatch]]:
        """What differs from the committed state; see `device_diff`. Changes nothing."""
        return device_diff(self._held, tensors, cast=cast)

    def advance(self, patch: Mapping[str, TensorPatch]) -> None:
        """The patch was committed: hold its new bits. Never call it before (I7).

        Raises BaseMismatch, changing nothing, when the patch was taken against other tensors or other bits.
        """
        for name, one in patch.items():
            if not self._fits(name, one):
                raise BaseMismatch(f"the patch of tensor {name!r} was taken against another state; load the base again")
        for name, one in patch.items():
            flat = _as_signed(self._held[name].view(-1))
            for index, new in _chunks(flat, one.index, one.new):
                flat[index] = new
        for device in {tensor.device for tensor in self._held.values()}:
            _wait(device)  # the next difference may be taken on another stream

    def matches(self, digest: str) -> bool:
        """True when the bits held give this state digest. Reads everything back: an audit, not for every version."""
        total = ZERO
        for name, spec in self._schema.items():
            total, flat = total.plus(tensor_term(name, spec)), _as_signed(self._held[name].view(-1))
            for start in range(0, spec.size, BLOCK):
                part = _to_host(flat[start : start + BLOCK])
                _wait(flat.device)
                total = total.plus(element_sums(name, None, bits(part.numpy()), start=start))
        return total.text() == digest

    def _fits(self, name: str, one: TensorPatch) -> bool:
        spec = self._schema.get(name)
        if spec is None or {one.old.dtype, one.new.dtype} != {np.dtype(unsigned(spec.width))}:
            return False
        if len(one.index) and not 0 <= one.index[0] <= one.index[-1] < spec.size:
            return False
        flat = _as_signed(self._held[name].view(-1))
        same = [(flat[index] == old).all() for index, old in _chunks(flat, one.index, one.old)]
        return not same or bool(torch.stack(same).all())


def _held(raw: Bits, spec: TensorSpec, device: torch.device, on_host: bool) -> Tensor:  # noqa: FBT001
    signed = _SIGNED[spec.width]
    pin = on_host and device.type != "cpu"
    flat = torch.empty(spec.size, dtype=signed, device="cpu" if on_host else device, pin_memory=pin)
    for start in range(0, spec.size, BLOCK):
        flat[start : start + BLOCK] = _from_host(raw[start : start + BLOCK])
    return flat.view(TORCH[spec.dtype]).view(spec.shape)


def _chunks(flat: Tensor, index: NDArray[np.integer[Any]], values: Bits) -> Iterator[tuple[Tensor, Tensor]]:
    """(index, signed values) on `flat`'s device, at most BLOCK at once."""
    for start in range(0, len(index), BLOCK):
        where = torch.from_numpy(index[start : start + BLOCK].astype(np.int64))
        yield where.to(flat.device), _from_host(values[start : start + BLOCK]).to(flat.device)


def _from_host(raw: Bits) -> Tensor:
    """A copy as signed integers: torch takes no arrays that may not be written, such as mapped ones."""
    return torch.from_numpy(raw.view(f"i{raw.dtype.itemsize}").copy())


# --- shards


def shard_changes(
    old: Tensor, new: Tensor, *, cast: Casts = MASTERS, holders: Collection[int] | None = None
) -> TensorPatch:  # fmt: skip
    """`changed` for this rank's shards of two DTensors, with indices into the unsharded tensor, sorted within a rank.

    Over all ranks each element is counted once, see `shard_runs`. Needs no communication. Raises SchemaChanged as
    `changed` does, and InvalidRequest when the two are not on one mesh with one placement.
    """
    _require_fit({"": new}, {"": _spec("", old)}, cast)
    if not (isinstance(old, DTensor) and isinstance(new, DTensor)):
        raise InvalidRequest("one state has a DTensor where the other has a tensor; shard both alike")
    if old.device_mesh != new.device_mesh or tuple(old.placements) != tuple(new.placements):
        raise InvalidRequest(f"shards differ: {old.placements} of the old, {new.placements} of the new state")
    runs, before, after = shard_runs(new, holders), old.to_local(), new.to_local()
    if runs is None:
        before, after = before.reshape(-1)[:0], after.reshape(-1)[:0]
    elif not tuple(before.shape) == tuple(after.shape) == tuple(sum(map(len, rows)) for rows in runs):
        raise InvalidRequest(f"local shards of {list(before.shape)} and {list(after.shape)} are not cut by torch.chunk")
    return _compare(before, after, new.numel(), lambda at: global_index(at, runs or (), new.shape))


def shard_runs(tensor: DTensor, holders: Collection[int] | None = None) -> tuple[Runs, ...] | None:
    """For each dimension the rows of the unsharded tensor that this rank's shard has; None when another rank counts it.

    Of replicas the rank at coordinate 0 counts. holders: the ranks of all meshes that hold this tensor; without it the
    tensor's own mesh must have every rank. (A layer that tensor parallelism leaves out lies on one mesh for each of its
    ranks; the one with the lowest rank counts.) Shards are cut by torch.chunk, as `Shard` documents, placement by
    placement; where FSDP cuts what tensor parallelism has cut, a shard has several runs (`split_factor`). Raises
    InvalidRequest for other placements, such as sums that are still to be reduced, and for want of `holders`.
    """
    mesh, ranks = tensor.device_mesh, range(torch.distributed.get_world_size()) if holders is None else holders
    if holders is None and mesh.size() != len(ranks):
        raise InvalidRequest(f"the tensor's mesh has {mesh.size()} of {len(ranks)} ranks; name its holders")
    coordinate = mesh.get_coordinate() if bool((mesh.mesh == min(ranks)).any()) else None
    if coordinate is None:
        return None
    runs: list[Runs] = [(range(size),) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if placement.is_replicate():
            if coordinate[axis]:
                return None
        elif dim is None:
            raise InvalidRequest(f"placement {placement} is neither sharded nor replicated; redistribute the tensor")
        else:
            parts = getattr(placement, "split_factor", 1)
            pieces = [_chunk(runs[dim], parts, i) for i in range(parts)]
            runs[dim] = _merged([run for p in pieces for run in _chunk(p, mesh.size(axis), coordinate[axis])])
    return tuple(runs)


def global_index(index: Tensor, runs: Sequence[Runs], shape: Sequence[int]) -> Tensor:
    """Flat indices (int64) into a C-contiguous shard that has the rows `runs` of each dimension, as flat indices into
    the C-contiguous tensor of `shape`. Increasing indices stay increasing."""
    out, rest, stride = torch.zeros_like(index), index, 1
    for rows, size in zip(reversed(runs), reversed(shape), strict=True):
        local = sum(map(len, rows))
        row = rest % local
        rest = rest // local
        ends = np.cumsum([len(run) for run in rows])
        shift = torch.from_numpy(np.array([run.stop for run in rows]) - ends).to(index.device)
        row = row + shift[torch.bucketize(row, torch.from_numpy(ends).to(index.device), right=True)]
        out, stride = out + row * stride, stride * size
    return out


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """Piece `number` of what torch.chunk makes of the rows of `runs`; () where it makes fewer pieces."""
    total = sum(map(len, runs))
    step = -(-total // count)
    first, last, out, at = number * step, min((number + 1) * step, total), list[range](), 0
    for run in runs:
        out.append(run[max(0, first - at) : max(0, last - at)])
        at += len(run)
    return _merged(out)


def _merged(runs: Sequence[range]) -> Runs:
    out: list[range] = []
    for run in filter(len, runs):
        if out and out[-1].stop == run.start:
            out[-1] = range(out[-1].start, run.stop)
        else:
            out.append(run)
    return tuple(out)
