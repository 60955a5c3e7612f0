"""Chat messages to token ids, extending recorded ids without ever encoding a sampled text again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jinja2

from sync.errors import InvalidRequest
from sync.schema.calls import Message

_CACHED_CHARACTERS = 2_048
_SENTINEL = "deltawire-7f3a9c41-assistant-content"
_OPENING = ({"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL})


def render(tokenizer: Any, prefix_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
    """The prompt of a call: recorded ids, then new messages and the opening of an assistant turn.

    Without `prefix_ids` the chat template renders the whole conversation. With them (prompt and output ids of
    the chain so far, as the engine recorded them) only the text that belongs after the assistant's content is
    encoded and appended: the end of its turn, unless the ids already end with it, the new messages, the generation
    prompt. Without messages the ids are the prompt.

    Raises InvalidRequest when both are empty, when the template refuses the messages or is missing, and when it
    changes earlier text as a conversation grows, so that no suffix exists.
    """
    if not messages:
        if not prefix_ids:
            raise InvalidRequest("the prompt is empty: send messages, or ids in prefix_ids", code="empty_prompt")
        return list(prefix_ids)
    template = tokenizer.chat_template or ""
    short = sum(len(message.content) for message in messages) <= _CACHED_CHARACTERS
    repeats = short and "strftime_now" not in template  # a template that tells the date renders anew
    suffix = (_new_ids if repeats else _new_ids.__wrapped__)(tokenizer, template, tuple(messages), bool(prefix_ids))
    if not prefix_ids:
        return list(suffix)
    closed = suffix[:1] == (prefix_ids[-1],) and _is_control(tokenizer, suffix[0])
    return [*prefix_ids, *(suffix[1:] if closed else suffix)]


@lru_cache(maxsize=4_096)
def _new_ids(
    tokenizer: Any,
    template: str,  # noqa: ARG001 - part of the cache's key
    messages: tuple[Message, ...],
    extends: bool,  # noqa: FBT001
) -> tuple[int, ...]:
    """Ids of the opening, or of what follows an assistant's content; the messages of environments repeat a lot."""
    new = [message.model_dump() for message in messages]
    text = _suffix(tokenizer, new) if extends else _text(tokenizer, new, prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _is_control(tokenizer: Any, token: int) -> bool:
    """Not every model names its end-of-turn token among the special ones; all of them add it to the vocabulary."""
    return token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder


def text_of(tokenizer: Any, output_ids: Sequence[int], *, ended: bool) -> str:
    """An output as text for people and environments, without the end token that closed it (`ended`)."""
    return str(tokenizer.decode(list(output_ids[:-1] if ended else output_ids), skip_special_tokens=False))


def _suffix(tokenizer: Any, new: list[dict[str, str]]) -> str:
    """The template's text after an assistant's content when `new` messages follow it."""
    head, found, closing = _text(tokenizer, list(_OPENING), prompt=False).partition(_SENTINEL)
    longer_head, still, suffix = _text(tokenizer, [*_OPENING, *new], prompt=True).partition(_SENTINEL)
    if not found or not still or longer_head != head or not suffix.startswith(closing) or _SENTINEL in suffix:
        raise InvalidRequest(
            "this model's chat template rewrites earlier turns when messages follow, so recorded ids cannot "
            "be extended; send the whole conversation as messages without prefix_ids",
            code="template_not_prefix_preserving",
        )
    return suffix


def _text(tokenizer: Any, messages: list[dict[str, str]], *, prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise InvalidRequest(
            "this model has no chat template: send token ids in prefix_ids, without messages",
            code="no_chat_template",
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"this model's chat template refuses the messages: {error}", code="template") from None
