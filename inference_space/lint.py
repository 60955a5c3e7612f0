"""`deltawire lint-template`: does a model's chat template let recorded ids be extended as conversations grow?

Where it does not, every such call begins a new chain and is rendered anew: nothing is lost, but what was sampled before
is a prompt there, and long conversations are rendered and read again.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from sync.errors import ConfigError, InvalidRequest
from sync.tools import common

from .gateway.turns import Tool, ToolCall, Turn
from .render import Prefix, conversation_text, render_turns, takes_tools, template_of

_FILES = ["tokenizer*", "vocab*", "merges.txt", "*.model", "*.jinja", "special_tokens_map.json", "added_tokens.json",
          "chat_template.json", "config.json"]  # fmt: skip
_KEEPS = {"preserve_thinking": "true", "keep_thinking": "true", "keep_past_thinking": "true",
          "clear_thinking": "false", "truncate_history_thinking": "false"}  # fmt: skip
"""Variables of templates, and the value with which earlier reasoning stays."""
_TOOLS = (Tool("search", "Searches the web.", {"type": "object", "properties": {"query": {"type": "string"}}}),)
_AROUND = 6
"""Tokens shown before and behind the first one that differs."""


class Case(NamedTuple):
    """A conversation: the prompt's turns, what was answered, and the turns that came then."""

    name: str
    before: tuple[Turn, ...]
    answer: Turn
    new: tuple[Turn, ...]


class Found(NamedTuple):
    """What became of a case: `ok`, `rewrites` (recorded ids cannot be extended) or `refused` (it cannot go on at all).

    For `rewrites`, `token` is the position of the first token that differs; `saw` and `now` are text around it (before,
    from it on): what the engine had, and what the template writes once the conversation has grown.
    """

    name: str
    status: str
    why: str = ""
    token: int | None = None
    saw: tuple[str, str] | None = None
    now: tuple[str, str] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder with a tokenizer, or the name of a model on the Hub")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was found; returns 0 when every conversation extends, else 1. Raises ConfigError for a bad MODEL."""
    tokenizer = _load(args.model)
    if not template_of(tokenizer):
        raise ConfigError(f"{args.model} has no chat template: only ids can be sent to it, and those extend always")
    found = check(tokenizer)
    result = {
        "model": args.model,
        "extends": all(case.status == "ok" for case in found),
        "shows_tools": takes_tools(tokenizer, _TOOLS),
        "cases": [case._asdict() for case in found],
        "fixes": fixes(tokenizer, found),
    }
    common.show(args, result, _lines(result))
    return 0 if result["extends"] else 1


def check(tokenizer: Any) -> list[Found]:
    """Every case with the tokenizer's chat template."""
    return [_check(tokenizer, case) for case in cases()]


def cases() -> Iterator[Case]:
    """A user's follow-up, a tool result, parallel ones, and a follow-up behind a result; plain, with a system prompt,
    with reasoning, with both."""
    for system, thinks in itertools.product((False, True), (False, True)):
        ask = (*([Turn("system", "Answer in one word.")] if system else []), Turn("user", "Which city is larger?"))
        reasoning = "Both are large; I should look." if thinks else ""
        said = Turn("assistant", "Paris", reasoning)
        calls = tuple(ToolCall(f"call{n:05d}", "search", f'{{"query": "city {n}"}}') for n in (1, 2))
        results = tuple(Turn("tool", "2 million", call_id=call.id, name="search") for call in calls)
        asks = [Turn("assistant", "", reasoning, calls[:n]) for n in (1, 2)]
        more = (Turn("user", "Are you sure?"),)
        named = [
            ("user follow-up", ask, said, more),
            ("tool result", ask, asks[0], results[:1]),
            ("parallel tool results", ask, asks[1], results),
            ("user follow-up behind a tool result", (*ask, asks[0], results[0]), said, more),
        ]
        suffix = ", with reasoning" * thinks + ", with a system prompt" * system
        yield from (Case(name + suffix, before, answer, new) for name, before, answer, new in named)


def fixes(tokenizer: Any, found: list[Found]) -> list[dict[str, Any]]:
    """Changes of the template that were tried and make more cases extend and none worse, the best first.

    Each is {fix, cures, leaves}: the names of cases that extend with it, and of those that still do not.
    """
    bad = {case.name for case in found if case.status != "ok"}
    if not any(case.status == "rewrites" for case in found):
        return []
    results = []
    for what, source in _candidates(template_of(tokenizer)):
        with _template(tokenizer, source):
            left = {case.name for case in check(tokenizer) if case.status != "ok"}
        if left < bad:
            results.append({"fix": what, "cures": sorted(bad - left), "leaves": sorted(left)})
    return sorted(results, key=lambda fix: len(fix["leaves"]))


