"""The last requests and their counts, as `/_log` shows them. Query values that are secrets are not kept."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..asgi import App, Receive, Scope, Send
from .faults import ABORT

KEPT = 10_000
MAX_PATH = 2000
SECRET_QUERY = {"sig", "token", "key", "signature", "access_token"}
_WORDS = {
    "api", "buckets", "models", "datasets", "spaces", "repos", "tree", "paths-info", "batch", "resolve", "settings",
    "xet-read-token", "xet-write-token", "events", "whoami-v2", "xet", "v1", "v2", "chunks", "xorbs", "xorb-grants",
    "xorb-commits", "grant", "shards", "reconstructions", "telemetry", "create", "delete", "move", "commit", "commits",
    "preupload", "revision", "refs", "cdn", "runtime", "secrets", "variables", "logs", "raw", "blob", "validate-yaml",
}  # fmt: skip
_REST = {"tree", "resolve", "raw", "blob", "revision", "commit", "cdn"}


def shape(method: str, path: str) -> str:
    """A request with its names left out, so that counts stay few: `GET /api/buckets/*/*/tree/**`."""
    out: list[str] = []
    for part in path.strip("/").split("/"):
        if out and out[-1] in _REST:
            out.append("**")
            break
        out.append(part if part in _WORDS else "*")
    return f"{method} /{'/'.join(out)}"[:200]


class RequestLog:
    """The last 10,000 requests and counters of all since the last `clear`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._calls: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._bytes = 0

    def add(self, method: str, path: str, query: str, status: int, ms: float, sent: int) -> None:
        """Note one finished request. Status 0: it ended without an answer."""
        pairs = [(k, "…" if k.lower() in SECRET_QUERY else v) for k, v in parse_qsl(query, keep_blank_values=True)]
        line = (path + ("?" + urlencode(pairs, safe="…/") if pairs else ""))[:MAX_PATH]
        entry = {"method": method, "path": line, "status": status, "ms": round(ms, 2), "bytes": sent}
        with self._lock:
            self._entries.append(entry)
            self._calls[shape(method, path) if len(self._calls) < KEPT else "other"] += 1
            self._statuses[str(status)] += 1
            self._bytes += sent

    def shown(self) -> dict[str, Any]:
        """Everything noted, oldest first."""
        with self._lock:
            return {
                "requests": sum(self._calls.values()), "bytes": self._bytes, "status": dict(self._statuses),
                "calls": dict(self._calls), "entries": list(self._entries),
            }  # fmt: skip

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._calls.clear()
            self._statuses.clear()
            self._bytes = 0

    def middleware(self, app: App) -> App:
        """ASGI middleware; it must be the outermost, next to the server."""
        return _Middleware(app, self)


class _Middleware:
    def __init__(self, app: App, log: RequestLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        transport = getattr(getattr(send, "__self__", None), "transport", None)  # uvicorn's, to close it without a word
        scope = {**scope, "extensions": {**scope.get("extensions", {}), ABORT: getattr(transport, "abort", _no_abort)}}
        status = sent = 0

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        begin = time.perf_counter()
        try:
            await self._app(scope, receive, noted)
        finally:
            if not scope["path"].startswith(("/_faults", "/_log")):
                query = scope.get("query_string", b"").decode("latin-1")
                ms = (time.perf_counter() - begin) * 1000
                self._log.add(scope["method"], scope["path"], query, status, ms, sent)


def _no_abort() -> None:
    raise RuntimeError("this server gives no way to close a connection without an answer")
