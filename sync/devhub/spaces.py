"""Spaces: their stage, hardware, secrets, variables and logs. This Hub keeps them; it starts no process yet.

`next_stage` is the state machine. Values of secrets go in and never come out again.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from .auth import check_write
from .blobs import Blobs
from .repo_access import Access
from .repo_cards import card_of
from .repo_commit import check_text
from .repo_trees import FileEntry, Trees
from .repos import Repo
from .responses import HubError, iso, now_ms, read_object

if TYPE_CHECKING:
    from .app import Hub
    from .database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS spaces (
    repo INTEGER PRIMARY KEY REFERENCES repos (key) ON DELETE CASCADE, sdk TEXT NOT NULL, stage TEXT NOT NULL,
    runnable INTEGER NOT NULL DEFAULT 0, hardware TEXT NOT NULL, sleep_seconds INTEGER
);
CREATE TABLE IF NOT EXISTS space_values (
    repo INTEGER NOT NULL REFERENCES spaces (repo) ON DELETE CASCADE, kind TEXT NOT NULL, key TEXT NOT NULL,
    value TEXT NOT NULL, description TEXT, updated INTEGER NOT NULL, PRIMARY KEY (repo, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS space_logs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, repo INTEGER NOT NULL REFERENCES spaces (repo) ON DELETE CASCADE,
    kind TEXT NOT NULL, at INTEGER NOT NULL, line TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS space_logs_by_repo ON space_logs (repo, kind, id);
"""

SDKS = {"gradio": "app.py", "streamlit": "app.py", "docker": "Dockerfile", "static": "index.html"}
DEFAULT_HARDWARE = "cpu-basic"
MAX_LOG_LINES = 1000
MAX_VALUE = 65536
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_FLAVOR = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

Event = Literal["commit", "restart", "pause", "hardware"]


def next_stage(stage: str, event: Event, *, runnable: bool) -> str:
    """The stage after an event. A paused Space stays so until it is restarted; `runnable`: its app file is there."""
    if event == "pause" or (stage == "PAUSED" and event != "restart"):
        return "PAUSED"
    return "RUNNING" if runnable else "NO_APP_FILE"


class Setting(NamedTuple):
    """A secret or a variable of a Space."""

    key: str
    value: str
    description: str | None


class Spaces:
    """What the Hub knows of Spaces besides their files. Thread-safe; has no state besides the database."""

    def __init__(self, db: Database, blobs: Blobs) -> None:
        self._db = db
        self._blobs = blobs

    def create(self, connection: sqlite3.Connection, repo: int, wanted: dict[str, Any]) -> None:
        """Add the Space of a new repository, as the body of the create request asks. Raises HubError 400 or 501."""
        if wanted.get("volumes"):
            raise HubError(501, "this Hub mounts no volumes in Spaces; create the Space without them")
        hardware, sleep = _flavor(wanted.get("hardware") or DEFAULT_HARDWARE), _sleep(wanted.get("sleepTimeSeconds"))
        sql = "INSERT INTO spaces (repo, sdk, stage, hardware, sleep_seconds) VALUES (?, ?, 'NO_APP_FILE', ?, ?)"
        connection.execute(sql, (repo, wanted["sdk"], hardware, sleep))
        for kind, name in (("secret", "secrets"), ("variable", "variables")):
            listed = wanted.get(name) or []
            if not isinstance(listed, list):
                raise HubError(400, f"{name} must be a list")
            for value in listed:
                _put(connection, repo, kind, setting(value))
        _log(connection, repo, "build", "the Space was created; push an app file to run it")

    def on_commit(self, connection: sqlite3.Connection, repo: int, trees: Trees, root: str) -> None:
        """Take over what a commit on main says: the SDK of its README.md, and whether the app file is there."""
        card = card_of(self._blobs, trees, root)
        sdk = connection.execute("SELECT sdk FROM spaces WHERE repo = ?", (repo,)).fetchone()[0]
        sdk = card["sdk"] if card.get("sdk") in SDKS else sdk
        named = card.get("app_file") if sdk not in ("docker", "static") else None
        app_file = named if isinstance(named, str) and named else SDKS[sdk]
        runnable = isinstance(trees.find(root, app_file), FileEntry)
        connection.execute("UPDATE spaces SET sdk = ?, runnable = ? WHERE repo = ?", (sdk, runnable, repo))
        _move(connection, repo, "commit", "" if runnable else f"no {app_file} in the repository")

    def change(self, repo: Repo, event: Event, **columns: str | int | None) -> dict[str, Any]:
        """Let an event happen to a Space; `columns` are set first. Returns its runtime. Raises HubError 400 or 404."""
        with self._db.write() as connection:
            if event in ("restart", "pause") and _row(connection, repo)[0] == "static":
                raise HubError(400, "a static Space is always running; it cannot be paused or restarted")
            for name, value in columns.items():
                connection.execute(f"UPDATE spaces SET {name} = ? WHERE repo = ?", (value, repo.key))  # noqa: S608
            _move(connection, repo.key, event, "")
            return _runtime(connection, repo)

    def runtime(self, repo: Repo) -> dict[str, Any]:
        """The runtime as the clients read it."""
        return _runtime(self._db.read(), repo)

    def info(self, connection: sqlite3.Connection, repo: Repo) -> dict[str, Any]:
        """What the info of a repository says more for a Space."""
        name = re.sub(r"[^a-z0-9]+", "-", repo.id.lower()).strip("-")
        sdk = _row(connection, repo)[0]
        return {"sdk": sdk, "runtime": _runtime(connection, repo), "subdomain": name, "host": None}

    def put(self, repo: Repo, kind: str, value: Setting) -> dict[str, Any]:
        """Add or replace a secret or a variable; returns all of that kind. Raises HubError 400 for a name of both."""
        with self._db.write() as connection:
            _row(connection, repo)
            _put(connection, repo.key, kind, value)
            return _settings(connection, repo, kind)

    def drop(self, repo: Repo, kind: str, key: str) -> dict[str, Any]:
        """Delete a secret or a variable, if it is there; returns all of that kind."""
        with self._db.write() as connection:
            sql = "DELETE FROM space_values WHERE repo = ? AND kind = ? AND key = ?"
            connection.execute(sql, (repo.key, kind, key))
            return _settings(connection, repo, kind)

    def settings(self, repo: Repo, kind: str) -> dict[str, Any]:
        """Secrets (without their values) or variables, by key."""
        return _settings(self._db.read(), repo, kind)

    def logs(self, repo: Repo, kind: str) -> list[dict[str, str]]:
        """The kept lines of one log, oldest first."""
        sql = "SELECT at, line FROM space_logs WHERE repo = ? AND kind = ? ORDER BY id"
        rows = self._db.read().execute(sql, (repo.key, kind)).fetchall()
        return [{"data": f"{line}\n", "timestamp": iso(at)} for at, line in rows]


