"""Chat messages to token ids, extending recorded ids without ever encoding a sampled text again. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jinja2

from sync.errors import InvalidRequest
from sync.schema.calls import Message

from .gateway.turns import Tool, ToolCall, Turn
from .template_forms import tool_form, variants

_CACHED_CHARACTERS = 2_048
_SENTINEL = "deltawire-7f3a9c41-"
_USER, _SAID = Turn("user", "x"), Turn("assistant", "x")
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template raises on purpose, or when it meets values that its author did not think of."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the engine recorded of a conversation's last call, to be extended.

    `ids` are its prompt and output ids. `answer` is that output as parsed: whether it has reasoning, text and calls
    decides what a template must keep; ids and names of its calls are what tool results refer to. `before` are all turns
    of its prompt as the ids have them (so with the recorded reasoning, also where an agent did not send it back); only
    roles, order, reasoning and calls matter. Empty: one user turn.
    """

    ids: tuple[int, ...]
    answer: Turn = _SAID
    before: tuple[Turn, ...] = ()


def render(tokenizer: Any, prefix_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
    """The prompt of a call: recorded ids, then new messages and the opening of an assistant turn.

    Without `prefix_ids` the chat template renders the whole conversation. With them (prompt and output ids of
    the chain so far, as the engine recorded them) only the text that belongs after the assistant's content is
    encoded and appended: the end of its turn, unless the ids already end with it, the new messages, the generation
    prompt. Without messages the ids are the prompt. Reasoning in the ids is kept: whoever sends ids decides that.

    Raises InvalidRequest when both are empty, when the template refuses the messages or is missing, and when it
    changes earlier text as a conversation grows, so that no suffix exists.
    """
    if not messages:
        if not prefix_ids:
            raise InvalidRequest("the prompt is empty: send messages, or ids in prefix_ids", code="empty_prompt")
        return list(prefix_ids)
    turns = [Turn(message.role, message.content) for message in messages]
    return render_turns(tokenizer, turns, (), prefix=Prefix(tuple(prefix_ids)) if prefix_ids else None)


def render_turns(
    tokenizer: Any, turns: Sequence[Turn], tools: Sequence[Tool], *, prefix: Prefix | None = None
) -> list[int]:
    """The prompt ids of a conversation, or of its growth, up to where the assistant's turn begins.

    Without `prefix` the chat template renders all `turns`. With it `turns` are only the new ones, and the result is
    `prefix.ids` followed by what the template writes behind the answer: the end of its turn, unless the ids already
    end with it, the new turns, the generation prompt. `tools` are the same in both: some templates write them again
    with each user turn.

    Raises InvalidRequest with code `template_not_prefix_preserving` where the template, given the new turns, no longer
    writes what the engine saw: it begins the answer otherwise than the generation prompt did, or leaves out
    reasoning, text or calls. Then the whole conversation is to be rendered without a prefix. Codes `template` (it
    refuses the turns) and `no_chat_template` are for good.
    """
    source = template_of(tokenizer, tools)
    if any(turn.role == "tool" for turn in turns) and not _shows_results(tokenizer, source):
        raise InvalidRequest(
            "this model's chat template leaves out tool results: it has no place for them", code="template"
        )
    extends = None if prefix is None else (_answer_shape(prefix.answer), _shape(prefix.before))
    end = _end_of(tokenizer, prefix.ids) if prefix is not None and prefix.ids else None
    new = tuple(replace(turn, record="") for turn in turns)
    short = sum(map(_size, new)) <= _CACHED_CHARACTERS and not tools
    repeats = short and "strftime_now" not in source  # a template that tells the date renders anew
    make = _new_ids if repeats else _new_ids.__wrapped__
    ids = make(tokenizer, source, new, tuple(tools), extends, None if end is None else end[1])
    if prefix is None:
        return list(ids)
    closed = end is not None and ids[:1] == (end[0],)
    return [*prefix.ids, *(ids[1:] if closed else ids)]


def text_of(tokenizer: Any, output_ids: Sequence[int], *, ended: bool) -> str:
    """An output as text for people and environments, without the end token that closed it (`ended`)."""
    return str(tokenizer.decode(list(output_ids[:-1] if ended else output_ids), skip_special_tokens=False))


def template_of(tokenizer: Any, tools: Sequence[Tool] = ()) -> str:
    """The source of the chat template that transformers takes with or without tools; "": there is none."""
    found = tokenizer.chat_template or ""
    if isinstance(found, dict):
        found = found.get("tool_use" if tools and "tool_use" in found else "default", "")
    return str(found)


def takes_tools(tokenizer: Any, tools: Sequence[Tool]) -> bool:
    """Whether the chat template shows `tools` to the model at all; some silently leave them out."""
    try:
        return conversation_text(tokenizer, [_USER], tools) != conversation_text(tokenizer, [_USER], ())
    except InvalidRequest:
        return False


def conversation_text(tokenizer: Any, turns: Sequence[Turn], tools: Sequence[Tool], *, prompt: bool = True) -> str:
    """The template's text of a conversation, with the generation prompt (`prompt`) or ending in its last turn.

    What a template refuses is offered again in the other forms that templates want, in this order: arguments of calls
    as text, or always as an object; call ids of nine letters and digits; system turns inside the next user turn.
    Reasoning and calls for which the template has no field are written into the text. Raises InvalidRequest with the
    first refusal.
    """
    source = template_of(tokenizer, tools)
    if not source:
        raise InvalidRequest(
            "this model has no chat template: send token ids in prefix_ids, without messages",
            code="no_chat_template",
        )
    offered = [tool_form(tool) for tool in tools] or None
    first: Exception | None = None
    for messages in variants(source, turns):
        try:
            return str(
                tokenizer.apply_chat_template(messages, tools=offered, tokenize=False, add_generation_prompt=prompt)
            )
        except _REFUSALS as error:
            first = first or error
    raise InvalidRequest(f"this model's chat template refuses the messages: {first}", code="template") from None


@lru_cache(maxsize=256)
def _shows_results(tokenizer: Any, source: str) -> bool:  # noqa: ARG001 - part of the cache's key
    """Whether the policy gets to see what a tool answers; True also where the template refuses, and says why."""
    call = ToolCall("call00000", "x", "{}")
    turns = [_USER, Turn("assistant", calls=(call,)), Turn("tool", _SENTINEL, call_id=call.id, name="x")]
    try:
        return _SENTINEL in conversation_text(tokenizer, turns, ())
    except InvalidRequest:
        return True


def opening_for(tokenizer: Any, choice: str) -> str | None:
    """The text that an answer must begin with, behind the generation prompt, to be a call of a tool.

    `choice` is `required` or `name:NAME`: the text goes up to the name, or up to NAME's arguments, in the format in
    which the chat template itself writes calls. Its ids are to be appended to the prompt, and the parser is to be told.
    None for other choices, and where the template writes no calls or the parser cannot read the ones that it writes.
    """
    kind, _, name = choice.partition(":")
    if kind not in ("required", "name"):
        return None
    return _opening(tokenizer, template_of(tokenizer), name)


@lru_cache(maxsize=256)
def _opening(tokenizer: Any, source: str, name: str) -> str | None:
    from .gateway.parsing import Parser  # it renders with this module

    if "tool_calls" not in source and "<tool_call>" not in source:
        return None
    wanted, key = name or _SENTINEL + "name", _SENTINEL + "key"
    call = ToolCall("call00000", wanted, json.dumps({key: "x"}))
    turns = [_USER, Turn("assistant", calls=(call,)), Turn("tool", "x", call_id=call.id, name=wanted)]
    try:
        longer, prompt = (conversation_text(tokenizer, t, (), prompt=True) for t in (turns, turns[:1]))
    except InvalidRequest:
        return None
    made = longer[len(prompt) :]
    until = made.find(key) if name else made.find(wanted)
    if not longer.startswith(prompt) or until <= 0:
        return None
    calls = Parser(tokenizer).parse(made, tools=(Tool(wanted),)).calls
    if [found for found, _ in calls] != [wanted]:
        return None
    if not name:
        return made[:until]
    before_key = made[:until].rstrip()  # what stands between the name and the first argument, less what opens that
    for opener in ('{"', "{'", "<parameter=", "{"):
        before_key = before_key.removesuffix(opener)
    return before_key if before_key.endswith("\n") else before_key.rstrip(" ")


@lru_cache(maxsize=4_096)
def _new_ids(
    tokenizer: Any,
    source: str,  # noqa: ARG001 - part of the cache's key
    new: tuple[Turn, ...],
    tools: tuple[Tool, ...],
    extends: tuple[Turn, tuple[Turn, ...]] | None,
    end: str | None,
) -> tuple[int, ...]:
    """Ids of the opening, or of what follows an answer; the messages of environments repeat a lot."""
    if extends is None:
        text = conversation_text(tokenizer, new, tools)
    else:
        answer, before = extends
        write = partial(conversation_text, tokenizer, tools=tools)
        text = _suffix(write, answer, before, new, end, tokenizer.eos_token or "")
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _suffix(
    write: Callable[..., str],
    answer: Turn,
    before: tuple[Turn, ...],
    new: tuple[Turn, ...],
    end: str | None,
    eos: str,
) -> str:
    """The template's text behind what was sampled as `answer`, when `new` turns follow it.

    It begins with the text of the token that ended the answer (`end`), if the template has that there. Some templates
    close whole conversations with `eos`.
    """
    if not new or new[0].role != "tool":
        answer = replace(answer, text=_SENTINEL + "text", calls=())
    longer, opening = write([*before, answer, *new], prompt=True), write(before, prompt=True)
    if not longer.startswith(opening):
        raise _rewrites("what stood before the answer, or how the answer begins, is no longer the same")
    tail = _tail(longer, answer, len(opening))
    short = _tail(write([*before, answer], prompt=False), answer, 0)
    at = tail.find(end) if end else -1
    if at >= 0 and short.startswith(tail[:at]) and (answer.calls or not tail[:at].strip()):
        return tail[at:]
    if not tail.startswith(short) and not (end and end in short):
        short = short.removesuffix(eos)
    if not tail.startswith(short):
        raise _rewrites("it ends an answer otherwise when messages follow")
    if not answer.calls:
        return tail
    plain = Turn("assistant", _SENTINEL + "text")
    closing = _tail(write([*before, plain], prompt=False), plain, 0)
    closing = closing if short.endswith(closing) else closing.removesuffix(eos)
    if not short.endswith(closing):
        raise _rewrites("where tool calls end cannot be told")
    return tail[len(short) - len(closing) :]


def _tail(text: str, answer: Turn, start: int) -> str:
    """What follows the answer's sentinels; each must be there once, behind `start`."""
    last = start
    for what, mark in _marks(answer):
        at = text.find(mark, start)
        if at < 0 or text.count(mark) != 1:
            raise _rewrites(f"it leaves out or repeats the answer's {what}")
        last = max(last, at + len(mark))
    return text[last:]


def _marks(answer: Turn) -> Iterator[tuple[str, str]]:
    if answer.reasoning:
        yield "reasoning", answer.reasoning
    if answer.text:
        yield "text", answer.text
    for call in answer.calls:
        yield "tool calls", json.loads(call.arguments)["x"]


def _rewrites(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model's chat template rewrites earlier turns when messages follow ({why}), so recorded ids cannot "
        "be extended; send the whole conversation as messages without prefix_ids",
        code="template_not_prefix_preserving",
    )


def _end_of(tokenizer: Any, ids: Sequence[int]) -> tuple[int, str] | None:
    """The last id and its text, if it is a control token. Not every model names its end-of-turn token among the special
    ones; all of them add it to the vocabulary."""
    token = ids[-1]
    if token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder:
        return token, str(tokenizer.decode([token], skip_special_tokens=False))
    return None


# --- turns as shapes: what a template's structure depends on, so that equal shapes share a rendering


def _answer_shape(answer: Turn) -> Turn:
    """The answer with sentinels for what it has; without text and calls it counts as one with text."""
    calls = tuple(
        ToolCall(call.id, call.name, json.dumps({"x": f"{_SENTINEL}call-{n}-"})) for n, call in enumerate(answer.calls)
    )
    text = _SENTINEL + "text" if answer.text or not calls else ""
    return Turn("assistant", text, _SENTINEL + "reasoning" if answer.reasoning else "", calls)


def _shape(before: tuple[Turn, ...]) -> tuple[Turn, ...]:
    ids: dict[str, str] = {}

    def short(call_id: str) -> str:
        return ids.setdefault(call_id, f"call{len(ids):05d}") if call_id else ""

    return tuple(
        Turn(
            turn.role,
            "" if turn.role == "assistant" and not turn.text else "x",
            "r" if turn.reasoning else "",
            tuple(ToolCall(short(call.id), call.name, "{}") for call in turn.calls),
            short(turn.call_id),
            turn.name,
        )
        for turn in before
    ) or (_USER,)


def _size(turn: Turn) -> int:
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in turn.calls)
    return len(turn.text) + len(turn.reasoning) + calls
