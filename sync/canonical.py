"""Canonical JSON and the `check` seal that every JSON object in a bucket ends with.

Canonical form: UTF-8, keys sorted, no white space, no NaN or infinity. A sealed document is the canonical form of
its body plus `check`, the sha256 (hex) of the canonical body without it, so one flipped byte anywhere is seen.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .errors import CorruptObject

MAX_JSON_BYTES = 64 * 1024 * 1024


def canonical_json(value: Any) -> bytes:
    """Return the canonical UTF-8 form of a JSON value. Raises ValueError on NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the sha256 of `data` in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def seal(body: dict[str, Any]) -> bytes:
    """Return the canonical bytes of `body` with its `check` added (a `check` already in it is replaced)."""
    plain = {k: v for k, v in body.items() if k != "check"}
    return canonical_json({**plain, "check": sha256_hex(canonical_json(plain))})


def _without(check: Any, data: bytes) -> bytes:
    """Canonical bytes of a sealed body without its `check`, which no string can hold unescaped."""
    field = b'"check":%s' % canonical_json(check)
    if data.count(field) != 1:  # deeper ones say the same
        body = json.loads(data)
        body.pop("check", None)
        return canonical_json(body)
    around = next((piece for piece in (field + b",", b"," + field) if piece in data), field)
    return data.replace(around, b"")


def unseal(data: bytes, key: str) -> dict[str, Any]:
    """Parse sealed bytes and return the body without `check`.

    Raises CorruptObject naming `key` when the bytes are not JSON, not an object, not canonical, or fail the check.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptObject(f"{key}: {len(data)} bytes of JSON, the limit is {MAX_JSON_BYTES}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{key}: not JSON ({error}); the object was damaged or cut short") from None
    if not isinstance(body, dict):
        raise CorruptObject(f"{key}: expected a JSON object, found {type(body).__name__}")
    try:
        canonical = canonical_json(body) == data
        found = body.pop("check", None)
        expected = sha256_hex(_without(found, data) if canonical else canonical_json(body))
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{key}: not canonical JSON ({error})") from None
    if not canonical or found != expected:
        raise CorruptObject(f"{key}: check is {found!r}, the content gives {expected!r}; the object was altered")
    return body
