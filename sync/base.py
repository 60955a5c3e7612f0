"""The publisher's base: the last committed state in a mirror on disk, and the patches taken against it.

<work>/base/       the mirror (`sync/mirror.py`)
<work>/stage/      a state on its way to become an anchor version
<work>/copy/       a private copy of the base, from which an anchor is made behind the publishing
<work>/next-*.patch  the difference that is being published
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from .codec import TensorPatch, changes, encode
from .digest import PieceSums, moved, state_sums
from .errors import BaseMismatch, SchemaChanged
from .events import Emit
from .layout import ADAPTER, ADAPTER_CONFIG, MODEL
from .mirror import Mirror
from .patchfile import PatchFile, write_patch
from .replica import Replica
from .safetensors_io import MappedCheckpoint, write_checkpoint
from .schema.base import Identity
from .schema.wire import Head, Manifest
from .stores.base import Content, Store
from .tensors import Schema, State, require_fit, schema_of

_FICLONE = 0x40049409  # ioctl of Linux: share the blocks of another file


class Elsewhere(Protocol):
    """A state that does not lie in this machine's memory, on an accelerator say, and is compared where it lies."""

    def changes(self, base: State, schema: Schema, digest: str) -> Iterator[tuple[str, TensorPatch]]:
        """What `codec.changes` finds from `base`, whose digest is `digest`, to this state. Raises SchemaChanged, and
        BaseMismatch when its own copy of the base was found damaged and is to be made anew by another call."""

    def advance(self, patch: Mapping[str, TensorPatch], digest: str) -> None:
        """The difference was committed: the base's digest is `digest` now. Raises BaseMismatch when the own copy of the
        base does not fit it and is to be made anew."""

    def fetch(self) -> State:
        """The state itself, as arrays."""


class Base:
    """The committed state of one publisher. `diff`, `equals` and `stage` are called while nothing is in flight.

    Raises ConfigError at construction when another process owns the folder.
    """

    def __init__(self, work: Path, side_files: Mapping[str, bytes], shard_bytes: int, emit: Emit) -> None:
        self._work, self._side_files, self._shard_bytes, self._emit = work, dict(side_files), shard_bytes, emit
        self._mirror = Mirror(work / "base")
        for left in ("stage", "copy"):
            shutil.rmtree(work / left, ignore_errors=True)
        for path in work.glob("next-*.patch"):
            path.unlink()
        self._patches = 0
        self._elsewhere: Elsewhere | None = None

    @property
    def identity(self) -> Identity | None:
        """The version held."""
        return self._mirror.identity

    @property
    def digest(self) -> str:
        """Its state digest."""
        return self._mirror.sums.text()

    @property
    def schema(self) -> Schema:
        """Its schema."""
        return self._mirror.schema

    @property
    def state(self) -> State:
        """Name → shaped bits, mapped: read only."""
        return self._mirror.state

    def forget(self) -> None:
        """Hold nothing: no difference fits, so the next version is an anchor."""
        self._mirror.forget_channel()

    def follow(self, store: Store, head: Head) -> None:
        """Go to the head's version as any follower does. Raises what a follower raises."""
        assert head.identity is not None
        if self._mirror.uid not in (None, head.channel_uid):
            self._mirror.forget_channel()
        held = self._mirror.held
        if held is not None and held.identity > head.identity:
            self._mirror.reset()  # committed in a term that the head does not continue
        Replica(store, self._mirror, self._emit).go_to(head.identity, head)

    def diff(self, state: State | Elsewhere) -> PatchFile:
        """What differs from the base, written to disk. Raises SchemaChanged when the tensors are other ones."""
        if self.identity is None:
            raise SchemaChanged("there is no base yet")
        self._patches += 1  # a name of its own: the patch before may still be read behind
        path = self._work / f"next-{self._patches}.patch"
        if isinstance(state, Mapping):
            self._elsewhere = None
            require_fit(state, self.schema)
            return write_patch(path, changes(self.state, state, self.schema))
        self._elsewhere = state
        try:
            return write_patch(path, state.changes(self.state, self.schema, self.digest))
        except BaseMismatch as error:
            self._emit("copy_damaged", why=str(error))
            return write_patch(path, state.changes(self.state, self.schema, self.digest))

    def equals(self, state: State) -> bool:
        """True when `state` has the base's tensors, bit for bit."""
        try:
            require_fit(state, self.schema)
        except SchemaChanged:
            return False
        return next(changes(self.state, state, self.schema), None) is None

    def encode(self, patch: PatchFile, codec: str) -> tuple[list[bytes], str, PieceSums]:
        """(payload objects, the state digest after the patch, what it adds to the pieces' sums)."""
        encoded = encode(patch, self.schema, codec, self.state)
        return encoded.objects, moved(self._mirror.sums, encoded.change).text(), encoded.change

    def advance(self, patch: PatchFile, manifest: Manifest, change: PieceSums) -> None:
        """The patch was committed as `manifest`: hold that version now. A base found damaged is dropped, so that the
        next version is an anchor."""
        values = {name: (one.index, one.new) for name, one in patch.items()}
        self._mirror.apply(values, manifest.identity, change)
        elsewhere, self._elsewhere = self._elsewhere, None  # it may hold an accelerator's memory
        if elsewhere is not None:
            try:
                elsewhere.advance(patch, self.digest)
            except BaseMismatch as error:  # the version is committed; the copy is made anew for the next difference
                self._emit("copy_damaged", why=str(error))
        if not self._mirror.audit_next():
            self._emit("base_damaged", version=manifest.identity)
            self._mirror.reset()

    def stage(self, state: State) -> Schema:
        """Write a state as a checkpoint folder that is to become an anchor version; returns its schema."""
        folder = self._work / "stage"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        schema = schema_of(state)
        file = ADAPTER if ADAPTER_CONFIG in self._side_files else MODEL  # the name that PEFT and vLLM look for
        write_checkpoint(folder, state, schema, shard_bytes=self._shard_bytes, file=file)
        for name, data in self._side_files.items():
            (folder / name).write_bytes(data)
        return schema

    def staged(self) -> tuple[str, dict[str, Content]]:
        """(state digest, files by name) of what was staged."""
        folder = self._work / "stage"
        mapped = MappedCheckpoint(folder)
        return state_sums(mapped.state, mapped.schema).text(), {p.name: p for p in sorted(folder.iterdir())}

    def install(self, manifest: Manifest) -> None:
        """What was staged was committed as `manifest`: hold that version now."""
        stage = self._work / "stage"

        def fill(folder: Path) -> None:
            for path in stage.iterdir():
                path.rename(folder / path.name)

        self._mirror.forget_channel()
        self._mirror.install(manifest.channel_uid, manifest.identity, manifest.state_digest, fill)
        shutil.rmtree(stage, ignore_errors=True)

    def copy(self) -> Path:
        """A private copy of the checkpoint folder, with the present side files; blocks are shared where the file system
        can."""
        self._mirror.flush()
        folder = self._work / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in self._mirror.checkpoint.iterdir():
            if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
                _clone(path, folder / path.name)
        for name, data in self._side_files.items():
            (folder / name).write_bytes(data)
        return folder

    def close(self) -> None:
        """Flush and release the folder. Safe to call twice."""
        self._mirror.close()


def _clone(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, write, 1 << 22)
