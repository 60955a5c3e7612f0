"""Pure planning: which anchor and deltas bring a follower from what it holds to the head, or why none does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .errors import Pruned
from .schema.base import Identity
from .schema.wire import Ref


class Held(NamedTuple):
    """What a follower's mirror holds: identity and state digest."""

    identity: Identity
    digest: str


def plan(refs: Iterable[Ref], target: Identity, held: Held | None, avoid: Collection[str] = ()) -> tuple[Ref, ...]:
    """Return the references to apply, in order: deltas from what is held, or an anchor and the deltas after it.

    Of the ways that exist the one with the fewest bytes is taken; `avoid` holds keys that proved damaged. Raises
    Pruned when no way reaches `target`.
    """
    usable = [r for r in refs if r.key not in avoid]
    steps = {ref.version: ref for ref in sorted(usable, key=lambda r: r.epoch) if ref.kind == "delta"}
    goal = next((r for r in usable if r.identity == target), None)
    if goal is None:
        raise Pruned(f"no usable reference leads to version {target}")
    ways = [_walk(steps, goal, held)] if held is not None else []
    ways += [_from_anchor(steps, goal, anchor) for anchor in usable if anchor.kind == "anchor"]
    found = [way for way in ways if way is not None]
    if not found:
        raise Pruned(f"neither {held.identity if held else 'nothing'} nor any live anchor leads to version {target}")
    return min(found, key=lambda way: sum(r.payload for r in way))


def _walk(steps: dict[int, Ref], goal: Ref, start: Held) -> tuple[Ref, ...] | None:
    """The deltas after `start` up to `goal`, following base digests backwards; None when the chain does not meet it."""
    way: list[Ref] = []
    at, digest = goal.version, goal.state_digest
    while (at, digest) != (start.identity.version, start.digest):
        ref = steps.get(at)
        if ref is None or ref.state_digest != digest or ref.base_digest is None or at <= start.identity.version:
            return None
        way.append(ref)
        at, digest = at - 1, ref.base_digest
    if not way:
        return () if start.identity == goal.identity else None  # equal bits of a fork are not this version
    return tuple(reversed(way)) if start.identity.epoch <= way[-1].epoch else None


def _from_anchor(steps: dict[int, Ref], goal: Ref, anchor: Ref) -> tuple[Ref, ...] | None:
    if anchor.identity > goal.identity:
        return None
    after = _walk(steps, goal, Held(anchor.identity, anchor.state_digest))
    return None if after is None else (anchor, *after)
