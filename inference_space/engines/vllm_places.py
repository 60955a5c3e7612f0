"""Places of a checkpoint tensor's elements in a model's parameters, and how to write and read them there.

Found out by `vllm_plan`. No vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sync.kernels import compiled, gather
from sync.tensors import Bits, TensorSpec, unsigned

from .weights import _NATIVE as NATIVE
from .weights import to_bits, to_tensor

Index = NDArray[np.integer[Any]]
Inside = slice | torch.Tensor
"""A part of a vector: a range, or a bool tensor as long as it."""
Steps = list[tuple[int, int, int]]
_SIGNED = {2: torch.int16, 4: torch.int32}


class Strided(NamedTuple):
    """Elements of a flat array: offset + Σ digit·stride, with digit k in 0..sizes[k]-1."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def nested(self) -> bool:
        """True when every element has a place of its own and digits follow from a place by division."""
        reach = 1
        for size, stride in sorted(zip(self.sizes, self.strides, strict=True), key=lambda pair: pair[1]):
            if stride < reach:
                return False
            reach = stride * size
        return True

    def places(self) -> NDArray[np.int64]:
        """Every place, in the order of the digits."""
        found = np.full((1,) * len(self.sizes), self.offset, np.int64)
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            shape = [1] * len(self.sizes)
            shape[axis] = size
            found = found + (np.arange(size, dtype=np.int64) * stride).reshape(shape)
        return found.reshape(-1)


class Copy:
    """One recorded copy: elements `source` of the checkpoint tensor stand at `target` of a parameter's storage.

    flat: that storage as flat signed integers of the parameter's width, so that copies keep the bits of every NaN;
    dtype: what they mean.
    """

    def __init__(self, storage: torch.Tensor, source: Strided, target: Strided) -> None:
        self.flat, self.dtype = integers(storage), storage.dtype
        self._source, self._target = source, target
        self._steps = _merged(sorted(zip(source.strides, source.sizes, target.strides, strict=True), reverse=True))
        self._plain = self.flat.numpy() if storage.device.type == "cpu" and self._is_run() else None

    def _is_run(self) -> bool:
        """True for neighbours that stay neighbours: nearly always."""
        return [(stride, step) for stride, _, step in self._steps] == [(1, 1)]

    def put(self, index: Index, values: Bits) -> bool:
        """Write values of the parameter's own dtype at (rising) flat checkpoint positions, quickly; False where that
        cannot be done here."""
        if self._plain is None:
            return False
        part, shift = self._part(index)
        _put(self._plain.view(values.dtype), index[part], shift, values[part])
        return True

    def get(self, index: Index, values: Bits) -> bool:
        """As `put`, reading."""
        if self._plain is None:
            return False
        part, shift = self._part(index)
        gather(self._plain.view(values.dtype), index[part], shift, values[part])
        return True

    def _part(self, index: Index) -> tuple[slice, int]:
        """Of a run: which of the positions it has, and how far before them their places are."""
        start = self._source.offset
        low, high = np.searchsorted(index, (start, start + self._steps[0][1]))
        return slice(int(low), int(high)), start - self._target.offset

    def find(self, index: Index) -> tuple[Inside, NDArray[np.int64]]:
        """Which of the (rising) flat checkpoint positions are copied here, and to which places those go."""
        if self._is_run():
            part, shift = self._part(index)
            return part, index[part].astype(np.int64) - shift
        rest = index.astype(np.int64) - self._source.offset
        inside = rest >= 0
        found = np.full(len(index), self._target.offset, np.int64)
        for stride, size, step in self._steps:
            digit, rest = np.divmod(rest, stride)
            inside &= digit < size
            found += digit * step
        inside &= rest == 0
        return torch.from_numpy(inside), found[inside]

    def cover(self, seen: torch.Tensor) -> None:
        """Set the checkpoint positions copied here in `seen` (bool, flat)."""
        _strided(seen, self._source).fill_(value=True)

    def take(self, taken: torch.Tensor) -> bool:
        """Set the places written here in `taken` (bool, as long as the storage); False: one was taken."""
        places = _strided(taken, self._target)
        fresh = not bool(places.any())
        places.fill_(value=True)
        return fresh

    def write_whole(self, values: torch.Tensor) -> None:
        """Put the whole tensor's flat `values` (integers as `flat`) in place."""
        _strided(self.flat, self._target).copy_(_strided(values, self._source))

    def read_whole(self, values: torch.Tensor) -> None:
        """Fill the flat `values` from their places."""
        _strided(values, self._source).copy_(_strided(self.flat, self._target))


