"""`deltawire rollback`: publish the state of an old version as the next one."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..clock import REAL, Clock
from ..errors import InvalidRequest, SchemaChanged
from ..fetch import read_manifest
from ..layout import INDEX
from ..publisher import Publisher, PublisherOptions, Stamp
from ..safetensors_io import MappedCheckpoint
from ..schema.wire import Manifest
from ..stores.base import Store
from ..tensors import Schema, State, schema_of
from ..term import TermOptions
from . import common
from .checkout import bring

_NUMPY = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "F16": "float16", "I32": "int32", "F32": "float32", "I64": "int64",
    "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""Dtypes for which an array of bits must be viewed as numpy's own type to be published under their name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=common.WEIGHTS)
    parser.add_argument("version", metavar="VERSION", help="a live version as 12 or 12@2")
    common.add_claim(parser)


def run(args: argparse.Namespace) -> int:
    """Publish the old state; returns 0."""
    store = common.open_run(args, writable=True)
    options = common.term_options(args, collect_every=0)
    result = rollback(store, args.version, args.channel, takeover=args.takeover, options=options)
    if result["new"] is None:
        text = f"{args.channel}: {result['old']} is the head already; nothing was published"
    else:
        text = f"{args.channel}: {result['old']} -> {result['new']} ({result['kind']}, {common.size(result['bytes'])})"
    common.show(args, result, [text])
    return 0


def rollback(
    store: Store, version: str, channel: str = common.WEIGHTS, *, takeover: bool = False,
    options: TermOptions | None = None, clock: Clock = REAL,
) -> common.Result:  # fmt: skip
    """Publish the state of `version` as the channel's next version, with its step and sync count, and close the term.

    Returns {url, channel, old, new, kind, bytes, head}: `head` is what was the head before, `new` None when `version`
    is the head. One delta, or an anchor when the head has other tensors or cannot be reached. Raises Fenced when the
    channel's writer is at work and `takeover` is not set, Pruned when the version is not live.
    """
    (found,) = common.read_channels(store, channel)
    head, refs = found.head, common.live_refs(store, found.head)
    identity = common.find_version(version, head, refs)
    if head.manifest is None or head.manifest.kind == "document":
        raise InvalidRequest(f"channel {channel!r} holds documents; publish the old document again instead")
    result = {"url": store.url, "channel": channel, "old": str(identity), "head": str(head.identity)}
    if identity == head.identity:
        return {**result, "new": None, "kind": None, "bytes": 0}
    ref = min((r for r in refs if r.identity == identity), key=lambda r: r.kind == "span")
    manifest = read_manifest(store, ref)
    with common.scratch_folder() as scratch:
        files = bring(store, head, ref, scratch)
        done = _publish(store, files, manifest, head.manifest, takeover, options, clock)
    return {**result, **done}


def _publish(
    store: Store, files: Path, manifest: Manifest, head: Manifest, takeover: bool, options: TermOptions | None,  # noqa: FBT001
    clock: Clock,
) -> common.Result:  # fmt: skip
    mapped = MappedCheckpoint(files)
    state = _typed(mapped.state, mapped.schema)
    faithful = schema_of(state) == mapped.schema
    if not faithful and manifest.schema_digest != head.schema_digest:
        raise _unfaithful(manifest, "the head has other tensors")

    def emit(event: str, **facts: object) -> None:
        if event == "base_lost" and not faithful:  # an anchor would name other dtypes than the version has
            raise _unfaithful(manifest, str(facts.get("why", "the head cannot be reached")))

    side = {p.name: p.read_bytes() for p in files.iterdir() if p.suffix != ".safetensors" and p.name != INDEX}
    term = options or TermOptions(collect_every=0)
    publisher = Publisher(
        store, channel=manifest.channel, side_files=side, options=PublisherOptions(largest_span=0, term=term),
        clock=clock, emit=emit, work=files.parent.parent / "work",
    )  # fmt: skip
    try:
        new = publisher.open(state, Stamp(manifest.step, manifest.sync, manifest.harness), takeover=takeover)
        done = publisher.history[-1]
    finally:
        publisher.close()
    return {"new": str(new), "kind": done.kind, "bytes": done.payload}


def _unfaithful(manifest: Manifest, why: str) -> SchemaChanged:
    return SchemaChanged(
        f"version {manifest.identity} cannot be published as a delta ({why}), and numpy cannot carry all its dtypes in "
        "an anchor; check it out and let the trainer publish it"
    )


def _typed(state: State, schema: Schema) -> State:
    """The same bits in the numpy dtypes that mean the schema's, where there is one."""
    return {name: array.view(_NUMPY.get(schema[name].dtype, array.dtype)) for name, array in state.items()}
