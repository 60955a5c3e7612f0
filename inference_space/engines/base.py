"""The seam between the Space and whatever runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from sync.engine import EngineSink
from sync.schema.base import Identity
from sync.schema.calls import Sampling, ScoreSequence, VersionSpan


class Call(NamedTuple):
    """What to continue, and how."""

    ids: Sequence[int]
    sampling: Sampling


class Generation(NamedTuple):
    """What one call gave; `spans` covers `output_ids` without gap. The end token is part of the output.

    `stopped_by` is the stop text that ended it; "" for the end token (`stop`) or the limit (`length`).
    """

    output_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    stopped_by: str = ""


class Scores(NamedTuple):
    """One list of logprobs per sequence, for ids[start:], all under `identity`."""

    identity: Identity
    logprobs: list[list[float]]


class Engine(EngineSink, Protocol):
    """Holds one version of the weights and samples from it. Requests may come from any thread.

    Between `pause` and `resume` no forward pass runs and requests wait, queued or in flight; only then may `apply`
    and `read` be called. `load` pauses by itself. An engine starts paused, without weights. Errors: `load` raises
    ConfigError when it cannot serve this checkpoint and CorruptObject when it is damaged, `apply` InvalidPatch before
    anything is written, `pause` PeerUnavailable at its deadline, all of them StopError after a failure. `resume`
    computes again first what was computed with older weights.
    """

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint loaded last. Raises PeerUnavailable before the first `load`."""

    @property
    def max_len(self) -> int:
        """The most tokens that prompt and output of one call may have together."""

    @property
    def seeds(self) -> bool:
        """Whether a call's seed decides what is sampled."""

    @property
    def failure(self) -> str:
        """Why the engine can never answer again, or the empty string."""

    def generate(self, calls: Sequence[Call]) -> list[Future[Generation]]:
        """Queue calls; the futures come in their order and may be cancelled.

        A call that is refused has a future that holds InvalidRequest; it does not touch the others. Raises
        InvalidRequest (429 `overloaded`) when the queue cannot take them all, PeerUnavailable before the first
        `load`, StopError after a failure.
        """

    def score(self, sequences: Sequence[ScoreSequence], temperature: float) -> Future[Scores]:
        """Queue teacher forcing under one version of the weights.

        Raises InvalidRequest when a sequence is refused or the queue is full, else as `generate`.
        """

    def ways(self) -> dict[str, str]:
        """Checkpoint tensor → how its places were found: `plan` or `trace` (the model's own loader was followed, see
        `vllm_plan`). One that is not listed is a parameter of its own name."""

    def status(self) -> dict[str, float | int | str]:
        """Counters: active, queued, output_tokens, prompt_tokens, tokens_per_second (last seconds), steps, …"""

    def close(self) -> None:
        """Stop; calls not yet answered fail."""
