"""Artifact channels: curriculum, guidance and rubric travel like weights, one JSON document per version."""

from __future__ import annotations

import pytest
from support.faults import Fault, FaultStore, copy_of, flip
from support.runs import Time, assert_i1, head_of
from support.states import small_state

from sync import ArtifactFollower, ArtifactPublisher, Follower, Identity, MemoryStore
from sync.errors import CorruptObject, Fenced, InvalidRequest, StopError, StoreUnavailable
from sync.schema.artifacts import (
    ARTIFACT_CHANNELS,
    Artifact,
    Criterion,
    Curriculum,
    CurriculumEntry,
    Guidance,
    GuidanceEntry,
    Rubric,
    parse_artifact,
)
from sync.term import Term, TermOptions

pytestmark = pytest.mark.unit


def curriculum(weight: float) -> Curriculum:
    return Curriculum(environment="guess", tasks={"7": CurriculumEntry(weight=weight, groups=3, success=0.5)})


ARTIFACTS: dict[str, Artifact] = {
    "curriculum": curriculum(0.25),
    "guidance": Guidance(environment="guess", entries=(GuidanceEntry(id="a", task="*", text="Halve — “immer” 🎯"),)),
    "rubric": Rubric(environment="guess", criteria=(Criterion(id="c", text="ends", weight=-1.5, polarity="negative"),)),
}


def opened(store: FaultStore | MemoryStore, channel: str = "curriculum", time: Time | None = None) -> ArtifactPublisher:
    made = ArtifactPublisher(store, channel, options=TermOptions(deadline=20.0), clock=(time or Time()).clock)
    made.open(takeover=True)
    return made


def test_every_channel_is_followed_with_what_it_was_measured_against() -> None:
    store = MemoryStore()
    follower = ArtifactFollower(store, *ARTIFACT_CHANNELS)
    assert follower.poll() == {}
    for n, (channel, artifact) in enumerate(ARTIFACTS.items()):
        writer = opened(store, channel)
        assert channel not in follower.poll()
        assert writer.publish(artifact, measured_against=Identity(1, 40), step=9) == Identity(1, 0)
        found = follower.poll()
        assert found[channel] == (Identity(1, 0), artifact)
        assert len(found) == n + 1
        manifest = head_of(store, channel).manifest
        assert manifest is not None
        assert (manifest.kind, manifest.measured_against, manifest.step) == ("document", "40@1", 9)
        writer.close()
        assert head_of(store, channel).closed
    for n in range(1, 30):  # across catchup lists
        writer = opened(store) if n % 10 == 1 else writer
        at = writer.publish(curriculum(n), measured_against=None)
        assert follower.poll()["curriculum"] == (at, curriculum(n))
        assert at.version == n
        assert_i1(store)
    late = ArtifactFollower(store, "curriculum")
    assert late.poll() == {"curriculum": (at, curriculum(29))}


def test_a_bad_newest_artifact_keeps_the_last_good_one_and_names_itself() -> None:
    store = FaultStore(MemoryStore())
    writer, follower = opened(store), ArtifactFollower(store, "curriculum")
    writer.publish(curriculum(1), measured_against=None)
    good = follower.poll()
    writer.publish(curriculum(2), measured_against=None)
    for where in ("heads/curriculum", "document.json"):
        store.damage = flip(where)
        with pytest.raises(CorruptObject, match=where):
            follower.poll()
        assert follower.held == good
    store.damage = lambda _k, data: data
    assert follower.poll()["curriculum"][1] == curriculum(2)


def test_an_unreadable_schema_version_is_refused_by_name() -> None:
    store = MemoryStore()
    follower = ArtifactFollower(store, "curriculum")
    term = Term.claim(store, "curriculum", clock=Time().clock)
    for body in (b'{"schema_version":2,"environment":"guess"}', b"{", b'{"environment":"guess","other":1}'):
        term.commit("document", {"document.json": body}, {"state_digest": "sha256:" + "0" * 64})
        with pytest.raises(CorruptObject, match=r"document\.json: not a curriculum of schema version 1"):
            follower.poll()
        assert follower.held == {}
    with pytest.raises(CorruptObject, match="not an artifact channel"):
        parse_artifact("weights", b"{}", "k")


