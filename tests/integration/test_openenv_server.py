"""Our Space driven by OpenEnv's own clients, by a standard MCP client, and by peers that misbehave."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport
from fastmcp.exceptions import ToolError
from openenv.core.client_types import StepResult  # type: ignore[import-untyped]
from openenv.core.env_client import EnvClient  # type: ignore[import-untyped]
from openenv.core.generic_client import GenericEnvClient  # type: ignore[import-untyped]
from openenv.core.mcp_client import MCPToolClient  # type: ignore[import-untyped]
from support_openenv import KEY, Odd, OpenSpace
from support_policy import TOKEN
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

pytestmark = pytest.mark.integration


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as open_things:
        yield open_things


@pytest.fixture
def space(stack: ExitStack, tmp_path: Path) -> OpenSpace:
    return OpenSpace(stack, tmp_path)


class Raw:
    """A socket without a client's manners."""

    def __init__(self, stack: ExitStack, space: OpenSpace, path: str, headers: dict[str, str] | None = None) -> None:
        url = f"{space.url}/openenv/{path}".replace("http", "ws", 1)
        opening = connect(url, additional_headers=KEY if headers is None else headers, proxy=None, open_timeout=60)
        self.socket: ClientConnection = stack.enter_context(opening)

    def say(self, frame: Any) -> None:
        self.socket.send(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))

    def hear(self) -> dict[str, Any]:
        return dict(json.loads(self.socket.recv(60)))

    def ask(self, kind: str, **data: Any) -> dict[str, Any]:
        self.say({"type": kind, "data": data} if kind != "state" else {"type": kind})
        return self.hear()

    def closed(self) -> int | None:
        with pytest.raises(ConnectionClosed) as end:
            self.socket.recv(60)
        return None if end.value.rcvd is None else end.value.rcvd.code


def code(frame: dict[str, Any]) -> str:
    assert frame["type"] == "error", frame
    return str(frame["data"]["code"])


# --- OpenEnv's clients, unchanged


def test_generic_client_plays_an_episode(space: OpenSpace) -> None:
    async def play() -> None:
        async with GenericEnvClient(base_url=space.at("guess"), headers=KEY) as client:
            first = await client.reset(task="secret-6", seed=5, episode_id="mine")
            assert first.observation["message"] == "guess 1-7"
            assert first.observation["messages"] == [{"role": "user", "content": "guess 1-7"}]
            assert (first.reward, first.done) == (None, False)
            assert first.metadata["task"] == "secret-6"
            middle = await client.step({"message": "4"})
            assert (middle.observation["message"], middle.reward, middle.done) == ("higher", None, False)
            state = await client.state()
            assert (state["episode_id"], state["step_count"], state["environment"]) == ("mine", 1, "guess")
            last = await client.step({"message": "6"})
            assert (last.observation["message"], last.reward, last.done) == ("correct", 1.0, True)
            assert last.metadata["success"] is True
            assert last.metadata["rewards"]["consistent"] == 0.2
            with pytest.raises(RuntimeError, match=r"is over \(done\).*EXECUTION_ERROR"):
                await client.step({"message": "6"})
            assert (await client.reset(seed=5)).done is False  # the session goes on

    asyncio.run(play())
    space.until("closed", 1)


