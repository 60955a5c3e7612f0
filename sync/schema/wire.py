"""Bucket objects of format version 1: manifest, reference, catchup list, head, pin, collecting plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError, model_validator

from ..canonical import seal, sha256_hex, unseal
from ..errors import CorruptObject
from .base import FORMAT, ChannelName, Identity, IdentityText, Sha256, Wire, WriterId

ObjectName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,511}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^(sd1:[0-9a-f]{32}|sha256:[0-9a-f]{64})$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
VersionNumber = Annotated[int, Field(ge=0, le=9_999_999_999)]
EpochNumber = Annotated[int, Field(ge=0, le=999_999)]
Harness = dict[ChannelName, tuple[IdentityText, ...]]

T = TypeVar("T", bound=Wire)

MAX_OBJECTS = 10_000
MAX_REFS = 100_000
MAX_RECENT = 1_000
MAX_TTL = 30 * 86_400


class ObjectEntry(Wire):
    """One immutable object of a version folder: its name there, size in bytes, sha256."""

    name: ObjectName
    size: Count
    sha256: Sha256


class Parent(Wire):
    """The version a manifest follows: its identity and the sha256 of its manifest's bytes."""

    epoch: EpochNumber
    version: VersionNumber
    sha256: Sha256


class Manifest(Wire):
    """What one version is: identity, parent, digests before and after, and the objects that carry it.

    kind `anchor` holds the complete state, `delta` the difference to the parent (no objects: nothing changed), `span`
    the merged difference to an older version, which its `parent` then names, `document` one JSON artifact. `step` and
    `sync` are the trainer's optimizer step and sync count, `harness` the artifact versions that the rollouts behind
    this version were made with, `measured_against` the weights version an artifact was computed on. `created_at` is
    information only: no decision reads another machine's clock.
    """

    format: Literal[1] = 1
    channel: ChannelName
    channel_uid: WriterId
    epoch: EpochNumber
    version: VersionNumber
    writer: WriterId
    kind: Literal["anchor", "delta", "span", "document"]
    parent: Parent | None
    base_digest: Digest | None
    state_digest: Digest
    objects: Annotated[tuple[ObjectEntry, ...], Field(max_length=MAX_OBJECTS)]
    step: Count = 0
    sync: Count = 0
    codec: str = Field(default="", max_length=32)
    schema_digest: Sha256 | None = None
    harness: Harness = {}
    measured_against: IdentityText | None = None
    created_at: float = Field(ge=0)

    @property
    def identity(self) -> Identity:
        """This version's (epoch, version)."""
        return Identity(self.epoch, self.version)

    @property
    def from_version(self) -> int | None:
        """The version that a delta or span starts from; None for what stands alone."""
        return self.parent.version if self.parent is not None and self.kind in ("delta", "span") else None

    @property
    def payload_bytes(self) -> int:
        """Bytes of all objects together."""
        return sum(o.size for o in self.objects)

    def to_bytes(self) -> bytes:
        """The sealed canonical bytes, as stored; their sha256 is what a child's parent link names."""
        return seal(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """The sha256 of `to_bytes()`."""
        return sha256_hex(self.to_bytes())


class Ref(Wire):
    """A pointer to the manifest of a version, anchor or span, with what planning needs to know without reading it.

    `key` is the manifest's; `size` and `sha256` are of the manifest's bytes; `payload` is the bytes of its objects.
    A delta or span goes from `from_version` to `version`; an anchor stands alone.
    """

    kind: Literal["anchor", "delta", "span", "document"]
    key: Key
    size: Count
    sha256: Sha256
    payload: Count
    epoch: EpochNumber
    from_version: VersionNumber | None = None
    version: VersionNumber
    base_digest: Digest | None
    state_digest: Digest

    @model_validator(mode="after")
    def _leads_forward(self) -> Ref:
        step = self.kind in ("delta", "span")
        if step != (self.from_version is not None) or (self.from_version or 0) >= self.version + (not step):
            raise ValueError(f"a {self.kind} from {self.from_version} to {self.version}")
        if step and self.base_digest is None:
            raise ValueError(f"a {self.kind} without a base digest")
        return self

    @property
    def identity(self) -> Identity:
        """The (epoch, version) reached."""
        return Identity(self.epoch, self.version)

    @classmethod
    def to(cls, manifest: Manifest, key: str) -> Ref:
        """Reference `manifest`, stored at `key`."""
        data = manifest.to_bytes()
        return cls(
            kind=manifest.kind,
            key=key,
            size=len(data),
            sha256=sha256_hex(data),
            payload=manifest.payload_bytes,
            epoch=manifest.epoch,
            from_version=manifest.from_version,
            version=manifest.version,
            base_digest=manifest.base_digest,
            state_digest=manifest.state_digest,
        )


class CatchupRef(Wire):
    """Where the current catchup list is: key, size and sha256 of its bytes."""

    key: Key
    size: Count
    sha256: Sha256


class Catchup(Wire):
    """Immutable list of live anchors and deltas, in version order, from which a late follower plans."""

    format: Literal[1] = 1
    channel: ChannelName
    channel_uid: WriterId
    refs: Annotated[tuple[Ref, ...], Field(max_length=MAX_REFS)]

    def to_bytes(self) -> bytes:
        """The sealed canonical bytes, as stored."""
        return seal(self.model_dump(mode="json"))


class Pin(Wire):
    """A reader's lease: nothing that leads from `version` to the head is deleted until `ttl` seconds after the store
    took this object. `reader` is a name to show, empty by default."""

    format: Literal[1] = 1
    channel: ChannelName
    channel_uid: WriterId
    epoch: EpochNumber
    version: VersionNumber
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL)]
    reader: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 ._/-]{0,64}$")] = ""

    def to_bytes(self) -> bytes:
        """The sealed canonical bytes, as stored."""
        return seal(self.model_dump(mode="json"))


