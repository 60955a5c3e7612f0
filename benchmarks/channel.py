"""The channel's ratios over a local Hub and the real clients, measured in one run on this machine.

    python benchmarks/channel.py [--pairs 5] [--only requests,latency,catchup,memory] [--out runs/bench-sync.json]

requests  what one publish and one poll ask of the Hub, read off its request log (exact counts, no timing)
latency   a 25 MB delta from offer() to the follower's mirror (A) against moving the same number of fresh random bytes
          and one 2 KB file with huggingface_hub alone: one batch_bucket_files, one download_bucket_files (B)
catchup   a follower 1,000 versions behind: as planned (A) against every delta one by one (B)
memory    peak anonymous memory of a publisher and of a follower above their start, against the largest tensor plus
          6 bytes per change (base and mirror are mapped files and count as file pages)

Each timed ratio is the median of interleaved A/B pairs, with its spread, at 0 and 50 ms added to every request. A
spread that straddles the bar is reported as undecided.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from channel_parts import RUN, Hub, Link, State, nudge, weights

BARS = {"latency": (1.7, "at most"), "catchup": (20.0, "at least"), "memory": (1.0, "at most")}
KB, MB = 1e3, 1e6


def requests(hub: Hub, folder: Path) -> dict[str, Any]:
    """Requests of one publish and of one poll."""
    rng = np.random.default_rng(0)
    state = weights(rng, 2, 100_000)
    link = Link(folder, "requests", state, largest_span=0)
    for _ in range(2):  # connections and caches are warm
        state = nudge(rng, state, 0.01)
        link.move(state)
    time.sleep(2.1)  # a new head is read once more when the store's lag has passed
    link.follower.poll()
    with hub.counted() as idle:
        link.follower.poll()
    state = nudge(rng, state, 0.01)
    with hub.counted() as publish:
        link.writer.offer(state, link.stamp(9, 9))
        link.writer.wait()
    with hub.counted() as follow:
        link.follower.poll()
    link.close()
    print(f"publish: {publish['batch']} batches   {dict(publish)}")
    print(f"poll, nothing new: {dict(idle)}")
    print(f"poll, one version behind: {dict(follow)}")
    return {"publish": dict(publish), "poll_idle": dict(idle), "poll_one_behind": dict(follow)}


def plain_move(folder: Path, rng: np.random.Generator, size: int, number: int) -> float:
    """Seconds to move fresh bytes and one small file with huggingface_hub alone."""
    from huggingface_hub import HfApi

    api, bucket = HfApi(), "local/bench"
    big, small = rng.bytes(size), rng.bytes(2000)
    names = [f"plain/{number}/big", f"plain/{number}/small"]
    to = [folder / f"plain-{number}-{n}" for n in ("big", "small")]
    started = time.perf_counter()
    api.batch_bucket_files(bucket, add=[(big, names[0]), (small, names[1])])
    api.download_bucket_files(bucket, files=list(zip(names, to, strict=True)), raise_on_missing_files=True)
    seconds = time.perf_counter() - started
    if to[0].read_bytes() != big or to[1].read_bytes() != small:
        raise SystemExit("huggingface_hub moved other bytes")
    for path in to:
        path.unlink()
    return seconds


def latency(hub: Hub, folder: Path, pairs: int) -> list[dict[str, Any]]:
    """Publish-to-applied against a plain move, for both codecs and delays."""
    found = []
    for codec, share, size_of in (("raw", 0.0625, 8_350_000), ("fast", 0.26, 20_000_000)):
        rng = np.random.default_rng(1)
        state = weights(rng, 8, size_of)
        link = Link(folder, f"latency-{codec}", state, codec=codec, largest_span=0, anchor_share=1e9)
        state = nudge(rng, state, share)
        _, size = link.move(state)
        plain_move(folder, rng, size, 0)
        for delay in (0.0, 0.05):
            with hub.delay(delay):
                times = []
                for n in range(pairs):
                    state = nudge(rng, state, share)
                    one = {}
                    for side in ("AB", "BA")[n % 2]:
                        one[side] = link.move(state)[0] if side == "A" else plain_move(folder, rng, size, n + 1)
                    times.append(one)
            label = f"latency, {codec}, {size / MB:.1f} MB, +{delay * 1000:.0f} ms"
            found.append(report("latency", label, [t["A"] / t["B"] for t in times], times))
        link.close()
    return found


class Paused:
    """An engine that counts its pauses and holds a copy of the weights."""

    def __init__(self) -> None:
        self.pauses = 0
        self.state: State = {}

    def load(self, folder: Path, identity: object) -> None:
        """Copy a checkpoint."""
        from sync.safetensors_io import MappedCheckpoint

        self.state = {n: a.reshape(-1).copy() for n, a in MappedCheckpoint(folder).state.items()}

    def pause(self) -> None:
        """Count."""
        self.pauses += 1

    def apply(self, patches: Mapping[str, Any], identity: object) -> None:
        """Scatter."""
        for name, (index, values) in patches.items():
            self.state[name][slice(None) if index is None else index] = values

    def read(self, name: str, index: Any) -> Any:
        """Gather."""
        return self.state[name][slice(None) if index is None else index]

    def resume(self) -> None:
        """Nothing."""


def catchup(hub: Hub, folder: Path, pairs: int, versions: int) -> list[dict[str, Any]]:
    """A follower far behind against the replay of everything."""
    from sync import Follower, open_store
    from sync.heads import newest, read_catchup, read_head
    from sync.plan import plan

    rng = np.random.default_rng(2)
    state = weights(rng, 4, 250_000)
    link = Link(folder, "catchup", state)
    link.follower.close()
    behind = folder / "catchup-mirror"
    started = time.perf_counter()
    for n in range(versions):
        state = nudge(rng, state, 0.01)
        link.writer.offer(state, link.stamp(n, n))
        link.writer.wait_behind()
    print(f"({versions} versions published in {time.perf_counter() - started:.0f} s)")
    link.writer.close()
    store = open_store(RUN + "catchup")
    ((key, _),) = newest(store.list("heads/"))["weights"]
    head = read_head(store, key)
    refs = (*read_catchup(store, head), *head.recent)
    assert head.identity is not None

    def copy(name: str) -> tuple[Any, Paused]:
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(behind, folder / name)
        engine = Paused()
        follower = Follower(open_store(RUN + "catchup"), folder / name, engine)
        follower._move_engine()
        return follower, engine

    found = []
    for delay in (0.0, 0.05):
        times: list[dict[str, float]] = []
        for n in range(pairs):
            one = {}
            for side in ("AB", "BA")[n % 2]:
                follower, engine = copy(f"catchup-{side}")
                way = plan(refs, head.identity, follower._mirror.held)
                deltas = [r for r in refs if r.kind == "delta"]
                with hub.delay(delay):
                    begun = time.perf_counter()
                    if side == "A":
                        follower.poll()
                    else:
                        for ref in {r.key: r for r in deltas}.values():
                            follower._replica.step(ref, head)
                        follower._move_engine()
                    one[side] = time.perf_counter() - begun
                same = all(np.array_equal(engine.state[name], array) for name, array in state.items())
                if not same or engine.pauses != (1 if all(r.kind != "anchor" for r in way) or side == "B" else 0):
                    raise SystemExit(f"side {side}: same bits {same}, {engine.pauses} pauses")
                follower.close()
            times.append(one)
        kinds = dict(Counter(r.kind for r in way))
        label = f"catchup over {versions} versions in {len(way)} objects {kinds}, +{delay * 1000:.0f} ms"
        found.append(report("catchup", label, [t["B"] / t["A"] for t in times], times))
        found[-1] |= {"objects": len(way), "bytes": sum(r.payload for r in way), "all": sum(r.payload for r in deltas)}
    return found


class Peak:
    """The most anonymous memory of this process above that at the start, sampled."""

    def __init__(self) -> None:
        self.start, self.most, self._stop = self.now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Anonymous resident bytes."""
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, self.now() - self.start)

    def end(self) -> int:
        """Stop and return the peak."""
        self._stop.set()
        self._thread.join()
        return self.most