class Typed(EnvClient[str, str, dict[str, Any]]):  # type: ignore[misc]
    """A client that somebody wrote for text environments."""

    def _step_payload(self, action: str) -> dict[str, Any]:
        return {"message": action, "metadata": {"from": "a typed client"}}

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        said = payload["observation"]["message"]
        return StepResult(observation=said, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


def test_a_typed_client_used_without_async(space: OpenSpace) -> None:
    with Typed(base_url=space.at("sort"), headers=KEY).sync() as client:
        opening = client.reset(index=0, split="train", seed=1).observation
        assert opening == client.reset(task={"id": "distinct"}, seed=1).observation  # same task and seed, same instance
        answer = " ".join(sorted(opening.split()[1:]))
        last = client.step(answer)
        assert (last.reward, last.done) == (1.0, True)


def test_an_unknown_reward_stays_null(space: OpenSpace) -> None:
    with GenericEnvClient(base_url=space.at("odd"), headers=KEY).sync() as client:
        client.reset(task="a")
        client.step({"message": "unknown"})
        last = client.step({"message": "end"})
        assert (last.done, last.reward, last.metadata["rewards"]) == (True, None, None)


def test_an_episode_ends_after_max_turns(space: OpenSpace) -> None:
    with GenericEnvClient(base_url=space.at("odd"), headers=KEY).sync() as client:
        client.reset(task="a")
        done = [client.step({"message": str(turn)}) for turn in range(3)]
        assert [step.done for step in done] == [False, False, True]
        assert (done[-1].reward, done[-1].metadata["truncated"]) == (3.0, True)


def test_many_clients_at_once_each_have_their_own_episode(space: OpenSpace) -> None:
    async def play(number: int) -> list[str]:
        async with GenericEnvClient(base_url=space.at("echo"), headers=KEY, connect_timeout_s=60) as client:
            await client.reset(seed=number)
            heard = [(await client.step({"message": f"{number}.{turn}"})).observation["message"] for turn in range(8)]
            state = await client.state()
            assert state["step_count"] == 8
            return heard

    async def all_of_them() -> list[list[str]]:
        return await asyncio.gather(*map(play, range(96)))

    assert asyncio.run(all_of_them()) == [[f"{n}.{turn}" for turn in range(8)] for n in range(96)]
    space.until("active", 0, of="sessions")
    assert space.status()["counters"]["steps"] == 96 * 8


def test_a_client_that_times_out_gets_no_silent_new_game(space: OpenSpace) -> None:
    async def play() -> None:
        async with GenericEnvClient(base_url=space.at("odd"), headers=KEY) as client:
            await client.reset(task="a")
            client._message_timeout = 0.5
            with pytest.raises(TimeoutError):
                await client.step({"message": "hang"})
            Odd.release.set()
            client._message_timeout = 60
            with pytest.raises(RuntimeError, match=r"send reset first.*SESSION_ERROR"):
                await client.step({"message": "next"})  # on a new socket
            await client.reset(task="a")
            assert (await client.step({"message": "next"})).observation["message"] == "next"

    asyncio.run(play())


def test_tool_client(space: OpenSpace) -> None:
    async def play() -> None:
        async with MCPToolClient(base_url=space.at("shop"), headers=KEY) as client:
            assert [(tool.name, tool.description) for tool in await client.list_tools()] == [
                ("price", "What one thing costs."),
                ("count", "Calls so far."),
            ]
            await client.reset(task="a", seed=1)
            assert await client.call_tool("price", thing="apple") == "3"
            assert await client.call_tool("count") == "2"  # one environment behind both calls
            with pytest.raises(RuntimeError, match="nothing known of 'pear'"):
                await client.call_tool("price", thing="pear")
            with pytest.raises(RuntimeError, match="has no tool 'steal'; known: price, count"):
                await client.call_tool("steal")
            assert (await client.state()).step_count == 0
            with pytest.raises(RuntimeError, match=r"the till is broken.*the episode is over"):
                await client.call_tool("price", thing="raise")

    asyncio.run(play())
    space.until("active", 0, of="sessions")


def test_tools_as_steps(stack: ExitStack, space: OpenSpace) -> None:
    raw = Raw(stack, space, "shop/ws")
    tools = raw.ask("step", type="list_tools")["data"]["observation"]["tools"]
    assert [tool["name"] for tool in tools] == ["price", "count"]
    assert set(tools[0]) == {"name", "description", "input_schema"}
    assert code(raw.ask("step", type="call_tool", tool_name="price", arguments={"thing": "apple"})) == "SESSION_ERROR"
    raw.ask("reset", task="a")
    right = raw.ask("step", type="call_tool", tool_name="price", arguments={"thing": "apple"})["data"]
    assert (right["reward"], right["done"]) == (None, False)
    assert right["observation"]["error"] is None
    assert right["observation"]["result"]["data"] == "3"
    wrong = raw.ask("step", type="call_tool", tool_name="price", arguments={})["data"]["observation"]
    assert wrong["error"] == {"error_type": "invalid_args", "message": "thing: nothing known of None"}
    missing = raw.ask("step", type="call_tool", tool_name="no")["data"]["observation"]["error"]
    assert missing["error_type"] == "tool_not_found"
    rpc = raw.ask("mcp", jsonrpc="2.0", id=4, method="tools/call", params={"name": "count"})["data"]
    assert (rpc["id"], rpc["result"]["isError"], rpc["result"]["is_error"]) == (4, False, False)
    assert raw.ask("step", message="3")["data"]["done"] is False


def test_standard_mcp_client(space: OpenSpace) -> None:
    async def play() -> None:
        transport = StreamableHttpTransport(f"{space.at('shop')}/mcp", headers=KEY)
        async with Client(transport) as client:
            assert [tool.name for tool in await client.list_tools()] == ["price", "count"]
            answer = await client.call_tool("price", {"thing": "apple"})
            assert answer.content[0].text == "3"
            assert (await client.call_tool("count", {})).content[0].text == "2"
            with pytest.raises(ToolError, match="nothing known of 'pear'"):
                await client.call_tool("price", {"thing": "pear"})
            await client.ping()

    asyncio.run(play())
    space.until("active", 0, of="sessions")  # the client ends its session


def test_openenv_validate_passes(space: OpenSpace) -> None:
    url = f"{space.url}/s/{TOKEN}/openenv/shop"  # the command takes no headers
    command = [str(Path(sys.executable).with_name("openenv")), "validate", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verdict: PASS" in done.stdout
    assert done.stdout.count("PASS ") == 6
    assert TOKEN not in space.http.get("/shop/openapi.json").text


# --- who may connect


def test_sockets_without_the_token_are_refused_before_they_are_accepted(stack: ExitStack, space: OpenSpace) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong-token-0123456789"}):
        for path in ("guess/ws", "guess/mcp", "nothing/ws"):
            with pytest.raises(InvalidStatus) as refused:
                Raw(stack, space, path, headers)
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body)["error"]["code"] == "unauthorized"
    assert space.status()["counters"]["opened"] == 0
    assert Raw(stack, space, f"guess/ws?key={TOKEN}", {}).ask("reset")["type"] == "observation"


def test_unknown_environments_and_paths(stack: ExitStack, space: OpenSpace) -> None:
    for path in ("nothing/ws", "guess/other"):
        with pytest.raises(InvalidStatus) as refused:
            Raw(stack, space, path)
        assert refused.value.response.status_code == 404
    answer = space.http.get("/nothing/health")
    assert answer.status_code == 404
    assert "known: countdown, echo, guess, odd, reverse-text, shop, sort, wordle" in answer.json()["error"]["message"]
    assert space.http.get("/guess/nothing").status_code == 404


# --- frames


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("{", "INVALID_JSON"),
        ("", "INVALID_JSON"),
        (b"\x00\xff\xfe", "INVALID_JSON"),
        ('{"type": "step", "data": {"message": NaN}}', "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ('{"type": 3}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": []}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {}, "more": 1}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"task": "z"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"index": 99}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"index": 0, "split": "test"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": 5}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "x", "more": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"type": "call_tool", "tool_name": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "jump"}', "UNKNOWN_TYPE"),
        ("{}", "UNKNOWN_TYPE"),
    ],
)
def test_a_bad_frame_is_answered_and_changes_nothing(
    stack: ExitStack, space: OpenSpace, frame: str | bytes, expected: str
) -> None:
    raw = Raw(stack, space, "echo/ws")
    raw.ask("reset", task="a", seed=1)
    raw.ask("step", message="one")
    before = raw.ask("state")
    raw.say(frame)
    answer = raw.hear()
    assert code(answer) == expected
    assert answer["data"]["message"]
    assert raw.ask("state") == before
    assert raw.ask("step", message="two")["data"]["observation"]["message"] == "two"
    assert space.status()["errors"] == {expected: 1}


