"""kill -9 of an environment Space: nothing acked comes again, nothing unacked is lost, no id is used twice."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support_policy import TOKEN, make_policy, served

from sync.schema.rollouts import Group, LeaseResponse, RunInfo, ServiceStatus

pytestmark = pytest.mark.crash
ROOT = Path(__file__).parents[2]
MAIN = (
    "import argparse, sys; from env_space.cli import add_arguments, run; "
    "p = argparse.ArgumentParser(); add_arguments(p); sys.exit(run(p.parse_args()))"
)


class Process:
    """One life of an environment Space."""

    def __init__(self, process: subprocess.Popen[bytes], client: httpx.Client) -> None:
        self.process, self.client = process, client

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(20) == -signal.SIGKILL

    def start(self, policy_url: str, **more: object) -> None:
        body = {"name": "r", "environment": "guess", "policy_url": policy_url, "group_size": 2, **more}
        self.client.post("/v1/runs", json=body).raise_for_status()

    def lease(self, limit: int = 8) -> LeaseResponse:
        answer = self.client.get("/v1/rollouts", params={"run": "r", "limit": limit, "wait": 20})
        assert answer.status_code == 200, answer.text
        return LeaseResponse.model_validate_json(answer.content)

    def ack(self, groups: list[Group]) -> int:
        answer = self.client.post("/v1/rollouts/ack", json={"groups": [group.id for group in groups]})
        return int(answer.json()["changed"])

    def status(self) -> ServiceStatus:
        return ServiceStatus.model_validate_json(self.client.get("/v1/status").content)

    def run(self) -> RunInfo:
        return self.status().runs[0]


@contextmanager
def alive(folder: Path) -> Iterator[Process]:
    """Start an environment Space on `folder`; ends it whatever happens."""
    ready = folder.parent / "ready.json"
    ready.unlink(missing_ok=True)
    flags = ["--folder", str(folder), "--ready-file", str(ready), "--inspector", "false", "--log", "none"]
    env = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", MAIN, *flags], cwd=ROOT, env=env)
    try:
        end = time.monotonic() + 30
        while not ready.exists():
            assert process.poll() is None, f"the environment Space ended with {process.returncode}"
            assert time.monotonic() < end, "the environment Space did not start within 30 s"
            time.sleep(0.02)
        url = json.loads(ready.read_text())["url"]
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=40) as client:
            yield Process(process, client)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def test_kill_between_every_step_of_delivery(tmp_path: Path) -> None:
    acked: dict[str, Group] = {}
    unacked: dict[str, Group] = {}
    boots: set[str] = set()
    with served(make_policy(TOKEN)) as policy_url:
        for life in range(3):
            with alive(tmp_path / "env") as space:
                boots.add(space.status().boot_id)
                if life == 0:
                    space.start(policy_url, concurrent_groups=4, ready_groups=6)
                else:
                    assert space.status().restored_rollouts >= 2 * len(unacked)
                got: dict[str, Group] = {}
                while not (unacked.keys() <= got.keys() and len(got) >= 8):
                    got |= {group.id: group for group in space.lease().groups}
                assert got.keys().isdisjoint(acked), "nothing acked is delivered again"
                for name, group in unacked.items():
                    assert got[name] == group, "the same ids with the same content"
                mine = list(got.values())
                assert space.ack(mine[::2]) == len(mine[::2])
                acked |= {group.id: group for group in mine[::2]}
                unacked = {group.id: group for group in mine[1::2]}
                if life < 2:
                    space.kill()
        assert len(boots) == 3, "a new boot_id says that there was a restart"
    everything = [rollout.id for group in (*acked.values(), *unacked.values()) for rollout in group.rollouts]
    assert len(everything) == len(set(everything))


def test_groups_in_flight_are_rolled_again_and_no_task_is_skipped(tmp_path: Path) -> None:
    policy = make_policy(TOKEN)
    with served(policy) as policy_url:
        with alive(tmp_path / "env") as space:
            policy.state.mode = "hang"
            evaluation = {"purpose": "evaluation", "tasks": 14, "concurrent_groups": 5, "ready_groups": 20}
            space.start(policy_url, **evaluation)
            assert space.run().groups_active == 5
            space.kill()
        policy.state.mode = "ok"
        with alive(tmp_path / "env") as space:
            groups: list[Group] = []
            while True:
                got = space.lease()
                groups += got.groups
                if got.complete:
                    break
            assert sorted(group.task for group in groups) == sorted([f"secret-{n}" for n in range(1, 8)] * 2)
            info = space.run()
            assert (info.groups_started, info.complete, info.groups_dropped) == (14, True, 0)
            assert space.ack(groups) == 14
            space.kill()
        with alive(tmp_path / "env") as space:
            end = space.lease()
            assert end.groups == ()
            assert end.complete
            assert space.run().groups_acked == 14
            assert space.status().restored_rollouts == 0


def test_a_stop_by_signal_is_clean(tmp_path: Path) -> None:
    with served(make_policy(TOKEN)) as policy_url, alive(tmp_path / "env") as space:
        space.start(policy_url)
        assert space.lease().groups
        space.process.terminate()
        assert space.process.wait(20) == 0


def test_a_disk_that_takes_nothing_is_waited_for(tmp_path: Path) -> None:
    with served(make_policy(TOKEN)) as policy_url, alive(tmp_path / "env") as space:
        space.start(policy_url, concurrent_groups=2, ready_groups=4)
        got = space.lease(2).groups
        limits = resource.prlimit(space.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(space.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))  # every write fails
        acks = {"groups": [group.id for group in got]}
        refused = space.client.post("/v1/rollouts/ack", json=acks)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_failed")
        other = {"name": "other", "environment": "guess", "policy_url": policy_url}
        assert space.client.post("/v1/runs", json=other).status_code == 503
        assert space.client.delete("/v1/runs/r").status_code == 503
        while "free some space" not in space.run().last_error:
            time.sleep(0.02)
        info = space.run()
        assert (len(space.status().runs), info.groups_acked, info.groups_leased) == (1, 0, len(got))

        resource.prlimit(space.process.pid, resource.RLIMIT_FSIZE, limits)
        assert space.ack(list(got)) == len(got), "what was refused can be acked"
        seen = {group.id for group in got}
        while len(seen) < 12:  # more than could be READY: the run goes on
            more = space.lease().groups
            assert seen.isdisjoint(group.id for group in more)
            seen |= {group.id for group in more}
            assert space.ack(list(more)) == len(more)
        assert space.run().last_error == ""
        assert sorted(int(name.split(".")[1]) for name in seen) == sorted({int(name.split(".")[1]) for name in seen})
        space.kill()
    with alive(tmp_path / "env") as space:
        assert space.run().groups_acked == len(seen), "counted once, on disk too"
        assert not {group.id for group in space.lease().groups} & seen
