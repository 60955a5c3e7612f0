"""Checkpoint folders out of a bucket: anchors taken by the Hub's own clients, versions checked out by ours.

Two runs of a tiny Qwen3 on a local Hub: one of tied weights and a single file, whose later versions are reached over a
span and deltas; one of untied weights in shards, with an anchor that was built behind the training.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from support_tiny import make_checkpoint, make_tokenizer, state_of

from sync import Publisher, PublisherOptions, Stamp
from sync.plan import plan
from sync.stores.hub import HubStore
from sync.term import TermOptions
from sync.tools.common import live_refs, read_channels

from .devhub import ROOT, HubProcess, client_env, run_client

State = dict[str, NDArray[Any]]
BUCKET = "local/checkpoints"
VERSIONS = 8
OLDER = 3
TERM = TermOptions(settle=0.0, deadline=60.0, catchup_every=4, keep_anchors=50, collect_every=0)
CASES = ("anchor", "older", "head", "sharded-anchor", "sharded-older", "sharded-head")


class Case(NamedTuple):
    """A folder that came out of a bucket, and the state (name → bf16 bits) that was published as its version."""

    folder: Path
    state: State

    @property
    def tied(self) -> bool:
        """True when the output matrix is the embedding."""
        return "lm_head.weight" not in self.state


def stepped(state: Mapping[str, NDArray[Any]], seed: int) -> State:
    """A copy in which about 5 % of the elements of every tensor have another mantissa; signs and exponents stay."""
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in state.items()}
    for array in new.values():
        flat = array.reshape(-1)
        at = np.flatnonzero(rng.random(flat.size) < 0.05)
        flat[at] ^= rng.integers(1, 1 << 7, size=len(at), dtype=np.uint16)
    return new


def published(hub: HubProcess, run: str, checkpoint: Path, **options: Any) -> dict[int, State]:
    """Publish a checkpoint and steps from it as a run of its own; returns every version's state."""
    store = HubStore(f"hf://buckets/{BUCKET}/{run}", create=True, endpoint=hub.url, token="hf_anything")
    files = {p.name: p.read_bytes() for p in checkpoint.iterdir() if p.suffix in (".json", ".jinja")}
    writer = Publisher(store, side_files=files, options=PublisherOptions(term=TERM, **options))
    state, states = state_of(checkpoint), {}
    try:
        first = writer.open(state, Stamp(step=0, sync=0))
        states[first.version] = state
        for n in range(1, VERSIONS):
            state = stepped(state, n)
            assert writer.offer(state, Stamp(step=n, sync=n))
            writer.wait_behind()
            assert writer.identity is not None
            states[writer.identity.version] = state
    finally:
        writer.close()
    assert len(states) == VERSIONS
    return states


def way_to_head(hub: HubProcess, run: str) -> list[str]:
    """The kinds of what a reader that holds nothing takes to the head, in order."""
    store = HubStore(f"hf://buckets/{BUCKET}/{run}", endpoint=hub.url, token="hf_anything")
    (channel,) = read_channels(store, "weights")
    assert channel.head.identity is not None
    return [ref.kind for ref in plan(live_refs(store, channel.head), channel.head.identity, None)]


def anchors(env: Mapping[str, str], run: str) -> dict[int, str]:
    """Version → folder in the bucket of every anchor of a run, as the Hub's own client lists them."""
    code = "print(json.dumps([f.path for f in api.list_bucket_tree(sys.argv[1], sys.argv[2], recursive=True)]))"
    paths = run_client(env, code, BUCKET, f"{run}/weights/anchors")
    folders = sorted({path.rpartition("/")[0] for path in paths if path.endswith("/manifest.json")})
    return {int(folder.rpartition("/")[2].split("-")[0]): folder for folder in folders}


def by_api(env: Mapping[str, str], folder: str, target: Path) -> Path:
    """Download a folder of the bucket whole with HfApi."""
    code = """
found = [f for f in api.list_bucket_tree(sys.argv[1], sys.argv[2], recursive=True) if f.type == "file"]
target = Path(sys.argv[3])
api.download_bucket_files(sys.argv[1], [(f, target / Path(f.path).name) for f in found])
print(len(found))
"""
    target.mkdir()
    assert run_client(env, code, BUCKET, folder, target) == len(list(target.iterdir()))
    return target