def test_text_in_binary_frames_is_read_and_close_closes(stack: ExitStack, space: OpenSpace) -> None:
    raw = Raw(stack, space, "echo/ws")
    raw.say(b'{"type": "reset", "data": {"task": "a", "speed": 9}}')
    assert raw.hear()["data"]["metadata"]["left_out"] == ["speed"]
    raw.say({"type": "close"})
    assert raw.closed() == 1000
    space.until("closed", 1)


def test_a_frame_beyond_the_limit_closes_the_socket(stack: ExitStack, tmp_path: Path) -> None:
    space = OpenSpace(stack, tmp_path, max_frame_bytes=2_000)
    raw = Raw(stack, space, "echo/ws")
    raw.ask("reset")
    raw.say({"type": "step", "data": {"message": "x" * 2_000}})
    answer = raw.hear()
    assert (code(answer), "openenv.max_frame_bytes" in answer["data"]["message"]) == ("VALIDATION_ERROR", True)
    assert raw.closed() == 1009
    space.until("frames_too_large", 1)
    space.until("active", 0, of="sessions")


def test_a_message_in_pieces_without_end_is_cut(stack: ExitStack, space: OpenSpace) -> None:
    raw = Raw(stack, space, "echo/ws")
    raw.ask("reset")

    def pieces() -> Iterator[bytes]:
        yield b'{"type": "'
        for _ in range(40):
            yield b"x" * (1 << 20)

    with pytest.raises(ConnectionClosed) as end:
        raw.socket.send(pieces(), text=True)
    assert end.value.rcvd is None or end.value.rcvd.code == 1009
    space.until("active", 0, of="sessions")


