"""Buckets of the local Hub, seen by the real clients: huggingface_hub, hf_xet, HfFileSystem and the hf command."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from support.devhub import Answer, HubProcess, client_env, run_client, start_client

from deltawire import main

pytestmark = pytest.mark.integration

TOKENS = "alice:write:alice-secret,alice:read:alice-reads,bob:write:bob-secret,root:admin:root-secret"
EMPTY = "0" * 64


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """An open Hub that the tests of this module share; each uses a bucket of its own."""
    with HubProcess(tmp_path_factory.mktemp("hub")) as process:
        yield process


@pytest.fixture
def env(hub: HubProcess, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a client of `hub`; the log begins empty, and faults are lifted afterwards."""
    hub.clear_log()
    yield client_env(tmp_path / "home", hub.url)
    hub.clear_faults()


def post_batch(hub: HubProcess, bucket: str, *operations: dict[str, Any], token: str | None = None) -> Answer:
    """Send operations as the client does; empty contents need no upload."""
    body = "\n".join(map(json.dumps, operations)).encode()
    return hub.http("POST", f"/api/buckets/{bucket}/batch", body, token=token)


def add(path: str, content: str = EMPTY) -> dict[str, Any]:
    return {"type": "addFile", "path": path, "xetHash": content, "mtime": 1_700_000_000_123}


def paths(hub: HubProcess, bucket: str, query: str = "?recursive=true", token: str | None = None) -> list[str]:
    """All paths of a listing, pages followed."""
    found: list[str] = []
    url = f"/api/buckets/{bucket}/tree{query}"
    while url:
        answer = hub.http("GET", url, token=token)
        assert answer.status == 200, answer
        found += [item["path"] for item in answer.json()]
        url = answer.headers.get("link", "").partition(">")[0].removeprefix("<").removeprefix(hub.url)
    return found


# --- all operations


OPERATIONS = """
from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError
import os
folder = Path(sys.argv[1])
blobs = {"empty": b"", "one": b"x", "dir/kilo": os.urandom(1000), "dir/sub/big": os.urandom(3_000_000)}
url = api.create_bucket("me/every")
api.create_bucket("local/every", exist_ok=True)
out = {"id": url.bucket_id, "url": url.url == f"{api.endpoint}/buckets/local/every"}
try:
    api.create_bucket("local/every")
except HfHubHTTPError as error:
    out["again"] = error.response.status_code
(folder / "file").write_bytes(blobs["dir/sub/big"])
os.utime(folder / "file", (1_600_000_000, 1_600_000_000))
add = [(folder / "file", "dir/sub/big"), *((v, k) for k, v in blobs.items() if k != "dir/sub/big")]
api.batch_bucket_files("local/every", add=add)
tree = {f.path: f for f in api.list_bucket_tree("local/every", recursive=True)}
out["sizes"] = {k: f.size == len(blobs[k]) for k, f in tree.items()}
out["mtime"] = tree["dir/sub/big"].mtime.timestamp()
out["flat"] = sorted((f.type, f.path) for f in api.list_bucket_tree("local/every"))
out["below"] = sorted((f.type, f.path) for f in api.list_bucket_tree("local/every", "dir"))
out["infos"] = sorted(f.path for f in api.get_bucket_paths_info("local/every", ["one", "nowhere", "dir/kilo"]))
out["head"] = api.get_bucket_file_metadata("local/every", "dir/sub/big").size
info = api.bucket_info("local/every")
out["info"] = [info.size, info.total_files, info.private]
api.download_bucket_files("local/every", [(k, folder / "got" / k) for k in blobs])
out["same"] = all((folder / "got" / k).read_bytes() == v for k, v in blobs.items())
api.batch_bucket_files("local/every", copy=[("bucket", "local/every", tree["dir/kilo"].xet_hash, "copied")])
api.copy_files("hf://buckets/local/every/dir", "hf://buckets/local/every/twice/")
api.download_bucket_files("local/every", [("copied", folder / "copied"), ("twice/sub/big", folder / "twice")])
out["copies"] = [(folder / "copied").read_bytes() == blobs["dir/kilo"],
                 (folder / "twice").read_bytes() == blobs["dir/sub/big"]]
api.batch_bucket_files("local/every", add=[(b"newer", "one")], delete=["copied"])
api.download_bucket_files("local/every", [("one", folder / "one")])
out["overwritten"] = (folder / "one").read_bytes().decode()
out["deleted"] = list(api.get_bucket_paths_info("local/every", ["copied"])) == []
api.update_bucket_settings("local/every", private=True)
out["private"] = api.bucket_info("local/every").private
out["listed"] = [b.id for b in api.list_buckets("local", search="EVER")]
api.move_bucket("local/every", "local/moved")
out["moved"] = api.bucket_info("local/moved").total_files
api.delete_bucket("local/moved")
api.delete_bucket("local/moved", missing_ok=True)
try:
    api.bucket_info("local/moved")
except BucketNotFoundError:
    out["gone"] = True
out["whoami"] = api.whoami()["name"]
print(json.dumps(out))
"""


