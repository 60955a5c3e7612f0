"""The channel's command line: what it says of a run, what it finds in a damaged one, what it takes out and deletes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import FaultStore, copy_of
from support.runs import Time, assert_i1, assert_i5, head_of, publish, publisher, refs_of, stamp
from support.states import NumpyEngine, State, nudged, same_bits, small_state

from deltawire import COMMANDS
from sync import ArtifactPublisher, Follower, Identity, MemoryStore, Publisher, PublisherOptions, state_digest
from sync.errors import ConfigError, CorruptObject, Fenced, InvalidRequest, Pruned, SchemaChanged
from sync.safetensors_io import MappedCheckpoint, write_checkpoint
from sync.schema.artifacts import Criterion, Rubric
from sync.schema.wire import Head, Manifest, Parent, Pin, SweepPlan, parse
from sync.stores import Content, DirectoryStore, ObjectInfo, Store
from sync.tensors import TensorSpec, schema_digest
from sync.term import Term, TermOptions, entries
from sync.tools.checkout import checkout
from sync.tools.close import close
from sync.tools.common import place_of
from sync.tools.doctor import doctor
from sync.tools.gc import collect, preview
from sync.tools.log import log
from sync.tools.rollback import rollback
from sync.tools.show import show
from sync.tools.status import status
from sync.tools.verify import verify

pytestmark = pytest.mark.integration
FAST = TermOptions(settle=0.0, deadline=30.0, catchup_every=4, keep_anchors=50, collect_every=0)
NOW = TermOptions(settle=0.0, deadline=30.0, grace=0.0, collect_every=0)
LIMIT = 1 << 26
SIDE = {"config.json": b'{"model_type": "test"}', "tokenizer.json": b"{}"}


def deltawire(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as a user does."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "deltawire", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def hoarder(store: Store, time: Time, *, anchor_share: float, shard_bytes: int = 1 << 30) -> Publisher:
    """A publisher that collects nothing."""
    options = PublisherOptions(anchor_share=anchor_share, shard_bytes=shard_bytes, term=FAST)
    return Publisher(store, side_files=SIDE, options=options, clock=time.clock)


def chain(store: Store, versions: int, *, time: Time | None = None, anchor_share: float = 0.8) -> list[State]:
    """Publish a chain with anchors and spans, and close it; returns every version's state."""
    writer = hoarder(store, time or Time(), anchor_share=anchor_share)
    states = [small_state()]
    writer.open(states[0], stamp(0))
    for n in range(1, versions):
        states.append(nudged(states[-1], n))
        publish(writer, states[-1], n)
        writer.wait_behind()
    writer.close()
    return states


def pin_at(store: Store, version: int, reader: str = "reader one", *, ttl: float = 1000.0) -> None:
    """Write a pin of the weights channel."""
    head = head_of(store)
    pin = Pin(channel="weights", channel_uid=head.channel_uid, epoch=1, version=version, ttl=ttl, reader=reader)
    store.put_batch({f"weights/pins/{version:016x}.json": pin.to_bytes()})


def rubric(text: str) -> Rubric:
    return Rubric(environment="guess", criteria=(Criterion(id="c", text=text),))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """A run with everything: two epochs, anchors, spans, a pin, a plan, an artifact channel. Copy it to change it."""
    root = tmp_path_factory.mktemp("whole") / "run"
    store = DirectoryStore(root, create=True)
    time = Time()
    states = chain(store, 7, time=time)
    writer = hoarder(store, time, anchor_share=50.0)
    for n in (7, 8):
        states.append(nudged(states[-1], n))
    writer.open(states[7], stamp(7))
    publish(writer, states[8], 8)
    writer.wait_behind()
    writer.close()
    pin_at(store, 2)
    collect(store, options=FAST)  # a third epoch with a plan, that of old catchup lists
    documents = ArtifactPublisher(store, "rubric", options=FAST)
    documents.open()
    documents.publish(rubric("ends with a digit"), measured_against=Identity(1, 3), step=3)
    documents.publish(rubric("ends with two"), measured_against=Identity(2, 8), step=8)
    documents.close()
    return root, states