# --- sessions: leases, places, resuming


def test_idle_sockets_and_sessions_end_with_their_lease(stack: ExitStack, tmp_path: Path) -> None:
    space = OpenSpace(stack, tmp_path, lease_seconds=2)
    played, silent, stuck = (Raw(stack, space, "echo/ws") for _ in range(3))
    played.ask("reset")
    stuck_sender = threading.Thread(target=_send_half, args=(stuck.socket,))
    stuck_sender.start()
    for raw in (played, silent):
        answer = raw.hear()
        assert (code(answer), "openenv.lease_seconds" in answer["data"]["message"]) == ("SESSION_ERROR", True)
        assert raw.closed() == 1001
    stuck_sender.join(100)
    assert not stuck_sender.is_alive()
    named = rpc(space, "echo", "openenv/session/create")["result"]["session_id"]
    space.until("reaped", 1)
    assert "lease" in rpc(space, "echo", "openenv/session/close", session_id=named)["error"]["message"]
    space.until("active", 0, of="sessions")


def _send_half(socket: ClientConnection) -> None:
    """Begin a message and never end it, until the peer is gone."""
    gone = threading.Event()

    def pieces() -> Iterator[str]:
        yield '{"type": "'
        while not gone.wait(0.1):
            yield "x"

    try:
        socket.send(pieces())
    except ConnectionClosed:
        gone.set()


