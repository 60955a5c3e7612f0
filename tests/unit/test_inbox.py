"""The rollout inbox against Spaces on loopback: one that says exactly what a test wants, and the real one."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from support_groups import chain, group, rollout
from support_policy import TOKEN, make_policy, served
from support_tiny import wait_until

from env_space.app import create_app
from env_space.config import EnvConfig
from sync.errors import InvalidRequest, PeerUnavailable
from sync.schema.base import Identity
from sync.schema.rollouts import (
    AckRequest,
    AckResponse,
    Group,
    LeaseResponse,
    RenewRequest,
    RunInfo,
    RunRequest,
    ServiceStatus,
)
from trainer_node.advantages import grpo
from trainer_node.config import Evaluation, TrainConfig
from trainer_node.curriculum import TaskStats
from trainer_node.evaluate import evaluate
from trainer_node.inbox import InboxSettings, RolloutInbox
from trainer_node.peers import Peer
from trainer_node.samples import TokenSample

pytestmark = pytest.mark.integration
SYNCS = {Identity(1, 0): 1, Identity(1, 1): 2, Identity(1, 3): 4}


class Scripted:
    """A Space that hands out the groups of `ready` and notes what it is told; a `status` but 200 refuses leases."""

    def __init__(self, *groups: Group) -> None:
        self.ready, self.acked, self.renewed = deque(groups), list[str](), list[str]()
        self.boot, self.status, self.seconds, self.limits = "boot-1", 200, 60.0, list[int]()
        self.app = FastAPI()
        self.app.add_api_route("/v1/rollouts", self._lease, methods=["GET"])
        self.app.add_api_route("/v1/rollouts/ack", self._ack, methods=["POST"])
        self.app.add_api_route("/v1/rollouts/renew", self._renew, methods=["POST"])

    async def _lease(self, run: str, limit: int, wait: float) -> Response:
        assert (run, 0 < wait <= 5) == ("r", True)
        if self.status != 200:
            return Response('{"error": {"code": "told", "message": "told to"}}', self.status)
        self.limits.append(limit)
        if not self.ready:
            await asyncio.sleep(0.02)
        groups = tuple(self.ready.popleft() for _ in range(min(limit, len(self.ready))))
        answer = LeaseResponse(boot_id=self.boot, lease="l", seconds=self.seconds, groups=groups)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _ack(self, request: Request) -> Response:
        names = AckRequest.model_validate_json(await request.body()).groups
        self.acked += names
        return Response(AckResponse(changed=len(names), ignored=0).model_dump_json(), media_type="application/json")

    async def _renew(self, request: Request) -> Response:
        names = RenewRequest.model_validate_json(await request.body()).groups
        self.renewed += names
        return Response(AckResponse(changed=len(names), ignored=0).model_dump_json(), media_type="application/json")


class Rig:
    """An inbox at work on one Space, and the events it emitted."""

    def __init__(self, inbox: RolloutInbox, events: list[dict[str, Any]]) -> None:
        self.inbox, self.events = inbox, events

    def take(self, count: int) -> list[TokenSample]:
        """The next samples, as the trainer reads them."""
        return [self.inbox.rollout_buffer.get(timeout=30) for _ in range(count)]

    def train(self, count: int) -> list[str]:
        """Train the next samples; the names of their groups."""
        names = [sample.group for sample in self.take(count)]
        self.inbox.trained(names)
        return names

    def count(self, what: str) -> int:
        return self.inbox.counts.groups[what]

    def trouble(self) -> str:
        """Why the run must end, or nothing."""
        try:
            self.inbox.check_health(1.0)
        except PeerUnavailable as error:
            return str(error)
        return ""


@contextmanager
def leasing(
    urls: Sequence[str], *, step: int = 8, size: int = 2, oversample: float = 1.5, seconds: float = 30.0,
    sync_of: Callable[[Identity], int | None] = SYNCS.get, run: str = "r", ask: Callable[[Peer], object] = bool,
) -> Iterator[Rig]:  # fmt: skip
    """An inbox for steps of `step` samples in groups of `size`, started; stopped at the end."""
    events: list[dict[str, Any]] = []
    settings = InboxSettings(run, step, size, oversample, vocabulary=300, peer_seconds=seconds)
    with ExitStack() as stack:
        peers = [stack.enter_context(closing(Peer(url, TOKEN))) for url in urls]
        inbox = RolloutInbox(
            peers, settings, sync_of, ask, lambda event, **facts: events.append({"event": event} | facts)
        )
        stack.callback(inbox.stop)
        inbox.start()
        yield Rig(inbox, events)


def live(*numbers: int, curriculum: str | None = None) -> list[Group]:
    """Groups of two with spread."""
    return [group(f"g{n}", [1.0, 0.0], curriculum=curriculum) for n in numbers]


def flat(*numbers: int) -> list[Group]:
    """Groups of two that all succeeded."""
    return [group(f"z{n}", [1.0, 1.0]) for n in numbers]


def test_samples_arrive_with_their_advantages() -> None:
    space = Scripted(group("a", [1.0, 0.0, None, 0.3]), group("b", [0.1, 0.2], "1@1"))
    with served(space.app) as url, leasing([url]) as rig:
        made = rig.take(5)
        assert [s.group for s in made] == ["a", "a", "a", "b", "b"]
        assert [s.advantage for s in made] == pytest.approx(grpo([1.0, 0.0, 0.3]) + grpo([0.1, 0.2]))
        assert [s.model_version for s in made] == [1, 1, 1, 2, 2]
        assert (rig.count("received"), rig.inbox.counts.rollouts) == (2, 6)


def test_a_group_is_acked_when_all_of_it_was_trained() -> None:
    two_chains = rollout("a", 0, 1.0, chain([5, 1], [0, 1]), chain([6, 1], [0, 1]))
    space = Scripted(Group(id="a", run="r", task="t", rollouts=(two_chains, rollout("a", 1, 0.0))), *live(1))
    with served(space.app) as url, leasing([url]) as rig:
        assert rig.train(2) == ["a", "a"]
        assert rig.train(3) == ["a", "g1", "g1"]
        wait_until(lambda: len(space.acked) == 2)
        assert sorted(space.acked) == ["a", "g1"]
        space.ready.extend(live(2))
        rig.train(1)
        space.ready.extend(live(3))
        wait_until(lambda: rig.count("received") == 4)
        assert "g2" not in space.acked, "half trained"
    assert sorted(space.acked) == ["a", "g1"], "the end acks nothing that was not trained"


def test_what_was_trained_last_is_acked_at_the_end() -> None:
    space = Scripted(*live(1))
    with served(space.app) as url:
        with leasing([url]) as rig:
            rig.train(2)
        assert space.acked == ["g1"]


def test_a_group_that_comes_again_is_not_trained_twice() -> None:
    space = Scripted(*live(1), *live(1), *flat(1), *flat(1))
    with served(space.app) as url, leasing([url]) as rig:
        wait_until(lambda: rig.count("delivered_again") == 2)
        assert rig.train(2) == ["g1", "g1"]
        wait_until(lambda: space.acked == ["g1"])
        space.ready.extend(live(1))
        wait_until(lambda: space.acked == ["g1", "g1"], 30)
        assert rig.inbox.rollout_buffer.empty()
        assert (rig.count("received"), rig.count("delivered_again")) == (2, 3)


def test_leases_are_renewed_until_a_group_is_done() -> None:
    space = Scripted(*live(1, 2), *flat(1))
    space.seconds = 0.3
    with served(space.app) as url, leasing([url]) as rig:
        wait_until(lambda: {"g1", "g2", "z1"} <= set(space.renewed))
        assert rig.train(2) == ["g1", "g1"]
        wait_until(lambda: "g1" in space.acked)
        space.renewed.clear()
        wait_until(lambda: space.renewed.count("g2") > 2)
        assert "g1" not in space.renewed
        assert "z1" in space.renewed, "set aside is not done"


def test_a_lease_of_the_real_space_does_not_lapse_while_a_group_waits(tmp_path: Path) -> None:
    with real_space(tmp_path, lease_seconds=0.8) as (peer, request):
        peer.post("/v1/runs", request.model_copy(update={"concurrent_groups": 1, "ready_groups": 1}), RunInfo)
        with leasing([peer.url], step=2, size=2, oversample=1.0) as rig:
            held = rig.take(2)
            for _ in range(30):
                threading.Event().wait(0.1)
            assert run_info(peer).redelivered == 0
            assert rig.count("delivered_again") == 0
            rig.inbox.trained([s.group for s in held])
            wait_until(lambda: run_info(peer).groups_acked > 0)


def test_zero_spread_groups_fill_a_step_only_when_others_are_too_few() -> None:
    space = Scripted(*live(1, 2, 3), *flat(1, 2))
    with served(space.app) as url, leasing([url]) as rig:
        assert rig.train(6) == ["g1", "g1", "g2", "g2", "g3", "g3"]
        wait_until(lambda: rig.count("received") == 5)
        assert rig.inbox.rollout_buffer.empty(), "five groups are fewer than 1.5 steps of four"
        space.ready.extend(flat(3))
        assert rig.train(2) == ["z3", "z3"], "the newest"
        space.ready.extend(live(4, 5, 6, 7))
        assert rig.train(8) == ["g4", "g4", "g5", "g5", "g6", "g6", "g7", "g7"]
        wait_until(lambda: len(space.acked) == 8)
        assert (rig.count("zero_spread"), rig.count("fillers")) == (3, 1)


def test_a_step_that_is_full_needs_no_fillers() -> None:
    space = Scripted(*live(1, 2, 3), *flat(1, 2), *live(4))
    with served(space.app) as url, leasing([url]) as rig:
        wait_until(lambda: rig.count("received") == 6)
        assert rig.train(8) == ["g1", "g1", "g2", "g2", "g3", "g3", "g4", "g4"]
        wait_until(lambda: sorted(space.acked) == ["g1", "g2", "g3", "g4"])
        assert rig.count("fillers") == 0
        assert rig.inbox.rollout_buffer.empty()


def test_fillers_carry_no_gradient() -> None:
    space = Scripted(*flat(1, 2, 3, 4, 5, 6))
    with served(space.app) as url, leasing([url]) as rig:
        made = rig.take(8)
        assert all(not s.token_advantages.any() and s.advantage == 0 for s in made)
        assert {s.group for s in made} == {"z3", "z4", "z5", "z6"}


def test_a_policy_that_always_succeeds_does_not_starve_the_trainer(tmp_path: Path) -> None:
    with real_space(tmp_path) as (peer, request):
        peer.post("/v1/runs", request, RunInfo)
        with leasing([peer.url]) as rig:
            names = [name for _ in range(6) for name in rig.train(8)]
            assert all(names.count(name) == 2 for name in names)
            assert rig.count("fillers") * 2 >= len(names)
            wait_until(lambda: run_info(peer).groups_acked >= len(set(names)))
        assert run_info(peer).redelivered == 0
        assert rig.count("zero_spread") == rig.count("received")
        info, stats = run_info(peer), rig.inbox.take_stats()
        assert info.groups_acked <= rig.count("received")
        assert sum(s.groups for s in stats.values()) == rig.count("received")
        assert {(s.useful, s.success / s.groups) for s in stats.values()} == {(0.0, 1.0)}


def test_what_is_set_aside_is_bounded_and_acked() -> None:
    space = Scripted(*(g for n in range(12) for g in (*live(n), *flat(n))))
    with served(space.app) as url, leasing([url], oversample=50.0) as rig:
        for _ in range(12):
            rig.train(2)
        wait_until(lambda: rig.count("zero_spread") == 12)
        wait_until(lambda: sum(name.startswith("z") for name in space.acked) == 8)
        assert rig.count("fillers") == 0, "the newest step's worth stays at hand, the older ones are done"


def test_stale_groups_are_counted_and_acked() -> None:
    space = Scripted(*live(1, 2))
    with served(space.app) as url, leasing([url], seconds=0.3) as rig:
        for sample in rig.take(2):
            rig.inbox.stale(sample.group)
        wait_until(lambda: space.acked == ["g1"])
        assert rig.count("stale_samples") == 2
        assert rig.inbox.take_harness() == {}


def test_a_policy_that_does_not_follow_ends_the_run_at_the_deadline() -> None:
    space = Scripted()
    with served(space.app) as url, leasing([url], seconds=1.0) as rig:
        rig.inbox.stale("g0")
        numbers = iter(range(10_000))

        def stuck() -> bool:
            space.ready.extend(live(next(numbers)))
            for sample in rig.take(2):
                rig.inbox.stale(sample.group)
            return bool(rig.trouble())

        wait_until(stuck)
        assert f"every rollout from {url} was too old (setting max_staleness) for more than 1 s" in rig.trouble()
        space.ready.extend(live(10_000))
        rig.train(2)
        rig.inbox.check_health(1.0)


def test_refused_groups_are_named_and_end_the_run_at_the_deadline() -> None:
    space = Scripted(group("u0", [1.0, 0.0], "7@9"))
    with served(space.app) as url, leasing([url], seconds=0.5) as rig:
        wait_until(lambda: space.acked == ["u0"])
        assert rig.count("refused") == 1
        assert rig.events == [
            {"event": "group_refused", "group": "u0", "why": "rollout u0.0: weights version 7@9 is not an ancestor of "
             "this run's head"}
        ]  # fmt: skip
        numbers = iter(range(1, 10_000))

        def silent() -> bool:
            space.ready.append(group(f"u{next(numbers)}", [1.0, 0.0], "7@9"))
            return bool(rig.trouble())

        wait_until(silent)
        assert "weights version 7@9" in rig.trouble()


def test_a_space_that_restarts_is_noticed() -> None:
    space = Scripted(*live(1))
    with served(space.app) as url, leasing([url]) as rig:
        rig.train(2)
        wait_until(lambda: space.acked == ["g1"])
        space.boot = "boot-2"
        space.ready.extend([*live(1), *live(2)])
        assert rig.train(2) == ["g2", "g2"], "what was trained before the restart is not trained again"
        wait_until(lambda: space.acked == ["g1", "g1", "g2"])
        assert rig.count("space_restarts") == 1
        assert rig.events == [{"event": "space_restarted", "peer": url, "boot": "boot-2"}]
        assert rig.inbox.counts.boots == {url: "boot-2"}


def test_a_space_that_is_away_for_a_while_is_waited_for() -> None:
    space = Scripted(*live(1, 2))
    space.status = 503
    with served(space.app) as url, leasing([url]) as rig:
        wait_until(lambda: "answered 503: told to" in rig.inbox._trouble)
        rig.inbox.check_health(30)
        space.status = 200
        assert rig.train(2) == ["g1", "g1"]


def test_a_space_that_is_gone_is_named_at_the_deadline() -> None:
    with served(Scripted().app) as url:
        pass
    with leasing([url], seconds=0.4) as rig:
        assert rig.trouble() == ""
        wait_until(lambda: "did not answer" in rig.trouble())
        assert f"no rollouts from {url} for" in rig.trouble()
        assert "setting peer_seconds" in rig.trouble()


def test_a_space_that_lost_its_disk_is_asked_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with real_space(first) as (before, request), real_space(second) as (after, _):
        asked: list[Peer] = []

        def ask(peer: Peer) -> None:
            asked.append(peer)
            peer.post("/v1/runs", request, RunInfo)

        with leasing([before.url], ask=ask, run="r") as rig:
            rig.take(4)
            (peer,) = rig.inbox._peers
            peer._client.base_url = httpx.URL(after.url)  # the same address, another machine behind it
            wait_until(lambda: len(asked) == 2)
            assert rig.count("space_disks_lost") == 1
            groups = {s.group for s in rig.take(24)}
            assert len(groups) == 12
            assert rig.count("space_restarts") == 1
            assert rig.trouble() == ""


def test_a_refused_lease_ends_the_run() -> None:
    space = Scripted()
    space.status = 400
    with served(space.app) as url, leasing([url]) as rig:
        wait_until(lambda: rig.inbox._error is not None)
        with pytest.raises(InvalidRequest, match="refused: told to"):
            rig.inbox.check_health(30)


def test_a_defect_in_a_leasing_thread_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))

    def broken(_: Identity) -> int:
        raise RuntimeError("a defect")

    space = Scripted(*live(1))
    with served(space.app) as url, leasing([url], sync_of=broken) as rig:
        wait_until(lambda: bool(seen))
        with pytest.raises(RuntimeError, match="a defect"):
            rig.inbox.check_health(30)


def test_stop_does_not_hang_on_a_full_queue() -> None:
    many = rollout("a", 0, 1.0, *(chain([n, 1], [0, 1]) for n in range(9)))
    space = Scripted(Group(id="a", run="r", task="t", rollouts=(many, rollout("a", 1, 0.0))))
    with served(space.app) as url:
        with leasing([url], step=4) as rig:
            wait_until(rig.inbox.rollout_buffer.full)
        assert not any(thread.name.startswith("inbox ") for thread in threading.enumerate())
        assert space.acked == []
        assert rig.inbox.rollout_buffer.qsize() == 8


def test_no_more_is_leased_than_there_is_room_for() -> None:
    space = Scripted(*live(*range(30)))
    with served(space.app) as url, leasing([url], step=4) as rig:
        wait_until(rig.inbox.rollout_buffer.full)
        assert rig.count("received") == 4
        rig.train(3)
        wait_until(lambda: rig.count("received") == 5)
        assert max(space.limits) <= 4


def test_statistics_and_harness_are_taken_once() -> None:
    space = Scripted(*live(1, curriculum="2@1"), *live(2, curriculum="10@1"), *flat(1))
    with served(space.app) as url, leasing([url]) as rig:
        wait_until(lambda: rig.count("received") == 3)
        assert rig.inbox.take_harness() == {}, "nothing was trained yet"
        rig.train(4)
        assert rig.inbox.take_harness() == {"curriculum": ("2@1", "10@1")}
        assert rig.inbox.take_harness() == {}
        assert rig.inbox.take_stats() == {"secret-1": TaskStats(groups=3, useful=2.0, success=2.0)}
        assert rig.inbox.take_stats() == {}


def test_several_spaces_feed_one_queue() -> None:
    one, two = Scripted(*live(1)), Scripted(*live(2))
    with served(one.app) as first, served(two.app) as second, leasing([first, second]) as rig:
        assert sorted(rig.train(4)) == ["g1", "g1", "g2", "g2"]
        wait_until(lambda: (one.acked, two.acked) == (["g1"], ["g2"]))


def test_an_evaluation_on_the_real_space_checks_the_version(tmp_path: Path) -> None:
    with real_space(tmp_path) as (peer, request):
        config = TrainConfig(
            run="unused", env_urls=(peer.url,), policy_url=request.policy_url, evaluation=Evaluation(episodes=14)
        )
        score = evaluate(peer, config, "eval-1", Identity.parse("3@1"))
        assert score == (1.0, 1.0, 14, 0, "3@1")
        with pytest.raises(InvalidRequest, match=r"used weights \['3@1'\], expected 4@1"):
            evaluate(peer, config, "eval-2", Identity.parse("4@1"))


# --- the real Space


class _Flaky(Peer):
    """A peer whose every fourth answer is lost on the way back."""

    lost = 0

    def _raw(self, *args: Any, **parts: Any) -> httpx.Response:
        answer = super()._raw(*args, **parts)
        type(self).lost += 1
        if self.lost % 4 == 0:
            raise PeerUnavailable("lost on the way back")
        return answer


def test_an_evaluation_survives_lost_answers(tmp_path: Path) -> None:
    with real_space(tmp_path, lease_seconds=1.0) as (peer, request), closing(_Flaky(peer.url, TOKEN)) as flaky:
        config = TrainConfig(
            run="unused", env_urls=(peer.url,), policy_url=request.policy_url, evaluation=Evaluation(episodes=14)
        )
        score = evaluate(flaky, config, "eval-3", Identity.parse("3@1"))
    assert score == (1.0, 1.0, 14, 0, "3@1")
    assert _Flaky.lost > 4


@contextmanager
def real_space(folder: Path, **settings: Any) -> Iterator[tuple[Peer, RunRequest]]:
    """A real environment Space with a scripted policy, and a request for run r in groups of two."""
    config = EnvConfig(folder=folder / "env", inspector=False, log="none", **settings)
    with ExitStack() as stack:
        policy_url = stack.enter_context(served(make_policy(TOKEN)))
        peer = stack.enter_context(closing(Peer(stack.enter_context(served(create_app(config, TOKEN))), TOKEN)))
        request = RunRequest(name="r", environment="guess", policy_url=policy_url, group_size=2, ready_groups=8)
        yield peer, request


def run_info(peer: Peer) -> RunInfo:
    (info,) = peer.get("/v1/status", ServiceStatus).runs
    return info


def test_the_queue_is_the_one_trl_reads() -> None:
    with leasing([]) as rig:
        assert isinstance(rig.inbox.rollout_buffer, queue.Queue)
        assert rig.inbox.metrics_queue.empty()
        assert rig.inbox.rollout_buffer.maxsize == 16, "two steps: more would only make older data"
