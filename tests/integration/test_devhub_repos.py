"""Repositories and Spaces of the local Hub, used by the real clients in processes of their own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.devhub import Answer, HubProcess, client_env, run_client, start_client

pytestmark = pytest.mark.integration

TOKENS = "ann:write:ann-secret,ann:read:ann-reads,bob:write:bob-secret,root:admin:root-secret"
ERROR = """
def error(call):
    try:
        call()
    except Exception as found:
        return [type(found).__name__, getattr(getattr(found, "response", None), "status_code", None)]
    return None
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """An open Hub with short pages, so that every listing here has several."""
    with HubProcess(tmp_path_factory.mktemp("open") / "hub", "--page-size", 4) as hub:
        yield hub


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with tokens."""
    with HubProcess(tmp_path_factory.mktemp("guarded") / "hub", tokens=TOKENS, token="root-secret") as hub:
        yield hub


def client(hub: HubProcess, home: Path, code: str, *args: object, token: str | None = None) -> Any:
    return run_client(client_env(home / "hf", hub.url, token), ERROR + code, *args)


def commit(hub: HubProcess, repo: str, *lines: object, raw: bytes | None = None, token: str | None = None) -> Answer:
    """Send a commit body made of a header and `lines`, or of `raw`."""
    header = {"key": "header", "value": {"summary": "by hand", "description": ""}}
    body = raw if raw is not None else b"".join(json.dumps(line).encode() + b"\n" for line in (header, *lines))
    return hub.http("POST", f"/api/models/{repo}/commit/main", body, token=token)


def new_repo(hub: HubProcess, name: str, kind: str = "model") -> str:
    body = {"name": name, "organization": "local", "type": kind} | ({"sdk": "docker"} if kind == "space" else {})
    assert hub.http("POST", "/api/repos/create", json.dumps(body).encode()).status == 200
    return f"local/{name}"


def head(hub: HubProcess, repo: str) -> str:
    return str(hub.http("GET", f"/api/models/{repo}").json()["sha"])


def text_file(path: object, content: object = "aGk=") -> dict[str, Any]:
    return {"key": "file", "value": {"path": path, "content": content, "encoding": "base64"}}


def pages(hub: HubProcess, path: str) -> Iterator[dict[str, Any]]:
    """The items of a listing, over all its pages."""
    while path:
        answer = hub.http("GET", path)
        assert answer.status == 200, answer
        yield from answer.json()
        path = answer.headers.get("link", "").partition(">")[0].removeprefix(f"<{hub.url}")


def test_small_and_large_files_come_back_at_every_revision(hub: HubProcess, tmp_path: Path) -> None:
    result = client(
        hub,
        tmp_path,
        """
import os
from huggingface_hub import hf_hub_download
url = api.create_repo("local/files")
first = api.upload_file(path_or_fileobj=b"one", path_in_repo="a/b c/ü%.txt", repo_id="local/files")
large = os.urandom(12 << 20)
second = api.upload_file(path_or_fileobj=large, path_in_repo="large.bin", repo_id="local/files")
third = api.upload_file(path_or_fileobj=b"two", path_in_repo="a/b c/ü%.txt", repo_id="local/files")
same = api.upload_file(path_or_fileobj=b"two", path_in_repo="a/b c/ü%.txt", repo_id="local/files")
read = lambda name, **more: Path(hf_hub_download("local/files", name, **more)).read_bytes()
assert read("large.bin") == large
versions = [read("a/b c/ü%.txt", revision=r).decode() for r in (first.oid, second.oid[:10], third.oid, "main")]
early = error(lambda: read("large.bin", revision=first.oid))
missing = [error(lambda: read("none")), error(lambda: read("a", revision="nope"))]
info = {s.rfilename: (s.size, bool(s.lfs)) for s in api.model_info("local/files", files_metadata=True).siblings}
api.delete_file("large.bin", "local/files")
gone = api.file_exists("local/files", "large.bin")
titles = [c.title for c in api.list_repo_commits("local/files")]
again = [str(api.create_repo("local/files", exist_ok=True)), error(lambda: api.create_repo("local/files"))]
last = {e.path: e.last_commit.oid for e in api.list_repo_tree("local/files", recursive=True, expand=True)}
right = last["a"] == last["a/b c"] == last["a/b c/ü%.txt"] == third.oid != last[".gitattributes"]
print(json.dumps([url, versions, same.oid == third.oid, early, missing, info, gone, titles, again, right]))
""",
    )
    url, versions, same, early, missing, info, gone, titles, again, right = result
    assert url == f"{hub.url}/local/files"
    assert versions == ["one", "one", "two", "two"]
    assert same, "an unchanged file makes no commit"
    assert early[0] == "RemoteEntryNotFoundError"
    assert missing == [["RemoteEntryNotFoundError", 404], ["RevisionNotFoundError", 404]]
    assert info["large.bin"] == [12 << 20, True]
    assert info["a/b c/ü%.txt"] == [3, False]
    assert gone is False
    assert len(titles) == 5
    assert titles[-1] == "initial commit"
    assert again == [url, ["HfHubHTTPError", 409]]
    assert right, "each entry names the commit that changed it last"


def test_folders_up_and_down_with_ignore_and_delete_patterns(hub: HubProcess, tmp_path: Path) -> None:
    folder = tmp_path / "up"
    (folder / "deep" / "er").mkdir(parents=True)
    for n in range(9):
        (folder / "deep" / f"{n}.txt").write_text(f"number {n}")
    (folder / "deep" / "er" / "weights.safetensors").write_bytes(bytes(range(256)) * 5000)
    (folder / ".gitignore").write_text("*.log\nsecret/\n")
    (folder / "noise.log").write_text("no")
    (folder / "secret").mkdir()
    (folder / "secret" / "key").write_text("no")
    result = client(
        hub,
        tmp_path,
        """