def memory_child(role: str, folder: Path) -> None:
    """Run one side over a directory store in this process and print its peak: one tensor, one delta of 2 %."""
    from sync import DirectoryStore, Follower, Publisher, PublisherOptions, Stamp

    rng = np.random.default_rng(3)
    store = DirectoryStore(folder / "bucket", create=True)
    if role == "publisher":
        state = weights(rng, 4, 32_000_000)
        new = nudge(rng, state, 0.02)
        writer = Publisher(store, work=folder / "work", options=PublisherOptions(anchor_share=1e9))
        writer.open(state, Stamp(0, 0))
        peak = Peak()
        writer.offer(new, Stamp(1, 1))
        writer.wait()
        print(json.dumps({"peak": peak.end(), "changed": writer.history[-1].changed, "largest": 64_000_000}))
        writer.close()
    else:
        follower = Follower(store, folder / "mirror", None)
        if role == "follower-first":
            from sync.heads import newest, read_head

            ((key, _),) = newest(store.list("heads/"))["weights"]
            head = read_head(store, key)
            follower._replica.step(next(r for r in head.recent if r.version == 0), head)
        else:
            peak = Peak()
            follower.poll()
            print(json.dumps({"peak": peak.end(), "applied": follower.status().versions_applied}))
        follower.close()


