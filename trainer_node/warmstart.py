"""Supervised warm start: next-token loss on the assistant turns of noisy demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sync.schema.calls import Message

from .config import WarmStart

IGNORED = -100


def encode_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and its labels: assistant text and end token are learned, all else is ignored.

    Segments are tokenized apart, as in sampling: the opening up to each assistant turn, then the turn.
    """
    ids: list[int] = []
    labels: list[int] = []
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = [m.model_dump() for m in messages[:position]]
        prompt = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        done = tokenizer.decode(ids) if ids else ""
        if not prompt.startswith(done):
            raise ValueError(f"the chat template does not preserve prefixes: {prompt!r} does not start with {done!r}")
        context = tokenizer.encode(prompt[len(done) :], add_special_tokens=False)
        turn = [*tokenizer.encode(message.content, add_special_tokens=False), tokenizer.eos_token_id]
        ids += context + turn
        labels += [IGNORED] * len(context) + turn
    return ids, labels


def warm_start(
    model: Any, tokenizer: Any, conversations: Sequence[Sequence[Message]], settings: WarmStart, seed: int,
    progress: Callable[[int, float], None],
) -> float:  # fmt: skip
    """Train `model` in place; returns the mean loss of the last tenth. progress(step, loss) is called every step."""
    data = [encode_conversation(tokenizer, c) for c in conversations]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    model.train()
    for step in range(settings.steps):
        picked = torch.randint(len(data), (settings.batch,), generator=generator).tolist()
        loss = _loss(model, [data[i] for i in picked], tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        progress(step + 1, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _loss(model: Any, batch: Sequence[tuple[list[int], list[int]]], pad: int) -> torch.Tensor:
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in batch])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORED
    )
