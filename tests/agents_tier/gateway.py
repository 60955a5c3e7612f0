"""The real inference Space with a scripted engine, as a process: `python gateway.py READY_FILE LOG_FILE`.

In front stands a fault: a session whose id ends in `-500` or `-429` has its first two requests refused with that
status; one that ends in `-cut` gets half of its second answer and a closed connection.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from scripted import SLOW_SECONDS, VERSIONS, ScriptedEngine

from inference_space.app import Limits, create_app
from sync.asgi import App, Receive, Scope, Send
from sync.schema.calls import SyncStatus
from sync.serving import bind, serve, until_stopped, url_of, write_ready_file
from sync.settings import token_from_environment

LIMITS = Limits(ping_seconds=SLOW_SECONDS / 8)  # a slow answer is waited for with several pings
Message = MutableMapping[str, Any]


class CutError(Exception):
    """The connection is closed here on purpose."""


class Still:
    """A follower that has its version and looks for no other."""

    def status(self) -> SyncStatus:
        """Ready."""
        return SyncStatus(ready=True, version=VERSIONS[-1], mirror=VERSIONS[-1], head=VERSIONS[-1], lag=0)

    def poke(self) -> None:
        """Nothing to look at."""


class Faults:
    """ASGI middleware that spoils requests to models by the session in their path (see the module)."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._seen: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, refuse or cut."""
        fault = self._fault(scope)
        if fault in ("500", "429"):
            await _refuse(int(fault), receive, send)
        elif fault == "cut":
            await self._half(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> str:
        parts = scope.get("path", "").split("/")
        if scope.get("method") != "POST" or len(parts) < 4 or parts[1] != "s":
            return ""
        session = parts[2].rpartition(".")[0]
        fault = session.rpartition("-")[2]
        self._seen[session] += 1
        if fault in ("500", "429"):
            return fault if self._seen[session] <= 2 else ""
        return fault if self._seen[session] == 2 else ""

    async def _half(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Message = {}
        body = b""

        async def held(message: Message) -> None:
            nonlocal begun, body
            if message["type"] == "http.response.start":
                begun = message
            body += message.get("body", b"")

        await self._app(scope, receive, held)
        await send(begun)
        await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
        raise CutError("half of the answer was sent")


async def _refuse(status: int, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    kind = {500: "server_error", 429: "rate_limit_error"}[status]
    body = json.dumps({"type": "error", "error": {"type": kind, "code": kind, "message": "try again"}}).encode()
    headers = [
        (b"content-type", b"application/json"), (b"retry-after", b"1"), (b"content-length", str(len(body)).encode())
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(ready_file: Path, log: Path) -> None:
    """Serve until SIGTERM."""
    log.touch()
    app = Faults(create_app(ScriptedEngine(log), Still(), token=token_from_environment(), limits=LIMITS))
    with until_stopped(), bind("127.0.0.1", 0) as listener:
        write_ready_file(ready_file, url=url_of(listener))
        serve(app, listener)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
