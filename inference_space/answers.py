"""What every route says in the same way: errors, and the text of an output."""

from __future__ import annotations

from typing import Any

from sync.errors import DeltawireError, InvalidRequest, RetryError, StopError

from .engines.base import Generation


def error_of(error: DeltawireError) -> tuple[int, str, str]:
    """HTTP status, code and message of an error of ours."""
    if isinstance(error, InvalidRequest):
        return error.status, error.code, str(error)
    if isinstance(error, RetryError):
        return 503, "not_ready", str(error)
    if isinstance(error, StopError):
        return 503, "engine_failed", str(error)
    return 500, "internal", str(error)


def text_of_generation(tokenizer: Any, made: Generation) -> str:
    """An output as text for people and agents: without the end token, without a stop text and what follows it."""
    ended = made.finish_reason == "stop" and not made.stopped_by
    text = str(tokenizer.decode(made.output_ids[:-1] if ended else made.output_ids, skip_special_tokens=False))
    return text.partition(made.stopped_by)[0] if made.stopped_by else text