def setting(body: object) -> Setting:
    """A secret or variable from `{key, value, description?}`. Raises HubError 400 that never shows the value."""
    if not isinstance(body, dict):
        raise HubError(400, "a secret or variable must be a JSON object with key and value")
    key, value, description = body.get("key"), body.get("value"), body.get("description")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise HubError(400, "key must be a name of letters, digits and '_' that begins with no digit")
    if not isinstance(value, str) or len(value) > MAX_VALUE or not _is_text(value):
        raise HubError(400, f"the value of {key} must be a text of at most {MAX_VALUE} characters")
    check_text(description, f"the description of {key}")
    return Setting(key, value, description)


def routes(hub: Hub) -> list[BaseRoute]:
    """Every route of Spaces that is not one of repositories."""
    known = _Routes(hub)
    one = "/api/spaces/{namespace}/{name}"
    changes: dict[str, Callable[[Repo, dict[str, Any]], dict[str, Any]]] = {
        "hardware": known.hardware, "sleeptime": known.sleep, "pause": known.pause, "restart": known.restart,
    }  # fmt: skip
    found: list[BaseRoute] = [Route(one + "/runtime", known.runtime, methods=["GET"])]
    found += [Route(f"{one}/{name}", known.changing(change), methods=["POST"]) for name, change in changes.items()]
    for kind in ("secret", "variable"):
        found.append(Route(f"{one}/{kind}s", known.settings(kind), methods=["GET"]))
        found.append(Route(f"{one}/{kind}s", known.changing(known.put(kind)), methods=["POST"]))
        found.append(Route(f"{one}/{kind}s", known.changing(known.drop(kind)), methods=["DELETE"]))
    return [*found, Route(one + "/logs/{kind}", known.logs, methods=["GET"])]