def rpc(space: OpenSpace, environment: str, method: str, **params: Any) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    answer = space.http.post(f"/{environment}/mcp", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_session_is_resumed_by_its_id_within_its_lease(stack: ExitStack, space: OpenSpace) -> None:
    name = rpc(space, "guess", "openenv/session/create")["result"]["session_id"]
    first = Raw(stack, space, f"guess/ws?session_id={name}")
    first.ask("reset", task="secret-6", episode_id="mine")
    first.ask("step", message="4")
    first.socket.close()
    again = Raw(stack, space, f"guess/ws?session_id={name}")
    state = again.ask("state")["data"]
    assert (state["episode_id"], state["step_count"], state["session_id"]) == ("mine", 1, name)
    third = Raw(stack, space, f"guess/ws?session_id={name}")  # a half-open socket must not lock its owner out
    assert third.ask("step", message="6")["data"]["reward"] == 1.0
    assert code(again.hear()) == "SESSION_ERROR"
    assert again.closed() == 1001
    assert rpc(space, "guess", "openenv/session/close", session_id=name)["result"]["closing"] is True
    third.socket.close()
    space.until("active", 0, of="sessions")
    lost = Raw(stack, space, f"guess/ws?session_id={name}")
    assert code(lost.hear()) == "SESSION_ERROR"
    assert lost.closed() == 1001
    other = Raw(
        stack, space, f"sort/ws?session_id={rpc(space, 'guess', 'openenv/session/create')['result']['session_id']}"
    )
    assert code(other.hear()) == "SESSION_ERROR"


def test_a_session_waits_for_a_place_and_has_it_in_turn(stack: ExitStack, tmp_path: Path) -> None:
    space = OpenSpace(stack, tmp_path, sessions=1, wait_seconds=100)
    first, second, third, fourth = (Raw(stack, space, "echo/ws") for _ in range(4))
    first.ask("reset")
    for count, raw in enumerate((second, third, fourth), 1):
        raw.say({"type": "reset", "data": {"task": "abc"[count - 1]}})
        space.until("waiting", count, of="sessions")
    third.socket.close()  # whoever leaves, leaves the queue
    space.until("waiting", 2, of="sessions")
    first.socket.close()
    assert second.hear()["data"]["metadata"]["task"] == "a"
    assert space.status()["sessions"] == {"active": 1, "attached": 1, "waiting": 1, "most": 1}
    second.say({"type": "close"})
    assert fourth.hear()["data"]["metadata"]["task"] == "c"
    assert space.status()["counters"]["refused"] == 0


def test_waiting_has_a_deadline_and_a_bound(stack: ExitStack, tmp_path: Path) -> None:
    space = OpenSpace(stack, tmp_path, sessions=2, waiting=3, wait_seconds=6)
    sockets = [Raw(stack, space, "echo/ws") for _ in range(12)]
    for raw in sockets:
        raw.say({"type": "reset"})
    answers = [raw.hear() for raw in sockets]
    served = [answer for answer in answers if answer["type"] == "observation"]
    refused = [answer["data"] for answer in answers if answer["type"] == "error"]
    assert len(served) == 2
    assert [(r["code"], r["max_sessions"]) for r in refused] == [("CAPACITY_REACHED", 2)] * 10
    assert sum("openenv.wait_seconds" in r["message"] for r in refused) == 3
    assert sum("openenv.waiting" in r["message"] for r in refused) == 7
    for raw, answer in zip(sockets, answers, strict=True):
        if answer["type"] == "error":
            assert raw.closed() == 1013
    assert space.status()["counters"]["refused"] == 10
    late = rpc(space, "echo", "openenv/session/create")["error"]
    assert late["data"] == {"code": "CAPACITY_REACHED"}


# --- environments that misbehave


@pytest.mark.parametrize(
    ("text", "found", "counter"),
    [
        ("raise", "KeyError: 'a hidden fault'", "raised"),
        ("exit", "SystemExit: 3", "raised"),
        ("surrogate", "is not valid text", None),
        ("huge", "openenv.max_frame_bytes", None),
    ],
)
def test_a_fault_of_the_environment_ends_its_episode_alone(
    stack: ExitStack, tmp_path: Path, text: str, found: str, counter: str | None
) -> None:
    space = OpenSpace(stack, tmp_path, max_frame_bytes=1 << 20)
    raw = Raw(stack, space, "odd/ws")
    raw.ask("reset", task="a")
    answer = raw.ask("step", message=text)
    assert code(answer) == "EXECUTION_ERROR"
    assert found in answer["data"]["message"]
    after = raw.ask("step", message="one")
    assert (code(after), "the episode ended" in after["data"]["message"]) == ("SESSION_ERROR", True)
    assert raw.ask("reset", task="a")["type"] == "observation"
    assert raw.ask("step", message="one")["type"] == "observation"
    instances = dict.fromkeys(who for who, _ in Odd.used)
    assert len(Odd.used) == 2, instances
    if counter is not None:
        assert space.status()["counters"][counter] == 1


def test_a_reward_that_is_no_number_is_an_error_and_not_0(stack: ExitStack, space: OpenSpace) -> None:
    raw = Raw(stack, space, "odd/ws")
    raw.ask("reset", task="a")
    raw.ask("step", message="nan")
    answer = raw.ask("step", message="end")
    assert code(answer) == "EXECUTION_ERROR"
    assert "a reward is a finite number" in answer["data"]["message"]


def test_a_reset_that_raises_leaves_no_episode(stack: ExitStack, space: OpenSpace) -> None:
    raw = Raw(stack, space, "odd/ws")
    raw.ask("reset", task="a")
    assert "no such level" in raw.ask("reset", task="b")["data"]["message"]
    assert code(raw.ask("step", message="one")) == "SESSION_ERROR"


def test_what_hangs_is_left_alone_and_takes_nobody_elses_thread(stack: ExitStack, tmp_path: Path) -> None:
    space = OpenSpace(stack, tmp_path, threads=1, step_seconds=0.5)
    stuck = Raw(stack, space, "odd/ws")
    stuck.ask("reset", task="a")
    answer = stuck.ask("step", message="hang")
    assert (code(answer), "its deadline" in answer["data"]["message"]) == ("EXECUTION_ERROR", True)
    assert space.status()["hung_threads"] == 1
    assert code(stuck.ask("step", message="more")) == "SESSION_ERROR"
    assert stuck.ask("reset", task="a")["type"] == "observation"  # another instance, another thread
    assert [text for _, text in Odd.used] == ["hang"]
    Odd.release.set()
    end = threading.Event()
    for _ in range(600):
        if space.status()["hung_threads"] == 0:
            break
        end.wait(0.1)
    assert space.status()["hung_threads"] == 0
    assert space.status()["counters"]["deadlines"] == 1


# --- HTTP


def test_http_routes(space: OpenSpace) -> None:
    get, post = space.http.get, space.http.post
    assert get("/guess/health").json() == {"status": "healthy"}
    assert get("/guess/metadata").json()["name"] == "guess"
    schema = get("/guess/schema").json()
    assert schema["action"]["required"] == ["message"]
    assert "CallTool" in get("/shop/schema").json()["action"]["$defs"]
    assert get("/guess/state").json()["episode_id"] is None
    opening = post("/guess/reset", json={"seed": 3}).json()
    assert (opening["observation"]["message"], opening["reward"]) == ("guess 1-7", None)
    assert post("/guess/reset").status_code == 200
    lonely = post("/guess/step", json={"action": {"message": "4"}})
    assert (lonely.status_code, lonely.json()["error"]["code"]) == (409, "SESSION_ERROR")
    name = rpc(space, "guess", "openenv/session/create")["result"]["session_id"]
    post("/guess/reset", json={"session_id": name, "task": "secret-4"})
    won = post("/guess/step", json={"session_id": name, "action": {"message": "4"}, "timeout_s": 50}).json()
    assert (won["reward"], won["done"]) == (1.0, True)
    assert get("/guess/state", params={"session_id": name}).json()["done"] is True
    assert post("/guess/step", json={"action": 5}).status_code == 422
    assert post("/guess/step", content=b"{").status_code == 422
    assert get("/guess/state", params={"session_id": "x"}).status_code == 404


def test_task_api(space: OpenSpace) -> None:
    get, post = space.http.get, space.http.post
    assert get("/sort/list_environments").json() == ["sort"]
    assert get("/sort/sort/splits").json() == [{"name": "train", "type": "train"}]
    assert post("/sort/sort/tasks", json={"split": "train"}).json() == {
        "tasks": [{"id": "distinct"}, {"id": "repeats"}],
        "env_name": "sort",
    }
    assert post("/sort/sort/num_tasks", json={"split": "train"}).json() == {"num_tasks": 2}
    assert post("/sort/sort/task", json={"split": "train", "index": 1}).json() == {"task": {"id": "repeats"}}
    ranged = post("/sort/sort/task_range", json={"split": "train", "start": 1, "stop": None})
    assert ranged.json() == {"tasks": [{"id": "repeats"}]}
    assert post("/sort/sort/task", json={"split": "train", "index": 2}).status_code == 400
    assert post("/sort/sort/tasks", json={"split": "test"}).status_code == 400
    assert post("/sort/guess/tasks", json={"split": "train"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b"{}", -32600),
        (b"[]", -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"resources/list"}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"price"}}', -32000),
        (b'{"jsonrpc":"2.0","id":1,"method":"openenv/session/close","params":{}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"openenv/session/close","params":{"session_id":"x"}}', -32000),
    ],
)
def test_bad_json_rpc(space: OpenSpace, body: bytes, expected: int) -> None:
    answer = space.http.post("/shop/mcp", content=body)
    assert answer.status_code == 200
    assert answer.json()["error"]["code"] == expected


