"""`deltawire demo`: inference, environment and trainer as three processes on loopback, and one bucket for all."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from sync.errors import ConfigError, PeerUnavailable
from sync.schema.calls import SyncStatus
from sync.schema.rollouts import ServiceStatus
from sync.settings import TOKEN_VARIABLE

from .config import make_folder
from .peers import Peer
from .view import RunView, table

START_SECONDS = 120.0
STOP_SECONDS = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's flags."""
    parser.add_argument("--steps", type=int, default=260, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of model, warm start and tasks (default: %(default)s)"
    )
    parser.add_argument(
        "--env",
        default="guess",
        help="environment: guess, sort, reverse-text, countdown, wordle (default: %(default)s)",
    )
    parser.add_argument(
        "--store", choices=["directory", "hub"], default="directory",
        help="where the run lives: a folder, or a bucket of a local Hub that the demo starts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=["torch", "vllm"], default="torch", help="what runs the policy (default: %(default)s)"
    )
    parser.add_argument(
        "--inference-python", default=sys.executable, metavar="PYTHON",
        help="interpreter of the environment that holds the engine (default: this one)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for all results (%(default)s)")
    parser.add_argument("--keep-open", action="store_true", help="keep the Spaces and the inspector up at the end")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when training ended. Raises ConfigError when a process could not be started or died."""
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}; it must be at least 1")
    out: Path = args.out.absolute()
    bucket = out / "bucket"
    if bucket.exists() and any(bucket.iterdir()):
        old = _set_aside(out)
        print(f"{out} held an earlier run, which is {old.name} now")
    make_folder(out)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal too: end the children, like Ctrl-C
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    bucket.mkdir(exist_ok=True)
    try:
        _show(args, out, token)
    except KeyboardInterrupt:
        print(f"\nstopped; what was done so far is in {out}")
        raise
    return 0


def _show(args: argparse.Namespace, out: Path, token: str) -> None:
    with ExitStack() as stack:
        crew = stack.enter_context(_Crew(out, token, {"inference": args.inference_python}))
        run_url = crew.local_hub() if args.store == "hub" else f"file://{out}/bucket"
        env_url = crew.space("env", f'folder = "{out}/env"\nlog = "json"\n')
        env = stack.enter_context(closing(Peer(env_url, token, seconds=5.0)))
        known = [e["name"] for e in env.call("GET", "/v1/environments")["environments"]]
        if args.env not in known:
            raise ConfigError(f"--env {args.env}: no such environment; known: {', '.join(known)}")
        engine = f'engine = "{args.engine}"\n{TINY_ENGINE}'
        policy_url = crew.space("inference", f'run = "{run_url}"\nfolder = "{out}/mirror"\nlog = "json"\n{engine}')
        trainer = crew.start("train", _train_settings(args, out, run_url, env_url, policy_url))
        inspector = f"{env_url}/?key={'$' + TOKEN_VARIABLE if TOKEN_VARIABLE in os.environ else token}"
        view = stack.enter_context(RunView())
        view.say(f"inspector  {inspector}")
        policy = stack.enter_context(closing(Peer(policy_url, token, seconds=5.0)))
        _watch(crew, trainer, out / "train.log", view, policy, env)
        summary = json.loads((out / "summary.json").read_text())
        view.close()
        print(table(summary, out))
        if args.keep_open:
            print(f"inspector: {inspector}   (Ctrl-C stops everything)")
            with suppress(KeyboardInterrupt):
                signal.pause()


def _set_aside(out: Path) -> Path:
    """A run folder that holds a run already is renamed, never mixed with a new one."""
    for n in range(1, 10_000):
        old = out.with_name(f"{out.name}.{n}")
        if not old.exists():
            out.rename(old)
            return old
    raise ConfigError(f"{out}: ten thousand older runs beside it; remove some or choose another --out")


def _train_settings(args: argparse.Namespace, out: Path, run_url: str, env_url: str, policy_url: str) -> str:
    settings: dict[str, Any] = {
        "run": run_url, "environment": args.env, "env_urls": [env_url], "policy_url": policy_url,
        "out": str(out), "steps": args.steps, "seed": args.seed, "log": "json",
    }  # fmt: skip
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return text + PRESETS.get(args.env, "")


TINY_ENGINE = "max_slots = 512\nmax_len = 256\n"
"""Room for every call of the demo at once: short sequences, small caches."""

PRESETS = {
    "sort": "learning_rate = 4e-4\ngroups_per_step = 16\ngroup_size = 16\nconcurrent_groups = 20\nready_groups = 20\n"
    "[warm_start]\nsteps = 600\n",
}
"""Settings that an environment's tiny policy learns well with, where they are not the defaults."""