@pytest.fixture
def run(whole: tuple[Path, list[State]], tmp_path: Path) -> DirectoryStore:
    """A copy of that run."""
    shutil.copytree(whole[0], tmp_path / "run")
    return DirectoryStore(tmp_path / "run")


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def test_every_command_has_help_and_needs_the_core_alone() -> None:
    ours = {name for name, command in COMMANDS.items() if command.module.startswith("sync.tools")}
    assert ours == {"log", "show", "verify", "checkout", "status", "gc", "rollback", "close", "doctor"}
    heavy = ["torch", "safetensors", "transformers", "fastapi", "uvicorn", "lz4"]
    code = f"""
import sys
for name in {heavy!r}:
    sys.modules[name] = None
import deltawire
for name in {sorted(ours)!r}:
    try:
        deltawire.main([name, "--help"])
    except SystemExit as error:
        assert error.code == 0
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--json") >= 2 * len(ours)
    assert done.stdout.count("URL") >= 2 * len(ours)


# --- log, show, status


def test_log_lists_live_versions_with_anchors_spans_and_pins(run: DirectoryStore) -> None:
    result = log(run)
    rubrics, weights = result["channels"]
    assert [c["channel"] for c in result["channels"]] == ["rubric", "weights"]
    assert [v["version"] for v in rubrics["versions"]] == ["1@1", "0@1"]
    refs = refs_of(run)
    assert [v["version"] for v in weights["versions"]] == [
        str(i) for i in sorted({r.identity for r in refs}, reverse=True)
    ]
    assert weights["versions"][0]["version"] == weights["head"] == "8@2"
    for row in weights["versions"]:
        here = [r for r in refs if str(r.identity) == row["version"]]
        assert {r.payload for r in here if r.kind == "anchor"} == ({row["anchor"]} - {None})
        spans = {(r.from_version, r.payload) for r in here if r.kind == "span"}
        assert spans == {(s["from"], s["bytes"]) for s in row["spans"]}
        assert row["pins"] == (["reader one"] if row["version"] == "2@1" else [])
        assert row["age"] >= 0
        assert "step" not in row
    assert any(v["spans"] for v in weights["versions"])
    assert sum(v["anchor"] is not None for v in weights["versions"]) >= 2
    short = log(run, "weights", limit=2, long=True)["channels"][0]
    assert [v["step"] for v in short["versions"]] == [8, 7]
    assert short["live"] == weights["live"] > 2


def test_log_reads_manifests_only_when_asked(run: DirectoryStore) -> None:
    store = FaultStore(run)
    log(store, "weights")
    assert not [keys for method, keys in store.calls if method == "get" and keys[0].endswith("manifest.json")]
    store.damage = lambda key, data: data[:-1] if "versions/0000000007" in key else data
    rows = log(store, "weights", long=True)["channels"][0]["versions"]
    assert [("error" in row) for row in rows][:3] == [False, True, False]


def test_show_prints_the_head_a_version_and_any_sealed_object(run: DirectoryStore) -> None:
    head = show(run)
    assert (head["kind"], head["content"]["version"]) == ("head", 8)
    for text in ("5", "5@1"):
        found = show(run, text)
        assert (found["kind"], found["content"]["version"], found["content"]["kind"]) == ("manifest", 5, "delta")
    assert show(run, "1", "rubric")["document"]["criteria"][0]["text"] == "ends with two"
    kinds = {"heads": "head", "manifest": "manifest", "catchup": "catchup", "pins": "pin", "plans": "plan"}
    for key in keys(run):
        place = place_of(key)
        kind = kinds.get("manifest" if place.name == "manifest.json" else place.kind)
        if kind is None:
            with pytest.raises(InvalidRequest, match="can be shown"):
                show(run, key)
        else:
            assert show(run, key)["kind"] == kind
    with pytest.raises(Pruned, match="live are 0@1 to 8@2"):
        show(run, "99")
    with pytest.raises(InvalidRequest, match="not a version"):
        show(run, "newest")


def test_status_says_who_writes_who_reads_and_what_it_weighs(run: DirectoryStore, tmp_path: Path) -> None:
    pin_at(run, 4, ttl=1.0)
    early = run.info(["weights/pins/0000000000000004.json"])["weights/pins/0000000000000004.json"].uploaded_at - 60
    os.utime(tmp_path / "run" / "weights/pins/0000000000000004.json", (early, early))
    before = keys(run)
    result = status(run)
    assert keys(run) == before
    weights = next(c for c in result["channels"] if c["channel"] == "weights")
    assert (weights["head"], weights["epoch"], weights["closed"], weights["split"]) == ("8@2", 3, True, False)
    assert weights["writers"] == [head_of(run).writer]
    assert result["clock"] == "store"
    assert weights["published"]["age"] >= weights["published"]["head_age"] >= 0
    two, four = weights["pins"]
    assert (two["reader"], two["version"], two["lag"], two["live"]) == ("reader one", "2@1", 6, True)
    assert 0 < two["left"] <= 1000
    assert (four["version"], four["live"]) == ("4@1", False)
    assert four["left"] < 0
    assert sum(n["bytes"] for n in result["kinds"].values()) == result["bytes"] == sum(i.size for i in run.list(""))
    assert weights["kinds"]["plans"]["objects"] == 1
    (plan,) = weights["plans"]
    assert plan["keys"] == len(parse(SweepPlan, run.get(plan["key"], limit=LIMIT), plan["key"]).keys)
    refs = refs_of(run)
    for kind, found in weights["live"].items():
        assert found["count"] == len({r.key for r in refs if r.kind == kind})


class ReadOnly(FaultStore):
    """A store whose token may not write."""

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        raise ConfigError(f"this token may not write {len(objects)} objects")


def test_status_writes_nothing_when_told_or_not_allowed(run: DirectoryStore) -> None:
    assert status(ReadOnly(run))["clock"] == "newest upload"
    watched = FaultStore(run)
    assert status(watched, probe=False)["clock"] == "newest upload"
    assert {method for method, _ in watched.calls} <= {"list", "get", "info"}


def split(store: Store) -> str:
    """A second head of the newest epoch; returns its key."""
    head = head_of(store)
    rival = head.model_copy(update={"writer": "f" * 16, "closed": False})
    key = f"heads/weights-{head.epoch:06d}-{rival.writer}.json"
    store.put_batch({key: rival.to_bytes()})
    return key


def test_a_split_is_said_and_healed_by_closing(run: DirectoryStore) -> None:
    split(run)
    weights = status(run, "weights")["channels"][0]
    assert weights["split"]
    assert len(weights["writers"]) == 2
    assert log(run, "weights")["channels"][0]["split"]
    result = verify(run)
    assert result["ok"]
    assert [c["split"] for c in result["channels"]] == [False, True, True]
    with pytest.raises(Fenced):
        close(run, options=NOW)
    assert close(run, takeover=True, options=NOW)["changed"]
    assert not status(run, "weights")["channels"][0]["split"]


# --- verify


def flip_on_disk(path: Path, at: int) -> bytes:
    """Flip one bit of a file; returns what it held before."""
    before = path.read_bytes()
    changed = bytearray(before)
    changed[at % len(before)] ^= 0x10
    path.write_bytes(changed)
    return before


def test_verify_reads_and_replays_everything(run: DirectoryStore) -> None:
    result = verify(run)
    assert result["problems"] == result["leftovers"] == result["foreign"] == []
    assert result["ok"]
    assert result["checked"] == {"objects": result["objects"], "bytes": result["bytes"]}
    assert result["objects"] == len(keys(run))
    weights = next(c for c in result["channels"] if c["channel"] == "weights")
    refs = refs_of(run)
    counts = {kind: len({r.key for r in refs if r.kind == kind}) for kind in ("delta", "span", "anchor")}
    assert counts["span"] >= 1
    assert counts["anchor"] >= 3
    assert weights["replayed"] == {**{f"{k}s": n for k, n in counts.items()}, "reached": "8@2"}
    assert (weights["versions"], weights["unreplayed"]) == (9, 0)
    quick = verify(run, quick=True)
    assert quick["ok"]
    assert quick["checked"] == result["checked"]


def test_any_flipped_byte_of_any_object_is_named_by_its_key(run: DirectoryStore, tmp_path: Path) -> None:
    seen = set()
    for number, info in enumerate(run.list("")):
        seen.add(place_of(info.key).kind)
        for place, quick in ((number * 7919, False), (-1, True), (info.size // 2, True)):
            path = tmp_path / "run" / info.key
            before = flip_on_disk(path, place)
            result = verify(run, quick=quick)
            assert [p["key"] for p in result["problems"]] == [info.key], (info.key, place, result["problems"])
            assert not result["ok"]
            path.write_bytes(before)
    assert seen == {"heads", "versions", "anchors", "spans", "catchup", "pins", "plans"}
    assert verify(run)["ok"]


def test_all_damaged_objects_are_named_at_once(run: DirectoryStore, tmp_path: Path) -> None:
    harmed = [k for k in keys(run) if k.endswith(("delta.safetensors", "config.json", "document.json"))]
    assert len(harmed) > 12
    for key in harmed:
        flip_on_disk(tmp_path / "run" / key, 3)
    done = deltawire("verify", tmp_path / "run", "--json")
    assert done.returncode == 1, done.stderr
    assert [p["key"] for p in json.loads(done.stdout)["problems"]] == sorted(harmed)


def test_any_missing_object_that_something_names_is_named(run: DirectoryStore, tmp_path: Path) -> None:
    catchup = head_of(run).catchup
    assert catchup is not None
    live = {r.key.removesuffix("manifest.json") for r in (*refs_of(run), *refs_of(run, "rubric"))}
    for info in run.list(""):
        folder = info.key[: info.key.rindex("/") + 1]
        named = folder in live or info.key == catchup.key
        path = tmp_path / "run" / info.key
        before = path.read_bytes()
        path.unlink()
        if place_of(info.key).kind != "heads":
            problems = [p["key"] for p in verify(run)["problems"]]
            assert problems == ([info.key] if named else []), (info.key, problems)
        path.write_bytes(before)


def test_what_is_not_ours_is_listed_and_harms_nothing_outside_version_folders(run: DirectoryStore) -> None:
    version = next(k for k in keys(run) if "/versions/" in k and k.endswith("delta.safetensors"))
    stranger = version.replace("delta.safetensors", "notes.txt")
    half = "weights/versions/0000000099-000009-00000000000000aa/delta.safetensors"
    run.put_batch({"README.md": b"hello", "weights/readme/x.txt": b"x", "doctor/ab/probe": b"x", half: b"half"})
    result = verify(run)
    assert result["ok"]
    assert result["foreign"] == ["README.md", "doctor/ab/probe", "weights/readme/x.txt"]
    assert result["leftovers"] == [half.removesuffix("delta.safetensors")]
    run.put_batch({stranger: b"?"})
    assert [p["key"] for p in verify(run)["problems"]] == [stranger]


def test_objects_under_another_key_than_their_own_are_named(run: DirectoryStore) -> None:
    moves = {}
    for kind in ("heads", "versions", "anchors", "spans", "plans"):
        key = next(k for k in keys(run) if place_of(k).kind == kind and place_of(k).name in ("", "manifest.json"))
        other = key.replace("-000001-", "-000000-", 1) if "-000001-" in key else key.replace("-00000", "-10000", 1)
        moves[other] = run.get(key, limit=LIMIT)
    pin = next(k for k in keys(run) if "/pins/" in k)
    moves[pin.replace("weights", "rubric")] = run.get(pin, limit=LIMIT)
    listed = next(k for k in keys(run) if "/catchup/" in k)
    moves[listed.replace("weights", "rubric")] = run.get(listed, limit=LIMIT)
    assert len(moves) == 7
    for other, data in moves.items():
        assert other not in keys(run)
        run.put_batch({other: data})
        problems = [p["key"] for p in verify(run)["problems"]]
        assert problems == [other]
        run.delete([other])


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("area", ["versions", "anchors", "spans"])
def test_a_manifest_that_was_sealed_again_is_named(run: DirectoryStore, area: str, quick: bool) -> None:
    ref = next(r for r in refs_of(run) if f"/{area}/" in r.key)
    manifest = parse(Manifest, run.get(ref.key, limit=LIMIT), ref.key)
    run.put_batch({ref.key: manifest.model_copy(update={"step": 99}).to_bytes()})
    (problem,) = verify(run, quick=quick)["problems"]
    assert problem["key"] == ref.key


def forged(store: Store, kind: str, payload: bytes | None = None, **changes: Any) -> str:
    """Let the writer name a second copy of a stored span or anchor with other facts, or with another payload; returns
    its manifest's key."""
    ref = [r for r in refs_of(store) if r.kind == kind][-1]
    manifest = parse(Manifest, store.get(ref.key, limit=LIMIT), ref.key)
    term = Term.claim(store, "weights", options=NOW)
    lie = manifest.model_copy(update={"writer": term.head.writer, **changes})
    old = ref.key.removesuffix("manifest.json")
    folder = old.replace(manifest.writer, lie.writer)
    files: dict[str, Content] = {e.name: store.get(old + e.name, limit=LIMIT) for e in manifest.objects}
    if payload is not None:
        files = {name: payload if name.endswith(".safetensors") else data for name, data in files.items()}
        lie = lie.model_copy(update={"objects": entries(files)})
    objects = {folder + name: data for name, data in files.items()}
    term.put_behind({**objects, folder + "manifest.json": lie.to_bytes()}, "a forgery")
    term.add(lie, folder)
    term.close()
    return folder + "manifest.json"


