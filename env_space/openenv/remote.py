"""One OpenEnv server from the outside: what it says of itself, and sockets to it, for threads that may block."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import httpx
from pydantic import Field, ValidationError
from pydantic_core import from_json, to_json
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from sync.errors import InvalidRequest, PeerUnavailable
from sync.settings import Settings

T = TypeVar("T")
TOKEN_VARIABLE = "DELTAWIRE_OPENENV_TOKEN"  # noqa: S105 - the variable's name, not a secret
MAX_TASKS, MAX_TOOLS = 100_000, 256
FOREVER = {401, 403, 404, 405}
"""Answers that waiting does not change. A socket's; /health of a Space that wakes up may be a 404 for a while."""
FULL = "CAPACITY_REACHED"
ON_LOOP_SECONDS = 5.0
"""Most that a caller on an event loop, which stands still meanwhile, is held up by a server that does not answer."""


class Options(Settings):
    """What may stand behind `#` in the name of a server."""

    turns: int = Field(default=64, ge=1, le=65_536)
    """Most turns of one episode."""
    ready_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """How long a server may take to answer at all, as a Space does that sleeps."""
    wait_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """How long to wait for a place on a server that is full."""
    reset_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Deadline of one reset."""
    step_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Deadline of one step or tool call."""
    max_frame_bytes: int = Field(default=16 << 20, ge=1_024, le=1 << 30)
    """Largest frame that the server may send."""

    @classmethod
    def parse(cls, address: str) -> tuple[str, Options]:
        """URL and options of `https://host/path#turns=8`; raises InvalidRequest."""
        try:
            parts = urlsplit(address)
            options = cls.model_validate(dict(parse_qsl(parts.fragment)))
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.username)
            good = good and parts.port != 0
        except ValidationError as error:
            first: Any = error.errors()[0]
            known = ", ".join(cls.model_fields)
            found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InvalidRequest(f"environment: options behind '#': {found}; known: {known}") from None
        except ValueError as error:
            raise InvalidRequest(f"environment: {address[:200]!r} is no URL: {error}") from None
        if not good:
            raise InvalidRequest(f"environment: {address[:200]!r} is not openenv:http(s)://host[:port][/path]")
        return urlunsplit(parts._replace(fragment="", path=parts.path.rstrip("/"))), options


class Description(NamedTuple):
    """What a server is. `tasks`: key to what reset is told; `field`: the action's text field, None where it has none;
    `fields`: the action's fields in words; `tools`: name, description and JSON schema of each."""

    tasks: dict[str, dict[str, Any]]
    field: str | None
    fields: str
    tools: tuple[tuple[str, str, dict[str, Any]], ...]


