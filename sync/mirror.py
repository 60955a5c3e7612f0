"""A follower's local copy of the state: a checkpoint folder on disk, one owner, able to survive a kill at any moment.

    <folder>/lock              held by the owning process
    <folder>/mirror.json       sealed: what the files below hold at least, and the highest identity ever reported
    <folder>/g-<n>/            a checkpoint folder; its model.safetensors is memory-mapped and patched in place
    <folder>/redo/<version>    absolute values of each version since the last flush

Order of an apply: the redo log is written and synced, then the map is patched. A kill between or during leaves the
redo log, and writing absolute values again is harmless, so `open` replays the logs and checks the digest of it all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import layout
from .canonical import seal, sha256_hex, unseal
from .codec import scatter
from .digest import Sums, state_sums
from .errors import ConfigError, CorruptObject
from .plan import Held
from .safetensors_io import MappedState, pack, pack_state, parse_header, view
from .schema.base import Identity
from .tensors import Bits, Schema, TensorSpec

Patches = Mapping[str, tuple[NDArray[np.integer[Any]] | None, Bits]]
_META = "mirror.json"


class Mirror:
    """Open with `Mirror(folder)`; use from one thread. `held` is None while it holds nothing.

    Raises ConfigError when another process owns the folder or it cannot be written.
    """

    def __init__(self, folder: Path, *, flush_every: int = 16) -> None:
        self._folder, self._flush_every = folder, flush_every
        self.uid: str | None = None
        self.highest: Identity | None = None
        self.identity: Identity | None = None
        self.sums = Sums(0, 0)
        self.recovered = False
        self._mapped: MappedState | None = None
        self._generation = 0
        self._side: dict[str, str] = {}
        self._unflushed = 0
        try:
            (folder / "redo").mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"mirror folder {folder}: cannot be written ({error.strerror}); choose another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"mirror folder {folder} is in use by another process; stop it, or give this one another folder"
            ) from None
        try:
            self._recover()
        except OSError as error:
            self._release()
            raise ConfigError(f"mirror folder {folder}: cannot be used ({error.strerror}); choose another") from None
        except BaseException:
            self._release()
            raise

    @property
    def held(self) -> Held | None:
        """Identity and digest of the state held, or None."""
        return None if self.identity is None else Held(self.identity, self.sums.text())

    @property
    def state(self) -> dict[str, Bits]:
        """Name → shaped bits, mapped from disk. Read it; never keep it beyond the next apply."""
        return self._mapped.state if self._mapped else {}

    @property
    def schema(self) -> Schema:
        """The state's schema."""
        return self._mapped.schema if self._mapped else {}

    @property
    def checkpoint(self) -> Path:
        """The folder that from_pretrained loads; it holds at least the last flushed version."""
        return self._folder / f"g-{self._generation}"

    def install(self, uid: str, identity: Identity, digest: str, fill: Callable[[Path], None]) -> None:
        """Replace everything by the anchor that `fill(folder)` downloads. Raises CorruptObject, changing nothing, when
        the state's digest is not `digest`."""
        part = self._folder / f"part-{self._generation + 1}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            fill(part)
            _single_file(part)
            mapped = MappedState(part / layout.MODEL, writable=True)
            sums = state_sums(mapped.state, mapped.schema)
            side = _side_files(part)
            if sums.text() != digest:
                raise CorruptObject(f"anchor {identity}: its files give state digest {sums.text()}, declared {digest}")
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._generation += 1  # the old files and logs stay until the new ones are noted: a kill here loses nothing
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        part.rename(self.checkpoint)
        self._mapped, self.uid, self.identity, self.sums, self._side = mapped, uid, identity, sums, side
        self._raise_highest(identity)
        self.flush()
        for old in self._folder.glob("g-*"):
            if old != self.checkpoint:
                shutil.rmtree(old, ignore_errors=True)

    def apply(self, patches: Patches, identity: Identity, sums: Sums) -> None:
        """Log, then write one version's absolute values. The caller has checked everything, the digest included."""
        _write_redo(self._folder / "redo" / f"{identity.epoch:06d}-{identity.version:010d}", patches, identity, sums)
        for name, (index, values) in patches.items():
            scatter(self.state[name], index, values)
        self.identity, self.sums = identity, sums
        self._raise_highest(identity)
        self._unflushed += 1
        if self._unflushed >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        """Bring the map to the disk, note what it holds, and drop the redo logs."""
        if self._mapped is not None:
            self._mapped.flush()
        self._write_meta()
        self._clear_redo()
        self._unflushed = 0

    def audit(self) -> bool:
        """Recompute the digest from the bytes on hand; False when it is not the one kept."""
        return state_sums(self.state, self.schema) == self.sums

    def reset(self) -> None:
        """Forget the state (not the highest identity of this channel); the next plan starts from an anchor."""
        self._mapped, self.identity, self.sums = None, None, Sums(0, 0)
        self._write_meta()
        self._clear_redo()
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def forget_channel(self) -> None:
        """The bucket holds another channel now: forget its state and every identity."""
        self.uid = self.highest = None
        self.reset()

    def close(self) -> None:
        """Flush and release the lock. Safe to call twice."""
        if self._lock is None:
            return
        try:
            if self.identity is not None:
                self.flush()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._mapped = self._lock = None

    def _raise_highest(self, reached: Identity) -> None:
        self.highest = max(reached, self.highest or reached)

    def _write_meta(self) -> None:
        body = {
            "uid": self.uid,
            "generation": self._generation,
            "side": self._side,
            "identity": str(self.identity) if self.identity else None,
            "digest": self.sums.text() if self.identity else None,
            "highest": str(self.highest) if self.highest else None,
        }
        _write_durably(self._folder / _META, seal(body))

    def _clear_redo(self) -> None:
        for path in (self._folder / "redo").iterdir():
            path.unlink()

    def _recover(self) -> None:
        """Read what the disk holds, replay the redo logs, audit; anything wrong leaves an empty mirror."""
        meta = self._folder / _META
        if not meta.exists():
            self._clear_redo()
            return
        try:
            body = unseal(meta.read_bytes(), _META)
            self.uid, self._generation = body["uid"], int(body["generation"])
            self.highest = Identity.parse(body["highest"]) if body["highest"] else None
            if body["identity"] is None:
                self._clear_redo()
                return
            logs = sorted((self._folder / "redo").glob("[0-9]*-[0-9]*"))
            for log in logs:
                self._raise_highest(Identity(*map(int, log.name.split("-"))))
            self._mapped = MappedState(self.checkpoint / layout.MODEL, writable=True)
            self.identity, self.sums = Identity.parse(body["identity"]), Sums.parse(body["digest"])
            self._side = _side_files(self.checkpoint)
            if self._side != body["side"]:
                raise CorruptObject(f"mirror of {self.identity}: its tokenizer or configuration was altered")
            for log in logs:
                self._replay(log)
            if not self.audit():
                raise CorruptObject(f"mirror of {self.identity}: its bytes do not give its digest")
        except (CorruptObject, OSError, ValueError, KeyError, IndexError, TypeError):
            self.reset()
            return
        self.recovered = True
        self._raise_highest(self.identity)
        self.flush()

    def _replay(self, path: Path) -> None:
        patches, identity, sums = _read_redo(path, self.schema)
        if self.identity is not None and identity <= self.identity:
            return
        for name, (index, values) in patches.items():
            scatter(self.state[name], index, values)
        self.identity, self.sums = identity, sums


