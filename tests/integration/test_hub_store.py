"""The store of a bucket under every fault of a Hub: each call works, or raises the error that says what to do."""

from __future__ import annotations

import http.server
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.devhub import ROOT, HubProcess

from sync.errors import ConfigError, CorruptObject, DeltawireError, ObjectMissing, StoreUnavailable
from sync.stores import open_store
from sync.stores.hub import HubStore
from sync.stores.hub_calls import Calls

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

SECRET = "zyx-recognisable-4b1d0c7e92aa"
PLAIN = 4 << 20
BLOCKS = PLAIN + 1_000_000
"""A size that is read in blocks."""


@pytest.fixture(autouse=True)
def _blocks_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects above 4 MiB are read in blocks here, so that small tests see both ways."""
    monkeypatch.setattr("sync.stores.hub.PLAIN_LIMIT", PLAIN)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch, HubProcess(folder / "server") as hub:
        patch.setenv("HF_HOME", str(folder / "home"))
        yield hub


@pytest.fixture
def hub(server: HubProcess) -> Iterator[HubProcess]:
    yield server
    server.clear_faults()


def opened(hub: HubProcess, timeout: float = 30.0, run: str | None = None, **more: Any) -> HubStore:
    url = f"hf://buckets/local/store/{run or secrets.token_hex(8)}"
    return HubStore(url, create=True, endpoint=hub.url, timeout=timeout, token=SECRET, **more)


@contextmanager
def writers_ended() -> Iterator[None]:
    """Afterwards the threads of all writes that began inside have ended, those that were given up too."""
    before = set(threading.enumerate())
    yield
    for thread in [t for t in threading.enumerate() if t.name == "hub-write" and t not in before]:
        thread.join(60)
        assert not thread.is_alive()


def calls(hub: HubProcess) -> dict[str, int]:
    """How often each request was made since `forget`. A request is noted shortly after its answer was sent, so this
    looks until nothing more is added."""
    seen, same = None, 0
    while same < 3:
        now = hub.log()["calls"]
        seen, same = now, same + 1 if now == seen else 0
        time.sleep(0.03)
    return dict(now)


def forget(hub: HubProcess) -> None:
    calls(hub)
    hub.clear_log()


def every_call(store: HubStore, path: Path) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("put_batch", lambda: store.put_batch({"w/new": os.urandom(1000)})),
        ("get", lambda: store.get("heads/h", limit=10)),
        ("get in blocks", lambda: store.get("w/large", limit=2 * BLOCKS)),
        ("fetch", lambda: store.fetch("heads/h", path, limit=10)),
        ("list", lambda: store.list("heads/")),
        ("info", lambda: store.info(["heads/h"])),
        ("delete", lambda: store.delete(["heads/none"])),
    ]


def all_at_once(store: HubStore, path: Path, **more: Callable[[], object]) -> dict[str, Any]:
    """What every call returned or raised, in threads of their own; no call may take longer than the clients would."""
    found: dict[str, Any] = {}

    def run(name: str, call: Callable[[], object]) -> None:
        try:
            found[name] = call()
        except Exception as error:  # noqa: BLE001 - judged by the test
            found[name] = error

    named = [*every_call(store, path), *more.items()]
    threads = [threading.Thread(target=run, args=pair) for pair in named]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - begin < 20  # the clients' own retries take 23 s and 230 s, or never end
    assert set(found) == {name for name, _ in named}
    return found


# --- requests


LIST = "GET /api/buckets/*/*/tree/**"
RESOLVE = "GET /buckets/*/*/resolve/**"
INFO = "POST /api/buckets/*/*/paths-info"
BATCH = "POST /api/buckets/*/*/batch"


def test_listing_the_heads_is_one_request(hub: HubProcess) -> None:
    store = opened(hub)
    store.put_batch({f"heads/{n}.json": b"{}" for n in range(50)} | {f"w/versions/{n}/m": b"{}" for n in range(50)})
    forget(hub)
    assert len(store.list("heads/")) == 50
    assert calls(hub) == {LIST: 1}
    forget(hub)
    assert store.list("channels/") == []
    assert calls(hub) == {LIST: 1}


def test_a_publish_is_two_batches_and_four_requests_each(hub: HubProcess, tmp_path: Path) -> None:
    store = opened(hub)
    forget(hub)
    (tmp_path / "delta").write_bytes(os.urandom(2_000_000))
    store.put_batch({"w/versions/1/delta": tmp_path / "delta", "w/versions/1/manifest.json": os.urandom(2000)})
    store.put_batch({"heads/w.json": os.urandom(3000)})
    found = calls(hub)
    assert found.pop(BATCH) == 2
    assert found == {"GET /api/buckets/*/*/xet-write-token": 2, "POST /xet/v1/xorbs/*/*": 2, "POST /xet/v2/shards": 2}


def test_small_objects_are_read_by_one_request(hub: HubProcess, tmp_path: Path) -> None:
    store = opened(hub)
    store.put_batch({"heads/w.json": b"head"})
    forget(hub)
    assert store.get("heads/w.json", limit=PLAIN) == b"head"
    store.fetch("heads/w.json", tmp_path / "f", limit=4)
    assert calls(hub) == {RESOLVE: 2}


def test_large_objects_are_read_in_blocks_with_three_requests(hub: HubProcess, tmp_path: Path) -> None:
    store, data = opened(hub), os.urandom(BLOCKS)
    store.put_batch({"w/large": data})
    store.fetch("w/large", tmp_path / "first", limit=BLOCKS)
    forget(hub)
    store.fetch("w/large", tmp_path / "f", limit=BLOCKS)
    assert (tmp_path / "f").read_bytes() == data
    assert calls(hub) == {INFO: 1, "GET /xet/v2/reconstructions/*": 1, "GET /xet/xorbs/*": 1}
    assert store.get("w/large", limit=2 * BLOCKS) == data


def test_what_is_too_large_is_refused_before_it_is_sent(hub: HubProcess, tmp_path: Path) -> None:
    store = opened(hub)
    store.put_batch({"w/large": os.urandom(BLOCKS)})
    forget(hub)
    with pytest.raises(CorruptObject, match=f"w/large: {BLOCKS} bytes, expected at most {BLOCKS - 1}"):
        store.fetch("w/large", tmp_path / "f", limit=BLOCKS - 1)
    assert calls(hub) == {INFO: 1}
    assert hub.log()["bytes"] < 1000
    with pytest.raises(CorruptObject, match=f"w/large: {BLOCKS} bytes, expected at most 5"):
        store.get("w/large", limit=5)
    assert list(tmp_path.iterdir()) == []


def test_opening_is_one_request_and_making_a_bucket_two(hub: HubProcess) -> None:
    forget(hub)
    store = HubStore(f"hf://buckets/local/{secrets.token_hex(4)}/r", create=True, endpoint=hub.url)
    assert calls(hub) == {"GET /api/buckets/*/*/xet-write-token": 1, "POST /api/buckets/*/*": 1}
    bucket = "/".join(store.url.split("/")[3:5])
    assert hub.http("GET", f"/api/buckets/{bucket}").json()["private"] is True
    for writable, kind in ((True, "write"), (False, "read")):
        forget(hub)
        HubStore(store.url, writable=writable, endpoint=hub.url)
        assert calls(hub) == {f"GET /api/buckets/*/*/xet-{kind}-token": 1}
    assert HubStore(store.url, endpoint=hub.url).list("") == []


# --- faults that pass


HUB_CALLS = ("/batch$", "/tree", "/resolve/", "paths-info", "xet-write-token", "xet-read-token")
STORAGE_CALLS = ("/xet/v1/xorbs/", "/xet/v2/shards", "/xet/v2/reconstructions", "/xet/xorbs/")


@pytest.mark.parametrize(
    ("kind", "value", "paths"),
    [
        ("latency", "0.3", ("",)),
        ("rate_limit", "0", HUB_CALLS),
        ("error_before", "503", HUB_CALLS + STORAGE_CALLS),
        ("error_after", "500", HUB_CALLS),
        ("drop", "before", HUB_CALLS + STORAGE_CALLS),
        ("drop", "after", HUB_CALLS),
    ],
)
def test_a_fault_that_passes_is_not_noticed(
    hub: HubProcess, kind: str, value: str, paths: tuple[str, ...], tmp_path: Path
) -> None:
    store, large = opened(hub), os.urandom(BLOCKS)
    store.put_batch({"w/large": large, "heads/h": b"x"})
    count = {} if kind == "latency" else {"count": 1}
    hub.faults(*({"kind": kind, "value": value, "path": path, **count} for path in paths))
    found = all_at_once(store, tmp_path / "f")
    assert min(hub.fault_hits()) >= 1
    hub.clear_faults()
    assert [result for result in found.values() if isinstance(result, Exception)] == []
    assert (found["get"], found["get in blocks"]) == (b"x", large)
    assert [i.key for i in found["list"]] == list(found["info"]) == ["heads/h"]
    assert (tmp_path / "f").read_bytes() == b"x"
    assert [i.key for i in store.list("")] == ["heads/h", "w/large", "w/new"]


def test_the_same_batch_may_be_applied_twice(hub: HubProcess) -> None:
    store = opened(hub)
    forget(hub)
    hub.faults({"kind": "drop", "value": "after", "count": 1, "path": "/batch$"})
    store.put_batch({"heads/h": b"one"})
    assert calls(hub)[BATCH] == 2
    assert store.get("heads/h", limit=3) == b"one"


# --- faults that stay


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "rate_limit", "value": "600"}, "HTTP 429, and the Hub asks to wait 600 s"),
        ({"kind": "error_before", "value": "503"}, "HTTP 503"),
        ({"kind": "error_after", "value": "500"}, "HTTP 500"),
        ({"kind": "drop", "value": "before"}, ""),
        ({"kind": "drop", "value": "after"}, ""),
    ],
    ids=["rate limit", "error before", "error after", "drop before", "drop after"],
)
def test_a_fault_that_stays_is_unavailable_in_time(
    hub: HubProcess, fault: dict[str, Any], said: str, tmp_path: Path
) -> None:
    store = opened(hub, timeout=1.0)
    store.put_batch({"w/large": bytes(BLOCKS), "heads/h": b"x"})
    hub.faults(fault)
    again = partial(HubStore, store.url, endpoint=hub.url, timeout=1.0)
    found = all_at_once(store, tmp_path / "f", open=again, create=partial(again, create=True))
    for name, error in found.items():
        assert isinstance(error, StoreUnavailable), name
        assert str(error).startswith(f"{store.url}: cannot "), name
        assert "\n" not in str(error), name
        assert said in str(error) or name == "put_batch", name  # hf_xet keeps the reason to itself
    assert list(tmp_path.iterdir()) == []
    hub.clear_faults()
    assert store.get("w/large", limit=2 * BLOCKS) == bytes(BLOCKS)


def test_a_call_that_was_given_up_never_writes_later(hub: HubProcess) -> None:
    store = opened(hub, timeout=1.0)
    store.put_batch({"heads/h": b"1"})
    forget(hub)
    hub.faults({"kind": "latency", "value": "3", "path": "xet-write-token", "count": 1})
    with writers_ended():
        with pytest.raises(StoreUnavailable, match="cannot write"):
            store.put_batch({"heads/h": b"2"})
        store.put_batch({"heads/h": b"3"})
    assert calls(hub)["GET /api/buckets/*/*/xet-write-token"] == 2
    assert calls(hub)[BATCH] == 1
    assert store.get("heads/h", limit=1) == b"3"


def test_repetitions_end_at_the_deadline(hub: HubProcess) -> None:
    store = opened(hub, timeout=2.0)
    forget(hub)
    hub.faults({"kind": "error_before", "value": "503", "path": "/batch$"})
    with writers_ended(), pytest.raises(StoreUnavailable):
        store.put_batch({"heads/h": b"2"})
    hub.clear_faults()
    assert calls(hub)[BATCH] == 2  # at 0 s and 1 s; the one at 3 s is refused
    assert store.list("") == []


def test_a_refused_operation_is_unavailable_and_named(hub: HubProcess) -> None:
    store = opened(hub)
    hub.faults({"kind": "fail_op", "value": "versions/1/delta"})
    with pytest.raises(StoreUnavailable, match=r"did not write w/versions/1/delta \(.*write the same bytes again"):
        store.put_batch({"w/versions/1/delta": b"x", "w/versions/1/manifest.json": b"{}"})
    assert [i.key for i in store.list("")] == ["w/versions/1/manifest.json"]
    with pytest.raises(StoreUnavailable, match=r"did not write w/versions/1/delta"):
        store.put_batch({"w/versions/1/delta": b"x"})
    hub.clear_faults()
    store.put_batch({"w/versions/1/delta": b"x"})
    hub.faults({"kind": "fail_op", "value": "versions/1/"})
    with pytest.raises(StoreUnavailable, match=r"did not delete w/versions/1/delta"):
        store.delete(["w/versions/1/delta", "w/versions/1/none"])
    store.delete(["w/versions/1/none"])  # refused, but it is not there
    assert len(store.list("")) == 2


def test_a_batch_shows_piece_by_piece_and_whole_in_the_end(hub: HubProcess) -> None:
    store = opened(hub)
    hub.faults({"kind": "slow_batch", "value": "0.3"})
    seen: set[int] = set()
    writer = threading.Thread(target=store.put_batch, args=({f"w/{n}": b"x" for n in range(5)},))
    writer.start()
    while writer.is_alive():
        seen.add(len(store.list("w/")))
    writer.join()
    assert len(store.list("w/")) == 5
    assert seen & {1, 2, 3, 4}


def test_listings_and_look_ups_may_show_the_past(hub: HubProcess) -> None:
    store = opened(hub)
    store.put_batch({"heads/a": b"1"})
    time.sleep(1.5)
    store.put_batch({"heads/a": b"22", "heads/b": b"3"})
    hub.faults({"kind": "stale_list", "value": "1"}, {"kind": "stale_info", "value": "1"})
    assert [(i.key, i.size) for i in store.list("heads/")] == [("heads/a", 1)]
    assert list(store.info(["heads/a", "heads/b"])) == ["heads/a"]
    with pytest.raises(ObjectMissing):
        store.get("heads/b", limit=10)
    hub.clear_faults()
    assert [(i.key, i.size) for i in store.list("heads/")] == [("heads/a", 2), ("heads/b", 1)]
    assert store.lag == 2.0


def test_times_are_the_hubs_and_change_with_the_etag_when_the_same_is_written_again(hub: HubProcess) -> None:
    store = opened(hub)
    store.put_batch({"heads/a": b"1"})
    (first,) = store.list("heads/")
    store.put_batch({"heads/a": b"1"})
    (second,) = store.list("heads/")
    assert second.uploaded_at > first.uploaded_at > time.time() - 3600
    assert second.etag != first.etag
    assert store.info(["heads/a"]) == {"heads/a": second}


def test_a_local_disk_that_refuses_is_an_os_error_and_leaves_nothing(hub: HubProcess, tmp_path: Path) -> None:
    store = opened(hub)
    store.put_batch({"w/large": os.urandom(BLOCKS), "w/small": os.urandom(100_000)})
    code = """