def test_every_bucket_operation_is_byte_exact(env: dict[str, str], tmp_path: Path) -> None:
    out = run_client(env, OPERATIONS, tmp_path)
    size = 3_000_000 + 1000 + 1
    assert out == {
        "id": "local/every",
        "url": True,
        "again": 409,
        "sizes": {"empty": True, "one": True, "dir/kilo": True, "dir/sub/big": True},
        "mtime": 1_600_000_000,
        "flat": [["directory", "dir"], ["file", "empty"], ["file", "one"]],
        "below": [["directory", "dir/sub"], ["file", "dir/kilo"]],
        "infos": ["dir/kilo", "one"],
        "head": 3_000_000,
        "info": [size, 4, False],
        "same": True,
        "copies": [True, True],
        "overwritten": "newer",
        "deleted": True,
        "private": True,
        "listed": ["local/every"],
        "moved": 6,
        "gone": True,
        "whoami": "local",
    }


FILESYSTEM = """
from huggingface_hub import HfFileSystem
api.create_bucket("local/fs")
fs = HfFileSystem()
root = "buckets/local/fs"
data = bytes(range(256)) * 5000
with fs.open(f"{root}/a/data.bin", "wb") as file:
    file.write(data)
with fs.open(f"{root}/a/note.txt", "w") as file:
    file.write("grüße")
out = {"cat": fs.cat(f"{root}/a/data.bin") == data}
with fs.open(f"{root}/a/data.bin", "rb") as file:
    file.seek(70_000)
    out["range"] = file.read(1000) == data[70_000:71_000]
out["ls"] = sorted(fs.ls(f"{root}/a", detail=False))
out["glob"] = fs.glob(f"{root}/**/*.txt")
fs.cp_file(f"{root}/a/note.txt", f"{root}/b/note.txt")
out["copy"] = fs.read_text(f"{root}/b/note.txt")
fs.rm(f"{root}/a", recursive=True)
fs.invalidate_cache()
out["left"] = fs.find(root)
out["exists"] = [fs.exists(f"{root}/a/data.bin"), fs.isdir(f"{root}/b")]
out["found"] = fs.info(f"{root}/b/note.txt")["size"]
print(json.dumps(out))
"""


def test_the_file_system_reads_and_writes(env: dict[str, str]) -> None:
    root = "buckets/local/fs"
    assert run_client(env, FILESYSTEM) == {
        "cat": True,
        "range": True,
        "ls": [f"{root}/a/data.bin", f"{root}/a/note.txt"],
        "glob": [f"{root}/a/note.txt"],
        "copy": "grüße",
        "left": [f"{root}/b/note.txt"],
        "exists": [False, True],
        "found": len("grüße".encode()),
    }


