"""Our side of each of vLLM's workers, in this process or in ones that vLLM starts (`tensor_parallel`).

vLLM imports this module in every worker before it builds the model (setting worker_extension_cls) and mixes `Extension`
into the worker. Importing it makes the layers multiply with their parameters, and in a worker process of its own ends
that process when its parent is gone. A call never raises: with several workers, vLLM would leave the answers of the
others in its queues, and the next call would take them for its own.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sync.errors import DeltawireError
from sync.safetensors_io import MappedCheckpoint
from sync.tensors import TensorSpec

from .vllm_fallback import Fallback
from .vllm_lent import Borrowed, borrow
from .vllm_places import Mapped
from .vllm_plan import follow
from .vllm_slot import Slot

SCORE_LOGITS = 1 << 26
"""Most logits of a score in memory at once: 256 MiB in float32."""
Answer = tuple[str, Any]
"""The name of what was raised, or the empty string; and its text, or the result."""


class Side:
    """What the engine asks of one worker. rank of ranks hold a part of each tensor."""

    def __init__(self, worker: Any) -> None:
        self._runner, self._rank = worker.model_runner, int(worker.rank)
        self._ranks = int(worker.parallel_config.world_size)
        self._temperature = 1.0
        self._mapped: dict[str, Mapped] = {}
        self._fallback = Fallback(worker)
        self._slot = Slot(self._runner)
        self._hook_scores()

    @property
    def _model(self) -> Any:
        return self._runner.get_model()

    def where(self) -> tuple[str, str]:
        """The device of the parameters, and the dtype that the model computes in."""
        return str(next(self._model.parameters()).device), str(self._runner.model_config.dtype).removeprefix("torch.")

    def follow(self, schema: Mapping[str, TensorSpec]) -> dict[str, str]:
        """Map these tensors, see `vllm_plan`: name → way; those that could not be followed are left out."""
        load = self._model.load_weights
        self._mapped, _ = follow(load, parameters(self._model), schema, part=self._ranks > 1)
        return {name: mapped.way for name, mapped in self._mapped.items()}

    def write(self, layout: Sequence[tuple[str, bool]], lent: Borrowed) -> None:
        """Put values in place. layout: name, and whether indices come before the values (else: the whole tensor)."""
        arrays = iter(borrow(lent))
        for name, sparse in layout:
            index = next(arrays) if sparse else None
            self._mapped[name].write(index, next(arrays))

    def fill(self, folder: str, names: Sequence[str]) -> None:
        """Overwrite whole tensors with a checkpoint's: the dense reload through the same places."""
        state = MappedCheckpoint(Path(folder)).state
        for name in names:
            self._mapped[name].write(None, state[name].reshape(-1))

    def read(self, name: str, lent: Borrowed, *, sparse: bool) -> None:
        """Fill in what this rank keeps. lent: for each rank the values; with several, for each which of them it keeps;
        and (sparse) their positions, of the whole tensor otherwise."""
        arrays = borrow(lent)
        index = arrays[-1] if sparse else None
        mapped = self._mapped[name]
        arrays[self._rank][...] = mapped.read(index)
        if self._ranks > 1:
            arrays[self._ranks + self._rank][...] = mapped.keeps(index)

    def keys_finite(self, blocks: Sequence[int], total: int) -> bool:
        """False when one of these blocks of keys and values (of `total`) holds what is not a number."""
        import torch

        where = torch.tensor(blocks)
        for cache in self._runner.kv_caches:
            axis = next(a for a, size in enumerate(cache.shape) if size == total)
            if not bool(torch.isfinite(cache.index_select(axis, where.to(cache.device))).all()):
                return False
        return True

    def zero_keys(self) -> None:
        """Overwrite all keys and values."""
        for cache in self._runner.kv_caches:
            cache.zero_()

    def temper(self, temperature: float) -> None:
        """Scores are read at this temperature."""
        self._temperature = temperature

    def shadow(self, schema: Mapping[str, TensorSpec], lent: Borrowed) -> None:
        """See `Fallback.shadow`."""
        self._fallback.shadow(schema, borrow(lent))

    def matches(self, name: str) -> str:
        """See `Fallback.matches`."""
        return self._fallback.matches(name, parameters(self._model))

    def patch(self, layout: Sequence[tuple[str, bool]], lent: Borrowed) -> None:
        """See `Fallback.patch`."""
        self._fallback.patch(layout, borrow(lent))

    def settle(self, how: str, mapped: Sequence[str], patched: Sequence[str]) -> None:
        """See `Fallback.settle`."""
        self._fallback.settle(how, {name: self._mapped[name] for name in mapped}, patched)

    def spoil(self) -> None:
        """See `Fallback.spoil`."""
        self._fallback.spoil(dict(self._model.named_parameters()))

    def adapt(self, folder: str) -> None:
        """See `Slot.load`."""
        self._slot.load(folder)

    def adapted(self, name: str, shape: Sequence[int]) -> tuple[Any, float]:
        """See `Slot.held`."""
        return self._slot.held(name, shape)

    def fingerprint(self) -> str:
        """See `Fallback.fingerprint`."""
        return self._fallback.fingerprint(parameters(self._model))

    def _hook_scores(self) -> None:
        """vLLM computes the logits of all positions of a step at once, and knows no temperature for a prompt's: give it
        hidden states in their place, and when it gathers logprobs from those, compute a few positions at a time."""
        runner, inner = self._runner, self._runner._get_prompt_logprobs_dict
        model, sampler = runner.model, runner.sampler
        compute, normal, gather = model.compute_logits, sampler.compute_logprobs, sampler.gather_logprobs

        def gathered(hidden: Any, count: int, wanted: Any) -> tuple[Any, ...]:
            import torch

            most = max(1, SCORE_LOGITS // runner.model_config.get_vocab_size())
            parts = [
                gather(normal(compute(some).float() / self._temperature), count, ids)[:3]
                for some, ids in zip(hidden.split(most), wanted.split(most), strict=True)
            ]
            return tuple(torch.cat(fields) for fields in zip(*parts, strict=True))

        def outer(*args: Any, **kwargs: Any) -> Any:
            model.compute_logits = sampler.compute_logprobs = lambda hidden: hidden
            sampler.gather_logprobs = gathered
            try:
                return inner(*args, **kwargs)
            finally:
                model.compute_logits, sampler.compute_logprobs, sampler.gather_logprobs = compute, normal, gather

        runner._get_prompt_logprobs_dict = outer


class Extension:
    """Mixed into vLLM's worker."""

    def deltawire(self, what: str, *args: Any, **kwargs: Any) -> Answer:
        """Call a method of this worker's `Side`."""
        try:
            if "_deltawire" not in self.__dict__:
                self.__dict__["_deltawire"] = Side(self)
            return "", getattr(self.__dict__["_deltawire"], what)(*args, **kwargs)
        except DeltawireError as error:
            return type(error).__name__, str(error)
        except Exception as error:  # noqa: BLE001 - becomes the answer: see the module
            return "EngineFailed", f"{type(error).__name__}: {error}"


def parameters(model: Any) -> dict[str, Any]:
    """Name → parameter or buffer of the model, each once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def keep_weights_live() -> None:
    """Have vLLM's layers on CPUs multiply with their parameters (elsewhere they do anyway). May be called twice.

    vLLM packs matrices away there when they are loaded, and multiplies tied output matrices with a copy: neither would
    see a patch.
    """
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(UnquantizedLinearMethod, "_deltawire"):
        return
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        _patch(method, torch.nn.functional.linear)


def _patch(method: Any, multiply: Any) -> None:
    pack = method.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = multiply
        else:
            pack(self, layer)

    method.process_weights_after_loading = process
    method._deltawire = True


def _end_with_parent() -> None:
    """vLLM's own watch begins after a worker has loaded its model, and cannot end one that waits for another."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


keep_weights_live()
_end_with_parent()
