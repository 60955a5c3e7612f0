"""How large a delta is at a learning rate that large models train with: measured on the same model, not published."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sync.codec import diff, encode_delta
from sync.tensors import schema_of, state_bytes

from .config import Sparsity
from .device_diff import ulp_counts
from .model import checkpoint_tensors, published_bits


class DeltaSize(NamedTuple):
    """Means over `steps` consecutive versions: share of changed values, share of those that moved by one ULP, payload
    bytes, bytes of a full copy."""

    learning_rate: float
    steps: int
    changed: float
    one_ulp: float
    payload: float
    full: int


def measure(trainer: Any, settings: Sparsity, codec: str) -> DeltaSize | None:
    """Go on training for a few steps at `settings.learning_rate` on the last batches, with the optimizer's state kept,
    and encode each step's delta. Changes the trainer's weights; call it last. None when there is nothing to train on.
    """
    batches = list(trainer.recent_inputs)
    if settings.steps == 0 or not batches:
        return None
    model, optimizer = trainer.model, trainer.optimizer
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
    held = _held(model)
    old = published_bits(held)
    schema = schema_of(old)
    elements = sum(spec.size for spec in schema.values())
    changed = payload = moved = by_one = 0
    model.train()
    for step in range(settings.steps):
        loss = trainer.compute_loss(model, batches[step % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        after = _held(model)
        new, counts = published_bits(after), ulp_counts(held, after)
        moved, by_one = moved + counts.changed, by_one + counts.one
        changed += sum(len(p.index) for p in diff(old, new, schema).values())
        payload += len(encode_delta(old, new, codec))
        old, held = new, after
    return DeltaSize(
        learning_rate=settings.learning_rate,
        steps=settings.steps,
        changed=changed / settings.steps / elements,
        one_ulp=by_one / moved if moved else 0.0,
        payload=payload / settings.steps,
        full=state_bytes(schema),
    )


def _held(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the tensors as they are published, on their own device."""
    tensors = checkpoint_tensors(model)
    return {n: t.to(torch.bfloat16) if t.dtype == torch.float32 else t.clone() for n, t in tensors.items()}
