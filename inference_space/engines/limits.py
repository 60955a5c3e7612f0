"""What every engine refuses, and how it says so."""

from __future__ import annotations

from collections.abc import Sequence

from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.base import Identity
from sync.schema.calls import ScoreSequence


def check_prompt(ids: Sequence[int], max_len: int, vocabulary: int) -> None:
    """Raise InvalidRequest for a prompt that is empty, leaves no room for output, or has unknown ids."""
    if not ids:
        raise InvalidRequest("the prompt is empty: send messages, or ids in prefix_ids", code="empty_prompt")
    if len(ids) >= max_len:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens; at most {max_len - 1} leave room for output (setting "
            f"max_len = {max_len}); prompts are never cut",
            code="prompt_too_long",
        )
    _check_ids(ids, "the prompt", vocabulary)


def check_scores(sequences: Sequence[ScoreSequence], max_len: int, vocabulary: int) -> None:
    """Raise InvalidRequest for a sequence to score that is too long, has unknown ids or no position to score."""
    for number, sequence in enumerate(sequences):
        _check_ids(sequence.ids, f"sequences.{number}", vocabulary)
        if len(sequence.ids) > max_len:
            raise InvalidRequest(
                f"sequences.{number}: {len(sequence.ids)} ids; at most {max_len} are possible (setting max_len)",
                code="sequence_too_long",
            )
        if sequence.start >= len(sequence.ids):
            raise InvalidRequest(
                f"sequences.{number}: start {sequence.start} is not a position of its {len(sequence.ids)} ids"
            )


def check_queue(queued: int, new: int, most: int) -> None:
    """Raise InvalidRequest (429) when `new` calls do not fit behind those that wait."""
    if queued + new > most:
        raise InvalidRequest(
            f"{queued} calls are waiting and {new} more would exceed {most} (setting max_queued); try again later or "
            "send fewer",
            status=429,
            code="overloaded",
        )


def no_weights() -> PeerUnavailable:
    """The engine has nothing to answer with yet."""
    return PeerUnavailable("the engine holds no weights yet; wait until /ready answers 200")


def model_changed() -> InvalidRequest:
    """Another model came while the call ran."""
    text = "the model changed its shape while this call ran or waited; send it again"
    return InvalidRequest(text, status=503, code="model_changed")


def not_finite(identity: Identity | None) -> InvalidRequest:
    """The weights give no answer here."""
    return InvalidRequest(
        f"version {identity} gives logits that are not finite here; publish better weights",
        status=500,
        code="not_finite",
    )


def _check_ids(ids: Sequence[int], what: str, vocabulary: int) -> None:
    if max(ids) >= vocabulary or min(ids) < 0:
        raise InvalidRequest(
            f"{what}: id {max(ids)} is unknown, the vocabulary ends at {vocabulary - 1}; send ids of this model's "
            "tokenizer",
            code="unknown_token",
        )
