"""The rollout database and the lease ledger, without a service around them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_space.config import EnvConfig
from env_space.service.ledger import Ledger
from env_space.service.service import RolloutService
from env_space.service.store import Draw, RolloutStore
from sync.errors import ConfigError
from sync.schema.calls import VersionSpan
from sync.schema.rollouts import Chain, Group, HarnessVersions, Rollout, RunRequest

pytestmark = pytest.mark.unit
RUN = RunRequest(name="r", environment="guess", policy_url="http://127.0.0.1:1")
DRAW = Draw(0, "secret-3", HarnessVersions(curriculum="4@1"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    opened = RolloutStore(tmp_path)
    opened.put_run(RUN)
    yield opened
    opened.close()


def rollout(group: str, index: int, reward: float | None = 0.5, status: str = "done") -> Rollout:
    chain = Chain(
        ids=(5, 6, 7),
        mask=(0, 1, 1),
        logprobs=(0.0, -0.25, -1.5),
        weight_versions=(VersionSpan(version="3@1", start=1, end=3),),
    )
    return Rollout.model_validate(
        {
            "id": f"{group}.{index}",
            "run": "r",
            "group": group,
            "index": index,
            "task": "secret-3",
            "environment": "guess",
            "status": status,
            "reward": reward,
            "chains": (chain,),
            "harness": DRAW.harness,
            "created_at": 12.5,
        }
    )


def add(store: RolloutStore, number: int, size: int = 2, status: str = "done") -> list[Rollout]:
    group = f"r.{number}.boot"
    rollouts = [rollout(group, index, status=status) for index in range(size)]
    draw = DRAW._replace(seq=number)
    store.start_groups("r", [draw], {})
    store.add_group("r", draw, group, rollouts, {"rollouts": size})
    return rollouts


def test_a_group_comes_back_as_it_went_in(store: RolloutStore) -> None:
    rollouts = add(store, 0)
    expected = Group(id="r.0.boot", run="r", task="secret-3", harness=DRAW.harness, rollouts=tuple(rollouts))
    assert Group.model_validate_json(store.group_json("r.0.boot")) == expected
    body = store.rollout_json("r.0.boot.1")
    assert body is not None
    assert Rollout.model_validate_json(body) == rollouts[1]
    assert store.rollout_json("nobody") is None


def test_everything_survives_closing(tmp_path: Path) -> None:
    first = RolloutStore(tmp_path)
    first.put_run(RUN)
    add(first, 0)
    add(first, 1)
    first.ack(["r.0.boot"], {"r": {"acked": 1}}, keep=100)
    flying = [Draw(2, "secret-1", HarnessVersions()), Draw(3, "secret-2", DRAW.harness)]
    first.start_groups("r", flying, {"acked": 1, "started": 4})
    first.close()
    second = RolloutStore(tmp_path)
    assert second.ready() == [("r", "r.1.boot", 2)]
    assert second.started("r") == flying
    (stored,) = second.runs()
    assert stored.request == RUN
    assert stored.cursor == 4
    assert stored.counters == {"acked": 1, "started": 4}
    assert not stored.stopped
    second.stop_run("r")
    assert second.runs()[0].stopped
    second.put_run(RUN)
    assert not second.runs()[0].stopped
    second.close()


def test_an_id_can_be_stored_once(store: RolloutStore) -> None:
    add(store, 0)
    with pytest.raises(sqlite3.IntegrityError):
        store.add_group("r", DRAW, "other", [rollout("r.0.boot", 0)], {"rollouts": 99})
    assert store.ready() == [("r", "r.0.boot", 2)], "the failed transaction left nothing behind"
    assert store.runs()[0].counters == {"rollouts": 2}


def test_the_oldest_acked_are_deleted_and_nothing_else(store: RolloutStore) -> None:
    for number in range(5):
        add(store, number)
    store.ack(["r.0.boot", "r.1.boot", "r.2.boot"], {}, keep=4)
    assert store.rollout_json("r.0.boot.0") is None
    assert store.rollout_json("r.1.boot.0") is not None
    assert store.recent(None, None, 0, 100).total == 8
    store.ack(["r.3.boot", "r.3.boot", "r.0.boot"], {}, keep=0)
    assert [group for _, group, _ in store.ready()] == ["r.4.boot"]
    assert store.recent(None, None, 0, 100).total == 2


def test_pages_are_newest_first_and_filtered(store: RolloutStore) -> None:
    for number in range(30):
        add(store, number, status="timeout" if number % 3 == 0 else "done")
    page = store.recent("r", None, 0, 3)
    assert page.total == 60
    assert [line.id for line in page.rollouts] == ["r.29.boot.1", "r.29.boot.0", "r.28.boot.1"]
    assert (page.rollouts[0].tokens, page.rollouts[0].reward, page.rollouts[0].success) == (2, 0.5, None)
    assert [line.id for line in store.recent("r", None, 58, 10).rollouts] == ["r.0.boot.1", "r.0.boot.0"]
    timeouts = store.recent("r", "timeout", 0, 100)
    assert timeouts.total == 20
    assert {line.status for line in timeouts.rollouts} == {"timeout"}
    assert store.recent("other", None, 0, 10).total == 0


def test_a_folder_has_one_owner(store: RolloutStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another environment Space uses this folder"):
        RolloutStore(tmp_path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollouts.sqlite").write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ConfigError, match="not a usable rollout database"):
        RolloutStore(tmp_path)
    other = tmp_path / "newer"
    RolloutStore(other).close()
    db = sqlite3.connect(other / "rollouts.sqlite")
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(ConfigError, match="schema version 7, this build reads 1"):
        RolloutStore(other)


def test_a_damaged_file_is_refused_when_it_is_opened(store: RolloutStore, tmp_path: Path) -> None:
    for number in range(40):
        add(store, number)
    store.close()
    path = tmp_path / "rollouts.sqlite"
    whole = path.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        whole[:40_960] + bytes(4_096) + whole[45_056:],
        whole[:100] + b"x" * 9_000,
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="not a usable rollout database"):
            RolloutStore(tmp_path)
    path.write_bytes(whole)
    RolloutStore(tmp_path).close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE runs SET request = substr(request, 2)",
        "UPDATE runs SET counters = '{'",
        "UPDATE started SET harness = 'x'",
        "DELETE FROM runs",
    ],
)
def test_damaged_rows_are_refused_when_the_service_starts(store: RolloutStore, tmp_path: Path, damage: str) -> None:
    add(store, 0)
    store.start_groups("r", [Draw(1, "secret-3", HarnessVersions())], {})
    store.close()
    db = sqlite3.connect(tmp_path / "rollouts.sqlite")
    db.execute(damage)
    db.commit()
    db.close()
    for _ in range(2):  # the folder is free again
        with pytest.raises(ConfigError, match="its rollout database is damaged"):
            RolloutService(EnvConfig(folder=tmp_path, log="none"), "0123456789abcdef")


def test_leases_lapse_renew_and_end() -> None:
    now = 0.0
    ledger = Ledger(lambda: now)
    for name in "abcd":
        ledger.add(name)
    assert ledger.lease(2, 10.0) == (["a", "b"], 0)
    assert (ledger.ready, ledger.leased, ledger.next_lapse()) == (2, 2, 10.0)
    now = 6.0
    assert ledger.renew(["b", "c", "nobody"], 10.0) == 1
    assert ledger.held(["a", "a", "nobody", "d"]) == ["a", "d"]
    ledger.ack(["a", "nobody"])
    assert ledger.held(["a"]) == []
    now = 15.9
    assert ledger.lease(5, 10.0) == (["c", "d"], 0)
    now = 16.0
    assert ledger.ready == 1
    assert ledger.lease(5, 10.0) == (["b"], 1), "a lapsed lease is delivered again and counted"
    now = 30.0
    assert ledger.lease(5, 10.0) == (["b", "c", "d"], 3), "in the order they became READY"
    now = 50.0
    assert ledger.held(["c"]) == ["c"], "an ack after the lease lapsed still counts"
    ledger.ack(["c"])
    assert ledger.lease(5, 10.0) == (["b", "d"], 2)
