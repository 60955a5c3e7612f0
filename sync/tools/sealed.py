"""Read every sealed JSON object of a run and compare it with its key: heads, manifests, catchup lists, pins, plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from .. import layout
from ..canonical import MAX_JSON_BYTES, sha256_hex, unseal
from ..errors import CorruptObject
from ..heads import newest
from ..schema.base import Wire
from ..schema.wire import Catchup, Head, Manifest, Pin, Ref, SweepPlan, parse
from ..stores.base import ObjectInfo, Store
from . import common
from .findings import Findings

T = TypeVar("T", bound=Wire)
_KIND_OF_AREA = {"versions": ("delta", "document"), "anchors": ("anchor",), "spans": ("span",)}


class Stored(NamedTuple):
    """A manifest as it is stored."""

    manifest: Manifest
    sha256: str
    size: int


@dataclass
class Documents:
    """What was read and is in order. heads: by key; live: channel → its newest heads with what each names, without
    those that are damaged or whose catchup list is."""

    heads: dict[str, Head] = field(default_factory=dict)
    manifests: dict[str, Stored] = field(default_factory=dict)
    live: dict[str, list[tuple[Head, tuple[Ref, ...]]]] = field(default_factory=dict)

    def live_folders(self) -> set[str]:
        """Folders that a newest head or its catchup list names."""
        return {layout.folder_of(r.key) for found in self.live.values() for _, refs in found for r in refs}

    def uids(self, channel: str) -> set[str]:
        """The channel's ids, as its heads say."""
        return {h.channel_uid for h in self.heads.values() if h.channel == channel}


def read_documents(store: Store, listing: list[ObjectInfo], channels: set[str], findings: Findings) -> Documents:
    """Read the sealed objects of the channels; what is wrong goes into the findings."""
    documents = Documents()
    places = {info.key: common.place_of(info.key) for info in listing}
    for key, place in places.items():
        if place.kind == "heads" and place.channel in channels:
            with findings.of(key):
                _head(store, key, documents, findings)
    _find_live(store, listing, channels, documents, findings)
    for key, place in places.items():
        if place.channel in channels and place.kind != "heads":
            with findings.of(key):
                _one(store, key, place, documents, findings)
    return documents


def _get(store: Store, key: str, model: type[T], findings: Findings) -> tuple[T, bytes]:
    data = store.get(key, limit=MAX_JSON_BYTES)
    found = parse(model, data, key)
    findings.passed(len(data))
    return found, data


def _head(store: Store, key: str, documents: Documents, findings: Findings) -> None:
    head, at = _get(store, key, Head, findings)[0], layout.parse_head_key(key)
    if at != (head.channel, head.epoch, head.writer):
        raise CorruptObject(f"holds the head of {head.channel} epoch {head.epoch} of writer {head.writer}")
    manifest = head.manifest
    if (None if manifest is None else manifest.version) != head.version:
        raise CorruptObject(f"says version {head.version}, its manifest is that of {manifest and manifest.identity}")
    if manifest is not None and (manifest.epoch > head.epoch or manifest.channel != head.channel):
        raise CorruptObject(f"of epoch {head.epoch} holds the manifest of {manifest.channel} {manifest.identity}")
    documents.heads[key] = head


def _find_live(
    store: Store, listing: list[ObjectInfo], channels: set[str], documents: Documents, findings: Findings
) -> None:  # fmt: skip
    for channel, found in newest(listing).items():
        if channel not in channels:
            continue
        documents.live[channel] = []
        for _, info in found:
            head = documents.heads.get(info.key)
            if head is None:
                continue  # damaged, and named
            listed = "" if head.catchup is None else head.catchup.key
            with findings.of(listed):
                documents.live[channel].append((head, common.live_refs(store, head)))
            if listed in findings.problems and not store.info([listed]):
                findings.missing.add(listed)


def _one(store: Store, key: str, place: common.Place, documents: Documents, findings: Findings) -> None:
    if place.kind in common.FOLDERS:
        if place.name == layout.MANIFEST:
            _manifest(store, key, place, documents, findings)
        return
    if place.kind == "claims":
        data = store.get(key, limit=MAX_JSON_BYTES)
        unseal(data, key)
        findings.passed(len(data))
    elif place.kind == "pins":
        pin, _ = _get(store, key, Pin, findings)
        _belongs(pin.channel, pin.channel_uid, place, documents)
    elif place.kind == "catchup":
        listing, _ = _get(store, key, Catchup, findings)
        _belongs(listing.channel, listing.channel_uid, place, documents)
    elif place.kind == "plans":
        plan, at = _get(store, key, SweepPlan, findings)[0], place.at
        _belongs(plan.channel, plan.channel_uid, place, documents)
        if at is None or plan.epoch != at.epoch:
            raise CorruptObject(f"holds the plan of epoch {plan.epoch} of writer {plan.writer}")


def _manifest(store: Store, key: str, place: common.Place, documents: Documents, findings: Findings) -> None:
    (manifest, data), at = _get(store, key, Manifest, findings), place.at
    _belongs(manifest.channel, manifest.channel_uid, place, documents)
    start = manifest.from_version if place.kind == "spans" else None
    said = (manifest.epoch, manifest.version, manifest.writer, start)
    expected = None if at is None else (at.epoch, at.version, at.writer, at.start if place.kind == "spans" else None)
    if said != expected or manifest.kind not in _KIND_OF_AREA[place.kind]:
        raise CorruptObject(f"holds the {manifest.kind} {manifest.identity} of writer {manifest.writer}")
    documents.manifests[key] = Stored(manifest, sha256_hex(data), len(data))


def _belongs(channel: str, uid: str, place: common.Place, documents: Documents) -> None:
    uids = documents.uids(place.channel)
    if channel != place.channel or (uids and uid not in uids):
        raise CorruptObject(f"belongs to channel {channel} {uid}, expected {place.channel} {' or '.join(sorted(uids))}")


def channels_of(listing: Iterable[ObjectInfo]) -> set[str]:
    """Every channel that some key belongs to."""
    return {place.channel for info in listing if (place := common.place_of(info.key)).channel}
