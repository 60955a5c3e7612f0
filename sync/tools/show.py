"""`deltawire show`: the head, one version's manifest, or one object of a run, checked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from .. import layout
from ..canonical import MAX_JSON_BYTES
from ..errors import InvalidRequest
from ..fetch import read_manifest, read_object
from ..schema.wire import Catchup, Head, Manifest, Pin, SweepPlan, parse
from ..stores.base import Store
from . import common

_MODELS = {"heads": Head, "catchup": Catchup, "pins": Pin, "plans": SweepPlan}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=common.WEIGHTS)
    about = "what to show: head (default), a version as 12 or 12@2, or the key of a JSON object of the run"
    parser.add_argument("what", nargs="?", default="head", metavar="VERSION|head|KEY", help=about)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; returns 0."""
    result = show(common.open_run(args), args.what, args.channel)
    common.show(args, result, _lines(result))
    return 0


def show(store: Store, what: str = "head", channel: str = common.WEIGHTS) -> common.Result:
    """{url, key, kind, content}: `kind` is head, manifest, catchup, pin or plan, `content` the object's own fields.

    For a version of an artifact channel `document` is its document. Raises CorruptObject when the object fails its
    check, ObjectMissing for an unknown key, Pruned for a version that is not live.
    """
    if "/" in what:
        return _object(store, what)
    (found,) = common.read_channels(store, channel)
    head = found.head
    if what == "head":
        return _result(store, layout.head_key(head.channel, head.epoch, head.writer), "head", head)
    refs = common.live_refs(store, head)
    identity = common.find_version(what, head, refs)
    order = {"delta": 0, "document": 0, "anchor": 1, "span": 2}
    ref = min((r for r in refs if r.identity == identity), key=lambda r: order[r.kind])
    manifest = read_manifest(store, ref)
    result = _result(store, ref.key, "manifest", manifest)
    if manifest.kind == "document":
        result["document"] = json.loads(read_object(store, ref, manifest, layout.DOCUMENT))
    return result


def _object(store: Store, key: str) -> common.Result:
    place = common.place_of(layout.check_key(key))
    model: Any = _MODELS.get(place.kind)
    if place.kind in common.FOLDERS and place.name == layout.MANIFEST:
        model = Manifest
    if model is None:
        raise InvalidRequest(f"{key} is not a head, manifest, catchup list, pin or plan; those can be shown")
    content = parse(model, store.get(key, limit=MAX_JSON_BYTES), key)
    return _result(store, key, "manifest" if model is Manifest else model.__name__.lower(), content)


def _result(store: Store, key: str, kind: str, content: Any) -> common.Result:
    kind = {"sweepplan": "plan"}.get(kind, kind)
    return {"url": store.url, "key": key, "kind": kind, "content": content.model_dump(mode="json")}


def _lines(result: common.Result) -> Iterator[str]:
    yield result["key"]
    rows = []
    for name, value in result["content"].items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows.append([name, f"{len(value)}:"])
            rows += [["", _short(item)] for item in value]
        else:
            rows.append([name, _short(value)])
    yield from common.table(rows, indent="  ")
    if "document" in result:
        yield json.dumps(result["document"], indent=2, ensure_ascii=False)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
