"""`deltawire close`: say in a channel's head that its writer publishes nothing more."""

from __future__ import annotations

import argparse

from ..clock import REAL, Clock
from ..stores.base import Store
from ..term import Term, TermOptions
from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=common.WEIGHTS)
    common.add_claim(parser)


def run(args: argparse.Namespace) -> int:
    """Close the channel; returns 0."""
    store = common.open_run(args, writable=True)
    result = close(store, args.channel, takeover=args.takeover, options=common.term_options(args))
    at = f"at {result['head'] or 'no version'}, epoch {result['epoch']}"
    text = f"{args.channel}: closed {at}" if result["changed"] else f"{args.channel}: was closed already {at}"
    common.show(args, result, [text])
    return 0


def close(
    store: Store, channel: str = common.WEIGHTS, *, takeover: bool = False, options: TermOptions | None = None,
    clock: Clock = REAL,
) -> common.Result:  # fmt: skip
    """{url, channel, changed, head, epoch}; `changed` is False when the head was closed already.

    Raises Fenced when the channel's writer is at work and `takeover` is not set.
    """
    (found,) = common.read_channels(store, channel)
    head = found.head
    changed = found.split or not head.closed
    if changed:
        term = Term.claim(store, channel, takeover=takeover, options=options, clock=clock)
        term.close()
        head = term.head
    said = str(head.identity) if head.identity else None
    return {"url": store.url, "channel": channel, "changed": changed, "head": said, "epoch": head.epoch}
