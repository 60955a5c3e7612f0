"""`deltawire log`: the live versions of a run, newest first."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..errors import CorruptObject
from ..fetch import read_manifest
from ..pins import read_pins
from ..schema.wire import Head, Manifest, Ref
from ..stores.base import Store
from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=None)
    parser.add_argument(
        "--limit", type=common.count, default=20, metavar="N", help="versions shown (default 20; 0: all)"
    )
    parser.add_argument("--long", action="store_true", help="read every manifest shown: step, sync, codec, harness")


def run(args: argparse.Namespace) -> int:
    """Print the versions; returns 0."""
    result = log(common.open_run(args), args.channel, limit=args.limit, long=args.long)
    common.show(args, result, _lines(result))
    return 0


def log(store: Store, channel: str | None = None, *, limit: int = 20, long: bool = False) -> common.Result:
    """{url, channels: [{channel, uid, head, epoch, writer, closed, floor, split, live, versions: […]}]}.

    A version is {version, kind, bytes, digest, age, anchor, spans, pins}: `bytes` of its own objects; `age` in seconds
    before the newest upload seen, by the store's clock; `anchor`: bytes of a full checkpoint of it, or null; `spans`:
    [{from, bytes}] that end there; `pins`: readers that hold it. `long` adds {step, sync, codec, objects, harness,
    measured_against, created_at}. A damaged manifest is an {error} there.
    """
    channels = [_channel(store, found, limit, long=long) for found in common.read_channels(store, channel)]
    return {"url": store.url, "channels": channels}


def _channel(store: Store, found: common.Channel, limit: int, *, long: bool) -> common.Result:
    head = found.head
    refs = common.live_refs(store, head)
    rows = _rows(refs)
    shown = rows[:limit] if limit else rows
    infos = store.info([own.key for own, _ in shown])
    newest = max([*(i.uploaded_at for i in infos.values()), *(i.uploaded_at for _, i in found.heads)])
    pinned: dict[int, list[str]] = defaultdict(list)
    for pin in read_pins(store, found.name, head.channel_uid)[0]:
        pinned[pin.pin.version].append(pin.pin.reader or pin.info.key.rpartition("/")[2].removesuffix(".json"))
    versions = []
    for own, others in shown:
        age = newest - infos[own.key].uploaded_at if own.key in infos else None
        row = _row(own, others, age, pinned.get(own.version, []))
        versions.append({**row, **_details(store, head, own)} if long else row)
    return {
        "channel": found.name, "uid": head.channel_uid, "head": str(head.identity) if head.identity else None,
        "epoch": head.epoch, "writer": head.writer, "closed": head.closed, "floor": head.floor, "split": found.split,
        "live": len(rows), "versions": versions,
    }  # fmt: skip


def _rows(refs: tuple[Ref, ...]) -> list[tuple[Ref, list[Ref]]]:
    """Newest first: the reference that made each version (an anchor where nothing else is live), and the others."""
    at: dict[Any, list[Ref]] = defaultdict(list)
    for ref in refs:
        at[ref.identity].append(ref)
    order = {"delta": 0, "document": 0, "anchor": 1, "span": 2}
    rows = []
    for identity in sorted(at, reverse=True):
        own, *others = sorted(at[identity], key=lambda r: order[r.kind])
        rows.append((own, others))
    return rows


def _row(own: Ref, others: list[Ref], age: float | None, pins: list[str]) -> common.Result:
    anchors = [r.payload for r in (own, *others) if r.kind == "anchor"]
    return {
        "version": str(own.identity), "kind": own.kind, "bytes": own.payload, "digest": own.state_digest,
        "age": None if age is None else round(age, 3), "anchor": anchors[0] if anchors else None,
        "spans": [{"from": r.from_version, "bytes": r.payload} for r in others if r.kind == "span"],
        "pins": sorted(pins),
    }  # fmt: skip


def _details(store: Store, head: Head, own: Ref) -> common.Result:
    try:
        manifest = _manifest(store, head, own)
    except CorruptObject as error:
        return {"error": str(error)}
    return {
        "step": manifest.step, "sync": manifest.sync, "codec": manifest.codec, "objects": len(manifest.objects),
        "harness": {name: list(ids) for name, ids in manifest.harness.items()},
        "measured_against": manifest.measured_against, "created_at": manifest.created_at,
    }  # fmt: skip


def _manifest(store: Store, head: Head, own: Ref) -> Manifest:
    if head.manifest is not None and head.manifest.sha256() == own.sha256:
        return head.manifest
    return read_manifest(store, own)


def _lines(result: common.Result) -> Iterator[str]:
    for channel in result["channels"]:
        state = "split" if channel["split"] else "closed" if channel["closed"] else "open"
        yield (
            f"{channel['channel']}: head {channel['head'] or '-'}, epoch {channel['epoch']} of writer "
            f"{channel['writer']} ({state}), floor {channel['floor']}, {common.plural(channel['live'], 'live version')}"
        )
        rows = [_cells(version) for version in channel["versions"]]
        if rows:
            yield from common.table(rows, right=(2, 4), indent="  ")
        if (more := channel["live"] - len(rows)) > 0:
            yield f"  and {more:,} more; --limit 0 shows all"


def _cells(row: common.Result) -> list[str]:
    marks = [f"anchor {common.size(row['anchor'])}"] if row["anchor"] is not None and row["kind"] != "anchor" else []
    if row["spans"]:
        marks.append(f"spans from {', '.join(str(s['from']) for s in row['spans'])}")
    marks += [f"pin {name}" for name in row["pins"]]
    if "error" in row:
        marks.append(row["error"])
    elif "step" in row:
        marks += [f"step {row['step']} sync {row['sync']}"]
        marks += [f"against {row['measured_against']}"] if row["measured_against"] else []
        marks += [f"{name} {','.join(ids)}" for name, ids in row["harness"].items()]
    digest = row["digest"].partition(":")[2][:12]
    return [row["version"], row["kind"], common.size(row["bytes"]), digest, common.span(row["age"]), ", ".join(marks)]