class Traced(Copy):
    """As Copy, for a loader whose every element was followed. sources: int64, rising; targets: int64, as long."""

    def __init__(self, storage: torch.Tensor, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self.flat, self.dtype, self._plain = integers(storage), storage.dtype, None
        self._sources, self._targets = sources, targets
        self._from = torch.from_numpy(sources).to(storage.device)
        self._to = torch.from_numpy(targets).to(storage.device)

    def find(self, index: Index) -> tuple[Inside, NDArray[np.int64]]:
        """See Copy."""
        at = np.minimum(np.searchsorted(self._sources, index), len(self._sources) - 1)
        inside = self._sources[at] == index
        return torch.from_numpy(inside), self._targets[at[inside]]

    def cover(self, seen: torch.Tensor) -> None:
        """See Copy."""
        seen[self._from.cpu()] = True

    def take(self, taken: torch.Tensor) -> bool:
        """See Copy."""
        fresh = not bool(taken[self._to.cpu()].any())
        taken[self._to.cpu()] = True
        return fresh

    def write_whole(self, values: torch.Tensor) -> None:
        """See Copy."""
        self.flat[self._to] = values[self._from]

    def read_whole(self, values: torch.Tensor) -> None:
        """See Copy."""
        values[self._from] = self.flat[self._to]


class Mapped:
    """One checkpoint tensor in a running model, or a rank's part of it. `way` is `plan` or `trace`, see `vllm_plan`.

    Flat positions and bits are those of the checkpoint; neither is checked here. An element with several places is
    written to all of them and read from the first. held: the parameters' dtype, None where no element is kept here.
    """

    def __init__(self, way: str, spec: TensorSpec, copies: Sequence[Copy]) -> None:
        self.way, self.spec, self._copies = way, spec, tuple(copies)
        self.held: torch.dtype | None = copies[0].dtype if copies else None
        self._same = self.held == NATIVE[spec.dtype]

    def write(self, index: Index | None, values: Bits) -> None:
        """Put bits in place (index None: all of them); what is not kept here is passed over."""
        if self.held is None:
            return
        if index is not None and self._same and all(copy.put(index, values) for copy in self._copies):
            return
        new = integers(to_tensor(values, self.spec.dtype, self.held))
        with torch.inference_mode():
            for copy in self._copies:
                if index is None:
                    copy.write_whole(new.to(copy.flat.device))
                    continue
                inside, places = copy.find(index)
                where = torch.from_numpy(places).to(copy.flat.device)
                copy.flat.index_copy_(0, where, new[inside].to(copy.flat.device))

    def read(self, index: Index | None) -> Bits:
        """The bits that stand there (index None: all of them, flat); 0 for what is not kept here."""
        size = self.spec.size if index is None else len(index)
        if self.held is None:
            return np.zeros(size, unsigned(self.spec.width))
        if index is not None and self._same:
            bits = np.zeros(size, unsigned(self.spec.width))
            if all(copy.get(index, bits) for copy in reversed(self._copies)):
                return bits
        found = torch.zeros(size, dtype=self._copies[0].flat.dtype)
        with torch.inference_mode():
            for copy in reversed(self._copies):
                if index is None:
                    part = found.to(copy.flat.device)
                    copy.read_whole(part)
                    found = part.cpu()
                    continue
                inside, places = copy.find(index)
                where = torch.from_numpy(places).to(copy.flat.device)
                found[inside] = copy.flat.index_select(0, where).cpu()
        return to_bits(found.view(self.held), self.spec.dtype)

    def keeps(self, index: Index | None) -> NDArray[np.bool_]:
        """Which of these positions (None: of all) are kept here."""
        seen = torch.zeros(self.spec.size if index is None else len(index), dtype=torch.bool)
        for copy in self._copies:
            if index is None:
                copy.cover(seen)
            else:
                seen[copy.find(index)[0]] = True
        return seen.numpy()


@compiled
def _put(flat: NDArray[Any], index: NDArray[Any], start: int, values: NDArray[Any]) -> None:
    """The inverse of `gather`: flat at index - start = values."""
    for j in range(len(index)):
        flat[np.uint64(index[j] - start)] = values[j]


@compiled
def rises(index: NDArray[Any]) -> Any:
    """True when each is greater than the one before."""
    last = index[0] if len(index) else 0
    good = True
    for j in range(1, len(index)):
        good &= index[j] > last
        last = index[j]
    return good


def _merged(steps: Steps) -> Steps:
    """The same copy with as few (source stride, size, target stride) as possible; outermost first."""
    found: Steps = []
    for stride, size, step in steps:
        if found and found[-1][0] == stride * size and found[-1][2] == step * size:
            size *= found.pop()[1]  # noqa: PLW2901 - one dimension more is part of this one
        found.append((stride, size, step))
    return found


def _strided(flat: torch.Tensor, where: Strided) -> torch.Tensor:
    return torch.as_strided(flat, where.sizes, where.strides, where.offset)


def integers(values: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers: copies of those keep the bits of every NaN."""
    return values.view(_SIGNED[values.element_size()])