from huggingface_hub import snapshot_download
api.create_repo("local/folder", repo_type="dataset")
api.upload_folder(folder_path=sys.argv[1], repo_id="local/folder", repo_type="dataset")
api.create_tag("local/folder", tag="v1", repo_type="dataset")
api.upload_folder(folder_path=sys.argv[1] + "/deep/er", path_in_repo="deep", delete_patterns="*.txt",
                  repo_id="local/folder", repo_type="dataset")
def down(**more):
    root = Path(snapshot_download("local/folder", repo_type="dataset", **more))
    kept = (p for p in root.rglob("*") if p.is_file() and ".cache" not in p.parts)
    return {str(p.relative_to(root)): len(p.read_bytes()) for p in kept}
print(json.dumps([down(revision="v1"), down(), down(local_dir=sys.argv[2]), api.list_repo_files("local/folder",
      repo_type="dataset")]))
""",
        folder,
        tmp_path / "down",
    )
    tagged, now, local, listed = result
    texts = {f"deep/{n}.txt": 8 for n in range(9)}
    weights = "weights.safetensors"
    common = {".gitattributes": tagged[".gitattributes"], ".gitignore": 14, f"deep/er/{weights}": 1280000}
    assert tagged == texts | common
    assert now == local == common | {f"deep/{weights}": 1280000}
    assert sorted(listed) == sorted(now)


def test_a_commit_on_an_old_parent_is_refused_and_two_writers_lose_nothing(hub: HubProcess, tmp_path: Path) -> None:
    new_repo(hub, "race")
    code = """
for n in range(12):
    api.upload_file(path_or_fileobj=f"{sys.argv[1]} {n}".encode(), path_in_repo=f"{sys.argv[1]}/{n}.txt",
                    repo_id="local/race")
print(json.dumps("done"))
"""
    writers = [start_client(client_env(tmp_path / name, hub.url), code, name) for name in ("a", "b")]
    for writer in writers:
        _, err = writer.communicate(timeout=120)
        assert writer.returncode == 0, err.decode()
    result = client(
        hub,
        tmp_path,
        """
commits = api.list_repo_commits("local/race")
put = lambda parent: api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="local/race", parent_commit=parent)
old = error(lambda: put(commits[1].commit_id))
files = api.list_repo_files("local/race")
put(commits[0].commit_id)
print(json.dumps([old, files, len(commits), "x" in api.list_repo_files("local/race")]))
""",
    )
    old, files, commits, put = result
    assert old == ["HfHubHTTPError", 412]
    assert set(files) == {f"{w}/{n}.txt" for w in "ab" for n in range(12)} | {".gitattributes"}
    assert commits == 25
    assert put


def test_branches_tags_moves_copies_and_lists(hub: HubProcess, tmp_path: Path) -> None:
    result = client(
        hub,
        tmp_path,
        """
from huggingface_hub import CommitOperationCopy, CommitOperationDelete, hf_hub_download
def names(refs):
    return [[b.name for b in refs.branches], [t.name for t in refs.tags]]
for n in range(6):
    api.create_repo(f"local/many-{n}", private=n == 0)
repo = "local/many-3"
api.upload_file(path_or_fileobj=b"text", path_in_repo="t.txt", repo_id=repo)
api.upload_file(path_or_fileobj=bytes(3 << 20), path_in_repo="w.bin", repo_id=repo)
api.create_branch(repo, branch="feat/x")
api.upload_file(path_or_fileobj=b"branch", path_in_repo="t.txt", repo_id=repo, revision="feat/x")
api.create_tag(repo, tag="v1", revision="feat/x", tag_message="first")
at = [Path(hf_hub_download(repo, "t.txt", revision=r)).read_text() for r in ("main", "feat/x", "v1")]
taken = [error(lambda: api.create_branch(repo, branch="feat/x")), error(lambda: api.create_tag(repo, tag="v1"))]
before = names(api.list_repo_refs(repo))
api.delete_branch(repo, branch="feat/x"); api.delete_tag(repo, tag="v1")
after = names(api.list_repo_refs(repo))
missing = [error(lambda: api.delete_tag(repo, tag="v1")), error(lambda: api.delete_branch(repo, branch="main"))]
api.create_commit(repo, [CommitOperationCopy("w.bin", "copy/w.bin"), CommitOperationCopy("t.txt", "copy/t.txt"),
                         CommitOperationDelete("w.bin")], commit_message="copy")