class _Routes:
    def __init__(self, hub: Hub) -> None:
        self._access = Access(hub)
        self._spaces = Spaces(hub.db, hub.blobs)

    def changing(self, change: Callable[[Repo, dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
        """The endpoint that lets whoever may write call `change` with the body."""

        async def endpoint(request: Request) -> Response:
            target = await run_in_threadpool(self._access.writable, request)
            body = await read_object(request)
            return JSONResponse(await run_in_threadpool(change, target.repo, body))

        return endpoint

    def runtime(self, request: Request) -> Response:
        return JSONResponse(self._spaces.runtime(self._access.readable(request).repo))

    def hardware(self, repo: Repo, body: dict[str, Any]) -> dict[str, Any]:
        columns: dict[str, str | int | None] = {"hardware": _flavor(body.get("flavor"))}
        if "sleepTimeSeconds" in body:
            columns["sleep_seconds"] = _sleep(body["sleepTimeSeconds"])
        return self._spaces.change(repo, "hardware", **columns)

    def sleep(self, repo: Repo, body: dict[str, Any]) -> dict[str, Any]:
        return self._spaces.change(repo, "hardware", sleep_seconds=_sleep(body.get("seconds")))

    def pause(self, repo: Repo, _body: dict[str, Any]) -> dict[str, Any]:
        return self._spaces.change(repo, "pause")

    def restart(self, repo: Repo, _body: dict[str, Any]) -> dict[str, Any]:
        return self._spaces.change(repo, "restart")

    def settings(self, kind: str) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            target = self._access.readable(request)
            if kind == "secret":
                check_write(target.caller, target.repo.namespace)
            return JSONResponse(self._spaces.settings(target.repo, kind))

        return endpoint

    def put(self, kind: str) -> Callable[[Repo, dict[str, Any]], dict[str, Any]]:
        return lambda repo, body: self._spaces.put(repo, kind, setting(body))

    def drop(self, kind: str) -> Callable[[Repo, dict[str, Any]], dict[str, Any]]:
        return lambda repo, body: self._spaces.drop(repo, kind, setting({"value": "", **body}).key)

    def logs(self, request: Request) -> Response:
        target, kind = self._access.writable(request), request.path_params["kind"]
        if kind not in ("run", "build"):
            raise HubError(404, f"no such log: {kind}; there are run and build")
        lines = self._spaces.logs(target.repo, kind)

        def stream() -> Iterator[str]:
            for line in lines:
                yield f"data: {json.dumps(line)}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _row(connection: sqlite3.Connection, repo: Repo) -> tuple[str, str, int, str, int | None]:
    sql = "SELECT sdk, stage, runnable, hardware, sleep_seconds FROM spaces WHERE repo = ?"
    row: tuple[str, str, int, str, int | None] | None = connection.execute(sql, (repo.key,)).fetchone()
    if row is None:
        raise HubError(404, f"The space {repo.id} not found", "RepoNotFound")
    return row


def _runtime(connection: sqlite3.Connection, repo: Repo) -> dict[str, Any]:
    _, stage, _, hardware, sleep = _row(connection, repo)
    current = hardware if stage == "RUNNING" else None
    return {
        "stage": stage, "hardware": {"current": current, "requested": hardware}, "gcTimeout": sleep, "storage": None,
        "replicas": {"current": int(stage == "RUNNING"), "requested": 1},
    }  # fmt: skip


def _move(connection: sqlite3.Connection, repo: int, event: Event, why: str) -> None:
    stage, runnable = connection.execute("SELECT stage, runnable FROM spaces WHERE repo = ?", (repo,)).fetchone()
    after = next_stage(stage, event, runnable=bool(runnable))
    connection.execute("UPDATE spaces SET stage = ? WHERE repo = ?", (after, repo))
    _log(connection, repo, "build" if event == "commit" else "run", f"{event}: {after}" + (f" ({why})" if why else ""))


def _log(connection: sqlite3.Connection, repo: int, kind: str, line: str) -> None:
    sql = "INSERT INTO space_logs (repo, kind, at, line) VALUES (?, ?, ?, ?)"
    connection.execute(sql, (repo, kind, now_ms(), line))
    old = "SELECT id FROM space_logs WHERE repo = ? AND kind = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
    connection.execute(f"DELETE FROM space_logs WHERE id IN ({old})", (repo, kind, MAX_LOG_LINES))  # noqa: S608


def _put(connection: sqlite3.Connection, repo: int, kind: str, value: Setting) -> None:
    found = connection.execute("SELECT kind FROM space_values WHERE repo = ? AND key = ?", (repo, value.key)).fetchone()
    if found is not None and found[0] != kind:
        raise HubError(400, f"Collision on variables and secrets names: {value.key} is a {found[0]} already")
    sql = "INSERT OR REPLACE INTO space_values VALUES (?, ?, ?, ?, ?, ?)"
    connection.execute(sql, (repo, kind, *value, now_ms()))


def _settings(connection: sqlite3.Connection, repo: Repo, kind: str) -> dict[str, Any]:
    sql = "SELECT key, value, description, updated FROM space_values WHERE repo = ? AND kind = ? ORDER BY key"
    shown: dict[str, Any] = {}
    for key, value, description, updated in connection.execute(sql, (repo.key, kind)):
        shown[key] = {"key": key, "description": description, "updatedAt": iso(updated)}
        if kind == "variable":
            shown[key]["value"] = value
    return shown


def _flavor(value: object) -> str:
    if not isinstance(value, str) or not _FLAVOR.fullmatch(value):
        raise HubError(400, "the hardware must be a flavor such as cpu-basic")
    return value


def _sleep(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or not -1 <= value <= 10**9):
        raise HubError(400, "the sleep time must be a number of seconds, or -1 for never")
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