class Server:
    """One server. `known` is its description once it was asked."""

    def __init__(self, url: str, options: Options) -> None:
        self.url, self.options = url, options
        self.known: Description | None = None
        self._asking = threading.Lock()

    def described(self) -> Description:
        """What it says of itself; asked once. Blocks: raises PeerUnavailable when it is not there in `ready_seconds`
        (on an event loop ON_LOOP_SECONDS: call it in a thread), InvalidRequest when it refuses us or is no OpenEnv
        server."""
        if self.known is None:
            seconds = min(self.options.ready_seconds, ON_LOOP_SECONDS if _on_a_loop() else 86_400)
            if not self._asking.acquire(timeout=2 * seconds):
                raise PeerUnavailable(f"{self.url} is asked by another thread, for too long; try again")
            try:
                if self.known is None:
                    with self._http(min(seconds, 10.0)) as http:
                        self._until_ready(http, seconds)
                        self.known = _describe(http, self.url)
            except httpx.TransportError as error:
                raise PeerUnavailable(f"{self.url} stopped answering: {type(error).__name__}: {error}") from error
            finally:
                self._asking.release()
        return self.known

    def begin(self, data: dict[str, Any]) -> tuple[Talk, dict[str, Any]]:
        """A socket with an episode, and the answer to its reset. Blocks; waits for a server that is away or full, and
        raises PeerUnavailable when it stays so."""
        until = time.monotonic() + self.options.wait_seconds
        pause = 0.2
        while True:
            talk = self._connected()
            try:
                return talk, talk.ask({"type": "reset", "data": data}, self.options.reset_seconds)
            except InvalidRequest as error:
                talk.close()
                if error.code != FULL:
                    raise
                if time.monotonic() + pause > until:
                    seconds = self.options.wait_seconds
                    raise PeerUnavailable(f"{self.url} had no free session for {seconds:g} s: {error}") from None
            except BaseException:
                talk.close()
                raise
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _connected(self) -> Talk:
        with suppress(PeerUnavailable):
            return Talk(self)
        with self._http(10.0) as http:
            self._until_ready(http, self.options.ready_seconds)
        return Talk(self)

    def _http(self, seconds: float) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers(), timeout=seconds, trust_env=not self.near)

    @property
    def near(self) -> bool:
        """True for this machine, where no proxy stands between."""
        host = urlsplit(self.url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def _until_ready(self, http: httpx.Client, seconds: float) -> None:
        until = time.monotonic() + seconds
        pause = 0.2
        while True:
            try:
                answer = http.get("/health")
                if answer.status_code in (401, 403):
                    refused = f"{self.url} answers {answer.status_code} to our token"
                    raise InvalidRequest(f"{refused}; put one that it takes into {TOKEN_VARIABLE}")
                if answer.status_code == 200 and _json_of(answer).get("status") == "healthy":
                    return
                found = f"GET /health: {answer.status_code} {answer.text[:200]!r}"
            except httpx.TransportError as error:
                found = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > until:
                raise PeerUnavailable(f"{self.url} was not ready within {seconds:g} s: {found}")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


class Talk:
    """One socket. Raises PeerUnavailable from its constructor when it cannot be opened."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket: ClientConnection | None = None
        self._socket = _loop().run(self._open(), 30.0, server.url)

    def ask(self, frame: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The `data` of the answer to one frame. Blocks.

        Raises PeerUnavailable, and never works again, when the socket is lost or the answer late or no OpenEnv; raises
        InvalidRequest with the server's code for an error that it answers.
        """
        answer = _loop().run(self._exchange(to_json(frame).decode(), seconds), seconds + 30.0, self._server.url)
        data = answer.get("data")
        if not isinstance(data, dict):
            self.close()
            raise PeerUnavailable(f"{self._server.url} answered a frame without data: {str(answer)[:200]}")
        if answer.get("type") == "error":
            code = str(data.get("code", "EXECUTION_ERROR"))
            text = f"{str(data.get('message', 'no message'))[:1_000]} ({self._server.url}, {code})"
            if code in ("SESSION_ERROR", "FACTORY_ERROR"):
                self.close()
                raise PeerUnavailable(text)
            raise InvalidRequest(text, code=code)
        return data

    def close(self) -> None:
        """Close the socket without waiting; a second call does nothing."""
        socket, self._socket = self._socket, None
        if socket is not None:
            _loop().start(_closed(socket))

    async def _open(self) -> ClientConnection:
        url = self._server.url
        try:
            return await connect(
                "ws" + url.removeprefix("http") + "/ws", additional_headers=headers(), open_timeout=20.0,
                max_size=self._server.options.max_frame_bytes, ping_interval=20.0, ping_timeout=20.0,
                proxy=None if self._server.near else True,
            )  # fmt: skip
        except InvalidStatus as error:
            status = error.response.status_code
            if status in FOREVER:
                text = f"{url}/ws answers {status}; is it an OpenEnv server, and {TOKEN_VARIABLE} its token?"
                raise InvalidRequest(text) from None
            raise PeerUnavailable(f"{url}/ws answers {status}") from None
        except (OSError, TimeoutError, WebSocketException) as error:
            raise PeerUnavailable(f"{url}/ws cannot be opened: {type(error).__name__}: {error}") from error

    async def _exchange(self, frame: str, seconds: float) -> dict[str, Any]:
        socket = self._socket
        if socket is None:
            raise PeerUnavailable(f"{self._server.url}: the connection was lost, and the episode with it")
        try:
            async with asyncio.timeout(seconds):
                with suppress(WebSocketException):  # it may have said why before it closed
                    await socket.send(frame)
                answer = from_json(await socket.recv())
            if isinstance(answer, dict):
                return answer
            found = f"answered {type(answer).__name__} instead of an object"
        except TimeoutError:
            found = f"did not answer within {seconds:g} s"
        except (OSError, ValueError, WebSocketException) as error:
            found = f"was lost: {type(error).__name__}: {error}"
        self.close()
        raise PeerUnavailable(f"{self._server.url} {found}; the episode ended with its socket")


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def headers() -> dict[str, str]:
    """What every request carries."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return {"Authorization": f"Bearer {token}"} if token else {}


class _LoopThread:
    """An event loop in a daemon thread of its own: no loop of a caller is ever needed, blocked or outlived."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[Any] = set()
        threading.Thread(target=self._loop.run_forever, name="openenv client", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float, peer: str) -> T:
        """Its result, from another thread; PeerUnavailable after `seconds`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise PeerUnavailable(f"{peer} did not answer within {seconds:g} s") from None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin it; nobody waits."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)


_starting = threading.Lock()


def _loop() -> _LoopThread:
    with _starting:  # a cache alone calls twice where two threads come first
        return _only_loop()


@lru_cache(maxsize=1)
def _only_loop() -> _LoopThread:
    return _LoopThread()


async def _closed(socket: ClientConnection) -> None:
    with suppress(OSError, TimeoutError, WebSocketException):
        async with asyncio.timeout(10.0):
            await socket.send('{"type":"close"}')
            await socket.close()


def _json_of(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = from_json(answer.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _describe(http: httpx.Client, url: str) -> Description:
    schema = _json_of(http.get("/schema")).get("action")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"environment: {url}/schema has no action; it is no OpenEnv server")
    field, fields = _text_field(schema)
    return Description(_tasks(http), field, fields, _tools(http))


def _text_field(schema: dict[str, Any]) -> tuple[str | None, str]:
    named = schema.get("$defs", {})
    kinds = schema.get("anyOf") or schema.get("oneOf") or [schema]
    kinds = [named.get(str(kind.get("$ref", "")).rpartition("/")[2], kind) for kind in kinds if isinstance(kind, dict)]
    for kind in kinds:
        fields = {k: v for k, v in kind.get("properties", {}).items() if k != "metadata"}
        texts = [k for k, v in fields.items() if isinstance(v, dict) and v.get("type") == "string" and "const" not in v]
        for name in ("message", *(texts if len(texts) == 1 else ())):
            if name in texts and set(kind.get("required", ())) <= {name}:
                return name, name
    words = [", ".join(k for k in kind.get("properties", {}) if k != "metadata") for kind in kinds]
    return None, " or ".join(filter(None, words)) or "the fields of the action"


def _tasks(http: httpx.Client) -> dict[str, dict[str, Any]]:
    names = http.get("/list_environments")
    found: Any = from_json(names.content) if names.status_code == 200 else None
    if not isinstance(found, list) or not found:
        return {"default": {}}
    answer = http.get(f"/{found[0]}/splits")
    splits: Any = from_json(answer.content) if answer.status_code == 200 else []
    usable = [s for s in splits if isinstance(s, dict) and isinstance(s.get("name"), str)]
    if not usable:
        return {"default": {}}
    split = next((s["name"] for s in usable if s.get("type") == "train"), usable[0]["name"])
    listed = _json_of(http.post(f"/{found[0]}/tasks", json={"split": split})).get("tasks")
    if not isinstance(listed, list) or not listed:
        return {"default": {}}
    keys = [_key(task, f"{split}-{index}") for index, task in enumerate(listed[:MAX_TASKS])]
    if len(set(keys)) < len(keys):
        keys = [f"{split}-{index}" for index in range(len(keys))]
    return {key: {"split": split, "index": index} for index, key in enumerate(keys)}


def _key(task: object, otherwise: str) -> str:
    named = next((task[k] for k in ("id", "task_id", "name") if k in task), None) if isinstance(task, dict) else task
    return str(named) if isinstance(named, (str, int)) and 0 < len(str(named)) <= 128 else otherwise


def _tools(http: httpx.Client) -> tuple[tuple[str, str, dict[str, Any]], ...]:
    request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
    result = _json_of(http.post("/mcp", json=request)).get("result")
    listed = result.get("tools") if isinstance(result, dict) else None
    found = []
    for tool in listed[:MAX_TOOLS] if isinstance(listed, list) else ():
        schema = tool.get("inputSchema", tool.get("input_schema", {})) if isinstance(tool, dict) else None
        if isinstance(schema, dict) and isinstance(tool.get("name"), str):
            found.append((tool["name"], str(tool.get("description") or ""), schema))
    return tuple(found)
