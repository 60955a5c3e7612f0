"""One run of all three roles as processes: each is killed and started again, an object is damaged, the run ends well.

The run is made once (`story`); each test reads what was noted on the way, or what is left on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.runs import assert_i1, assert_i4, head_of, manifests, refs_of
from support_policy import TOKEN

from sync import apply_delta, state_digest
from sync.layout import DELTA, MODEL, folder_of
from sync.safetensors_io import parse_header, view
from sync.schema.base import Identity
from sync.schema.calls import SyncStatus
from sync.schema.wire import Manifest
from sync.stores import DirectoryStore

pytestmark = [
    pytest.mark.integration,
    pytest.mark.crash,
    pytest.mark.timeout(300),
]
STEPS, GROUPS, SIZE = 36, 4, 4
SECONDS = 120


class Role:
    """One process of the run; started again it has the same settings, folder and port."""

    def __init__(self, home: Path, name: str, **settings: Any) -> None:
        self.home, self.name, self.settings = home, name, settings
        self.log = home / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; a Space is waited for until it listens, and keeps its port from then on."""
        ready = self.home / f"{self.name}.json"
        ready.unlink(missing_ok=True)
        text = "".join(f"{k} = {json.dumps(v)}\n" for k, v in self.settings.items() if not isinstance(v, dict))
        for table, values in self.settings.items():
            if isinstance(values, dict):
                text += f"[{table}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        config = self.home / f"{self.name}.toml"
        config.write_text(text)
        environ = {**os.environ, "DELTAWIRE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "deltawire", self.name, "--config", str(config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        if "port" in self.settings:
            self.until(ready.exists, "listen")
            self.settings["port"] = int(json.loads(ready.read_text())["url"].rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings['port']}"

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition` while the process runs."""
        end = time.monotonic() + SECONDS
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()[-2_000:]}"
            assert time.monotonic() < end, f"{self.name} did not {what}: {self.log.read_text()[-2_000:]}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        assert self.process.wait(20) == -signal.SIGKILL

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The complete event lines of one kind, over all lives."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if event["event"] == kind]


class Crew:
    """The three roles, their bucket, and how far the training is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bucket = folder, folder / "bucket"
        self.bucket.mkdir()
        self.store = DirectoryStore(self.bucket)
        common = {"log": "json", "port": 0}
        self.env = Role(
            folder, "env", folder=str(folder / "env"), inspector=False, poll_seconds=0.2,
            ready_file=str(folder / "env.json"), **common,
        )  # fmt: skip
        self.inference = Role(
            folder, "inference", run=str(self.bucket), folder=str(folder / "mirror"), poll_seconds=0.5,
            ready_file=str(folder / "inference.json"), **common,
        )  # fmt: skip

    def start(self) -> None:
        self.env.start()
        self.inference.start()
        self.train = Role(
            self.folder, "train", run=str(self.bucket), env_urls=[self.env.url], policy_url=self.inference.url,
            out=str(self.folder / "out"), steps=STEPS, groups_per_step=GROUPS, group_size=SIZE, concurrent_groups=8,
            ready_groups=8, max_staleness=1_000, peer_seconds=60.0, report="none", log="json",
            warm_start={"steps": 80, "conversations": 1000}, evaluation={"episodes": 16},
            curriculum={"every": 4}, publishing={"anchor_share": 1.0}, sparsity={"steps": 0},
        )  # fmt: skip
        self.train.start()

    def close(self) -> None:
        for role in (self.train, self.inference, self.env):
            if role.process is not None and role.process.poll() is None:
                role.signal(signal.SIGCONT)
                role.kill()

    def step(self) -> int:
        """The optimizer steps done."""
        steps = self.train.events("step")
        return int(steps[-1]["step"]) if steps else 0

    def until_step(self, step: int) -> None:
        self.train.until(lambda: self.step() >= step, f"reach step {step}")

    def until_serving(self, condition: Callable[[SyncStatus], bool], what: str) -> SyncStatus:
        """Wait for a status of the inference Space."""
        self.inference.until(lambda: condition(self.status()), what)
        return self.status()

    def status(self) -> SyncStatus:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{self.inference.url}/sync/status", headers=headers, timeout=30)
        return SyncStatus.model_validate_json(answer.content)


class Story(NamedTuple):
    """What was seen on the way: statuses of the inference Space after its two restarts and once it was healed."""

    crew: Crew
    summary: dict[str, Any]
    version_before_kill: Identity
    resumed: SyncStatus
    env_killed_at: int
    damaged: Identity
    damaged_key: str
    refused: SyncStatus
    healed: SyncStatus


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("loop")
    crew = Crew(folder)
    try:
        yield tell(crew, folder)
    finally:
        crew.close()


def tell(crew: Crew, folder: Path) -> Story:
    """The whole run."""
    crew.start()
    crew.until_step(3)
    before = crew.status().version
    crew.inference.kill()
    shutil.copytree(folder / "mirror", folder / "mirror-old")
    crew.inference.start()
    resumed = crew.until_serving(lambda s: s.ready, "serve again")

    crew.until_step(10)
    crew.env.kill()
    env_killed_at = crew.step()
    crew.env.start()

    crew.until_step(16)
    crew.train.signal(signal.SIGSTOP)  # so that the head stays where it is
    crew.inference.kill()
    shutil.rmtree(folder / "mirror")
    (folder / "mirror-old").rename(folder / "mirror")  # the disk as it was at the first kill: versions are missing
    damaged, keys = damage_head(crew)
    crew.inference.start()
    refused = crew.until_serving(lambda s: bool(s.last_error) and s.ready, "refuse the damaged object")
    crew.train.signal(signal.SIGCONT)
    healed = crew.until_serving(lambda s: s.version is not None and Identity.parse(s.version) > damaged, "heal")

    assert crew.train.process is not None
    assert crew.train.process.wait(SECONDS) == 0, crew.train.log.read_text()[-2_000:]
    for key in keys:
        flip(crew.bucket / key)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert before is not None
    return Story(
        crew, summary, Identity.parse(before), resumed, env_killed_at, damaged, keys[0], refused, healed
    )  # fmt: skip


def damage_head(crew: Crew) -> tuple[Identity, list[str]]:
    """Flip a byte in every object that leads to the head's version: its delta, and its anchor where there is one."""
    head = head_of(crew.store).identity
    assert head is not None
    refs = [ref for ref in refs_of(crew.store) if ref.identity == head]
    names = {"delta": DELTA, "anchor": MODEL}
    keys = [folder_of(ref.key) + names[ref.kind] for ref in sorted(refs, key=lambda r: r.kind, reverse=True)]
    for key in dict.fromkeys(keys):
        flip(crew.bucket / key)
    return head, list(dict.fromkeys(keys))


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file; once more restores it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def rows(story: Story, query: str) -> list[tuple[Any, ...]]:
    """Ask the environment Space's database."""
    with closing(sqlite3.connect(f"file:{story.crew.folder}/env/rollouts.sqlite?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()


def weights(story: Story) -> dict[str, Manifest]:
    """The manifests of the weights channel by key."""
    return {key: m for key, m in manifests(story.crew.store).items() if m.channel == "weights"}


# --- the run as a whole


def test_the_run_goes_to_its_end(story: Story) -> None:
    summary = story.summary
    assert (summary["steps"], summary["environment"], summary["evaluation_episodes"]) == (STEPS, "guess", 16)
    assert summary["follower_version"] == summary["last_version"]
    assert summary["digest_failures"] == 0
    assert summary["digest_checks"] > 0
    assert [event["step"] for event in story.crew.train.events("step")] == list(range(1, STEPS + 1))
    assert {event["when"] for event in story.crew.train.events("evaluated")} == {"before", "after"}
    head = head_of(story.crew.store)
    assert head.closed
    assert str(head.identity) == summary["last_version"]
    assert head.manifest is not None
    assert (head.manifest.step, head.manifest.sync) == (STEPS, STEPS + 1)
    assert summary["versions"] == 1 + head.manifest.version


def test_every_version_replays_from_the_anchor_to_its_digest(story: Story) -> None:
    store, found = story.crew.store, weights(story)
    keys = {m.version: key for key, m in sorted(found.items())}  # "anchors" sorts before "versions"
    versions = sorted(keys.items())
    assert [version for version, _ in versions] == list(range(story.summary["versions"]))
    state: dict[str, Any] = {}
    digests: dict[int, str] = {}
    for version, key in versions:
        manifest = found[key]
        if manifest.kind == "anchor":
            state = anchor_state(store, key)
        for entry in manifest.objects:
            if entry.name == DELTA:
                apply_delta(state, store.get(folder_of(key) + DELTA, limit=1 << 30))
        digests[version] = state_digest(state)
        assert digests[version] == manifest.state_digest
    anchors = {m.version: key for key, m in found.items() if "/anchors/" in key}
    assert len(anchors) > 2
    for version, key in anchors.items():
        assert state_digest(anchor_state(store, key)) == digests[version] == found[key].state_digest


def anchor_state(store: DirectoryStore, key: str) -> dict[str, Any]:
    data = store.get(folder_of(key) + MODEL, limit=1 << 30)
    _, entries = parse_header(data, MODEL)
    return {name: view(data, entry).copy() for name, entry in entries.items()}


def test_the_channel_keeps_its_promises(story: Story) -> None:
    assert_i1(story.crew.store)
    assert_i4(story.crew.store)
    assert_i4(story.crew.store, "curriculum")


# --- the inference Space is killed


def test_a_killed_inference_space_resumes_from_its_mirror(story: Story) -> None:
    resumed = story.resumed
    first, second = story.crew.inference.events("recovered")  # behind that, an anchor may be fewer bytes than deltas
    assert Identity.parse(first["version"]) >= story.version_before_kill, "its mirror was never behind the engine"
    assert second["version"] == first["version"], "the second restart was given the disk of the first kill"
    assert resumed.digest_checks > 0
    assert resumed.digest_failures == 0
    assert resumed.version is not None
    assert Identity.parse(resumed.version) >= story.version_before_kill, "what was reported never goes back"


# --- the environment Space is killed


def test_the_training_goes_on_after_the_environment_was_killed(story: Story) -> None:
    assert 10 <= story.env_killed_at < STEPS
    assert story.summary["groups"]["space_restarts"] == 1
    assert len(story.crew.train.events("space_restarted")) == 1
    first, second = story.crew.env.events("boot")
    assert first["boot_id"] != second["boot_id"]


def test_no_group_is_trained_twice_and_no_acked_group_is_lost(story: Story) -> None:
    groups = story.summary["groups"]
    (stored,) = rows(story, "SELECT count(*) FROM groups WHERE run LIKE 'train-%'")[0]
    (acked,) = rows(story, "SELECT count(*) FROM groups WHERE run LIKE 'train-%' AND acked")[0]
    assert acked <= groups["received"] <= stored
    assert groups.get("refused", 0) == groups.get("stale_samples", 0) == 0
    finished = STEPS * GROUPS + groups.get("zero_spread", 0) - groups.get("fillers", 0)
    assert 0 <= finished - acked <= GROUPS, "only what was set aside at the end is not acked"
    assert story.summary["rollouts"] == groups["received"] * SIZE
    (counters,) = rows(story, "SELECT counters FROM runs WHERE name LIKE 'train-%'")[0]
    assert json.loads(counters)["acked"] == acked


def test_every_rollout_is_whole_after_the_kills(story: Story) -> None:
    bodies = [json.loads(body) for (body,) in rows(story, "SELECT body FROM rollouts WHERE run LIKE 'train-%'")]
    known = {str(m.identity) for m in weights(story).values()}
    assert {body["status"] for body in bodies} <= {"done", "truncated"}, "an absence of the policy fails no episode"
    assert {span["version"] for b in bodies for c in b["chains"] for span in c["weight_versions"]} <= known
    assert len({body["id"] for body in bodies}) == len(bodies)


# --- an object is damaged


def test_a_damaged_object_is_refused_by_name_and_nothing_of_it_is_applied(story: Story) -> None:
    refused, damaged = story.refused, story.damaged
    assert story.damaged_key in refused.last_error
    assert "the object was altered or cut short" in refused.last_error
    assert refused.mirror == refused.version == f"{damaged.version - 1}@{damaged.epoch}", "up to it, not into it"
    assert refused.head == str(damaged)
    found = {str(m.identity): m.state_digest for m in weights(story).values()}
    assert refused.state_digest == found[str(refused.mirror)]


def test_the_next_anchor_heals_it(story: Story) -> None:
    healed = story.healed
    assert healed.anchors_loaded >= 1
    assert healed.digest_failures == 0
    assert healed.version is not None
    found = {str(m.identity) for key, m in weights(story).items() if "/anchors/" in key}
    assert any(Identity.parse(text) > story.damaged for text in found)
    assert story.crew.status().last_error == ""


# --- curriculum and harness


def test_the_curriculum_is_followed_and_stamped(story: Story) -> None:
    published = {str(m.identity) for m in manifests(story.crew.store).values() if m.channel == "curriculum"}
    assert len(published) == story.summary["curriculum_versions"] == 1 + STEPS // 4
    bodies = [json.loads(body) for (body,) in rows(story, "SELECT body FROM rollouts WHERE run LIKE 'train-%'")]
    stamped = {body["harness"]["curriculum"] for body in bodies} - {None}
    assert stamped <= published
    assert len(stamped) > 2
    of_group: dict[str, set[str | None]] = {}
    for body in bodies:
        of_group.setdefault(body["group"], set()).add(body["harness"]["curriculum"])
    assert all(len(versions) == 1 for versions in of_group.values()), "a group pins one"
    assert {b["harness"]["curriculum"] for (t,) in rows(
        story, "SELECT body FROM rollouts WHERE run LIKE 'eval-%'") for b in [json.loads(t)]} == {None}  # fmt: skip


def test_weights_name_the_harness_behind_them(story: Story) -> None:
    stamps = {harness for (harness,) in rows(story, "SELECT DISTINCT harness FROM groups WHERE run LIKE 'train-%'")}
    stamped = {json.loads(text)["curriculum"] for text in stamps} - {None}
    by_version = {m.version: set(m.harness.get("curriculum", ())) for m in weights(story).values()}
    assert by_version[0] == set(), "nothing was trained into the first version"
    named = set().union(*by_version.values())
    assert named <= stamped
    assert len(named) > 2


def test_curricula_name_the_weights_they_were_measured_on(story: Story) -> None:
    known = {str(m.identity) for m in weights(story).values()}
    curricula = [m for m in manifests(story.crew.store).values() if m.channel == "curriculum"]
    assert {m.measured_against for m in curricula} <= known
    assert [m.step for m in sorted(curricula, key=lambda m: m.version)] == [0, *range(4, STEPS + 1, 4)]