import resource, sys
from pathlib import Path
from sync.stores.hub import HubStore
import sync.stores.hub
sync.stores.hub.PLAIN_LIMIT = 4 << 20
store = HubStore(sys.argv[1], endpoint=sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for key in ("w/small", "w/large"):
    try:
        store.fetch(key, Path(sys.argv[3]) / "f", limit=10_000_000)
    except OSError as error:
        print(type(error).__name__, error.strerror)
"""
    command = [sys.executable, "-c", code, store.url, hub.url, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["OSError File too large"] * 2, "")
    assert list(tmp_path.iterdir()) == []


# --- a Hub that is not there


def test_a_hub_that_is_down_is_unavailable_and_may_come_back(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub") as hub:
        store = opened(hub, timeout=1.0)
        store.put_batch({"w/large": bytes(BLOCKS), "heads/h": b"x"})
        hub.kill()
        found = all_at_once(store, tmp_path / "f", open=partial(HubStore, store.url, endpoint=hub.url, timeout=1.0))
        for name, error in found.items():
            assert isinstance(error, StoreUnavailable), name
            assert str(error).startswith(f"{store.url}: cannot "), name
        hub.start()
        found = all_at_once(store, tmp_path / "f")
        assert [result for result in found.values() if isinstance(result, Exception)] == []


def test_a_token_for_contents_that_ends_before_its_time_is_replaced(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub") as hub:
        store, data = opened(hub), os.urandom(BLOCKS)
        store.put_batch({"w/large": data})
        assert store.get("w/large", limit=BLOCKS) == data
        hub.stop()
        (hub.data / "secret").unlink()
        hub.start()
        assert store.get("w/large", limit=BLOCKS) == data


def test_a_hub_that_hangs_is_unavailable(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub") as hub:
        store = opened(hub, timeout=1.0)
        store.put_batch({"w/large": bytes(BLOCKS), "heads/h": b"x"})
        os.kill(hub.pid, signal.SIGSTOP)
        for name, error in all_at_once(store, tmp_path / "f").items():
            assert isinstance(error, StoreUnavailable), name
            assert str(error).startswith(f"{store.url}: cannot "), name
        hub.kill()


def test_a_server_that_never_answers_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=r"hf://buckets/a/b/c: cannot open"):
            HubStore("hf://buckets/a/b/c", endpoint=url, timeout=1.0)


def test_an_answer_that_is_no_hubs_is_a_typed_error() -> None:
    page = (200, {"Content-Type": "text/html"}, b"<html>Welcome</html>")
    with answering(lambda _handler: page) as (url, _), pytest.raises(StoreUnavailable):
        HubStore("hf://buckets/a/b/c", endpoint=url, timeout=2.0)
    with (
        answering(lambda _handler: (404, {}, b"nothing here")) as (url, _),
        pytest.raises(ConfigError, match="no buckets"),
    ):
        HubStore("hf://buckets/a/b/c", endpoint=url, timeout=2.0)


def test_a_hub_that_lost_its_data_is_unavailable_with_a_way_out(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub") as hub:
        store = opened(hub, run="r")
        store.put_batch({"w/a": b"a" * 300_000})
        hub.stop()
        hub.data.rename(tmp_path / "gone")
        hub.start()
        store = opened(hub, run="r", timeout=20.0)
        with pytest.raises(StoreUnavailable, match="remembers uploads that the Hub has lost: stop, delete"):
            store.put_batch({"w/a": b"a" * 300_000})


# --- rights and secrets


ALICE, READER, OTHER = (f"{SECRET}-{name}" for name in ("alice", "reader", "other"))
ROOT_TOKEN = f"{SECRET}-root"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    tokens = f"alice:write:{ALICE},alice:read:{READER},bob:write:{OTHER},root:admin:{ROOT_TOKEN}"
    folder = tmp_path_factory.mktemp("guarded")
    with pytest.MonkeyPatch.context() as patch, HubProcess(folder, "--cdn", tokens=tokens, token=ROOT_TOKEN) as hub:
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.delenv("HF_TOKEN", raising=False)
        HubStore("hf://buckets/alice/private/r", create=True, endpoint=hub.url, token=ALICE).put_batch({"w/a": b"1"})
        made = hub.http("POST", "/api/buckets/alice/public", b'{"visibility":"public"}', token=ALICE)
        assert made.status == 200
        HubStore("hf://buckets/alice/public/r", writable=True, endpoint=hub.url, token=ALICE).put_batch({"w/a": b"2"})
        yield hub


@pytest.mark.parametrize(
    ("token", "bucket", "mode", "said"),
    [
        ("wrong-" + SECRET, "alice/private", {}, "no permission .*HTTP 401.*set HF_TOKEN"),
        ("wrong-" + SECRET, "alice/public", {"writable": True}, "no permission .*HTTP 401"),
        (None, "alice/private", {}, "no such bucket, or the token may not see it.*hf buckets create alice/private"),
        (None, "alice/public", {"writable": True}, "no permission .*HTTP 401.*may write it"),
        (None, "alice/new", {"create": True}, "no permission .*HTTP 401.*may write it"),
        (READER, "alice/private", {"writable": True}, "no permission .*HTTP 403.*may write it"),
        (READER, "alice/new", {"create": True}, "no permission .*HTTP 403.*may write it"),
        (OTHER, "alice/private", {}, "no such bucket"),
        (OTHER, "alice/public", {"writable": True}, "no permission .*HTTP 403"),
        (OTHER, "alice/private", {"create": True}, "no permission .*HTTP 403"),
        (ALICE, "alice/missing", {}, "no such bucket"),
        (ALICE, "alice/missing", {"writable": True}, "no such bucket"),
    ],
)
def test_a_missing_right_or_bucket_is_a_config_error_in_one_line(
    guarded: HubProcess, token: str | None, bucket: str, mode: dict[str, bool], said: str
) -> None:
    url = f"hf://buckets/{bucket}/r"
    with pytest.raises(ConfigError, match=f"{url}: .*{said}") as caught:
        HubStore(url, endpoint=guarded.url, token=token, **mode)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    names = [b["id"] for b in guarded.http("GET", "/api/buckets/alice").json()]
    assert sorted(names) == ["alice/private", "alice/public"]


def test_a_read_only_token_reads_and_is_told_when_it_writes(guarded: HubProcess, tmp_path: Path) -> None:
    reader = HubStore("hf://buckets/alice/private/r", endpoint=guarded.url, token=READER)
    assert reader.get("w/a", limit=1) == b"1"
    assert HubStore("hf://buckets/alice/public/r", endpoint=guarded.url).get("w/a", limit=1) == b"2"
    for write in (partial(reader.put_batch, {"w/b": b"x"}), partial(reader.delete, ["w/a"])):
        with pytest.raises(ConfigError, match=r"no permission .*may write it"):
            write()
    assert [i.key for i in reader.list("")] == ["w/a"]


def test_a_bucket_that_goes_away_is_a_config_error(guarded: HubProcess, tmp_path: Path) -> None:
    store = HubStore("hf://buckets/bob/brief/r", create=True, endpoint=guarded.url, token=OTHER)
    store.put_batch({"w/large": bytes(BLOCKS), "heads/h": b"x"})
    assert guarded.http("DELETE", "/api/buckets/bob/brief").status == 200
    for name, error in all_at_once(store, tmp_path / "f").items():
        assert isinstance(error, ConfigError), name
        assert "no such bucket" in str(error), name


def test_no_error_and_no_log_line_holds_a_secret(
    guarded: HubProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    store = HubStore("hf://buckets/alice/private/s", writable=True, endpoint=guarded.url, token=ALICE, timeout=1.0)
    store.put_batch({"w/large": os.urandom(BLOCKS), "heads/h": b"x"})
    errors: list[str] = []
    faults: list[dict[str, Any]] = [
        {"kind": kind, "value": value, "path": path}
        for path in ("", "/xet/|/cdn/")
        for kind, value in (("error_before", "403"), ("error_before", "500"), ("drop", "after"), ("rate_limit", "99"))
    ]
    for fault in faults:
        guarded.faults(fault)
        raised = [r for r in all_at_once(store, tmp_path / "f").values() if isinstance(r, Exception)]
        errors += [f"{error!r} {error.__cause__!r} {error.__suppress_context__}" for error in raised]
        guarded.clear_faults()
    assert len(errors) > 40
    text = "\n".join([*errors, caplog.text, *capfd.readouterr()])
    assert all(error.endswith("None True") for error in errors)
    assert "HTTP Request: GET" in text  # the log did hold the requests
    assert "/cdn/" in text
    assert [line for line in text.splitlines() if SECRET in line or "sig=" in line or "xet.r." in line] == []


def test_the_log_files_of_hf_xet_hold_no_secret(guarded: HubProcess, tmp_path: Path) -> None:
    code = """
import os, sys
from sync.stores.hub import HubStore
store = HubStore("hf://buckets/alice/private/logs", writable=True, endpoint=sys.argv[1])
store.put_batch({"w/large": os.urandom(int(sys.argv[2]))})
print(len(store.get("w/large", limit=int(sys.argv[2]))))
"""
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_TOKEN": ALICE, "RUST_LOG": "debug"}
    command = [sys.executable, "-c", code, guarded.url, str(BLOCKS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(BLOCKS), "")
    texts = [path.read_text(errors="replace") for path in (tmp_path / "xet" / "logs").rglob("*") if path.is_file()]
    assert sum(map(len, texts)) > 0
    assert [text for text in texts if SECRET in text or "sig=" in text] == []


@contextmanager
def answering(
    answer: Callable[[http.server.BaseHTTPRequestHandler], tuple[int, dict[str, str], bytes]],
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """An HTTP server that answers GET as told, and the headers of the requests it got."""
    seen: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


TOKEN_ANSWER = b'{"casUrl": "http://127.0.0.1:1", "accessToken": "a", "exp": 1}'


def test_a_redirect_to_another_origin_gets_no_token() -> None:
    with answering(lambda _handler: (200, {}, b"content")) as (storage, there):

        def hub(handler: http.server.BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
            if handler.path.startswith("/api/"):
                return 200, {}, TOKEN_ANSWER
            if "hop" not in handler.path:
                return 302, {"Location": "/hop?again=1", "X-Linked-Size": "7"}, b""
            return 302, {"Location": f"{storage}/blob?sig=abc", "X-Linked-Size": "7"}, b""

        with answering(hub) as (url, here):
            store = HubStore("hf://buckets/a/b/c", endpoint=url, token=SECRET)
            assert store.get("w/x", limit=7) == b"content"
            with pytest.raises(CorruptObject, match="7 bytes, expected at most 6"):
                store.get("w/x", limit=6)
    assert [request["path"] for request in there] == ["/blob?sig=abc"]  # and nothing of what is too large
    assert "authorization" not in there[0]
    assert [request.get("authorization") for request in here[1:3]] == [f"Bearer {SECRET}"] * 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((200, {"Content-Length": "3000000"}, b"x" * 3_000_000), CorruptObject),
        ((200, {"Content-Length": "30"}, b"short"), StoreUnavailable),
        ((302, {"Location": "file:///etc/passwd"}, b""), StoreUnavailable),
        ((302, {"Location": "/buckets/a/b/resolve/round"}, b""), StoreUnavailable),
        ((200, {"X-Linked-Size": "many"}, b"x"), StoreUnavailable),
    ],
    ids=["too large", "cut short", "another scheme", "a loop", "a wrong size"],
)
def test_a_hostile_answer_is_a_typed_error(
    answer: tuple[int, dict[str, str], bytes], error: type[DeltawireError], tmp_path: Path
) -> None:
    with answering(lambda handler: (200, {}, TOKEN_ANSWER) if handler.path.startswith("/api/") else answer) as (url, _):
        store = HubStore("hf://buckets/a/b/c", endpoint=url, timeout=1.0)
        with pytest.raises(error):
            store.get("w/x", limit=1000)
        with pytest.raises(error):
            store.fetch("w/x", tmp_path / "f", limit=1000)
    assert list(tmp_path.iterdir()) == []


# --- the seams to the rest


def test_calls_that_hang_are_limited() -> None:
    calls, go = Calls("hf://buckets/a/b/c", most=2), threading.Event()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="cannot read: no success within 0 s"):
            calls.run("read", 0.05, go.wait)
    with pytest.raises(StoreUnavailable, match="2 calls are in flight or have not ended yet"):
        calls.run("read", 5.0, go.wait)
    go.set()
    while True:  # until both have ended
        with suppress(StoreUnavailable):
            assert calls.run("read", 5.0, lambda: 7) == 7
            break


def test_an_error_of_our_own_making_is_not_dressed_up() -> None:
    calls = Calls("hf://buckets/a/b/c")
    with pytest.raises(AssertionError, match="ours"):
        calls.run("read", 5.0, _fails)


def _fails() -> None:
    raise AssertionError("ours")


def test_the_environment_names_the_hub_and_the_library_loads_on_use(hub: HubProcess) -> None:
    code = """
import sys
import sync
assert not {"huggingface_hub", "hf_xet", "httpx2"} & set(sys.modules)
store = sync.open_store("hf://buckets/local/env/r", create=True, lag=0.5)
store.put_batch({"heads/h": b"x"})
print(store.get("heads/h", limit=1), store.lag, sync.open_store(store.url).lag)
"""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "b'x' 0.5 2.0", "")


def test_offline_mode_is_a_config_error(hub: HubProcess) -> None:
    code = "import sync; sync.open_store('hf://buckets/local/env/r')"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert "ConfigError: hf://buckets/local/env/r: cannot open: HF_HUB_OFFLINE is set; unset it" in done.stderr


def test_a_file_that_is_not_there_is_unavailable(hub: HubProcess, tmp_path: Path) -> None:
    store = opened(hub)
    forget(hub)
    with pytest.raises(StoreUnavailable, match=r"cannot read .*nothing"):
        store.put_batch({"w/a": tmp_path / "nothing"})
    assert calls(hub) == {}


def test_open_store_passes_on_what_the_url_says(hub: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.url, raising=False)
    store = open_store("hf://buckets/local/opened/deep/er/run/", create=True, writable=True)
    assert store.url == "hf://buckets/local/opened/deep/er/run"
    store.put_batch({"heads/h": b"x"})
    assert hub.http("GET", "/buckets/local/opened/resolve/deep/er/run/heads/h").body == b"x"
