"""Codecs: public, pure, numpy in and out, no I/O.

`diff` finds what changed, `encode` writes payloads, `decode` reads one against a base and checks everything before
anything is written. `encode_delta`, `decode_delta` and `apply_delta` are the same for whole states.
"""

from __future__ import annotations

from .api import apply_delta, decode_delta, encode_delta, scatter
from .patch import Patch, TensorPatch, changes, compose, diff
from .payload import CODECS, Encoded, encode
from .reading import Decoded, decode, join

__all__ = [
    "CODECS",
    "Decoded",
    "Encoded",
    "Patch",
    "TensorPatch",
    "apply_delta",
    "changes",
    "compose",
    "decode",
    "decode_delta",
    "diff",
    "encode",
    "encode_delta",
    "join",
    "scatter",
]