def by_command(env: Mapping[str, str], folder: str, target: Path) -> Path:
    """Download a folder of the bucket whole with the hf command."""
    hf = Path(sys.executable).with_name("hf")
    _run([hf, "buckets", "sync", f"hf://buckets/{BUCKET}/{folder}", target], env)
    return target


def checked_out(env: Mapping[str, str], run: str, version: str, target: Path) -> Path:
    """`deltawire checkout`."""
    words = ["checkout", f"hf://buckets/{BUCKET}/{run}", version, target]
    _run([sys.executable, "-m", "deltawire", *words], env)
    return target


def _run(command: list[object], env: Mapping[str, str]) -> None:
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def bring_all(hub: HubProcess, home: Path) -> dict[str, Case]:
    """Publish both runs and bring every one of CASES to a folder below `home`."""
    env = client_env(home / "client", hub.url)
    plain = published(hub, "plain", make_checkpoint(home / "tied"), anchor_share=50.0)
    first, head = min(plain), max(plain)
    assert way_to_head(hub, "plain")[0] == "anchor"
    assert {"span", "delta"} <= set(way_to_head(hub, "plain"))
    assert list(anchors(env, "plain")) == [first]
    cases = {
        "anchor": Case(by_api(env, anchors(env, "plain")[first], home / "anchor"), plain[first]),
        "older": Case(checked_out(env, "plain", str(first + OLDER), home / "older"), plain[first + OLDER]),
        "head": Case(checked_out(env, "plain", "head", home / "head"), plain[head]),
    }
    untied = make_checkpoint(home / "untied", seed=1, tied=False)
    sharded = published(hub, "sharded", untied, anchor_share=0.2, shard_bytes=64 << 10, largest_span=0)
    built = anchors(env, "sharded")
    first, latest, head = min(sharded), max(built), max(sharded)
    assert first + OLDER < latest < head  # built behind, and followed by deltas
    cases["sharded-anchor"] = Case(by_command(env, built[latest], home / "sharded-anchor"), sharded[latest])
    for name, version in ("sharded-older", first + OLDER), ("sharded-head", head):
        cases[name] = Case(checked_out(env, "sharded", str(version), home / name), sharded[version])
    assert tuple(cases) == CASES
    return cases


def assert_same_bits(found: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> None:
    """Assert equal names, shapes and bits, naming the tensors that differ."""
    assert sorted(found) == sorted(wanted), f"other tensors: {sorted(found.keys() ^ wanted.keys())}"
    other = [n for n in wanted if found[n].dtype != wanted[n].dtype or not np.array_equal(found[n], wanted[n])]
    assert other == [], f"other bits: {other}"


def as_loaded(case: Case) -> State:
    """The state under the names that a loaded model has: the output matrix too where it is the embedding."""
    return case.state | ({"lm_head.weight": case.state["model.embed_tokens.weight"]} if case.tied else {})


def assert_transformers_loads(case: Case) -> None:
    """Assert that from_pretrained takes the folder as it lies there: every tensor bit for bit, none missing, none drawn
    anew; and that its tokenizer is the published one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(case.folder, output_loading_info=True)
    assert {kind: keys for kind, keys in info.items() if keys} == {}
    held = model.state_dict()
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert_same_bits({n: t.view(torch.int16).numpy().view(np.uint16) for n, t in held.items()}, as_loaded(case))
    tokenizer, wanted = AutoTokenizer.from_pretrained(case.folder), make_tokenizer()
    talk = [{"role": "user", "content": "I think it is 42."}]
    assert tokenizer.apply_chat_template(talk, tokenize=True) == wanted.apply_chat_template(talk, tokenize=True)
    assert tokenizer.eos_token_id == wanted.eos_token_id == model.generation_config.eos_token_id
