"""Chains written by earlier builds stay readable, bit for bit: one folder per format version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import assert_i1, assert_i4, assert_i5, head_of, refs_of
from support.states import State

from sync import ArtifactFollower, DirectoryStore, Follower, Identity
from sync.canonical import sha256_hex
from sync.pins import read_pins
from sync.schema.artifacts import Curriculum
from sync.schema.base import FORMAT

pytestmark = pytest.mark.contract

HERE = Path(__file__).parent
CHAINS = sorted(HERE.glob("format-*"))


def sha_of(state: State) -> dict[str, str]:
    return {name: sha256_hex(array.tobytes()) for name, array in state.items()}


def test_the_present_format_has_a_golden_chain() -> None:
    assert HERE / f"format-{FORMAT}" in CHAINS


@pytest.mark.parametrize("chain", CHAINS, ids=lambda p: p.name)
def test_every_version_that_can_be_reached_has_its_bits(chain: Path, tmp_path: Path) -> None:
    store = DirectoryStore(chain / "run")
    expected: dict[str, dict[str, str]] = json.loads((chain / "expected.json").read_text())
    head = head_of(store)
    refs = refs_of(store)
    assert {r.kind for r in refs} == {"anchor", "delta", "span"}
    assert head.closed
    live = sorted({r.identity for r in refs})
    assert live[-1] == head.identity
    assert {str(i) for i in live} <= set(expected)
    assert len(live) == len(expected)
    for identity in live:
        follower = Follower(store, tmp_path / str(identity), None)
        follower._replica.go_to(identity, head)
        assert sha_of(follower._mirror.state) == expected[str(identity)]
        assert follower._mirror.audit()
        follower.close()


@pytest.mark.parametrize("chain", CHAINS, ids=lambda p: p.name)
def test_the_promises_hold_on_it(chain: Path, tmp_path: Path) -> None:
    store = DirectoryStore(chain / "run")
    assert_i1(store)
    assert_i4(store)
    assert_i5(store, tmp_path)
    (pinned,), damaged = read_pins(store, "weights", head_of(store).channel_uid)
    assert (pinned.pin.reader, pinned.pin.version, damaged) == ("golden", 12, [])
    artifacts = ArtifactFollower(store, "curriculum").poll()
    assert artifacts["curriculum"] == (Identity(1, 3), Curriculum(environment="guess-3"))
    assert len({r.version for r in refs_of(store, "curriculum")}) == 4
