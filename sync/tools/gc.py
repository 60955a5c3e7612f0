"""`deltawire gc`: collect a run whose writer is gone: announce what goes, wait the grace, delete."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..clock import REAL, Clock
from ..collect import PLAN_LIMIT, Collector, sweepable, wanted_floor
from ..errors import CorruptObject, ObjectMissing
from ..pins import read_pins
from ..schema.wire import SweepPlan, parse
from ..stores.base import Store
from ..term import Term, TermOptions, live
from . import common

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=common.WEIGHTS)
    common.add_claim(parser)
    add = parser.add_argument
    add("--keep-anchors", type=common.count, default=2, metavar="N", help="newest anchors that stay, with all that "
        "follows the oldest of them (default 2)")  # fmt: skip
    add("--grace", type=common.seconds, default=3600.0, metavar="SECONDS", help="wait between the plan and the deletes "
        "(default 3600; less is only safe when nobody reads)")  # fmt: skip
    add("--wait", action="store_true", help="stay until the grace is over and delete; else call again later")
    add("--dry-run", action="store_true", help="claim and change nothing; print what would go")


def run(args: argparse.Namespace) -> int:
    """Collect; returns 0."""
    options = common.term_options(args, keep_anchors=args.keep_anchors, grace=args.grace)
    store = common.open_run(args, writable=not args.dry_run)
    if args.dry_run:
        result = preview(store, args.channel, options=options)
        common.show(args, result, _preview_lines(result))
        return 0
    result = collect(store, args.channel, takeover=args.takeover, wait=args.wait, options=options)
    common.show(args, result, _lines(result))
    return 0


class FoundPlan(NamedTuple):
    """A collecting plan as the store holds it."""

    key: str
    plan: SweepPlan
    uploaded_at: float


def read_plans(store: Store, channel: str) -> list[FoundPlan]:
    """The plans of a channel that are whole, oldest first."""
    found = []
    for info in store.list(f"{channel}/plans/"):
        try:
            plan = parse(SweepPlan, store.get(info.key, limit=PLAN_LIMIT), info.key)
        except (CorruptObject, ObjectMissing):
            continue
        found.append(FoundPlan(info.key, plan, info.uploaded_at))
    return sorted(found, key=lambda f: (f.uploaded_at, f.key))


def preview(store: Store, channel: str = common.WEIGHTS, *, options: TermOptions | None = None) -> common.Result:
    """{url, channel, floor, new_floor, keys: [{key, bytes}], bytes, planned}: what a `collect` would announce, and the
    number of keys that an earlier plan names already. Nothing is changed: one small object is written and deleted to
    read the store's clock, where this token may."""
    options = options or TermOptions()
    (found,) = common.read_channels(store, channel)
    head, refs = found.head, common.live_refs(store, found.head)
    pins, _ = read_pins(store, channel, head.channel_uid)
    listing = store.list(f"{channel}/")
    now = max(
        [*(i.uploaded_at for i in listing), *(i.uploaded_at for _, i in found.heads), common.read_clock(store) or 0]
    )
    floor = max(head.floor, wanted_floor(refs, options.keep_anchors, pins, now) or 0)
    kept = live(refs, floor) if floor > head.floor else refs
    after = head.model_copy(update={"floor": floor, "catchup": head.catchup if floor == head.floor else None})
    sizes = {info.key: info.size for info in listing}
    keys = [{"key": k, "bytes": sizes.get(k, 0)} for k in sweepable(listing, after, kept, pins, now)]
    return {
        "url": store.url, "channel": channel, "floor": head.floor, "new_floor": floor, "keys": keys,
        "bytes": sum(int(str(k["bytes"])) for k in keys),
        "planned": sum(len(p.plan.keys) for p in read_plans(store, channel)),
    }  # fmt: skip


