"""Which recorded call does a request go on from? Conversations of one session as a tree, walked turn by turn.

Agents send the whole conversation with every request, and send sampled turns back changed: arguments are parsed and
written anew, reasoning is dropped, empty texts come and go. A turn that means what a recorded answer said *is* that
answer, and its recorded ids are used. One that says something else was never sampled: the tree forks there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .turns import Asked, Tool, ToolCall, Turn

_Key = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A conversation so far: the calls made with it, and how it went on otherwise."""

    calls: list[Linked] = field(default_factory=list)
    turns: dict[_Key, Node] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Linked:
    """A recorded call in the tree: the turns of its prompt as its ids have them, its ids, and what its answer said.
    `after` is the conversation with that answer."""

    id: str
    before: tuple[Turn, ...]
    ids: tuple[int, ...]
    said: Turn
    after: Node = field(default_factory=Node)


class Place(NamedTuple):
    """Where a request stands: `parent` is the last recorded answer in it, `rest` the turns behind that (all turns
    where there is none). `why` names what makes it another way than the last one, "" where it just goes on."""

    root: _Key
    keys: tuple[_Key | Linked, ...]
    parent: Linked | None
    rest: tuple[Turn, ...]
    why: str
    cut: Linked | None = None
    """The call of whose answer only a part arrived: the request has that part, and none goes on from the whole."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the prompt, recorded answers as they were made."""
        return self.rest if self.parent is None else (*self.parent.before, self.parent.said, *self.rest)


class Tree:
    """The conversations of one session. Tools are a part of the prompt, so each list of tools has a root."""

    def __init__(self) -> None:
        self._roots: dict[_Key, Node] = {}

    def find(self, asked: Asked) -> Place:
        """Walk the request's turns through what is recorded; changes nothing."""
        root = _tools_key(asked.tools)
        node: Node | None = self._roots.get(root)
        why = "" if node or not self._roots else "other_tools"
        parent, cut, rest = None, None, 0
        keys: list[_Key | Linked] = []
        for number, turn in enumerate(asked.turns):
            found = None
            if node is not None and turn.role == "assistant" and node.calls:
                found = same_answer(node.calls, turn)
                cut = cut if found else part_of_answer(node.calls, turn)
                why = why if found else "cut_answer" if cut else "echo_differs"
            keys.append(found or _key(turn))
            if found is not None:
                node, parent, rest = found.after, found, number + 1
            elif node is not None:
                node = node.turns.get(_key(turn))
        if not why and node is not None and node.calls:
            why = "repeated"
        elif not why and parent is not None and (parent.after.calls or parent.after.turns):
            why = "branch"
        elif not why and parent is None and self._roots:
            why = "history_differs"
        return Place(root, tuple(keys), parent, asked.turns[rest:], why, cut)

    def add(self, place: Place, call: Linked) -> None:
        """Record an answered call where `find` placed its request."""
        node = self._roots.setdefault(place.root, Node())
        for key in place.keys:
            node = key.after if isinstance(key, Linked) else node.turns.setdefault(key, Node())
        node.calls.append(call)


def same_answer(calls: Sequence[Linked], turn: Turn) -> Linked | None:
    """The call whose answer `turn` is: of those with the same meaning the one that its ids name, else the newest."""
    alike = [call for call in reversed(calls) if same_meaning(call.said, turn)]
    ids = {call.id for call in turn.calls}
    named = (call for call in alike if call.id == turn.record or ids & {made.id for made in call.said.calls})
    return next(named, alike[0] if alike else None)


def same_meaning(said: Turn, echo: Turn) -> bool:
    """True when `echo` says what was said: the same text but for outer whitespace, the same calls with arguments of
    the same value. Reasoning may be missing, or stand behind that of an answer that broke off; it may not differ."""
    return (
        said.text.strip() == echo.text.strip()
        and len(said.calls) == len(echo.calls)
        and all(map(_same_call, said.calls, echo.calls))
        and (not echo.reasoning.strip() or echo.reasoning.strip().endswith(said.reasoning.strip()))
    )


def part_of_answer(calls: Sequence[Linked], turn: Turn) -> Linked | None:
    """The call that `turn` names by its record or an id, when it says a part of that answer and stops there."""
    ids = {call.id for call in turn.calls}
    for call in calls:
        said, count = call.said, len(turn.calls)
        named = call.id == turn.record or ids & {made.id for made in said.calls}
        begun = said.text.strip().startswith(turn.text.strip()) and count <= len(said.calls)
        if named and begun and all(map(_same_call, said.calls, turn.calls)):
            return call
    return None


def _same_call(said: ToolCall, echo: ToolCall) -> bool:
    return said.name == echo.name and (
        said.arguments == echo.arguments or _value(said.arguments) == _value(echo.arguments)
    )


def _value(text: str) -> _Key:
    """What JSON text means, as a hashable value: numbers by value, true apart from 1; other text is itself."""
    try:
        return ("json", _frozen(json.loads(text, parse_int=float, parse_constant=_refuse)))
    except (ValueError, RecursionError, OverflowError):
        return ("text", text)


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return ("object", frozenset((name, _frozen(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(_frozen, value)))
    return (type(value).__name__, value)


def _key(turn: Turn) -> _Key:
    """A turn that was not sampled here, as it enters the prompt. Ids of calls do not."""
    calls = tuple((call.name, _value(call.arguments)) for call in turn.calls)
    return (turn.role, turn.text, turn.reasoning.strip(), calls, turn.name)


def _tools_key(tools: Sequence[Tool]) -> _Key:
    return tuple((t.name, t.description, json.dumps(t.parameters, sort_keys=True)) for t in tools)