@pytest.mark.parametrize("kind", ["span", "anchor"])
def test_a_declared_digest_that_replay_does_not_give_is_named(run: DirectoryStore, kind: str) -> None:
    key = forged(run, kind, state_digest="sd1:" + "ab" * 16)
    problems = verify(run)["problems"]
    assert [p["key"] for p in problems] == [key]
    assert "declares state sd1:abab" in problems[0]["problem"]


@pytest.mark.parametrize("kind", ["span", "anchor"])
def test_objects_that_are_whole_but_give_another_state_are_named(run: DirectoryStore, kind: str) -> None:
    forged(run, kind)  # a second copy that is right is in order
    assert verify(run)["ok"]
    ref = next(r for r in refs_of(run) if r.kind == ("delta" if kind == "span" else "anchor"))
    name = "delta.safetensors" if kind == "span" else "model.safetensors"
    key = forged(run, kind, run.get(ref.key.replace("manifest.json", name), limit=LIMIT))
    assert verify(run, quick=True)["ok"]
    (problem,) = verify(run)["problems"]
    assert problem["key"] == key
    assert "declared" in problem["problem"]


def test_a_parent_link_to_another_manifest_is_named(run: DirectoryStore) -> None:
    term = Term.claim(run, "weights", options=NOW)
    last = term.head.manifest
    assert last is not None
    lie = Parent(epoch=last.epoch, version=last.version, sha256="ab" * 32)
    facts = {"state_digest": last.state_digest, "base_digest": last.state_digest, "parent": lie}
    manifest = term.commit("delta", {}, facts)
    term.close()
    (problem,) = verify(run, quick=True)["problems"]
    assert (
        problem["key"]
        == f"weights/versions/{manifest.version:010d}-{manifest.epoch:06d}-{manifest.writer}/manifest.json"
    )
    assert "parent" in problem["problem"]


