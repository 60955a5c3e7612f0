"""`deltawire status`: who writes a run, how fresh it is, who reads it, and what it weighs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..pins import read_pins
from ..schema.wire import Ref
from ..stores.base import ObjectInfo, Store
from . import common
from .gc import read_plans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=None)
    parser.add_argument("--no-probe", action="store_true", help="write nothing: without the small object that is "
        "written and deleted to read the store's clock, ages count from the newest upload")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the status; returns 0."""
    result = status(common.open_run(args), args.channel, probe=not args.no_probe)
    common.show(args, result, _lines(result))
    return 0


def status(store: Store, channel: str | None = None, *, probe: bool = True) -> common.Result:
    """{url, clock, now, objects, bytes, kinds, channels: […]}.

    `clock` is `store` when `now`, a second of the store's clock, was read off an object written for it, else `newest
    upload`. `kinds` maps heads, versions, anchors, spans, catchup, pins, plans, claims and foreign to {objects, bytes}.
    A channel is {channel, uid, head, epoch, closed, split, writers, published, floor, live, kinds, pins, plans}:
    `published` is {at, age, head_age}: when the head's version went up, and how long ago that and the head's last write
    were, in seconds; `live` maps delta, anchor, span and document to {count, bytes} of what can be
    reached; `pins`: {id, reader, version, lag, left, live}, `lag` in versions and `left` in seconds; `plans`: {key,
    keys, age}.
    """
    now = common.read_clock(store) if probe else None
    listing = store.list("")
    clock = "newest upload" if now is None else "store"
    now = max([*(i.uploaded_at for i in listing), *([] if now is None else [now])], default=0.0)
    channels = [_channel(store, found, listing, now) for found in common.read_channels(store, channel)]
    return {
        "url": store.url, "clock": clock, "now": now, "objects": len(listing), "bytes": sum(i.size for i in listing),
        "kinds": common.by_kind(listing), "channels": channels,
    }  # fmt: skip


def _channel(store: Store, found: common.Channel, listing: list[ObjectInfo], now: float) -> common.Result:
    head = found.head
    refs = common.live_refs(store, head)
    pins, damaged = read_pins(store, found.name, head.channel_uid)
    return {
        "channel": found.name, "uid": head.channel_uid, "head": str(head.identity) if head.identity else None,
        "epoch": head.epoch, "closed": head.closed, "split": found.split, "writers": [h.writer for h, _ in found.heads],
        "published": _published(found, refs, listing, now), "floor": head.floor, "live": _live(refs),
        "kinds": common.by_kind(listing, found.name),
        "pins": [
            {
                "id": p.info.key.rpartition("/")[2].removesuffix(".json"), "reader": p.pin.reader,
                "version": f"{p.pin.version}@{p.pin.epoch}",
                "lag": None if head.version is None else head.version - p.pin.version,
                "left": round(p.info.uploaded_at + p.pin.ttl - now, 3), "live": not p.expired(now),
            }
            for p in pins
        ],
        "damaged_pins": [str(error) for error in damaged],
        "plans": [
            {"key": p.key, "keys": len(p.plan.keys), "age": round(now - p.uploaded_at, 3)}
            for p in read_plans(store, found.name)
        ],
    }  # fmt: skip


def _published(found: common.Channel, refs: tuple[Ref, ...], listing: list[ObjectInfo], now: float) -> common.Result:
    own = {r.key for r in refs if r.identity == found.head.identity and r.kind != "span"}
    at = min((i.uploaded_at for i in listing if i.key in own), default=None)
    age = None if at is None else round(now - at, 3)
    return {"at": at, "age": age, "head_age": round(now - max(i.uploaded_at for _, i in found.heads), 3)}


def _live(refs: tuple[Ref, ...]) -> common.Result:
    kinds = sorted({r.kind for r in refs})
    return {
        kind: {"count": len(some), "bytes": sum(r.payload for r in some)}
        for kind, some in ((k, [r for r in refs if r.kind == k]) for k in kinds)
    }


def _lines(result: common.Result) -> Iterator[str]:
    yield f"{result['url']}: {common.plural(result['objects'], 'object')}, {common.size(result['bytes'])}"
    rows = [[kind, f"{n['objects']:,}", common.size(n["bytes"])] for kind, n in result["kinds"].items()]
    yield from common.table(rows, right=(1, 2), indent="  ") if rows else ()
    if result["clock"] != "store":
        yield "  ages count from the newest upload: the store's clock was not read"
    for channel in result["channels"]:
        yield from _channel_lines(channel)


def _channel_lines(channel: common.Result) -> Iterator[str]:
    state = "closed" if channel["closed"] else "open"
    yield f"{channel['channel']}: head {channel['head'] or '-'}, {state}, floor {channel['floor']}"
    age, head_age = (common.span(channel["published"][name]) for name in ("age", "head_age"))
    yield f"  last publish {age} ago; head written {head_age} ago by {' and '.join(channel['writers'])}"
    if channel["split"]:
        yield (
            f"  split: {len(channel['writers'])} writers claimed epoch {channel['epoch']}, so both stopped and readers "
            "wait; start one of them with --takeover"
        )
    rows = [[f"{kind}s", f"{n['count']:,}", common.size(n["bytes"])] for kind, n in channel["live"].items()]
    yield from common.table(rows, right=(1, 2), indent="  live ") if rows else ()
    yield from _pin_lines(channel["pins"])
    for text in channel["damaged_pins"]:
        yield f"  damaged {text}"
    for plan in channel["plans"]:
        yield f"  plan to delete {common.plural(plan['keys'], 'object')}, written {common.span(plan['age'])} ago"


def _pin_lines(pins: list[dict[str, Any]]) -> list[str]:
    rows = []
    for pin in pins:
        lag, left = common.plural(pin["lag"] or 0, "version"), common.span(pin["left"])
        reader = pin["reader"] or pin["id"]
        rows.append(
            ["pin", reader, f"at {pin['version']}", f"{lag} behind", f"{left} left" if pin["live"] else "expired"]
        )
    return common.table(rows, indent="  ") if rows else []
