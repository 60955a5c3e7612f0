"""What the channel's commands share: arguments, channels and their heads, version names, the store's clock, output."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from .. import layout
from ..canonical import seal
from ..errors import ConfigError, InvalidRequest, Pruned
from ..heads import newest, read_catchup, read_head
from ..schema.base import Identity
from ..schema.wire import Head, Ref
from ..stores import open_store
from ..stores.base import ObjectInfo, Store
from ..term import TermOptions

Result = dict[str, Any]
"""A command's result: JSON types alone; what `--json` prints."""

WEIGHTS = "weights"
FOLDERS = ("versions", "anchors", "spans")
"""Areas of a channel in which every object lies in a folder with a manifest."""
KINDS = ("heads", *FOLDERS, "catchup", "pins", "plans", "claims", "foreign")
_CLAIM = re.compile(r"claims/([a-z][a-z0-9_]{0,31})-[0-9a-f]{16}\.json")


# --- arguments


def add_common(parser: argparse.ArgumentParser, *, channel: str | None) -> None:
    """Add URL, `--channel` (default `channel`; None: every channel) and `--json`."""
    parser.add_argument(
        "url", metavar="URL", help="the run: hf://buckets/NAMESPACE/BUCKET/RUN, file:///dir or a folder"
    )
    default = f"default {channel}" if channel else "default: every channel of the run"
    parser.add_argument("--channel", default=channel, metavar="NAME", help=f"which channel ({default})")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_claim(parser: argparse.ArgumentParser) -> None:
    """Add what a command needs that claims the channel."""
    add = parser.add_argument
    add("--takeover", action="store_true", help="claim although the head is younger than 10 minutes and not "
        "closed; its writer then stops")  # fmt: skip
    add("--settle", type=seconds, metavar="SECONDS", help="wait between the claim and the look for rivals "
        "(default: the store's own; `deltawire doctor` measures it)")  # fmt: skip


def seconds(text: str) -> float:
    """An argument of seconds, 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def count(text: str) -> int:
    """An argument that is a whole number, 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def open_run(args: argparse.Namespace, *, writable: bool = False) -> Store:
    """The store that the arguments name."""
    return open_store(args.url, writable=writable)


def term_options(args: argparse.Namespace, **more: Any) -> TermOptions:
    """The options of a term that a command claims."""
    return TermOptions(settle=args.settle, **more)


# --- channels


class Channel(NamedTuple):
    """One channel as its newest heads show it. `heads`: those of the highest epoch, with where they are; more than one
    is a split, and the first is then the one that went further."""

    name: str
    heads: tuple[tuple[Head, ObjectInfo], ...]

    @property
    def head(self) -> Head:
        """The head that a claim would go on from."""
        return self.heads[0][0]

    @property
    def split(self) -> bool:
        """True when several writers claimed the highest epoch."""
        return len(self.heads) > 1


def read_channels(store: Store, only: str | None = None) -> list[Channel]:
    """Every channel of a run, or the one named. Raises ConfigError when there is none, CorruptObject for a head that is
    damaged."""
    listing = newest(store.list(layout.HEADS))
    wanted = sorted(listing) if only is None else [only]
    if not listing or (only is not None and only not in listing):
        has = f"it has {', '.join(sorted(listing))}: choose one with --channel" if listing else (
            "it has no channel at all: is the URL right, and did a writer publish yet?"
        )  # fmt: skip
        raise ConfigError(f"{store.url} has no {'channel' if only is None else f'channel {only!r}'}; {has}")
    channels = []
    for name in wanted:
        found = [(read_head(store, key), info) for key, info in listing[name]]
        found.sort(key=lambda item: -1 if item[0].version is None else item[0].version, reverse=True)
        channels.append(Channel(name, tuple(found)))
    return channels


def live_refs(store: Store, head: Head) -> tuple[Ref, ...]:
    """Everything that a head and its catchup list name, each once, in order of version."""
    refs = {r.key: r for r in (*read_catchup(store, head), *head.recent)}
    return tuple(sorted(refs.values(), key=lambda r: (r.identity, r.kind, r.key)))


