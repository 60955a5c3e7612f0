"""A follower that goes to one version and stays there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import publish, publisher, stamp
from support.states import NumpyEngine, nudged, same_bits, small_state

from inference_space.config import InferenceConfig
from sync import Follower, MemoryStore
from sync.errors import ConfigError, Pruned

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("at", ["2", "2@1"])
def test_it_goes_to_its_version_and_stays(tmp_path: Path, at: str) -> None:
    store = MemoryStore()
    writer = publisher(store)
    states = [small_state()]
    writer.open(states[0], stamp(0))
    for seed in (1, 2, 3):
        states.append(nudged(states[-1], seed))
        publish(writer, states[-1], seed)
    engine = NumpyEngine()
    follower = Follower(store, tmp_path / "mirror", engine, at=at)
    assert follower.poll()
    assert follower.status().version == "2@1"
    assert same_bits(engine.state, states[2])
    publish(writer, nudged(states[-1], 4), 4)
    assert not follower.poll()
    status = follower.status()
    assert (status.version, status.head, status.lag, status.last_error) == ("2@1", "4@1", 0, "")
    follower.close()
    again = Follower(store, tmp_path / "mirror", NumpyEngine(), at=at)
    again.poll()
    assert again.status().version == "2@1"
    again.close()
    other = Follower(store, tmp_path / "mirror", NumpyEngine(), at="1")
    with pytest.raises(ConfigError, match=r"holds 2@1, not 1; choose an empty folder"):
        other.poll()
    other.close()
    writer.close()


def test_a_version_that_is_not_live_is_named(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = publisher(store)
    writer.open(small_state(), stamp(0))
    follower = Follower(store, tmp_path / "mirror", NumpyEngine(), at="7")
    with pytest.raises(Pruned, match=r"version 7 is not live; live are 0@1 to 0@1"):
        follower.poll()
    assert not follower.status().ready
    follower.close()
    writer.close()


def test_the_setting_takes_a_bare_number(tmp_path: Path) -> None:
    for given, wanted in ((12, "12"), ("12@2", "12@2"), (None, None)):
        assert InferenceConfig(run="file:///x", folder=tmp_path, at=given).at == wanted
    with pytest.raises(ValueError, match="at"):
        InferenceConfig(run="file:///x", folder=tmp_path, at="newest")
