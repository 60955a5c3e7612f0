"""The Model Context Protocol over an environment's tools: JSON-RPC for standard clients and for OpenEnv's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from sync.errors import InvalidRequest

from ..environments import Environment
from .episode import tool_result, tools_of
from .sessions import Session, Sessions
from .wire import Rpc, encoded, invalid

PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601
INVALID_PARAMS, INTERNAL_ERROR, SERVER_ERROR = -32602, -32603, -32000

SessionOf = Callable[[], Awaitable[Session]]
"""The session that a request without `session_id` belongs to; raises InvalidRequest where there is none."""


class Mcp:
    """Answers JSON-RPC for one environment.

    A tool call needs an episode. A session of MCP alone, which has no reset, gets its first one with its first call,
    and never another; where there is a reset (`resets`: the episode socket) a call without one is refused.
    """

    def __init__(self, cls: type[Environment], sessions: Sessions, *, socket: bool = False) -> None:
        self._cls, self._sessions, self._socket = cls, sessions, socket

    def read(self, text: str | bytes | dict[str, Any]) -> Rpc | str:
        """A request, from JSON or parsed; where it is none, the error to answer."""
        try:
            return Rpc.model_validate(text if isinstance(text, dict) else from_json(text, allow_inf_nan=False))
        except ValidationError as error:
            return _error(None, INVALID_REQUEST, str(invalid(error, "Invalid request")))
        except ValueError as error:
            return _error(None, PARSE_ERROR, f"Parse error: {error}")

    async def answer(
        self, request: Rpc | str, session: SessionOf, *, own: Session | None = None, resets: bool = False
    ) -> str | None:
        """The response to what `read` gave as JSON, or None to a notification. `own` is the session of a socket."""
        if isinstance(request, str):
            return request
        if "id" not in request.model_fields_set:
            return None
        try:
            result = await self._result(request, session, own, resets)
            answer = {"jsonrpc": "2.0", "id": request.id, "result": result}
            return encoded(answer, self._sessions.limits.max_frame_bytes)
        except _RpcError as error:
            return _error(request.id, error.code, str(error))
        except InvalidRequest as error:
            self._sessions.errors[error.code] += 1
            return _error(request.id, SERVER_ERROR, str(error), {"code": error.code})

    async def _result(self, request: Rpc, session: SessionOf, own: Session | None, resets: bool) -> dict[str, Any]:  # noqa: FBT001
        match request.method:
            case "initialize":
                return self._greeting(request.params)
            case "ping":
                return {}
            case "tools/list":
                return {"tools": [_described(tool) for tool in tools_of(self._cls)]}
            case "tools/call":
                return await self._call(request.params, session, resets)
            case "openenv/session/create":
                found = session() if self._socket else self._sessions.open(self._cls, named=True)
                return {"session_id": (await found).id}
            case "openenv/session/close":
                return self._close(request.params, own)
        raise _RpcError(METHOD_NOT_FOUND, f"Method not found: {request.method}")

    def _greeting(self, params: dict[str, Any]) -> dict[str, Any]:
        wanted = params.get("protocolVersion")
        return {
            "protocolVersion": wanted if wanted in PROTOCOLS else PROTOCOLS[1],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": f"deltawire {self._cls.name}", "version": "0.1.0"},
        }

    async def _call(self, params: dict[str, Any], session: SessionOf, resets: bool) -> dict[str, Any]:  # noqa: FBT001
        name, arguments, wanted = params.get("name"), params.get("arguments") or {}, params.get("session_id")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _RpcError(INVALID_PARAMS, "tools/call wants a 'name' and an object of 'arguments'")
        found = await session() if wanted is None else self._sessions.get(str(wanted), self._cls)
        try:
            return tool_result(await found.episode.call(name, arguments, opens=not resets))
        except LookupError as error:
            raise _RpcError(INVALID_PARAMS, f"Tool not found: {error.args[0]}") from None
        except ValueError as error:
            if wanted is not None:  # OpenEnv's own client expects an error here, MCP's a result
                raise _RpcError(INTERNAL_ERROR, str(error)) from None
            content = [{"type": "text", "text": str(error)}]
            return {"content": content, "isError": True, "is_error": True}

    def _close(self, params: dict[str, Any], own: Session | None) -> dict[str, Any]:
        wanted = params.get("session_id")
        if not isinstance(wanted, str):
            raise _RpcError(INVALID_PARAMS, "openenv/session/close wants a 'session_id'")
        if own is not None and own.id == wanted:
            raise _RpcError(INVALID_REQUEST, "this socket's own session ends with the socket: close that")
        session = self._sessions.get(wanted, self._cls)
        if session.socket is not None:
            session.closing = True
            return {"session_id": wanted, "closed": False, "closing": True}
        self._sessions.close(session)
        return {"session_id": wanted, "closed": True}


def _described(tool: Any) -> dict[str, Any]:
    schema = tool.parameters
    return {"name": tool.name, "description": tool.description, "inputSchema": schema, "input_schema": schema}


class _RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def _error(request: str | int | None, code: int, message: str, data: Any = None) -> str:
    body = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return to_json({"jsonrpc": "2.0", "id": request, "error": body}).decode()
