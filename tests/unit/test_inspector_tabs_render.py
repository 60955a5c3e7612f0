"""The inspector's other views: hostile text stays text, unknown is none, and what differs between two versions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from test_inspector_render import HOSTILE, Seen, rollout, service

from env_space.service.archive import Archive
from env_space.service.channels import Readings, reading_router
from env_space.service.store import Draw, RolloutStore
from env_space.ui import plots, render, views
from env_space.ui.bodies import Artifact, ChannelLine, Channels, EnvironmentInfo, Series, TaskStats, VersionLine, Window
from sync.artifacts import ArtifactPublisher
from sync.errors import ConfigError, InvalidRequest
from sync.schema.artifacts import Criterion, Rubric
from sync.schema.calls import Message
from sync.schema.rollouts import HarnessVersions, RolloutStatus, RunInfo, RunRequest
from sync.stores import open_store
from sync.term import TermOptions

pytestmark = pytest.mark.unit


def rubric(version: str, *criteria: Criterion) -> Artifact:
    document = Rubric(environment="guess", criteria=criteria).model_dump(mode="json")
    return Artifact(channel="rubric", version=version, document=document)


def test_hostile_text_stays_text_in_every_view() -> None:
    stats = TaskStats(environment=HOSTILE, task=HOSTILE, rollouts=1, rewarded=0, reward=None, success=None)
    info = EnvironmentInfo(name="guess", about=HOSTILE, max_turns=1, tasks=1)
    run = RunInfo(name="demo", environment=HOSTILE, purpose=HOSTILE, last_error=HOSTILE)
    line = VersionLine(version="0@1", kind=HOSTILE, bytes=1, digest="x", harness={HOSTILE: [HOSTILE]}, error=HOSTILE)
    log = ChannelLine(channel=HOSTILE, head=None, writer=HOSTILE, closed=False, split=False, live=1, versions=(line,))
    window = Window(
        rollouts=1, to=1.0, reward=1.0, statuses={HOSTILE: 1}, lag=0.0, tokens=1, seconds={HOSTILE: 1.0}
    )  # fmt: skip
    old, new = rubric("0@1", Criterion(id="a", text=HOSTILE)), rubric("1@1", Criterion(id="a", text=HOSTILE + "!"))
    talk = (Message(role="user", content=HOSTILE), Message(role="assistant", content=HOSTILE))
    pieces = [
        views.tasks([info], [stats], {"guess": [HOSTILE]}),
        views.queue(service(runs=(run,), stage_active={HOSTILE: 1})),
        views.channels(Channels(url=HOSTILE, channels=(log,)), HOSTILE),
        views.difference(old, new),
        views.game(HOSTILE, talk, {HOSTILE: 1.0, "reward": 1.0}, done=True, success=None),
        plots.plots(Series(runs={HOSTILE: (window,)})),
        render.rollout(rollout(rewards={f"criterion.{HOSTILE}": 1.0}), 0.0),
    ]
    for html in pieces:
        seen = Seen(html)
        assert HOSTILE in seen.text
        assert not {"script", "img"} & set(seen.tags)
        assert not [name for name, _ in seen.attributes if name.startswith("on")]


def test_a_difference_says_what_was_added_removed_and_changed() -> None:
    old = rubric("0@1", Criterion(id="a", text="x"), Criterion(id="b", text="y"), Criterion(id="c", text="z"))
    new = rubric("1@1", Criterion(id="a", text="x"), Criterion(id="b", text="y", bar=0.9), Criterion(id="d", text="z"))
    seen = Seen(views.difference(old, new))
    assert sorted(seen.all("data-kind")) == ["added", "changed", "removed", "same", "same"]
    assert "1 added, 1 removed, 1 changed" in seen.text
    assert views.difference(old, new).count("<mark>") == 2


def test_neighbours_and_criteria_of_a_rollout() -> None:
    item = rollout(id="g-1", rewards={"found": 1.0, "criterion.true": 0.5}, harness=HarnessVersions(rubric="3@1"))
    html = render.rollout(item, 0.0, ("g-0", "g-1", "g-2"))
    seen = Seen(html)
    assert [a for a in seen.all("data-rollout") if a != "g-1"] == ["g-0", "g-2"]
    assert "?tab=channels&run=demo&channel=rubric&version=3@1" in seen.all("href")
    assert "rubric criteria" in seen.text
    assert "criterion." not in seen.text


def stored(folder: Path, artifacts: str | None) -> None:
    store = RolloutStore(folder)
    store.put_run(RunRequest(name="demo", environment="guess", policy_url="http://127.0.0.1:9", artifacts=artifacts))
    store.start_groups("demo", [Draw(0, "secret-3", HarnessVersions())], {})
    rows: list[tuple[RolloutStatus, float | None]] = [("done", 1.0), ("done", 0.5), ("env_error", None)]
    rollouts = [
        rollout(
            id=f"g-1-{i}", index=i, status=status, reward=reward, success=None if reward is None else reward == 1.0,
            version_min=f"{i}@1", version_max=f"{2 * i}@1", created_at=100.0 + i, seconds={"run": 2.0},
        )
        for i, (status, reward) in enumerate(rows)
    ]  # fmt: skip
    store.add_group("demo", Draw(0, "secret-3", HarnessVersions()), "g-1", rollouts, {})
    store.close()


def test_an_archive_means_over_known_rewards_alone_and_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    stored(tmp_path, None)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    archive = Archive(tmp_path)
    (task,) = archive.tasks()
    assert (task["rollouts"], task["rewarded"], task["reward"], task["success"]) == (3, 2, 0.75, 0.5)
    (window,) = archive.series("demo", 1)["demo"]
    assert (window["reward"], window["lag"], window["seconds"]) == (0.75, (0 + 1 + 2) / 3, {"run": 2.0})
    assert window["statuses"] == {"done": 2, "env_error": 1}
    assert archive.group("g-1") == ["g-1-0", "g-1-1", "g-1-2"]
    archive.close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_an_archive_reads_beside_the_space_that_holds_the_folder(tmp_path: Path) -> None:
    stored(tmp_path, None)
    holder = RolloutStore(tmp_path)
    holder.put_run(RunRequest(name="second", environment="guess", policy_url="http://127.0.0.1:9"))
    archive = Archive(tmp_path)
    assert [found.request.name for found in archive.runs()] == ["demo", "second"]
    archive.close()
    holder.close()
    with pytest.raises(ConfigError, match="does not exist"):
        Archive(tmp_path / "nowhere")


def asked(folder: Path, path: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(reading_router(folder))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_channels_and_artifacts_come_from_the_runs_bucket(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    writer = ArtifactPublisher(
        open_store(url, create=True, writable=True), "rubric", options=TermOptions(settle=0.0)
    )  # fmt: skip
    writer.open()
    writer.publish(Rubric(environment="guess", criteria=(Criterion(id="a", text="x"),)), measured_against=None)
    writer.close()
    stored(tmp_path, url)
    log = asked(tmp_path, "/v1/channels?run=demo").json()
    assert [(c["channel"], c["head"]) for c in log["channels"]] == [("rubric", "0@1")]
    found = asked(tmp_path, "/v1/artifacts?run=demo&channel=rubric&version=0@1").json()
    assert (found["version"], found["document"]["criteria"][0]["text"]) == ("0@1", "x")
    for path, code in (
        ("/v1/channels?run=other", "unknown_run"),
        ("/v1/artifacts?run=demo&channel=weights&version=0", "invalid_request"),
        ("/v1/artifacts?run=demo&channel=guidance&version=0", "not_found"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            asked(tmp_path, path)
        assert refused.value.code == code


def test_more_readings_than_may_run_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(Readings(tmp_path, most=0).tasks())
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
