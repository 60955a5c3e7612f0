"""The seam between the Space and whatever runs the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from sync.schema.base import Identity
from sync.schema.calls import Sampling, ScoreSequence, VersionSpan

TensorPatch = tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any]]
"""(flat indices, strictly increasing, or None for the whole tensor; values as raw bits of the checkpoint's dtype)."""


class Call(NamedTuple):
    """What to continue, and how."""

    ids: Sequence[int]
    sampling: Sampling


class Generation(NamedTuple):
    """What one call gave; `spans` covers `output_ids` without gap. The end token is part of the output."""

    output_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str


class Scores(NamedTuple):
    """One list of logprobs per sequence, for ids[start:], all under `identity`."""

    identity: Identity
    logprobs: list[list[float]]


class Engine(Protocol):
    """Holds one version of the weights and samples from it; every method may be called from any thread.

    Between `pause` and `resume` no forward pass runs, requests stay queued or in flight, and only then `load`,
    `apply` and `read` may be called. An engine starts paused, without weights.
    """

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint loaded last. Raises PeerUnavailable before the first `load`."""

    @property
    def max_len(self) -> int:
        """The most tokens that prompt and output of one call may have together."""

    @property
    def failure(self) -> str:
        """Why the engine can never answer again, or the empty string."""

    def generate(self, calls: Sequence[Call]) -> list[Future[Generation]]:
        """Queue calls; the futures come in their order and may be cancelled.

        A call that is refused has a future that holds InvalidRequest; it does not touch the others. Raises
        InvalidRequest (429 `overloaded`) when the queue cannot take them all, StopError after a failure.
        """

    def score(self, sequences: Sequence[ScoreSequence], temperature: float) -> Future[Scores]:
        """Queue teacher forcing under one version of the weights.

        Raises InvalidRequest when a sequence is refused or the queue is full, StopError after a failure.
        """

    def load(self, folder: Path, identity: Identity) -> None:
        """Take the weights and tokenizer of a checkpoint folder, as private copies; stays paused.

        Raises ConfigError when the engine cannot serve this checkpoint, CorruptObject when it is damaged.
        """

    def pause(self) -> None:
        """Return when no forward pass runs. Raises PeerUnavailable when that takes too long."""

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """Scatter new values in place. Raises InvalidPatch before anything is written."""

    def read(self, name: str, index: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        """The bits held at flat positions `index` of a checkpoint tensor (None: all of it, flat)."""

    def resume(self) -> None:
        """Go on; what was computed with older weights is computed again first."""

    def status(self) -> dict[str, float | int | str]:
        """Counters: active, queued, output_tokens, prompt_tokens, tokens_per_second, steps, recomputed_tokens …"""

    def close(self) -> None:
        """Stop; calls not yet answered fail."""
