"""The HTTP routes of one environment as OpenEnv 0.10 has them; which environment is in the scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from sync.asgi import error_json
from sync.errors import InvalidRequest

from ..environments import Environment
from .episode import tools_of
from .mcp import Mcp
from .sessions import Session, Sessions
from .wire import (
    SPLIT,
    TEXT_ACTION,
    TOOL_ACTION,
    VERSION,
    Observation,
    RangeBody,
    ResetOptions,
    Rpc,
    SplitBody,
    State,
    StepBody,
    TaskBody,
    encoded,
    session_error,
)

STATELESS = (
    "HTTP requests hold no episode: open the socket /ws, or create a session by POST /mcp openenv/session/create and "
    "name it as session_id"
)
MCP_SESSION = "mcp-session-id"


class _Routes:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def health(self) -> Response:
        return _json(b'{"status":"healthy"}')

    async def metadata(self, request: Request) -> Response:
        cls = _environment(request)
        about = (cls.__doc__ or "").strip()
        return _json(to_json({"name": cls.name, "description": about or cls.name, "version": VERSION}))

    async def schema(self, request: Request) -> Response:
        action = TOOL_ACTION if tools_of(_environment(request)) else TEXT_ACTION
        seen = Observation.model_json_schema()
        schemas = {"action": action.json_schema(), "observation": seen, "state": State.model_json_schema()}
        return _json(to_json({**schemas, "reset_observation": seen}))

    async def state(self, request: Request, session_id: str | None = None) -> Response:
        cls = _environment(request)
        if session_id is None:
            return _json(State(environment=cls.name).model_dump_json())
        return _json(to_json(self._sessions.get(session_id, cls).episode.state()))

    async def reset(self, request: Request, body: ResetOptions | None = None) -> Response:
        data = {} if body is None else body.model_dump(exclude_unset=True)
        wanted = data.pop("session_id", None)
        if wanted is not None:
            return await self._answer(self._sessions.get(str(wanted), _environment(request)), "reset", data)
        session = await self._sessions.open(_environment(request))
        try:
            return await self._answer(session, "reset", data)
        finally:
            self._sessions.close(session)

    async def step(self, request: Request, body: StepBody) -> Response:
        if body.session_id is None:
            raise session_error(STATELESS)
        session = self._sessions.get(body.session_id, _environment(request))
        return await self._answer(session, "step", body.action, body.timeout_s)

    async def mcp(self, request: Request) -> Response:
        cls, named = _environment(request), request.headers.get(MCP_SESSION)
        mcp, opened = Mcp(cls, self._sessions), None
        raw = mcp.read(await request.body())
        if named is not None:
            self._sessions.get(named, cls)  # 404 where it is not held any more, as the protocol has it
        elif isinstance(raw, Rpc) and raw.method == "initialize":
            opened = await self._sessions.open(cls, named=True)

        async def session() -> Session:
            if named is None:
                raise session_error(STATELESS)
            return self._sessions.get(named, cls)

        answer = await mcp.answer(raw, session)
        headers = None if opened is None else {MCP_SESSION: opened.id}
        return Response(status_code=202) if answer is None else _json(answer, headers)

    async def end_mcp(self, request: Request) -> Response:
        session = self._sessions.get(request.headers.get(MCP_SESSION, ""), _environment(request))
        if session.socket is None:
            self._sessions.close(session)
        session.closing = True
        return Response(status_code=204)

    async def environments(self, request: Request) -> list[str]:
        return [_environment(request).name]

    async def splits(self, request: Request, env_name: str) -> list[dict[str, str]]:
        _tasks(request, env_name, SPLIT)
        return [{"name": SPLIT, "type": SPLIT}]

    async def tasks(self, request: Request, env_name: str, body: SplitBody) -> dict[str, Any]:
        return {"tasks": _tasks(request, env_name, body.split), "env_name": _environment(request).name}

    async def num_tasks(self, request: Request, env_name: str, body: SplitBody) -> dict[str, int]:
        return {"num_tasks": len(_tasks(request, env_name, body.split))}

    async def task(self, request: Request, env_name: str, body: TaskBody) -> dict[str, Any]:
        tasks = _tasks(request, env_name, body.split)
        if not 0 <= body.index < len(tasks):
            raise InvalidRequest(f"index: Invalid task index {body.index}; there are {len(tasks)} tasks")
        return {"task": tasks[body.index]}

    async def task_range(self, request: Request, env_name: str, body: RangeBody) -> dict[str, Any]:
        return {"tasks": _tasks(request, env_name, body.split)[body.start : body.stop]}

    async def _answer(
        self, session: Session, what: str, data: dict[str, Any], seconds: float | None = None
    ) -> Response:
        episode = session.episode
        found = await (episode.reset(data) if what == "reset" else episode.step(data, seconds))
        try:
            return _json(encoded(found, self._sessions.limits.max_frame_bytes))
        except InvalidRequest as error:
            raise episode.over(str(error)) from None


def make_app(sessions: Sessions) -> FastAPI:
    """The app behind /openenv/{environment}; its own /openapi.json, no pages."""
    routes = _Routes(sessions)
    app = FastAPI(
        title="Deltawire environment over OpenEnv", version=VERSION, docs_url=None, redoc_url=None,
        root_path_in_servers=False,  # the root path may hold a key
    )  # fmt: skip
    ways: tuple[tuple[str, str, Callable[..., Awaitable[Any]]], ...] = (
        ("GET", "/health", routes.health), ("GET", "/metadata", routes.metadata), ("GET", "/schema", routes.schema),
        ("GET", "/state", routes.state), ("POST", "/reset", routes.reset), ("POST", "/step", routes.step),
        ("POST", "/mcp", routes.mcp), ("DELETE", "/mcp", routes.end_mcp),
        ("GET", "/list_environments", routes.environments), ("GET", "/{env_name}/splits", routes.splits),
        ("POST", "/{env_name}/tasks", routes.tasks), ("POST", "/{env_name}/num_tasks", routes.num_tasks),
        ("POST", "/{env_name}/task", routes.task), ("POST", "/{env_name}/task_range", routes.task_range),
    )  # fmt: skip
    for method, path, answer in ways:
        app.add_api_route(path, answer, methods=[method], response_model=None)
    _answer_errors(app, sessions)
    return app


def _answer_errors(app: FastAPI, sessions: Sessions) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidRequest)
        sessions.errors[error.code] += 1
        return _error(error.status, error.code, str(error))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first: dict[str, Any] = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        sessions.errors["VALIDATION_ERROR"] += 1
        return _error(422, "VALIDATION_ERROR", f"{where or 'body'}: {first['msg']}")

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.scope['path']}: {error.detail}"
        return _error(error.status_code, "http_error", text, error.headers)

    app.add_exception_handler(InvalidRequest, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _environment(request: Request) -> type[Environment]:
    found: type[Environment] = request.scope["openenv_environment"]
    return found


def _tasks(request: Request, name: str, split: str) -> list[dict[str, str]]:
    cls = _environment(request)
    if name.lower() != cls.name.lower():
        raise InvalidRequest(f"unknown environment {name[:64]!r}; this is {cls.name}", status=404)
    if split != SPLIT:
        raise InvalidRequest(f"split: {split!r} is unknown; known: {SPLIT}")
    return [{"id": task} for task in cls.tasks()]


def _json(body: str | bytes, headers: Any = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")


def _error(status: int, code: str, message: str, headers: Any = None) -> Response:
    return Response(error_json(code, message), status, headers, "application/json")