def find_version(text: str, head: Head, refs: Iterable[Ref]) -> Identity:
    """The live version that `text` names: a number, an identity like 12@2, or `head`.

    Raises InvalidRequest when it is none of these, Pruned when that version is not live.
    """
    if head.identity is None:
        raise InvalidRequest(f"channel {head.channel!r} has no version yet")
    if text == "head":
        return head.identity
    live = sorted({r.identity for r in refs if r.identity <= head.identity})
    if re.fullmatch(r"[0-9]{1,10}", text):
        found = [i for i in live if i.version == int(text)]
    elif re.fullmatch(r"[0-9]{1,10}@[0-9]{1,6}", text):
        found = [i for i in live if i == Identity.parse(text)]
    else:
        raise InvalidRequest(f"{text!r} is not a version; write a number, an identity like 12@2, or head")
    if not found:
        shown = f"{live[0]} to {live[-1]}" if live else "none"
        raise Pruned(f"version {text} of channel {head.channel!r} is not live; live are {shown}")
    return found[-1]


# --- keys


class Place(NamedTuple):
    """What a key is: one of KINDS, its channel, the parts of its name, and in FOLDERS its folder and name there."""

    kind: str
    channel: str = ""
    at: layout.ObjectKey | None = None
    folder: str = ""
    name: str = ""


def place_of(key: str) -> Place:
    """Say what a key is, from its name alone."""
    if (head := layout.parse_head_key(key)) is not None:
        return Place("heads", head.channel)
    if layout.is_pin(key):
        return Place("pins", key.partition("/")[0])
    if (claim := _CLAIM.fullmatch(key)) is not None:
        return Place("claims", claim[1])
    parts = key.split("/", 3)
    if len(parts) == 4 and parts[1] in FOLDERS:
        folder = "/".join(parts[:3]) + "/"
        at = layout.parse_object_key(folder + layout.MANIFEST)
        return Place("foreign") if at is None else Place(at.area, at.channel, at, folder, parts[3])
    at = layout.parse_object_key(key)
    if at is not None and at.area in ("catchup", "plans") and key.endswith(".json"):
        return Place(at.area, at.channel, at)
    return Place("foreign")


def by_kind(listing: Iterable[ObjectInfo], channel: str | None = None) -> dict[str, dict[str, int]]:
    """Kind → {objects, bytes} of a listing; `channel`: without what belongs to others."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"objects": 0, "bytes": 0})
    for info in listing:
        place = place_of(info.key)
        if channel in (None, place.channel):
            found[place.kind]["objects"] += 1
            found[place.kind]["bytes"] += info.size
    return {kind: found[kind] for kind in KINDS if kind in found}


def read_clock(store: Store) -> float | None:
    """The present second of the store's clock, read off an object that is written and deleted at once. None when this
    token may not write."""
    probe = f"claims/{WEIGHTS}-{secrets.token_hex(8)}.json"
    try:
        store.put_batch({probe: seal({"purpose": "reads the store's clock"})})
    except ConfigError:
        return None
    try:
        seen = store.info([probe]).get(probe)
    finally:
        with suppress(ConfigError):
            store.delete([probe])
    return None if seen is None else seen.uploaded_at


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder, gone at the end. A disk that is missing or full is a ConfigError that names the way out."""
    where = tempfile.gettempdir() if parent is None else str(parent)
    try:
        with tempfile.TemporaryDirectory(prefix="deltawire-", dir=parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise ConfigError(
            f"the temporary folder {where} failed ({error.strerror or error}); free some room there, or name another "
            "folder with $TMPDIR"
        ) from None


# --- output


def show(args: argparse.Namespace, result: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print a result as one JSON document, or as the lines for people. A reader that has seen enough is no error."""
    try:
        if args.json:
            print(json.dumps(result, ensure_ascii=False))
        else:
            for line in lines:
                print(line.rstrip())
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "") -> list[str]:
    """Rows as aligned lines; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if n in right else str.ljust for n in range(len(widths))]
    return [indent + "  ".join(pad(c, w) for pad, c, w in zip(sides, row, widths, strict=True)) for row in rows]


def size(number: float) -> str:
    """Bytes for people: `812 B`, `1.2 MB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def span(number: float | None) -> str:
    """Seconds for people: `4 s`, `12 min`, `3.1 h`, `2.0 d`."""
    if number is None:
        return "-"
    if abs(number) < 120:
        return f"{number:.0f} s"
    if abs(number) < 7200:
        return f"{number / 60:.0f} min"
    return f"{number / 3600:.1f} h" if abs(number) < 172_800 else f"{number / 86_400:.1f} d"


def plural(number: int, noun: str) -> str:
    """`1 object`, `2 objects`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
