"""Parts of OpenEnv, both ways: what of an action is text, what a policy is told, threads that hang, places in turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from pydantic import TypeAdapter

from env_space.config import OpenEnvLimits
from env_space.environments.guess import Guess
from env_space.openenv import remote
from env_space.openenv.client import _messages, _tool_text
from env_space.openenv.remote import Options, _key, _text_field
from env_space.openenv.sessions import Session, Sessions
from env_space.openenv.threads import NotStarted, Threads
from env_space.openenv.wire import TEXT_ACTION, TOOL_ACTION, encoded
from sync.errors import InvalidRequest

pytestmark = pytest.mark.unit

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("properties", "required", "field"),
    [
        ({"message": TEXT}, ["message"], "message"),
        ({"message": TEXT, "metadata": {"type": "object"}}, [], "message"),
        ({"message": TEXT, "tone": TEXT}, ["message"], "message"),
        ({"code": TEXT, "metadata": {"type": "object"}}, ["code"], "code"),
        ({"code": TEXT, "timeout": {"type": "number"}}, ["code"], "code"),
        ({"code": TEXT, "language": TEXT}, ["code"], None),
        ({"message": TEXT, "channel": TEXT}, ["message", "channel"], None),
        ({"move": {"type": "integer"}}, ["move"], None),
        ({}, [], None),
    ],
)
def test_the_text_field_of_an_action(properties: dict[str, Any], required: list[str], field: str | None) -> None:
    assert _text_field({"type": "object", "properties": properties, "required": required})[0] == field


@pytest.mark.parametrize("adapter", [TEXT_ACTION, TOOL_ACTION])
def test_the_text_field_of_our_own_actions(adapter: TypeAdapter[Any]) -> None:
    assert _text_field(adapter.json_schema()) == ("message", "message")


def test_fields_are_named_where_there_is_no_text() -> None:
    both = {"type": "object", "properties": {"row": {}, "column": {}, "metadata": {}}}
    assert _text_field(both) == (None, "row, column")


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, ["a", "b"]),
        ({"messages": [], "message": ""}, []),
        ({"echoed": "x", "steps": 1, "metadata": {"secret": "y"}, "done": False, "reward": None}, ["x"]),
        ({"board": [1, 2], "steps": 1, "metadata": {"secret": "y"}}, ['{"board":[1,2],"steps":1}']),
        ({"a": "x", "b": "y"}, ['{"a":"x","b":"y"}']),
        ({}, ["{}"]),
    ],
)
def test_what_the_policy_is_told(observation: dict[str, Any], said: list[str]) -> None:
    assert [message.content for message in _messages(observation)] == said


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"data": "7", "content": [{"type": "text", "text": "seven"}]}, "7"),
        ({"data": None, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ("plain", "plain"),
        ({"rows": [1]}, '{"rows":[1]}'),
        (None, "null"),
    ],
)
def test_the_text_of_a_tools_answer(result: object, text: str) -> None:
    assert _tool_text(result) == text


def test_task_keys() -> None:
    assert [_key(t, "train-0") for t in ("a", 3, {"id": "b"}, {"name": "c"}, {}, None, "", "x" * 129)] == [
        "a", "3", "b", "c", "train-0", "train-0", "train-0", "train-0",
    ]  # fmt: skip


def test_options_in_a_name() -> None:
    url, options = Options.parse("https://host:8/path/#turns=8&step_seconds=0.5")
    assert (url, options.turns, options.step_seconds, options.reset_seconds) == ("https://host:8/path", 8, 0.5, 60.0)


def test_an_answer_has_a_bound_and_is_text() -> None:
    assert encoded({"a": "x"}, 9) == '{"a":"x"}'
    for data in ({"a": "xy"}, {"a": "\ud800"}):
        with pytest.raises(InvalidRequest) as refused:
            encoded(data, 9)
        assert refused.value.code == "EXECUTION_ERROR"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def test_threads_that_hang_are_replaced_up_to_a_bound() -> None:
    release = threading.Event()

    async def test() -> None:  # a second is for a slow machine: what hangs must have begun by then
        threads = Threads(2)
        for hung in range(1, 5):
            with pytest.raises(TimeoutError):
                await threads.run(lambda: release.wait(100), 1.0)
            assert threads.hung == min(hung, 4)
            if hung < 4:
                assert await threads.run(lambda: hung, 60) == hung  # noqa: B023 - awaited within the turn
        with pytest.raises(NotStarted):
            await threads.run(lambda: 5, 0.05)
        release.set()
        assert await threads.run(lambda: 6, 60) == 6
        for _ in range(6_000):
            if threads.hung:
                await asyncio.sleep(0.01)
        assert threads.hung == 0
        assert await asyncio.gather(*(threads.run(partial(int, n), 60) for n in range(20))) == list(range(20))
        threads.close()

    run(test)


@pytest.mark.parametrize(("raised", "seen"), [(SystemExit(3), RuntimeError), (StopIteration(), RuntimeError),
                                              (ValueError("x"), ValueError)])  # fmt: skip
def test_whatever_a_thread_raises_reaches_its_waiter(raised: BaseException, seen: type[BaseException]) -> None:
    def fault() -> None:
        raise raised

    async def test() -> None:
        threads = Threads(1)
        with pytest.raises(seen):
            await threads.run(fault, 60)
        assert await threads.run(lambda: 1, 60) == 1
        threads.close()

    run(test)


def test_places_are_given_in_turn_and_never_lost() -> None:
    async def test() -> None:
        sessions = Sessions(OpenEnvLimits(sessions=1, waiting=8, wait_seconds=100), threads=1)
        first = await sessions.open(Guess)
        order: list[int] = []

        async def wait(number: int) -> Session:
            session = await sessions.open(Guess)
            order.append(number)
            return session

        waiting = [asyncio.create_task(wait(n)) for n in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        await asyncio.gather(waiting[0], return_exceptions=True)
        sessions.close(first)
        sessions.close(first)  # a second time gives no second place
        waiting[1].cancel()  # when its place was given but not yet taken
        await asyncio.gather(waiting[1], return_exceptions=True)
        second = await waiting[2]
        assert not waiting[3].done()
        sessions.close(second)
        await waiting[3]
        assert order == [2, 3]
        assert sessions.status()["sessions"] == {"active": 1, "attached": 0, "waiting": 0, "most": 1}
        await sessions.stop()

    run(test)


def test_threads_that_come_first_together_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Barrier(8)

    class Slow(remote._LoopThread):
        def __init__(self) -> None:
            time.sleep(0.1)
            super().__init__()

    monkeypatch.setattr(remote, "_LoopThread", Slow)
    remote._only_loop.cache_clear()

    def first() -> Any:
        begun.wait(60)
        return remote._loop()

    with ThreadPoolExecutor(8) as pool:
        loops = [future.result(60) for future in [pool.submit(first) for _ in range(8)]]
    assert len({id(loop) for loop in loops}) == 1
