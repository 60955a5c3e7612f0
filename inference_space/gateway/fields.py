"""What the dialects share: reading a body without trusting it, folding turns, server-sent events. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from sync.errors import InvalidRequest
from sync.schema.calls import LOWEST_TEMPERATURE, TOO_LONG_CODES

from .turns import Tool, ToolCall, Turn

MAX_ITEMS = 16_384
"""Most messages, items, parts or tools in one list of a body."""
MAX_DEPTH = 96
"""Deepest nesting of a body; what reads it later (templates, JSON encoders) recurses."""
_MAX_STOPS = 16
_DELTAS = 6
_THINK, _UNTHINK = "<think>", "</think>"

_NUMBERS: dict[str, tuple[float, ...]] = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "top_a": (0,), "typical_p": (1,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,),
}  # fmt: skip
_COLLECTIONS = ("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids")
_FLAGS = ("ignore_eos", "use_beam_search")


def checked(body: object) -> dict[str, Any]:
    """`body`, once it is known that nothing in it can make later code fail: it is an object, nested at most MAX_DEPTH
    deep, its texts can be encoded and its numbers are finite. Raises InvalidRequest."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"body: must be an object, is {_kind(body)}")
    for name, top in body.items():
        stack = [(name, 0), (top, 1)]
        while stack:
            value, depth = stack.pop()
            wrong = _wrong(value, depth)
            if wrong:
                raise InvalidRequest(f"{ascii(name)[1:-1][:60]}: {wrong}")
            if isinstance(value, dict):
                stack.extend((key, depth) for key in value)
                stack.extend((inner, depth + 1) for inner in value.values())
            elif isinstance(value, list):
                stack.extend((inner, depth + 1) for inner in value)
    return body


