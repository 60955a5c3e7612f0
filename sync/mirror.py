"""A follower's local copy of the state: a checkpoint folder on disk, one owner, able to survive a kill at any moment.

    <folder>/lock              held by the owning process
    <folder>/mirror.json       sealed: what the files below hold at least, and the highest identity ever reported
    <folder>/g-<n>/            a checkpoint folder; its *.safetensors are memory-mapped and patched in place
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

from .canonical import seal, sha256_hex, unseal
from .codec import scatter
from .digest import PieceSums, Sums, element_sums, moved, piece_sums, total
from .errors import ConfigError, CorruptObject
from .pieces import layout_of
from .plan import Held
from .safetensors_io import MappedCheckpoint, read_arrays, write_arrays
from .schema.base import Identity
from .tensors import Bits, Schema, bits

Patches = Mapping[str, tuple[NDArray[np.integer[Any]] | None, Bits]]
_META = "mirror.json"
_MAX_LEFT = 64
_AUDITED_SHARE = 64


class Mirror:
    """Open with `Mirror(folder)`; use from one thread. `held` is None while it holds nothing.

    Raises ConfigError when another process owns the folder or it cannot be written.
    """

    def __init__(self, folder: Path, *, flush_every: int = 16) -> None:
        self.folder, self._flush_every = folder, flush_every
        self.uid: str | None = None
        self.highest: Identity | None = None
        self.left: tuple[str, ...] = ()
        self.identity: Identity | None = None
        self.sums = Sums(0, 0)
        self._pieces: PieceSums = np.zeros((0, 2), np.uint64)
        self._next_piece = 0
        self.recovered = False
        self._mapped: MappedCheckpoint | None = None
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
        return self.folder / f"g-{self._generation}"

    def install(self, uid: str, identity: Identity, digest: str, fill: Callable[[Path], None]) -> None:
        """Replace everything by the anchor that `fill(folder)` downloads. Raises CorruptObject, changing nothing, when
        the state's digest is not `digest`."""
        part = self.folder / f"part-{self._generation + 1}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            fill(part)
            mapped = MappedCheckpoint(part, writable=True)
            pieces = piece_sums(mapped.state, mapped.schema)
            sums = total(pieces, mapped.schema)
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
        self._pieces, self._next_piece = pieces, 0
        self._raise_highest(identity)
        self.flush()
        for old in (*self.folder.glob("g-*"), *self.folder.glob("part-*")):
            if old != self.checkpoint:
                shutil.rmtree(old, ignore_errors=True)

    def apply(self, patches: Patches, identity: Identity, change: PieceSums) -> None:
        """Log, then write one version's absolute values, which change the pieces' sums by `change`. The caller has
        checked everything, the digest included."""
        sums = moved(self.sums, change)
        _write_redo(self.folder / "redo" / f"{identity.epoch:06d}-{identity.version:010d}", patches, identity, sums)
        for name, (index, values) in patches.items():
            scatter(self.state[name], index, values)
        self.identity, self.sums, self._pieces = identity, sums, self._pieces + change
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
        found = piece_sums(self.state, self.schema)
        self._pieces = found
        return total(found, self.schema) == self.sums

    def audit_next(self) -> bool:
        """Recompute the sums of the next 1/64 of the bytes (one piece at least); False when they are not those kept.

        A digest that is moved along never reads what no version touches; called after each version, this has read
        everything after 64.
        """
        pieces = layout_of(self.schema).pieces
        left = sum(spec.nbytes for spec in self.schema.values()) / _AUDITED_SHARE
        for _ in pieces:
            number = self._next_piece
            self._next_piece = (number + 1) % len(pieces)
            piece = pieces[number]
            flat = bits(self.state[piece.name])[piece.start : piece.stop]
            kept = Sums(int(self._pieces[number, 0]), int(self._pieces[number, 1]))
            if element_sums(piece.name, None, flat, start=piece.start) != kept:
                return False
            left -= flat.nbytes
            if left <= 0:
                break
        return True

    def reset(self) -> None:
        """Forget the state (not the highest identity of this channel); the next plan starts from an anchor."""
        self._mapped, self.identity, self.sums = None, None, Sums(0, 0)
        self._write_meta()
        self._clear_redo()
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def forget_channel(self) -> None:
        """Forget the state, its channel and every identity."""
        self.uid = self.highest = None
        self.reset()

    def leave_channel(self) -> None:
        """The bucket holds another channel now: forget this one, and know it again, should a stale look show it."""
        if self.uid is not None:
            self.left = (*self.left, self.uid)[-_MAX_LEFT:]
        self.forget_channel()

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
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
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
            "left": list(self.left),
        }
        _write_durably(self.folder / _META, seal(body))

    def _clear_redo(self) -> None:
        for path in (self.folder / "redo").iterdir():
            path.unlink()

    def _recover(self) -> None:
        """Read what the disk holds, replay the redo logs, audit; anything wrong leaves an empty mirror."""
        meta = self.folder / _META
        if not meta.exists():
            self._clear_redo()
            return
        try:
            body = unseal(meta.read_bytes(), _META)
            self.uid, self._generation = body["uid"], int(body["generation"])
            self.highest = Identity.parse(body["highest"]) if body["highest"] else None
            self.left = tuple(body["left"])
            if body["identity"] is None:
                self._clear_redo()
                return
            logs = sorted((self.folder / "redo").glob("[0-9]*-[0-9]*"))
            for log in logs:
                self._raise_highest(Identity(*map(int, log.name.split("-"))))
            self._mapped = MappedCheckpoint(self.checkpoint, writable=True)
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
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return {path.relative_to(folder).as_posix(): sha256_hex(path.read_bytes()) for path in files}


def _write_redo(path: Path, patches: Patches, identity: Identity, sums: Sums) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    for name, (index, values) in patches.items():
        arrays[f"v:{name}"] = values
        if index is not None:
            arrays[f"i:{name}"] = index
    write_arrays(path, arrays, {"identity": str(identity), "digest": sums.text()})


def _read_redo(path: Path, schema: Schema) -> tuple[dict[str, tuple[NDArray[Any] | None, Bits]], Identity, Sums]:
    arrays, metadata = read_arrays(path)
    patches = {n: (arrays.get(f"i:{n}"), arrays[f"v:{n}"]) for n in schema if f"v:{n}" in arrays}
    return patches, Identity.parse(metadata["identity"]), Sums.parse(metadata["digest"])


def _write_durably(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
