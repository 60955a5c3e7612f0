"""Formats in which models write calls of tools: where they stand in a text, and what they say. Total and linear."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from .turns import Tool

Call = tuple[str, str]
"""A name, and the text of the arguments."""
Format = Literal["hermes", "xml", "mistral", "llama"]
Reader = Callable[[str, Sequence[Tool]], tuple[list[str], list[Call]]]
"""Gives the pieces of a text around its calls, and the calls."""

_TOOL, _END_TOOL = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)  # also one that is cut: group 1 is empty
_NESTING = re.compile(_STRING.pattern + r"|[{}\[\]]", re.DOTALL)
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_SCALAR = re.compile(r"[^,{}\[\]\s\"]+")
_FUNCTION = re.compile(r"<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
_BARE_NAME = re.compile(r"\s*+([\w.:/-]{1,256})\s*+(?:\[CALL_ID\][\w-]{1,64})?(?:\[ARGS\])?\s*+(?=\{)")


def format_of(source: str) -> Format:
    """The format that a chat template shows; where it shows none, Hermes's."""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<function=" in source:
        return "xml"
    if _TOOL not in source and ("<|python_tag|>" in source or "ipython" in source):
        return "llama"
    return "hermes"


# --- JSON, complete or cut


def _members(text: str, start: int) -> tuple[dict[str, str], int]:
    """The raw texts of a JSON object's members, the last maybe cut, and where reading stopped. `text[start]` is {."""
    members: dict[str, str] = {}
    at = start + 1
    while True:
        at = _skip(text, at)
        key = _STRING.match(text, at)
        if key is None or (name := _string(key[0])) is None:
            return members, at
        at = _skip(text, key.end())
        if text[at : at + 1] != ":":
            return members, at
        at = _skip(text, at + 1)
        end = _value_end(text, at)
        members[name] = text[at:end]
        at = _skip(text, end)
        if text[at : at + 1] != ",":
            return members, at
        at += 1


def _value_end(text: str, at: int) -> int:
    """Where the JSON value at `at` ends; a cut one ends with the text."""
    if text[at : at + 1] not in ("{", "["):
        string, scalar = _STRING.match(text, at), _SCALAR.match(text, at)
        if string is not None:
            return string.end() if string[1] else len(text)
        return scalar.end() if scalar is not None else at
    end = closed(text, at, len(text))
    return len(text) if end < 0 else end


def closed(text: str, at: int, stop: int) -> int:
    """Where the bracket at `at` is closed; -1: not before `stop`."""
    depth = 0
    for token in _NESTING.finditer(text, at, stop):
        depth += _DEPTH.get(token[0], 0)
        if depth == 0:
            return token.end()
    return -1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _string(raw: str | None) -> str | None:
    """The value of a JSON string; None when it is cut or none."""
    try:
        value = json.loads(raw or "", strict=False) if (raw or "").startswith('"') else None
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def json_call(text: str, *, needs_arguments: bool = False) -> Call | None:
    """The call that a JSON object (maybe cut) tells; None without a readable name."""
    start = _skip(text, 0)
    if text[start : start + 1] != "{":
        return None
    members, stopped = _members(text, start)
    name = _string(members.get("name"))
    key = next((key for key in ("arguments", "parameters") if key in members), None)
    if not name or (needs_arguments and key is None):
        return None
    if key is not None:
        return name, members[key].rstrip()
    return name, "{}" if text[stopped : stopped + 1] == "}" else text[stopped:].strip()


# --- formats: each gives the pieces of text around the calls, and the calls


