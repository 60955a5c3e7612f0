"""Our client against OpenEnv's own server as a process, and against our own Space."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support_openenv import Odd, OpenSpace, Upstream
from support_policy import TOKEN, make_policy, served
from support_tiny import wait_until

from env_space.environments import Environment, Turn
from env_space.openenv.client import describe, remote
from env_space.openenv.remote import TOKEN_VARIABLE
from sync.errors import InvalidRequest, PeerUnavailable

pytestmark = pytest.mark.integration


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Upstream]:
    server = Upstream(tmp_path)
    yield server
    server.stop()


def begun(name: str, task: str = "default") -> tuple[Environment, str]:
    env = remote(name)()
    return env, env.reset(task, Random(7))[0].content


def text_of(turn: Turn) -> str:
    return "\n".join(message.content for message in turn.messages)


def test_an_episode_on_the_server_of_openenv(upstream: Upstream) -> None:
    cls = remote(f"openenv:{upstream.url}")
    assert cls.tasks() == ("default",)
    assert cls.max_turns == 64
    env, opening = begun(cls.name)
    assert opening == f"hello {Random(7).randrange(2**31)}"
    assert env.reward() is None
    assert text_of(env.step("nothing")) == "nothing"
    assert env.reward() is None  # null is not 0
    assert env.step("one").done is False
    last = env.step("end")
    assert (text_of(last), last.done) == ("end", True)
    assert env.reward() == {"reward": 2.0}
    assert env.success() is True
    with pytest.raises(PeerUnavailable):
        env.step("more")


def test_many_threads_each_have_their_own_episode(upstream: Upstream) -> None:
    def play(number: int) -> list[str]:
        env, _ = begun(f"openenv:{upstream.url}")
        said = [text_of(env.step(f"{number}.{turn}")) for turn in range(20)]
        assert env.step("end").done
        return said

    with ThreadPoolExecutor(8) as pool:
        played = list(pool.map(play, range(16)))  # 8 at once, the server's most
    assert played == [[f"{number}.{turn}" for turn in range(20)] for number in range(16)]


def test_a_full_server_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    server = Upstream(tmp_path, sessions=1)
    try:
        first, _ = begun(f"openenv:{server.url}")
        with pytest.raises(PeerUnavailable, match="no free session for 1 s"):
            begun(f"openenv:{server.url}#wait_seconds=1")
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.append(begun(f"openenv:{server.url}#wait_seconds=90")[1]))
        waiting.start()
        first.step("end")  # closes its socket
        waiting.join(100)
        assert found == [f"hello {Random(7).randrange(2**31)}"]
    finally:
        server.stop()


def test_a_killed_and_restarted_server_ends_the_episode_as_infrastructure(tmp_path: Path) -> None:
    server = Upstream(tmp_path)
    name = f"openenv:{server.url}"
    env, _ = begun(name)
    env.step("one")
    port = server.port
    server.stop()
    with pytest.raises(PeerUnavailable, match="the episode ended with its socket"):
        env.step("two")
    again = Upstream(tmp_path, port=port)
    try:
        with pytest.raises(PeerUnavailable, match="the connection was lost"):
            env.step("three")  # never on a new, never reset environment
        assert env.reward() == {"reward": 1.0}
        assert text_of(begun(name)[0].step("fresh")) == "fresh"
    finally:
        again.stop()


def test_after_a_slow_step_nothing_more_is_read_from_its_socket(upstream: Upstream) -> None:
    env, _ = begun(f"openenv:{upstream.url}#step_seconds=0.5")
    with pytest.raises(PeerUnavailable, match=r"did not answer within 0\.5 s"):
        env.step("sleep 3")
    with pytest.raises(PeerUnavailable, match="the connection was lost"):
        env.step("one")  # the late answer to "sleep 3" would be read as the answer to this


def test_a_server_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    name = f"openenv:http://127.0.0.1:{port}"
    with pytest.raises(PeerUnavailable, match="was not ready within 1 s"):
        remote(f"{name}#ready_seconds=1").tasks()
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(remote(name).tasks()))
    asking.start()
    server = Upstream(tmp_path, port=port)
    try:
        asking.join(120)
        assert found == [("default",)]
    finally:
        server.stop()


def test_what_the_server_refuses_and_raises(upstream: Upstream) -> None:
    env, _ = begun(f"openenv:{upstream.url}")
    with pytest.raises(InvalidRequest, match="the echo failed") as raised:
        env.step("raise")
    assert raised.value.code == "EXECUTION_ERROR"
    with pytest.raises(InvalidRequest, match="tasks of"):
        begun(f"openenv:{upstream.url}", "another")
    with pytest.raises(InvalidRequest, match="no demonstrations"):
        env.demonstrate("default", Random(1))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as open_things:
        yield open_things


@pytest.fixture
def space(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenSpace:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return OpenSpace(stack, tmp_path)


def test_our_own_space_from_afar(space: OpenSpace) -> None:
    cls = remote(f"openenv:{space.at('guess')}")
    assert cls.tasks() == tuple(f"secret-{n}" for n in range(1, 8))
    env, opening = begun(cls.name, "secret-6")
    assert opening == "guess 1-7"
    assert text_of(env.step("4")) == "higher"
    assert env.reward() is None
    last = env.step("6")
    assert (text_of(last), last.done) == ("correct", True)
    assert env.reward() == {"reward": 1.0, "found": 1.0, "consistent": 0.2, "malformed": 0.0}
    assert env.success() is True
    space.until("closed", 1)


def test_an_unfinished_episode_gives_its_place_back(space: OpenSpace) -> None:
    env, _ = begun(f"openenv:{space.at('echo')}", "a")
    assert space.status()["sessions"]["active"] == 1
    del env
    space.until("active", 0, of="sessions")


def test_tools_from_afar(space: OpenSpace) -> None:
    about = describe(f"openenv:{space.at('shop')}")
    assert [name for name, _, _ in about.tools] == ["price", "count"]
    env: Any = remote(f"openenv:{space.at('shop')}")()
    assert [tool.name for tool in env.tools] == ["price", "count"]
    env.reset("a", Random(1))
    assert env.call("price", {"thing": "apple"}) == "3"
    with pytest.raises(ValueError, match="nothing known of 'pear'"):
        env.call("price", {"thing": "pear"})
    assert env.call("count", {}) == "3"
    assert env.step("3").done is False


def test_a_refused_action_is_told_to_the_policy(space: OpenSpace) -> None:
    env, _ = begun(f"openenv:{space.at('echo')}", "b")
    env._asked({"message": "once"})  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest) as refused:
        env._asked({"words": "once"})  # type: ignore[attr-defined]
    assert refused.value.code == "VALIDATION_ERROR"
    assert text_of(env.step("x")) == "x"


def test_a_deadline_of_the_space_ends_the_episode(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    space = OpenSpace(stack, tmp_path, step_seconds=0.3)
    env, _ = begun(f"openenv:{space.at('odd')}", "a")
    with pytest.raises(InvalidRequest, match="its deadline"):
        env.step("hang")
    Odd.release.set()


def test_a_wrong_token_is_an_error_at_once(space: OpenSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-0123456789")
    with pytest.raises(InvalidRequest, match=f"answers 401.*{TOKEN_VARIABLE}") as refused:
        remote(f"openenv:{space.at('sort')}").tasks()
    assert "another-token" not in str(refused.value)


def test_the_rollout_service_rolls_a_server_by_its_name(space: OpenSpace, stack: ExitStack, tmp_path: Path) -> None:
    rolling = OpenSpace(stack, tmp_path / "rolling")
    policy = stack.enter_context(served(make_policy(TOKEN)))
    name = f"openenv:{space.at('guess')}"
    run = {"name": "r", "environment": name, "policy_url": policy, "group_size": 2, "concurrent_groups": 2}
    answer = rolling.http.post(f"{rolling.url}/v1/runs", json={**run, "ready_groups": 2})
    assert answer.status_code == 200, answer.text
    leased = rolling.http.get(f"{rolling.url}/v1/rollouts", params={"run": "r", "limit": 1, "wait": 30}).json()
    rollouts = leased["groups"][0]["rollouts"]
    assert [(r["environment"], r["status"], r["success"]) for r in rollouts] == [(name, "done", True)] * 2
    assert {r["reward"] for r in rollouts} == {1.0}  # the policy plays by binary search
    assert rollouts[0]["task"].startswith("secret-")


def test_a_server_that_is_away_or_dies_under_a_run_is_waited_for_and_no_reward_is_made_up(
    stack: ExitStack, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    rolling = OpenSpace(stack, tmp_path / "rolling")
    policy = stack.enter_context(served(make_policy(TOKEN)))
    name = f"openenv:http://127.0.0.1:{port}#ready_seconds=1&turns=2"
    run = {"name": "r", "environment": name, "policy_url": policy, "group_size": 2, "concurrent_groups": 2}
    answer = rolling.http.post(f"{rolling.url}/v1/runs", json={**run, "ready_groups": 2})
    assert answer.status_code == 200, answer.text

    def info() -> dict[str, Any]:
        found: dict[str, Any] = rolling.http.get(f"{rolling.url}/v1/status").json()["runs"][0]
        return found

    def take() -> list[dict[str, Any]]:
        query: dict[str, str | int] = {"run": "r", "limit": 1, "wait": 30}
        groups = rolling.http.get(f"{rolling.url}/v1/rollouts", params=query).json()["groups"]
        rolling.http.post(f"{rolling.url}/v1/rollouts/ack", json={"groups": [group["id"] for group in groups]})
        return [rollout for group in groups for rollout in group["rollouts"]]

    wait_until(lambda: "was not ready" in info()["last_error"])
    tasks = rolling.http.get(f"{rolling.url}/v1/tasks", params={"environment": name})
    assert (tasks.status_code, tasks.json()["error"]["code"]) == (503, "peer_unavailable")
    server = Upstream(tmp_path, port=port)
    seen = take()
    assert info()["last_error"] == ""
    server.stop()
    failures = info()["infrastructure_failures"]
    wait_until(lambda: info()["infrastructure_failures"] > failures + 4)
    again = Upstream(tmp_path, port=port)
    try:
        for _ in range(6):
            seen += take()
    finally:
        again.stop()
    assert {rollout["status"] for rollout in seen} <= {"truncated", "agent_error"}
    assert any(rollout["status"] == "truncated" for rollout in seen)
    for rollout in seen:
        assert rollout["reward"] == (2.0 if rollout["status"] == "truncated" else None)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openenv:ftp://host", "is not openenv:http"),
        ("openenv:host", "is not openenv:http"),
        ("openenv:https://user:secret@host", "is not openenv:http"),
        ("openenv:https://host:99999", "is no URL"),
        ("openenv:https://host#turns=0", "turns"),
        ("openenv:https://host#speed=9", "known: turns"),
    ],
)
def test_names_that_are_no_server(name: str, found: str) -> None:
    with pytest.raises(InvalidRequest, match=found):
        remote(name)


class _Rude:
    """A socket server that answers the frames of one client with what `says` gives."""

    def __init__(self, says: Callable[[str], Any]) -> None:
        from websockets.sync.server import serve

        def handle(connection: Any) -> None:
            for frame in connection:
                connection.send(says(frame))

        self.server = serve(handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join(60)


@pytest.mark.parametrize("says", ["not json", "[1]", '{"type":"observation"}', b"\x00\xff"])
def test_answers_that_are_no_openenv_end_the_episode(says: str | bytes) -> None:
    from env_space.openenv.remote import Options, Server, Talk

    rude = _Rude(lambda _: says)
    try:
        talk = Talk(Server(rude.url, Options()))
        with pytest.raises(PeerUnavailable):
            talk.ask({"type": "reset", "data": {}}, 60.0)
        with pytest.raises(PeerUnavailable, match="the connection was lost"):
            talk.ask({"type": "step", "data": {}}, 60.0)
    finally:
        rude.stop()