def _check(tokenizer: Any, case: Case) -> Found:
    tools = _TOOLS if any(turn.calls for turn in (*case.before, case.answer)) else ()
    try:
        prompt = render_turns(tokenizer, case.before, tools)
        whole = render_turns(tokenizer, [*case.before, case.answer, *case.new], tools)
    except InvalidRequest as error:
        return Found(case.name, "refused", str(error))
    sampled = _sampled(tokenizer, case, tools)
    try:
        render_turns(tokenizer, case.new, tools, prefix=Prefix((*prompt, *sampled), case.answer, case.before))
    except InvalidRequest as error:
        if error.code != "template_not_prefix_preserving":
            return Found(case.name, "refused", str(error))
        saw = [*prompt, *sampled]
        at = next((n for n, (a, b) in enumerate(zip(saw, whole, strict=False)) if a != b), min(len(saw), len(whole)))
        why = re.search(r"follow \((.*?)\), so", str(error))
        pieces = [_around(tokenizer, ids, at) for ids in (saw, whole)]
        return Found(case.name, "rewrites", why[1] if why else str(error), at, *pieces)
    return Found(case.name, "ok")


def _sampled(tokenizer: Any, case: Case, tools: tuple[Tool, ...]) -> list[int]:
    """An answer as the model makes it, up to its end token: as the template writes it while it is the last turn."""
    prompt = conversation_text(tokenizer, case.before, tools)
    last = conversation_text(tokenizer, [*case.before, case.answer], tools, prompt=False)
    if not last.startswith(prompt):
        return []
    ids = list(tokenizer.encode(last[len(prompt) :], add_special_tokens=False))
    while ids and not tokenizer.decode(ids[-1:]).strip():
        ids.pop()
    return ids


def _around(tokenizer: Any, ids: list[int], at: int) -> tuple[str, str]:
    before, rest = ids[max(0, at - _AROUND) : at], ids[at : at + _AROUND]
    return tokenizer.decode(before), tokenizer.decode(rest)


def _candidates(source: str) -> Iterator[tuple[str, str]]:
    """What to do, and the template that it makes."""
    for name, value in _KEEPS.items():
        if re.search(rf"\b{name}\b", source):
            line = f"{{%- set {name} = {value} %}}"
            yield f"put {line} at the very beginning of the chat template", line + source
    try:
        trl = metadata.distribution("trl")
    except metadata.PackageNotFoundError:
        return
    folder = Path(str(trl.locate_file("trl/chat_templates")))
    for stock in sorted(folder.glob("*.jinja")):
        training = stock.with_name(f"{stock.stem}_training.jinja")
        if training.is_file() and stock.read_text(encoding="utf-8").strip() == source.strip():
            text = f"use {training.name}, which TRL ships for this template (trl/chat_templates), as the chat template"
            yield text, training.read_text(encoding="utf-8")


@contextmanager
def _template(tokenizer: Any, source: str) -> Iterator[None]:
    before = tokenizer.chat_template
    tokenizer.chat_template = source
    try:
        yield
    finally:
        tokenizer.chat_template = before


def _load(model: str) -> Any:
    """The tokenizer of a folder, or of a model on the Hub, of which only the tokenizer's files are fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from transformers import AutoTokenizer

    try:
        folder = model if Path(model).is_dir() else snapshot_download(model, allow_patterns=_FILES)
        return AutoTokenizer.from_pretrained(folder)
    except (HfHubHTTPError, OSError, ValueError, KeyError, TypeError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{model}: no tokenizer could be loaded from there: {line}") from None


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    width = max(len(case["name"]) for case in result["cases"])
    for case in result["cases"]:
        yield f"{case['name']:{width}}  " + ("OK" if case["status"] == "ok" else f"{case['status']}: {case['why']}")
        if case["token"] is not None:
            head = f"    token {case['token']}:"
            yield f"{head} the engine saw  {_quoted(case['saw'])}"
            yield f"{' ' * len(head)} it now writes   {_quoted(case['now'])}"
    if not result["shows_tools"]:
        yield "The template does not show tools to the model."
    for fix in result["fixes"]:
        left = f"; these stay as they are: {', '.join(fix['leaves'])}" if fix["leaves"] else "; then all extend"
        yield f"Fix, tried with this tokenizer: {fix['fix']} ({len(fix['cures'])} more extend{left})."


def _quoted(pieces: tuple[str, str]) -> str:
    before, rest = (repr(piece)[1:-1] for piece in pieces)
    return f"…{before} ⟦{rest}⟧…"