class SweepPlan(Wire):
    """What one collecting will delete, no sooner than the grace after the store took this object."""

    format: Literal[1] = 1
    channel: ChannelName
    channel_uid: WriterId
    epoch: EpochNumber
    writer: WriterId
    floor: VersionNumber
    keys: Annotated[tuple[Key, ...], Field(max_length=MAX_REFS)]

    def to_bytes(self) -> bytes:
        """The sealed canonical bytes, as stored."""
        return seal(self.model_dump(mode="json"))


class Head(Wire):
    """The one mutable object of a channel's term.

    `manifest` is the newest committed version, embedded (None: nothing was ever committed); after a claim it is the
    adopted version of the earlier term. `recent` references every version, anchor and span newer than the catchup
    list, the head's own version included, so that head and catchup list together always name a way to the head. No
    reference leads to or from a version below `floor`.
    """

    format: Literal[1] = 1
    channel: ChannelName
    channel_uid: WriterId
    epoch: EpochNumber
    writer: WriterId
    version: VersionNumber | None
    floor: VersionNumber = 0
    manifest: Manifest | None
    catchup: CatchupRef | None
    recent: Annotated[tuple[Ref, ...], Field(max_length=MAX_RECENT)] = ()
    closed: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> Head:
        made = self.manifest
        if (self.version, self.channel, self.channel_uid) != (
            (None, self.channel, self.channel_uid) if made is None else (made.version, made.channel, made.channel_uid)
        ):
            raise ValueError("the head and the manifest in it are of different versions or channels")
        if made is not None and (made.epoch > self.epoch or self.floor > made.version):
            raise ValueError(f"epoch {self.epoch} and floor {self.floor} do not fit version {made.identity}")
        if made is not None and not any(r.identity == made.identity for r in self.recent):
            raise ValueError(f"nothing in `recent` leads to version {made.identity}")
        return self

    @property
    def identity(self) -> Identity | None:
        """The identity of the newest committed version, or None."""
        return None if self.manifest is None else self.manifest.identity

    def to_bytes(self) -> bytes:
        """The sealed canonical bytes, as stored."""
        return seal(self.model_dump(mode="json"))


def parse(model: type[T], data: bytes, key: str) -> T:
    """Parse sealed bytes into a wire model; raises CorruptObject naming `key` for anything malformed."""
    body: dict[str, Any] = unseal(data, key)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(p) for p in first["loc"])
        raise CorruptObject(f"{key}: not a {model.__name__} of format {FORMAT}: {where}: {first['msg']}") from None
