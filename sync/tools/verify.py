"""`deltawire verify`: read every object of a run, and replay every live version, and say what is wrong by key."""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import layout
from ..errors import CorruptObject, DeltawireError
from ..fetch import object_bytes
from ..schema.artifacts import ARTIFACT_CHANNELS, parse_artifact
from ..schema.wire import Head, ObjectEntry, Ref
from ..stores.base import ObjectInfo, Store
from . import common
from .chain import check_chain, check_refs
from .findings import Findings, text_of
from .replay import Replayed, expect_head, replay
from .sealed import Documents, Stored, channels_of, read_documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(parser, channel=None)
    parser.add_argument("--quick", action="store_true", help="compare every object, but replay no version")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where replaying may use the room of two "
        "checkpoints (default: the system's temporary folder)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Verify; returns 0 when all is well, 1 when a problem was found."""
    result = verify(common.open_run(args), args.channel, quick=args.quick, scratch=args.scratch)
    common.show(args, result, _lines(result))
    return 0 if result["ok"] else 1


def verify(
    store: Store, channel: str | None = None, *, quick: bool = False, scratch: Path | None = None
) -> common.Result:
    """{url, ok, objects, bytes, checked: {objects, bytes}, channels: […], problems: [{key, problem}], leftovers,
    foreign}.

    Every object below the run (of one channel, if given) is read and compared: sealed objects with their own check and
    their key, all others with the size and sha256 that their manifest names; references with what they name; parent
    links down to the floor; and unless `quick` every live version is replayed. A channel is {channel, head, epoch,
    floor, split, versions, replayed: {deltas, spans, anchors, reached} or null, unreplayed}. `unreplayed` counts live
    deltas and spans to which no undamaged anchor leads. `leftovers` are folders and objects that no head names and that
    are not whole, as an interrupted publish or collecting leaves them; `foreign` are keys that are none of a run's.
    Neither is a problem.
    """
    listing = store.list("")
    known = {i.key for i in listing}
    listing += [i for i in store.list(layout.HEADS) if i.key not in known]  # heads must be newer than what they name
    channels = channels_of(listing) if channel is None else {channel}
    if not {p.channel for i in listing if (p := common.place_of(i.key)).kind == "heads"} & channels:
        common.read_channels(store, channel)  # raises, and says what there is
    with common.scratch_folder(scratch) as folder:
        return _Verify(store, listing, channels, folder).run(quick=quick)


@dataclass
class _Folder:
    """The objects of one version, anchor or span: name → where it is listed."""

    place: common.Place
    objects: dict[str, ObjectInfo]


