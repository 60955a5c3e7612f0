"""`deltawire inference --engine vllm` as a process: it follows a run and serves what a Space serves, nothing of vLLM's.

Needs vLLM's build for CPUs, which has an environment of its own: `make test-vllm`. It computes in float32 here, so that
its logprobs can be compared with transformers' closely.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.devhub import ROOT
from support_tiny import assert_close_to, make_checkpoint, prompts, publishing, reference, state_of, wait_until
from vllm_live import edited

from sync import Publisher, Stamp, open_store
from sync.schema.calls import (
    CallResult,
    GenerateCall,
    GenerateRequest,
    GenerateResponse,
    Message,
    Sampling,
    ScoreRequest,
    ScoreResponse,
    ScoreSequence,
    SyncStatus,
)
from sync.schema.sessions import Session, SessionKey
from sync.tools.checkout import checkout

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
TOKEN = "a-token-of-sixteen-and-more"
KEY = {"Authorization": f"Bearer {TOKEN}"}
USER = Message(role="user", content="Guess a number between 1 and 99.")


class Space:
    """One process and a client of it."""

    def __init__(self, child: subprocess.Popen[bytes], url: str) -> None:
        self.child, self.url = child, url
        self.http = httpx.Client(base_url=url, headers=KEY, timeout=120)

    def status(self) -> SyncStatus:
        return SyncStatus.model_validate_json(self.http.get("/sync/status").content)

    def generate(self, *calls: GenerateCall) -> list[CallResult]:
        answer = self.http.post("/v1/generate", content=GenerateRequest(calls=calls).model_dump_json())
        assert answer.status_code == 200, answer.text
        return list(GenerateResponse.model_validate_json(answer.content).calls)

    def reach(self, version: str) -> None:
        """Poke until it serves `version`."""
        self.http.post("/sync/poke")
        wait_until(lambda: self.status().version == version, 60)


@contextmanager
def space(run: Path, home: Path, *flags: object) -> Iterator[Space]:
    """The command, ended by SIGTERM; its end must be clean."""
    ready = home / "ready.json"
    ready.unlink(missing_ok=True)
    words = ["--run", run, "--folder", home / "mirror", "--engine", "vllm", "--ready-file", ready, "--dtype", "float32"]
    limits = ["--max-slots", 16, "--max-len", 512, "--max-queued", 64, "--prefill-tokens", 256]
    command = [sys.executable, "-m", "deltawire", "inference", *map(str, [*words, *limits, *flags])]
    log = home / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "DELTAWIRE_TOKEN": TOKEN}, stdout=file, stderr=file
        ) as child,
    ):
        try:
            wait_until(lambda: ready.exists() or child.poll() is not None, 60)
            assert ready.exists(), log.read_text()[-4000:]
            found = Space(child, json.loads(ready.read_text())["url"])
            yield found
            found.http.close()
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0, log.read_text()[-4000:]
        finally:
            if child.poll() is None:
                child.kill()


class Run:
    """A run in a folder: what was published, and each version as a checkpoint."""

    def __init__(self, home: Path, publisher: Publisher, state: dict[str, Any]) -> None:
        self.path, self.version, self._home, self._publisher, self._state = home / "run", 0, home, publisher, state

    def publish(self) -> str:
        """One more random edit; returns its identity."""
        self.version += 1
        self._state = edited(self._state, self.version)
        self._publisher.flush(self._state, Stamp(step=self.version, sync=self.version))
        return f"{self.version}@1"

    def checkpoint(self, version: str) -> Path:
        """The version as a folder."""
        number = version.split("@", maxsplit=1)[0]
        folder = self._home / f"v{number}"
        if not folder.exists():
            checkout(open_store(str(self.path)), number, folder)
        return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    home = tmp_path_factory.mktemp("run")
    first = make_checkpoint(home / "first", tied=False)
    store = open_store(str(home / "run"), create=True, writable=True)
    with publishing(store, first) as publisher:
        yield Run(home, publisher, state_of(first))


@pytest.fixture(scope="module")
def serving(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    with space(run.path, tmp_path_factory.mktemp("space")) as found:
        answer = found.http.get("/ready")
        assert answer.status_code in (200, 503)
        wait_until(lambda: found.http.get("/ready").status_code == 200, 120)
        yield found


ROUTES = [
    ("GET", "/ready"), ("GET", "/sync/status"), ("POST", "/sync/poke"), ("POST", "/v1/generate"),
    ("POST", "/v1/score"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"),
]  # fmt: skip
VLLMS = [
    ("POST", "/pause"), ("POST", "/resume"), ("POST", "/update_weights"), ("POST", "/start_weight_update"),
    ("POST", "/collective_rpc"), ("POST", "/weight_checker"), ("POST", "/reset_prefix_cache"), ("POST", "/sleep"),
    ("GET", "/server_info"), ("POST", "/inference/v1/generate"), ("POST", "/tokenize"), ("GET", "/version"),
    ("GET", "/openapi.json"), ("GET", "/docs"), ("POST", "/v1/load_lora_adapter"), ("POST", "/invocations"),
]  # fmt: skip


def test_only_health_answers_without_the_token_and_no_route_of_vllm_at_all(serving: Space) -> None:
    assert httpx.get(serving.url + "/health").json() == {"status": "alive"}
    for method, path in ROUTES + VLLMS:
        for headers in {}, {"Authorization": "Bearer wrong"}:
            assert httpx.request(method, serving.url + path, headers=headers).status_code == 401
    for method, path in VLLMS:
        assert serving.http.request(method, path).status_code == 404


def test_every_route_answers_as_with_the_torch_engine(run: Run, serving: Space) -> None:
    serving.reach(run.publish())
    version = f"{run.version}@1"
    status = serving.status()
    assert (status.ready, status.digest_failures, status.engine["kv_policy"]) == (True, 0, "recompute")
    assert set(status.ways.values()) == {"plan"}
    assert "model.layers.0.self_attn.q_proj.weight" in status.ways
    first = serving.generate(GenerateCall(id="a", messages=(USER,), sampling=Sampling(max_tokens=6, seed=7)))[0]
    folder = run.checkpoint(version)
    ids = [*first.prompt_ids, *first.output_ids]
    assert_close_to(first.logprobs, reference(folder, ids, len(first.prompt_ids)), 1e-3)
    assert [span.version for span in first.weight_versions] == [version]
    again = GenerateCall(id="b", prefix_ids=tuple(ids), messages=(Message(role="user", content="higher"),))
    second, bad = serving.generate(again, GenerateCall(id="c", prefix_ids=(5, 999_999)))
    assert second.prompt_ids[: len(ids)] == tuple(ids)
    assert bad.error is not None
    assert bad.error.code == "unknown_token"
    asked = ScoreRequest(sequences=(ScoreSequence(ids=tuple(ids), start=3),), temperature=0.5)
    scores = ScoreResponse.model_validate_json(serving.http.post("/v1/score", content=asked.model_dump_json()).content)
    assert scores.version == version
    assert_close_to(scores.logprobs[0], reference(folder, ids, 3, 0.5), 1e-3)
    chat = serving.http.post("/v1/chat/completions", json={"messages": [USER.model_dump()], "max_tokens": 5}).json()
    assert chat["weight_version"] == version
    assert chat["usage"]["completion_tokens"] <= 5
    assert serving.http.get("/v1/models").json()["data"][0]["weight_version"] == version


def test_updates_while_calls_run_cost_no_call_and_name_every_token(run: Run, serving: Space) -> None:
    """32 seeded calls at once, long prompts among them: what vLLM on a CPU dies of when it gets the seeds."""
    serving.reach(f"{run.version}@1")
    asked = [(ids * 8)[: 20 + 9 * i] for i, ids in enumerate(prompts(32, 9))]
    calls = tuple(
        GenerateCall(id=str(i), prefix_ids=tuple(ids), sampling=Sampling(max_tokens=180, seed=i))
        for i, ids in enumerate(asked)
    )
    made: list[CallResult] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            made.extend(serving.generate(*calls))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    versions = {f"{run.version}@1"}
    try:
        for _ in range(6):
            wait_until(lambda: int(serving.status().engine["active"]) > 8)
            versions.add(run.publish())
            serving.reach(f"{run.version}@1")
    finally:
        stop.set()
        thread.join()
    assert made
    assert len(made) % 32 == 0
    seen, most = set(), 0
    for ids, result in zip(asked * (len(made) // 32), made, strict=True):
        assert result.error is None
        assert [s.start for s in result.weight_versions] == [0, *(s.end for s in result.weight_versions[:-1])]
        assert result.weight_versions[-1].end == len(result.output_ids) == len(result.logprobs)
        whole = [*ids, *result.output_ids]
        most = max(most, len(result.weight_versions))
        for span in result.weight_versions:
            seen.add(span.version)
            wanted = reference(run.checkpoint(span.version), whole, len(ids))[span.start : span.end]
            assert_close_to(result.logprobs[span.start : span.end], wanted, 2e-3)
    assert most > 1
    assert seen <= versions
    assert serving.status().engine["recomputed_tokens"]


@pytest.mark.timeout(600)
def test_64_sessions_at_once_through_20_updates_are_recorded_exactly(run: Run, serving: Space) -> None:
    """Each talks until the last update is served; its record has the engine's ids, and every logprob is that of the
    version named."""
    serving.reach(f"{run.version}@1")
    first = run.version

    async def talk(http: httpx.AsyncClient, number: int, done: asyncio.Event) -> Session:
        opened = SessionKey.model_validate((await http.post("/v1/sessions", json={"max_tokens": 40})).json())
        key = {"Authorization": f"Bearer {opened.key}"}
        while not done.is_set():
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"Guess {number} of {turn}."})
                body = {"model": "policy", "messages": messages}
                answer = await http.post("/v1/chat/completions", json=body, headers=key)
                assert answer.status_code == 200, answer.text
                messages.append(answer.json()["choices"][0]["message"])
        return Session.model_validate_json((await http.get(f"/v1/sessions/{opened.id}")).content)

    async def all_of_them() -> list[Session]:
        done = asyncio.Event()
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(base_url=serving.url, headers=KEY, timeout=120, limits=limits) as http:
            talks = [asyncio.create_task(talk(http, n, done)) for n in range(64)]
            for _ in range(20):
                await asyncio.to_thread(run.publish)
                await asyncio.to_thread(serving.reach, f"{run.version}@1")
            done.set()
            return await asyncio.gather(*talks)

    seen = set()
    for session in asyncio.run(all_of_them()):
        assert session.calls
        assert not session.findings.keys() - {"fork:repeated", "fork:history_differs"}
        calls = {call.id: call for call in session.calls}
        for call in session.calls:
            if call.parent:
                before = calls[call.parent].prompt_ids + calls[call.parent].output_ids
                assert call.prompt_ids[: len(before)] == before
            whole = [*call.prompt_ids, *call.output_ids]
            for span in call.weight_versions:
                seen.add(span.version)
                wanted = reference(run.checkpoint(span.version), whole, len(call.prompt_ids))[span.start : span.end]
                assert_close_to(call.logprobs[span.start : span.end], wanted, 2e-3)
        assert sum(sum(chain.chain.mask) for chain in session.chains) == sum(len(c.output_ids) for c in session.calls)
    assert len(seen) > 10
    assert seen <= {f"{version}@1" for version in range(first, run.version + 1)}


def test_calls_of_a_lost_caller_are_given_up(serving: Space) -> None:
    calls = tuple(GenerateCall(id=str(i), prefix_ids=(5, 6), sampling=Sampling(max_tokens=500)) for i in range(8))
    body = GenerateRequest(calls=calls).model_dump_json()
    wait_until(lambda: serving.status().engine["active"] == 0)
    before = serving.status().engine["output_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        serving.http.post("/v1/generate", content=body, timeout=0.15)
    wait_until(lambda: serving.status().engine["active"] == serving.status().engine["queued"] == 0)
    assert int(serving.status().engine["output_tokens"]) - int(before) < 8 * 500
    assert serving.generate(GenerateCall(id="a", prefix_ids=(5,), sampling=Sampling(max_tokens=2)))[0].error is None


def test_too_many_calls_are_refused_together(serving: Space) -> None:
    calls = tuple(GenerateCall(id=str(i), prefix_ids=(5,), sampling=Sampling(max_tokens=500)) for i in range(65))
    answer = serving.http.post("/v1/generate", content=GenerateRequest(calls=calls).model_dump_json())
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    long = serving.generate(GenerateCall(id="a", prefix_ids=(5,) * 512))[0]
    assert long.error is not None
    assert long.error.code == "prompt_too_long"


def test_a_restart_resumes_from_the_mirror(run: Run, tmp_path: Path) -> None:
    with space(run.path, tmp_path, "--kv-policy", "salt") as one:
        wait_until(lambda: one.http.get("/ready").status_code == 200, 120)
    with space(run.path, tmp_path, "--kv-policy", "drain") as two:
        wait_until(lambda: two.http.get("/ready").status_code == 200, 120)
        assert two.status().bytes_fetched == 0
        assert two.status().version == f"{run.version}@1"
        result = two.generate(GenerateCall(id="a", prefix_ids=(5, 6, 7), sampling=Sampling(max_tokens=8)))[0]
        wanted = reference(run.checkpoint(f"{run.version}@1"), [5, 6, 7, *result.output_ids], 3)
        assert np.allclose(result.logprobs, wanted, atol=1e-3)
