"""Who calls, and what they may do: user tokens, the short-lived tokens for file contents, and signed URLs.

Without tokens the Hub is open: every caller is the user `local` and may do everything. With tokens, an unknown one is
refused with 401, no token means anonymous, and a token reads public things and its own namespace and writes its own
namespace; `read` tokens write nothing and `admin` tokens everything everywhere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from starlette.requests import Request

from ..errors import ConfigError
from .responses import HubError, not_found

Role = Literal["read", "write", "admin"]
TOKENS_VARIABLE = "DELTAWIRE_HUB_TOKENS"
TOKEN_SECONDS = 3600
URL_SECONDS = 3600
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class Caller(NamedTuple):
    """Who sent a request. `name` is the namespace they own; empty when anonymous."""

    name: str
    role: Literal["read", "write", "admin", "anonymous"]


ANONYMOUS = Caller("", "anonymous")
OPEN = Caller("local", "admin")


def parse_tokens(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, Caller]:
    """Tokens from `--token NAME:ROLE:VALUE` and the environment (same form, separated by commas), by their sha256.

    Raises ConfigError that names the position and the user, never the value.
    """
    known: dict[str, Caller] = {}
    listed = [part for part in environ.get(TOKENS_VARIABLE, "").split(",") if part.strip()]
    for n, text in enumerate([*given, *listed], 1):
        where = "--token" if n <= len(given) else f"${TOKENS_VARIABLE}"
        parts = text.strip().split(":", 2)
        if len(parts) != 3 or not _NAME.fullmatch(parts[0]) or parts[1] not in get_args(Role):
            raise ConfigError(f"entry {n} of {where}: expected NAME:ROLE:VALUE with a role of read, write or admin")
        name, role, value = parts
        if len(value) < 4 or not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigError(f"the token of {name} in {where}: expected at least 4 printable characters, no spaces")
        caller: Caller = Caller(name, role)  # type: ignore[arg-type]
        if known.setdefault(_digest(value), caller) != caller:
            raise ConfigError(f"the token of {name} in {where} was also given to another user; draw another one")
    return known


def may_read(caller: Caller, *, private: bool, namespace: str) -> bool:
    """Whether a thing of `namespace` is visible."""
    return not private or caller.role == "admin" or (caller.role != "anonymous" and caller.name == namespace)


def may_write(caller: Caller, namespace: str) -> bool:
    """Whether a thing of `namespace` may be changed or created."""
    return caller.role == "admin" or (caller.role == "write" and caller.name == namespace)


def check_read(caller: Caller, *, private: bool, namespace: str, what: str) -> None:
    """Raise HubError 404 (RepoNotFound) when `what` is invisible."""
    if not may_read(caller, private=private, namespace=namespace):
        raise not_found(what)


def check_write(caller: Caller, namespace: str) -> None:
    """Raise HubError 401 for an anonymous caller and 403 for one without the right."""
    if caller.role == "anonymous":
        raise HubError(401, "Invalid username or password: send a token")
    if not may_write(caller, namespace):
        why = "a read token" if caller.role == "read" else f"a token of {caller.name}"
        raise HubError(403, f"You don't have the rights to write in the namespace {namespace} with {why}")


class Auth:
    """The tokens of one Hub and the secret that signs what it hands out; the secret is kept in `folder`."""

    def __init__(self, folder: Path, tokens: Mapping[str, Caller]) -> None:
        self._tokens = dict(tokens)
        self._secret = _secret(folder / "secret")

    @property
    def open(self) -> bool:
        """True when no tokens were given: everybody may do everything."""
        return not self._tokens

    def caller(self, request: Request) -> Caller:
        """Who sent `request`. Raises HubError 401 for a token that is not known."""
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if self.open:
            return OPEN
        if not value.strip():
            return ANONYMOUS
        found = self._tokens.get(_digest(value.strip())) if scheme.lower() == "bearer" else None
        if found is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return found

    def issue(self, *, write: bool) -> tuple[str, int]:
        """(token, expiry in seconds since 1970) for the routes of file contents."""
        expiry = int(time.time()) + TOKEN_SECONDS
        text = f"xet.{'w' if write else 'r'}.{expiry}"
        return f"{text}.{self._mac(text)}", expiry

    def allowed(self, token: str, write: bool) -> bool:  # noqa: FBT001 - the seam that the content routes call
        """Whether a token that `issue` gave is good now; one that may write may read."""
        text, _, mac = token.rpartition(".")
        parts = text.split(".")
        if len(parts) != 3 or not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return False
        return parts[0] == "xet" and (parts[1] == "w" or not write) and int(parts[2]) > time.time()

    def sign(self, path: str) -> str:
        """The query string (`exp=…&sig=…`) with which `path` may be fetched without a token, for an hour."""
        expiry = int(time.time()) + URL_SECONDS
        return f"exp={expiry}&sig={self._mac(f'url.{expiry}.{path}')}"

    def signed(self, path: str, expiry: str, signature: str) -> bool:
        """Whether `sign` gave these values for `path`, and they still hold."""
        good = hmac.compare_digest(signature.encode(), self._mac(f"url.{expiry}.{path}").encode())
        return good and int(expiry) > time.time()

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def _secret(path: Path) -> bytes:
    """Read the secret of this data folder, or draw it: a whole file of mode 0600, or none."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    return path.read_bytes()
