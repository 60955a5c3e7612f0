"""One session's episode: an `Environment` behind OpenEnv's reset, step and state."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from pydantic import ValidationError

from sync.errors import InvalidRequest
from sync.schema.calls import Message

from ..config import OpenEnvLimits
from ..environments import Environment
from .threads import NotStarted, Threads
from .wire import (
    SPLIT,
    TEXT_ACTION,
    TOOL_ACTION,
    CallTool,
    ListTools,
    MessageAction,
    ResetOptions,
    State,
    execution_error,
    invalid,
    session_error,
)

T = TypeVar("T")
NEVER_RESET = (
    "there is no episode here: send reset first. A new socket or session starts without one; after a lost connection "
    "the episode before is over, unless its session is resumed with ?session_id="
)


class Episode:
    """The episodes of one session, one after the other; only `reset` starts one.

    What an environment raises, an unfinished method at its deadline and an answer that cannot be sent end the episode
    with EXECUTION_ERROR; its instance is not used again. Methods are called one at a time.
    """

    def __init__(
        self, cls: type[Environment], limits: OpenEnvLimits, threads: Threads, counters: Counter[str], session_id: str
    ) -> None:
        self.cls = cls
        self._limits, self._threads, self._counters = limits, threads, counters
        self._session_id = session_id
        self._actions = TOOL_ACTION if tools_of(cls) else TEXT_ACTION
        self._turn = asyncio.Lock()
        self._env: Environment | None = None
        self._why_none = NEVER_RESET
        self._episode_id: str | None = None
        self._task: str | None = None
        self._steps = self._calls = 0
        self._done = False

    def state(self) -> dict[str, Any]:
        """The answer to a `state` frame."""
        return State(
            episode_id=self._episode_id,
            step_count=self._steps,
            tool_calls=self._calls,
            environment=self.cls.name,
            task=self._task,
            done=self._done,
            session_id=self._session_id,
        ).model_dump()

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Start an episode; the one before is over whatever becomes of the new one."""
        try:
            options = ResetOptions.model_validate(data)
        except ValidationError as error:
            raise invalid(error, "reset") from None
        seed = secrets.randbits(31) if options.seed is None else options.seed
        task = _task(self.cls, options, seed)
        async with self._turn:
            said = await self._begin(task, seed, options.episode_id)
        facts: dict[str, Any] = {"session_id": self._session_id, "task": task, "seed": seed}
        if options.model_extra:
            facts["left_out"] = sorted(name[:64] for name in options.model_extra)[:16]
        return _observed(said, facts)

    async def step(self, data: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Take one action. Raises InvalidRequest as a frame's error needs it; a done episode is not stepped again."""
        try:
            action = self._actions.validate_python(data)
        except ValidationError as error:
            raise invalid(error, "step") from None
        if isinstance(action, ListTools):
            return _answer({"tools": [_tool(tool) for tool in tools_of(self.cls)]})
        if isinstance(action, CallTool):
            return await self._tool_step(action, seconds)
        assert isinstance(action, MessageAction)
        async with self._turn:
            env, text = self._live(), action.message
            last = self._steps + 1 >= self.cls.max_turns
            limit = self._deadline(seconds)
            said, done, rewards, success = await self._guarded(lambda: _stepped(env, text, last=last), limit, "step")
            self._steps += 1
            self._counters["steps"] += 1
            self._done = done or last
        if not self._done:
            return _observed(said, None)
        facts: dict[str, Any] = {"rewards": rewards, "success": success}
        if not done:
            facts["truncated"] = True
        return _observed(said, facts, None if rewards is None else rewards["reward"], done=True)

    async def call(
        self, name: str, arguments: dict[str, Any], seconds: float | None = None, *, opens: bool = False
    ) -> str:
        """Call a tool. Raises LookupError for an unknown one, ValueError for what the tool says of bad arguments, and
        InvalidRequest as `step` does. `opens`: where there never was an episode, begin one with a drawn task."""
        if name not in {tool.name for tool in tools_of(self.cls)}:
            known = ", ".join(tool.name for tool in tools_of(self.cls)) or "none"
            raise LookupError(f"{self.cls.name} has no tool {name[:128]!r}; known: {known}")
        limit = self._deadline(seconds)
        async with self._turn:
            if opens and self._episode_id is None:
                seed = secrets.randbits(31)
                await self._begin(_task(self.cls, ResetOptions(), seed), seed, None)
            env: Any = self._live()
            self._calls += 1
            self._counters["tool_calls"] += 1
            text, problem = await self._guarded(lambda: _called(env, name, arguments), limit, f"tool {name}")
        if problem is not None:
            raise ValueError(problem)
        return text

    async def _tool_step(self, action: CallTool, seconds: float | None) -> dict[str, Any]:
        found: dict[str, Any] = {"tool_name": action.tool_name, "result": None, "error": None}
        try:
            found["result"] = tool_result(await self.call(action.tool_name, action.arguments, seconds))
        except LookupError as error:
            found["error"] = {"error_type": "tool_not_found", "message": str(error.args[0])}
        except ValueError as error:
            found["error"] = {"error_type": "invalid_args", "message": str(error)}
        return _answer(found)

    async def _begin(self, task: str, seed: int, episode_id: str | None) -> list[dict[str, str]]:
        self._env, self._why_none, self._done = None, "the last reset failed: send reset again", False
        self._steps = self._calls = 0
        self._task, self._episode_id = task, episode_id or secrets.token_hex(16)
        self._counters["resets"] += 1
        first = Random(f"{seed}:instance")
        self._env, said = await self._guarded(
            lambda: _begun(self.cls, task, first), self._limits.reset_seconds, "reset"
        )
        return said

    def _deadline(self, seconds: float | None) -> float:
        most = self._limits.step_seconds
        return most if seconds is None else min(seconds, most)

    def _live(self) -> Environment:
        if self._env is None:
            raise session_error(self._why_none)
        if self._done:
            raise execution_error(f"episode {self._episode_id} is over (done): send reset for another")
        return self._env

    async def _guarded(self, method: Callable[[], T], seconds: float, stage: str) -> T:
        try:
            if self.cls.inline:
                return method()
            return await self._threads.run(method, seconds)
        except NotStarted:
            raise InvalidRequest(
                f"{stage}: no thread was free within {seconds:g} s (setting threads); try again",
                status=503,
                code="CAPACITY_REACHED",
            ) from None
        except TimeoutError:
            self._counters["deadlines"] += 1
            raise self.over(f"{stage} was not done within {seconds:g} s, its deadline") from None
        except (Exception, SystemExit) as error:
            self._counters["raised"] += 1
            raise self.over(
                f"the environment raised in {stage}: {type(error).__name__}: {str(error)[:1_000]}"
            ) from error

    def over(self, what: str) -> InvalidRequest:
        """End the episode for a fault of the environment; returns the error to raise."""
        self._env, self._why_none = None, f"the episode ended: {what}. Send reset for another"
        return execution_error(f"{what}; the episode is over, without a reward")


def tools_of(cls: type[Environment]) -> tuple[Any, ...]:
    """The tools that the environment offers; () for a plain one."""
    return tuple(getattr(cls, "tools", ()))


def tool_result(text: str) -> dict[str, Any]:
    """A tool's answer, with every name in OpenEnv's spelling and in MCP's."""
    both = {"structured_content": None, "is_error": False, "structuredContent": None, "isError": False}
    return {"content": [{"type": "text", "text": text}], "data": text, "meta": None, **both}


def _tool(tool: Any) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}


