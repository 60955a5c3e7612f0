"""Following a model's own loader: fused, transposed, padded, permuted and computed parameters."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from inference_space.engines.vllm_core import prepare_environment
from inference_space.engines.vllm_places import Mapped
from inference_space.engines.vllm_plan import EXACT, map_checkpoint
from sync.errors import ConfigError
from sync.tensors import TensorSpec

pytestmark = pytest.mark.unit
Put = Callable[[torch.Tensor, torch.Tensor], Any]
BF16 = torch.bfloat16
ROWS, COLUMNS = 6, 8


def loaded(parameter: torch.Tensor, put: Put) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    """A model's `load_weights` that knows one tensor, `w`."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            put(parameter.data, weight)

    return load


def pad(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    parameter[:ROWS].copy_(weight)
    parameter[ROWS:].fill_(0)


def twice(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    parameter[:ROWS].copy_(weight)
    parameter[ROWS:].copy_(weight)


FOLLOWED: dict[str, tuple[tuple[int, ...], Put, str]] = {
    "whole": ((6, 8), lambda p, w: p.copy_(w), "plan"),
    "fused": ((20, 8), lambda p, w: p.narrow(0, 4, 6).copy_(w), "plan"),
    "transposed": ((8, 6), lambda p, w: p.copy_(w.t()), "plan"),
    "columns": ((6, 30), lambda p, w: p[:, 3:27:3].copy_(w), "plan"),
    "halves": ((2, 6, 4), lambda p, w: (p[0].copy_(w[:, :4]), p[1].copy_(w[:, 4:])), "plan"),
    "heads": ((3, 8, 2), lambda p, w: p.copy_(w.view(3, 2, 8).transpose(1, 2)), "plan"),
    "even and odd rows": ((6, 8), lambda p, w: (p[:3].copy_(w[::2]), p[3:].copy_(w[1::2])), "plan"),
    "padded": ((10, 8), pad, "plan"),
    "twice": ((12, 8), twice, "plan"),
    "packed": ((48,), lambda p, w: p.copy_(w.view(3, 2, 8).permute(2, 0, 1).contiguous().view(-1)), "trace"),
    "rolled": ((6, 8), lambda p, w: p.copy_(torch.roll(w, 1, 0)), "trace"),
    "sorted": ((6, 8), lambda p, w: p.copy_(w[torch.tensor([5, 0, 1, 4, 2, 3])]), "trace"),
    "joined": ((6, 10), lambda p, w: p.copy_(torch.cat((w, torch.zeros(6, 2, dtype=w.dtype)), 1)), "trace"),
}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_written_stands_where_the_loader_would_put_it(name: str, dtype: str) -> None:
    shape, put, way = FOLLOWED[name]
    rng, spec = np.random.default_rng(0), TensorSpec(dtype, (ROWS, COLUMNS))
    native = EXACT[dtype][0]
    kind = np.uint32 if dtype == "F32" else np.uint16
    parameter = torch.zeros(shape, dtype=native)
    mapped = map_checkpoint(loaded(parameter, put), {"p": parameter}, {"w": spec})["w"]
    assert mapped.way == way
    assert not parameter.any()  # nothing was written by looking
    bits = rng.integers(0, np.iinfo(kind).max, spec.size, dtype=kind, endpoint=True)  # NaN payloads among them
    mapped.write(None, bits)
    for _ in range(4):
        assert np.array_equal(mapped.read(None), bits)
        wanted = torch.zeros(shape, dtype=native)
        signed = torch.int32 if dtype == "F32" else torch.int16
        put(wanted.view(signed), torch.from_numpy(bits.copy()).view(signed).view(ROWS, COLUMNS))
        assert torch.equal(parameter.view(signed), wanted.view(signed))
        index = np.flatnonzero(rng.random(spec.size) < 0.3).astype(np.int32)
        bits[index] = rng.integers(0, np.iinfo(kind).max, len(index), dtype=kind)
        mapped.write(index, bits[index])
        assert np.array_equal(mapped.read(index), bits[index])


def test_a_wider_parameter_holds_bf16_exactly() -> None:
    parameter = torch.zeros(4, dtype=torch.float32)
    load = loaded(parameter, lambda p, w: p.copy_(w))
    mapped = map_checkpoint(load, {"p": parameter}, {"w": TensorSpec("BF16", (4,))})["w"]
    bits = np.array([0x3F80, 0xFFC1, 0x8000, 0x0001], dtype=np.uint16)
    mapped.write(None, bits)
    assert parameter[0] == 1.0
    assert np.array_equal(mapped.read(None), bits)


@pytest.mark.parametrize("size", [1, 3])
def test_a_scalar_that_is_filled_in_is_followed(size: int) -> None:
    parameter = torch.zeros(size, dtype=BF16)
    load = loaded(parameter, lambda p, w: p[:1].fill_(w.item()))
    mapped = map_checkpoint(load, {"p": parameter}, {"w": TensorSpec("BF16", (1,))})["w"]
    mapped.write(np.array([0]), np.array([0x4000], dtype=np.uint16))
    assert parameter[0] == 2.0
    assert mapped.read(None).tolist() == [0x4000]


REFUSED: dict[str, Put] = {
    "added to": lambda p, w: p.copy_(w + 1),
    "scaled": lambda p, w: p.copy_(w * 2),
    "negated": lambda p, w: p.copy_(-w),
    "averaged": lambda p, w: p.copy_(w.mean(0, keepdim=True).expand(6, 8)),
    "another type on the way": lambda p, w: p.copy_(w.to(torch.float16)),
    "zeroed before": lambda p, w: p.copy_(w.zero_()),
    "partly zeroed before": lambda p, w: (w[0].zero_(), p.copy_(w)),
    "dropped": lambda p, w: p.copy_(p + 0 * len(w)),
    "one row dropped": lambda p, w: p[:5].copy_(w[:5]),
    "one place for two": lambda p, w: (p.copy_(w), p[:1].copy_(w[1:2])),
    "added in place": lambda p, w: p.add_(w),
    "as out": lambda p, w: torch.mul(w, 1, out=p),
    "an error": lambda p, w: p.copy_(w.reshape(7, 7)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_does_more_than_move_is_refused(name: str) -> None:
    parameter = torch.zeros(ROWS, COLUMNS, dtype=BF16)
    with pytest.raises(ConfigError, match="cannot be followed"):
        map_checkpoint(loaded(parameter, REFUSED[name]), {"p": parameter}, {"w": TensorSpec("BF16", (ROWS, COLUMNS))})
    assert not parameter.any()


def test_a_type_that_loses_bits_is_refused() -> None:
    parameter = torch.zeros(4, dtype=BF16)
    load = loaded(parameter, lambda p, w: p.copy_(w))
    with pytest.raises(ConfigError, match="holds it as"):
        map_checkpoint(load, {"p": parameter}, {"w": TensorSpec("F32", (4,))})
    with pytest.raises(ConfigError, match="F8_E4M3"):
        map_checkpoint(load, {"p": parameter}, {"w": TensorSpec("F8_E4M3", (4,))})


def test_a_loader_that_replaces_its_parameter_is_refused() -> None:
    parameters = {"p": torch.zeros(4, dtype=BF16), "q": torch.nn.Parameter(torch.zeros(4, dtype=BF16))}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            parameters["p"].copy_(weight)
            parameters["q"].data = torch.zeros(5, dtype=BF16)

    with torch.no_grad(), pytest.raises(ConfigError, match="replaces parameter 'q'"):
        map_checkpoint(load, parameters, {"w": TensorSpec("BF16", (4,))})


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_setting_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="engine = vllm needs vLLM"):
        prepare_environment(threads=1, kv_cache_gib=1)


def test_tied_parameters_are_one_place() -> None:
    shared = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=BF16))
    mapped: Mapped = map_checkpoint(
        loaded(shared, lambda p, w: p.copy_(w)), {"a": shared, "b": shared}, {"w": TensorSpec("BF16", (ROWS, COLUMNS))}
    )["w"]
    mapped.write(np.array([47]), np.array([0x3F80], dtype=np.uint16))
    assert float(shared.detach()[5, 7]) == 1.0
