"""The vLLM engine: vLLM in this process, its weights patched in place, its tokens named by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from sync.engine import TensorPatch
from sync.errors import ConfigError, InvalidRequest, StopError
from sync.schema.base import Identity
from sync.schema.calls import ScoreSequence
from sync.tensors import Bits

from .adapter import base_of
from .base import Call, Generation, Scores
from .limits import check_prompt, check_scores, no_weights
from .rows import Running, ScoreJob, StopTexts
from .vllm_adapter import LiveAdapter
from .vllm_core import Core
from .vllm_loop import Loop
from .vllm_weights import WAYS, LiveWeights
from .weights import end_ids


class VllmEngine:
    """See `base.Engine` for the contract of every method. Call `vllm_core.prepare_environment` first.

    dtype: auto (the checkpoint's own) | float32 | bfloat16. max_slots sequences run at once, each of at most max_len
    tokens; max_queued more may wait (sequences to score count). prefill_tokens bounds the tokens of one step.
    kv_policy: see `vllm_loop.Loop`. A call's seed is not used: vLLM on a CPU dies of one (`vllm_core.Core.add`).
    tensor_parallel: worker processes that hold a part of each tensor. adapter, base: as of the torch engine.
    ways: see `vllm_weights.LiveWeights`.
    """

    def __init__(
        self,
        *,
        max_slots: int = 256,
        max_len: int = 1024,
        max_queued: int = 4096,
        prefill_tokens: int = 16384,
        dtype: str = "auto",
        pause_seconds: float = 120.0,
        kv_policy: str = "recompute",
        tensor_parallel: int = 1,
        ways: Sequence[str] = WAYS,
        adapter: bool = False,
        base: Path | None = None,
    ) -> None:
        if adapter and tensor_parallel > 1:
            raise ConfigError(f"tensor_parallel = {tensor_parallel}: an adapter is served by one worker; leave it at 1")
        self._adapter, self._base = adapter, base
        self._max_slots, self._max_len, self._prefill_tokens = max_slots, max_len, prefill_tokens
        self._dtype, self._tensor_parallel, self._pause_seconds, self._ways = (
            dtype,
            tensor_parallel,
            pause_seconds,
            ways,
        )
        self._tokenizer: Any = None
        self._weights: LiveWeights | LiveAdapter | None = None
        self._loop = Loop(max_slots=max_slots, max_queued=max_queued, pause_seconds=pause_seconds, kv=kv_policy)

    @property
    def tokenizer(self) -> Any:
        """The loaded checkpoint's tokenizer."""
        if self._tokenizer is None:
            raise no_weights()
        return self._tokenizer

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._max_len

    @property
    def seeds(self) -> bool:
        """They do not: vLLM on a CPU dies of one (`vllm_core.Core.add`)."""
        return False

    @property
    def failure(self) -> str:
        """Why the engine can never answer again, or the empty string."""
        return self._loop.failure

    # Calls: from any thread

    def generate(self, calls: Sequence[Call]) -> list[Future[Generation]]:
        """Queue calls."""
        weights = self._loaded()
        accepted, futures = [], []
        for call in calls:
            future: Future[Generation] = Future()
            futures.append(future)
            try:
                check_prompt(call.ids, self._max_len, weights.vocabulary)
            except InvalidRequest as error:
                future.set_exception(error)
                continue
            limit = min(call.sampling.max_tokens, self._max_len - len(call.ids))
            stops = StopTexts.of(self._tokenizer, call.sampling.stop)
            accepted.append(Running(list(call.ids), call.sampling.temperature, 0, limit, future, stops=stops))
        self._loop.submit(weights.core, accepted)
        return futures

    def score(self, sequences: Sequence[ScoreSequence], temperature: float) -> Future[Scores]:
        """Queue teacher forcing."""
        weights = self._loaded()
        check_scores(sequences, self._max_len, weights.vocabulary)
        job = ScoreJob(sequences, temperature, Future(), self._max_len)
        self._loop.submit(weights.core, (), (job,))
        return job.future

    def _loaded(self) -> LiveWeights | LiveAdapter:
        weights = self._weights
        if weights is None:
            raise StopError(self.failure) if self.failure else no_weights()
        return weights

    # Weights: the follower's side

    def load(self, folder: Path, identity: Identity) -> None:
        """Take a checkpoint. Sequences under way go on with it when the model has the same shape, else they fail."""
        from transformers import AutoTokenizer

        self.pause()
        source = base_of(folder, self._base) if self._adapter else folder
        tokenizer = AutoTokenizer.from_pretrained(source)
        if self._weights is not None and not self._weights.core.lost and self._weights.same_shape(folder):
            self._weights.refill(folder)
        else:
            self._loop.install(None, ())
            if self._weights is not None:
                old, self._weights = self._weights, None  # freed first: two models may not fit
                old.close()
            self._weights = (
                LiveAdapter(folder, source, self._start)
                if self._adapter
                else LiveWeights(folder, self._start, self._ways)
            )
            self._weights.core.warm_up()
        weights = self._weights
        ends = end_ids(weights.config, tokenizer, source)
        self._loop.install(weights.core, ends[ends < weights.vocabulary].tolist())
        self._loop.changed_weights(identity)
        self._tokenizer = tokenizer

    def _start(self, folder: Path, lora_rank: int = 0) -> Core:
        return Core(
            folder, slots=self._max_slots, max_len=self._max_len, step_tokens=self._prefill_tokens, dtype=self._dtype,
            tensor_parallel=self._tensor_parallel, rpc_seconds=self._pause_seconds,
            lora_rank=lora_rank,
        )  # fmt: skip

    def pause(self) -> None:
        """Stop between two steps."""
        self._loop.pause()
        if self._weights is not None:
            self._weights.doubt()

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """Scatter new values in place."""
        self._held().apply(patches)
        self._loop.changed_weights(identity)

    def read(self, name: str, index: np.ndarray[Any, Any] | None) -> Bits:
        """The bits that vLLM computes with."""
        return self._held().read(name, index)

    def resume(self) -> None:
        """Go on."""
        self._held()
        self._loop.resume()

    def _held(self) -> LiveWeights | LiveAdapter:
        if self._weights is None or not self._loop.paused:
            raise StopError("the engine's weights are touched only after a load, between pause and resume")
        return self._weights

    def ways(self) -> dict[str, str]:
        """How each tensor is reached: `plan` or `trace` (see `vllm_plan`), `patch` or `dense` (see `vllm_fallback`)."""
        weights = self._weights
        return {} if weights is None else weights.ways()

    def status(self) -> dict[str, float | int | str]:
        """Counters and limits."""
        weights = self._weights
        limits = {"max_slots": self._max_slots, "max_len": self._max_len, "tensor_parallel": self._tensor_parallel}
        device = "" if weights is None else weights.device
        compute = "" if weights is None else str(weights.compute).removeprefix("torch.")
        return {**self._loop.counts(), **limits, "device": device, "dtype": compute}

    def close(self) -> None:
        """Stop."""
        self._loop.close()
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()
