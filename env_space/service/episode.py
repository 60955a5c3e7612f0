"""One rollout: an episode of an environment against the policy, through the stages, as one `Rollout`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from sync.chains import ChainBuilder
from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.base import Identity
from sync.schema.calls import TOO_LONG_CODES, CallResult, Message
from sync.schema.rollouts import Chain, Rollout, RolloutStatus, RunRequest

from ..environments import Environment
from .policy import Policy
from .stages import Budget, Pipeline, Stage, StageTimeout
from .store import Draw

T = TypeVar("T")


class EnvironmentFailed(Exception):
    """A method of the environment raised."""


class EnvironmentStuck(StageTimeout):
    """A method of the environment did not return in time; its instance must not be touched again."""


@dataclass(slots=True)
class _Trace:
    """What one attempt has seen so far; survives a deadline in the middle."""

    builder: ChainBuilder = field(default_factory=ChainBuilder)
    messages: list[Message] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    status: RolloutStatus = "done"
    scorable: bool = True
    chains: tuple[Chain, ...] = ()
    rewards: dict[str, float] | None = None
    success: bool | None = None

    def ended(self, status: RolloutStatus, finding: str, *, scorable: bool) -> None:
        self.status = status
        self.findings.append(finding)
        self.scorable = self.scorable and scorable


@dataclass(frozen=True, slots=True)
class Roller:
    """Rolls episodes of one run. Holds nothing of a single episode."""

    request: RunRequest
    environment: type[Environment]
    policy: Policy
    pipeline: Pipeline
    threads: Executor

    async def roll(self, group: str, index: int, draw: Draw, deadline: Budget) -> tuple[Rollout, int]:
        """One rollout, final, and how many infrastructure failures it met.

        An attempt whose call fails is repeated once with the same task and instance; after that the rollout is
        agent_error without a reward, as it is where the policy refuses a call for another reason than its length.
        Deadlines and truncation keep the partial trace and are scored; an environment
        that raises gives env_error without a reward.
        """
        failure = ""
        for attempt in range(2):
            trace = _Trace()
            try:
                await _Episode(self, f"{group}.{index}", draw, deadline, trace).play()
            except PeerUnavailable as error:
                failure = str(error)
                trace.ended("agent_error", failure, scorable=False)
                trace.chains = trace.builder.chains()
                continue
            if failure:
                trace.findings.append(f"restarted once: {failure}")
            return self._rollout(group, index, draw, trace), attempt
        return self._rollout(group, index, draw, trace), 2

    def _rollout(self, group: str, index: int, draw: Draw, trace: _Trace) -> Rollout:
        versions = sorted({Identity.parse(s.version) for chain in trace.chains for s in chain.weight_versions})
        rewards = trace.rewards or {}
        return Rollout(
            id=f"{group}.{index}",
            run=self.request.name,
            group=group,
            index=index,
            task=draw.task,
            environment=self.environment.name,
            status=trace.status,
            reward=rewards.get("reward"),
            rewards={name: value for name, value in rewards.items() if name != "reward"},
            success=trace.success,
            chains=trace.chains,
            messages=tuple(trace.messages),
            findings=tuple(text[:1_000] for text in trace.findings),
            harness=draw.harness,
            version_min=str(versions[0]) if versions else None,
            version_max=str(versions[-1]) if versions else None,
            seconds={name: round(value, 6) for name, value in trace.seconds.items()},
            created_at=round(time.time(), 3),
        )


class _Episode:
    def __init__(self, roller: Roller, name: str, draw: Draw, deadline: Budget, trace: _Trace) -> None:
        self._roller = roller
        self._name = name
        self._draw = draw
        self._deadline = deadline
        self._trace = trace
        self._sampling = {"max_tokens": roller.request.max_tokens, "temperature": roller.request.temperature}

    async def play(self) -> None:
        """All stages; the outcome is in the trace. Raises PeerUnavailable when a call failed for good."""
        stages, trace = self._roller.pipeline, self._trace
        try:
            env, opening = await self._init(stages)
            await self._run(stages, env, opening)
        except StageTimeout as error:
            trace.ended("timeout", str(error), scorable=False)
        except EnvironmentFailed as error:
            trace.ended("env_error", str(error), scorable=False)
        try:
            async with stages.post.inside(self._grace(stages.post), trace.seconds):
                trace.chains = trace.builder.chains()
                if len(trace.chains) > 1:
                    trace.findings.append(f"{len(trace.chains)} chains: the policy did not extend the recorded prefix")
            if trace.scorable:
                await self._score(stages, env)
        except StageTimeout as error:
            trace.ended("no_reward", str(error), scorable=False)
        except EnvironmentFailed as error:
            trace.ended("env_error", str(error), scorable=False)

    async def _init(self, stages: Pipeline) -> tuple[Environment, list[Message]]:
        async with stages.init.inside(self._deadline, self._trace.seconds):
            budget = self._budget(stages.init)
            env = await self._env(self._roller.environment, budget, "init")
            instance = Random(f"{self._roller.request.seed}:{self._draw.seq}:instance")
            opening = await self._env(lambda: env.reset(self._draw.task, instance), budget, "init")
        self._trace.messages += opening
        return env, opening

    async def _run(self, stages: Pipeline, env: Environment, opening: list[Message]) -> None:
        async with stages.ready.inside(self._deadline, self._trace.seconds):
            await stages.run.enter(self._budget(stages.ready))
        async with stages.run.entered(self._trace.seconds):
            try:
                await self._turns(env, opening, self._budget(stages.run))
            except EnvironmentStuck:
                raise
            except StageTimeout as error:
                self._trace.ended("timeout", str(error), scorable=True)

    async def _turns(self, env: Environment, new: list[Message], budget: Budget) -> None:
        trace = self._trace
        for number in range(1, env.max_turns + 1):
            try:
                result = await self._call(number, new, budget)
            except InvalidRequest as error:
                long = error.code in TOO_LONG_CODES
                finding = f"turn {number}: the policy refused the call: {error}"
                trace.ended("truncated" if long else "agent_error", finding, scorable=long)
                return
            trace.messages.append(Message(role="assistant", content=result.text))
            turn = await self._env(lambda text=result.text: env.step(text), budget, "run")  # type: ignore[misc]
            trace.messages += turn.messages
            if result.finish_reason == "length":
                trace.ended("truncated", f"turn {number} hit max_tokens {self._sampling['max_tokens']}", scorable=True)
                return
            if turn.done:
                return
            new = list(turn.messages)
        trace.ended("truncated", f"not done after {env.max_turns} turns", scorable=True)

    async def _call(self, number: int, new: list[Message], budget: Budget) -> CallResult:
        call: dict[str, Any] = {
            "id": f"{self._name}.{number}",
            "prefix_ids": self._trace.builder.ids,
            "messages": new,
            "sampling": self._sampling,
        }
        began = time.monotonic()
        try:
            result = await budget.wait(self._roller.policy.generate(call), "run")
        finally:
            waited = time.monotonic() - began
            self._roller.policy.totals.wait_seconds += waited
            self._trace.seconds["policy"] = self._trace.seconds.get("policy", 0.0) + waited
        try:
            self._trace.builder.append(result)
        except InvalidRequest as error:
            raise PeerUnavailable(f"{self._roller.policy.url} answered an inconsistent result: {error}") from None
        return result

    async def _score(self, stages: Pipeline, env: Environment) -> None:
        trace, budget = self._trace, self._grace(stages.score)
        async with stages.score.inside(budget, trace.seconds):
            rewards = await self._env(lambda: _finite(env.reward()), budget, "score")
            trace.success = await self._env(lambda: bool(env.success()), budget, "score")
        if rewards is None:
            trace.ended("no_reward", "the environment gave no reward", scorable=False)
        trace.rewards = rewards

    async def _env(self, method: Callable[[], T], budget: Budget, stage: str) -> T:
        if self._roller.environment.inline:
            return _checked(method, stage)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._roller.threads, _checked, method, stage)
        try:
            return await budget.wait(future, stage)
        except StageTimeout:
            raise EnvironmentStuck(stage) from None

    def _budget(self, stage: Stage) -> Budget:
        return Budget(stage.deadline, self._roller.policy.away, self._deadline)

    def _grace(self, stage: Stage) -> Budget:
        """POST and SCORE have their own deadline even where the group's is over: a partial trace is still scored."""
        return Budget(stage.deadline, self._roller.policy.away)


def _finite(rewards: dict[str, float] | None) -> dict[str, float] | None:
    if rewards is None:
        return None
    if "reward" not in rewards or not all(math.isfinite(value) for value in rewards.values()):
        raise ValueError(f"a reward is a finite number named 'reward', with finite named parts; found {rewards}")
    return {name: float(value) for name, value in rewards.items()}


def _checked(method: Callable[[], T], stage: str) -> T:
    try:
        return method()
    except PeerUnavailable:  # a server behind the environment: nothing that the policy or the task did
        raise
    except Exception as error:
        raise EnvironmentFailed(f"the environment raised in stage {stage}: {type(error).__name__}: {error}") from error
