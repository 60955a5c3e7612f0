"""Keys of capture sessions: what an agent gets in place of the Space's token."""

from __future__ import annotations

import hashlib
import hmac

_DIGITS = 40


def make_key(token: str, session: str) -> str:
    """`<session>.<40 hex>`: the name, and its HMAC-SHA256 under the Space's token (RFC 2104), cut to 160 bits.

    Every replica and router that holds the token can check it without asking anyone.
    """
    return f"{session}.{_mac(token, session)}"


def session_of(token: str, key: str) -> str | None:
    """The session that `key` was made for, or None when it was not made under this token."""
    session, _, given = key.rpartition(".")
    return session if session and hmac.compare_digest(given.encode(), _mac(token, session).encode()) else None


def _mac(token: str, session: str) -> str:
    return hmac.new(token.encode(), f"deltawire session {session}".encode(), hashlib.sha256).hexdigest()[:_DIGITS]
