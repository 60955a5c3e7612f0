"""OpenEnv servers as environments: `openenv:https://host/path` in a run request.

The socket is an episode: when it is lost, or an answer does not come in time, the episode ends with PeerUnavailable and
nothing is sent on another one. Frames of OpenEnv carry no ids, so a socket with an answer owed is never used again.
Options stand behind `#`, as in `openenv:https://host#turns=8&step_seconds=120`; see `Options`. A token for the servers
is taken from `DELTAWIRE_OPENENV_TOKEN` and sent to every one of them.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, NamedTuple

from pydantic_core import from_json, to_json

from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.calls import Message

from ..environments.base import Environment, Turn, user
from .remote import FULL, Description, Options, Server, Talk

PREFIX = "openenv:"


class RemoteTool(NamedTuple):
    """A tool of a server, as our environments describe theirs."""

    name: str
    description: str
    parameters: dict[str, Any]


class _Tools:
    """The tools of the server; () until it was asked."""

    def __get__(self, _: object, cls: type[RemoteEnvironment]) -> tuple[RemoteTool, ...]:
        found = cls.server.known
        return () if found is None else tuple(RemoteTool(*tool) for tool in found.tools)


class RemoteEnvironment(Environment):
    """One episode on an OpenEnv server. Methods block; run them in threads.

    The policy's text becomes the one text field of the server's action (`message` before others); where the action has
    no such field the text must be a JSON object. An action that the server refuses is answered to the policy as a
    message, and counts as a turn. What the policy is told is the observation's `messages`, else its only text field,
    else all of it as JSON. The reward is the sum of the rewards that were not null, None where all were. Success is
    what the server says in `metadata.success`, else a reward of at least 1.
    """

    server: ClassVar[Server]
    tools = _Tools()  # type: ignore[assignment,unused-ignore]

    def __init__(self) -> None:
        self._talk: Talk | None = None
        self._reward: float | None = None
        self._parts: dict[str, float] = {}
        self._success: bool | None = None

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """The keys of the server's task API, else "default". Asks the server the first time, which may take as long as
        a cold Space needs: raises PeerUnavailable after `ready_seconds`, InvalidRequest where it can never work."""
        return tuple(cls.server.described().tasks)

    def reset(self, task: str, rng: Random) -> list[Message]:
        """Open a socket and reset; waits for a cold server, and for a place on a full one."""
        about = self.server.described()
        if task not in about.tasks:
            raise InvalidRequest(f"task {task[:64]!r} is none of the {len(about.tasks)} tasks of {self.server.url}")
        data: dict[str, Any] = {"seed": rng.randrange(2**31), **about.tasks[task]}
        talk, answer = self.server.begin(data)
        self._talk = talk
        weakref.finalize(self, talk.close).atexit = False
        return list(self._heard(answer))

    def step(self, text: str) -> Turn:
        """Send one action."""
        about = self.server.described()
        action: Any = {about.field: text} if about.field else _object(text)
        if action is None:
            return Turn((user(f"the action must be a JSON object with {about.fields}"),), done=False)
        try:
            answer = self._asked(action)
        except InvalidRequest as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Turn((user(f"the action was refused: {error}"),), done=False)
        said = self._heard(answer)
        done = answer.get("done") is True
        if done and self._talk is not None:
            self._talk.close()
        return Turn(said, done=done)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server; raises ValueError with what it says of bad arguments."""
        answer = self._asked({"type": "call_tool", "tool_name": name, "arguments": arguments})
        self._count(answer)
        observation = _dict(answer.get("observation"))
        problem = _dict(observation.get("error"))
        if problem:
            raise ValueError(str(problem.get("message", problem)))
        return _tool_text(observation.get("result"))

    def reward(self) -> dict[str, float] | None:
        """The sum so far, and the named parts that the server told last."""
        return None if self._reward is None else {**self._parts, "reward": self._reward}

    def success(self) -> bool:
        """What the server says, else whether the reward is at least 1."""
        return self._success if self._success is not None else (self._reward or 0.0) >= 1.0

    def demonstrate(self, task: str, rng: Random) -> list[Message]:  # noqa: ARG002 - a server has no expert
        """Raises InvalidRequest: OpenEnv has no experts."""
        raise InvalidRequest(f"{self.name} is a server and gives no demonstrations", code="unsupported")

    def _asked(self, action: dict[str, Any]) -> dict[str, Any]:
        if self._talk is None:
            raise InvalidRequest(f"{self.server.url}: reset comes before step")
        try:
            return self._talk.ask({"type": "step", "data": action}, self.server.options.step_seconds)
        except InvalidRequest as error:
            if error.code == FULL:
                raise PeerUnavailable(str(error)) from None
            raise

    def _heard(self, answer: dict[str, Any]) -> tuple[Message, ...]:
        self._count(answer)
        return _messages(_dict(answer.get("observation")))

    def _count(self, answer: dict[str, Any]) -> None:
        value = answer.get("reward")
        if isinstance(value, (int, float)):
            self._reward = (self._reward or 0.0) + float(value)
        facts = _dict(answer.get("metadata")) or _dict(_dict(answer.get("observation")).get("metadata"))
        if isinstance(facts.get("success"), bool):
            self._success = facts["success"]
        parts = _dict(facts.get("rewards")).items()
        self._parts |= {str(k)[:64]: float(v) for k, v in parts if k != "reward" and isinstance(v, (int, float))}


@lru_cache(maxsize=64)
def remote(name: str) -> type[Environment]:
    """The environment class for `openenv:URL`; contacts nobody. Raises InvalidRequest for what is no such name."""
    server = Server(*Options.parse(name.removeprefix(PREFIX)))
    return type(
        "OpenEnvServer", (RemoteEnvironment,), {"name": name, "server": server, "max_turns": server.options.turns}
    )


def describe(name: str) -> Description:
    """Ask the server of `openenv:URL` what it is, once per process; blocks, and raises as `RemoteEnvironment.tasks`."""
    found: Any = remote(name)
    about: Description = found.server.described()
    return about


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _messages(observation: dict[str, Any]) -> tuple[Message, ...]:
    listed = observation.get("messages")
    if isinstance(listed, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in listed):
        return tuple(Message.model_validate({"role": m["role"], "content": m["content"]}) for m in listed)
    fields = {k: v for k, v in observation.items() if k not in ("metadata", "done", "reward")}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return (user(texts[0] if len(texts) == 1 else to_json(fields).decode()),)


def _tool_text(result: object) -> str:
    if isinstance(result, dict):
        if isinstance(result.get("data"), str):
            return str(result["data"])
        content = result.get("content")
        texts = [c["text"] for c in content if isinstance(c, dict) and "text" in c] if isinstance(content, list) else []
        if texts:
            return "\n".join(map(str, texts))
    return result if isinstance(result, str) else to_json(result).decode()
