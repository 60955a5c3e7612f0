"""Where a model's own loader puts every element of a checkpoint tensor, found out once and without writing.

A model that fuses, slices or pads its parameters has one place that knows how: its `load_weights`. It is run once per
name with a probe in place of the tensor, while every copy is recorded instead of made. Two kinds of probe:

    plan    views of the probe reach the copies: places follow by arithmetic, O(1) memory per copy
    trace   the loader makes new tensors (permutes and packs them, say): the probe holds each element's number, and
            what arrives says where every one went; 8 bytes per element are kept

A name is mapped when each of its elements arrives, with its own value, at one place at least (on some rank, where
several share a model). Else nothing is known of it, and it must not be patched here: so a mapped tensor can be read
back too, element by element. `vllm_fallback` has ways for the others. No vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sync.errors import ConfigError
from sync.tensors import Schema, TensorSpec

from .vllm_places import Copy, Mapped, Strided, Traced

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
NATIVE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
EXACT = {"BF16": (torch.bfloat16, torch.float32), "F16": (torch.float16,), "F32": (torch.float32,)}
"""Types of parameter that hold every value of a checkpoint dtype and give its bits back."""


def map_checkpoint(load: Loader, parameters: Mapping[str, torch.Tensor], schema: Schema) -> dict[str, Mapped]:
    """As `follow`, and raises ConfigError too when a tensor cannot be mapped, naming the first."""
    found, refused = follow(load, parameters, schema)
    for name, why in refused.items():
        raise ConfigError(
            f"checkpoint tensor {name!r} {list(schema[name].shape)} cannot be followed into the model ({why}), so it "
            "could be neither patched in place nor read back"
        )
    return found


def follow(
    load: Loader, parameters: Mapping[str, torch.Tensor], schema: Schema, *, part: bool = False
) -> tuple[dict[str, Mapped], dict[str, str]]:
    """Map the tensors of `schema` into `parameters` (name → the model's own tensors) by running the loader `load`.

    Nothing is written and no parameter moves. Returns what was mapped, and why each of the others was not. part: the
    model is one of several that keep a part of each tensor. Raises ConfigError for a tensor whose values its parameter
    cannot hold exactly, and for a loader that replaces parameters.
    """
    before = {name: _where(tensor) for name, tensor in parameters.items()}
    storages = {t.untyped_storage().data_ptr(): storage_of(t) for t in parameters.values() if t.numel()}
    found, refused = {}, {}
    for name, spec in schema.items():
        mapped = _map_one(load, storages, name, spec, part=part)
        if isinstance(mapped, str):
            refused[name] = mapped
            continue
        require_exact(name, spec, mapped.held)
        found[name] = mapped
    moved = [name for name, tensor in parameters.items() if _where(tensor) != before[name]]
    if moved:
        raise ConfigError(f"the model's loader replaces parameter {moved[0]!r} instead of filling it")
    return found, refused


def require_exact(name: str, spec: TensorSpec, held: torch.dtype | None) -> None:
    """Raise ConfigError unless a parameter of type `held` (None: none) gives a checkpoint tensor's bits back."""
    if held is not None and held not in EXACT[spec.dtype]:
        raise ConfigError(
            f"checkpoint tensor {name!r} is {spec.dtype}, and the model holds it as {held}, which does not give its "
            "bits back; set dtype so that it does"
        )


def _map_one(
    load: Loader, storages: Mapping[int, torch.Tensor], name: str, spec: TensorSpec, *, part: bool
) -> Mapped | str:
    """A tensor's places, or why they were not found."""
    if spec.dtype not in NATIVE:
        raise ConfigError(f"checkpoint tensor {name!r} is {spec.dtype}; BF16, F16 and F32 can be followed")
    why = ""
    for way, recorder in (("plan", Recorder), ("trace", _Tracer)):
        mode = recorder(spec, storages)
        try:
            with torch.no_grad(), mode:
                load([(name, mode.probe)])
        except Exception as error:  # noqa: BLE001 - a loader may refuse a probe with any error of its own
            why = f"{type(error).__name__}: {error}"
            continue
        if mode.refused or not (mode.copies or part):
            why = mode.refused or "its loader puts it nowhere"
        elif not _covers(mode.copies, spec.size, part=part):
            why = "some of its elements are not kept"
        elif len({copy.dtype for copy in mode.copies}) > 1:
            why = "its places differ in dtype"
        else:
            return Mapped(way, spec, mode.copies)
    return why


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies of views of `probe` into the model's storages, and lets nothing be written there."""

    def __init__(self, spec: TensorSpec, storages: Mapping[int, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.probe = torch.empty(spec.shape, dtype=NATIVE[spec.dtype])  # never touched: costs no memory
        self.copies: list[Copy] = []
        self.refused = ""
        self._spec, self._storages = spec, storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stand in for one operation of the loader."""
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        named = [value for value in (kwargs or {}).values() if isinstance(value, torch.Tensor)]
        if not func._schema.is_mutable or (target is None and not named):
            return func(*args, **(kwargs or {}))
        if any(map(self._is_probe, named)) or any(self._flat_of(value) is not None for value in named):
            raise ValueError(f"its loader uses {func}")  # as `out=`: an operation of which nothing is known
        if target is not None and self._is_probe(target):
            self.refused = f"its loader changes it first ({func})"
            return target
        flat = None if target is None else self._flat_of(target)
        if target is None or flat is None:
            return func(*args, **(kwargs or {}))
        self._written(func, flat, target, args[1] if len(args) > 1 else None)
        return target

    def _flat_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._storages.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _written(self, func: Any, flat: torch.Tensor, target: torch.Tensor, value: Any) -> None:
        name = func._schema.name
        if name in ("aten::zero_", "aten::fill_") and not (isinstance(value, (int, float)) and value):
            return  # padding
        if name == "aten::copy_" and isinstance(value, torch.Tensor):
            self._copied(flat, target, value)
        elif name == "aten::fill_":
            self._copied(flat, target, torch.full(target.shape, float(value), dtype=torch.float64))
        else:
            self.refused = f"its loader uses {name}"

    def _copied(self, flat: torch.Tensor, target: torch.Tensor, value: torch.Tensor) -> None:
        if not self._is_probe(value):
            self.refused = "its loader makes another tensor of it"
            return
        value = value.expand(target.shape)
        source, place = _elements(value), _elements(target)
        if source.nested() and place.nested():
            self.copies.append(Copy(flat, source, place))
        else:
            self.refused = "its loader copies overlapping views"

    def _is_probe(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.untyped_storage().data_ptr() == self.probe.untyped_storage().data_ptr())


class _Tracer(Recorder):  # type: ignore[no-untyped-call]
    """As Recorder, with a probe that holds 1, 2, 3…: float64, which keeps whole numbers up to 2^53 apart."""

    def __init__(self, spec: TensorSpec, storages: Mapping[int, torch.Tensor]) -> None:
        super().__init__(spec, storages)
        self.probe = torch.arange(1, spec.size + 1, dtype=torch.float64).reshape(spec.shape)

    def _copied(self, flat: torch.Tensor, target: torch.Tensor, value: torch.Tensor) -> None:
        if value.dtype != torch.float64:
            self.refused = "its loader changes its type"
            return
        numbers = value.expand(target.shape).contiguous().numpy().reshape(-1)
        where = _elements(target)
        if not where.nested():
            self.refused = "its loader copies overlapping views"
            return
        places = where.places()
        kept = numbers != 0  # zeros are padding: elements count from 1
        numbers, places = numbers[kept], places[kept]
        whole = numbers.astype(np.int64)
        if (whole != numbers).any() or (whole < 1).any() or (whole > self._spec.size).any():
            self.refused = "its loader computes with its values"
            return
        order = np.argsort(whole, kind="stable")
        sources = whole[order] - 1
        if (np.diff(sources) == 0).any():
            self.refused = "its loader repeats elements"
            return
        self.copies.append(Traced(flat, sources, places[order]))


def _covers(copies: Sequence[Copy], size: int, *, part: bool) -> bool:
    """True when every element is copied somewhere (or this is a part), and no place is written for two of them."""
    seen = torch.zeros(size, dtype=torch.bool)
    taken: dict[int, torch.Tensor] = {}
    fresh = True
    for copy in copies:
        where = copy.flat.data_ptr()
        if where not in taken:
            taken[where] = torch.zeros(len(copy.flat), dtype=torch.bool)
        copy.cover(seen)
        fresh &= copy.take(taken[where])
    return fresh and (part or bool(seen.all()))


def _elements(view: torch.Tensor) -> Strided:
    """A view's elements in its storage; dimensions of size 1 say nothing and are left out."""
    kept = [a for a in range(view.ndim) if view.shape[a] != 1]
    return Strided(int(view.storage_offset()), tuple(view.shape[a] for a in kept), tuple(view.stride(a) for a in kept))


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor over the whole storage of `tensor`."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _where(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