def collect(
    store: Store, channel: str = common.WEIGHTS, *, takeover: bool = False, wait: bool = False,
    options: TermOptions | None = None, clock: Clock = REAL,
) -> common.Result:  # fmt: skip
    """Claim the channel, raise its floor, announce a plan; delete what an earlier plan (with `wait`: this one) names
    and nothing reaches, once its grace is over; close the term.

    Returns {url, channel, claimed, floor, planned, planned_bytes, deleted, deleted_bytes, spared, due_in, damaged}:
    `spared` counts planned keys that something reaches again; `due_in` the seconds until the standing plan may be
    swept, None without one; `damaged` pins and plans that could not be read: such a pin
    may hold anything, so nothing is collected while it is there. With
    nothing to do nothing is claimed. Raises Fenced when the writer is at work and `takeover` is not set, or when
    another claims meanwhile.
    """
    options = options or TermOptions()
    due = preview(store, channel, options=options)
    result: common.Result = {
        "url": store.url, "channel": channel, "claimed": False, "floor": due["floor"], "planned": 0, "planned_bytes": 0,
        "deleted": 0, "deleted_bytes": 0, "spared": 0, "due_in": None,
        "damaged": [],
    }  # fmt: skip
    if not due["keys"] and not due["planned"] and due["floor"] == due["new_floor"]:
        return result
    term = Term.claim(store, channel, takeover=takeover, options=options, clock=clock)
    try:
        _Collecting(term, clock, result).run(wait=wait)
    finally:  # an open claim would lock the writer out
        if not term.over:
            term.close()
    return {**result, "claimed": True, "floor": term.head.floor}


class _Collecting:
    """One claimed term's collecting; counts into `result`."""

    def __init__(self, term: Term, clock: Clock, result: common.Result) -> None:
        self._term, self._clock, self._result = term, clock, result
        self._collector = Collector(term, self._emit)

    def run(self, *, wait: bool) -> None:
        self._raise_floor()
        while True:
            sizes = {info.key: info.size for info in self._term.store.list(f"{self._term.head.channel}/")}
            outcome = self._collector.step()
            if outcome == "planned":
                self._count_plan(sizes)
            elif outcome == "swept":
                left = {info.key for info in self._term.store.list(f"{self._term.head.channel}/")}
                gone = [key for key in sizes if key not in left and "/plans/" not in key]
                self._result["deleted_bytes"] += sum(sizes[key] for key in gone)
                self._result["due_in"] = None
                continue  # what became unreachable since that plan is announced now
            if outcome in ("nothing", "unsure") or not self._until_due(wait=wait):
                return

    def _raise_floor(self) -> None:
        """Raise the floor in a head of its own, before the look that decides what is unreachable."""
        self._collector.raise_floor()
        if self._term.wanted_floor > self._term.head.floor:
            self._term.refresh()

    def _count_plan(self, sizes: dict[str, int]) -> None:
        plan = self._collector.plan
        self._result["planned_bytes"] = 0 if plan is None else sum(sizes.get(key, 0) for key in plan.keys)

    def _until_due(self, *, wait: bool) -> bool:
        """With `wait` stay until the plan may be swept. True when it may."""
        while not self._collector.ready:
            left = (self._collector.due_at or 0.0) - self._term.now
            self._result["due_in"] = round(left, 3)
            if not wait:
                return False
            self._clock.sleep(max(left, 0.05))
            self._term.refresh()  # the store's clock is read off our own writes
        return True

    def _emit(self, event: str, **facts: Any) -> None:
        if event == "collect_plan":
            self._result["planned"] += facts["objects"]
        elif event == "collect":
            self._result["deleted"] += facts["deleted"]
            self._result["spared"] += facts["spared"]
        elif event == "refused":
            self._result["damaged"] = sorted({*self._result["damaged"], facts["why"]})


def _preview_lines(result: common.Result) -> Iterator[str]:
    rise = f"floor {result['floor']} -> {result['new_floor']}"
    total = f"{common.plural(len(result['keys']), 'object')} ({common.size(result['bytes'])}) would go"
    yield f"{result['channel']}: {rise}, {total}"
    rows = [[common.size(k["bytes"]), k["key"]] for k in result["keys"][:SHOWN]]
    yield from common.table(rows, right=(0,), indent="  ") if rows else ()
    if len(result["keys"]) > SHOWN:
        yield f"  and {len(result['keys']) - SHOWN:,} more; --json names all"
    if result["planned"]:
        yield f"  an earlier plan names {common.plural(result['planned'], 'object')}"


def _lines(result: common.Result) -> Iterator[str]:
    if not result["claimed"]:
        yield f"{result['channel']}: nothing to collect above floor {result['floor']}; nothing was written"
        return
    parts = [f"floor {result['floor']}"]
    if result["planned"]:
        parts.append(f"planned {common.plural(result['planned'], 'object')} ({common.size(result['planned_bytes'])})")
    parts.append(f"deleted {result['deleted']:,} ({common.size(result['deleted_bytes'])})")
    parts.append(f"spared {result['spared']:,}")
    yield f"{result['channel']}: " + ", ".join(parts)
    yield from (f"  ignored {text}" for text in result["damaged"])
    if result["due_in"] is not None:
        yield f"  call again in {common.span(max(result['due_in'], 0))} to delete what is planned"
