"""What every Store promises, asked of each."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devhub import HubProcess
from support.faults import FaultStore

from sync.errors import ConfigError, CorruptObject, ObjectMissing, StoreUnavailable
from sync.stores import DirectoryStore, MemoryStore, Store, open_store
from sync.stores.hub import HubStore

pytestmark = pytest.mark.contract

BIG = 1 << 20
BAD_KEYS = [
    "", ".", "..", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "/a", "a/.hidden", "a b", "a\n", "a\0b", "ä", "a\\b",
    "a/" + "b" * 129, "/".join(["a" * 100] * 6), "~", "-x", "a/*", "a?b",
]  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One Hub for all; it answers reads by a redirect to a second port, as the real one does."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch, HubProcess(folder / "server", "--cdn") as server:
        patch.setenv("HF_HOME", str(folder / "home"))  # what hf_xet remembers of uploads belongs to this Hub
        yield server


@pytest.fixture(params=["memory", "directory", "hub", "hub behind faults"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "directory":
        return DirectoryStore(tmp_path / "bucket", create=True, writable=True)
    server: HubProcess = request.getfixturevalue("hub")
    found = HubStore(f"hf://buckets/local/contract/{secrets.token_hex(8)}", create=True, endpoint=server.url)
    return found if request.param == "hub" else FaultStore(found)


def test_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "byte", "big"])
def test_round_trip(store: Store, data: bytes, tmp_path: Path) -> None:
    store.put_batch({"a/b.bin": data, "c": b"other"})
    assert store.get("a/b.bin", limit=len(data)) == data
    store.fetch("a/b.bin", tmp_path / "here", limit=len(data))
    assert (tmp_path / "here").read_bytes() == data
    info = store.info(["a/b.bin"])["a/b.bin"]
    assert (info.key, info.size) == ("a/b.bin", len(data))
    assert info == store.list("a/")[0]


def test_overwrite_shows_the_new_bytes_and_always_changes_the_etag(store: Store) -> None:
    etags = []
    for n in range(30 if store.url.startswith("hf://") else 200):
        store.put_batch({"heads/h.json": b"%04d" % n})
        assert store.get("heads/h.json", limit=4) == b"%04d" % n
        etags.append(store.info(["heads/h.json"])["heads/h.json"].etag)
    assert len(set(etags)) == len(etags)


def test_list_gives_a_prefix_in_key_order(store: Store) -> None:
    keys = ["heads/b.json", "heads/a.json", "heads-x", "w/versions/1/m.json", "w/versions/10/m.json", "w/a"]
    store.put_batch({key: key.encode() for key in keys})
    assert [i.key for i in store.list("heads/")] == ["heads/a.json", "heads/b.json"]
    assert [i.key for i in store.list("heads")] == ["heads-x", "heads/a.json", "heads/b.json"]
    assert [i.key for i in store.list("w/versions/1")] == ["w/versions/1/m.json", "w/versions/10/m.json"]
    assert [i.key for i in store.list("")] == sorted(keys)
    assert store.list("nothing/") == []
    assert store.list("heads/a.json/") == []


def test_info_leaves_out_what_is_missing(store: Store) -> None:
    store.put_batch({"a/x": b"1"})
    assert set(store.info(["a/x", "a/y", "a/x/z", "a"])) == {"a/x"}
    assert store.info([]) == {}


def test_a_folder_is_no_object(store: Store, tmp_path: Path) -> None:
    store.put_batch({"a/x": b"1"})
    with pytest.raises(ObjectMissing, match="a"):
        store.get("a", limit=BIG)
    with pytest.raises(ObjectMissing):
        store.fetch("a", tmp_path / "f", limit=BIG)
    with pytest.raises(ObjectMissing):
        store.get("a/x/y", limit=BIG)


def test_delete_of_a_missing_object_is_no_error(store: Store) -> None:
    store.put_batch({"a": b"1", "b/c": b"2"})
    store.delete(["a", "never/there", "b/c/d"])
    store.delete(["a"])
    assert [i.key for i in store.list("")] == ["b/c"]
    with pytest.raises(ObjectMissing, match="a"):
        store.get("a", limit=1)


def test_more_than_the_limit_is_corrupt(store: Store, tmp_path: Path) -> None:
    store.put_batch({"a": b"12345"})
    target = tmp_path / "out" / "file"
    target.parent.mkdir()
    target.write_bytes(b"before")
    with pytest.raises(CorruptObject, match="5 bytes"):
        store.get("a", limit=4)
    with pytest.raises(CorruptObject, match="5 bytes"):
        store.fetch("a", target, limit=4)
    with pytest.raises(ObjectMissing):
        store.fetch("b", target, limit=4)
    assert target.read_bytes() == b"before"
    assert list(target.parent.iterdir()) == [target]
    store.fetch("a", target, limit=5)
    assert target.read_bytes() == b"12345"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_outside_the_grammar_is_refused_by_every_method(store: Store, key: str, tmp_path: Path) -> None:
    store.put_batch({"a/b": b"1"})
    with pytest.raises(CorruptObject):
        store.put_batch({key: b"x"})
    with pytest.raises(CorruptObject):
        store.get(key, limit=BIG)
    with pytest.raises(CorruptObject):
        store.fetch(key, tmp_path / "f", limit=BIG)
    with pytest.raises(CorruptObject):
        store.info([key])
    with pytest.raises(CorruptObject):
        store.delete([key])
    assert [i.key for i in store.list("")] == ["a/b"]


def test_files_are_sent_like_bytes(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "large").write_bytes(bytes(range(256)) * 20_000)
    store.put_batch({"w/empty": tmp_path / "empty", "w/large": tmp_path / "large", "w/bytes": b"x"})
    (tmp_path / "large").write_bytes(b"changed after the call")
    assert {i.key: i.size for i in store.list("w/")} == {"w/bytes": 1, "w/empty": 0, "w/large": 5_120_000}
    assert store.get("w/large", limit=5_120_000) == bytes(range(256)) * 20_000
    store.fetch("w/empty", tmp_path / "copy", limit=0)
    assert (tmp_path / "copy").read_bytes() == b""
    with pytest.raises(CorruptObject, match="5120000 bytes"):
        store.fetch("w/large", tmp_path / "copy", limit=5_119_999)
    assert (tmp_path / "copy").read_bytes() == b""


def test_nothing_to_do_is_no_error(store: Store) -> None:
    store.put_batch({})
    store.delete([])
    assert store.info([]) == {}
    assert store.list("") == []


def test_more_than_a_thousand_keys(store: Store) -> None:
    keys = [f"w/{n % 7}/{n:04d}" for n in range(1100)]
    store.put_batch({key: key[-2:].encode() for key in keys})
    assert [i.key for i in store.list("")] == sorted(keys)
    found = store.info([*keys, "w/none"])
    assert set(found) == set(keys)
    assert {i.size for i in found.values()} == {2}
    store.delete(keys[1:])
    assert [i.key for i in store.list("")] == keys[:1]


def test_threads_may_share_a_store(store: Store, tmp_path: Path) -> None:
    wrong: list[object] = []

    def use(number: int) -> None:
        for n in range(5):
            key, data = f"w/{number}/{n}", bytes([number, n]) * 10_000
            store.put_batch({key: data, f"heads/{number}": b"%d" % n})
            store.fetch(key, tmp_path / str(number), limit=BIG)
            seen = (
                store.get(key, limit=BIG),
                (tmp_path / str(number)).read_bytes(),
                store.get(f"heads/{number}", limit=1),
            )
            if seen != (data, data, b"%d" % n) or len(store.info([key])) != 1:
                wrong.append((number, n))
        store.delete([f"w/{number}/{n}" for n in range(4)])

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert wrong == []
    assert [i.key for i in store.list("w/")] == [f"w/{n}/4" for n in range(4)]


def test_concurrent_readers_never_see_half_an_object(store: Store, tmp_path: Path) -> None:
    size, stop, reads = 300_000, threading.Event(), [0, 0]
    wrong: list[int] = []
    store.put_batch({"heads/h": b"a" * size})

    def read(number: int) -> None:
        path = tmp_path / f"copy-{number}"
        while not stop.is_set():
            store.fetch("heads/h", path, limit=size)
            found = (store.get("heads/h", limit=size), path.read_bytes())
            wrong.extend(len(data) for data in found if len(data) != size or data != data[:1] * size)
            if any(i.size != size for i in store.list("heads/")) or len(store.list("heads/")) != 1:
                wrong.append(-1)
            reads[number] += 1

    readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for reader in readers:
        reader.start()
    written = 0
    while written < 40 or (min(reads) < 5 and all(r.is_alive() for r in readers)):
        store.put_batch({"heads/h": b"%c" % (97 + written % 26) * size})
        written += 1
    stop.set()
    for reader in readers:
        reader.join(30)
    assert wrong == []
    assert min(reads) >= 5


# --- the directory alone


def test_a_folder_that_cannot_be_a_bucket_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root, text in [(tmp_path / "missing", "no such bucket"), (tmp_path / "file", "cannot be used")]:
        with pytest.raises(ConfigError, match=text):
            DirectoryStore(root)
    with pytest.raises(ConfigError, match="cannot be used"):
        DirectoryStore(tmp_path / "file", create=True)
    with pytest.raises(ConfigError, match="cannot be used"):
        DirectoryStore(tmp_path / "file" / "below", create=True)
    with pytest.raises(ConfigError, match="write"):
        DirectoryStore(Path("/proc/self/fdinfo"), writable=True)  # no one writes there, root included


def test_a_write_that_the_disk_refuses_is_unavailable_and_leaves_nothing_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "b", create=True)
    store.put_batch({"a": b"1"})
    with pytest.raises(StoreUnavailable, match="cannot write"):
        store.put_batch({"a/b": b"2"})  # `a` is a file
    assert [i.key for i in store.list("")] == ["a"]


WRITER = """
import sys
from pathlib import Path
from sync.stores import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]), create=True)
n = 0
while True:
    store.put_batch({f"w/{n % 3}": bytes([n % 251]) * 3_000_000})
    n += 1
    if n == 3:
        print("going", flush=True)
