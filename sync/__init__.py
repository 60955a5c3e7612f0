"""Deltawire's wire: versioned channels in a bucket, codecs, publisher and follower. Imports no torch."""

from __future__ import annotations

from .artifacts import ArtifactFollower, ArtifactPublisher
from .codec import apply_delta, decode_delta, diff, encode_delta
from .digest import state_digest
from .follower import Follower
from .publisher import Published, Publisher, PublisherOptions, Stamp
from .schema.base import Identity
from .stores import DirectoryStore, MemoryStore, Store, open_store

__all__ = [
    "ArtifactFollower",
    "ArtifactPublisher",
    "DirectoryStore",
    "Follower",
    "Identity",
    "MemoryStore",
    "Published",
    "Publisher",
    "PublisherOptions",
    "Stamp",
    "Store",
    "apply_delta",
    "decode_delta",
    "diff",
    "encode_delta",
    "open_store",
    "state_digest",
]
