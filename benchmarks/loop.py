"""The loop's ratios, measured in one run on this machine: asynchronous against its parts, and the cost of publishing.

    python benchmarks/loop.py [--rounds 5] [--steps 8] [--out runs/bench-loop]

One trainer process with an inference and an environment Space on loopback, as in `deltawire demo`. Each round measures
four segments of `--steps` optimizer steps, interleaved:

    T       training alone: rollouts are ready, the Spaces are idle            → T seconds per step
    G       generation alone: the trainer waits, one step's groups are rolled   → G seconds per step
    async   both at once, as in training                                       → A seconds per step
    serial  generate, then train, then generate (each may use both cores)      → S seconds per step

Ratios per round: max(G, T)/A (the bar is 0.85: asynchronous steps per second against the slower side alone), S/A, and
publishing's share of A on the training thread (the bar is 10 %). Reported: median, spread, and whether the spread
straddles the bar. Writes a JSON with every round.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sync.events import emitter
from sync.schema.rollouts import AckRequest, AckResponse, Group, LeaseResponse, RunInfo, RunRequest, ServiceStatus
from sync.settings import validated
from sync.stores import open_store
from trainer_node.config import TrainConfig
from trainer_node.demo import TINY_ENGINE, _Crew
from trainer_node.peers import Peer
from trainer_node.run import _prepare_model, _Run
from trainer_node.samples import TokenSample, group_samples

BARS = {"async_over_slower_side": (0.85, "at least"), "publish_share": (0.10, "at most")}


class _Gate:
    """Stands in for the rollout inbox: feeds the trainer as the segment demands, and notes when steps end."""

    def __init__(self, run: _Run, env: Peer, config: TrainConfig, rounds: int, steps: int) -> None:
        self.run, self.env, self.config = run, env, config
        self.rounds, self.steps = rounds, steps
        self.rollout_buffer: queue.Queue[TokenSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.results: list[dict[str, float]] = []
        self.ended: list[float] = []
        self.publish: list[float] = []
        self.recorded: list[Group] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._drive, daemon=True)

    # TRL's worker protocol

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.thread.join(timeout=60)

    def update_model_version(self, model_version: int) -> None:
        """Not needed: samples carry the present version."""

    def check_health(self, stale_after_s: float) -> None:
        if self.error is not None:
            raise self.error

    # segments: every one starts at rest, and its first step is not counted

    def _drive(self) -> None:
        try:
            self.recorded = self._roll_one_step()
            for _ in range(self.rounds):
                self.results.append(self._round())
                print(json.dumps(self.results[-1]), flush=True)
            self.run.trainer.control.should_training_stop = True
            self._feed(self.recorded, 3)
        except BaseException as error:
            self.error = error
            raise

    def _round(self) -> dict[str, float]:
        trained = self._counted(lambda: self._feed(self.recorded, self.steps + 3))
        generated = statistics.fmean(self._roll_seconds() for _ in range(self.steps))
        marks = len(self.publish)
        mixed = self._async()
        published = statistics.fmean(self.publish[marks:])
        serial = self._serial()
        return {"T": trained, "G": generated, "A": mixed, "S": serial, "publish": published}

    def _counted(self, feed: Callable[[], None]) -> float:
        """Seconds per step over `steps` steps after the first that ends behind `feed`."""
        start = len(self.ended)
        feed()
        self._steps_done(start + self.steps + 1)
        seconds = (self.ended[start + self.steps] - self.ended[start]) / self.steps
        self._rest()
        return seconds

    def _roll_seconds(self) -> float:
        before = time.monotonic()
        self._roll_one_step()
        return time.monotonic() - before

    def _feed(self, groups: list[Group], steps: int) -> None:
        """Queue the samples of `groups` `steps` times over, as rolled with the present weights."""
        for _ in range(steps):
            for group in groups:
                for sample in group_samples(group, self.run.transfer.sync_of):
                    sample.model_version = self.run.trainer.model_version
                    self.rollout_buffer.put(sample)

    def _serial(self) -> float:
        """Every batch that is queued completes one step (accelerate holds one batch, always the same number)."""

        def feed() -> None:
            for _ in range(self.steps + 1):
                done = len(self.ended)
                self._feed(self._roll_one_step(), 1)
                self._steps_done(done + 1)

        return self._counted(feed)

    def _async(self) -> float:
        """Lease from a training run and queue what comes, at most two steps' worth ahead."""
        name = f"bench-{secrets.token_hex(4)}"
        size = self.config.groups_per_step * self.config.group_size
        self._post(name, "training", None)

        def feed() -> None:
            start = len(self.ended)
            while len(self.ended) < start + self.steps + 1:
                if self.rollout_buffer.qsize() > size:
                    time.sleep(0.005)
                else:
                    self._feed(self._lease(name, 8), 1)
            self.env.call("DELETE", f"/v1/runs/{name}")

        return self._counted(feed)

    def _rest(self) -> None:
        """Empty the queue and wait until neither the trainer nor the Spaces do anything."""
        while not self.rollout_buffer.empty():
            self.rollout_buffer.get_nowait()
        self.env.wait_for("the Space coming to rest", self._idle, 60.0)
        seen = -1
        while seen != len(self.ended):
            seen = len(self.ended)
            time.sleep(1.0)

    def _idle(self) -> str | None:
        status = self.env.get("/v1/status", ServiceStatus)
        active = sum(r.groups_active for r in status.runs)
        return f"{active} groups active" if active else None

    def _roll_one_step(self) -> list[Group]:
        name = f"bench-{secrets.token_hex(4)}"
        self._post(name, "evaluation", self.config.groups_per_step)
        groups: list[Group] = []
        while len(groups) < self.config.groups_per_step:
            groups += self._lease(name, 64)
        self.env.call("DELETE", f"/v1/runs/{name}")
        return groups

    def _lease(self, name: str, limit: int) -> list[Group]:
        answer = self.env.get("/v1/rollouts", LeaseResponse, seconds=60.0, run=name, limit=limit, wait=5)
        if answer.groups:
            self.env.post("/v1/rollouts/ack", AckRequest(groups=tuple(g.id for g in answer.groups)), AckResponse)
        return list(answer.groups)

    def _post(self, name: str, purpose: Any, tasks: int | None) -> None:
        config = self.config
        request = RunRequest(
            name=name, environment=config.environment, policy_url=config.policy_url, purpose=purpose,
            group_size=config.group_size, concurrent_groups=config.concurrent_groups, tasks=tasks,
            ready_groups=config.ready_groups, max_tokens=config.max_tokens, seed=secrets.randbits(20),
        )  # fmt: skip
        self.env.post("/v1/runs", request, RunInfo)

    def _steps_done(self, count: int) -> None:
        while len(self.ended) < count:
            time.sleep(0.002)


