"""What a policy sampled, read as reasoning, text and calls. Total: any text is an answer, and none is lost silently.

Arguments stay as they were sampled, character by character, also where they are no JSON: agents say so to the policy,
and a repaired call would be one that was never made.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sync.errors import InvalidRequest

from ..render import conversation_text, template_of
from .call_formats import READERS, Call, closed, format_of, json_call
from .turns import Tool, Turn

_THINK, _END_THINK = "<think>", "</think>"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TEMPLATE_CHARACTERS = 16_384
"""Longer texts are not given to transformers' parser, whose time grows with the square of the length."""
_PATTERN_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(|\)?(?:[*+]|\{\d*,\})|\)", re.DOTALL)


class Parsed(NamedTuple):
    """An answer's parts; a call is (name, text of the arguments). `text` beside calls is "" when it was only space."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Parser:
    """Reads the outputs of one model: by the response template of its tokenizer, else by the format of calls that its
    chat template shows (Hermes and Qwen, Qwen-coder's XML, Mistral, Llama 3; where it shows none, Hermes)."""

    def __init__(self, tokenizer: Any) -> None:
        source = template_of(tokenizer) + template_of(tokenizer, (Tool("x"),))
        self._format = format_of(source)
        self._thinks = _END_THINK in source
        try:
            self._prompt = conversation_text(tokenizer, [Turn("user", "x")], (), prompt=True)
        except InvalidRequest:
            self._prompt = ""
        self._opened = self._prompt.rstrip().endswith(_THINK)
        self._responses = _responses_of(getattr(tokenizer, "response_template", None))

    def parse(self, text: str, *, opening: str = "", tools: Sequence[Tool] = ()) -> Parsed:
        """The parts of `text`, an output without its end token. `opening` is what the prompt already held of it.

        Without tools no calls are looked for. A call of a tool that is not among them is a call all the same. Never
        raises; takes time linear in the length of the text.
        """
        whole = opening + text
        if len(whole) <= _TEMPLATE_CHARACTERS:
            for template in self._responses:
                found = self._by_template(template, whole, tools)
                if found is not None:
                    return found
        reasoning, rest = self._split(whole)
        pieces, calls = READERS[self._format](rest, tools) if tools else ([rest], [])
        if not calls:
            return Parsed(rest, reasoning)
        return Parsed("\n".join(piece.strip("\r\n") for piece in pieces if piece.strip()), reasoning, tuple(calls))

    def _split(self, text: str) -> tuple[str, str]:
        """Reasoning, and what follows it. Reasoning that does not end is all there is."""
        start = text.lstrip()
        if start.startswith(_THINK):
            inner = start[len(_THINK) :]
        elif self._opened or (self._thinks and _END_THINK in text.partition(_THINK)[0]):
            inner = text
        else:
            return "", text
        reasoning, _, rest = inner.partition(_END_THINK)
        return reasoning.strip("\r\n"), rest.lstrip("\r\n")

    def _by_template(self, template: Any, text: str, tools: Sequence[Tool]) -> Parsed | None:
        """Transformers' own reading; None where the template does not fit the text."""
        from transformers.utils.chat_parsing import ResponseParser

        offered = [{"type": "function", "function": {"name": t.name, "parameters": t.parameters}} for t in tools]
        try:
            reader = ResponseParser(template, prefix=self._prompt, tools=offered)
            events = [*reader.initial_events, *reader.feed(text), *reader.finalize()[1]]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
        values = [(event["field"], event["value"]) for event in events if event["type"] == "region_close"]
        blocks = [value if isinstance(value, list) else [value] for field, value in values if field == "tool_calls"]
        made = [_told_call(call) for block in blocks for call in block]
        calls = [call for call in made if call is not None]
        if len(calls) != len(made) or (calls and not tools):
            return None
        texts = [str(value) for field, value in values if field == "content" and value]
        reasons = [str(value) for field, value in values if field in _REASONING_FIELDS and value]
        if text.strip() and not (calls or texts or reasons):
            return None
        return Parsed("\n".join(texts), "\n".join(reasons), tuple(calls))


# --- transformers' response templates


def _responses_of(template: Any) -> list[Any]:
    """The template in the forms to try: first one that leaves arguments as text, where it names them itself.

    None of them where one of its patterns may take very long: what a policy makes at random must not stop the server.
    """
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        return []
    fields = template["fields"]
    if any(_costly(pattern) for pattern in _patterns(fields)):
        return []
    calls = fields.get("tool_calls")
    raw = copy.deepcopy(template)
    if not isinstance(calls, dict) or calls.get("content") != "json":
        return [template]
    raw["fields"]["tool_calls"]["content"] = "text"
    raw["fields"]["tool_calls"].pop("content_args", None)
    return [template, raw] if calls.get("content_args") else [raw]


def _patterns(value: Any) -> Iterator[str]:
    """The regular expressions anywhere in a response template's fields."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            yield from _patterns(inner)
        elif str(key).endswith("pattern"):
            yield str(inner)


def _costly(pattern: str) -> bool:
    """Whether it repeats what repeats, which may take exponential time, or looks ahead, to the end at every place."""
    repeats = [False]  # whether the group that is open, and those around it, hold a repetition
    for part in _PATTERN_TOKEN.findall(pattern):
        if part == "(":
            repeats.append(False)
        elif part[0] == ")" and len(repeats) > 1:
            inner = repeats.pop()
            if inner and len(part) > 1:
                return True
            repeats[-1] |= inner or len(part) > 1
        elif part[0] in "*+{":
            repeats[-1] = True
    return "(?=" in pattern


def _told_call(call: Any) -> Call | None:
    """The call that a response template made of a block."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, str):  # the raw text of the whole call
        return json_call(function)
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name.strip():
        return None
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        return name, json.dumps(arguments, ensure_ascii=False)
    end = closed(arguments, 0, len(arguments)) if arguments.startswith("{") else -1
    rest = arguments[end:].strip() if end >= 0 else ""
    return name, arguments[:end] if rest == "}" else arguments