def test_mcp_over_http_and_its_socket(stack: ExitStack, space: OpenSpace) -> None:
    greeting = rpc(space, "shop", "initialize", protocolVersion="2025-03-26", capabilities={})["result"]
    assert greeting["protocolVersion"] == "2025-03-26"
    noted = space.http.post("/shop/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (noted.status_code, noted.content) == (202, b"")
    gone = space.http.post(
        "/shop/mcp", headers={"mcp-session-id": "x"}, json={"jsonrpc": "2.0", "id": 1, "method": "ping"}
    )
    assert gone.status_code == 404
    raw = Raw(stack, space, "shop/mcp")
    for number in (1, 2):
        raw.say({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": "count"}})
        assert raw.hear()["result"]["data"] == str(number)
    raw.say("{")
    assert raw.hear()["error"]["code"] == -32700
    raw.say({"jsonrpc": "2.0", "id": 3, "method": "openenv/session/create"})
    own = raw.hear()["result"]["session_id"]  # its own, not another one
    raw.say({"jsonrpc": "2.0", "id": 4, "method": "openenv/session/close", "params": {"session_id": own}})
    assert "ends with the socket" in raw.hear()["error"]["message"]
    assert space.status()["counters"]["opened"] == 2  # one by initialize


def test_clean_and_rude_ends_leave_no_traceback(
    stack: ExitStack, space: OpenSpace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for end in ("close", "drop", "vanish"):
        raw = Raw(stack, space, "echo/ws")
        raw.ask("reset")
        if end == "close":
            raw.say({"type": "close"})
            raw.closed()
        elif end == "drop":
            raw.socket.close()
        else:
            raw.socket.socket.close()
    space.until("closed", 3)
    assert [record.getMessage() for record in caplog.records] == []