def memory(folder: Path) -> list[dict[str, Any]]:
    """Peaks of publisher and follower against the bound."""

    def child(role: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", role, "--folder", str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        lines = done.stdout.strip().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    wrote = child("publisher")
    child("follower-first")
    read = child("follower")
    bound = wrote["largest"] + 6 * wrote["changed"]
    found = []
    for role, peak in (("publisher", wrote["peak"]), ("follower", read["peak"])):
        label = f"memory of the {role}: {peak / MB:.0f} MB for {bound / MB:.0f} MB (largest tensor + 6 B per change)"
        found.append(report("memory", label, [peak / bound], []))
    return found


def report(kind: str, label: str, ratios: list[float], times: list[dict[str, float]]) -> dict[str, Any]:
    """Print one line and return its facts."""
    bar, way = BARS[kind]
    low, high, middle = min(ratios), max(ratios), statistics.median(ratios)
    good = [r <= bar if way == "at most" else r >= bar for r in ratios]
    verdict = "met" if all(good) else "missed" if not any(good) else "undecided"
    spread = f" ({low:.2f} to {high:.2f}, {len(ratios)} pairs)" if len(ratios) > 1 else ""
    print(f"{label}: {middle:.2f}{spread}, bar {way} {bar:g}: {verdict}", flush=True)
    return {"what": label, "median": middle, "low": low, "high": high, "bar": bar, "verdict": verdict, "times": times}


def main() -> int:
    """Run the chosen parts and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--only", default="requests,latency,catchup,memory")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-sync.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        memory_child(args.child, args.folder)
        return 0
    only = args.only.split(",")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-bench-")))
        results: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"}
        if "memory" in only:
            results["memory"] = memory(folder)
            shutil.rmtree(folder / "bucket")
        hub = Hub(folder)
        stack.callback(hub.stop)
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_TOKEN": "local",
                       "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
        if "requests" in only:
            results["requests"] = requests(hub, folder)
        if "latency" in only:
            results["latency"] = latency(hub, folder, args.pairs)
        if "catchup" in only:
            results["catchup"] = catchup(hub, folder, args.pairs, args.versions)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"details: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