class _Crew:
    """The child processes: started with a settings file and a log each, ended in reverse order, by pid."""

    def __init__(self, out: Path, token: str, pythons: Mapping[str, str] = MappingProxyType({})) -> None:
        self._out, self._token, self._pythons = out, token, pythons
        self._environ = {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for last in (False, True):  # the Hub goes when nobody needs it any more
            children = [child for role, child in reversed(self._children) if (role == "hub") == last]
            for child in children:
                if child.poll() is None:
                    child.terminate()
            for child in children:
                try:
                    child.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()

    def start(self, role: str, settings: str) -> subprocess.Popen[bytes]:
        """Start `deltawire ROLE --config …`; its event lines go to ROLE.log."""
        config = self._out / f"{role}.toml"
        config.write_text(settings)
        return self._spawn(role, role, "--config", str(config))

    def _spawn(self, role: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._out / f"{role}.log").open("wb") as log:
            child = subprocess.Popen(  # noqa: S603 - our own program
                [self._pythons.get(role, sys.executable), "-m", "deltawire", *words], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, env=os.environ | self._environ, start_new_session=True,
            )  # fmt: skip
        self._children.append((role, child))
        return child

    def space(self, role: str, settings: str) -> str:
        """Start a Space on a port that the system chooses; returns its URL once it listens."""
        ready = self._out / f"{role}.json"
        ready.unlink(missing_ok=True)
        self.start(role, settings + f'ready_file = "{ready}"\n')
        return self._wait_for(role, ready)

    def local_hub(self) -> str:
        """Start a Hub of this demo's own, which the processes started after it use; returns the run's URL."""
        ready = self._out / "hub.json"
        ready.unlink(missing_ok=True)
        words = ("--data", str(self._out / "hub"), "--port", "0", "--ready-file", str(ready))
        self._spawn("hub", "hub", "serve", *words)
        endpoint = self._wait_for("hub", ready)
        self._environ |= {
            "HF_ENDPOINT": endpoint, "HF_HOME": str(self._out / "hf"), "HF_TOKEN": "local", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        os.environ |= self._environ
        run_url = "hf://buckets/local/demo/run"
        from sync.stores import open_store

        open_store(run_url, create=True)
        return run_url

    def _wait_for(self, role: str, ready: Path) -> str:
        give_up = time.monotonic() + START_SECONDS
        while not ready.exists():
            self.check()
            if time.monotonic() > give_up:
                raise PeerUnavailable(f"{role} did not listen within {START_SECONDS:.0f} s; see {self._out}/{role}.log")
            time.sleep(0.05)
        return str(json.loads(ready.read_text())["url"])

    def check(self) -> None:
        """Raise ConfigError with the end of its log when a Space has died."""
        for role, child in self._children:
            code = child.poll()
            if code is not None and (role != "train" or code != 0):
                tail = (self._out / f"{role}.log").read_text(errors="replace").strip().splitlines()[-3:]
                raise ConfigError(
                    f"{role} ended with status {code}; end of {self._out}/{role}.log:\n  " + "\n  ".join(tail)
                )


def _watch(crew: _Crew, trainer: subprocess.Popen[bytes], log: Path, view: RunView, policy: Peer, env: Peer) -> None:
    """Show the trainer's events and the Spaces' counters until the trainer ends."""
    asked, rest = 0.0, ""
    with log.open() as file:
        while True:
            ended = trainer.poll() is not None
            *lines, rest = (rest + file.read()).split("\n")  # the last one may be half written
            for line in lines:
                view.line(line)
            crew.check()
            if ended:
                return
            if time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                with suppress(PeerUnavailable):  # one look less on the screen; a Space that died is seen by check()
                    view.spaces(policy.get("/sync/status", SyncStatus), env.get("/v1/status", ServiceStatus))
            time.sleep(0.1)
