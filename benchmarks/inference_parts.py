"""What the inference benchmark runs over: a model, patches, streams of calls, an HTTP server, memory of a process."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sync.safetensors_io import MappedCheckpoint
from sync.schema.base import Identity
from sync.schema.calls import Sampling, SyncStatus

State = dict[str, NDArray[Any]]
Patches = dict[str, tuple[NDArray[Any], NDArray[Any]]]
TOKEN = secrets.token_hex(16)
CHECK = Sampling(max_tokens=64)
TURNS = 4
NEW_TOKENS = 24
"""Tokens that a turn of a conversation adds to the answer before it."""


def make_model(folder: Path, layers: int) -> int:
    """Write a random tied Qwen3 (768 wide, 32 k tokens; 18 layers have 138 M parameters); returns its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer_node.model import tiny_tokenizer

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(60_000)]
    tokenizer = tiny_tokenizer((" ".join(words[i : i + 20]) for i in range(0, len(words), 20)), vocabulary=32_768)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=32_768, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )).to(torch.bfloat16)  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(sum(p.numel() for p in model.parameters()))


def shaped(folder: Path) -> State:
    """A checkpoint's bits."""
    return dict(MappedCheckpoint(folder).state)


def state_of(folder: Path) -> State:
    """Private copies of a checkpoint's bits, flat."""
    return {name: np.array(bits).reshape(-1) for name, bits in shaped(folder).items()}


def nudged(state: State, share: float, seed: int) -> Patches:
    """One ULP up or down for a share of the elements of every tensor."""
    rng = np.random.default_rng(seed)
    found: Patches = {}
    for name, bits in state.items():
        index = np.flatnonzero(rng.random(len(bits), dtype=np.float32) < share).astype(np.int32)
        found[name] = index, bits[index] + np.where(rng.random(len(index)) < 0.5, 1, -1).astype(np.uint16)
    return found


def back(state: State, patches: Patches) -> Patches:
    """What undoes a patch."""
    return {name: (index, state[name][index]) for name, (index, _) in patches.items()}


@contextmanager
def bare_engine(**settings: Any) -> Iterator[Any]:
    """Our engine with vLLM in this process, without weights."""
    from inference_space.engines.vllm_core import prepare_environment

    prepare_environment(threads=1, kv_cache_gib=1)
    from inference_space.engines.vllm_engine import VllmEngine

    engine = VllmEngine(**({"max_slots": 32, "max_len": 1024, "prefill_tokens": 2048} | settings))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def engine_on(folder: Path, **settings: Any) -> Iterator[Any]:
    """Our engine with vLLM in this process, running on a checkpoint."""
    with bare_engine(**settings) as engine:
        engine.load(folder, Identity(1, 0))
        engine.resume()
        yield engine


class Streams:
    """Calls in a closed loop: whenever one is answered, its stream asks the next. `next_call(stream, ids so far)` gives
    the ids. Count with the engine's own counters; `latencies` holds seconds per call."""

    def __init__(
        self, engine: Any, streams: int, next_call: Callable[[int, list[int]], list[int]], sampling: Sampling = CHECK
    ) -> None:
        self._engine, self._next, self._on, self._sampling = engine, next_call, True, sampling
        self._lock, self._left = threading.Condition(), streams
        self.latencies: list[float] = []
        self.failed = ""
        for stream in range(streams):
            self._ask(stream, [])

    def _ask(self, stream: int, last: list[int]) -> None:
        from inference_space.engines.base import Call

        ids, started = self._next(stream, last), time.perf_counter()
        (future,) = self._engine.generate([Call(ids, self._sampling)])

        def done(made: Future[Any]) -> None:
            if made.exception() is not None:
                self.failed = str(made.exception())
            elif self._on:
                self.latencies.append(time.perf_counter() - started)
                self._ask(stream, ids + made.result().output_ids)
                return
            with self._lock:
                self._left -= 1
                self._lock.notify_all()

        future.add_done_callback(done)

    def stop(self) -> None:
        """Ask no more and wait for what is under way."""
        self._on = False
        with self._lock:
            if not self._lock.wait_for(lambda: self._left == 0, 300):
                raise SystemExit("calls did not end in 300 s")
        if self.failed:
            raise SystemExit(f"a call failed: {self.failed}")


