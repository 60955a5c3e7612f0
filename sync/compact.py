"""Anchors and spans, built behind the publishing: the writer's compaction. One upload at a time, never of a version.

    after(version) ─▶ compose spans that end here ─▶ upload what waits ─▶ one step of collecting

Spans cover aligned powers of two: (0, 4], (4, 8], (0, 8], …, so any stretch of n versions takes at most 6 deltas and
2·log2(n) spans. A span is composed from its two halves' patches on the local disk; one as large as a full copy is not
worth sending. An anchor is made from a private copy of the base, and named only after the digest recomputed from its
files equals the version's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from . import layout
from .codec import TensorPatch, compose, encode
from .collect import Collector
from .digest import Sums, moved, state_sums
from .errors import CorruptObject, DeltawireError
from .events import Emit
from .patchfile import PatchFile, write_patch
from .safetensors_io import MappedCheckpoint
from .schema.wire import Manifest, Parent, Ref
from .stores.base import Content
from .tensors import Schema, state_bytes
from .term import Term, entries

SMALLEST_SPAN = 4


class Committed(NamedTuple):
    """One committed version as compaction needs it: its manifest and the one before, its patch (None: a break of the
    chain), and when an anchor is due the folder of a private copy of the state. `schema` is the state's."""

    manifest: Manifest
    before: Manifest | None
    patch: PatchFile | None
    copy: Path | None
    schema: Schema


class _Piece(NamedTuple):
    start: Manifest
    end: Manifest
    patch: PatchFile


