"""OpenEnv's routes and sockets, for every environment of this Space: /openenv/{environment}/…"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic_core import to_json

from sync.asgi import App, Receive, Scope, Send, error_json, refuse

from ..config import OpenEnvLimits
from ..environments import ENVIRONMENTS, Environment
from .routes import make_app
from .sessions import Sessions
from .sockets import EpisodeSocket, McpSocket

PREFIX = "/openenv/"
SOCKETS = {"/ws": EpisodeSocket, "/mcp": McpSocket}


class OpenEnvSpace:
    """What of an environment Space speaks OpenEnv. `behind(app)` puts it before the other routes; sessions live while
    `running()` lasts."""

    def __init__(self, limits: OpenEnvLimits, threads: int) -> None:
        self.sessions = Sessions(limits, threads)
        self._http = make_app(self.sessions)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold sessions, and end them all at the end."""
        self.sessions.start()
        try:
            yield
        finally:
            await self.sessions.stop()

    def behind(self, app: App) -> App:
        """An app that answers /openenv/… here and leaves everything else to `app`."""

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] in ("http", "websocket") and scope["path"].startswith(PREFIX):
                await self._serve(scope, receive, send)
            else:
                await app(scope, receive, send)

        return routed

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, _, rest = scope["path"].removeprefix(PREFIX).partition("/")
        if scope["type"] == "http" and name == "status" and not rest:
            body = to_json({"environments": sorted(ENVIRONMENTS), **self.sessions.status()})
            await refuse(scope, send, 200, body)
            return
        cls = ENVIRONMENTS.get(name)
        if cls is None:
            known = ", ".join(sorted(ENVIRONMENTS))
            text = f"no environment {name[:64]!r} is served over OpenEnv here; known: {known}"
            await refuse(scope, send, 404, error_json("unknown_environment", text))
            return
        if scope["type"] == "websocket":
            await self._socket(cls, "/" + rest, scope, receive, send)
            return
        path = "/" + rest
        root = scope.get("root_path", "") + PREFIX + name
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": root, "openenv_environment": cls}
        await self._http(inner, receive, send)

    async def _socket(self, cls: type[Environment], path: str, scope: Scope, receive: Receive, send: Send) -> None:
        kind = SOCKETS.get(path)
        if kind is None:
            text = f"no socket {path[:64]!r}; there are {PREFIX}{cls.name}/ws and {PREFIX}{cls.name}/mcp"
            await refuse(scope, send, 404, error_json("not_found", text))
            return
        await kind(cls, self.sessions, scope, receive, send).serve()
