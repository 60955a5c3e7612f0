"""The rollout service over HTTP, against a scripted policy over HTTP."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support_policy import END, TOKEN, VERSION, make_policy, served

from env_space.app import create_app
from env_space.config import EnvConfig, PolicyLimits, Pool, Stages
from env_space.environments import ENVIRONMENTS, Environment, Turn
from env_space.environments.base import user
from env_space.service.store import RolloutStore
from sync.artifacts import ArtifactPublisher
from sync.errors import ConfigError
from sync.schema.artifacts import Curriculum, CurriculumEntry
from sync.schema.calls import ErrorResponse, Message
from sync.schema.rollouts import Group, LeaseResponse, Rollout, RolloutPage, RunInfo, RunRequest, ServiceStatus
from sync.stores import open_store

pytestmark = pytest.mark.integration
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Space:
    """An environment Space and a policy, both served in this process."""

    def __init__(self, policy: FastAPI, policy_url: str, client: httpx.Client) -> None:
        self.policy, self.policy_url, self.client = policy, policy_url, client

    def post(self, name: str = "r", **more: Any) -> httpx.Response:
        body = {"environment": "guess", "policy_url": self.policy_url, "group_size": 4, "concurrent_groups": 4}
        return self.client.post("/v1/runs", json={"name": name, "ready_groups": 4, **body, **more})

    def start(self, name: str = "r", **more: Any) -> RunInfo:
        answer = self.post(name, **more)
        assert answer.status_code == 200, answer.text
        return RunInfo.model_validate_json(answer.content)

    def lease(self, name: str = "r", limit: int = 4, wait: float = 20) -> LeaseResponse:
        answer = self.client.get("/v1/rollouts", params={"run": name, "limit": limit, "wait": wait})
        assert answer.status_code == 200, answer.text
        return LeaseResponse.model_validate_json(answer.content)

    def collect(self, count: int, name: str = "r") -> list[Group]:
        groups: list[Group] = []
        while len(groups) < count:
            got = self.lease(name).groups
            assert got, self.status().runs
            groups += got
        return groups

    def ack(self, *groups: str) -> dict[str, int]:
        answer = self.client.post("/v1/rollouts/ack", json={"groups": groups})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def status(self) -> ServiceStatus:
        return ServiceStatus.model_validate_json(self.client.get("/v1/status").content)

    def run(self, name: str = "r") -> RunInfo:
        return next(run for run in self.status().runs if run.name == name)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end, f"never happened: {what}; {self.status()}"
            time.sleep(0.02)


@contextmanager
def make_space(folder: Path, **settings: Any) -> Iterator[Space]:
    limits = PolicyLimits(backoff_seconds=0.1, **settings.pop("policy", {}))
    config = EnvConfig(folder=folder, inspector=False, log="none", policy=limits, **settings)
    policy = make_policy(TOKEN)
    with ExitStack() as stack:
        policy_url = stack.enter_context(served(policy))
        url = stack.enter_context(served(create_app(config, TOKEN)))
        client = stack.enter_context(httpx.Client(base_url=url, headers=HEADERS, timeout=40))
        yield Space(policy, policy_url, client)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Space]:
    with make_space(tmp_path) as made:
        yield made


def test_rollouts_carry_the_truth_of_the_tokens(space: Space) -> None:
    space.start(group_size=3)
    groups = space.collect(6)
    for group in groups:
        assert [r.index for r in group.rollouts] == [0, 1, 2]
        assert {(r.task, r.group, r.run, r.status, r.reward, r.success) for r in group.rollouts} == {
            (group.task, group.id, "r", "done", 1.0, True)
        }
        for rollout in group.rollouts:
            (chain,) = rollout.chains
            answers = [m.content for m in rollout.messages if m.role == "assistant"]
            sampled = [i for i, trained in zip(chain.ids, chain.mask, strict=True) if trained]
            assert sampled == [i for answer in answers for i in (*answer.encode(), END)]
            assert [p for p, trained in zip(chain.logprobs, chain.mask, strict=True) if trained] == [-0.5] * len(
                sampled
            )
            assert (rollout.version_min, rollout.version_max) == (VERSION, VERSION)
            assert len(chain.weight_versions) == len(answers)
            assert rollout.messages[-1].content == "correct"
            assert set(rollout.seconds) == {"init", "ready", "run", "post", "score", "policy"}
    assert len({r.id for g in groups for r in g.rollouts}) == 3 * len(groups)
    assert max(space.policy.state.requests) > 1, "calls of concurrent episodes share a request"
    status = space.status()
    assert status.calls >= 18
    assert status.output_tokens == 2 * status.calls
    assert set(status.stage_seconds) == {"init", "ready", "run", "post", "score"}


def test_posting_a_run_again(space: Space) -> None:
    space.start()
    assert space.start().name == "r"
    assert len(space.status().runs) == 1
    conflict = space.post(seed=5)
    assert conflict.status_code == 409
    assert "another body" in conflict.json()["error"]["message"]


def test_backpressure_then_stop_then_go_on(space: Space) -> None:
    space.start(ready_groups=2, concurrent_groups=1)
    space.until(lambda: space.run().groups_ready == 2, "two READY groups")
    before = space.run()
    assert space.status().backpressure
    assert (before.groups_started, before.groups_active) == (2, 0)
    leased = [group.id for group in space.lease(limit=2).groups]
    space.until(lambda: space.run().groups_ready == 2, "two more")
    assert space.run().groups_leased == 2
    stopped = space.client.delete("/v1/runs/r")
    assert stopped.status_code == 200
    assert not space.status().backpressure
    rest = space.lease(limit=10)
    assert len(rest.groups) == 2
    assert rest.complete, "a stopped run that was leased to the end has nothing more"
    assert space.ack(*leased) == {"changed": 2, "ignored": 0}
    assert space.lease(limit=10).groups == ()
    space.start(ready_groups=2, concurrent_groups=1)
    assert {g.id for g in space.collect(2)}.isdisjoint(leased)


def test_acks_are_final_and_leases_lapse(tmp_path: Path) -> None:
    with make_space(tmp_path, lease_seconds=1.5) as space:
        space.start(purpose="evaluation", tasks=3, concurrent_groups=1, ready_groups=3)
        space.until(lambda: space.run().complete, "all groups final")
        first = space.lease(limit=10)
        assert len(first.groups) == 3
        assert first.complete
        assert first.lease is not None
        kept, *others = [group.id for group in first.groups]
        assert space.ack(kept, "nobody") == {"changed": 1, "ignored": 1}
        assert space.ack(kept) == {"changed": 0, "ignored": 1}
        space.until(lambda: space.run().groups_ready == 2, "the leases of the others lapse")
        again = space.lease(limit=10)
        assert [group.id for group in again.groups] == others, "the same ids, in the same order"
        assert again.groups[0] == next(g for g in first.groups if g.id == others[0])
        renewed = space.client.post("/v1/rollouts/renew", json={"groups": [others[0], kept]}).json()
        assert renewed == {"changed": 1, "ignored": 1}
        assert space.run().redelivered == 2
        assert space.ack(*others) == {"changed": 2, "ignored": 0}
        end = space.lease()
        assert end.complete
        assert end.groups == ()
        assert (space.run().groups_acked, space.run().groups_leased, space.run().groups_ready) == (3, 0, 0)


def test_an_evaluation_rolls_fixed_tasks_once(space: Space) -> None:
    tasks: list[list[str]] = []
    for name in ("one", "two"):
        space.start(name, purpose="evaluation", tasks=14, group_size=1, seed=3)
        groups: list[Group] = []
        while True:
            got = space.lease(name)
            groups += got.groups
            if got.complete:
                break
        assert space.run(name).complete
        tasks.append(sorted(group.task for group in groups))
    assert tasks[0] == tasks[1]
    assert set(Counter(tasks[0]).values()) == {2}
    assert len(tasks[0]) == 14


@pytest.mark.parametrize("mode", ["500", "429", "garbage", "engine_error"])
def test_a_failing_policy_costs_nothing_but_time(space: Space, mode: str) -> None:
    space.start()
    space.ack(*(group.id for group in space.collect(2)))
    space.policy.state.mode = mode
    space.until(lambda: space.run().infrastructure_failures > 3, "failures counted")
    assert space.run().last_error.startswith(f"{space.policy_url}/v1/generate ")
    space.policy.state.mode = "ok"
    for group in space.collect(8):
        assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4
        assert [rollout.status for rollout in group.rollouts] == ["done"] * 4
    after = space.run()
    assert after.groups_dropped == 0
    assert after.last_error == ""


def test_a_policy_that_hangs_is_asked_again_and_no_deadline_runs(tmp_path: Path) -> None:
    stages = Stages(run=Pool(seconds=0.5))
    with make_space(tmp_path, policy={"call_seconds": 0.2}, stages=stages, group_seconds=0.6) as space:
        space.policy.state.mode = "hang"
        space.start()
        space.until(lambda: space.run().infrastructure_failures >= 5, "several attempts, longer than the deadlines")
        assert "no answer within 0.2 s" in space.run().last_error
        space.policy.state.mode = "ok"
        groups = space.collect(4)
        assert {r.status for g in groups for r in g.rollouts} == {"done"}
        assert space.run().groups_dropped == 0


def test_a_policy_that_dies_and_comes_back_on_its_port(tmp_path: Path) -> None:
    config = EnvConfig(folder=tmp_path, inspector=False, log="none", policy=PolicyLimits(backoff_seconds=0.1))
    with served(create_app(config, TOKEN)) as url, httpx.Client(base_url=url, headers=HEADERS, timeout=40) as client:
        with served(make_policy(TOKEN)) as policy_url:
            space = Space(make_policy(TOKEN), policy_url, client)
            space.start()
            space.collect(2)
        space.lease(limit=1_000, wait=0)
        space.until(lambda: "does not answer" in space.run().last_error, "the absence is seen")
        with served(make_policy(TOKEN), int(policy_url.rpartition(":")[2])):
            groups = space.collect(8)
            assert {r.reward for g in groups for r in g.rollouts} == {1.0}
            assert space.run().groups_dropped == 0


def test_a_single_failed_call_restarts_its_episode(space: Space) -> None:
    space.policy.state.mode = "odd_error"
    space.start()
    for group in space.collect(4):
        assert {rollout.reward for rollout in group.rollouts} == {1.0}
        assert [bool(rollout.findings) for rollout in group.rollouts] == [True, False, True, False]
        assert group.rollouts[0].findings[0].startswith("restarted once: ")
    assert space.run().groups_dropped == 0


@pytest.mark.parametrize(
    ("mode", "status", "reward", "finding"),
    [
        ("endless", "truncated", None, "hit max_tokens"),
        ("too_long", "truncated", None, "refused the call"),
        ("rude", "done", -0.2, ""),
    ],
)
def test_truncated_and_malformed_episodes_are_scored(
    space: Space, mode: str, status: str, reward: float | None, finding: str
) -> None:
    space.policy.state.mode = mode
    space.start()
    seen = [rollout for group in space.collect(4) for rollout in group.rollouts]
    seen = [rollout for rollout in seen if mode != "too_long" or rollout.task != "secret-4"]  # solved by the first call
    assert seen
    for rollout in seen:
        assert rollout.status == status
        assert rollout.reward == (reward or (1.0 if rollout.task == "secret-4" else 0.1))
        assert rollout.trainable_tokens > 0
        assert finding in "".join(rollout.findings)


def test_requests_that_are_too_large_are_split(space: Space) -> None:
    space.policy.state.mode = "small"
    space.start(group_size=7)
    assert {rollout.reward for group in space.collect(4) for rollout in group.rollouts} == {1.0}
    assert max(space.policy.state.requests) <= 2
    assert space.run().infrastructure_failures == 0


def test_a_policy_that_refuses_every_call_gives_no_rewards(space: Space) -> None:
    space.policy.state.mode = "refuse"
    space.start()
    space.until(lambda: space.run().groups_dropped > 4, "groups are dropped")
    assert "no_chat_template: told to" in space.run().last_error
    assert (space.run().groups_ready, space.run().infrastructure_failures) == (0, 0)
    space.policy.state.mode = "ok"
    assert space.collect(4)


class Scripted(Environment):
    """Two turns in threads; what happens in which is in the task key."""

    name = "scripted"
    max_turns = 2

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        return ("fine", "raises", "stuck", "slow_reward", "unknown", "infinite", "endless")

    def reset(self, task: str, rng: Random) -> list[Message]:  # noqa: ARG002
        self.task, self.turns = task, 0
        return [user("guess 1-7")]

    def step(self, text: str) -> Turn:  # noqa: ARG002
        self.turns += 1
        if self.task == "raises" and self.turns == 2:
            raise KeyError("a bug in the environment")
        if self.task == "stuck" and self.turns == 2:
            time.sleep(1.6)
        return Turn((user("higher"),), done=self.turns == 2 and self.task != "endless")

    def reward(self) -> dict[str, float] | None:
        if self.task == "slow_reward":
            time.sleep(1.6)
        values = {"unknown": None, "infinite": {"reward": float("inf")}}
        return values.get(self.task, {"reward": 0.25, "turns": float(self.turns)})

    def success(self) -> bool:
        return self.task == "fine"

    def demonstrate(self, task: str, rng: Random) -> list[Message]:
        return self.reset(task, rng)


def test_what_goes_wrong_in_an_environment_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "scripted", Scripted)
    stages = Stages(run=Pool(seconds=0.8), score=Pool(seconds=0.8))
    with make_space(tmp_path, stages=stages, threads=64) as space:
        body: dict[str, Any] = {
            "environment": "scripted",
            "purpose": "evaluation",
            "tasks": 7,
            "group_size": 2,
            "ready_groups": 9,
        }
        space.start(concurrent_groups=7, **body)
        space.until(lambda: space.run().complete, "all groups final")
        groups = {group.task: group for group in space.lease(limit=9).groups}
        assert set(groups) == {"fine", "endless"}, "groups without rewards are dropped"
        assert {(r.status, r.reward, r.success) for r in groups["fine"].rollouts} == {("done", 0.25, True)}
        assert groups["fine"].rollouts[0].rewards == {"turns": 2.0}
        assert {(r.status, r.reward, r.success) for r in groups["endless"].rollouts} == {("truncated", 0.25, False)}
        info = space.run()
        assert (info.groups_dropped, info.infrastructure_failures, info.rollouts_done) == (5, 0, 14)
        assert "0 of 2 rollouts usable" in info.last_error


@pytest.mark.parametrize(
    ("task", "status", "finding"),
    [
        ("raises", "env_error", "KeyError: 'a bug in the environment'"),
        ("stuck", "timeout", "deadline of stage run exceeded"),
        ("slow_reward", "no_reward", "deadline of stage score exceeded"),
        ("unknown", "no_reward", "the environment gave no reward"),
        ("infinite", "env_error", "finite"),
    ],
)
def test_one_rollout_without_a_reward_stays_in_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, status: str, finding: str
) -> None:
    made: list[int] = []
    lock = threading.Lock()

    class OneBad(Scripted):
        """The first episode goes wrong, the others are fine."""

        @classmethod
        def tasks(cls) -> tuple[str, ...]:
            return ("any",)

        def reset(self, _: str, rng: Random) -> list[Message]:
            with lock:
                made.append(1)
                first = len(made) == 1
            return super().reset(task if first else "fine", rng)

    monkeypatch.setitem(ENVIRONMENTS, "scripted", OneBad)
    stages = Stages(run=Pool(seconds=0.8), score=Pool(seconds=0.8))
    with make_space(tmp_path, stages=stages) as space:
        space.start(environment="scripted", purpose="evaluation", tasks=1, group_size=4)
        (group,) = space.collect(1)
        (bad,) = [rollout for rollout in group.rollouts if rollout.reward is None]
        assert bad.status == status
        assert finding in " ".join(bad.findings)
        assert bad.trainable_tokens > 0, "the partial trace is kept"
        assert bad.messages
        assert [rollout.usable for rollout in group.rollouts].count(True) == 3


def test_a_call_that_outlasts_the_run_deadline_ends_in_a_scored_timeout(tmp_path: Path) -> None:
    with make_space(tmp_path, stages=Stages(run=Pool(seconds=1.0))) as space:
        space.policy.state.mode = "hang_later"  # never answered, but not failed either: call_seconds is 120
        space.start(concurrent_groups=1, purpose="evaluation", tasks=3)
        groups = {group.task: group for group in space.collect(3)}
        for task, group in groups.items():
            expected = ("done", 1.0) if task == "secret-4" else ("timeout", 0.1)
            assert {(rollout.status, rollout.reward) for rollout in group.rollouts} == {expected}
            assert {rollout.trainable_tokens for rollout in group.rollouts} == {2}
        info = space.run()
        assert (info.infrastructure_failures, info.groups_dropped) == (0, 0)


def test_the_curriculum_channel_is_followed_and_pinned(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    store = open_store(str(bucket), create=True, writable=True)
    publisher = ArtifactPublisher(store, "curriculum")
    publisher.open()

    def publish(task: str, environment: str = "guess") -> str:
        weights = {task: CurriculumEntry(weight=2.0)}
        document = Curriculum(environment=environment, default_weight=0.0, tasks=weights)
        return str(publisher.publish(document, measured_against=None))

    try:
        with make_space(tmp_path / "env", poll_seconds=0.05) as space:
            space.start(artifacts=str(bucket), ready_groups=2, concurrent_groups=1)
            plain = space.collect(2)
            assert {group.harness.curriculum for group in plain} == {None}
            for task in ("secret-2", "secret-6"):
                version = publish(task)
                pinned = _first_pinned(space, version)
                assert pinned.task == task
                assert {rollout.harness.curriculum for rollout in pinned.rollouts} == {version}
                assert space.run().curriculum == version
            wrong = publish("secret-1", environment="sort")
            space.until(lambda: f"curriculum {wrong} not used" in space.run().last_error, "the misfit is reported")
            assert space.run().curriculum == version, "the last good one stays"
            publish("secret-3")
            space.until(lambda: space.run().last_error == "", "a good version heals")
    finally:
        publisher.close()


def _first_pinned(space: Space, version: str) -> Group:
    while True:
        for group in space.collect(1):
            if group.harness.curriculum == version:
                return group


def test_demonstrations_tasks_and_environments(space: Space) -> None:
    params: dict[str, Any] = {"environment": "guess", "count": 70, "seed": 4}
    first = space.client.get("/v1/demonstrations", params=params)
    talks = first.json()["conversations"]
    assert len(talks) == 70
    assert all(Message.model_validate(message) for talk in talks for message in talk)
    assert all(talk[0] == {"role": "user", "content": "guess 1-7"} for talk in talks)
    assert space.client.get("/v1/demonstrations", params=params).content == first.content
    assert space.client.get("/v1/demonstrations", params={**params, "seed": 5}).content != first.content
    assert space.client.get("/v1/tasks", params={"environment": "sort"}).json()["tasks"] == ["distinct", "repeats"]
    known = space.client.get("/v1/environments").json()["environments"]
    assert [(e["name"], e["max_turns"], e["tasks"]) for e in known] == [
        ("countdown", 1, 2), ("guess", 3, 7), ("reverse-text", 1, 2), ("sort", 1, 2), ("wordle", 6, 3)
    ]  # fmt: skip


def test_browsing_takes_no_lease(space: Space) -> None:
    space.start(ready_groups=3, concurrent_groups=1)
    space.until(lambda: space.run().groups_ready == 3, "READY groups")
    page = RolloutPage.model_validate_json(space.client.get("/v1/rollouts/recent", params={"limit": 5}).content)
    assert page.total == 12
    assert len(page.rollouts) == 5
    found = space.client.get(f"/v1/rollouts/{page.rollouts[0].id}")
    assert Rollout.model_validate_json(found.content).id == page.rollouts[0].id
    empty = space.client.get("/v1/rollouts/recent", params={"run": "r", "status": "timeout"}).json()
    assert empty == {"total": 0, "rollouts": []}
    assert space.run().groups_leased == 0


BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/runs", {"environment": "guess", "policy_url": "http://x"}, 400, "name"),
    (
        "POST",
        "/v1/runs",
        {"name": "a", "environment": "chess", "policy_url": "http://x"},
        400,
        "known: countdown, guess",
    ),
    ("POST", "/v1/runs", {"name": "a", "environment": "guess", "policy_url": "ftp://x"}, 400, "policy_url"),
    ("POST", "/v1/runs", {"name": "a/b", "environment": "guess", "policy_url": "http://x"}, 400, "name"),
    ("POST", "/v1/runs", {"name": "a" * 97, "environment": "guess", "policy_url": "http://x"}, 400, "name"),
    ("POST", "/v1/runs", {"name": "a", "environment": "guess", "policy_url": "http://x", "x": 1}, 400, "x"),
    (
        "POST",
        "/v1/runs",
        {"name": "a", "environment": "guess", "policy_url": "http://x", "group_size": 0},
        400,
        "group_size",
    ),
    (
        "POST",
        "/v1/runs",
        {"name": "a", "environment": "guess", "policy_url": "http://x", "purpose": "evaluation"},
        400,
        "tasks",
    ),
    (
        "POST",
        "/v1/runs",
        {"name": "a", "environment": "guess", "policy_url": "http://x", "artifacts": "/no/such"},
        400,
        "artifacts",
    ),
    ("POST", "/v1/runs", b"{not json", 400, "JSON"),
    ("POST", "/v1/runs", b"[" * 100_000, 400, "pars"),
    ("POST", "/v1/runs", b"", 400, "body"),
    ("DELETE", "/v1/runs/nobody", None, 404, "'nobody' is unknown"),
    ("GET", "/v1/rollouts?run=nobody", None, 404, "'nobody' is unknown"),
    ("GET", "/v1/rollouts", None, 400, "run"),
    ("GET", "/v1/rollouts?run=r&limit=-1", None, 400, "limit"),
    ("GET", "/v1/rollouts?run=r&wait=31", None, 400, "wait"),
    ("GET", "/v1/rollouts?run=r&wait=nan", None, 400, "wait"),
    ("GET", "/v1/rollouts/recent?limit=-1", None, 400, "limit"),
    ("GET", "/v1/rollouts/recent?offset=-1", None, 400, "offset"),
    ("GET", "/v1/rollouts/recent?status=great", None, 400, "status"),
    ("GET", "/v1/rollouts/nobody", None, 404, "'nobody' is not stored"),
    ("POST", "/v1/rollouts/ack", {"groups": []}, 400, "groups"),
    ("POST", "/v1/rollouts/ack", {"groups": ["a b"]}, 400, "groups.0"),
    ("POST", "/v1/rollouts/renew", {"ids": ["a"]}, 400, "groups"),
    ("GET", "/v1/tasks?environment=chess", None, 400, "known: countdown, guess"),
    ("GET", "/v1/tasks", None, 400, "environment"),
    ("GET", "/v1/demonstrations?environment=guess&count=10001", None, 400, "count"),
    ("GET", "/v1/demonstrations?environment=guess&seed=-1", None, 400, "seed"),
    ("GET", "/v1/nowhere", None, 404, "/v1/nowhere"),
    ("PUT", "/v1/status", None, 405, "PUT /v1/status"),
    ("POST", "/v1/rollouts/ack", b"x" * (2 << 20), 413, "max_body_bytes"),
]


def test_bad_requests_are_4xx_json_that_name_the_field(space: Space) -> None:
    for method, path, body, status, words in BAD:
        content = body if isinstance(body, bytes) else None
        kind = {"content-type": "application/json"} if content is not None else {}
        json = None if isinstance(body, bytes) else body
        answer = space.client.request(method, path, content=content, json=json, headers=kind)
        error = ErrorResponse.model_validate_json(answer.content).error
        assert (answer.status_code, words in error.message) == (status, True), f"{method} {path}: {answer.text}"
    assert space.status().refused_requests == len(BAD)
    assert space.status().runs == ()


def test_without_the_token_only_health_answers(space: Space) -> None:
    url = str(space.client.base_url)
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/v1/status", "/v1/rollouts?run=r", "/v1/environments", "/openapi.json"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = httpx.get(f"{url}{path}", headers=headers)
            assert answer.status_code == 401
            assert ErrorResponse.model_validate_json(answer.content).error.code == "unauthorized"


def test_a_waiting_caller_that_goes_away_leases_nothing(space: Space) -> None:
    space.policy.state.mode = "500"
    space.start()
    with pytest.raises(httpx.ReadTimeout):
        space.client.get("/v1/rollouts", params={"run": "r", "wait": 30}, timeout=0.3)
    space.policy.state.mode = "ok"
    space.until(lambda: space.run().groups_ready >= 4, "READY groups")
    assert space.run().groups_leased == 0


def test_a_long_poll_is_woken_by_a_lapse(tmp_path: Path) -> None:
    with make_space(tmp_path, lease_seconds=0.5) as space:
        space.start(ready_groups=1, concurrent_groups=1)
        held = [group.id for group in space.collect(1)]
        space.policy.state.mode = "500"
        while space.run().groups_ready:
            held += [group.id for group in space.lease(wait=0).groups]
        assert {group.id for group in space.lease(wait=20).groups} <= set(held)


def test_an_error_that_is_not_an_episodes_ends_the_run_and_says_so(space: Space, tmp_path: Path) -> None:
    space.start(ready_groups=2, concurrent_groups=1)
    space.until(lambda: space.run().groups_ready == 2, "READY groups")
    db = sqlite3.connect(tmp_path / "rollouts.sqlite")
    db.execute("ALTER TABLE started RENAME TO lost")
    db.close()
    assert len(space.lease().groups) == 2
    answer = space.client.get("/v1/rollouts", params={"run": "r", "wait": 20})
    assert answer.status_code == 500
    assert "no such table" in answer.json()["error"]["message"]
    assert "no such table" in space.run().last_error


def test_a_stored_run_of_a_lost_environment_is_a_clear_error(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.put_run(RunRequest(name="old", environment="gone", policy_url="http://127.0.0.1:1"))
    store.close()
    with pytest.raises(ConfigError, match="holds a run that cannot go on: environment: 'gone' is unknown"):
        create_app(EnvConfig(folder=tmp_path, inspector=False), TOKEN)
    RolloutStore(tmp_path).close()  # the folder was released


def test_limits_on_runs_and_waiting(tmp_path: Path) -> None:
    with make_space(tmp_path, max_runs=1, max_waiting=1) as space:
        space.policy.state.mode = "500"
        space.start()
        refused = space.post("second")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_runs")
        waiter = threading.Thread(target=lambda: space.lease(wait=1))
        waiter.start()

        def overloaded() -> bool:
            answer = space.client.get("/v1/rollouts", params={"run": "r"})
            return answer.status_code == 429 and "max_waiting" in answer.json()["error"]["message"]

        space.until(overloaded, "the second waiter is refused")
        waiter.join()
        space.client.delete("/v1/runs/r")
        space.policy.state.mode = "ok"
        space.start("second")
        assert space.collect(1, "second")