class Compactor:
    """Works for one term in one thread; `folder` holds its patches and survives a restart.

    largest_span: versions in the longest span, a power of two (below 4: no spans). Errors of a single upload are
    emitted and counted in `failed`, not raised: a missing span or anchor costs bytes, not correctness.
    """

    def __init__(self, term: Term, folder: Path, emit: Emit, largest_span: int) -> None:
        self._term, self._folder, self._emit, self._largest = term, folder, emit, largest_span
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._waiting: list[tuple[_Piece, Schema]] = []
        self._uploading = ""
        self._since_look = 0
        self.collector = Collector(term, emit, lambda: {self._uploading, *term.pending})
        self.failed = 0
        folder.mkdir(exist_ok=True)

    def adopt(self, refs: Iterable[Ref]) -> None:
        """Take over the pieces that an earlier term of this folder left, as far as `refs` has both their ends."""
        known = {(r.identity, r.state_digest) for r in refs}
        for path in sorted(self._folder.glob("*.json")):
            patch = path.with_suffix(".patch")
            try:
                said = json.loads(path.read_bytes())
                start, end = (Manifest.model_validate(m) for m in said["ends"])
                piece = _Piece(start, end, PatchFile(patch))
                if piece.patch.checksum() != said["crc32"]:
                    raise CorruptObject(f"{patch.name} was altered")
            except (OSError, ValueError, KeyError, TypeError, ValidationError, CorruptObject):
                piece = None
            if piece is not None and all((m.identity, m.state_digest) in known for m in (piece.start, piece.end)):
                self._pieces[piece.start.version, piece.end.version] = piece
            else:
                path.unlink()
        owned = {piece.patch.path for piece in self._pieces.values()}
        for patch in self._folder.glob("*.patch"):
            if patch not in owned:
                patch.unlink()

    def after(self, done: Committed, *, more: bool = False) -> None:
        """Take in one version; upload what waits unless too many `more` versions wait already, then look for
        garbage."""
        if done.copy is not None:
            copy = done.copy
            self._attempt(f"anchor {done.manifest.identity}", lambda: self._anchor(done.manifest, copy, done.schema))
        try:
            if done.patch is None or done.before is None:
                self._forget()
            else:
                self._compose(_Piece(done.before, done.manifest, done.patch), done.schema)
        except OSError as error:
            self._failure(f"spans at {done.manifest.identity}", error)
            self._forget()
        while self._waiting and not more and not self._term.over:
            piece, schema = self._waiting.pop(0)
            self._attempt(f"span to {piece.end.identity}", partial(self._upload, piece, schema))
        self._look(force=done.copy is not None)

    def _look(self, *, force: bool) -> None:
        every = self._term.options.collect_every
        self._since_look += 1
        if every and (force or self._since_look >= every or self.collector.ready):
            self._since_look = 0
            self._attempt("collect", self.collector.step)

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (DeltawireError, OSError) as error:
            self._failure(what, error)  # a term that is over says so where versions are committed

    def _failure(self, what: str, error: Exception) -> None:
        self.failed += 1
        self._emit("compact_failed", what=what, error=type(error).__name__, why=str(error))

    # --- spans

    def _compose(self, piece: _Piece, schema: Schema) -> None:
        if self._largest < SMALLEST_SPAN:
            piece.patch.remove()
            return
        version, size = piece.end.version, 1
        made: list[tuple[_Piece, Schema]] = []
        self._keep(piece)
        while 2 * size <= self._largest and version % (2 * size) == 0:
            second = self._pieces.pop((version - size, version))
            first = self._pieces.pop((version - 2 * size, version - size), None)
            if first is None:
                self._drop(second)
                break
            piece, size = self._join(first, second), 2 * size
            self._keep(piece)
            if len(piece.patch) and size >= SMALLEST_SPAN:
                made.append((piece, schema))
        if made:  # what still waits inside a longer span would come too late to matter
            start = made[-1][0].start.version
            self._waiting = [w for w in self._waiting if w[0].start.version < start] + made
        top = self._pieces.get((version - size, version))
        if size == self._largest and top is not None:
            self._drop(self._pieces.pop((version - size, version)))

    def _join(self, first: _Piece, second: _Piece) -> _Piece:
        path = self._folder / f"{first.start.version}-{second.end.version}.patch"
        names = sorted({*first.patch, *second.patch})
        patch = write_patch(path, _composed(names, first.patch, second.patch))
        self._drop(first)
        self._drop(second)
        return _Piece(first.start, second.end, patch)

    def _keep(self, piece: _Piece) -> None:
        start, end = piece.start.version, piece.end.version
        patch = piece.patch.move(self._folder / f"{start}-{end}.patch")
        ends = [m.model_dump(mode="json") for m in (piece.start, piece.end)]
        text = json.dumps({"ends": ends, "crc32": patch.checksum()})
        (self._folder / f"{start}-{end}.json").write_text(text)
        self._pieces[start, end] = _Piece(piece.start, piece.end, patch)

    def _drop(self, piece: _Piece) -> None:
        (self._folder / f"{piece.start.version}-{piece.end.version}.json").unlink(missing_ok=True)
        piece.patch.remove()  # one that waits for its upload stays mapped

    def _forget(self) -> None:
        pieces, self._pieces, self._waiting = self._pieces, {}, []
        with suppress(OSError):
            for piece in pieces.values():
                self._drop(piece)

    def _upload(self, piece: _Piece, schema: Schema) -> None:
        start, end, head = piece.start, piece.end, self._term.head
        encoded = encode(piece.patch, schema, "fast", {}, sparse=True)
        if sum(map(len, encoded.objects)) >= state_bytes(schema):
            return
        reached = moved(Sums.parse(start.state_digest), encoded.change).text()
        if reached != end.state_digest:  # a patch on the disk was damaged
            what = f"span {start.identity} to {end.identity}"
            self._failure(what, CorruptObject(f"{what} gives digest {reached}, not {end.state_digest}; not published"))
            return
        names = layout.delta_names(len(encoded.objects))
        objects: dict[str, Content] = dict(zip(names, encoded.objects, strict=True))
        facts: dict[str, Any] = {
            "kind": "span", "base_digest": start.state_digest, "codec": "fast", "objects": entries(objects),
            "writer": head.writer,
            "parent": Parent(epoch=start.epoch, version=start.version, sha256=start.sha256()),
        }  # fmt: skip
        folder = layout.span_folder(head.channel, start.version, end.version, end.epoch, head.writer)
        self._store(end.model_copy(update=facts), folder, objects)

    # --- anchors

    def _anchor(self, manifest: Manifest, copy: Path, schema: Schema) -> None:
        try:
            found = state_sums(MappedCheckpoint(copy).state, schema).text()
            if found != manifest.state_digest:
                raise DeltawireError(
                    f"anchor {manifest.identity} gives digest {found}, not {manifest.state_digest}; it is not published"
                )
            objects: dict[str, Content] = {p.name: p for p in sorted(copy.iterdir())}
            name = layout.version_name(manifest.version, manifest.epoch, manifest.writer)
            facts = {"kind": "anchor", "base_digest": None, "parent": None, "codec": "", "objects": entries(objects)}
            folder = layout.anchor_folder(manifest.channel, name)
            self._store(manifest.model_copy(update=facts), folder, objects)
        finally:
            with suppress(OSError):
                shutil.rmtree(copy)

    def _store(self, manifest: Manifest, folder: str, objects: Mapping[str, Content]) -> None:
        batch: dict[str, Content] = {folder + n: c for n, c in objects.items()}
        batch[folder + layout.MANIFEST] = manifest.to_bytes()
        what = f"{manifest.kind} {manifest.identity}"

        def store() -> None:
            self._uploading = folder
            try:
                self._term.put_behind(batch, what)
                self._term.add(manifest, folder)
            finally:
                self._uploading = ""
            self._emit(manifest.kind, version=manifest.identity, bytes=manifest.payload_bytes)

        self._attempt(what, store)


def _composed(names: Iterable[str], first: PatchFile, second: PatchFile) -> Iterator[tuple[str, TensorPatch]]:
    for name in names:
        if name not in second:
            yield name, first[name]
        elif name not in first:
            yield name, second[name]
        else:
            both = compose(first[name], second[name])
            if len(both.index):
                yield name, both