def hf(env: dict[str, str], *words: object) -> str:
    """Run the hf command; returns its standard output."""
    command = [str(Path(sys.executable).with_name("hf")), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_hf_command_syncs_both_ways(hub: HubProcess, env: dict[str, str], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    contents = {"a.txt": b"alpha", "sub/b.bin": os.urandom(200_000), "sub/empty": b""}
    for name, data in contents.items():
        (source / name).write_bytes(data)
    assert "local/cmd" in hf(env, "buckets", "create", "local/cmd")
    hf(env, "buckets", "sync", source, "hf://buckets/local/cmd/x")
    listed = hf(env, "buckets", "list", "local/cmd", "-R", "--format", "json")
    assert sorted(item["path"] for item in json.loads(listed)) == [f"x/{name}" for name in sorted(contents)]
    hf(env, "buckets", "sync", "hf://buckets/local/cmd/x", target)
    assert {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()} == contents
    hf(env, "buckets", "rm", "local/cmd/x/a.txt", "-y")
    assert paths(hub, "local/cmd") == ["x/sub/b.bin", "x/sub/empty"]


NAMES = [
    "grüße/雪 🙂.txt",
    "with space/a b",
    "100%/a%2Fb",
    "q?x=1&y#z+",
    "semi;colon,comma'\"",
    "ʼ/back\\slash",
    ".hidden",
]


def test_odd_names_come_back_as_they_were(hub: HubProcess, env: dict[str, str], tmp_path: Path) -> None:
    code = """
names = json.loads(sys.argv[1]); folder = Path(sys.argv[2])
api.create_bucket("local/odd")
api.batch_bucket_files("local/odd", add=[(n.encode(), n) for n in names])
listed = [f.path for f in api.list_bucket_tree("local/odd", recursive=True)]
infos = [f.path for f in api.get_bucket_paths_info("local/odd", names)]
heads = [api.get_bucket_file_metadata("local/odd", n).size for n in names]
api.download_bucket_files("local/odd", [(n, folder / str(i)) for i, n in enumerate(names)])
below = [[f.path for f in api.list_bucket_tree("local/odd", n, recursive=True)] for n in names]
print(json.dumps([listed, infos, heads, [(folder / str(i)).read_text() for i in range(len(names))], below]))
"""
    listed, infos, heads, contents, below = run_client(env, code, json.dumps(NAMES), tmp_path)
    assert sorted(listed) == sorted(NAMES)
    assert infos == NAMES
    assert heads == [len(name.encode()) for name in NAMES]
    assert contents == NAMES
    assert below == [[name] for name in NAMES]


BAD_PATHS = [
    "../x",
    "a/../x",
    "..",
    ".",
    "a/./b",
    "/etc/passwd",
    "a//b",
    "a/",
    "",
    "nul\0",
    "line\n",
    "\ud800",
    "x" * 1025,
]


def test_paths_that_lead_elsewhere_are_refused_one_by_one(hub: HubProcess) -> None:
    hub.http("POST", "/api/buckets/local/bad", b"{}")
    answer = post_batch(hub, "local/bad", *map(add, BAD_PATHS))
    assert answer.status == 422
    assert answer.json()["succeeded"] == 0
    assert [failure["path"] for failure in answer.json()["failed"]] == BAD_PATHS
    assert post_batch(hub, "local/bad", add("good"), add("../bad")).json()["succeeded"] == 1
    assert paths(hub, "local/bad") == ["good"]
    assert hub.http("GET", "/buckets/local/bad/resolve/..%2F..%2F..%2Fhub.sqlite3").status == 404
    assert hub.http("GET", "/buckets/local/bad/resolve/../../../hub.sqlite3").status == 404
    for body in (b"[]", b"{", b'{"type":"addFile"}', b'{"type":"format","path":"x"}', b"\xff\xfe"):
        refused = hub.http("POST", "/api/buckets/local/bad/batch", body)
        assert refused.status == 400
        assert "line 1" in refused.json()["error"]
    assert hub.http("POST", "/api/buckets/local/bad/batch", b"x" * 70_000).status == 413
    assert hub.http("POST", "/api/buckets/..%2Fup/x", b"{}").status in (400, 404)
    assert hub.http("POST", "/api/buckets/local/-dash", b"{}").status == 400


def test_a_page_ends_with_a_link_to_the_next(env: dict[str, str], hub: HubProcess) -> None:
    code = """
api.create_bucket("local/many")
names = [f"d{i % 3}/f{i:04d}" for i in range(2300)]
api.batch_bucket_files("local/many", add=[(b"same", n) for n in names])
listed = [f.path for f in api.list_bucket_tree("local/many", recursive=True)]
some = [f.path for f in api.list_bucket_tree("local/many", "d1/f00", recursive=True)]
infos = len(list(api.get_bucket_paths_info("local/many", names)))
flat = [f.path for f in api.list_bucket_tree("local/many")]
api.batch_bucket_files("local/many", delete=names[:1500])
print(json.dumps([listed == sorted(names), len(some), infos, flat, api.bucket_info("local/many").total_files]))
"""
    assert run_client(env, code) == [True, 33, 2300, ["d0", "d1", "d2"], 800]
    calls = hub.log()["calls"]
    assert calls["POST /api/buckets/*/*/batch"] == 3 + 2
    assert calls["POST /api/buckets/*/*/paths-info"] == 3
    assert calls["GET /api/buckets/*/*/tree"] == 3 + 1  # 2300 in pages of 1000, and the flat one
    assert paths(hub, "local/many", "?limit=2") == ["d0", "d1", "d2"]
    assert len(paths(hub, "local/many", "/d0?limit=100")) == 267
    assert hub.http("GET", "/api/buckets/local/many/tree?cursor=%%%").status == 400
    assert hub.http("GET", "/api/buckets/local/many/tree?limit=0").status == 400


def test_an_unknown_hash_fails_alone(env: dict[str, str]) -> None:
    code = """
from huggingface_hub.errors import BucketBatchError
api.create_bucket("local/unknown")
api.batch_bucket_files("local/unknown", add=[(b"known", "known")])
known = next(iter(api.get_bucket_paths_info("local/unknown", ["known"]))).xet_hash
copies = [("bucket", "local/unknown", "ab" * 32, "lost"), ("bucket", "local/unknown", known, "found"),
          ("bucket", "local/nowhere", known, "elsewhere"), ("bucket", "local/unknown", "zz", "nonsense")]
try:
    api.batch_bucket_files("local/unknown", copy=copies)
except BucketBatchError as error:
    failed = [f["path"] for f in error.failures]
try:
    api.batch_bucket_files("local/unknown", copy=copies[:1])
except BucketBatchError as error:
    status = error.response.status_code
print(json.dumps([failed, status, sorted(f.path for f in api.list_bucket_tree("local/unknown"))]))
"""
    assert run_client(env, code) == [["lost", "elsewhere", "nonsense"], 422, ["found", "known"]]


def test_one_file_answers_ranges_and_unchanged(hub: HubProcess) -> None:
    hub.http("POST", "/api/buckets/local/range", b"{}")
    post_batch(hub, "local/range", add("empty"))
    empty = hub.http("GET", "/buckets/local/range/resolve/empty")
    assert (empty.status, empty.body, empty.headers["x-xet-hash"]) == (200, b"", EMPTY)
    assert empty.headers["link"] == f'<{hub.url}/api/buckets/local/range/xet-read-token>; rel="xet-auth"'
    etag = empty.headers["etag"]
    assert hub.http("GET", "/buckets/local/range/resolve/empty", headers={"If-None-Match": etag}).status == 304
    assert hub.http("GET", "/buckets/local/range/resolve/empty", headers={"Range": "bytes=0-"}).status == 416
    assert hub.http("GET", "/buckets/local/range/resolve/%00%0d%0a%ff%c3%bc").status == 404
    missing = hub.http("HEAD", "/buckets/local/range/resolve/none")
    assert (missing.status, missing.headers["x-error-code"]) == (404, "EntryNotFound")


# --- tokens


def test_private_buckets_and_read_tokens(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub", token="root-secret", tokens=TOKENS) as hub:
        code = """
api.create_bucket("alice/private", private=True)
api.create_bucket("alice/public")
for bucket in ("alice/private", "alice/public"):
    api.batch_bucket_files(bucket, add=[(b"secret" * 100, "f")])
print(json.dumps([api.whoami()["name"], sorted(b.id for b in api.list_buckets())]))
"""
        made = run_client(client_env(tmp_path / "alice", hub.url, "alice-secret"), code)
        assert made == ["alice", ["alice/private", "alice/public"]]
        attempt = """
from huggingface_hub.errors import HfHubHTTPError
def status(call):
    try:
        call()
    except HfHubHTTPError as error:
        return [error.response.status_code, type(error).__name__]
    return [200, ""]
target = Path(sys.argv[1])
print(json.dumps([
    status(lambda: api.download_bucket_files("alice/private", [("f", target / "p")])),
    status(lambda: api.download_bucket_files("alice/public", [("f", target / "q")])),
    status(lambda: api.bucket_info("alice/private")),
    status(lambda: api.batch_bucket_files("alice/public", delete=["f"])),
    status(lambda: api.create_bucket("alice/mine")),
    sorted(b.id for b in api.list_buckets("alice")),
]))
"""
        hidden, denied = [404, "BucketNotFoundError"], [403, "HfHubHTTPError"]
        everything = ["alice/private", "alice/public"]
        reads = run_client(client_env(tmp_path / "reads", hub.url, "alice-reads"), attempt, tmp_path / "r")
        assert reads == [[200, ""], [200, ""], [200, ""], denied, denied, everything]
        bob = run_client(client_env(tmp_path / "bob", hub.url, "bob-secret"), attempt, tmp_path / "b")
        assert bob == [hidden, [200, ""], hidden, denied, denied, ["alice/public"]]
        assert hub.http("GET", "/api/buckets/alice/private", token="").status == 404
        assert hub.http("GET", "/api/buckets/alice/public", token="").status == 200
        assert hub.http("POST", "/api/buckets/alice/public/batch", b"", token="").status == 401
        assert hub.http("GET", "/api/buckets/alice/private/xet-read-token", token="bob-secret").status == 404
        assert hub.http("GET", "/api/buckets/alice/public/xet-write-token", token="alice-reads").status == 403
        unknown = hub.http("GET", "/api/whoami-v2", token="no-such-token")
        assert (unknown.status, "no-such-token" in unknown.body.decode()) == (401, False)
        assert hub.http("GET", "/_log", token="alice-secret").status == 403
        assert hub.http("GET", "/_log").status == 200


def test_web_pages_of_other_sites_change_nothing(hub: HubProcess) -> None:
    def create(**headers: str) -> int:
        return hub.http("POST", "/api/buckets/local/page", b"{}", headers=headers).status

    assert create(Origin="https://evil.example") == 403
    assert create(Origin="null") == 403
    assert create(Host="evil.example") == 403
    assert hub.http("GET", "/api/buckets/local", headers={"Host": "evil.example:80"}).status == 403
    assert create(Origin=hub.url) == 200
    assert create(Host=f"localhost:{hub.port}") == 409


# --- faults


OBSERVE = """
from huggingface_hub.utils import get_session, build_hf_headers
from huggingface_hub.errors import BucketBatchError, HfHubHTTPError
bucket = sys.argv[1]
def fault(kind, value, **more):
    body = {"kind": kind, "value": value, **more}
    get_session().post(f"{api.endpoint}/_faults", json=body).raise_for_status()
def once(*operations):
    text = "\\n".join(map(json.dumps, operations))
    headers = {**build_hf_headers(), "Content-Type": "application/x-ndjson"}
    return get_session().post(f"{api.endpoint}/api/buckets/{bucket}/batch", content=text, headers=headers)
def names():
    return sorted(f.path for f in api.list_bucket_tree(bucket, recursive=True))
def put(path):
    return {"type": "addFile", "path": path, "xetHash": "0" * 64}
api.create_bucket(bucket)
"""


def test_latency_is_waited_for_and_counted(env: dict[str, str], hub: HubProcess) -> None:
    code = (
        OBSERVE + 'fault("latency", 0.2, jitter=0.05, path="/tree", method="GET")\nnames()\nprint(json.dumps(names()))'
    )
    assert run_client(env, code, "local/slow") == []
    assert hub.fault_hits() == [2]
    waits = [entry["ms"] for entry in hub.log()["entries"] if "/tree" in entry["path"]]
    assert min(waits) >= 200  # what the Hub did, not how fast it is


def test_a_rate_limit_is_read_by_the_client(env: dict[str, str], hub: HubProcess) -> None:
    code = """
fault("rate_limit", 0, count=2, path="/api/buckets/")
try:
    api.bucket_info(bucket)
except HfHubHTTPError as error:
    said = str(error)
listed = names()
print(json.dumps([said, listed]))
"""
    said, listed = run_client(env, OBSERVE + code, "local/limited")
    assert "rate limit" in said
    assert "0/1000 requests remaining in current 300s window" in said
    assert listed == []  # the client waited as told and asked again
    assert hub.fault_hits() == [2]
    assert hub.log()["status"]["429"] == 2


@pytest.mark.parametrize(("kind", "applied"), [("error_before", False), ("error_after", True)])
def test_a_server_error_comes_before_or_after_the_work(
    env: dict[str, str], hub: HubProcess, kind: str, applied: bool
) -> None:
    code = """
kind = sys.argv[2]
fault(kind, 503, count=1, path="/batch$")
status = once(put("first")).status_code
then = names()
fault(kind, 500, count=1, path="/batch$")
api.batch_bucket_files(bucket, add=[(b"", "second")])
print(json.dumps([status, then, names()]))
"""
    out = run_client(env, OBSERVE + code, f"local/{kind}", kind)
    assert out == [503, ["first"] if applied else [], ["first", "second"] if applied else ["second"]]
    assert hub.fault_hits() == [1, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dropped_connection_comes_before_or_after_the_work(env: dict[str, str], hub: HubProcess, when: str) -> None:
    code = """
import httpx2
fault("drop", sys.argv[2], count=1, path="/batch$")
try:
    once(put("first"))
except httpx2.TransportError as error:
    said = type(error).__name__
print(json.dumps([said, names()]))
"""
    said, listed = run_client(env, OBSERVE + code, f"local/drop-{when}", when)
    assert said in ("RemoteProtocolError", "ReadError")
    assert listed == (["first"] if when == "after" else [])
    assert hub.log()["status"]["0"] == 1


def test_one_operation_of_a_batch_fails(env: dict[str, str], hub: HubProcess) -> None:
    code = """
fault("fail_op", "latest", count=1)
try:
    api.batch_bucket_files(bucket, add=[(b"1", "weights"), (b"2", "latest.json")])
except BucketBatchError as error:
    failed = error.failures
first = names()
api.batch_bucket_files(bucket, add=[(b"2", "latest.json")])
print(json.dumps([failed, first, names()]))
"""
    failed, first, then = run_client(env, OBSERVE + code, "local/partial")
    assert [failure["path"] for failure in failed] == ["latest.json"]
    assert (first, then) == (["weights"], ["latest.json", "weights"])
    assert hub.fault_hits() == [1]


def test_a_slow_batch_is_seen_half_done(env: dict[str, str]) -> None:
    code = """
import threading
fault("slow_batch", 1.0, count=1)
writer = threading.Thread(target=api.batch_bucket_files, args=(bucket,), kwargs={"add": [(b"", "a"), (b"", "b")]})
writer.start()
seen = set()
while writer.is_alive():
    seen.add(len(names()))
writer.join()
print(json.dumps([sorted(seen | {len(names())}), names()]))
"""
    seen, last = run_client(env, OBSERVE + code, "local/half")
    assert 1 in seen
    assert last == ["a", "b"]


def test_the_past_is_shown_exactly(env: dict[str, str], hub: HubProcess) -> None:
    code = """
import time
def shown():
    tree = {f.path: f.size for f in api.list_bucket_tree(bucket, recursive=True)}
    infos = {f.path: f.size for f in api.get_bucket_paths_info(bucket, ["kept", "written", "deleted", "added"])}
    return tree, infos
api.batch_bucket_files(bucket, add=[(b"1", "kept"), (b"1", "written"), (b"1", "deleted")])
time.sleep(0.7)
before = time.time()
time.sleep(0.7)
api.batch_bucket_files(bucket, add=[(b"22", "written"), (b"22", "added")], delete=["deleted"])
api.batch_bucket_files(bucket, add=[(b"333", "written")])
now = shown()
fault("stale_list", time.time() - before, path="/tree")
half = shown()
fault("stale_info", time.time() - before)
past = shown()
head = api.get_bucket_file_metadata(bucket, "deleted").size
print(json.dumps([now, half, past, head]))
"""
    now, half, past, head = run_client(env, OBSERVE + code, "local/past")
    new = {"kept": 1, "written": 3, "added": 2}
    old = {"kept": 1, "written": 1, "deleted": 1}
    assert now == [new, new]
    assert half == [old, new]
    assert past == [old, old]
    assert head == 1


def test_faults_are_seeded_shown_and_lifted(hub: HubProcess, env: dict[str, str]) -> None:
    def statuses() -> list[int]:
        numbers = hub.faults({"kind": "error_before", "value": 500, "probability": 0.5, "seed": 7, "path": "whoami"})
        found = [hub.http("GET", "/api/whoami-v2").status for _ in range(20)]
        assert hub.fault_hits() == [found.count(500)]
        assert hub.http("DELETE", f"/_faults/{numbers[0]}").json() == {"faults": []}
        return found

    first = statuses()
    assert set(first) == {200, 500}
    assert statuses() == first
    wrong: list[dict[str, Any]] = [
        {"kind": "earthquake", "value": 1},
        {"kind": "latency", "value": "soon"},
        {"kind": "latency", "value": 1, "path": "("},
        {"kind": "drop", "value": "sometimes"},
        {"kind": "error_after", "value": 200},
        {"kind": "latency", "value": 1, "colour": "red"},
    ]
    for fault in wrong:
        refused = hub.http("POST", "/_faults", json.dumps(fault).encode())
        assert refused.status == 400
        assert "expected" in refused.json()["error"]
    assert hub.http("DELETE", "/_faults/999").status == 404
    assert hub.http("GET", "/_faults").json() == {"faults": []}


# --- what survives, what is bounded


def test_writers_at_once_leave_exact_counts(hub: HubProcess) -> None:
    hub.http("POST", "/api/buckets/local/crowd", b"{}")

    def write(worker: int) -> set[int]:
        own = [add(f"own/{worker}/{n}") for n in range(40)]
        shared = [add(f"shared/{n}") for n in range(40)]
        removed = [{"type": "deleteFile", "path": f"own/{worker}/{n}"} for n in range(10)]
        return {post_batch(hub, "local/crowd", *operations).status for operations in (own, shared, removed)}

    with ThreadPoolExecutor(8) as pool:
        assert set().union(*pool.map(write, range(8))) == {200}
    assert len(paths(hub, "local/crowd")) == 8 * 30 + 40
    info = hub.http("GET", "/api/buckets/local/crowd").json()
    assert (info["totalFiles"], info["size"]) == (8 * 30 + 40, 0)


def test_what_a_batch_confirmed_survives_a_kill(tmp_path: Path) -> None:
    upload = """
api.create_bucket("local/kept", exist_ok=True)
api.batch_bucket_files("local/kept", add=[(Path(sys.argv[1]), "big"), (b"old", "gone")])
api.batch_bucket_files("local/kept", add=[(b"small", "small")], delete=["gone"])
print(json.dumps("confirmed"))
"""
    check = """
api.download_bucket_files("local/kept", [("big", sys.argv[1]), ("small", sys.argv[1] + ".small")])
print(json.dumps(sorted(f.path for f in api.list_bucket_tree("local/kept"))))
"""
    data = os.urandom(2_000_000)
    (tmp_path / "big").write_bytes(data)
    with HubProcess(tmp_path / "hub") as hub:
        env = client_env(tmp_path / "home", hub.url)
        assert run_client(env, upload, tmp_path / "big") == "confirmed"
        hub.kill()
        hub.start()
        assert run_client(env, check, tmp_path / "got") == ["big", "small"]
        assert (tmp_path / "got").read_bytes() == data
        assert (tmp_path / "got.small").read_bytes() == b"small"


def test_no_kill_loses_or_halves_a_confirmed_batch(tmp_path: Path) -> None:
    confirmed: list[int] = []
    sent: list[int] = []
    with HubProcess(tmp_path / "hub") as hub:
        hub.http("POST", "/api/buckets/local/kills", b"{}")

        def write() -> None:
            while True:
                number = len(sent)
                sent.append(number)
                try:
                    answer = post_batch(hub, "local/kills", *(add(f"{number:04d}/{n}") for n in range(20)))
                except (OSError, HTTPException):
                    return
                assert answer.json()["succeeded"] == 20
                confirmed.append(number)

        for _ in range(3):
            goal = len(confirmed) + 5
            writer = threading.Thread(target=write)
            writer.start()
            while len(confirmed) < goal:
                assert writer.is_alive()
                time.sleep(0.001)
            hub.kill()
            writer.join()
            hub.start()
            found = Counter(int(path.split("/")[0]) for path in paths(hub, "local/kills"))
            assert set(found.values()) == {20}
            assert set(confirmed) <= set(found) <= set(sent)
            assert hub.http("GET", "/api/buckets/local/kills").json()["totalFiles"] == found.total()


def test_a_kill_in_mid_upload_leaves_nothing_and_hinders_nothing(tmp_path: Path) -> None:
    upload = """
api.create_bucket("local/cut", exist_ok=True)
api.batch_bucket_files("local/cut", add=[(Path(sys.argv[1]), "big")])
print(json.dumps([f.size for f in api.list_bucket_tree("local/cut")]))
"""
    size = 30_000_000
    source = tmp_path / "big"
    source.write_bytes(os.urandom(size))
    with HubProcess(tmp_path / "hub") as hub:
        env = client_env(tmp_path / "home", hub.url)
        hub.faults({"kind": "latency", "value": 0.3, "path": "/xet/"})
        client = start_client(env, upload, source)
        while not any("/xet/" in call for call in hub.log()["calls"]):
            assert client.poll() is None, client.communicate()
            time.sleep(0.02)
        hub.kill()
        _, error = client.communicate(timeout=120)
        assert client.returncode != 0, error
        hub.start()
        assert paths(hub, "local/cut") == []
        assert list((hub.data / "tmp").iterdir()) == []
        assert run_client(env, upload, source) == [size]
        code = 'api.download_bucket_files("local/cut", [("big", sys.argv[1])])\nprint("0")'
        run_client(client_env(tmp_path / "other", hub.url), code, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == source.read_bytes()


def peak_mb(pid: int) -> float:
    """The most memory a process ever held, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def test_large_files_pass_in_bounded_memory(tmp_path: Path) -> None:
    code = """
import hashlib, urllib.request
api.create_bucket("local/large")
api.batch_bucket_files("local/large", add=[(Path(sys.argv[1]), "large")])
api.download_bucket_files("local/large", [("large", sys.argv[2])])
with urllib.request.urlopen(f"{api.endpoint}/buckets/local/large/resolve/large") as answer:
    digest = hashlib.file_digest(answer, "sha256").hexdigest()
print(json.dumps(digest))
"""
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        for _ in range(200):
            file.write(os.urandom(1_000_000))
    with HubProcess(tmp_path / "hub") as hub:
        digest = run_client(client_env(tmp_path / "home", hub.url), code, source, target)
        assert peak_mb(hub.pid) < 250, peak_mb(hub.pid)
    with source.open("rb") as one, target.open("rb") as other:
        assert hashlib.file_digest(one, "sha256").hexdigest() == digest
        assert hashlib.file_digest(other, "sha256").hexdigest() == digest


def test_contents_come_from_another_origin_with_cdn(tmp_path: Path) -> None:
    code = """
from huggingface_hub import HfFileSystem
data = bytes(range(256)) * 2000
api.create_bucket("local/cdn")
api.batch_bucket_files("local/cdn", add=[(data, "dir/data.bin"), (b"", "empty")])
api.download_bucket_files("local/cdn", [("dir/data.bin", sys.argv[1])])
same = [Path(sys.argv[1]).read_bytes() == data, HfFileSystem().cat("buckets/local/cdn/dir/data.bin") == data]
print(json.dumps([*same, api.get_bucket_file_metadata("local/cdn", "dir/data.bin").size]))
"""
    tokens = "local:write:local-secret,root:admin:root-secret"
    with HubProcess(tmp_path / "hub", "--cdn", token="root-secret", tokens=tokens) as hub:
        env = client_env(tmp_path / "home", hub.url, "local-secret")
        assert run_client(env, code, tmp_path / "got") == [True, True, 512_000]
        first = hub.http("GET", "/buckets/local/cdn/resolve/dir%2Fdata.bin", redirect=False)
        assert first.status == 302
        location = first.headers["location"]
        assert not location.startswith(hub.url + "/")
        path = "/" + location.split("/", 3)[3]
        part = hub.http("GET", path, token="", headers={"Range": "bytes=300-303"})  # the signature is enough
        assert (part.status, part.body) == (206, bytes([44, 45, 46, 47]))
        assert hub.http("GET", path[:-1] + ("0" if path[-1] != "0" else "1"), token="").status == 403
        assert hub.http("GET", path.split("?")[0], token="").status == 403


def test_a_live_listing_follows_changes(env: dict[str, str]) -> None:
    code = """
import time
from huggingface_hub import HfFileSystem
api.create_bucket("local/live")
api.batch_bucket_files("local/live", add=[(b"1", "one")])
fs = HfFileSystem(live_follow=True)
root = "buckets/local/live"
first = fs.ls(root, detail=False)
deadline = time.monotonic() + 30
def wait(names):
    while fs.ls(root, detail=False) != [f"{root}/{n}" for n in names]:
        assert time.monotonic() < deadline, fs.ls(root, detail=False)
        time.sleep(0.02)
api.batch_bucket_files("local/live", add=[(b"2", "two")])
wait(["one", "two"])
api.batch_bucket_files("local/live", delete=["one"])
wait(["two"])
print(json.dumps(first))
"""
    assert run_client(env, code) == ["buckets/local/live/one"]


def events(hub: HubProcess, query: str) -> list[tuple[str, Any]]:
    """The events that come before the stream goes live, `ready` included."""
    found: list[tuple[str, Any]] = []
    url = f"{hub.url}/api/buckets/local/told/events{query}"
    with urllib.request.urlopen(url, timeout=30) as stream:  # noqa: S310
        while not found or found[-1][0] not in ("ready", "reset"):
            name = stream.readline().decode().removeprefix("event: ").strip()
            found.append((name, json.loads(stream.readline().decode().removeprefix("data: "))))
            assert stream.readline() == b"\n"
    return found


def test_missed_changes_are_replayed_from_a_cursor_or_a_time(hub: HubProcess) -> None:
    hub.http("POST", "/api/buckets/local/told", b"{}")
    assert [name for name, _ in events(hub, "")] == ["ready"]
    post_batch(hub, "local/told", add("a"))
    (_, told), (_, ready) = events(hub, "?since=2020-01-01T00:00:00.000Z")
    assert [(change["path"], change["op"]) for change in told["changes"]] == [("a", "add")]
    post_batch(hub, "local/told", add("a"), add("b"), {"type": "deleteFile", "path": "a"})
    (_, told), (name, _) = events(hub, f"?cursor={ready['cursor']}")
    assert [(change["path"], change["op"]) for change in told["changes"]] == [
        ("a", "update"), ("b", "add"), ("a", "delete")
    ]  # fmt: skip
    assert name == "ready"
    assert hub.http("GET", "/api/buckets/local/told/events?cursor=x").status == 400
    assert hub.http("GET", "/api/buckets/local/told/events?since=soon").status == 400


# --- the command line


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that `deltawire hub serve` says when it cannot start."""
    assert main(["hub", "serve", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return str(err)


def test_one_data_folder_serves_one_hub(hub: HubProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--data", hub.data, "--port", 0) == (
        f"deltawire hub: --data {hub.data} is in use by another Hub; stop that one, or give this one another folder\n"
    )


WRONG = [
    (("--token", "alice:owner:supersecret"), "expected NAME:ROLE:VALUE"),
    (("--token", "alice:read:supersecret", "--token", "bob:read:supersecret"), "another user"),
    (("--token", "alice:read:supersecret with spaces"), "no spaces"),
    (("--fault", "earthquake=9"), "latency=0.05"),
    (("--page-size", "0"), "--page-size is 0"),
    (("--public-url", "ftp://x"), "--public-url"),
    (("--ready-file", "/nowhere/at/all/ready"), "its folder does not exist"),
    (("--data", "/dev/null/x"), "cannot be written"),
]


@pytest.mark.parametrize(("words", "part"), WRONG)
def test_a_mistake_on_the_command_line_gives_one_line(
    words: tuple[str, ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "--data", tmp_path / "data", "--port", 0, *words)
    assert part in said
    assert "supersecret" not in said


def test_a_data_folder_of_a_newer_release_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(tmp_path / "hub.sqlite3")) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "layout 99, this release knows 1" in refusal(capsys, "--data", tmp_path, "--port", 0)


def test_the_start_line_names_the_variable_and_warns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltawire", "hub", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    for more, warned in ((["--host", "0.0.0.0"], True), (["--json"], False)):
        with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.terminate()
            _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said
        assert (len(said.splitlines()) == 1 and "without tokens" in said) == warned, said
        if warned:
            assert "export HF_ENDPOINT=http://127.0.0.1:" in line
        else:
            assert json.loads(line)["url"].startswith("http://127.0.0.1:")


def test_control_is_closed_unless_asked_for(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub", "--fault", "latency=0.01", control=False) as hub:
        assert hub.http("GET", "/api/whoami-v2").status == 200
        for method, path in (("GET", "/_log"), ("GET", "/_faults"), ("DELETE", "/_faults"), ("POST", "/_faults")):
            assert hub.http(method, path).status == 404


# --- the store below the routes


def test_a_listing_costs_what_it_shows_not_what_is_there(tmp_path: Path) -> None:
    from sync.devhub import buckets, listing
    from sync.devhub.database import Database

    db = Database(tmp_path / "hub.sqlite3", [buckets.SCHEMA])
    store = buckets.Buckets(db, lambda _hash: 5)
    bucket, _ = store.create("local", "large", private=False)
    for folder in range(20):
        names = [f"folder-{folder:02d}/{n:04d}" for n in range(1000)]
        assert store.apply(bucket, [buckets.Operation("put", name, EMPTY) for name in names]) == []
    assert store.find("local", "large").files == 20_000
    assert store.find("local", "large").size == 100_000
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 100
        return 0

    with store.view(bucket) as view:
        db.read().set_progress_handler(count, 100)
        items, cursor = listing.page(view, "folder-07/000", recursive=True, cursor=None, limit=1000)
        assert (len(items), cursor) == (10, None)
        assert view.get("folder-19/0999") is not None
        assert steps < 5_000  # one look at every entry takes over 100,000
        items, cursor = listing.page(view, "", recursive=True, cursor=None, limit=50)
        assert (len(items), steps < 10_000) == (50, True)
        steps = 0
        assert sum(1 for _ in view.scan(b"", None)) == 20_000
        assert steps > 100_000
        db.read().set_progress_handler(None, 0)
    db.close()


def test_changes_are_forgotten_after_their_time_and_a_follower_is_told(tmp_path: Path) -> None:
    from starlette.requests import Request

    from sync.devhub import buckets, events
    from sync.devhub.database import Database

    def asked(query: str) -> Request:
        return Request({"type": "http", "query_string": query.encode(), "headers": []})

    db = Database(tmp_path / "hub.sqlite3", [buckets.SCHEMA])
    store = buckets.Buckets(db, lambda _hash: 5, history_seconds=0)
    bucket, _ = store.create("local", "b", private=False)
    for name in ("a", "b", "c"):
        store.apply(bucket, [buckets.Operation("put", name, EMPTY)])
    bucket = store.find("local", "b")
    assert bucket.pruned == 2
    assert [change.path for change in store.changes(bucket)] == ["c"]
    assert events.starting_point(bucket, asked("cursor=1"), bucket.updated) is None
    assert events.starting_point(bucket, asked("cursor=2"), bucket.updated) == (2, 0)
    assert events.starting_point(bucket, asked("since=2020-01-01T00:00:00Z"), bucket.updated) is None
    late = events.starting_point(bucket, asked("since=2100-01-01T00:00:00Z"), bucket.updated)
    assert late is not None
    assert events.starting_point(bucket, asked(""), bucket.updated) == (-1, 0)
    db.close()
