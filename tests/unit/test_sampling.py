"""Sampling by inverse distribution: shares, extremes, noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inference_space.engines.sampling import sample, uniforms

pytestmark = pytest.mark.unit


def test_noise_on_a_grid_gives_every_token_its_share() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0, 0.5]]).repeat(10_000, 1)
    noise = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    ids, logprobs = sample(logits, torch.full((10_000,), 2.0), noise)
    wanted = torch.softmax(logits[0] / 2, -1)
    share = torch.bincount(ids, minlength=5) / 10_000
    assert torch.allclose(share, wanted, atol=2e-4)
    assert torch.allclose(logprobs, wanted.log()[ids], atol=1e-5)


def test_extreme_noise_never_draws_an_impossible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    ids, _ = sample(logits, torch.ones(2), torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64))
    assert ids.tolist() == [1, 2]


def test_uniforms_are_spread_and_depend_on_seed_and_counter() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    found = uniforms(seeds, np.tile(np.arange(100, dtype=np.uint64), 100))
    assert len(np.unique(found)) == 10_000
    assert found.min() >= 0
    assert found.max() < 1
    assert np.abs(np.histogram(found, bins=10, range=(0, 1))[0] - 1000).max() < 150
