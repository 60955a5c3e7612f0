"""Turns and tools in the forms that chat templates read. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .gateway.turns import Tool, Turn

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_REASONING_FIELD = re.compile(r"""[.'"](reasoning_content|reasoning|thinking)\b""")


def variants(source: str, turns: Sequence[Turn]) -> Iterator[list[dict[str, Any]]]:
    """The forms in which a template may want the turns, without repetition."""
    seen: list[list[dict[str, Any]]] = []
    names = {call.id: call.name for turn in turns for call in turn.calls}
    turns = [replace(t, name=names.get(t.call_id, "")) if t.role == "tool" and not t.name else t for t in turns]
    forms: tuple[Callable[[str], Any], ...] = (_parsed, str, _wrapped)
    for folded, short_ids, form in itertools.product((False, True), (False, True), forms):
        chosen = _folded(turns) if folded else turns
        messages = [_message(source, turn, form, short_ids=short_ids) for turn in chosen]
        if messages not in seen:
            seen.append(messages)
            yield messages


@lru_cache(maxsize=64)
def _fields(source: str) -> tuple[tuple[str, ...], bool]:
    """The fields of a message in which a template looks for reasoning, and whether it looks for calls."""
    code = _COMMENT.sub("", source)
    return tuple(sorted(set(_REASONING_FIELD.findall(code)))), "tool_calls" in code


def _message(source: str, turn: Turn, form: Callable[[str], Any], *, short_ids: bool) -> dict[str, Any]:
    fields, has_calls = _fields(source)
    reasoning = fields if turn.reasoning else ()
    text = turn.text
    if turn.reasoning and not reasoning:
        text = f"<think>\n{turn.reasoning}\n</think>\n\n{text}"
    if turn.calls and not has_calls:
        blocks = [f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n</tool_call>'
                  for c in turn.calls]  # fmt: skip
        text = "\n".join([text, *blocks] if text else blocks)
    message: dict[str, Any] = {"role": turn.role, "content": text}
    message |= dict.fromkeys(reasoning, turn.reasoning)
    name_id = _short_id if short_ids else str
    if turn.calls and has_calls:
        message["tool_calls"] = [
            {"id": name_id(c.id), "type": "function", "function": {"name": c.name, "arguments": form(c.arguments)}}
            for c in turn.calls
        ]
    if turn.call_id:
        message["tool_call_id"] = name_id(turn.call_id)
    if turn.name:
        message["name"] = turn.name
    return message


def tool_form(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's clients write it; templates were made for that."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _parsed(arguments: str) -> Any:
    """An object where the text is one, else the text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _wrapped(arguments: str) -> dict[str, Any]:
    value = _parsed(arguments)
    return value if isinstance(value, dict) else {"arguments": value}


def _short_id(call_id: str) -> str:
    """Nine letters and digits, the same for the same id: Mistral's templates refuse others."""
    fits = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if fits else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """System turns put in front of the user turn that comes next (without one they become it), and user turns in a row
    joined: what templates refuse that want user and assistant in turn."""
    result: list[Turn] = []
    held: list[str] = []
    for turn in turns:
        if turn.role == "system":
            held.append(turn.text)
        elif turn.role == "user":
            before = result.pop().text if result and result[-1].role == "user" else None
            texts = [*held, turn.text] if before is None else [before, *held, turn.text]
            result.append(replace(turn, text="\n\n".join(texts)))
            held = []
        else:
            result.append(turn)
    return [*result, Turn("user", "\n\n".join(held))] if held else result
