"""Differences of DTensors in real processes over gloo: together the ranks find what one process finds in the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sync.codec import TensorPatch, diff
from sync.digest import ZERO, Sums, element_sums, state_sums, tensor_term
from sync.tensors import Schema, TensorSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]

ROOT = Path(__file__).resolve().parents[2]
RANK = r"""
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sync.errors import InvalidRequest, SchemaChanged
from trainer_node.device_diff import changed, device_diff, global_index, shard_changes, shard_runs, ulp_counts

folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
torch.manual_seed(0)  # the same whole tensors on every rank
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
out = {}


def raw(tensor):
    return tensor.detach().contiguous().view(SIGNED[tensor.element_size()]).reshape(-1).numpy()


def counted(tensor, holders):
    # the places and bits of every element that this rank counts, not only of changed ones
    runs, local = shard_runs(tensor, holders), tensor.to_local()
    if runs is None:
        return np.empty(0, np.int64), np.empty(0, raw(local).dtype)
    return global_index(torch.arange(local.numel()), runs, tensor.shape).numpy(), raw(local)


def check(name, old, new, whole_old, whole_new, holders=None):
    found = shard_changes(old, new, holders=holders)
    again = dict(device_diff({name: old}, {name: new}, holders=holders)).get(name)
    assert (again is None) == (len(found.index) == 0)
    assert again is None or np.array_equal(again.index, found.index)
    for field in ("index", "old", "new"):
        out[f"{name}|{field}"] = getattr(found, field)
    for when, tensor in (("before", old), ("after", new)):
        out[f"{name}|{when}_index"], out[f"{name}|{when}_bits"] = counted(tensor, holders)
    out[f"{name}|whole_old"], out[f"{name}|whole_new"] = raw(whole_old), raw(whole_new)
    out[f"{name}|shape"] = np.array(whole_old.shape, np.int64)


def moved(whole, share):
    at = torch.rand(whole.shape) < share
    new = whole.clone()
    new.view(SIGNED[whole.element_size()])[at] ^= 1
    return new


def plain(mesh, placements, tag, holders=None):
    shapes = [(), (0,), (1,), (3,), (5, 7), (8, 6), (2, 9, 3), (7, 1, 5), (64, 33)]
    for number, shape in enumerate(shapes):
        if any(isinstance(p, Shard) and p.dim >= len(shape) for p in placements):
            continue
        for dtype, share in ((torch.bfloat16, 0.2), (torch.float32, 0.9), (torch.int64, 0.0)):
            whole_old = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 9, shape)
            whole_new = moved(whole_old, share)
            old, new = (distribute_tensor(t, mesh, placements) for t in (whole_old, whole_new))
            check(f"{tag}/{number}/{str(dtype)[6:]}", old, new, whole_old, whole_new, holders)


def refusals(mesh):
    whole = torch.randn(8, 4)
    cut, other = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)])
    pending = DTensor.from_local(whole, mesh, [Partial()])
    odd = DTensor.from_local(whole[: 5 if rank == 0 else 3], mesh, [Shard(0)], shape=(8, 4), stride=(4, 1))
    for refused in (lambda: changed(cut, cut), lambda: ulp_counts({"a": cut}, {"a": cut})):
        try:
            refused()
        except InvalidRequest:
            continue
        raise AssertionError("a DTensor was read as one tensor")
    for kind, old, new in (
        (InvalidRequest, cut, other), (InvalidRequest, pending, pending), (InvalidRequest, cut, whole),
        (InvalidRequest, whole, cut), (InvalidRequest, odd, odd), (SchemaChanged, cut, cut.to(torch.float64)),
        (SchemaChanged, cut, distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])),
    ):
        try:
            shard_changes(old, new)
        except kind:
            continue
        raise AssertionError(f"{old.__class__} against {new.__class__} was not refused")


