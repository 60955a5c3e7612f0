"""The promises, judged by a model that sees everything: each is checked in the moment something could break it.

I1 the newest head names only what exists and matches its hash. I2 what a follower or an engine holds was declared, and
is bit for bit what a trainer had. I3 a reader never goes back. I4 one chain per epoch, one content per name. I5 replay
from any live anchor. I6 nothing reachable is deleted. I7 a writer's base is its last committed version. bounded: every
call ends. live: when the faults end, everyone reaches the head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from support.states import State

from sync import Identity, Stamp, apply_delta, state_digest
from sync.canonical import sha256_hex
from sync.errors import DeltawireError
from sync.heads import newest
from sync.layout import HEADS, MANIFEST, folder_of, is_pin, parse_head_key
from sync.safetensors_io import parse_header, view
from sync.schema.wire import Catchup, Head, Manifest, Pin, Ref, parse
from sync.tensors import bits, schema_of

from .store import Bucket
from .world import World

PATIENCE = 1500.0
"""Virtual seconds within which every call of the library ends, whatever the bucket does."""


class Known(NamedTuple):
    """A state that a trainer offered."""

    digest: str
    bits: dict[str, Any]
    schema: dict[str, Any]


class Lease(NamedTuple):
    """A pin that came in time, and the folders it holds."""

    pin: Pin
    until: float
    folders: set[str]


class Judge:
    """Hooks into a bucket; actors report to it. `bases`: writer id → the digest of that writer's present base."""

    def __init__(self, world: World, bucket: Bucket, channel: str = "weights") -> None:
        self._world, self._bucket, self._channel = world, bucket, channel
        self._known: dict[int, Known] = {}
        self._sha: dict[str, tuple[int, str]] = {}
        self._first_sha: dict[str, str] = {}
        self._manifests: dict[str, Manifest] = {}
        self._catchups: dict[str, tuple[Ref, ...]] = {}
        self._heads: dict[str, list[Head]] = defaultdict(list)
        self._declared: dict[tuple[str, Identity], Manifest] = {}
        self._named: dict[tuple[str, int, int], str] = {}
        self._extends: dict[int, str] = {}
        self._leases: dict[str, Lease] = {}
        self.bases: dict[str, Any] = {}
        self._deleting = False
        bucket.before_put, bucket.before_delete, bucket.after_change = self._put, self._delete, self._changed

    # --- what actors report

    def stamp(self, state: State) -> Stamp:
        """A stamp that names this state alone."""
        schema = schema_of(state)
        number = len(self._known) + 1
        flat = {n: bits(a).copy() for n, a in state.items()}
        self._known[number] = Known(state_digest(state), flat, schema)
        return Stamp(step=number, sync=number)

    def state_at(self, number: int) -> State:
        """An offered state again, for a rewind."""
        known = self._known[number]
        dtypes = {"BF16": np.uint16, "F32": np.float32, "I64": np.int64}
        return {n: known.bits[n].copy().view(dtypes[s.dtype]).reshape(s.shape) for n, s in known.schema.items()}

    def check(self, promise: str, *, holds: bool, why: str) -> None:
        """Count a check; a promise that does not hold ends the world."""
        self._world.count[f"check {promise}"] += 1
        if not holds:
            self._world.broken(promise, why)

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """The calls within end in PATIENCE."""
        began = self._world.now
        yield
        self.check("bounded", holds=self._world.now - began < PATIENCE, why=f"{what} took {self._world.now - began} s")

    def delete_the_run(self) -> None:
        """An operator deletes everything; what comes next is another channel."""
        self._deleting = True
        self._bucket.delete(self._bucket.keys())
        self._deleting = False
        self._extends.clear()

    def engine_serves(self, who: str, identity: Identity, state: State) -> None:
        """I2: an engine goes on serving with these bits."""
        found = [m for (_, at), m in self._declared.items() if at == identity]
        self.check("I2", holds=any(self._same(m, state) for m in found), why=f"{who} serves other bits as {identity}")

    def mirror_holds(self, who: str, uid: str, identity: Identity, digest: str) -> None:
        """I2: a mirror holds a declared state."""
        found = self._declared.get((uid, identity))
        holds = found is not None and found.state_digest == digest
        self.check("I2", holds=holds, why=f"{who} holds {identity} of {uid} with {digest}, declared {found}")

    def _same(self, manifest: Manifest, state: State) -> bool:
        known = self._known[manifest.sync].bits
        return known.keys() == state.keys() and all(np.array_equal(known[n], bits(state[n])) for n in known)

    # --- what the bucket reports

    def _put(self, key: str, data: bytes) -> None:
        if key.startswith(HEADS):
            self._head_written(key, parse(Head, data, key))
        elif not is_pin(key) and not key.startswith("claims/"):
            sha = sha256_hex(data)
            first = self._first_sha.setdefault(key, sha)
            self.check("I4", holds=first == sha, why=f"{key} is written again with another content")
            if key.endswith("/" + MANIFEST):
                self._declare(key, parse(Manifest, data, key))

    def _declare(self, key: str, manifest: Manifest) -> None:
        if manifest.channel != self._channel:
            return
        at = (manifest.channel_uid, manifest.identity)
        known = self._known.get(manifest.sync)
        self.check(
            "I2",
            holds=known is not None and known.digest == manifest.state_digest,
            why=f"{key} declares {manifest.state_digest} for what the trainer had as {known.digest if known else None}",
        )
        before = self._declared.setdefault(at, manifest)
        same = (before.state_digest, before.sync, before.writer) == (
            manifest.state_digest, manifest.sync, manifest.writer,
        )  # fmt: skip
        rivals = before.writer != manifest.writer  # a tie: neither is a version until a head names it
        self.check("I4", holds=same or rivals, why=f"{key} declares another {manifest.identity}")

    def _head_written(self, key: str, head: Head) -> None:
        if head.channel != self._channel:
            return
        history = self._heads[key]
        if head in history:
            return  # a repeated request
        last = history[-1] if history else None
        history.append(head)
        if head.manifest is None:
            return
        sha = head.manifest.sha256()
        named = self._named.setdefault((head.channel_uid, *head.manifest.identity), sha)
        self.check("I4", holds=named == sha, why=f"{key} names another {head.manifest.identity} than a head before")
        if last is None:
            return  # the claim
        moved = (head.version or 0) - (-1 if last.version is None else last.version)
        parent = None if head.manifest.parent is None else head.manifest.parent.sha256
        holds = moved == 0 or (moved == 1 and parent == (last.manifest.sha256() if last.manifest else None))
        self.check("I4", holds=holds, why=f"{key} goes from {last.version} to {head.version}, no child of it")
        if moved:
            writer = self._extends.setdefault(head.epoch, head.writer)
            why = f"epoch {head.epoch} is extended by {writer} and by {head.writer}"
            self.check("I4", holds=writer == head.writer, why=why)
        if moved and head.manifest.base_digest is not None and head.writer in self.bases:
            base = self.bases[head.writer]()
            why = f"{key}: the base is at {base}, the last committed version has {head.manifest.base_digest}"
            self.check("I7", holds=base in (None, head.manifest.base_digest), why=why)

    def _changed(self, key: str) -> None:
        data = self._bucket.peek(key)
        if data is None:
            self._sha.pop(key, None)
            self._leases.pop(key, None)
            return
        self._sha[key] = (len(data), sha256_hex(data))
        if key.startswith(HEADS):
            self._look_at_heads()
        elif is_pin(key):
            self._lease(key, parse(Pin, data, key))

    def _look_at_heads(self) -> None:
        for head in self.newest():
            for ref in self.refs(head):
                self._check_ref(ref)
                for lease in self._leases.values():
                    if start(ref) >= lease.pin.version:
                        lease.folders.add(folder_of(ref.key))

    def newest(self, channel: str | None = None) -> list[Head]:
        """The heads of the highest epoch of a channel."""
        listing = [i for i in self._bucket.list(HEADS) if parse_head_key(i.key) is not None]
        found = newest(listing).get(channel or self._channel, [])
        return [parse(Head, self._bucket.get(i.key, limit=1 << 30), i.key) for _, i in found]

    def refs(self, head: Head) -> tuple[Ref, ...]:
        """Everything that a head and its catchup list name; checks the list."""
        if head.catchup is None:
            return head.recent
        key = head.catchup.key
        found = self._sha.get(key)
        self.check("I1", holds=found == (head.catchup.size, head.catchup.sha256), why=f"the head names {key}: {found}")
        sha = head.catchup.sha256
        if sha not in self._catchups:
            self._catchups[sha] = parse(Catchup, self._bucket.get(key, limit=1 << 30), key).refs
        return (*self._catchups[sha], *head.recent)

    def _check_ref(self, ref: Ref) -> None:
        found = self._sha.get(ref.key)
        self.check("I1", holds=found == (ref.size, ref.sha256), why=f"the head names {ref.key}: {found}")
        if ref.sha256 not in self._manifests:
            self._manifests[ref.sha256] = parse(Manifest, self._bucket.get(ref.key, limit=1 << 30), ref.key)
        for entry in self._manifests[ref.sha256].objects:
            key = folder_of(ref.key) + entry.name
            self.check("I1", holds=self._sha.get(key) == (entry.size, entry.sha256), why=f"{ref.key} names {key}")

    def _lease(self, key: str, pin: Pin) -> None:
        heads = self.newest()
        if len(heads) == 1 and heads[0].floor <= pin.version and heads[0].channel_uid == pin.channel_uid:
            folders = {folder_of(r.key) for r in self.refs(heads[0]) if start(r) >= pin.version}
            before = self._leases.get(key)
            if before is not None and before.pin.version <= pin.version:
                folders |= {f for f in before.folders if before.pin.version == pin.version}
            self._leases[key] = Lease(pin, self._world.now + pin.ttl, folders)
        else:
            self._leases.pop(key, None)

    def _delete(self, key: str) -> None:
        if self._deleting or key.startswith((HEADS, "claims/")):
            return
        folder = folder_of(key)
        for head in self.newest():
            reached = {folder_of(r.key) for r in self.refs(head)}
            named = head.catchup is not None and head.catchup.key == key
            self.check("I6", holds=folder not in reached and not named, why=f"{key} is reachable from the head")
        for lease in self._leases.values():
            live = lease.until >= self._world.now
            self.check("I6", holds=not live or folder not in lease.folders, why=f"{key} is held by {lease.pin}")

    # --- at the end

    def replay(self) -> None:
        """I5: from every live anchor, along every delta and span that the head names, to the declared digests."""
        for head in self.newest():
            refs = self.refs(head)
            reached: set[tuple[int, str]] = set()
            for anchor in (r for r in refs if r.kind == "anchor"):
                self._replay_from(anchor, refs, reached)
            if head.manifest is not None:
                goal = (head.manifest.version, head.manifest.state_digest)
                self.check("I5", holds=goal in reached, why=f"no anchor leads to the head {head.identity}")

    def _replay_from(self, anchor: Ref, refs: tuple[Ref, ...], reached: set[tuple[int, str]]) -> None:
        todo = [(anchor, self._load(anchor))]
        seen = {(anchor.version, anchor.state_digest)}
        while todo:
            at, (state, schema) = todo.pop()
            found = state_digest(state, schema)
            self.check("I5", holds=found == at.state_digest, why=f"{at.key} gives {found}, declared {at.state_digest}")
            reached.add((at.version, at.state_digest))
            for ref in refs:
                if (start(ref), ref.base_digest) != (at.version, at.state_digest) or ref.kind == "anchor":
                    continue
                if (ref.version, ref.state_digest) in seen and ref.kind == "delta":
                    continue
                seen.add((ref.version, ref.state_digest))
                copy = {n: a.copy() for n, a in state.items()}
                for entry in self._manifests[ref.sha256].objects:
                    payload = self._bucket.get(folder_of(ref.key) + entry.name, limit=1 << 30)
                    try:
                        apply_delta(copy, payload, schema)
                    except DeltawireError as error:
                        self._world.broken("I5", f"{ref.key} does not apply: {error}")
                todo.append((ref, (copy, schema)))

    def _load(self, anchor: Ref) -> tuple[dict[str, Any], dict[str, Any]]:
        state: dict[str, Any] = {}
        schema: dict[str, Any] = {}
        for entry in self._manifests[anchor.sha256].objects:
            if entry.name.endswith(".safetensors"):
                key = folder_of(anchor.key) + entry.name
                data = self._bucket.get(key, limit=1 << 30)
                _, entries = parse_header(data, key)
                schema |= {n: e.spec for n, e in entries.items()}
                state |= {n: view(data, e).copy().reshape(e.spec.shape) for n, e in entries.items()}
        return state, schema


def start(ref: Ref) -> int:
    """The version that a reference starts from; an anchor's own."""
    return ref.version if ref.from_version is None else ref.from_version
