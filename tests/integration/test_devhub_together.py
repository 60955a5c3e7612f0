"""Every kind of unmodified client against one local Hub, in separate processes, all at once: bytes arrive as sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.devhub import HubProcess, client_env

pytestmark = pytest.mark.integration

COMMON = """
import hashlib, os, sys, pathlib
me = sys.argv[1]
def content(n, size=200_000):
    out, at = [], hashlib.sha256(f"{me}-{n}".encode()).digest()
    while sum(map(len, out)) < size:
        out.append(at); at = hashlib.sha256(at).digest()
    return b"".join(out)[:size]
from huggingface_hub import HfApi
api = HfApi()
"""

CLIENTS = {
    "bucket and its command line": """
import subprocess
api.create_bucket(f"local/{me}", exist_ok=True)
data = {f"run/{n}/x.bin": content(n, 40_000 * n + n) for n in range(6)}
api.batch_bucket_files(f"local/{me}", add=[(d, p) for p, d in data.items()])
hf = pathlib.Path(sys.executable).with_name("hf")
listed = subprocess.run([hf, "buckets", "ls", f"local/{me}", "-R"], capture_output=True, text=True, check=True).stdout
assert all(p in listed for p in data), listed
back = pathlib.Path("back"); back.mkdir()
api.download_bucket_files(f"local/{me}", files=[(p, back / p.replace("/", "_")) for p in data])
assert all((back / p.replace("/", "_")).read_bytes() == d for p, d in data.items())
""",
    "HfFileSystem": """
from huggingface_hub import HfFileSystem
api.create_bucket(f"local/{me}", exist_ok=True)
fs = HfFileSystem()
for n in range(4):
    with fs.open(f"buckets/local/{me}/d/{n}.bin", "wb") as file:
        file.write(content(n))
fs.invalidate_cache()
names = [f.rsplit("/", 1)[1] for f in sorted(fs.ls(f"buckets/local/{me}/d", detail=False))]
assert names == [f"{n}.bin" for n in range(4)]
for n in range(4):
    assert fs.cat(f"buckets/local/{me}/d/{n}.bin") == content(n)
    with fs.open(f"buckets/local/{me}/d/{n}.bin", "rb") as file:
        file.seek(1234); assert file.read(999) == content(n)[1234:2233]
""",
    "upload_folder and snapshot_download": """
from huggingface_hub import snapshot_download
api.create_repo(f"local/{me}", exist_ok=True)
src = pathlib.Path("src"); (src / "sub").mkdir(parents=True)
(src / "config.json").write_text('{"a": 1}')
for n in range(4):
    (src / "sub" / f"{n}.safetensors").write_bytes(content(n, 300_000))
api.upload_folder(repo_id=f"local/{me}", folder_path=src)
got = pathlib.Path(snapshot_download(f"local/{me}"))
for path in src.rglob("*"):
    if path.is_file():
        assert (got / path.relative_to(src)).read_bytes() == path.read_bytes()
""",
    "hf_hub_download of two revisions": """
from huggingface_hub import hf_hub_download
api.create_repo(f"local/{me}", exist_ok=True)
shas = []
for n in range(3):
    shas.append(api.upload_file(path_or_fileobj=content(n), path_in_repo="w.bin", repo_id=f"local/{me}").oid)
for n, sha in enumerate(shas):
    assert pathlib.Path(hf_hub_download(f"local/{me}", "w.bin", revision=sha)).read_bytes() == content(n)
""",
    "load_dataset": """
import json, datasets
api.create_repo(f"local/{me}", repo_type="dataset", exist_ok=True)
rows = [{"n": n, "text": content(n, 50).hex()} for n in range(500)]
api.upload_file(path_or_fileobj="".join(json.dumps(r) + "\\n" for r in rows).encode(), path_in_repo="data/train.jsonl",
                repo_id=f"local/{me}", repo_type="dataset")
assert list(datasets.load_dataset(f"local/{me}", split="train")) == rows
""",
    "a run followed over the wire": """
import numpy as np
from sync import Follower, Publisher, PublisherOptions, Stamp, open_store
from sync.term import TermOptions
url = f"hf://buckets/local/{me}/run"
rng = np.random.default_rng(1)
state = {"w": rng.integers(0, 60000, 50_000, dtype=np.uint16)}
writer = Publisher(open_store(url, create=True), options=PublisherOptions(term=TermOptions(settle=0.1)))
writer.open(state, Stamp(0, 0))
follower = Follower(open_store(url), pathlib.Path("mirror"), None)
for n in range(1, 6):
    state["w"][rng.integers(0, 50_000, 500)] += 1
    writer.offer(state, Stamp(n, n)); writer.wait(); follower.poll()
    assert np.array_equal(follower._mirror.state["w"], state["w"])
follower.close(); writer.close()
""",
}  # fmt: skip


def test_all_clients_at_once_read_back_what_they_wrote(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "hub") as hub:
        running = {}
        for number, (name, code) in enumerate(CLIENTS.items()):
            home = tmp_path / f"c{number}"
            home.mkdir()
            env = client_env(home / "hf", hub.url) | {"PYTHONPATH": str(Path(__file__).parents[2])}
            command = [sys.executable, "-c", COMMON + code, f"client{number}"]
            out = (home / "out").open("w+")
            running[name] = (subprocess.Popen(command, cwd=home, env=env, stdout=out, stderr=out), out)
        said = {}
        for name, (process, out) in running.items():
            code_of = process.wait(150)
            out.seek(0)
            said[name] = (code_of, out.read()[-2000:] if code_of else "")
            out.close()
    assert said == dict.fromkeys(CLIENTS, (0, ""))