def trained(mesh, tag):
    # fully_shard, over tensor parallelism where the mesh has two axes: one dimension cut twice, from the inside
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8), torch.nn.Linear(8, 6))
    if mesh.ndim == 2:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["inner"], plan)
        fully_shard(model, mesh=mesh["outer"])
    else:
        fully_shard(model, mesh=mesh)
    held = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}
    before = {n: p.full_tensor() for n, p in held.items()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    model(torch.randn(5, 9)).square().sum().backward()
    optimizer.step()
    strided, held_by = 0, set()
    for name, master in model.named_parameters():
        strided += any(getattr(p, "split_factor", 1) > 1 for p in master.placements)
        old, new = held[name], master.detach().to(torch.bfloat16)
        found = [shard_changes(old, tensor, holders=range(world)).index for tensor in (master, new)]
        assert np.array_equal(*found)  # a master is cast block by block
        check(f"{tag}/{name}", old, new, before[name], new.full_tensor(), holders=range(world))
        held_by.add(master.device_mesh.size())
    assert strided == (2 if mesh.ndim == 2 else 0), strided  # the column-wise weight and bias
    assert held_by == ({2, world} if mesh.ndim == 2 else {world})  # 3.weight is in no plan: on both `outer` meshes


line = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
plain(line, [Shard(0)], "S0")
plain(line, [Shard(1)], "S1")
plain(line, [Shard(2)], "S2")
plain(line, [Replicate()], "R")
trained(line, "fsdp")
if world == 2:
    refusals(line)
else:
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    for one in (Shard(0), Shard(1), Replicate()):
        for other in (Shard(0), Shard(1), Replicate()):
            plain(grid, [one, other], f"grid {one}{other}")
    trained(grid, "fsdp over tp")
    plain(DeviceMesh("cpu", [1, 3]), [Shard(0)], "stage", holders=[1, 3])
    half = distribute_tensor(torch.randn(8), grid["outer"], [Shard(0)])
    try:
        shard_changes(half, half)
        raise AssertionError("a mesh of some ranks was taken for all of them")
    except InvalidRequest as error:
        assert "2 of 4 ranks" in str(error)
np.savez(folder / f"{rank}.npz", **out)
dist.barrier()
dist.destroy_process_group()
"""


def ranks(folder: Path, world: int) -> list[dict[str, NDArray[Any]]]:
    """What each rank saved; every process ends, or is ended, before this returns."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANK, str(folder)]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(world)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    assert [child.returncode for child in children] == [0] * world, "\n".join(said)[-4000:]
    found = []
    for rank in range(world):
        with np.load(folder / f"{rank}.npz") as saved:
            found.append({key: saved[key] for key in saved.files})
    return found


def cases(saved: list[dict[str, NDArray[Any]]]) -> Iterator[tuple[str, list[dict[str, NDArray[Any]]]]]:
    names = sorted({key.split("|")[0] for key in saved[0]})
    assert all({key.split("|")[0] for key in rank} == set(names) for rank in saved)
    for name in names:
        yield name, [{k.split("|")[1]: v for k, v in rank.items() if k.startswith(f"{name}|")} for rank in saved]


def unsigned_bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(f"u{array.dtype.itemsize}")


def summed(parts: list[Sums]) -> Sums:
    total = ZERO
    for part in parts:
        total = total.plus(part)
    return total


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_together_find_the_difference_of_the_whole(world: int, tmp_path: Path) -> None:
    checked = changes = idle = 0
    for name, parts in cases(ranks(tmp_path, world)):
        shape = tuple(parts[0]["shape"].tolist())
        old, new = (unsigned_bits(parts[0][key]).reshape(shape) for key in ("whole_old", "whole_new"))
        schema: Schema = {name: TensorSpec({2: "BF16", 4: "F32", 8: "I64"}[old.dtype.itemsize], shape)}
        for part in parts:
            assert np.array_equal(unsigned_bits(part["whole_new"]).reshape(shape), new), name
            assert np.all(np.diff(part["index"]) > 0), name
            idle += not len(part["before_index"])
        none = np.empty(0, old.dtype)
        wanted = diff({name: old}, {name: new}, schema).get(name, TensorPatch(np.empty(0, np.int32), none, none))
        index = np.concatenate([part["index"] for part in parts])
        order = np.argsort(index, kind="stable")
        assert index.dtype == wanted.index.dtype, name
        assert np.array_equal(index[order], wanted.index), name  # so no element is found by two ranks
        for key in ("old", "new"):
            values = np.concatenate([part[key] for part in parts])[order]
            assert values.dtype == old.dtype, name
            assert np.array_equal(values, getattr(wanted, key)), name
        assert_digests_add_up(name, schema, parts, {"before": old, "after": new})
        checked, changes = checked + 1, changes + len(index)
    assert checked > 40
    assert changes > 1000
    assert idle > 20  # ranks with an empty shard, or a replica that another rank counts


def assert_digests_add_up(
    name: str, schema: Schema, parts: list[dict[str, NDArray[Any]]], whole: dict[str, NDArray[Any]]
) -> None:
    term, sums = tensor_term(name, schema[name]), {}
    for when, full in whole.items():
        every = [element_sums(name, p[f"{when}_index"], unsigned_bits(p[f"{when}_bits"])) for p in parts]
        sums[when] = summed(every).plus(term)
        assert sums[when] == state_sums({name: full}, schema), f"{name} {when}"
    removed = summed([element_sums(name, part["index"], part["old"]) for part in parts])
    added = summed([element_sums(name, part["index"], part["new"]) for part in parts])
    assert sums["before"].minus(removed).plus(added) == sums["after"], name
