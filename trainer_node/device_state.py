"""A trainer's tensors as a state that is compared on their own device: only what changed crosses to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from sync.codec import TensorPatch
from sync.errors import BaseMismatch
from sync.tensors import Schema, State, bits

from .device_diff import DeviceBase
from .model import published_bits


class DeviceCopy:
    """The publisher's base on a device, kept from one version to the next and known by its state digest. It is loaded
    from the base whenever that is another one than was last committed here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: DeviceBase | None = None
        self._digest = ""

    def offer(self, tensors: Mapping[str, torch.Tensor]) -> DeviceState:
        """The tensors (base-checkpoint names, fp32 masters or wire dtypes) as what `Publisher.offer` takes."""
        return DeviceState(self, tensors)

    def changes(
        self, tensors: Mapping[str, torch.Tensor], base: State, schema: Schema, digest: str
    ) -> Iterator[tuple[str, TensorPatch]]:
        """See `sync.base.Elsewhere`. What the device holds is compared with the base wherever something changed; raises
        BaseMismatch where it differs, and the next call loads it anew."""
        if self._base is None or self._digest != digest:
            self._base, self._digest = DeviceBase(base, schema, self._device), digest
        for name, patch in self._base.diff(tensors):
            if not np.array_equal(bits(base[name])[patch.index], patch.old):
                self._base = None
                raise BaseMismatch(f"the device's copy of tensor {name!r} is not what was committed")
            yield name, patch

    def advance(self, patch: Mapping[str, TensorPatch], digest: str) -> None:
        """See `sync.base.Elsewhere`."""
        assert self._base is not None
        self._digest = ""  # in doubt until all of it is written
        self._base.advance(patch)
        self._digest = digest


class DeviceState:
    """One offered state (`sync.base.Elsewhere`). The tensors are read while the difference is taken and by `fetch`."""

    def __init__(self, copy: DeviceCopy, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copy, self._tensors = copy, tensors

    def changes(self, base: State, schema: Schema, digest: str) -> Iterator[tuple[str, TensorPatch]]:
        """The difference from the base, found on the device."""
        return self._copy.changes(self._tensors, base, schema, digest)

    def advance(self, patch: Mapping[str, TensorPatch], digest: str) -> None:
        """The difference was committed."""
        self._copy.advance(patch, digest)

    def fetch(self) -> State:
        """The published bits, on the host."""
        return published_bits(self._tensors)
