"""Compare what a head names with what is stored, and follow the parent links from the head down to the floor."""

from __future__ import annotations

from collections.abc import Mapping

from .. import layout
from ..errors import CorruptObject
from ..fetch import check_manifest
from ..schema.wire import Head, Ref
from .findings import Findings
from .sealed import Stored

_NOWHERE = "named by the head or its catchup list, but not there"


def check_refs(
    head: Head, refs: tuple[Ref, ...], stored: Mapping[str, Stored], present: set[str], findings: Findings
) -> None:
    """I1: every reference names a manifest that exists, has its size and sha256 and says the same."""
    for ref in refs:
        if ref.key not in present:
            findings.add_missing(ref.key, _NOWHERE)
        elif (found := stored.get(ref.key)) is not None:
            with findings.of(ref.key):
                if (found.sha256, found.size) != (ref.sha256, ref.size):
                    raise CorruptObject(f"has sha256 {found.sha256[:12]}…, the reference to it {ref.sha256[:12]}…")
                check_manifest(found.manifest, ref)
    digests: dict[object, Ref] = {}
    for ref in refs:
        first = digests.setdefault(ref.identity, ref)
        if first.state_digest != ref.state_digest:
            findings.add(ref.key, f"declares state {ref.state_digest} for {ref.identity}, {first.key} another")
        start = ref.version if ref.from_version is None else ref.from_version
        if ref.kind != "document" and start < head.floor:
            findings.add(_key(head), f"names {ref.key}, which is below its floor {head.floor}")


def check_chain(head: Head, refs: tuple[Ref, ...], stored: Mapping[str, Stored], findings: Findings) -> int:
    """I4: from the head down to the floor versions are contiguous and each names its parent by sha256.

    Returns the number of versions on the chain. A manifest that is damaged or missing is passed over: it is named
    already.
    """
    if head.manifest is None:
        return 0
    made = _by_version(refs)
    at = made.get(head.manifest.version)
    if at is None or (at.identity, at.sha256) != (head.manifest.identity, head.manifest.sha256()):
        findings.add(_key(head), f"does not name its own version {head.identity} as its manifest has it")
        return 0
    lowest = head.floor if at.kind != "document" else min(made)
    length = 1
    while at.version > lowest:
        before = made.get(at.version - 1)
        if before is None:
            if at.version - 1 > lowest:
                findings.add(at.key, f"follows version {at.version - 1}, which nothing names")
            return length
        with findings.of(at.key):
            _check_link(at, before, stored)
        at, length = before, length + 1
    return length


def _by_version(refs: tuple[Ref, ...]) -> dict[int, Ref]:
    """Version → the reference that made it; an anchor where no delta or document is named."""
    made: dict[int, Ref] = {}
    for ref in sorted(refs, key=lambda r: (r.kind != "anchor", r.identity)):
        if ref.kind != "span":
            made[ref.version] = ref
    return made


def _check_link(at: Ref, before: Ref, stored: Mapping[str, Stored]) -> None:
    if before.identity > at.identity:
        raise CorruptObject(f"is of epoch {at.epoch}, its parent {before.identity} of a later one")
    if at.kind == "delta" and at.base_digest != before.state_digest:
        raise CorruptObject(f"starts from state {at.base_digest}, version {before.identity} has {before.state_digest}")
    if at.key not in stored:
        return
    parent = stored[at.key].manifest.parent
    if parent is None or (parent.epoch, parent.version) != before.identity:
        raise CorruptObject(
            f"names the parent {parent and f'{parent.version}@{parent.epoch}'}, expected {before.identity}"
        )
    if before.kind == "anchor" and (before.key not in stored or _made_behind(stored[before.key])):
        return  # an anchor made from a version has a manifest of its own: the version's is what the link names
    if parent.sha256 != before.sha256:
        raise CorruptObject(f"names a parent with sha256 {parent.sha256[:12]}…, {before.key} has {before.sha256[:12]}…")


def _made_behind(anchor: Stored) -> bool:
    return anchor.manifest.parent is None and anchor.manifest.version > 0


def _key(head: Head) -> str:
    return layout.head_key(head.channel, head.epoch, head.writer)