def _wrong(value: object, depth: int) -> str:
    if depth > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep"
    if isinstance(value, str):
        return "" if _encodable(value) else "holds half of a surrogate pair, which is no text"
    if isinstance(value, float):
        return "" if math.isfinite(value) else "holds a number that is not finite"
    return ""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def short(value: object) -> str:
    """A value of a checked body for a message: ASCII, at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """One object of a checked body, and the path to it; every reader names the path when it refuses.

    An absent field and null are the same.
    """

    __slots__ = ("_raw", "where")

    def __init__(self, value: object, where: str = "") -> None:
        self.where = where
        if not isinstance(value, dict):
            raise InvalidRequest(f"{where or 'body'}: must be an object, is {_kind(value)}")
        self._raw: dict[str, Any] = value

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str) -> Any:
        """A field as it is."""
        return self._raw.get(name)

    def keys(self) -> set[str]:
        """The names of all fields."""
        return set(self._raw)

    def refuse(self, name: str, what: str, *, code: str = "invalid_request") -> NoReturn:
        """Raise InvalidRequest about a field."""
        raise InvalidRequest(f"{self.at(name)}: {what}", code=code)

    def unsupported(self, name: str, advice: str) -> NoReturn:
        """Raise InvalidRequest about a value that is understood and cannot be honoured."""
        self.refuse(name, f"{short(self.get(name))} is not supported; {advice}", code="unsupported")

    def text(self, name: str) -> str:
        """A text; "" when absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"must be a text, is {_kind(value)}")
        return value or ""

    def named(self, name: str) -> str:
        """A text of 1 to 512 characters."""
        value = self.text(name)
        if not 1 <= len(value) <= 512:
            self.refuse(name, f"must be a text of 1 to 512 characters, has {len(value)}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, is {_kind(value)}")
        return value

    def whole(self, name: str, low: int, high: int = 2**63 - 1) -> int | None:
        """A whole number from `low` to `high` (2.0 is one); None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            self.refuse(name, f"must be a whole number, is {short(value)}")
        if not low <= value <= high:
            self.refuse(name, f"must be {low} to {high}, is {short(value)}")
        return int(value)

    def temperature(self) -> float | None:
        """The field `temperature`, 0 to 100; below 0.001 it is 0, which takes the same token and overflows nothing."""
        value = self.get("temperature")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            self.refuse("temperature", f"must be a number from 0 to 100, is {short(value)}")
        return float(value) if value >= LOWEST_TEMPERATURE else 0.0

    def inner(self, name: str) -> Fields | None:
        """An object; None when absent."""
        value = self.get(name)
        return None if value is None else Fields(value, self.at(name))

    def items(self, name: str) -> list[Fields]:
        """A list of objects; empty when absent."""
        return [Fields(value, f"{self.at(name)}.{i}") for i, value in enumerate(self.listed(name))]

    def listed(self, name: str) -> list[Any]:
        """A list of at most MAX_ITEMS; empty when absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, f"must be a list, is {_kind(value)}")
        if len(value) > MAX_ITEMS:
            self.refuse(name, f"has {len(value)} entries, possible are {MAX_ITEMS}")
        return value

    def content(self, name: str, kinds: Mapping[str, str]) -> str:
        """A content as text: null is "", a text is itself, a list of parts is their texts joined by newlines.

        Parts without text add nothing, so a list of one part equals the plain text and a part put behind extends it.
        `kinds` names the types of parts that have text, and where they have it; others are refused.
        """
        if not isinstance(self.get(name), list):
            return self.text(name)
        return joined(part.part(kinds) for part in self.items(name))

    def part(self, kinds: Mapping[str, str]) -> str:
        """The text of this object as a part of a content, see `content`."""
        kind = self.text("type")
        if kind not in kinds:
            self.unsupported("type", "this policy reads text only")
        return self.text(kinds[kind])

    def stops(self, name: str) -> tuple[str, ...]:
        """Stop texts: one or a list of at most 16, none of them empty."""
        value = self.get(name)
        texts = [value] if isinstance(value, str) else self.listed(name)
        if len(texts) > _MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
            self.refuse(name, f"must be texts that are not empty, at most {_MAX_STOPS}")
        return tuple(texts)

    def refuse_any(self, neutral: Mapping[str, Collection[Any]], advice: str = "leave it out") -> None:
        """Refuse each field of `neutral` whose value is neither absent nor one of those named there."""
        for name, values in neutral.items():
            value = self.get(name)
            if value is not None and value not in values:
                self.unsupported(name, advice)

    def dropped(self) -> dict[str, Any]:
        """Parameters that would shape sampling, have no effect here and were sent with other than neutral values."""
        found: dict[str, Any] = {}
        for name, neutral in _NUMBERS.items():
            value = self.get(name)
            if value is None or value in neutral:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.refuse(name, f"must be a number, is {_kind(value)}")
            found[name] = value
        for name in _COLLECTIONS:
            value = self.get(name)
            if value is not None and not isinstance(value, list | dict):
                self.refuse(name, f"must be a list or an object, is {_kind(value)}")
            if value:
                found[name] = short(value)
        return found | {name: True for name in _FLAGS if self.flag(name)}

    def function(self, parameters: str, *, namespace: str = "") -> Tool:
        """A function as its declaration has it, with its schema in the field `parameters`."""
        schema = self.inner(parameters)
        return Tool(self.named("name"), self.text("description"), schema._raw if schema else {}, namespace)


def joined(texts: Iterator[str], between: str = "\n") -> str:
    """The texts that are not empty, joined."""
    return between.join(text for text in texts if text)


