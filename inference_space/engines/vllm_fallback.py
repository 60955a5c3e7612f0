"""Ways for checkpoint tensors whose places in vLLM are not known, see `vllm_plan`: slower, and checked as well.

    patch   vLLM's own `load_checkpoint_weight_patches`: its loader writes a tensor of NaN, numbers where it changed.
            Its loader must copy, and the kernels must compute with what it wrote.
    dense   the whole model again, packed as its kernels want it: by vLLM's reload; or, where a loader goes round that
            one's hooks, loaded over the parameters that are there. Then what has places or patches, in those ways.

Neither can be read back by place. A *shadow*, the checkpoint's own bits, is kept beside the model; what vLLM holds is
compared with what its loader makes of the shadow, and then the shadow answers. For `dense` that takes a reload over
spoiled parameters: where a reload does not write, it shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sync.tensors import TensorSpec

from .vllm_lent import Array
from .vllm_places import Mapped, integers
from .vllm_plan import NATIVE, Recorder, require_exact, storage_of
from .weights import to_tensor

NOWHERE = "its loader puts it nowhere"
HOW = ("reload", "over")


class Fallback:
    """Patches, reloads and compares in one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._schema: dict[str, TensorSpec] = {}
        self._state: dict[str, Array] = {}

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def shadow(self, schema: Mapping[str, TensorSpec], arrays: Sequence[Array]) -> None:
        """From now on these arrays (in the order of `schema`) are the checkpoint's bits; the lender changes them."""
        self._schema, self._state = dict(schema), dict(zip(schema, arrays, strict=True))

    def matches(self, name: str, parameters: Mapping[str, torch.Tensor]) -> str:
        """Empty when the model holds what its loader would put there now; else the reason, NOWHERE for one. Nothing is
        written.

        Raises ConfigError when a parameter cannot hold the tensor's values exactly."""
        storages = {t.untyped_storage().data_ptr(): storage_of(t) for t in parameters.values() if t.numel()}
        mode = _Compare(self._schema[name], self._tensor(name), storages)
        try:
            with torch.no_grad(), mode:
                self._model.load_weights([(name, mode.probe)])
        except Exception as error:  # noqa: BLE001 - a loader may refuse a part with any error of its own
            return f"{type(error).__name__}: {error}"
        for kind in mode.kinds:
            require_exact(name, self._schema[name], kind)
        return mode.refused or ("" if mode.kinds else NOWHERE)

    def patch(self, layout: Sequence[tuple[str, bool]], arrays: Sequence[Array]) -> None:
        """Put values in place through vLLM's loader. layout: name, and whether indices come before the values (else,
        and where NaN is among them, the shadow's whole tensor is loaded)."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        rest = iter(arrays)
        for name, sparse in layout:
            index, spec = next(rest) if sparse else None, self._schema[name]
            values, kind = to_tensor(next(rest), spec.dtype, NATIVE[spec.dtype]), NATIVE[spec.dtype]
            where = None if index is None else torch.from_numpy(np.array(index))
            if index is None or bool(torch.isnan(values).any()):  # there NaN means: as it was
                values, where = self._tensor(name).reshape(-1), None
            part = CheckpointWeightPatch(name, spec.shape, kind, values, where)
            load_checkpoint_weight_patches(self._model, [part], max_chunk_bytes=1)

    def settle(self, how: str, mapped: Mapping[str, Mapped], patched: Sequence[str]) -> None:
        """Load the whole shadow (how: one of HOW), then again what is `mapped`, and what is `patched`."""
        weights = ((name, self._tensor(name)) for name in self._schema)
        with _kernels_made_anew(self._model) as layers:
            if how == "reload":
                self._worker.reload_weights(weights_iterator=weights)
            else:
                self._load_over(weights, layers)
        for name, places in mapped.items():
            places.write(None, self._state[name])
        self.patch([(name, False) for name in patched], [self._state[name] for name in patched])

    def _load_over(self, weights: Iterator[tuple[str, torch.Tensor]], layers: Sequence[Any]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            self._model.load_weights(weights)
            for layer in layers:
                vars(layer).pop("_already_called_process_weights_after_loading", None)
                layer.quant_method.process_weights_after_loading(layer)

    def spoil(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Overwrite all parameters with what no model holds."""
        with torch.inference_mode():
            for tensor in parameters.values():
                if tensor.numel():
                    storage_of(tensor).view(torch.uint8).fill_(0xA5)

    def fingerprint(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """A digest of all bits that the kernels compute with."""
        found = hashlib.sha256()
        for name in sorted(parameters):
            tensor = parameters[name].detach()
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
            found.update(
                tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data if tensor.numel() else b""
            )
        return found.hexdigest()

    def _tensor(self, name: str) -> torch.Tensor:
        """A copy: a loader may change what it is given."""
        spec = self._schema[name]
        return to_tensor(np.array(self._state[name]), spec.dtype, NATIVE[spec.dtype]).reshape(spec.shape)


class _Compare(Recorder):  # type: ignore[no-untyped-call]
    """Compares what a loader would copy with what stands there. `kinds`: the types of parameter that it met."""

    def __init__(self, spec: TensorSpec, values: torch.Tensor, storages: Mapping[int, torch.Tensor]) -> None:
        super().__init__(spec, storages)
        self.probe, self.kinds = values, set[torch.dtype]()

    def _is_probe(self, _: torch.Tensor) -> bool:
        return False  # it may be changed: what counts is what arrives

    def _copied(self, _: torch.Tensor, target: torch.Tensor, value: torch.Tensor) -> None:
        if target.shape != value.shape or not (target.is_floating_point() and value.is_floating_point()):
            self.refused = "its loader does not end in a plain copy"
            return
        self.kinds.add(target.dtype)
        there = integers(target.detach().contiguous().cpu())
        if not torch.equal(there, integers(value.to(target.dtype).contiguous().cpu())):
            self.refused = "the model holds other bits than its loader would put there"


@contextmanager
def _kernels_made_anew(model: Any) -> Iterator[list[Any]]:
    """vLLM packs the experts' matrices for its kernels only where it makes the kernel: have it make one, for the
    matrices only, and go on with the first, which refers to the parameters that stay. Gives the layers with experts."""
    held: list[tuple[Any, Any, Any]] = []
    layers = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            held.append((method, method.moe_kernel, method.moe_quant_config))
            method.moe_kernel = None
            layers.append(layer)
    try:
        yield layers
    finally:
        for method, kernel, config in held:
            method.moe_kernel, method.moe_quant_config = kernel, config