def _side_files(folder: Path) -> dict[str, str]:
    """Name → sha256 of what lies beside the weights: the state digest says nothing of it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != layout.MODEL)
    return {path.relative_to(folder).as_posix(): sha256_hex(path.read_bytes()) for path in files}


def _single_file(folder: Path) -> None:
    """Join the shards of a checkpoint into one model.safetensors (the mirror patches one map)."""
    shards = sorted(folder.glob("*.safetensors"))
    if [s.name for s in shards] == [layout.MODEL]:
        return
    if not shards:
        raise CorruptObject("the anchor holds no .safetensors file")
    state: dict[str, Bits] = {}
    schema: dict[str, TensorSpec] = {}
    for shard in shards:
        mapped = MappedState(shard)
        state |= mapped.state
        schema |= mapped.schema
    (folder / layout.MODEL).write_bytes(pack_state(state, schema))
    for path in (*(s for s in shards if s.name != layout.MODEL), *folder.glob("*.safetensors.index.json")):
        path.unlink()


def _write_redo(path: Path, patches: Patches, identity: Identity, sums: Sums) -> None:
    tensors: dict[str, tuple[TensorSpec, bytes | memoryview]] = {}
    for name, (index, _) in patches.items():
        if index is not None:
            tensors[f"i:{name}"] = (TensorSpec("I64", (len(index),)), index.astype("<i8").tobytes())
    for name, (_, values) in patches.items():
        kind = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}[values.dtype.itemsize]
        tensors[f"v:{name}"] = (TensorSpec(kind, (len(values),)), values.tobytes())
    _write_durably(path, pack(tensors, {"identity": str(identity), "digest": sums.text()}))


def _read_redo(path: Path, schema: Schema) -> tuple[dict[str, tuple[NDArray[Any] | None, Bits]], Identity, Sums]:
    data = path.read_bytes()
    metadata, entries = parse_header(data, path.name)
    patches: dict[str, tuple[NDArray[Any] | None, Bits]] = {}
    for name in schema:
        if f"v:{name}" in entries:
            index = view(data, entries[f"i:{name}"]).view("<i8") if f"i:{name}" in entries else None
            patches[name] = (index, view(data, entries[f"v:{name}"]))
    return patches, Identity.parse(metadata["identity"]), Sums.parse(metadata["digest"])


def _write_durably(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
