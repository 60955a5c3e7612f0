"""The router's routes: one URL in front of the replicas, behind the same guard as theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette

from sync.asgi import App, Guard, Receive, Scope, Send, error_json
from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable
from sync.events import Emit, emitter
from sync.session_keys import make_key, session_of

from .affinity import Affinity
from .calls import Calls
from .config import RouterConfig
from .passing import Asked, CutError, Reply, failure, json_reply
from .replicas import Pool, Replica
from .sessions import Sessions
from .upstream import Client, passed_on

Handler = Callable[[Asked, Send], Awaitable[None]]
_PASSED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip


class _ClientGone(Exception):
    pass


def create_app(
    config: RouterConfig, token: str, *, emit: Emit | None = None, on_start: Callable[[], None] = lambda: None
) -> App:
    """The router as an ASGI app. `on_start` runs once requests are answered."""
    return Guard(
        _Router(config, token, emit or emitter("router", "none"), on_start),
        token=token,
        max_body=config.max_body_bytes,
        sessions=lambda key: session_of(token, key),
        keyed=_left_to_the_replica,
    )


def _left_to_the_replica(path: str) -> bool:
    """A session's key opens what its replica lets it do at / and under /v1/, and nothing else here."""
    return (path == "/" or path.startswith("/v1/")) and ".." not in path.split("/")


class _Router:
    def __init__(self, config: RouterConfig, token: str, emit: Emit, on_start: Callable[[], None]) -> None:
        self._config, self._token, self._emit, self._on_start = config, token, emit, on_start
        self._starting = Starlette(lifespan=self._lifespan)
        self.routes: dict[tuple[str, str], Handler] = {}

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        config = self._config
        self._pool = Pool(
            [Replica(url, self._client(url)) for url in config.replicas], max_lag=config.max_lag,
            poll_seconds=config.poll_seconds, poll_timeout=config.poll_timeout_seconds,
            backoff=config.backoff_seconds, hold=config.hold_seconds, emit=self._emit,
        )  # fmt: skip
        affinity = Affinity(config.prefix, config.max_chains)
        seconds, most = config.request_seconds, config.max_answer_bytes
        self._calls = Calls(self._pool, affinity, seconds=seconds, max_answer=most)
        self._sessions = Sessions(self._pool, seconds=seconds, max_answer=most)
        self.routes = self._table()
        watching = [asyncio.create_task(self._pool.watch(r)) for r in self._pool.replicas.values()]
        try:
            self._on_start()
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            for replica in self._pool.replicas.values():
                await replica.client.close()

    def _client(self, url: str) -> Client:
        config = self._config
        return Client(
            url, self._token, connections=config.replica_connections, connect=config.connect_seconds,
            seconds=config.request_seconds,
        )  # fmt: skip

    def _table(self) -> dict[tuple[str, str], Handler]:
        calls = self._calls
        return {
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/router/status"): self._status,
            ("GET", "/sync/status"): calls.any_status,
            ("GET", "/v1/models"): calls.any_status,
            ("HEAD", "/"): calls.any_status,
            ("POST", "/sync/poke"): calls.poke,
            ("POST", "/v1/generate"): calls.generate,
            ("POST", "/v1/score"): calls.score,
            **{("POST", path): calls.stateless for path in _PASSED},
            ("POST", "/v1/sessions"): self._sessions.open,
            ("GET", "/v1/sessions"): self._sessions.list_sessions,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection that the door let in."""
        if scope["type"] == "lifespan":
            await self._starting(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 4404, "reason": "the router has no WebSocket"})
        else:
            with suppress(_ClientGone):
                await self._with_client(scope, receive, send)

    async def _with_client(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; when the client goes, so does what is done for it, up to the replica."""
        asked = self._asked(scope, await _body(receive))
        answering = asyncio.ensure_future(self._answer(scope, asked, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, asked: Asked, send: Send) -> None:
        async def bounded(message: MutableMapping[str, Any]) -> None:
            try:
                async with asyncio.timeout(self._config.request_seconds):
                    await send(message)
            except TimeoutError:
                raise CutError("the client does not read its answer") from None

        try:
            await self._dispatch(scope, asked, bounded)
        except CutError as error:  # returning without the end of the answer makes uvicorn close the connection
            self._emit("cut", target=scope["path"], why=str(error))
        except DeltawireError as error:
            await failure(error).send(bounded)

    async def _dispatch(self, scope: Scope, asked: Asked, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        guest = scope.get("deltawire_session")
        if path == "/health":
            await self._health(asked, send)
        elif (session := guest if guest is not None else _session_in(path)) is not None:
            await self._sessions.at_home(asked, session, send)
        elif (handler := self.routes.get((method, path))) is not None:
            await handler(asked, send)
        elif method == "GET" and path.startswith("/v1/models/") and ".." not in path.split("/"):
            await self._calls.any_status(asked, send)
        else:
            await self._unknown(method, path).send(send)

    def _asked(self, scope: Scope, body: bytes) -> Asked:
        """The request as a replica is given it: the key, however it came, in a header."""
        guest = scope.get("deltawire_session")
        pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        query = urlencode([(k, v) for k, v in pairs if k != "key"])
        target = quote(scope["path"], safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
        key = make_key(self._token, guest) if guest is not None else ""
        return Asked(scope["method"], target, passed_on(scope["headers"]), body, key.encode())

    def _unknown(self, method: str, path: str) -> Reply:
        known = ", ".join(f"{m} {p}" for m, p in self.routes) + ", GET /v1/models/{id}, /v1/sessions/{id}"
        there = any(p == path for _, p in self.routes)
        status, code = (405, "method_not_allowed") if there else (404, "not_found")
        body = error_json(code, f"{method} {path[:200]} is no route; known: {known}")
        return json_reply(status, body)

    async def _health(self, _: Asked, send: Send) -> None:
        await _say({"status": "alive"}, send)

    async def _ready(self, _: Asked, send: Send) -> None:
        state = self._pool.describe()
        if not state["usable"]:
            why = "; ".join(f"{r['url']} {r['obstacle']}" for r in state["replicas"])
            raise PeerUnavailable(f"no replica is usable: {why}")
        await _say({"status": "ready", "version": state["newest"], "usable": state["usable"]}, send)

    async def _status(self, _: Asked, send: Send) -> None:
        await _say(self._pool.describe(), send)


async def _say(what: dict[str, Any], send: Send) -> None:
    await json_reply(200, json.dumps(what).encode()).send(send)


def _session_in(path: str) -> str | None:
    """The id in /v1/sessions/{id}[/…], or None."""
    parts = path.split("/")
    if parts[:3] != ["", "v1", "sessions"] or len(parts) < 4:
        return None
    if not parts[3] or {".", ".."} & set(parts):
        raise InvalidRequest("the path must be /v1/sessions/{id}")
    return parts[3]


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