across = CommitOperationCopy("copy/w.bin", "from.bin", src_repo_id=repo, src_repo_type="model")
api.create_commit("local/many-4", [across], commit_message="across")
copied = [sorted(api.list_repo_files(repo)), sorted(api.list_repo_files("local/many-4"))]
ghosts = [error(lambda: api.delete_file("ghost", repo)), error(lambda: api.delete_folder("ghosts", repo))]
listed = [[m.id for m in api.list_models(author="local", search="many-")], [m.id for m in api.list_models(limit=2)]]
api.move_repo("local/many-5", "local/moved"); api.update_repo_settings("local/moved", private=True)
moved = [api.repo_exists("local/many-5"), api.model_info("local/moved").private]
api.super_squash_history(repo)
squashed = len(api.list_repo_commits(repo))
pull = [error(lambda: api.create_pull_request(repo, title="x")), list(api.get_repo_discussions(repo)),
        error(lambda: api.upload_file(path_or_fileobj=b"", path_in_repo="x", repo_id=repo, create_pr=True))]
api.delete_repo("local/moved"); api.delete_repo("local/moved", missing_ok=True)
deleted = [api.repo_exists("local/moved"), error(lambda: api.delete_repo("local/moved"))]
print(json.dumps([at, taken, before, after, missing, copied, ghosts, listed, moved, squashed, pull, deleted]))
""",
    )
    at, taken, before, after, missing, copied, ghosts, listed, moved, squashed, pull, deleted = result
    assert at == ["text", "branch", "branch"]
    assert taken == [["HfHubHTTPError", 409]] * 2
    assert before == [["feat/x", "main"], ["v1"]]
    assert after == [["main"], []]
    assert missing == [["RevisionNotFoundError", 404], ["HfHubHTTPError", 403]]
    assert copied == [[".gitattributes", "copy/t.txt", "copy/w.bin", "t.txt"], [".gitattributes", "from.bin"]]
    assert ghosts == [["RemoteEntryNotFoundError", 404]] * 2
    assert listed[0] == [f"local/many-{n}" for n in range(6)]
    assert len(listed[1]) == 2
    assert moved == [False, True]
    assert squashed == 1
    assert pull == [["HfHubHTTPError", 501], [], ["HfHubHTTPError", 501]]
    assert deleted == [False, ["RepositoryNotFoundError", 404]]


def test_file_system_and_datasets_load_what_was_uploaded(hub: HubProcess, tmp_path: Path) -> None:
    result = client(
        hub,
        tmp_path,
        """
from datasets import Dataset, load_dataset
from huggingface_hub import HfFileSystem
fs = HfFileSystem()
api.create_repo("local/rows", repo_type="dataset")
with fs.open("datasets/local/rows/train.jsonl", "w") as file:
    file.write("".join(json.dumps({"n": n, "text": f"row {n}"}) + "\\n" for n in range(50)))
rows = load_dataset("local/rows", split="train")
fs.invalidate_cache()
listed = fs.ls("datasets/local/rows", detail=False)
with fs.open("datasets/local/rows/train.jsonl", "rb") as file:
    file.seek(10)
    middle = file.read(5).decode()
fs.cp_file("datasets/local/rows/train.jsonl", "datasets/local/rows/sub/copy.jsonl")
found = fs.glob("datasets/local/rows/**/*.jsonl")
fs.rm("datasets/local/rows/sub", recursive=True)
left = fs.exists("datasets/local/rows/sub/copy.jsonl")
Dataset.from_dict({"x": list(range(1000))}).push_to_hub("local/table")
table = load_dataset("local/table", split="train")
stream = next(iter(load_dataset("local/table", split="train", streaming=True)))
print(json.dumps([rows[49], len(rows), listed, middle, found, left, table.column_names, sum(table["x"]), stream]))
""",
    )
    last, count, listed, middle, found, left, columns, total, stream = result
    assert (last, count) == ({"n": 49, "text": "row 49"}, 50)
    assert "datasets/local/rows/train.jsonl" in listed
    assert middle == json.dumps({"n": 0, "text": "row 0"})[10:15]
    assert found == ["datasets/local/rows/sub/copy.jsonl", "datasets/local/rows/train.jsonl"]
    assert left is False
    assert (columns, total, stream) == (["x"], 499500, {"x": 0})


def test_transformers_push_and_load_a_model(hub: HubProcess, tmp_path: Path) -> None:
    result = client(
        hub,
        tmp_path,
        """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
