"""What the channel's benchmark runs over: a local Hub, states and their changes, a publisher with a follower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

State = dict[str, NDArray[Any]]
RUN = "hf://buckets/local/bench/"


class Hub:
    """A local Hub in a process of its own, whose faults and request log are under control."""

    def __init__(self, folder: Path) -> None:
        ready = folder / "hub.json"
        command = [sys.executable, "-m", "deltawire", "hub", "serve", "--data", str(folder / "hub"), "--port", "0"]
        self._child = subprocess.Popen(
            [*command, "--control", "--ready-file", str(ready)], stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        give_up = time.monotonic() + 60
        while not ready.exists():
            if self._child.poll() is not None or time.monotonic() > give_up:
                raise SystemExit("the local Hub did not start")
            time.sleep(0.05)
        self.url = str(json.loads(ready.read_text())["url"])

    def call(self, method: str, path: str, body: object = None) -> Any:
        """One request to a control route."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    @contextmanager
    def delay(self, seconds: float) -> Iterator[None]:
        """Add this much to every request."""
        if seconds:
            self.call("POST", "/_faults", [{"kind": "latency", "value": str(seconds)}])
        try:
            yield
        finally:
            self.call("DELETE", "/_faults")

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """What was asked of it inside, by kind."""
        self.call("DELETE", "/_log")
        found: Counter[str] = Counter()
        yield found
        for entry in self.call("GET", "/_log")["entries"]:
            found[kind_of(entry["method"], entry["path"])] += 1

    def stop(self) -> None:
        """End it."""
        self._child.terminate()
        self._child.wait(30)


def kind_of(method: str, path: str) -> str:
    """The kind of a request, short."""
    path = path.split("?", maxsplit=1)[0]
    for mark in ("/batch", "/paths-info", "/tree", "/resolve/", "xet-write-token", "xet-read-token"):
        if mark in path:
            return mark.strip("/")
    return "xet" if "/xet/" in path or "/v1/" in path or "/v2/" in path else f"{method} {path}"


def nudge(rng: np.random.Generator, state: State, share: float) -> State:
    """A copy in which a share of the bf16 elements moved by one ULP."""
    new = {}
    for name, array in state.items():
        flat = array.copy()
        at = np.flatnonzero(rng.random(len(flat), dtype=np.float32) < share)
        flat[at] += np.where(rng.random(len(at)) < 0.5, 1, -1).astype(np.uint16)
        new[name] = flat
    return new


def weights(rng: np.random.Generator, tensors: int, size: int) -> State:
    """Normal bf16 weights of a usual scale, as bits."""
    return {
        f"layer{n}": (rng.standard_normal(size, dtype=np.float32) * 0.02)
        .view(np.uint32)
        .__rshift__(16)
        .astype(np.uint16)
        for n in range(tensors)
    }


class Link:
    """One publisher and one follower on a run of the Hub; the follower polls as soon as a commit is told of."""

    def __init__(self, folder: Path, name: str, state: State, **options: Any) -> None:
        from sync import Follower, Publisher, PublisherOptions, Stamp, open_store
        from sync.term import TermOptions

        self.stamp = Stamp
        term = TermOptions(settle=0.0, keep_anchors=99, collect_every=0)
        self.told = threading.Event()
        self.writer = Publisher(
            open_store(RUN + name, create=True), work=folder / f"{name}-work", on_sent=self.told.set,
            options=PublisherOptions(term=term, **options),
        )  # fmt: skip
        self.writer.open(state, Stamp(0, 0))
        self.follower = Follower(open_store(RUN + name), folder / f"{name}-mirror", None)
        self.follower.poll()
        self.count = 0

    def move(self, state: State) -> tuple[float, int]:
        """Publish and follow: (seconds from offer to the mirror, payload bytes)."""
        self.writer.wait_behind()
        self.told.clear()
        self.count += 1
        started = time.perf_counter()
        self.writer.offer(state, self.stamp(self.count, self.count))
        self.told.wait(600)
        if not self.follower.poll():  # looked too early
            self.writer.wait()
            self.follower.poll()
        seconds = time.perf_counter() - started
        self.writer.wait()
        done = self.writer.history[-1]
        if self.follower.status().mirror != str(done.identity):
            raise SystemExit(f"the follower is at {self.follower.status().mirror}, expected {done.identity}")
        return seconds, done.payload

    def close(self) -> None:
        """End both."""
        self.follower.close()
        self.writer.close()
