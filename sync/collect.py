"""Collecting: make unreachable first, announce, wait, look again, delete.

    look ── pins read, floor wanted ──▶ next catchup list omits what is below ──▶ plan object
         ── grace by the store's clock, fence and pins read again ──▶ manifests, newest first, then objects

Roots: what the head and its catchup list name, what a live pin reaches, everything newer than the head or of a higher
epoch. `sweepable` is pure; `Collector` does the reading and deleting, for the term's writer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from . import layout
from .errors import CorruptObject, ObjectMissing
from .events import Emit
from .pins import Pinned, read_pins
from .schema.wire import MAX_REFS, Head, Ref, SweepPlan, parse
from .stores.base import ObjectInfo
from .term import Term

PLAN_LIMIT = 64 * 1024 * 1024
BATCH = 1000


def wanted_floor(refs: Iterable[Ref], keep_anchors: int, pins: Iterable[Pinned], now: float) -> int | None:
    """The floor to raise to: the oldest anchor that is kept, or a live pin below it; None while there are too few."""
    anchors = sorted(r.version for r in refs if r.kind == "anchor")
    if len(anchors) < keep_anchors:
        return None
    return min([anchors[-keep_anchors], *(p.pin.version for p in pins if not p.expired(now))])


def sweepable(
    listing: Iterable[ObjectInfo], head: Head, refs: Iterable[Ref], pins: Collection[Pinned], now: float,
    busy: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Keys of the channel that nothing reaches, in the order to delete them: manifests newest first, then the rest.

    listing: every object below the channel's folder; refs: what the head and its catchup list name; pins: expired ones
    too, whose own keys are swept; busy: folders that this writer still fills.
    """
    kept = {layout.folder_of(r.key) for r in refs} | set(busy)
    lowest = min((p.pin.version for p in pins if not p.expired(now)), default=None)
    found: list[tuple[layout.ObjectKey, str]] = []
    for info in listing:
        at = layout.parse_object_key(info.key)
        if at is None or at.channel != head.channel or at.epoch > head.epoch:
            continue
        if head.version is None or at.version > head.version or layout.folder_of(info.key) in kept:
            continue
        named = head.catchup is not None and info.key == head.catchup.key
        pinned = at.area in ("versions", "anchors", "spans") and lowest is not None and at.start >= lowest
        if not named and not pinned and at.area != "plans":
            found.append((at, info.key))
    manifests = [item for item in found if item[1].endswith("/" + layout.MANIFEST)]
    rest = [item for item in found if not item[1].endswith("/" + layout.MANIFEST)]
    ordered = [*sorted(manifests, key=lambda i: (i[0].version, i[1]), reverse=True), *sorted(rest)]
    return [key for _, key in ordered] + sorted(p.info.key for p in pins if p.expired(now))


class Collector:
    """Collects one channel for the writer of its term. Every call of `step` does at most one thing and returns."""

    def __init__(self, term: Term, emit: Emit, busy: Callable[[], Collection[str]] = lambda: ()) -> None:
        self._term, self._emit, self._busy = term, emit, busy
        self._adopted = False
        self._plan: tuple[SweepPlan, float, str] | None = None
        self._announced: float | None = None
        self.deleted = 0

    @property
    def due_at(self) -> float | None:
        """The second of the store's clock at which the announced plan may be swept; None without one."""
        return None if self._plan is None else self._plan[1] + self._term.options.grace

    @property
    def ready(self) -> bool:
        """True when an announced plan may be swept."""
        if self.due_at is None or self._term.now < self.due_at:
            return False
        # a jump of the store's clock makes nothing due: what was announced here has waited here
        return self._announced is None or self._term.monotonic() >= self._announced + self._term.options.grace

    def step(self) -> str:
        """Raise the wanted floor; then announce a plan, or wait for one, or sweep it. Returns which. While a pin cannot
        be read it may hold anything: nothing is done ("unsure").

        Raises StoreUnavailable, Fenced, StopError.
        """
        if not self._adopted:
            self._plan, self._adopted = self._earlier_plan(), True
        pins = self.raise_floor()
        if pins is None:
            return "unsure"
        if self._plan is None:
            return self._announce(pins)
        return self._sweep(pins) if self.ready else "waiting"

    @property
    def plan(self) -> SweepPlan | None:
        """The announced plan, or None."""
        return None if self._plan is None else self._plan[0]

    def raise_floor(self) -> list[Pinned] | None:
        """Read the pins and want the floor that they allow, from the next catchup list on. Returns the pins, or None,
        having wanted nothing, when one of them cannot be read."""
        pins = self._pins()
        if pins is not None:
            floor = wanted_floor(self._term.refs, self._term.options.keep_anchors, pins, self._term.now)
            self._term.wanted_floor = max(self._term.wanted_floor, floor or 0)
        return pins

    def _pins(self) -> list[Pinned] | None:
        head = self._term.head
        pins, damaged = read_pins(self._term.store, head.channel, head.channel_uid)
        for one in damaged:
            self._emit("refused", error=type(one.error).__name__, why=str(one.error))
        return pins if all(one.outlived(self._term.now) for one in damaged) else None

    def _sweepable(self, pins: list[Pinned]) -> list[str]:
        term = self._term
        head = term.head
        listing = term.store.list(f"{head.channel}/")
        return sweepable(listing, head, term.refs, pins, term.now, self._busy())

    def _announce(self, pins: list[Pinned]) -> str:
        term = self._term
        keys = self._sweepable(pins)
        if not keys:
            return "nothing"
        head = term.head
        term.check_fence()
        name = layout.version_name(head.version or 0, head.epoch, term.token())  # one name, one content
        key = layout.plan_key(head.channel, name)
        plan = SweepPlan(
            channel=head.channel, channel_uid=head.channel_uid, epoch=head.epoch, writer=head.writer, floor=head.floor,
            keys=tuple(keys[:MAX_REFS]),
        )  # fmt: skip
        term.put_behind({key: plan.to_bytes()}, "the collecting plan")
        seen = term.store.info([key]).get(key)
        if seen is not None:
            self._plan, self._announced = (plan, seen.uploaded_at, key), term.monotonic()
        self._emit("collect_plan", objects=len(plan.keys), floor=head.floor)
        return "planned"

    def _earlier_plan(self) -> tuple[SweepPlan, float, str] | None:
        term = self._term
        found: list[tuple[float, str, SweepPlan]] = []
        for info in term.store.list(f"{term.head.channel}/plans/"):
            try:
                plan = parse(SweepPlan, term.store.get(info.key, limit=PLAN_LIMIT), info.key)
            except (CorruptObject, ObjectMissing) as error:
                self._emit("refused", error=type(error).__name__, why=str(error))
                term.store.delete([info.key])
                continue
            if plan.channel_uid == term.head.channel_uid:
                found.append((info.uploaded_at, info.key, plan))
        if not found:
            return None
        at, key, plan = max(found)
        term.store.delete([k for _, k, _ in found if k != key])
        return plan, at, key

    def _sweep(self, pins: list[Pinned]) -> str:
        assert self._plan is not None
        plan, _, key = self._plan
        self._term.check_fence()
        planned = set(plan.keys)
        doomed = [k for k in self._sweepable(pins) if k in planned]
        for at in range(0, len(doomed), BATCH):
            self._term.store.delete(doomed[at : at + BATCH])
        self._term.store.delete([key])
        self.deleted += len(doomed)
        self._plan = self._announced = None
        self._emit("collect", deleted=len(doomed), spared=len(plan.keys) - len(doomed))
        return "swept"