raw = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").push_to_hub("local/tiny")
sizes = dict(vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
model.push_to_hub("local/tiny", commit_message="weights")
loaded = AutoModelForCausalLM.from_pretrained("local/tiny")
tokenizer = AutoTokenizer.from_pretrained("local/tiny")
equal = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
print(json.dumps([equal, tokenizer("hello world")["input_ids"], api.list_repo_files("local/tiny")]))
""",
    )
    equal, ids, files = result
    assert equal
    assert ids == [1, 2]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)


def test_private_repositories_and_read_tokens(guarded: HubProcess, tmp_path: Path) -> None:
    code = """
from huggingface_hub import hf_hub_download
read = lambda: Path(hf_hub_download("ann/private", "f.txt")).read_text()
put = lambda text: api.upload_file(path_or_fileobj=text.encode(), path_in_repo="f.txt", repo_id="ann/private")
write = lambda: put(sys.argv[1])
seen = [m.id for m in api.list_models()]
"""
    show = "print(json.dumps([seen, error(read) or read(), error(write)]))"
    made = 'api.create_repo("ann/private", private=True); api.create_repo("public")\n'
    owner = client(guarded, tmp_path / "ann", made + code + "write()\n" + show, "ann", token="ann-secret")
    reads = client(guarded, tmp_path / "read", code + show, "reader", token="ann-reads")
    other = client(guarded, tmp_path / "bob", code + show, "bob", token="bob-secret")
    admin = client(guarded, tmp_path / "root", code + show, "root", token="root-secret")
    unknown = client(guarded, tmp_path / "bad", "print(json.dumps(error(lambda: api.whoami())))", token="hf_wrong")
    anonymous = guarded.http("GET", "/api/models", token="").json()
    assert owner == [["ann/private", "ann/public"], "ann", None]
    assert reads == [["ann/private", "ann/public"], "ann", ["HfHubHTTPError", 403]]
    assert other == [["ann/public"], ["RepositoryNotFoundError", 404], ["RepositoryNotFoundError", 404]]
    assert admin == [["ann/private", "ann/public"], "ann", None]
    assert unknown[1] == 401
    assert [model["id"] for model in anonymous] == ["ann/public"]
    api_paths = ("", "/tree/main", "/refs", "/commits/main", "/xet-read-token/main")
    file_paths = ("/ann/private", "/ann/private/resolve/main/f.txt", "/ann/private/raw/main/f.txt")
    for path in (*file_paths, *(f"/api/models/ann/private{path}" for path in api_paths)):
        assert guarded.http("GET", path, token="").status == 404, path
    create = json.dumps({"name": "x", "organization": "ann"}).encode()
    answers = [
        guarded.http("POST", "/api/repos/create", create, token=t).status for t in ("", "ann-reads", "bob-secret")
    ]
    assert answers == [401, 403, 403]
    assert guarded.http("GET", "/api/models/ann/public/xet-write-token/main", token="bob-secret").status == 403


def test_a_space_with_its_settings(hub: HubProcess, tmp_path: Path) -> None:
    result = client(
        hub,
        tmp_path,
        """
import time
repo = "local/app"
api.create_repo(repo, repo_type="space", space_sdk="gradio", space_secrets=[{"key": "A", "value": "hide me"}],
                space_variables=[{"key": "V", "value": "one"}])
stages = [api.get_space_runtime(repo).stage]
api.upload_file(path_or_fileobj=b"print(1)", path_in_repo="app.py", repo_id=repo, repo_type="space")
stages.append(api.wait_for_space(repo).stage)
api.add_space_secret(repo, "B", "hide me too", description="why")
secrets = {k: v.description for k, v in api.get_space_secrets(repo).items()}
api.add_space_variable(repo, "W", "two")
variables = {k: v.value for k, v in api.delete_space_variable(repo, "V").items()}
collision = error(lambda: api.add_space_variable(repo, "A", "x"))
api.delete_space_secret(repo, "A")
stages += [api.pause_space(repo).stage, api.restart_space(repo).stage]
stages.append(api.restart_space(repo, factory_reboot=True).stage)
hardware = api.request_space_hardware(repo, "t4-small", sleep_time=600)
sleep = api.set_space_sleep_time(repo, 700).sleep_time
deadline = time.monotonic() + 20  # the client leaves out lines newer than the answer's Date, which trails a little
while not any("PAUSED" in line for line in api.fetch_space_logs(repo)) and time.monotonic() < deadline:
    time.sleep(0.2)
logs = list(api.fetch_space_logs(repo)) + list(api.fetch_space_logs(repo, build=True))
info = api.space_info(repo)
api.delete_file("app.py", repo, repo_type="space")
stages.append(api.get_space_runtime(repo).stage)
print(json.dumps([stages, secrets, variables, collision, [hardware.hardware, hardware.sleep_time, sleep], logs,
                  info.sdk, info.runtime.stage, list(api.get_space_secrets(repo)), [s.id for s in api.list_spaces()]]))
""",
    )
    stages, secrets, variables, collision, hardware, logs, sdk, stage, left, spaces = result
    assert stages == ["NO_APP_FILE", "RUNNING", "PAUSED", "RUNNING", "RUNNING", "NO_APP_FILE"]
    assert secrets == {"A": None, "B": "why"}
    assert variables == {"W": "two"}
    assert collision == ["BadRequestError", 400]
    assert hardware == ["t4-small", 600, 700]
    assert any("PAUSED" in line for line in logs)
    assert (sdk, stage, left, spaces) == ("gradio", "RUNNING", ["B"], ["local/app"])
    shown = hub.http("GET", "/api/spaces/local/app/secrets").body + hub.http("GET", "/api/spaces/local/app").body
    assert b"hide me" not in shown
    bad = hub.http("POST", "/api/spaces/local/app/secrets", json.dumps({"key": "1-x", "value": "hide me"}).encode())
    assert bad.status == 400
    assert b"hide me" not in bad.body


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub") as hub:
        repo = new_repo(hub, "kept")
        client(hub, tmp_path, """
api.upload_file(path_or_fileobj=bytes(range(256)) * 9000, path_in_repo="big.bin", repo_id="local/kept")
print(json.dumps(0))""")  # fmt: skip
        made = [commit(hub, repo, text_file(f"{n}.txt", base64.b64encode(b"%d" % n).decode())) for n in range(5)]
        part = hub.data / "tmp" / "blob-left"
        part.write_bytes(b"half")
        hub.kill()
        hub.start()
        assert not part.exists()
        assert head(hub, repo) == made[-1].json()["commitOid"]
        assert [hub.http("GET", f"/{repo}/resolve/main/{n}.txt").body for n in range(5)] == [
            b"%d" % n for n in range(5)
        ]
        assert hub.http("GET", f"/{repo}/resolve/main/big.bin").body == bytes(range(256)) * 9000
        assert commit(hub, repo, text_file("after.txt")).status == 200


@pytest.mark.parametrize("acknowledged", [1, 6])
def test_a_kill_in_the_middle_of_commits_loses_none_that_was_answered(tmp_path: Path, acknowledged: int) -> None:
    code = """
import itertools, os
for n in itertools.count():
    (Path(sys.argv[1]) / "s.txt").write_bytes(os.urandom(2000))
    (Path(sys.argv[1]) / "l.bin").write_bytes(os.urandom(200_000))
    print(api.upload_folder(folder_path=sys.argv[1], path_in_repo=str(n), repo_id="local/torn").oid, flush=True)
"""
    (tmp_path / "up").mkdir()
    with HubProcess(tmp_path / "hub") as hub:
        repo = new_repo(hub, "torn")
        writer = start_client(client_env(tmp_path / "hf", hub.url), code, tmp_path / "up")
        assert writer.stdout is not None
        answered = [writer.stdout.readline().decode().strip() for _ in range(acknowledged)]
        hub.kill()
        writer.kill()
        answered += writer.communicate()[0].decode().split()
        hub.start()
        history = list(pages(hub, f"/api/models/{repo}/commits/main"))
        assert [c["id"] for c in history[::-1]][1 : len(answered) + 1] == answered
        assert len(history) - 1 - len(answered) in (0, 1), "at most the commit whose answer was lost"
        files = list(pages(hub, f"/api/models/{repo}/tree/main?recursive=true"))
        assert len([f for f in files if f["type"] == "file"]) == 2 * (len(history) - 1) + 1
        for file in (f for f in files if f["type"] == "file"):
            body = hub.http("GET", f"/{repo}/resolve/main/{file['path']}").body
            assert len(body) == file["size"]
            if "lfs" in file:
                assert hashlib.sha256(body).hexdigest() == file["lfs"]["oid"]


def test_a_stream_is_uploaded_over_lfs(hub: HubProcess, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    hub.clear_log()
    result = client(
        hub,
        tmp_path,
        """
import io
from huggingface_hub import hf_hub_download
content = bytes(range(256)) * 4000
api.create_repo("local/stream")
for n in range(2):
    api.upload_file(path_or_fileobj=io.BytesIO(content), path_in_repo=f"{n}.bin", repo_id="local/stream")
info = api.get_paths_info("local/stream", "0.bin")[0]
print(json.dumps([Path(hf_hub_download("local/stream", "1.bin")).read_bytes() == content, info.lfs.sha256, info.size]))
""",
    )
    sha256 = hashlib.sha256(content).hexdigest()
    assert result == [True, sha256, len(content)]
    body = json.dumps({"operation": "download", "objects": [{"oid": sha256, "size": len(content)}]}).encode()
    found = hub.http("POST", "/local/stream.git/info/lfs/objects/batch", body).json()["objects"][0]
    href = found["actions"]["download"]["href"].removeprefix(hub.url)
    assert hub.http("GET", href, headers={"Range": "bytes=256-259"}).body == b"\0\1\2\3"
    other = new_repo(hub, "elsewhere")
    refused = hub.http("POST", f"/{other}.git/info/lfs/objects/batch", body).json()["objects"][0]
    assert refused["error"]["code"] == 404
    assert hub.http("GET", href.replace("sig=", "sig=0")).status == 403


def test_an_lfs_upload_that_is_not_what_it_says_is_refused(hub: HubProcess) -> None:
    repo = new_repo(hub, "liar")
    sha256 = hashlib.sha256(b"the truth").hexdigest()
    body = json.dumps({"operation": "upload", "objects": [{"oid": sha256, "size": 9}]}).encode()
    actions = hub.http("POST", f"/{repo}.git/info/lfs/objects/batch", body).json()["objects"][0]["actions"]
    href = actions["upload"]["href"].removeprefix(hub.url)
    verify = actions["verify"]["href"].removeprefix(hub.url)
    lfs_line = {"key": "lfsFile", "value": {"path": "t", "oid": sha256, "size": 9}}
    assert [hub.http("PUT", href, sent).status for sent in (b"a lie !!!", b"short", b"the truth and more")] == [400] * 3
    assert hub.http("PUT", href.replace("size=9", "size=8"), b"the trut").status == 403
    assert hub.http("POST", verify, json.dumps({"oid": sha256, "size": 9}).encode()).status == 400
    assert commit(hub, repo, lfs_line).status == 400
    assert hub.http("PUT", href, b"the truth").status == 200
    assert hub.http("POST", verify, json.dumps({"oid": sha256, "size": 9}).encode()).status == 200
    wrong_size = {"key": "lfsFile", "value": {"path": "t", "oid": sha256, "size": 8}}
    assert commit(hub, repo, wrong_size).status == 400
    assert commit(hub, repo, lfs_line).status == 200
    assert hub.http("GET", f"/{repo}/resolve/main/t").body == b"the truth"
    assert hub.http("GET", f"/{repo}/raw/main/t").body.startswith(b"version https://git-lfs")
    assert not list((hub.data / "tmp").iterdir())


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (text_file("f", "not base64!"), 400),
        (text_file("f", "aGk"), 400),
        (text_file("f", 7), 400),
        (text_file("../f"), 400),
        (text_file("a/../../f"), 400),
        (text_file("/etc/f"), 400),
        (text_file("a//f"), 400),
        (text_file("a/./f"), 400),
        (text_file(".git/config"), 400),
        (text_file("a\x00b"), 400),
        (text_file("\ud800"), 400),
        (text_file("x" * 2000), 400),
        (text_file("/".join("x" * 200)), 400),
        (text_file(None), 400),
        (text_file("good.txt/inside"), 400),
        (text_file("f", base64.b64encode(bytes((10 << 20) + 1)).decode()), 400),
        ({"key": "lfsFile", "value": {"path": "f", "algo": "sha256", "oid": "0" * 64, "size": 3}}, 400),
        ({"key": "lfsFile", "value": {"path": "f", "oid": "../../etc/passwd", "size": 3}}, 400),
        ({"key": "deletedFile", "value": {"path": "none"}}, 404),
        ({"key": "deletedFolder", "value": {"path": "none"}}, 404),
        ({"key": "copyFile", "value": {"path": "f", "srcPath": "none"}}, 404),
        ({"key": "header", "value": {"summary": "again"}}, 400),
        ({"key": "surprise", "value": {"path": "f"}}, 400),
        ({"key": "file", "value": "f"}, 400),
        (["file"], 400),
    ],
)  # fmt: skip
def test_a_bad_line_refuses_the_whole_commit(hub: HubProcess, line: object, status: int) -> None:
    repo = "local/hostile"
    if hub.http("GET", f"/api/models/{repo}").status == 404:
        new_repo(hub, "hostile")
    before = head(hub, repo)
    answer = commit(hub, repo, text_file("good.txt"), line)
    assert answer.status == status, answer
    assert answer.headers["x-error-message"]
    assert head(hub, repo) == before
    assert hub.http("GET", f"/{repo}/resolve/main/good.txt").status == 404
    assert not list((hub.data / "tmp").iterdir())


def test_bodies_that_are_no_commit(hub: HubProcess) -> None:
    repo = new_repo(hub, "bodies")
    before = head(hub, repo)
    header = b'{"key": "header", "value": {"summary": "\\ud800"}}\n'
    deep = b'{"key": "header", "value": ' + b"[" * 100_000 + b"\n"
    bodies = [b"", b"\n\n", b"nonsense", b"\xff\xfe", b'{"key": "file", "value": {}}\n', header, deep]
    assert [commit(hub, repo, raw=body).status for body in bodies] == [400] * len(bodies)
    assert commit(hub, repo, raw=b"x" * (15 << 20)).status == 413
    for branch, status in (("none", 404), ("refs%2Fpr%2F1", 404), (before, 404), ("main?create_pr=1", 501)):
        body = b'{"key": "header", "value": {"summary": "x"}}\n'
        assert hub.http("POST", f"/api/models/{repo}/commit/{branch}", body).status == status, branch
    for name in ("../x", "a/b", "", "x.git", "-x", "x" * 97, "a b", "a--b", "<b>", None, 7):
        create = json.dumps({"name": name, "organization": "local"}).encode()
        assert hub.http("POST", "/api/repos/create", create).status == 400, name
    assert hub.http("POST", "/api/repos/create", b'{"name": "x", "organization": "datasets"}').status == 400
    assert head(hub, repo) == before


BAD = "\ud800"
SPACE = {"name": "q", "type": "space", "sdk": "docker"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/api/repos/delete", {"name": BAD}),
        ("DELETE", "/api/repos/delete", {"name": 7, "organization": [1]}),
        ("POST", "/api/repos/move", {"fromRepo": BAD, "toRepo": "x/y"}),
        ("POST", "/api/repos/move", {"fromRepo": "local/probe", "toRepo": BAD}),
        ("POST", "/api/repos/create", {"name": BAD}),
        ("POST", "/api/repos/create", {"name": "q", "type": ["x"]}),
        ("POST", "/api/repos/create", {"name": "q", "visibility": ["x"]}),
        ("POST", "/api/repos/create", SPACE | {"sdk": ["x"]}),
        ("POST", "/api/repos/create", SPACE | {"secrets": {"a": 1}}),
        ("POST", "/api/repos/create", SPACE | {"secrets": [{"key": "A", "value": BAD}]}),
        ("POST", "/api/repos/create", SPACE | {"hardware": 7}),
        ("POST", "/api/repos/create", SPACE | {"sleepTimeSeconds": 10**30}),
        ("POST", "/api/models/local/probe/branch/%00", {}),
        ("POST", "/api/models/local/probe/branch/a%2F..%2Fb", {}),
        ("POST", "/api/models/local/probe/branch/a", {"startingPoint": BAD}),
        ("POST", "/api/models/local/probe/tag/main", {"tag": BAD}),
        ("POST", "/api/models/local/probe/preupload/main", {"files": [{"path": BAD, "size": 1}]}),
        ("POST", "/api/models/local/probe/preupload/main", {"files": [{"path": "a", "size": 1, "sample": "é"}]}),
        ("POST", "/api/models/local/probe/lfs-files/duplicate", {"target": {"type": BAD, "name": BAD}, "files": []}),
        ("POST", "/api/models/local/probe/paths-info/main", {"paths": 7}),
        ("POST", "/local/probe.git/info/lfs/objects/batch", {"operation": "upload", "objects": [7]}),
        ("DELETE", "/api/spaces/local/probe/secrets", {"key": BAD}),
        ("POST", "/api/spaces/local/probe/secrets", {"key": "A", "value": "x", "description": BAD}),
        ("GET", "/api/models/local/probe/revision/%ff%00", None),
        ("GET", "/api/models?cursor=" + "9" * 5000, None),
        ("GET", "/lfs/xx?size=1&exp=%C3%A9&sig=%C3%A9", None),
        ("GET", "/local/probe/resolve/main/%00", None),
        ("GET", "/local/probe/resolve", None),
    ],
)  # fmt: skip
def test_requests_that_make_no_sense_are_refused(hub: HubProcess, method: str, path: str, body: object) -> None:
    if hub.http("GET", "/api/spaces/local/probe").status == 404:
        new_repo(hub, "probe"), new_repo(hub, "probe", "space")
    sent = None if body is None else json.dumps(body).encode()
    answer = hub.http(method, path, sent, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status < 500, answer
    assert answer.json()["error"]


def test_metadata_of_cards_is_read_and_never_trusted(hub: HubProcess, tmp_path: Path) -> None:
    result = client(
        hub,
        tmp_path,
        """
api.create_repo("local/card")
card = b"---\\ntags: [tiny, test]\\npipeline_tag: text-generation\\ndate: 2026-01-02\\nodd: .nan\\n---\\n# Hi"
api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="local/card")
info = api.model_info("local/card")
put = lambda text: api.upload_file(path_or_fileobj=text, path_in_repo="README.md", repo_id="local/card")
bad = error(lambda: put(b"---\\na: [\\n---\\n"))
found = [m.id for m in api.list_models(filter="tiny")]
print(json.dumps([info.tags, info.pipeline_tag, info.card_data.date, bad, found]))
""",
    )
    assert result == [["tiny", "test"], "text-generation", "2026-01-02", ["ValueError", None], ["local/card"]]
    laughs = "---\na0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for text in (laughs + "---\n", "---\na: &a [*a]\n---\n", "---\n!!python/object/apply:os.system [id]\n---\n"):
        assert hub.http("POST", "/api/validate-yaml", json.dumps({"content": text}).encode()).status == 400
        line = text_file("README.md", base64.b64encode(text.encode()).decode())
        assert commit(hub, "local/card", line).status == 200
        assert hub.http("GET", "/api/models/local/card").status == 200


def test_trees_and_commits_have_the_ids_that_git_gives(hub: HubProcess, tmp_path: Path) -> None:
    repo = new_repo(hub, "git")
    for paths in (("a.txt", "a/b.txt", "a-b", "a0", "ä/ö"), ("a/c/d", "A")):
        assert commit(hub, repo, *(text_file(path) for path in paths)).status == 200
    for remove in ("a/c/d", "a0"):
        assert commit(hub, repo, {"key": "deletedFile", "value": {"path": remove}}).status == 200

    def git(*args: str) -> str:
        env = {**os.environ, "GIT_DIR": str(tmp_path / "git"), "GIT_WORK_TREE": str(tmp_path / "files")}
        for role in ("AUTHOR", "COMMITTER"):
            env |= {f"GIT_{role}_NAME": "local", f"GIT_{role}_EMAIL": "local@localhost", f"GIT_{role}_DATE": date}
        done = subprocess.run(["git", *args], cwd=tmp_path, env=env, capture_output=True, check=True)
        return done.stdout.decode().strip()

    date, made = "", list[str]()
    for item in reversed(list(pages(hub, f"/api/models/{repo}/commits/main"))):
        shutil.rmtree(tmp_path / "files", ignore_errors=True)
        (tmp_path / "files").mkdir()
        date = item["date"][:19] + "+0000"
        git("init", "-q", "--template=")
        for entry in pages(hub, f"/api/models/{repo}/tree/{item['id']}?recursive=true"):
            target = tmp_path / "files" / entry["path"]
            if entry["type"] == "directory":
                target.mkdir()
            else:
                target.write_bytes(hub.http("GET", f"/{repo}/raw/{item['id']}/{quote(entry['path'])}").body)
        git("add", "-A")
        parents = ["-p", made[-1]] if made else []
        made.append(git("commit-tree", git("write-tree"), *parents, "-m", item["title"]))
        assert made[-1] == item["id"]
    assert len(made) == 5
    assert made[-1] == head(hub, repo)


def test_files_come_by_redirect_from_another_origin(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub", "--cdn") as hub:
        result = client(
            hub,
            tmp_path,
            """
