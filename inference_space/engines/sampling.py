"""Sampling by inverse distribution and counter-based noise: one uniform number per call and position."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

_Array: TypeAlias = np.ndarray[Any, Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: _Array) -> _Array:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Array = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: _Array, counters: _Array) -> _Array:
    """Uniform float64 in [0, 1 - 2^-52], a function of (seed, counter) alone (uint64 arrays)."""
    stream = _mix(seeds + _GOLDEN) + _GOLDEN * (counters + np.uint64(1))
    found: _Array = (_mix(stream) >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return found


def sample(logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature), the full distribution.

    logits: float32 [n, vocabulary]; temperature: float32 [n], 0 takes the most likely token; noise: float64 [n]
    in [0, 1). Returns (ids int64 [n], logprobs float32 [n]): the natural log of each token's probability under
    the distribution it was drawn from; for temperature 0 under temperature 1.
    """
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    drawn = torch.searchsorted(cumulative, (noise * cumulative[:, -1])[:, None], right=True)[:, 0]
    ids = torch.where(greedy, logits.argmax(dim=-1), drawn.clamp_(max=logits.shape[1] - 1))
    return ids, logprobs.gather(1, ids[:, None])[:, 0]
