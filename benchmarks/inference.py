"""The inference Space with vLLM, measured on this machine: pauses, throughput under updates, the gateway, memory.

    .venv-vllm/bin/python benchmarks/inference.py [--only pause,throughput,gateway,memory] [--pairs 5] [--json FILE]

A random Qwen3 of 138 M parameters in bfloat16, one thread. Every ratio is the median of pairs that are measured one
after the other, with their spread; a spread that straddles its bar decides nothing.

    pause       with 1 % of the elements changed, at rest: pause, scatter, read back, resume against an empty update of
                the same engine plus twice the bare scatter (numpy, the same elements, one array after the other); and
                against vLLM's own reload of the checkpoint's files
    throughput  32 streams, prompts of 64 and answers of 64 tokens: tokens per second with an update of 1 % every
                --every seconds against none, for kv_policy salt and recompute; generated alone, and with the recomputed
    gateway     32 agents in a process of their own, conversations of 4 turns, each in a session of its own, over HTTP:
                generated tokens per second against calls of the same shape made directly; and, with one agent and
                answers of 4 tokens, how many milliseconds a call takes longer
    memory      anonymous memory of a Space (engine, follower, after an update), its mirror's mapped pages apart,
                against plain vLLM on the same checkpoint, each in a process of its own
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import inference_parts as parts
import numpy as np

from sync.schema.base import Identity
from sync.schema.calls import Sampling

BARS: dict[str, tuple[float, str]] = {
    "pause / (empty update + 2 x bare scatter)": (1.0, "at most"),
    "pause / dense reload": (0.5, "at most"),
    "salt: generated per second, with updates / without": (0.9, "at least"),
    "recompute: generated + recomputed per second, with / without": (0.85, "at least"),
    "private memory / plain vLLM's": (1.05, "at most"),
    "gateway: tokens per second / direct": (0.95, "at least"),
    "gateway: a call takes longer by, ms": (10.0, "at most"),
}


SHORT = Sampling(max_tokens=4)


class Ratio(NamedTuple):
    """One figure: a value per pair."""

    name: str
    values: list[float]
    unit: str = ""


def pause(folder: Path, pairs: int) -> list[Ratio]:
    """See the module."""
    state = parts.state_of(folder)
    one = parts.nudged(state, 0.01, 1)
    updates = one, parts.back(state, one)
    found: dict[str, list[float]] = {"pause": [], "empty": [], "scatter": [], "dense": []}
    with parts.engine_on(folder) as engine:
        for n in range(2 * pairs + 1):  # the first is not counted
            patches = updates[n % 2]
            took = {"pause": update(engine, patches, n + 1), "empty": update(engine, {}, n + 1)}
            started = time.perf_counter()
            for name, (index, values) in patches.items():
                state[name][index] = values
            took["scatter"] = time.perf_counter() - started
            engine.pause()
            started = time.perf_counter()
            engine._weights.core._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            took["dense"] = time.perf_counter() - started
            update(engine, patches, n + 1)  # what the reload undid
            for kind, seconds in took.items():
                found[kind] += [seconds] if n else []
    rows = list(zip(*found.values(), strict=True))
    return [
        Ratio("pause / (empty update + 2 x bare scatter)", [a / (b + 2 * c) for a, b, c, _ in rows]),
        Ratio("pause / dense reload", [a / d for a, _, _, d in rows]),
        *(Ratio(f"{kind}, ms", [1e3 * s for s in seconds], "ms") for kind, seconds in found.items()),
    ]


def update(engine: Any, patches: parts.Patches, version: int) -> float:
    """As a follower does it; seconds from pause to resume."""
    started = time.perf_counter()
    engine.pause()
    engine.apply(patches, Identity(1, version))
    for name, (index, values) in patches.items():
        if not np.array_equal(engine.read(name, index), values):
            raise SystemExit(f"{name} was not written")
    engine.resume()
    return time.perf_counter() - started


def throughput(folder: Path, pairs: int, seconds: float, every: float) -> list[Ratio]:
    """See the module."""
    found: list[Ratio] = []
    state = parts.state_of(folder)
    one = parts.nudged(state, 0.01, 1)
    updates = one, parts.back(state, one)
    for policy in "salt", "recompute":
        plain, whole = [], []
        with parts.engine_on(folder, kv_policy=policy) as engine:
            streams = parts.Streams(engine, 32, parts.fresh_prompt(64))
            while not streams.failed and not streams.latencies:
                time.sleep(0.1)
            time.sleep(every)  # until the streams are apart
            for n in range(pairs):
                order = [False, True] if n % 2 else [True, False]
                rates = {moving: _rates(engine, seconds, every if moving else 0.0, updates) for moving in order}
                plain.append(rates[True][0] / rates[False][0])
                whole.append(rates[True][1] / rates[False][1])
            streams.stop()
        found += [
            Ratio(f"{policy}: generated per second, with updates / without", plain),
            Ratio(f"{policy}: generated + recomputed per second, with / without", whole),
        ]
    return found


def _rates(engine: Any, seconds: float, every: float, updates: tuple[parts.Patches, ...]) -> tuple[float, float]:
    """Tokens per second, generated and with the recomputed, over whole intervals between updates (0: none)."""
    before, started = engine.status(), time.perf_counter()
    if every:
        for n in range(max(1, round(seconds / every))):
            update(engine, updates[n % 2], n + 1)
            time.sleep(max(0.0, started + (n + 1) * every - time.perf_counter()))
    else:
        time.sleep(seconds)
    after, took = engine.status(), time.perf_counter() - started
    made = int(after["output_tokens"]) - int(before["output_tokens"])
    again = int(after["recomputed_tokens"]) - int(before["recomputed_tokens"])
    return made / took, (made + again) / took


def gateway(folder: Path, pairs: int, seconds: float) -> list[Ratio]:
    """See the module."""
    rates, prompts, longer = [], [], []
    with parts.engine_on(folder) as engine, parts.space_of(engine) as url:
        parts.agents(url, 2, 5)
        for n in range(pairs):
            found = {}
            for way in ("direct", "gateway") if n % 2 else ("gateway", "direct"):
                found[way] = _asked(engine, url if way == "gateway" else "", 32, seconds)
            rates.append(found["gateway"][0] / found["direct"][0])
            prompts.append(found["gateway"][1] / found["direct"][1])
        for _ in range(pairs):
            direct = _asked(engine, "", 1, seconds / 2, SHORT)[2]
            longer.append(1e3 * (_asked(engine, url, 1, seconds / 2, SHORT)[2] - direct))
    return [
        Ratio("gateway: tokens per second / direct", rates),
        Ratio("gateway: prompt tokens per generated token / direct", prompts),
        Ratio("gateway: a call takes longer by, ms", longer, "ms"),
    ]


def _asked(
    engine: Any, url: str, streams: int, seconds: float, sampling: Sampling = parts.CHECK
) -> tuple[float, float, float]:
    """Generated tokens per second, prompt tokens per generated one, median seconds per call."""
    before, started = engine.status(), time.perf_counter()
    if url:
        median = parts.agents(url, streams, seconds, sampling.max_tokens)["median"]
    else:
        running = parts.Streams(engine, streams, parts.conversation(), sampling)
        time.sleep(seconds)
        running.stop()
        median = statistics.median(running.latencies)
    after, took = engine.status(), time.perf_counter() - started
    made = int(after["output_tokens"]) - int(before["output_tokens"])
    return made / took, (int(after["prompt_tokens"]) - int(before["prompt_tokens"])) / made, median


def memory(folder: Path, pairs: int) -> list[Ratio]:
    """See the module."""
    ratios, mirror = [], []
    for n in range(pairs):
        found = {}
        for role in ("plain", "space") if n % 2 else ("space", "plain"):
            with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as run:
                found[role] = _child(role, folder, Path(run) / "run")
        ratios.append(found["space"]["private"] / found["plain"]["private"])
        mirror.append(found["space"]["mirror"] / 2**20)
    return [Ratio("private memory / plain vLLM's", ratios), Ratio("pages of the mirror, MiB", mirror, "MiB")]


def _child(role: str, folder: Path, run: Path) -> dict[str, int]:
    """A process that samples, says so, and samples again when asked; the `space` finds one version, then the next."""
    from sync import Publisher, Stamp, open_store

    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".json", ".jinja")}
    publisher = Publisher(open_store(str(run), create=True, writable=True), side_files=files)
    publisher.open(parts.shaped(folder), Stamp(0, 0))
    command = [sys.executable, __file__, "--child", role, "--folder", str(folder), "--run", str(run)]
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            if child.stdout.readline() == "sampled\n":
                state = {name: np.array(bits) for name, bits in parts.shaped(folder).items()}
                for name, (index, values) in parts.nudged(parts.state_of(folder), 0.01, 1).items():
                    state[name].reshape(-1)[index] = values
                publisher.flush(state, Stamp(1, 1))
                child.stdin.write("again\n")
                child.stdin.flush()
            said = child.stdout.read()
        publisher.close()
        log.seek(0)
        if child.returncode:
            raise SystemExit(log.read().decode(errors="replace")[-3000:])
    return dict(json.loads(said.splitlines()[-1]))


def _sampled() -> None:
    print("sampled", flush=True)
    sys.stdin.readline()


def plain_child(folder: Path, prompts: list[list[int]], _run: Path) -> None:
    """Plain vLLM: load, sample from 32 prompts twice, print what is in memory then."""
    from inference_space.engines.vllm_core import let_modules_be_scanned, prepare_environment

    prepare_environment(threads=1, kv_cache_gib=1)
    let_modules_be_scanned()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder), enforce_eager=True, max_model_len=1025, max_num_seqs=32, max_num_batched_tokens=2048,
        distributed_executor_backend="uni", disable_log_stats=True,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=64, logprobs=0, detokenize=False)
    for again in range(2):
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        if not again:
            _sampled()
    gc.collect()
    print(json.dumps(parts.private_bytes(folder)))


def space_child(_: Path, prompts: list[list[int]], run: Path) -> None:
    """An engine and its follower: the same, and an update between."""
    from inference_space.engines.base import Call
    from sync import Follower, open_store

    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as place, parts.bare_engine() as engine:
        follower = Follower(open_store(str(run)), Path(place), engine)
        for again in range(2):
            if not follower.poll():
                raise SystemExit("there is no new version")
            for future in engine.generate([Call(ids, parts.CHECK) for ids in prompts]):
                future.result(300)
            if not again:
                _sampled()
        gc.collect()
        print(json.dumps(parts.private_bytes(Path(place))))
        follower.close()


def report(found: Ratio) -> dict[str, Any]:
    """Print a line of the table and return its facts."""
    low, high, middle = min(found.values), max(found.values), statistics.median(found.values)
    facts: dict[str, Any] = {"what": found.name, "median": middle, "low": low, "high": high, "values": found.values}
    line = f"| {found.name} | {middle:.3g} | {low:.3g} to {high:.3g} |"
    if found.name in BARS:
        bar, way = BARS[found.name]
        good = [v <= bar if way == "at most" else v >= bar for v in found.values]
        facts |= {"bar": bar, "verdict": "met" if all(good) else "missed" if not any(good) else "undecided"}
        line += f" {way} {bar:g} | {facts['verdict']} |"
    else:
        line += " | |"
    print(line, flush=True)
    return facts


def main() -> int:
    """Run the chosen parts, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="pause,throughput,gateway,memory")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of each side of a pair, for throughput and gateway"
    )
    parser.add_argument("--every", type=float, default=10.0, help="seconds between updates")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--json", type=Path, help="write every value here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        prompts = [parts.fresh_prompt(64)(0, []) for _ in range(32)]
        {"plain": plain_child, "space": space_child}[args.child](args.folder, prompts, args.run)
        return 0
    results: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-bench-"))) / "model"
        results["parameters"] = parts.make_model(folder, args.layers)
        print(f"{results['parameters'] / 1e6:.0f} M parameters, {results['machine']}\n")
        print("| | median | lowest to highest | bar | verdict |\n|---|---|---|---|---|", flush=True)
        measure = {
            "pause": lambda: pause(folder, args.pairs),
            "throughput": lambda: throughput(folder, args.pairs, args.seconds, args.every),
            "gateway": lambda: gateway(folder, args.pairs, args.seconds),
            "memory": lambda: memory(folder, args.pairs),
        }
        for name in args.only.split(","):
            results[name] = [report(found) for found in measure[name]()]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