class Meanwhile(FaultStore):
    """Does something once, right after the whole run was listed."""

    def __init__(self, inner: Store, work: Callable[[], object]) -> None:
        super().__init__(inner)
        self._work: Callable[[], object] | None = work

    def list(self, prefix: str) -> list[ObjectInfo]:
        found = super().list(prefix)
        if prefix == "" and self._work is not None:
            work, self._work = self._work, None
            work()
        return found


def test_a_run_that_is_written_and_collected_meanwhile_is_in_order(run: DirectoryStore) -> None:
    result = verify(Meanwhile(run, lambda: rollback(run, "5", options=NOW)))
    assert result["problems"] == []
    assert [c["head"] for c in result["channels"]] == ["1@1", "9@4"]
    run.delete([k for k in keys(run) if "/pins/" in k])
    thrifty = TermOptions(settle=0.0, grace=0.0, keep_anchors=1)
    deleted = []
    result = verify(Meanwhile(run, lambda: deleted.append(collect(run, options=thrifty)["deleted"])))
    assert deleted[0] > 5
    assert result["problems"] == []


def test_a_long_chain_is_verified_and_bounded_by_its_floor(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run", create=True)
    chain(store, 40, anchor_share=1.0)
    collect(store, options=NOW)
    head = head_of(store)
    assert head.floor > 15
    (row,) = verify(store)["channels"]
    assert (row["floor"], row["versions"]) == (head.floor, 40 - head.floor)
    assert row["replayed"]["reached"] == "39@1"
    assert_i1(store)
    assert_i5(store, tmp_path / "replays")


def test_large_objects_are_compared_on_disk_and_named_too(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run", create=True)
    rng = np.random.default_rng(3)
    state: State = {"w": rng.integers(0, 2**16, 900_000, dtype=np.uint16)}
    writer = hoarder(store, Time(), anchor_share=0.1)
    writer.open(state, stamp(0))
    publish(writer, {"w": rng.integers(0, 2**16, 900_000, dtype=np.uint16)}, 1)
    writer.wait_behind()
    writer.close()
    assert verify(store)["ok"]
    large = [i for i in store.list("") if i.size > 1 << 20]
    assert len(large) == 3
    for info in large:
        for quick in (False, True):
            before = flip_on_disk(tmp_path / "run" / info.key, -5)
            assert [p["key"] for p in verify(store, quick=quick)["problems"]] == [info.key]
            (tmp_path / "run" / info.key).write_bytes(before)


def test_what_no_whole_anchor_leads_to_is_counted(run: DirectoryStore, tmp_path: Path) -> None:
    anchors = sorted({r.key: r for r in refs_of(run) if r.kind == "anchor"}.values(), key=lambda r: r.version)
    flip_on_disk(tmp_path / "run" / anchors[0].key.replace("manifest.json", "model.safetensors"), -1)
    weights = verify(run)["channels"][-1]
    lost = [r for r in refs_of(run) if r.from_version is not None and r.from_version < anchors[1].version]
    assert weights["unreplayed"] == len({r.key for r in lost}) > 0
    assert weights["replayed"]["reached"] == "8@2"
    for anchor in anchors:
        flip_on_disk(tmp_path / "run" / anchor.key.replace("manifest.json", "tokenizer.json"), -1)
    result = verify(run)
    assert len(result["problems"]) == len(anchors) + 1
    assert result["channels"][-1]["replayed"] == {"deltas": 0, "spans": 0, "anchors": 0, "reached": None}


def test_a_head_that_nothing_leads_to_is_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run", create=True)
    chain(store, 3, anchor_share=50.0)
    term = Term.claim(store, "weights", options=NOW)
    last = term.head.manifest
    assert last is not None
    lie = {"state_digest": last.state_digest, "base_digest": "sd1:" + "cd" * 16}  # starts from a state nobody had
    manifest = term.commit("delta", {}, lie)
    term.close()
    problems = {p["key"]: p["problem"] for p in verify(store)["problems"]}
    head = f"heads/weights-000002-{manifest.writer}.json"
    assert problems.keys() == {head, f"weights/versions/0000000003-000002-{manifest.writer}/manifest.json"}
    assert "no live anchor leads to 3@2; the newest version reached is 2@1" in problems[head]


def test_a_scratch_folder_that_is_missing_is_said(run: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        verify(run, scratch=tmp_path / "nowhere")


# --- checkout


@pytest.mark.parametrize("shard_bytes", [1 << 30, 600])
def test_every_live_version_is_checked_out_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    from safetensors import safe_open

    store = DirectoryStore(tmp_path / "run", create=True)
    writer = hoarder(store, Time(), anchor_share=0.4, shard_bytes=shard_bytes)
    states = [small_state()]
    writer.open(states[0], stamp(0))
    for n in range(1, 6):
        states.append(nudged(states[-1], n))
        publish(writer, states[-1], n)
        writer.wait_behind()
    writer.close()
    for version, state in enumerate(states):
        folder = tmp_path / f"out-{version}"
        result = checkout(store, str(version), folder)
        assert result["version"] == f"{version}@1"
        assert {p.name: p.read_bytes() for p in folder.glob("*.json") if "index" not in p.name} == SIDE
        assert result["files"] == len(list(folder.iterdir()))
        shards = sorted(folder.glob("*.safetensors"))
        assert (len(shards) > 1) == (shard_bytes == 600)
        loaded: dict[str, Any] = {}
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                loaded |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file, not a dict
        assert loaded.keys() == state.keys()
        assert {str(t.dtype) for t in loaded.values()} == {"torch.bfloat16", "torch.float32", "torch.int64"}
        assert same_bits(state, MappedCheckpoint(folder).state)
        if shards[1:]:
            index = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
            assert index.keys() == state.keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out-0", "out-1", "out-2", "out-3", "out-4", "out-5", "run"]


def test_checkout_makes_the_folder_whole_or_not_at_all(
    run: DirectoryStore, whole: tuple[Path, list[State]], tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        checkout(run, "head", full)
    for key in keys(run):
        if key.endswith("model.safetensors"):
            flip_on_disk(tmp_path / "run" / key, -1)
    with pytest.raises(CorruptObject, match=r"model\.safetensors"):
        checkout(run, "head", tmp_path / "out")
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(whole[0], tmp_path / "run")
    with pytest.raises(Pruned, match="live are"):
        checkout(run, "8@1", tmp_path / "out")
    with pytest.raises(InvalidRequest, match="documents"):
        checkout(run, "head", tmp_path / "out", "rubric")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run"]
    (tmp_path / "out").mkdir()
    assert checkout(run, "head", tmp_path / "out")["version"] == "8@2"
    assert same_bits(whole[1][8], MappedCheckpoint(tmp_path / "out").state)


# --- gc


def test_gc_plans_then_deletes_and_pins_hold_it_back(tmp_path: Path) -> None:
    time = Time()
    store = MemoryStore(now=time.now)
    states = chain(store, 24, time=time)
    pin_at(store, 6, ttl=50_000.0)
    options = TermOptions(settle=0.0)
    before = copy_of(store)
    would = preview(store, options=options)
    assert before._objects == store._objects
    assert would["new_floor"] == 6
    first = collect(store, options=options, clock=time.clock)
    assert (first["floor"], first["deleted"]) == (6, 0)
    assert first["planned"] == len(would["keys"]) > 10
    assert first["planned_bytes"] == would["bytes"]
    assert first["due_in"] == pytest.approx(3600.0, abs=5)
    assert head_of(store).closed
    time.seconds += 1800
    early = collect(store, options=options, clock=time.clock)
    assert (early["deleted"], early["planned"]) == (0, 0)
    assert early["due_in"] == pytest.approx(1800.0, abs=5)
    time.seconds += 1900
    second = collect(store, options=options, clock=time.clock)
    assert (second["deleted"], second["spared"]) == (first["planned"], 0)
    assert second["deleted_bytes"] == first["planned_bytes"]
    gone = {k["key"] for k in would["keys"]}
    assert not gone & set(keys(store))
    assert min(place.at.start for k in keys(store) if (place := place_of(k)).folder and place.at is not None) == 6
    assert verify(store)["ok"]
    time.seconds += 60_000  # the pin runs out
    last = collect(store, wait=True, options=options, clock=time.clock)
    assert last["floor"] > 6
    assert last["deleted"] > 10
    assert not [k for k in keys(store) if "/pins/" in k or "/plans/" in k]
    assert verify(store)["ok"]
    assert_i1(store)
    assert_i5(store, tmp_path / "replays")
    follower = Follower(store, tmp_path / "mirror", None)
    follower.poll()
    assert same_bits(states[-1], follower._mirror.state)
    follower.close()
    heads = [k for k in keys(store) if k.startswith("heads/")]
    assert not collect(store, options=options, clock=time.clock)["claimed"]
    assert [k for k in keys(store) if k.startswith("heads/")] == heads


def test_gc_spares_what_a_pin_reaches_again() -> None:
    time = Time()
    store = MemoryStore(now=time.now)
    chain(store, 24, time=time)
    options = TermOptions(settle=0.0)
    planned = collect(store, options=options, clock=time.clock)["planned"]
    pin_at(store, 8, ttl=50_000.0)
    time.seconds += 4000
    done = collect(store, options=options, clock=time.clock)
    assert done["spared"] > 0
    assert done["deleted"] == planned - done["spared"]
    kept = [place_of(k) for k in keys(store)]
    assert min(p.at.start for p in kept if p.folder and p.at is not None) == 8


def test_gc_leaves_a_writer_at_work_alone(run: DirectoryStore) -> None:
    writer = publisher(run)
    writer.open(small_state(5), stamp(9))
    with pytest.raises(Fenced, match="takeover"):
        collect(run, options=NOW)
    writer.close()
    for text in ("gc", "close", "rollback"):
        words = [text, run.url, *(["5"] if text == "rollback" else []), "--channel", "nothing"]
        done = deltawire(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "has no channel 'nothing'; it has rubric, weights" in done.stderr
    assert not [k for k in keys(run) if "nothing" in k]


# --- rollback, close


def test_rollback_publishes_the_old_state_and_followers_converge(
    run: DirectoryStore, whole: tuple[Path, list[State]], tmp_path: Path
) -> None:
    engine = NumpyEngine()
    follower = Follower(run, tmp_path / "mirror", engine)
    follower.poll()
    result = rollback(run, "5", options=NOW)
    assert (result["old"], result["new"], result["kind"], result["head"]) == ("5@1", "9@4", "delta", "8@2")
    head = head_of(run)
    assert head.closed
    assert head.manifest is not None
    assert (head.manifest.step, head.manifest.sync) == (5, 5)
    assert follower.poll()
    assert engine.identity == Identity(4, 9)
    assert same_bits(whole[1][5], engine.state)
    assert engine.loads == 1
    follower.close()
    assert verify(run)["ok"]
    again = rollback(run, "9", options=NOW)
    assert again["new"] is None
    assert head_of(run) == head


def test_rollback_across_other_tensors_is_an_anchor_of_the_same_dtypes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run", create=True)
    writer = publisher(store)
    old = small_state()
    writer.open(old, stamp(0))
    publish(writer, {**old, "more": np.zeros(3, np.float32)}, 1)
    writer.close()
    assert rollback(store, "0", options=NOW)["kind"] == "anchor"
    checkout(store, "2", tmp_path / "out")
    again = MappedCheckpoint(tmp_path / "out")
    assert same_bits(old, again.state)
    assert {n: s.dtype for n, s in again.schema.items()} == {
        "embed": "BF16", "head": "BF16", "norm": "F32", "step": "I64", "none": "BF16"
    }  # fmt: skip
    assert (tmp_path / "out" / "config.json").exists()
    assert verify(store)["ok"]


def test_rollback_leaves_a_damaged_head_behind(
    run: DirectoryStore, whole: tuple[Path, list[State]], tmp_path: Path
) -> None:
    for key in keys(run):
        if "0000000008-000002" in key and key.endswith(".safetensors"):
            flip_on_disk(tmp_path / "run" / key, -1)
    done = rollback(run, "7", options=NOW)
    assert (done["new"], done["kind"]) == ("9@4", "anchor")
    follower = Follower(run, tmp_path / "mirror", None)
    follower.poll()
    assert same_bits(whole[1][7], follower._mirror.state)
    follower.close()


def test_rollback_keeps_dtypes_that_numpy_cannot_name(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run", create=True)
    schema = {"q": TensorSpec("F8_E4M3", (40,)), "w": TensorSpec("BF16", (8,))}
    old: State = {"q": np.arange(40, dtype=np.uint8), "w": np.arange(8, dtype=np.uint16)}
    (tmp_path / "v0").mkdir()
    write_checkpoint(tmp_path / "v0", old, schema)
    term = Term.claim(store, "weights", options=NOW)
    facts = {"state_digest": state_digest(old, schema), "schema_digest": schema_digest(schema)}
    term.commit("anchor", {"model.safetensors": tmp_path / "v0" / "model.safetensors"}, facts)
    term.close()
    writer = hoarder(store, Time(), anchor_share=50.0)
    writer.open({**old, "q": old["q"] + np.uint8(1)}, stamp(1))
    writer.close()
    assert rollback(store, "0", options=NOW)["kind"] == "delta"
    checkout(store, "2", tmp_path / "out")
    again = MappedCheckpoint(tmp_path / "out")
    assert same_bits(old, again.state)
    assert again.schema == schema
    for key in keys(store):  # the delta, and an anchor of that version if one was made behind it
        if "/0000000002-" in key and key.endswith(".safetensors"):
            flip_on_disk(tmp_path / "run" / key, -1)
    with pytest.raises(SchemaChanged, match="cannot be published as a delta"):
        rollback(store, "1", options=NOW)
    assert head_of(store).version == 2


def test_close_claims_once(run: DirectoryStore) -> None:
    assert not close(run, options=NOW)["changed"]
    writer = publisher(run)
    writer.open(small_state(5), stamp(9))
    with pytest.raises(Fenced):
        close(run, options=NOW)
    assert not head_of(run).closed
    assert close(run, takeover=True, options=NOW) == {
        "url": run.url, "channel": "weights", "changed": True, "head": "9@4", "epoch": 5,
    }  # fmt: skip
    assert head_of(run).closed
    with pytest.raises(Fenced):
        publish(writer, small_state(6))
    writer.close()


# --- doctor


class Late(FaultStore):
    """A store whose answers trail behind its writes by `late` seconds: listings and look-ups, and reads if `reads`;
    with `flaps` every second answer is fresh."""

    def __init__(self, time: Time, late: float, *, reads: bool = False, flaps: bool = False) -> None:
        super().__init__(MemoryStore(now=time.now))
        self._time, self._late, self._reads, self._flaps = time, late, reads, flaps
        self._looks = 0
        self._past: list[tuple[float, MemoryStore]] = [(0.0, MemoryStore())]

    def _note(self) -> None:
        assert isinstance(self.inner, MemoryStore)
        self._past.append((self._time.now(), copy_of(self.inner)))

    def _shown(self) -> MemoryStore:
        self._looks += 1
        if self._flaps and self._looks % 2:
            return self._past[-1][1]
        return [store for at, store in self._past if at <= self._time.now() - self._late][-1]

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        super().put_batch(objects)
        self._note()

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        self._note()

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._shown().list(prefix)

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        return self._shown().info(keys)

    def get(self, key: str, *, limit: int) -> bytes:
        return (self._shown() if self._reads else self.inner).get(key, limit=limit)


def test_doctor_of_a_store_without_lag_recommends_its_default(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run", create=True)
    chain(store, 3)
    before = keys(store)
    result = doctor(store, rounds=3, batch=4)
    assert keys(store) == before
    assert result["ok"]
    assert result["rights"] == {"read": True, "write": True, "why": ""}
    assert {seen["stale"] for seen in result["staleness"].values()} == {0}
    assert (result["recommended"]["lag"], result["recommended"]["grace"]) == (0.0, 3600.0)
    assert abs(result["clock_offset"]["seconds"]) < 60
    assert result["throughput"]["up"] > 0
    store.lag = 2.0
    assert doctor(store, rounds=1, batch=2)["recommended"]["lag"] == 2.0


@pytest.mark.parametrize("reads", [False, True])
def test_doctor_measures_staleness_and_recommends_twice_of_it(reads: bool) -> None:
    time = Time()
    store = Late(time, 1.5, reads=reads)
    result = doctor(store, rounds=2, batch=3, clock=time.clock)
    seen = result["staleness"]
    for name in ("put_to_list", "put_to_info", "overwrite_to_list", "delete_to_list"):
        assert seen[name]["stale"] == 2
        assert seen[name]["worst"] == pytest.approx(1.5, abs=0.11)
    assert (seen["overwrite_to_read"]["worst"] > 1) == reads
    assert result["recommended"]["lag"] == pytest.approx(3.0, abs=0.2)
    assert result["ok"]
    assert store.inner.list("doctor/") == []


def test_doctor_is_not_misled_by_one_fresh_answer() -> None:
    time = Time()
    result = doctor(Late(time, 1.5, flaps=True), rounds=2, batch=3, clock=time.clock)
    assert result["staleness"]["put_to_list"]["worst"] == pytest.approx(1.5, abs=0.2)


def test_doctor_says_when_a_write_is_never_seen() -> None:
    time = Time()
    result = doctor(Late(time, 90.0), rounds=1, batch=2, patience=10.0, clock=time.clock)
    assert not result["ok"]
    assert result["staleness"]["put_to_list"]["unseen"] == 1
    assert any("not seen within the patience" in line for line in result["recommended"]["why"])
    assert result["recommended"]["lag"] >= 20.0


class Halves(FaultStore):
    """A store whose batches appear one half after the other, with a look between them."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._looked = threading.Event()

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        half = dict(list(objects.items())[: len(objects) // 2])
        if half:
            super().put_batch(half)
            self._looked.clear()
            assert self._looked.wait(60)
        super().put_batch(objects)

    def list(self, prefix: str) -> list[ObjectInfo]:
        found = super().list(prefix)
        self._looked.set()
        return found


def test_doctor_sees_that_batches_are_not_atomic() -> None:
    assert doctor(Halves(MemoryStore()), rounds=2, batch=6)["batches"]["partial"] >= 2
    assert doctor(MemoryStore(), rounds=2, batch=6)["batches"]["partial"] == 0


def test_doctor_without_the_right_to_write_says_so_and_writes_nothing() -> None:
    store = ReadOnly(MemoryStore())
    result = doctor(store)
    assert result["rights"] == {"read": True, "write": False, "why": "this token may not write 1 objects"}
    assert result["staleness"] is result["recommended"] is None


# --- as a user calls it


@pytest.fixture
def lines(run: DirectoryStore) -> Callable[..., list[str]]:
    """Call a command on the run; its lines on standard output."""

    def call(name: str, *words: object, rc: int = 0) -> list[str]:
        done = deltawire(name, run.url, *words)
        assert done.returncode == rc, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()

    return call


def test_the_commands_print_lines_for_people(
    lines: Callable[..., list[str]], run: DirectoryStore, tmp_path: Path
) -> None:
    found = lines("log", "--channel", "weights", "--limit", "3")
    assert found[0].startswith("weights: head 8@2, epoch 3 of writer ")
    assert found[1].split()[:2] == ["8@2", "delta"]
    assert found[-1] == "  and 6 more; --limit 0 shows all"
    assert any("pin  reader one  at 2@1  6 versions behind" in line for line in lines("status"))
    assert lines("show", "head")[0].startswith("heads/weights-000003-")
    assert lines("verify")[-1] == "no problem found"
    (told,) = lines("checkout", "4", tmp_path / "out")
    assert told.startswith("4@1  sd1:")
    assert "would go" in lines("gc", "--dry-run")[0]
    assert lines("gc", "--grace", "0", "--wait")[0].startswith("weights: floor 2, ")
    assert lines("rollback", "4")[0].startswith("weights: 4@1 -> 9@")
    assert lines("close")[0].startswith("weights: was closed already at 9@")
    assert lines("doctor", "--rounds", "1", "--batch", "2")[0] == f"{run.url}: may read, may write"
    path = next(k for k in keys(run) if k.endswith("delta.safetensors"))
    flip_on_disk(tmp_path / "run" / path, 9)
    assert lines("verify", rc=1)[-1].startswith(f"  {path}: ")


def test_the_commands_print_one_json_document(lines: Callable[..., list[str]], tmp_path: Path) -> None:
    for words in (
        ["log"], ["show"], ["status"], ["verify", "--quick"], ["checkout", "head", tmp_path / "out"], ["gc"],
        ["gc", "--dry-run"], ["rollback", "3"], ["close"], ["doctor", "--rounds", "1", "--batch", "2"],
    ):  # fmt: skip
        (text,) = lines(*words, "--json")
        assert json.loads(text)["url"].startswith("file:///")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["log", "{tmp}/none"], "no such bucket folder"),
        (["status", "{tmp}"], "no channel at all"),
        (["verify", "{tmp}"], "no channel at all"),
        (["verify", "{run}", "--channel", "weigths"], "it has rubric, weights"),
        (["show", "{run}", "heads/../x"], "not a key"),
        (["checkout", "{run}", "77", "{tmp}/out"], "live are 0@1 to 8@2"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, run: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    named = [w.format(run=tmp_path / "run", tmp=tmp_path / "empty") for w in words]
    done = deltawire(*named)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_head_of_another_channel_does_not_hide_ours(run: DirectoryStore) -> None:
    (key,) = [k for k in keys(run) if k.startswith("heads/rubric")]
    head = parse(Head, run.get(key, limit=LIMIT), key)
    run.put_batch({key: head.to_bytes()[:-9]})
    with pytest.raises(CorruptObject, match="heads/rubric"):
        status(run)
    assert status(run, "weights", probe=False)["channels"][0]["head"] == "8@2"
    assert [p["key"] for p in verify(run)["problems"]] == [key]