def test_one_damaged_channel_stops_no_other() -> None:
    store = FaultStore(MemoryStore())
    for channel in ARTIFACT_CHANNELS:
        opened(store, channel).publish(ARTIFACTS[channel], measured_against=None)
    for where in ("heads/curriculum", "curriculum/versions", "heads/guidance", "heads/rubric", "rubric/versions"):
        store.damage = flip(where)
        follower = ArtifactFollower(store, *ARTIFACT_CHANNELS)
        with pytest.raises(CorruptObject, match=where):
            follower.poll()
        assert follower.held.keys() == set(ARTIFACT_CHANNELS) - {where.replace("heads/", "").split("/")[0]}


def test_a_damaged_artifact_head_does_not_stop_the_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    from support.runs import publisher, stamp

    store = FaultStore(MemoryStore())
    opened(store).publish(curriculum(1), measured_against=None)
    publisher(store).open(small_state(), stamp(0))
    store.damage = flip("heads/curriculum")
    follower = Follower(store, tmp_path_factory.mktemp("m"), None)
    assert follower.poll()
    assert follower.status().mirror == "0@1"
    follower.close()


def test_i3_artifacts_never_go_back_and_another_channel_starts_anew() -> None:
    store = MemoryStore()
    view = FaultStore(store)
    writer, follower = opened(store), ArtifactFollower(view, "curriculum")
    writer.publish(curriculum(1), measured_against=None)
    old = copy_of(store)
    writer.publish(curriculum(2), measured_against=None)
    follower.poll()
    view.inner = old
    assert follower.poll()["curriculum"] == (Identity(1, 1), curriculum(2))
    view.inner = fresh = MemoryStore()
    assert follower.poll()["curriculum"] == (Identity(1, 1), curriculum(2))
    time = Time()
    time.clock = time.clock._replace(token_hex=lambda n: "cd" * n)
    opened(fresh, time=time).publish(curriculum(3), measured_against=None)
    assert follower.poll()["curriculum"] == (Identity(1, 0), curriculum(3))


def test_a_version_number_is_given_to_one_content_only() -> None:
    inner = MemoryStore()
    store = FaultStore(inner)
    writer, follower = opened(store), ArtifactFollower(inner, "curriculum")
    writer.publish(curriculum(1), measured_against=None)

    def lost(method: str, keys: tuple[str, ...]) -> Fault | None:
        return "fail after" if method == "put_batch" and keys[0].startswith("heads/") else None

    store.rule = lost
    with pytest.raises(StoreUnavailable, match="outcome is unknown"):
        writer.publish(curriculum(2), measured_against=None)
    store.rule = lambda _m, _k: None
    assert follower.poll()["curriculum"] == (Identity(1, 1), curriculum(2))  # it had arrived all the same
    head = head_of(inner, "curriculum")
    with pytest.raises(StopError, match="open the channel again"):
        writer.publish(curriculum(3), measured_against=None)
    writer.close()
    assert head_of(inner, "curriculum") == head
    writer.open(takeover=True)
    assert writer.publish(curriculum(3), measured_against=None) == Identity(2, 2)
    assert follower.poll()["curriculum"] == (Identity(2, 2), curriculum(3))


def test_an_artifact_channel_has_one_writer_and_is_opened_first() -> None:
    store = MemoryStore()
    first, second = opened(store), ArtifactPublisher(store, "curriculum", clock=Time().clock)
    with pytest.raises(InvalidRequest, match="open the artifact publisher"):
        second.publish(curriculum(1), measured_against=None)
    second.close()
    with pytest.raises(Fenced, match="takeover"):
        second.open()
    second.open(takeover=True)
    with pytest.raises(Fenced, match="epoch 2"):
        first.publish(curriculum(1), measured_against=None)
    assert second.publish(curriculum(2), measured_against=None).epoch == 2