class _Marks(TrainerCallback):  # type: ignore[misc]
    def __init__(self, gate: _Gate) -> None:
        self._gate = gate

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gate.ended.append(time.monotonic())


def _measure(out: Path, rounds: int, steps: int) -> list[dict[str, float]]:
    token = secrets.token_hex(16)
    bucket = out / "bucket"
    bucket.mkdir(parents=True)
    with ExitStack() as stack:
        crew = stack.enter_context(_Crew(out, token))
        env_url = crew.space("env", f'folder = "{out}/env"\nlog = "json"\ninspector = false\n')
        policy_url = crew.space("inference", f'run = "{bucket}"\nfolder = "{out}/mirror"\nlog = "json"\n{TINY_ENGINE}')
        values = {
            "run": str(bucket), "env_urls": [env_url], "policy_url": policy_url, "out": out, "report": "none",
            "steps": 100_000, "schedule": "constant", "learning_rate": 1e-5, "log": "none",
        }  # fmt: skip
        config = validated(TrainConfig, values)
        env = stack.enter_context(closing(Peer(env_url, token)))
        policy = stack.enter_context(closing(Peer(policy_url, token)))
        folder = _prepare_model(config, env, emitter("bench", "none"))
        run = _Run(config, open_store(config.run, create=True), [env], policy, folder, emitter("bench", "none"))
        stack.callback(run.close)
        gate = _Gate(run, env, config, rounds, steps)
        trainer: Any = run.trainer
        trainer.rollout_worker, trainer.rollout_queue = gate, gate.rollout_buffer
        trainer.add_callback(_Marks(gate))
        send = run.transfer.send_weights

        def timed(iterator: Any) -> None:
            before = time.monotonic()
            send(iterator)
            gate.publish.append(time.monotonic() - before)

        run.transfer.send_weights = timed  # type: ignore[method-assign]
        run.start_at_rest()
        trainer.train()
        return gate.results


def _report(rounds: list[dict[str, float]]) -> dict[str, Any]:
    ratios = {
        "async_over_slower_side": [max(r["G"], r["T"]) / r["A"] for r in rounds],
        "serial_over_async": [r["S"] / r["A"] for r in rounds],
        "publish_share": [r["publish"] / r["A"] for r in rounds],
    }
    report: dict[str, Any] = {}
    for name, values in ratios.items():
        low, high = min(values), max(values)
        report[name] = {"median": statistics.median(values), "low": low, "high": high}
        if name in BARS:
            bar, sense = BARS[name]
            met = low >= bar if sense == "at least" else high <= bar
            missed = high < bar if sense == "at least" else low > bar
            report[name] |= {"bar": f"{sense} {bar}", "verdict": "met" if met else "missed" if missed else "undecided"}
    for side in "TGAS":
        report[f"{side}_seconds_per_step"] = statistics.median(r[side] for r in rounds)
    return report


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-loop"))
    args = parser.parse_args()
    out = args.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    rounds = _measure(out, args.rounds, args.steps)
    report = _report(rounds) | {"rounds": rounds, "machine": platform.processor() or platform.machine()}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, value in report.items():
        if name != "rounds":
            print(f"{name}: {value}")
    print(f"report: {out}/report.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