def unique(tools: list[Tool]) -> tuple[Tool, ...]:
    """The tools of a request; raises InvalidRequest when two have one name, as a call could not say which it means."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(f"tools: two tools have the name {short(tool.name)}; rename one")
        seen.add(tool.name)
    return tuple(tools)


def choose(choice: str, tools: tuple[Tool, ...]) -> str:
    """`choice` (see `Asked.choice`), if the tools can honour it; else InvalidRequest."""
    if choice.startswith("name:") and choice[5:] not in {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice: no tool in this request has the name {short(choice[5:])}")
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: a call is required and no function is offered")
    return choice


class Conversation:
    """Turns as a dialect reads them, folded into what a chat template takes.

    System texts before all other turns become one leading turn, joined by blank lines in their order; a later one
    stays where it is, as agents add them while a conversation goes on. Assistant turns in a row become one, unless
    their records differ: those are two replies. A reply's text that begins with `<think>…</think>` is split. A tool's
    result gets the name of the call that it answers.
    """

    def __init__(self) -> None:
        self._system: list[str] = []
        self._turns: list[Turn] = []
        self._names: dict[str, str] = {}

    def system(self, text: str) -> None:
        """Add to the leading turn, or behind the last one; "" adds nothing."""
        if text and self._turns:
            self._turns.append(Turn("system", text))
        elif text:
            self._system.append(text)

    def add(self, turn: Turn) -> None:
        """Add a turn of another role."""
        if turn.role == "assistant":
            turn = _split(turn)
            self._names.update((call.id, call.name) for call in turn.calls)
            if self._turns and _one_reply(self._turns[-1], turn):
                self._turns[-1] = _merged(self._turns[-1], turn)
                return
        elif turn.role == "tool" and not turn.name:
            turn = replace(turn, name=self._names.get(turn.call_id, ""))
        self._turns.append(turn)

    def turns(self) -> tuple[Turn, ...]:
        """The conversation; raises InvalidRequest when it is empty."""
        system = (Turn("system", "\n\n".join(self._system)),) if self._system else ()
        if not system and not self._turns:
            raise InvalidRequest("the prompt is empty: send at least one message", code="empty_prompt")
        return (*system, *self._turns)


def _split(turn: Turn) -> Turn:
    if not turn.text.startswith(_THINK):
        return turn
    thought, closed, text = turn.text[len(_THINK) :].partition(_UNTHINK)
    if not closed:
        return turn
    reasoning = joined(iter((turn.reasoning, thought.strip("\n"))))
    return replace(turn, reasoning=reasoning, text=text.lstrip("\n"))


def _one_reply(first: Turn, second: Turn) -> bool:
    known = {first.record, second.record} - {""}
    return first.role == "assistant" and len(known) < 2


def _merged(first: Turn, second: Turn) -> Turn:
    return replace(
        first,
        text=joined(iter((first.text, second.text))),
        reasoning=joined(iter((first.reasoning, second.reasoning))),
        calls=first.calls + second.calls,
        record=second.record or first.record,
    )


def recorded(mark: str) -> str:
    """What an agent sent back in an opaque field, if it is a record's id; else ""."""
    return mark if mark.startswith("rec_") else ""


def plain_object(arguments: str) -> dict[str, Any] | None:
    """Arguments as the JSON object that they are, {} for blank ones; None when they are none that JSON can carry on
    (not an object, broken, not finite, half a surrogate pair)."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def dumped(value: object) -> str:
    """A value as compact JSON, in the characters it has."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pieces(text: str) -> Iterator[str]:
    """`text` in a few deltas; none for ""."""
    size = max(48, -(-len(text) // _DELTAS))
    for start in range(0, len(text), size):
        yield text[start : start + size]


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event. ASCII, because some readers also split lines at U+2028 and U+0085."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def key_of(record: str) -> str:
    """The digits of a record's id, from which a dialect makes ids of its own kind."""
    return record.removeprefix("rec_")


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients expect it; `param` is what the message has before the colon, if that is a path."""
    if code in TOO_LONG_CODES:
        code = "context_length_exceeded"
    elif status == 401:
        code = "invalid_api_key"
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    head, colon, _ = message.partition(":")
    param = head if colon and head.isascii() and head.replace(".", "").replace("_", "").isalnum() else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def call_of(item: Fields, *, id_at: str = "id", arguments_at: str = "arguments") -> ToolCall:
    """A call that an agent sent back; the arguments are kept as they are."""
    return ToolCall(item.named(id_at), item.named("name"), item.text(arguments_at))
