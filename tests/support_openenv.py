"""OpenEnv servers for tests: our Space with odd environments in this process, and OpenEnv's own as a process.

`python tests/support_openenv.py READY_FILE SESSIONS [PORT] [FOLDER]` serves an echo environment with OpenEnv's own
`create_app`: reward 1 for each step, done at "end"; a step "sleep N" takes N seconds, "raise" raises, "nothing" has no
reward. With a folder it is our Space instead, at /openenv/echo.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
from support_policy import TOKEN

from env_space.app import create_app
from env_space.config import EnvConfig, OpenEnvLimits
from env_space.environments import ENVIRONMENTS, Environment, Turn
from env_space.environments.base import assistant, user
from sync.asgi import App
from sync.schema.calls import Message
from sync.serving import bind, serve, url_of, write_ready_file

KEY = {"Authorization": f"Bearer {TOKEN}"}


class Echo(Environment):
    """Says what it hears; done at "end"."""

    name: ClassVar[str] = "echo"
    max_turns: ClassVar[int] = 1_000_000
    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self.heard: list[str] = []

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        return ("a", "b", "c")

    def reset(self, task: str, rng: Random) -> list[Message]:
        return [user(f"{task} {rng.randint(0, 999_999)}")]

    def step(self, text: str) -> Turn:
        self.heard.append(text)
        return Turn((user(text),), done=text == "end")

    def reward(self) -> dict[str, float] | None:
        return {"reward": float(len(self.heard)), "parts": 0.5}

    def success(self) -> bool:
        return True

    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        return [*self.reset(task, rng), assistant("end")]


class Odd(Echo):
    """Runs in threads and misbehaves on request. `release` ends what hangs; `used` notes each step of any instance."""

    name: ClassVar[str] = "odd"
    max_turns: ClassVar[int] = 3
    inline: ClassVar[bool] = False
    release: ClassVar[threading.Event] = threading.Event()
    used: ClassVar[list[tuple[int, str]]] = []

    def reset(self, task: str, rng: Random) -> list[Message]:
        if task == "b":
            raise RuntimeError("no such level")
        return super().reset(task, rng)

    def step(self, text: str) -> Turn:
        self.used.append((id(self), text))
        if text == "hang":
            self.release.wait(120)
        if text == "raise":
            raise KeyError("a hidden fault")
        if text == "exit":
            sys.exit(3)
        if text == "huge":
            return Turn((user("x" * 3_000_000),), done=False)
        if text == "surrogate":
            return Turn((Message.model_construct(role="user", content="\ud800"),), done=False)
        return super().step(text)

    def reward(self) -> dict[str, float] | None:
        if "nan" in self.heard:
            return {"reward": float("nan")}
        return None if "unknown" in self.heard else super().reward()


class Shop(Echo):
    """Two tools and a final answer."""

    name: ClassVar[str] = "shop"
    max_turns: ClassVar[int] = 2
    inline: ClassVar[bool] = False
    tools: ClassVar[tuple[Any, ...]] = tuple(
        SimpleNamespace(name=name, description=about, parameters={"type": "object", "properties": {key: {}}})
        for name, about, key in (("price", "What one thing costs.", "thing"), ("count", "Calls so far.", "unused"))
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        self.calls += 1
        if name == "count":
            return str(self.calls)
        if arguments.get("thing") == "raise":
            raise RuntimeError("the till is broken")
        if arguments.get("thing") != "apple":
            raise ValueError(f"thing: nothing known of {arguments.get('thing')!r}")
        return "3"


TEST_ENVIRONMENTS: dict[str, type[Environment]] = {cls.name: cls for cls in (Echo, Odd, Shop)}


@contextmanager
def serving(app: App) -> Iterator[str]:
    """Serve an app, sockets included, in a thread of this process; yields its URL."""
    import uvicorn

    with bind("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until = time.monotonic() + 60
            while not server.started:
                if not thread.is_alive() or time.monotonic() > until:
                    raise RuntimeError("the app did not start within 60 s")
                time.sleep(0.01)
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


class OpenSpace:
    """Our Space, serving until `stack` closes."""

    def __init__(self, stack: ExitStack, folder: Path, threads: int = 4, **limits: Any) -> None:
        known = set(ENVIRONMENTS)
        ENVIRONMENTS.update(TEST_ENVIRONMENTS)
        stack.callback(lambda: [ENVIRONMENTS.pop(name) for name in ENVIRONMENTS.keys() - known])
        Odd.release.clear()
        Odd.used.clear()
        settings = EnvConfig(
            folder=folder, inspector=False, log="none", threads=threads, openenv=OpenEnvLimits(**limits)
        )
        self.url = stack.enter_context(serving(create_app(settings, TOKEN)))
        stack.callback(Odd.release.set)
        self.http = stack.enter_context(httpx.Client(base_url=f"{self.url}/openenv", headers=KEY, timeout=60))

    def at(self, environment: str) -> str:
        """The base URL that a client of OpenEnv is given."""
        return f"{self.url}/openenv/{environment}"

    def status(self) -> dict[str, Any]:
        """GET /openenv/status."""
        return dict(self.http.get("/status").json())

    def until(self, what: str, count: int, *, of: str = "counters") -> None:
        """Wait until a count of /openenv/status is reached."""
        end = time.monotonic() + 60
        while self.status()[of].get(what) != count:
            assert time.monotonic() < end, f"{of}.{what} never was {count}: {self.status()}"
            time.sleep(0.02)


class Upstream:
    """OpenEnv's own server, or ours with its data in the folder `ours`, in a process of its own."""

    def __init__(self, folder: Path, sessions: int = 8, port: int = 0, *, ours: Path | None = None) -> None:
        ready = folder / f"openenv-{time.monotonic_ns()}.json"
        self._log = (folder / "openenv.log").open("ab")
        arguments = [sys.executable, str(Path(__file__)), str(ready), str(sessions), str(port)]
        arguments += [] if ours is None else [str(ours)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.process = subprocess.Popen(arguments, stdout=self._log, stderr=self._log, env=env)
        try:
            self.url = self._until_ready(ready)
        except BaseException:
            self.stop()
            raise

    def _until_ready(self, ready: Path) -> str:
        end = time.monotonic() + 120
        while not ready.exists():
            assert self.process.poll() is None, Path(self._log.name).read_text()
            assert time.monotonic() < end, "OpenEnv's server did not start within 120 s"
            time.sleep(0.05)
        url = str(httpx.Response(200, content=ready.read_bytes()).json()["url"])
        while True:
            try:
                if httpx.get(f"{url}/health", headers=KEY, timeout=10).status_code == 200:
                    return url
            except httpx.TransportError:
                assert time.monotonic() < end, "OpenEnv's server did not answer within 120 s"
            time.sleep(0.05)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(60)
        self._log.close()


def upstream_app(sessions: int) -> Any:
    """OpenEnv's server over an echo environment."""
    from openenv.core.env_server import create_app as create  # type: ignore[import-untyped]
    from openenv.core.env_server.interfaces import Environment as Base  # type: ignore[import-untyped]
    from openenv.core.env_server.types import (  # type: ignore[import-untyped]
        Action,
        ConcurrencyConfig,
        Observation,
        State,
    )

    class EchoAction(Action):  # type: ignore[misc]
        message: str

    class EchoObservation(Observation):  # type: ignore[misc]
        echoed: str = ""
        steps: int = 0

    class EchoEnvironment(Base):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.now = State(episode_id=None, step_count=0)

        def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Any:
            self.now = State(episode_id=episode_id or "an episode", step_count=0)
            return EchoObservation(echoed=f"hello {seed}")

        def step(self, action: Any, **_: Any) -> Any:
            if action.message.startswith("sleep "):
                time.sleep(float(action.message[6:]))
            if action.message == "raise":
                raise RuntimeError("the echo failed")
            self.now.step_count += 1
            reward = None if action.message == "nothing" else 1.0
            done = action.message == "end"
            return EchoObservation(echoed=action.message, steps=self.now.step_count, reward=reward, done=done)

        @property
        def state(self) -> Any:
            return self.now

    config = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=None)
    return create(EchoEnvironment, EchoAction, EchoObservation, env_name="echo", concurrency_config=config)


def main(ready_file: str, sessions: str, port: str = "0", folder: str | None = None) -> None:
    """Serve OpenEnv's own server, or our Space, until terminated."""
    if folder is None:
        app = upstream_app(int(sessions))
    else:
        ENVIRONMENTS.update(TEST_ENVIRONMENTS)
        limits = OpenEnvLimits(sessions=int(sessions))
        app = create_app(EnvConfig(folder=Path(folder), inspector=False, log="none", openenv=limits), TOKEN)
    with bind("127.0.0.1", int(port)) as listener:
        write_ready_file(Path(ready_file), url=url_of(listener))
        serve(app, listener, max_connections=4_096)


if __name__ == "__main__":
    main(*sys.argv[1:])