class _Places:
    """Where marks are next, looked up from left to right: a mark that is far off or missing is searched once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._next: dict[str, int] = {}

    def after(self, mark: str, at: int) -> int:
        """The first `mark` at `at` or behind it, or the length of the text."""
        known = self._next.get(mark, -1)
        if known < at:
            found = self._text.find(mark, at)
            known = self._next[mark] = len(self._text) if found < 0 else found
        return known


def _read_hermes(text: str, tools: Sequence[Tool]) -> tuple[list[str], list[Call]]:  # noqa: ARG001
    places, pieces, calls = _Places(text), [], []
    kept = at = 0
    budget = 4 * len(text)
    while (start := places.after(_TOOL, at)) < len(text):
        at = start + len(_TOOL)
        mark = min(places.after(_END_TOOL, at), places.after(_TOOL, at))
        end, cost = _block_end(text, at, mark, len(text) if budget > 0 else mark)
        budget -= cost
        if (call := json_call(text[at:end])) is not None:
            pieces.append(text[kept:start])
            calls.append(call)
            end = _skip(text, end)
            kept = at = end + len(_END_TOOL) if text.startswith(_END_TOOL, end) else end
    return [*pieces, text[kept:]], calls


def _block_end(text: str, at: int, mark: int, stop: int) -> tuple[int, int]:
    """Where the block at `at` ends, and what looking cost: behind its object, or at the next `mark` where that is cut.
    A string may hold marks, so the object may go on behind it (up to `stop`) if it is valid."""
    start = _skip(text, at)
    if text[start : start + 1] != "{":
        return mark, 0
    end = closed(text, start, stop)
    cost = (stop if end < 0 else end) - start
    if end < 0 or (end > mark and not _is_json(text[start:end])):
        return mark, cost
    rest = text[end:mark]  # what stands behind the object belongs to the block too
    return (end if end > mark or not rest.strip() else mark), cost


def _read_xml(text: str, tools: Sequence[Tool]) -> tuple[list[str], list[Call]]:
    kinds = {tool.name: tool.parameters.get("properties") for tool in tools}
    places, pieces, calls = _Places(text), [], []
    kept = at = 0
    while (start := places.after("<function=", at)) < len(text):
        head = _FUNCTION.match(text, start)
        if head is None:
            at = start + 1
            continue
        at, arguments = _parameters(text, head.end(), places, kinds.get(head[1].strip()))
        before = text[kept:start].rstrip()
        pieces.append(before.removesuffix(_TOOL))
        calls.append((head[1].strip(), arguments))
        kept = at
    return [*pieces, text[kept:]], calls


def _parameters(text: str, start: int, places: _Places, kinds: Any) -> tuple[int, str]:
    """Where the call ends whose function was named before `start`, and its arguments: JSON, or the raw text if cut."""
    values: dict[str, Any] = {}
    at = start
    while (head := _PARAMETER.match(text, at)) is not None:
        end = places.after("</parameter>", head.end())
        if end == len(text):
            break
        values[head[1].strip()] = _typed(text[head.end() : end], kinds, head[1].strip())
        at = end + len("</parameter>")
    closing = _skip(text, at)
    closed = text.startswith("</function>", closing)
    if closed:
        closing = _skip(text, closing + len("</function>"))
    if text.startswith(_END_TOOL, closing):
        return closing + len(_END_TOOL), json.dumps(values, ensure_ascii=False)
    if closed:
        return closing, json.dumps(values, ensure_ascii=False)
    end = min(places.after("</function>", at), places.after(_END_TOOL, at))
    raw = text[start:end].strip("\r\n")
    if text.startswith("</function>", end):
        end = _skip(text, end + len("</function>"))
    return end + len(_END_TOOL) if text.startswith(_END_TOOL, end) else end, raw


def _typed(raw: str, kinds: Any, name: str) -> Any:
    """A parameter's value: text where the tool's schema says so, else the JSON that it is, else text."""
    value = raw.removeprefix("\r").removeprefix("\n").removesuffix("\n").removesuffix("\r")
    schema = kinds.get(name) if isinstance(kinds, dict) else None
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _read_mistral(text: str, tools: Sequence[Tool]) -> tuple[list[str], list[Call]]:  # noqa: ARG001
    pieces, calls = [], []
    first, *blocks = text.split("[TOOL_CALLS]")
    pieces.append(first)
    for block in blocks:
        made, at = _mistral_calls(block)
        calls += made
        pieces.append(block[at:] if made else "[TOOL_CALLS]" + block)
    return pieces, calls


def _mistral_calls(block: str) -> tuple[list[Call], int]:
    """The calls at the beginning of what follows a mark, and where they end."""
    if named := _BARE_NAME.match(block):
        end = closed(block, named.end(), len(block))
        end = len(block) if end < 0 else end
        return [(named[1], block[named.end() : end])], end
    at = _skip(block, 0)
    listed = block[at : at + 1] == "["
    at += listed
    calls: list[Call] = []
    while True:
        at = _skip(block, at)
        if block[at : at + 1] != "{":
            break
        end = closed(block, at, len(block))
        end = len(block) if end < 0 else end
        call = json_call(block[at:end])
        if call is None:
            break
        calls.append(call)
        at = _skip(block, end)
        if block[at : at + 1] != ",":
            break
        at += 1
    return calls, at + (listed and block[at : at + 1] == "]")


def _read_llama(text: str, tools: Sequence[Tool]) -> tuple[list[str], list[Call]]:  # noqa: ARG001
    at = _skip(text, 0)
    if text.startswith("<|python_tag|>", at):
        at += len("<|python_tag|>")
    calls: list[Call] = []
    while True:
        at = _skip(text, at)
        if text[at : at + 1] != "{":
            break
        end = closed(text, at, len(text))
        end = len(text) if end < 0 else end
        call = json_call(text[at:end], needs_arguments=True)
        if call is None:
            break
        calls.append(call)
        at = _skip(text, end)
        if text[at : at + 1] not in (";", ","):
            break
        at += 1
    return [text[at:]] if calls else [text], calls


READERS: dict[Format, Reader] = {
    "hermes": _read_hermes,
    "xml": _read_xml,
    "mistral": _read_mistral,
    "llama": _read_llama,
}
