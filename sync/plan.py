"""Pure planning: which anchor, spans and deltas bring a follower from what it holds to a version, or why none does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from .errors import Pruned
from .schema.base import Identity
from .schema.wire import Ref

STEP_COST = 64 * 1024
"""Bytes that one more object is worth: a request costs a round trip, not only its payload."""


class Held(NamedTuple):
    """What a follower's mirror holds: identity and state digest."""

    identity: Identity
    digest: str


class _Place(NamedTuple):
    version: int
    digest: str


class _Way(NamedTuple):
    """The last reference of a way (None: what is held), the place before it, and the cost of it all."""

    cost: int
    ref: Ref | None
    before: _Place | None


def plan(refs: Iterable[Ref], target: Identity, held: Held | None, avoid: Collection[str] = ()) -> tuple[Ref, ...]:
    """Return the references to apply, in order: steps from what is held, or an anchor and the steps after it.

    A step is a delta or a span. Of the ways that exist the one with the fewest bytes is taken, each object counted
    STEP_COST more; `avoid` holds keys that proved damaged. Raises Pruned when no way reaches `target`.
    """
    usable = [r for r in refs if r.key not in avoid and r.identity <= target]
    reached = next((r for r in usable if r.identity == target), None)
    if reached is None:
        raise Pruned(f"no usable reference leads to version {target}")
    goal = _Place(target.version, reached.state_digest)
    if held == Held(target, goal.digest):
        return ()
    ways = _ways(usable, _starts(usable, target, held))
    found: list[Ref] = []
    at: _Place | None = goal
    while at is not None and (way := ways.get(at)) is not None and way.ref is not None:
        found.append(way.ref)
        at = way.before
    if not found or found[0].identity != target:
        raise Pruned(f"neither {held.identity if held else 'nothing'} nor any live anchor leads to version {target}")
    return tuple(reversed(found))


def _starts(usable: list[Ref], target: Identity, held: Held | None) -> dict[_Place, _Way]:
    starts: dict[_Place, _Way] = {}
    for ref in usable:
        if ref.kind == "anchor":
            _keep(starts, _Place(ref.version, ref.state_digest), _Way(ref.payload + STEP_COST, ref, None))
    if held is not None and held.identity.version < target.version and held.identity < target:
        _keep(starts, _Place(held.identity.version, held.digest), _Way(0, None, None))
    return starts


def _ways(usable: list[Ref], starts: dict[_Place, _Way]) -> dict[_Place, _Way]:
    """The cheapest way to every place that can be reached, found in order of version: a step leads to a higher one."""
    ways, leaving = dict(starts), defaultdict(list)
    for ref in usable:
        if ref.from_version is not None and ref.base_digest is not None:
            leaving[_Place(ref.from_version, ref.base_digest)].append(ref)
    for place in sorted({*starts, *leaving}):
        way = ways.get(place)
        if way is None:
            continue
        for ref in leaving[place]:
            if way.ref is None or ref.epoch >= way.ref.epoch:
                cost = way.cost + ref.payload + STEP_COST
                _keep(ways, _Place(ref.version, ref.state_digest), _Way(cost, ref, place))
    return ways


def _keep(ways: dict[_Place, _Way], place: _Place, way: _Way) -> None:
    known = ways.get(place)
    if known is None or way.cost < known.cost:
        ways[place] = way
