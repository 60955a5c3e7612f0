"""The torch engine: transformers models with continuous batching, for tests, laptops and small machines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sync.engine import TensorPatch
from sync.errors import InvalidRequest, StopError
from sync.schema.base import Identity
from sync.schema.calls import ScoreSequence
from sync.tensors import Bits

from .adapter import AdapterWeights, base_of
from .base import Call, Generation, Scores
from .forward import Passes
from .limits import check_prompt, check_scores, no_weights
from .rows import Running, ScoreJob, StopTexts
from .scheduler import Scheduler
from .weights import Weights, end_ids

_SCORE_LOGITS = 1 << 26
"""Most logits of one score pass: 256 MiB in float32."""


class TorchEngine:
    """See `base.Engine` for the contract of every method.

    dtype: auto | float32 | bfloat16, what the model computes in; the weights are the published values either way.
    max_slots sequences run at once, each of at most max_len tokens; max_queued more may wait (sequences to score
    count). prefill_tokens bounds the padded tokens of one pass (a longer sequence passes alone). A call may ask for
    more output than max_len leaves room for: it then ends there with finish reason `length`. Seeded calls repeat on
    one version up to float rounding, which depends on the size of the batch they meet. adapter: what is loaded and
    patched are adapters, of `base` or else of the model that their configuration names (`adapter.base_of`).
    """

    def __init__(
        self,
        *,
        max_slots: int = 256,
        max_len: int = 1024,
        max_queued: int = 4096,
        prefill_tokens: int = 16384,
        dtype: str = "auto",
        device: str = "auto",
        pause_seconds: float = 120.0,
        adapter: bool = False,
        base: Path | None = None,
    ) -> None:
        self._adapter, self._base = adapter, base
        self._max_len, self._max_slots, self._prefill_tokens = max_len, max_slots, prefill_tokens
        self._dtype = dtype
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._tokenizer: Any = None
        self._weights: Weights | None = None
        self._passes: Passes | None = None
        self._scheduler = Scheduler(
            max_slots=max_slots,
            max_queued=max_queued,
            prefill_tokens=prefill_tokens,
            pause_seconds=pause_seconds,
        )

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
        """They do."""
        return True

    @property
    def failure(self) -> str:
        """Why the engine can never answer again, or the empty string."""
        return self._scheduler.failure

    # Requests

    def generate(self, calls: Sequence[Call]) -> list[Future[Generation]]:
        """Queue calls."""
        passes = self._loaded()
        accepted, futures = [], []
        unseeded = np.frombuffer(os.urandom(8 * len(calls)), dtype=np.uint64).tolist()
        for call, noise in zip(calls, unseeded, strict=True):
            future: Future[Generation] = Future()
            futures.append(future)
            try:
                check_prompt(call.ids, self._max_len, passes.vocabulary)
            except InvalidRequest as error:
                future.set_exception(error)
                continue
            sampling = call.sampling
            seed = noise if sampling.seed is None else sampling.seed
            limit = min(sampling.max_tokens, self._max_len - len(call.ids))
            stops = StopTexts.of(self._tokenizer, sampling.stop)
            accepted.append(Running(list(call.ids), sampling.temperature, seed, limit, future, stops=stops))
        self._scheduler.submit(passes, accepted)
        return futures

    def score(self, sequences: Sequence[ScoreSequence], temperature: float) -> Future[Scores]:
        """Queue teacher forcing."""
        passes = self._loaded()
        vocabulary = passes.vocabulary
        check_scores(sequences, self._max_len, vocabulary)
        most = max(1, min(self._prefill_tokens, _SCORE_LOGITS // vocabulary))
        job = ScoreJob(sequences, temperature, Future(), most)
        self._scheduler.submit(passes, (), (job,))
        return job.future

    def _loaded(self) -> Passes:
        passes = self._passes
        if passes is None:
            raise no_weights()
        return passes

    # Weights: the follower's side

    def load(self, folder: Path, identity: Identity) -> None:
        """Take a checkpoint. Sequences under way go on with it when the model has the same shape, else they fail."""
        from transformers import AutoTokenizer

        self.pause()
        source = base_of(folder, self._base) if self._adapter else folder
        tokenizer = AutoTokenizer.from_pretrained(source)
        if self._weights is not None and self._weights.same_shape(folder):
            self._weights.refill(folder)
        else:
            self._scheduler.install(None, np.zeros(0, dtype=np.int64))
            self._weights = self._passes = None  # freed first: two models may not fit
            kinds = {"dtype": self._dtype, "device": self._device}
            weights = AdapterWeights(folder, source, **kinds) if self._adapter else Weights(folder, **kinds)
            self._passes = Passes(weights.model, self._max_slots, self._max_len)
            self._weights = weights
        self._scheduler.install(self._passes, end_ids(self._weights.config, tokenizer, source))
        self._scheduler.changed_weights(identity)
        self._tokenizer = tokenizer

    def pause(self) -> None:
        """Stop between two passes."""
        self._scheduler.pause()

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """Scatter new values in place."""
        self._held().apply(patches)
        self._scheduler.changed_weights(identity)

    def read(self, name: str, index: np.ndarray[Any, Any] | None) -> Bits:
        """The bits held."""
        return self._held().read(name, index)

    def resume(self) -> None:
        """Go on."""
        self._held()
        self._scheduler.resume()

    def _held(self) -> Weights:
        if self._weights is None or not self._scheduler.paused:
            raise StopError("the engine's weights are touched only after a load, between pause and resume")
        return self._weights

    def ways(self) -> dict[str, str]:
        """Nothing to tell: every tensor is a parameter of its own name."""
        return {}

    def status(self) -> dict[str, float | int | str]:
        """Counters and limits."""
        compute = "" if self._weights is None else str(self._weights.compute).removeprefix("torch.")
        limits = {"max_slots": self._max_slots, "max_len": self._max_len}
        return {**self._scheduler.counts(), **limits, "device": self._device, "dtype": compute}

    def close(self) -> None:
        """Stop."""
        self._scheduler.close()
