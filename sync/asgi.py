"""What stands before every route of a Space: our token, the body limit, JSON errors. Plain ASGI, no framework.

The token is taken from `Authorization: Bearer`, `x-api-key`, `X-Deltawire-Key`, a leading path part `/s/<key>/`, or
the cookie that a browser gets by opening any page with `?key=<token>` (the cookie serves the inspector, where a
browser cannot send headers). Routes in `public` need none. Where the owner knows other keys (`sessions`), one of them
opens the paths that `keyed` accepts and nothing else, and the app finds in `scope["deltawire_session"]` whose it was.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refusal = Callable[[str, int, str, str], bytes]
"""(path, status, code, message) → the JSON body of a refusal."""

COOKIE = "deltawire_key"


class _TooLarge(Exception):
    pass


class Guard:
    """ASGI middleware: answers 401 without the token, 413 above `max_body` bytes, else passes on.

    >>> app = Guard(app, token="…", max_body=16 << 20, public=frozenset({"/health"}))
    """

    def __init__(
        self,
        app: App,
        *,
        token: str,
        max_body: int,
        public: frozenset[str] = frozenset({"/health"}),
        sessions: Callable[[str], str | None] = lambda _: None,
        keyed: Callable[[str], bool] = lambda _: False,
        refusal: Refusal = lambda _path, _status, code, message: error_json(code, message),
    ) -> None:
        self._app = app
        self._sessions, self._keyed, self._refusal = sessions, keyed, refusal
        self._token = token
        self._max_body = max_body
        self._public = public
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope = _without_path_key(scope)
        if scope["path"] in self._public:
            await self._limited(scope, receive, send)
            return
        keys = _keys(scope)
        owner = any(map(self._same, keys))
        session = next((name for name in map(self._sessions, keys) if name is not None), None)
        if not owner and session is None:
            text = "missing or wrong token: send Authorization: Bearer <token>"
            await self._refuse(scope, send, 401, "unauthorized", text)
            return
        if not owner and not self._keyed(scope["path"]):
            await self._refuse(scope, send, 403, "forbidden", "the key of a session does not open this route")
            return
        if session is not None:
            scope = {**scope, "deltawire_session": session}
        if owner and scope["type"] == "http" and (query := _query_key(scope)) is not None:
            await _set_cookie(scope, send, self._token, query)
            return
        await self._limited(scope, receive, send)

    async def _refuse(self, scope: Scope, send: Send, status: int, code: str, message: str) -> None:
        self.refused += 1
        await refuse(scope, send, status, self._refusal(scope["path"], status, code, message), message)

    def _same(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self._token.encode())

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # has frames and no body; whoever reads them bounds them
            await self._app(scope, receive, send)
            return
        try:
            length = int(_header(scope, b"content-length") or 0)
        except ValueError:
            await self._refuse(scope, send, 400, "invalid_request", "content-length is not a number")
            return
        seen = length if length > self._max_body else 0
        started = False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise _TooLarge
            return message

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if seen > self._max_body and not started:
                return  # what the app made of the cut body; 413 follows
            started = True
            await send(message)

        if not seen:
            with suppress(_TooLarge):
                await self._app(scope, counted, noted)
        if seen > self._max_body:
            if started:
                self.refused += 1
            else:
                text = f"the body is larger than {self._max_body} bytes (setting max_body_bytes); send less at once"
                await self._refuse(scope, send, 413, "body_too_large", text)


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key.lower() == name:
            return str(value.decode("latin-1"))
    return None


def _keys(scope: Scope) -> list[str]:
    found = [scope.get("deltawire_path_key", "")]
    authorization = _header(scope, b"authorization") or ""
    if authorization.lower().startswith("bearer "):
        found.append(authorization[7:].strip())
    found += [_header(scope, b"x-api-key") or "", _header(scope, b"x-deltawire-key") or ""]
    cookies = (part.strip().partition("=") for part in (_header(scope, b"cookie") or "").split(";"))
    found += [unquote(value) for name, _, value in cookies if name == COOKIE]
    found += [v for k, v in parse_qsl(scope.get("query_string", b"").decode("latin-1")) if k == "key"]
    return [key for key in found if key]


def _without_path_key(scope: Scope) -> Scope:
    parts = scope["path"].split("/", 3)
    if len(parts) < 3 or parts[1] != "s":
        return scope
    path = "/" + (parts[3] if len(parts) == 4 else "")
    root = f"{scope.get('root_path', '')}/s/{parts[2]}"
    return {**scope, "path": path, "raw_path": path.encode(), "root_path": root, "deltawire_path_key": parts[2]}


def _query_key(scope: Scope) -> str | None:
    """The rest of the query string when a browser opened a page with `?key=`, else None."""
    pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    if scope["method"] != "GET" or not any(k == "key" for k, _ in pairs):
        return None
    return urlencode([(k, v) for k, v in pairs if k != "key"])


async def _set_cookie(scope: Scope, send: Send, token: str, query: str) -> None:
    path = "/" + (scope.get("root_path", "") + scope["path"]).lstrip("/\\")  # two slashes would name another host
    target = quote(path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
    cookie = f"{COOKIE}={quote(token, safe='')}; Path=/; HttpOnly; SameSite=Lax"
    headers = [(b"location", target.encode()), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def error_json(code: str, message: str) -> bytes:
    """The body of an error answer, as `sync.schema.calls.ErrorResponse` describes it."""
    return json.dumps({"error": {"code": code, "message": message}}).encode()


async def refuse(scope: Scope, send: Send, status: int, body: bytes, reason: str = "") -> None:
    """Answer with a JSON body; a WebSocket is refused before it is accepted, with the same answer where the server can
    send one."""
    kind = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 4000 + status, "reason": reason[:120]})
            return
        kind = "websocket.http"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})