class _Verify:
    def __init__(self, store: Store, listing: list[ObjectInfo], channels: set[str], scratch: Path) -> None:
        self._store, self._channels, self._scratch = store, channels, scratch
        self._listing = [i for i in listing if common.place_of(i.key).channel in ({*channels, ""})]
        self._present = {i.key for i in listing}
        self._findings = Findings(foreign=[i.key for i in self._listing if common.place_of(i.key).kind == "foreign"])
        self._documents = Documents()
        self._replayed: set[str] = set()
        self._failed: dict[str, str] = {}

    def run(self, *, quick: bool) -> common.Result:
        self._documents = read_documents(self._store, self._listing, self._channels, self._findings)
        self._look_again()
        rows = [
            self._head(head, refs, split=len(heads) > 1, quick=quick)
            for _, heads in sorted(self._documents.live.items()) for head, refs in heads
        ]  # fmt: skip
        live = self._documents.live_folders()
        for folder in self._folders():
            self._folder(folder, live=folder.place.folder in live)
        for key, why in self._failed.items():
            if not self._findings.folder_has_problem(layout.folder_of(key)):
                self._findings.add(key, why)
        self._settle()
        return self._result(rows)

    def _look_again(self) -> None:
        """The listing may be older than the heads: what they name and it lacks is looked up."""
        named = {r.key for heads in self._documents.live.values() for _, refs in heads for r in refs}
        named |= {
            layout.folder_of(key) + entry.name
            for key in named & self._documents.manifests.keys()
            for entry in self._documents.manifests[key].manifest.objects
        }
        named |= {h.catchup.key for heads in self._documents.live.values() for h, _ in heads if h.catchup}
        self._present |= self._store.info(sorted(named - self._present)).keys()

    # --- heads: what they name, and replaying it

    def _head(self, head: Head, refs: tuple[Ref, ...], *, split: bool, quick: bool) -> common.Result:
        stored = self._documents.manifests
        check_refs(head, refs, stored, self._present, self._findings)
        key = layout.head_key(head.channel, head.epoch, head.writer)
        row: common.Result = {
            "channel": head.channel, "head": str(head.identity) if head.identity else None, "epoch": head.epoch,
            "floor": head.floor, "split": split, "versions": check_chain(head, refs, stored, self._findings),
            "replayed": None, "unreplayed": 0,
        }  # fmt: skip
        if quick or not refs or all(r.kind == "document" for r in refs):
            return row
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            done = replay(self._store, head, refs, Path(scratch))
        with self._findings.of(key):
            expect_head(head, done)
        self._replayed |= done.folders
        self._failed |= done.failed
        return row | {"replayed": _counts(done), "unreplayed": len(refs) - len(done.passed) - len(done.failed)}

    # --- folders: every object in them

    def _folders(self) -> list[_Folder]:
        found: dict[str, _Folder] = {}
        for info in self._listing:
            place = common.place_of(info.key)
            if place.folder:
                found.setdefault(place.folder, _Folder(place, {})).objects[place.name] = info
        return [found[name] for name in sorted(found)]

    def _folder(self, folder: _Folder, *, live: bool) -> None:
        name = folder.place.folder
        key = name + layout.MANIFEST
        stored = self._documents.manifests.get(key)
        if stored is None:
            if key not in self._findings.problems and not live:
                self._findings.leftovers.add(name)
            return
        for entry in stored.manifest.objects:
            if name + entry.name in self._present:
                self._object(name, entry, stored)
            elif live:
                self._findings.add_missing(name + entry.name, "named by its manifest, but not there")
            else:
                self._findings.leftovers.add(name)
        named = {layout.MANIFEST, *(e.name for e in stored.manifest.objects)}
        for other in sorted(folder.objects.keys() - named):
            self._findings.add(name + other, "lies in a version's folder, but its manifest does not name it")

    def _object(self, folder: str, entry: ObjectEntry, stored: Stored) -> None:
        key, manifest = folder + entry.name, stored.manifest
        if folder not in self._replayed:
            before = len(self._findings.problems)
            with self._findings.of(key), object_bytes(
                self._store, key, entry.size, entry.sha256, self._scratch
            ) as data:  # fmt: skip
                if manifest.kind == "document" and entry.name == layout.DOCUMENT:
                    if manifest.state_digest != f"sha256:{entry.sha256}":
                        raise CorruptObject(f"has sha256 {entry.sha256}, its version declares {manifest.state_digest}")
                    if manifest.channel in ARTIFACT_CHANNELS:
                        parse_artifact(manifest.channel, bytes(data), key)
            if len(self._findings.problems) > before:
                return
        self._findings.passed(entry.size)

    # --- the end

    def _settle(self) -> None:
        """A writer may have collected meanwhile: what was missing and is named no longer is no problem."""
        suspects = [k for k in self._findings.problems if layout.parse_object_key(k) is not None]
        there = self._store.info(suspects) if suspects else {}
        self._findings.missing |= {k for k in suspects if k not in there}
        if not self._findings.missing:
            return
        named: set[str] = set()
        for name in self._documents.live:
            try:
                (found,) = common.read_channels(self._store, name)
                for head, _ in found.heads:
                    named |= {layout.folder_of(r.key) for r in common.live_refs(self._store, head)}
                    named |= {head.catchup.key} if head.catchup else set()
            except DeltawireError as error:
                self._findings.leftovers.add(f"{name}: {text_of(error)}")
                return
        for key in self._findings.missing:
            if key not in named and layout.folder_of(key) not in named:
                del self._findings.problems[key]

    def _result(self, rows: list[common.Result]) -> common.Result:
        findings = self._findings
        return {
            "url": self._store.url, "ok": not findings.problems, "objects": len(self._listing),
            "bytes": sum(i.size for i in self._listing),
            "checked": {"objects": findings.checked, "bytes": findings.checked_bytes}, "channels": rows,
            "problems": [{"key": k, "problem": findings.problems[k]} for k in sorted(findings.problems)],
            "leftovers": sorted(findings.leftovers), "foreign": findings.foreign,
        }  # fmt: skip


def _counts(done: Replayed) -> common.Result:
    kinds: dict[str, int] = defaultdict(int)
    for ref in done.passed.values():
        kinds[ref.kind] += 1
    reached = str(done.reached) if done.reached else None
    return {"deltas": kinds["delta"], "spans": kinds["span"], "anchors": kinds["anchor"], "reached": reached}


def _lines(result: common.Result) -> Iterator[str]:
    for row in result["channels"]:
        text = f"{row['channel']}: head {row['head'] or '-'}, {common.plural(row['versions'], 'version')} to floor "
        text += f"{row['floor']}"
        if (done := row["replayed"]) is not None:
            counts = [common.plural(done[f"{kind}s"], kind) for kind in ("delta", "span", "anchor")]
            text += f"; replayed {', '.join(counts)}"
        if row["unreplayed"]:
            text += f"; {row['unreplayed']:,} not replayed, no whole anchor leads there"
        yield text + ("; split between two writers" if row["split"] else "")
    checked, all_of_it = result["checked"], common.plural(result["objects"], "object")
    yield f"checked {checked['objects']:,} of {all_of_it}, {common.size(checked['bytes'])}"
    for name in ("leftovers", "foreign"):
        if result[name]:
            yield f"{name}: {', '.join(result[name][:5])}{' …' if len(result[name]) > 5 else ''} ({len(result[name])})"
    if result["ok"]:
        yield "no problem found"
        return
    yield common.plural(len(result["problems"]), "problem") + ":"
    for problem in result["problems"]:
        yield f"  {problem['key']}: {problem['problem']}"
