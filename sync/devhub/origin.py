"""What a web page of another site could make a browser send to a Hub on this machine is refused.

Browsers name the page's site in `Origin` with every request that changes something; other clients send none. And in an
open Hub on a loopback address, a foreign `Host` means that somebody else's name was made to point at this machine.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ..asgi import App, Receive, Scope, Send
from .responses import HubError, error_response

_SAFE = {"GET", "HEAD", "OPTIONS"}


class OriginGuard:
    """ASGI middleware. `check_host`: also refuse foreign names in `Host`, but for the host of `public_url`."""

    def __init__(self, app: App, *, check_host: bool, public_url: str | None = None) -> None:
        self._app = app
        self._check_host = check_host
        self._public = urlsplit(public_url).netloc if public_url else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse or pass on one request."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> HubError | None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if scope["method"] not in _SAFE and origin is not None and _netloc(origin) not in (host, self._public):
            return HubError(403, "a web page of another site may not change anything here")
        server = scope.get("server")
        local = server is not None and is_loopback(server[0])
        if self._check_host and local and host != self._public and not is_loopback(_hostname(host)):
            return HubError(403, f"this Hub is not known as {host}; start it with --public-url, or with tokens")
        return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