def _answer(observation: dict[str, Any]) -> dict[str, Any]:
    return {"observation": {**observation, "metadata": {}}, "reward": None, "done": False}


def _observed(
    said: list[dict[str, str]], facts: dict[str, Any] | None, reward: float | None = None, *, done: bool = False
) -> dict[str, Any]:
    text = said[0]["content"] if len(said) == 1 else "\n".join(message["content"] for message in said)
    answer: dict[str, Any] = {
        "observation": {"messages": said, "message": text, "metadata": facts or {}}, "reward": reward, "done": done,
    }  # fmt: skip
    if facts:
        answer["metadata"] = facts
    return answer


def _task(cls: type[Environment], options: ResetOptions, seed: int) -> str:
    tasks = cls.tasks()
    wanted = options.task
    if isinstance(wanted, dict):
        wanted = str(wanted.get("id", ""))
    if wanted is not None:
        if wanted not in tasks:
            known = ", ".join(tasks[:8]) + (", …" if len(tasks) > 8 else "")
            text = f"reset: {cls.name} has no task {wanted[:64]!r}; its {len(tasks)} tasks: {known}"
            raise InvalidRequest(text, code="VALIDATION_ERROR")
        return wanted
    if options.index is None:
        return Random(f"{seed}:task").choice(tasks)
    if options.split not in (None, SPLIT):
        raise InvalidRequest(f"reset: split {options.split!r} is unknown; known: {SPLIT}", code="VALIDATION_ERROR")
    if not 0 <= options.index < len(tasks):
        text = f"reset: index {options.index} is not below {len(tasks)}, the number of tasks of {cls.name}"
        raise InvalidRequest(text, code="VALIDATION_ERROR")
    return tasks[options.index]


def _begun(cls: type[Environment], task: str, rng: Random) -> tuple[Environment, list[dict[str, str]]]:
    env = cls()
    return env, _plain(env.reset(task, rng))


def _stepped(
    env: Environment, text: str, *, last: bool
) -> tuple[list[dict[str, str]], bool, dict[str, float] | None, bool | None]:
    turn = env.step(text)
    said = _plain(turn.messages)
    if not (turn.done or last):
        return said, False, None, None
    return said, bool(turn.done), _finite(env.reward()), bool(env.success())


def _called(env: Any, name: str, arguments: dict[str, Any]) -> tuple[str, str | None]:
    try:
        return str(env.call(name, arguments)), None
    except ValueError as error:
        return "", str(error)


def _plain(messages: list[Message] | tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _finite(rewards: dict[str, float] | None) -> dict[str, float] | None:
    if rewards is None:
        return None
    if "reward" not in rewards or not all(math.isfinite(value) for value in rewards.values()):
        raise ValueError(f"a reward is a finite number named 'reward', with finite named parts; found {rewards}")
    return {name: float(value) for name, value in rewards.items()}
