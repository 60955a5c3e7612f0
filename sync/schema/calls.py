"""HTTP bodies of an inference Space: generate, score, readiness, sync status, errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import IdentityText, Wire

MAX_CALLS = 1_024
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
LOWEST_TEMPERATURE = 1e-3


def _no_overflow(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"is {value:g}; possible are 0 (the most likely token) and {LOWEST_TEMPERATURE:g} to 100")
    return value


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_no_overflow)]
"""0 takes the most likely token; below 0.001 logits divided by it would leave float32."""
Ids = Annotated[tuple[TokenId, ...], Field(max_length=1_048_576)]


TOO_LONG_CODES = frozenset({"prompt_too_long", "sequence_too_long", "body_too_large"})
"""Error codes that mean: this conversation has outgrown the policy."""
REFUSED_CODES = frozenset(
    {
        "invalid_request", "empty_prompt", "unknown_token", "template", "template_not_prefix_preserving",
        "no_chat_template", "unsupported", "model_not_found", "session_not_found", "session_full", "conflict",
    }
)  # fmt: skip
"""Error codes that mean: the same call will be refused again."""
TRANSIENT_CODES = frozenset(
    {"deadline", "not_ready", "engine_failed", "internal", "model_changed", "not_finite", "overloaded"}
)
"""Error codes that mean: infrastructure; the same call may work later, and nothing is known of the policy."""


StopText = Annotated[str, Field(min_length=1, max_length=256)]


class ErrorBody(Wire):
    """The content of every error answer: `{"error": {...}}`."""

    code: str
    message: str


class ErrorResponse(Wire):
    """What every 4xx and 5xx answer holds."""

    error: ErrorBody


class Message(Wire):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(max_length=4_194_304)


class Sampling(Wire):
    """How to sample. `seed` makes one call repeatable on one weight version.

    An output ends with the model's own end token, or with the token that completes one of the texts in `stop`: that
    token is part of the output, and the text may go on behind the stop text within it.
    """

    max_tokens: int = Field(default=64, ge=1, le=1_048_576)
    temperature: Temperature = 1.0
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: Annotated[tuple[StopText, ...], Field(max_length=16)] = ()


class GenerateCall(Wire):
    """One call: the recorded ids so far, and new messages for the engine to render behind them.

    The client never tokenizes. The first call of a chain has no `prefix_ids` and the opening messages; the next has
    the previous prompt and output ids as `prefix_ids` and only the new messages; ids in, no messages, is plain
    token-in token-out. `id` is echoed.
    """

    id: str = Field(min_length=1, max_length=128)
    prefix_ids: Ids = ()
    messages: Annotated[tuple[Message, ...], Field(max_length=4_096)] = ()
    sampling: Sampling = Sampling()


class GenerateRequest(Wire):
    """A batch of independent calls; one bad call fails alone."""

    calls: Annotated[tuple[GenerateCall, ...], Field(min_length=1, max_length=MAX_CALLS)]


class VersionSpan(Wire):
    """Positions [start, end) of the output ids that were sampled with one weights version."""

    version: IdentityText
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class CallResult(Wire):
    """What one call gave: the exact ids seen and sampled, one logprob per output id, and who sampled what.

    logprobs are natural logs under the sampling distribution (temperature applied). `text` is derived from the ids,
    for people and environments, without the end token and without a stop text and what follows it. `error` is set
    instead of a finish reason when this call was refused or aborted.
    """

    id: str
    prompt_ids: Ids = ()
    output_ids: Ids = ()
    logprobs: tuple[float, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    text: str = ""
    error: ErrorBody | None = None


class GenerateResponse(Wire):
    """Results in the order of the calls."""

    calls: tuple[CallResult, ...]


class ScoreSequence(Wire):
    """Token ids to be read under the current weights; logprobs are wanted from position `start` (≥ 1) on."""

    ids: Annotated[tuple[TokenId, ...], Field(min_length=2, max_length=1_048_576)]
    start: int = Field(default=1, ge=1)


class ScoreRequest(Wire):
    """Teacher forcing for a batch of sequences at one temperature."""

    sequences: Annotated[tuple[ScoreSequence, ...], Field(min_length=1, max_length=MAX_CALLS)]
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE, le=100)


class ScoreResponse(Wire):
    """One list of logprobs per sequence (for ids[start:]), all under `version`."""

    version: IdentityText
    logprobs: tuple[tuple[float, ...], ...]


class SyncStatus(Wire):
    """What a follower holds and has checked. `version` is what the engine serves, `mirror` what is on its disk.

    digest_checks counts comparisons of a state digest with a manifest (one per version applied, one per full audit),
    digest_failures how many differed. `lag` is head minus engine version within the head's epoch (None: unknown).
    `paused`: weights are being exchanged, no call advances. `ways` says per checkpoint tensor how the engine found its
    places; one not listed is a parameter of its own name.
    """

    ready: bool
    reason: str = ""
    channel_uid: str | None = None
    version: IdentityText | None = None
    mirror: IdentityText | None = None
    head: IdentityText | None = None
    state_digest: str | None = None
    lag: int | None = None
    paused: bool = False
    highest_reported: IdentityText | None = None
    versions_applied: int = 0
    anchors_loaded: int = 0
    digest_checks: int = 0
    digest_failures: int = 0
    refused_objects: int = 0
    bytes_fetched: int = 0
    pause_seconds_last: float = 0.0
    polls: int = 0
    last_error: str = ""
    engine: dict[str, float | int | str] = {}
    ways: dict[str, str] = {}