def fresh_prompt(length: int) -> Callable[[int, list[int]], list[int]]:
    """Every call a random prompt of its own."""
    rng = random.Random(1)
    return lambda _stream, _last: [rng.randrange(300, 32_000) for _ in range(length)]


def conversation() -> Callable[[int, list[int]], list[int]]:
    """TURNS calls, each the one before with NEW_TOKENS more; then another conversation."""
    rng, turn = random.Random(2), dict[int, int]()

    def following(stream: int, last: list[int]) -> list[int]:
        number = turn.get(stream, 0)
        turn[stream] = (number + 1) % TURNS
        new = [rng.randrange(300, 32_000) for _ in range(NEW_TOKENS)]
        return new if number == 0 else last + new

    return following


class Standing:
    """Stands where the app wants a follower: always ready, and never anything new."""

    def status(self) -> SyncStatus:
        """One version for ever."""
        return SyncStatus(ready=True, version="0@1")

    def poke(self) -> None:
        """Nothing to do."""


@contextmanager
def space_of(engine: Any) -> Iterator[str]:
    """The Space's app on the loopback, served by a thread of this process; gives its URL."""
    import uvicorn

    from inference_space.app import create_app

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app: Any = create_app(engine, Standing(), token=TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def agents(url: str, streams: int, seconds: float, tokens: int = CHECK.max_tokens) -> dict[str, float]:
    """That many agents in a process of their own for that long: calls, their median latency."""
    command = [sys.executable, __file__, url, str(streams), str(seconds), str(tokens)]
    done = subprocess.run(
        command, input=TOKEN, capture_output=True, text=True, timeout=seconds + 300, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout))


async def _agent(http: Any, until: float, tokens: int, latencies: list[float], rng: random.Random) -> None:
    while time.monotonic() < until:
        opened = await http.post("/v1/sessions", json={"max_tokens": tokens})
        key, messages = {"Authorization": f"Bearer {opened.json()['key']}"}, []
        for _ in range(TURNS):
            text = " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(NEW_TOKENS // 4))
            messages.append({"role": "user", "content": text})
            started = time.perf_counter()
            answer = await http.post(
                "/v1/chat/completions", headers=key, json={"model": "policy", "messages": messages}
            )
            if answer.status_code != 200:
                raise SystemExit(answer.text)
            latencies.append(time.perf_counter() - started)
            messages.append(answer.json()["choices"][0]["message"])
            if time.monotonic() > until:
                break
        await http.delete(f"/v1/sessions/{opened.json()['id']}")


async def _agents(url: str, streams: int, seconds: float, tokens: int) -> list[float]:
    import httpx

    latencies: list[float] = []
    head = {"Authorization": f"Bearer {sys.stdin.read()}"}
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, headers=head, timeout=300, limits=limits) as http:
        until = time.monotonic() + seconds
        await asyncio.gather(*(_agent(http, until, tokens, latencies, random.Random(i)) for i in range(streams)))
    return latencies


def private_bytes(mirror: Path) -> dict[str, int]:
    """What this process has in memory that no file backs, and apart (`mirror`) the pages of files below a folder."""
    found = {"private": 0, "mirror": 0}
    path = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""
        elif words[0] == "Anonymous:":
            found["private"] += int(words[1]) * 1024
        elif words[0] == "Rss:" and path.startswith(str(mirror)):
            found["mirror"] += int(words[1]) * 1024
    return found


if __name__ == "__main__":
    times = sorted(asyncio.run(_agents(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))))
    print(json.dumps({"calls": len(times), "median": times[len(times) // 2]}))