from huggingface_hub import HfFileSystem, hf_hub_download
content = bytes(range(256)) * 9000
api.create_repo("local/far")
api.upload_file(path_or_fileobj=content, path_in_repo="w.bin", repo_id="local/far")
ranged = HfFileSystem().read_block("local/far/w.bin", 255, 3)
print(json.dumps([Path(hf_hub_download("local/far", "w.bin")).read_bytes() == content, list(ranged)]))
""",
        )
        assert result == [True, [255, 0, 1]]
        answer = hub.http("GET", "/local/far/resolve/main/w.bin", redirect=False)
        assert answer.status == 302
        assert {"x-repo-commit", "x-linked-size", "x-linked-etag", "x-xet-hash"} <= answer.headers.keys()


def test_the_page_shows_everything_and_escapes_it(hub: HubProcess) -> None:
    repo = new_repo(hub, "page")
    name = '<script>alert("1")</script>&".html'
    assert commit(hub, repo, text_file(name), text_file("dir <b>/x?#%.txt")).status == 200
    assert hub.http("POST", "/api/buckets/local/page-bucket", b"{}").status == 200
    home, files = hub.http("GET", "/"), hub.http("GET", f"/{repo}")
    assert b'href="/local/page"' in home.body
    assert b'href="/buckets/local/page-bucket"' in home.body
    assert b"<script" not in files.body
    assert b"&lt;script&gt;alert(&quot;1&quot;)" in files.body
    assert "default-src 'none'" in files.headers["content-security-policy"]
    assert (
        hub.http("GET", f"/{repo}/tree/main/dir%20%3Cb%3E").body.count(b"/resolve/main/dir%20%3Cb%3E/x%3F%23%25.txt")
        == 1
    )
    assert hub.http("GET", f"/{repo}/resolve/main/dir%20%3Cb%3E/x%3F%23%25.txt").body == b"hi"
    served = hub.http("GET", f"/{repo}/resolve/main/%3Cscript%3Ealert(%221%22)%3C%2Fscript%3E%26%22.html")
    assert served.body == b"hi"
    assert "sandbox" in served.headers["content-security-policy"]
    assert hub.http("GET", "/buckets/local/page-bucket").status == 200
    for path in ("/local/none", "/buckets/local/none", f"/{repo}/tree/none", f"/{repo}/tree/main/none"):
        missing = hub.http("GET", path)
        assert missing.status == 404, path
        assert b"<h1>Not here" in missing.body
