"""`deltawire doctor`: measure on a real bucket what a test on one machine cannot show, and say what to set."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from ..clock import REAL, Clock
from ..errors import ConfigError
from ..stores import open_store
from ..stores.base import Store
from . import common
from .measure import Measure

LEAST_GRACE = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("url", metavar="URL", help="the run; objects are written below doctor/ in it, and deleted")
    add("--rounds", type=_rounds, default=10, metavar="N", help="how often each staleness is measured (default 10)")
    add("--batch", type=_rounds, default=20, metavar="N", help="objects of the batches that are watched (default 20)")
    add("--patience", type=common.seconds, default=30.0, metavar="SECONDS", help="longest wait for one write to be "
        "seen (default 30)")  # fmt: skip
    add("--create", action="store_true", help="make the bucket or folder when it is missing")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; returns 0, or 1 when a write was not seen within the patience."""
    store = open_store(args.url, create=args.create)
    result = doctor(store, rounds=args.rounds, batch=args.batch, patience=args.patience)
    common.show(args, result, _lines(result))
    return 0 if result["ok"] else 1


def doctor(
    store: Store, *, rounds: int = 10, batch: int = 20, patience: float = 30.0, clock: Clock = REAL
) -> common.Result:
    """{url, ok, rights: {read, write, why}, staleness, batches, clock_offset, round_trip, throughput, recommended}.

    staleness: put_to_list, put_to_info, overwrite_to_read, overwrite_to_list and delete_to_list as {rounds, stale,
    worst, median, unseen}: `stale` rounds in which an answer came from before the write, `worst` and `median` seconds
    from the end of the write to the last such answer, `unseen` rounds that never showed it. batches: {size, looks,
    partial}: looks during a batch, and those that saw a part of it. clock_offset: {seconds, error}: the store's clock
    minus this machine's, and how far off that may be. round_trip: median seconds of list, info, get and put.
    throughput: bytes per second up and down. recommended: {lag, grace, why}. Without the right to write all but
    `rights` is null. Only keys below `doctor/` are written; they are deleted at the end.
    """
    measure = Measure(store, clock, patience)
    rights = _rights(store, measure)
    result: common.Result = {
        "url": store.url, "ok": True, "rights": rights, "staleness": None, "batches": None, "clock_offset": None,
        "round_trip": None, "throughput": None, "recommended": None,
    }  # fmt: skip
    if not rights["write"]:
        return result
    try:
        result["round_trip"] = measure.round_trip(rounds)
        result["staleness"] = measure.staleness(rounds)
        result["batches"] = measure.batches(rounds, batch)
        result["clock_offset"] = measure.clock_offset()
        result["throughput"] = measure.throughput()
    finally:
        measure.clean()
    result["recommended"] = _recommend(result, store, _largest_anchor(store))
    result["ok"] = not any(seen["unseen"] for seen in result["staleness"].values())
    return result


def _rights(store: Store, measure: Measure) -> common.Result:
    store.list(measure.folder)
    try:
        measure.put("rights", b"may this token write?")
    except ConfigError as error:
        return {"read": True, "write": False, "why": str(error)}
    return {"read": True, "write": True, "why": ""}


def _largest_anchor(store: Store) -> int:
    """Bytes of the largest anchor of the run: what a new reader has to download before anything it planned may go."""
    sizes: dict[str, int] = {}
    for info in store.list(""):
        place = common.place_of(info.key)
        if place.kind == "anchors":
            sizes[place.folder] = sizes.get(place.folder, 0) + info.size
    return max(sizes.values(), default=0)


def _recommend(result: common.Result, store: Store, anchor: int) -> common.Result:
    seen = result["staleness"]
    worst = max(m["worst"] for m in seen.values())
    unseen = [name.replace("_", " ") for name, m in seen.items() if m["unseen"]]
    lag = store.lag if worst == 0 else max(store.lag, math.ceil(20 * worst) / 10)
    trip = anchor / result["throughput"]["down"]
    grace = max(LEAST_GRACE, 60 * math.ceil((4 * trip + 10 * lag) / 60))
    why = [
        f"lag {lag:g} s: " + (f"twice the stalest answer seen ({worst:.2f} s)" if worst else
                              "no stale answer was seen; the store's own default stays")
        + ", so that a rival's claim is seen before this writer goes on",
        f"grace {grace:g} s: " + (f"four downloads of the largest anchor ({common.size(anchor)}, {trip:.0f} s each)"
                                  if grace > LEAST_GRACE else "one hour is ample here")
        + ", so that nothing is deleted that a reader planned with",
    ]  # fmt: skip
    if unseen:
        why.append(f"not seen within the patience: {', '.join(unseen)}; measure again with a longer --patience")
    return {"lag": lag, "grace": grace, "why": why}


def _rounds(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 1000")
    return value


def _lines(result: common.Result) -> Iterator[str]:
    rights = result["rights"]
    yield f"{result['url']}: may read{', may write' if rights['write'] else ''}"
    if not rights["write"]:
        yield f"  may not write, so nothing was measured: {rights['why']}"
        return
    rows = [[name.replace("_", " "), *_seen(seen)] for name, seen in result["staleness"].items()]
    yield from common.table([["staleness", "stale", "worst", "median"], *rows], right=(1, 2, 3))
    trips = ", ".join(f"{name} {1000 * t:.0f} ms" for name, t in result["round_trip"].items())
    batches, offset, speed = result["batches"], result["clock_offset"], result["throughput"]
    partly = f"partly visible in {batches['partial']} of {common.plural(batches['looks'], 'look')} during the write"
    yield from common.table([
        ["round trip", trips],
        ["batches", f"of {batches['size']}: {partly}"],
        ["clock", f"the store's is {offset['seconds']:+.2f} s off this machine's (± {offset['error']:.2f} s)"],
        ["throughput", f"{common.size(speed['up'])}/s up, {common.size(speed['down'])}/s down"],
    ])  # fmt: skip
    yield f"recommended: lag {result['recommended']['lag']:g} s, grace {result['recommended']['grace']:g} s"
    yield from (f"  {text}" for text in result["recommended"]["why"])


def _seen(seen: dict[str, Any]) -> list[str]:
    worst = f"over {seen['worst']:.1f} s" if seen["unseen"] else f"{seen['worst']:.2f} s"
    return [f"{seen['stale']} of {seen['rounds']}", worst, f"{seen['median']:.2f} s"]