"""


def test_leftovers_of_a_killed_writer_are_invisible(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"going\n"
        seen: list[Path] = []
        while not seen:  # catch it in the middle of a write
            seen = list((tmp_path / ".parts").glob("*"))
        child.send_signal(signal.SIGKILL)
    store = DirectoryStore(tmp_path)
    assert [i.key for i in store.list("")] == ["w/0", "w/1", "w/2"]
    for info in store.list("w/"):
        data = store.get(info.key, limit=3_000_000)
        assert len(data) == info.size == 3_000_000
        assert data == data[:1] * 3_000_000


def test_open_store_by_url(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    made = open_store(f"file://{tmp_path}/a%20b", create=True, writable=True)
    made.put_batch({"x": b"1"})
    assert (folder / "x").read_bytes() == b"1"
    assert open_store(str(folder)).get("x", limit=1) == b"1"
    assert (open_store(str(folder)).lag, open_store(str(folder), lag=3.5).lag) == (0.0, 3.5)
    bad = ["", "memory:", "s3://x/y", "file://host/x", "file:", f"file://{tmp_path}/none"]
    bad += [
        f"hf://{rest}"
        for rest in ("", "buckets", "buckets/a", "buckets/a/b", "buckets/a/b/", "a/b/c", "datasets/a/b/c")
    ]
    bad += [
        f"hf://buckets/{rest}"
        for rest in ("a/b/../c", "a/b//c", "a/b/c?d", "a/b/c#d", "a/../c", "/b/c", "a/b/ä", "a b/c/d")
    ]
    for url in bad:
        with pytest.raises(ConfigError):
            open_store(url)
