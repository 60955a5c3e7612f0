"""A tiny policy for tests: a Qwen3 checkpoint of two layers, with the demo's tokenizer and sharp, uneven logits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sync import Publisher, Stamp, Store

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_CORPUS = ("Guess a number between 1 and 99.", "higher", "lower", "I think it is 42.", "the quick brown fox")


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A tokenizer of about 300 tokens whose end token closes an assistant turn."""
    from trainer_node.model import tiny_tokenizer

    tokenizer = tiny_tokenizer(_CORPUS, vocabulary=320)
    tokenizer.chat_template = template
    return tokenizer


def make_checkpoint(folder: Path, seed: int = 0, *, tied: bool = True, **changes: Any) -> Path:
    """Write a checkpoint folder: config, tokenizer, bf16 model.safetensors drawn from `seed`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    config = Qwen3Config(**(settings | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's tensors as bits, copied: name → uint16 array."""
    import numpy as np

    from sync.safetensors_io import MappedState

    return {name: np.array(b) for name, b in MappedState(checkpoint / "model.safetensors").state.items()}


@contextmanager
def publishing(store: Store, checkpoint: Path) -> Iterator[Publisher]:
    """A publisher that has committed `checkpoint` as its first version."""
    files = {p.name: p.read_bytes() for p in checkpoint.iterdir() if p.suffix in (".json", ".jinja")}
    publisher = Publisher(store, side_files=files)
    try:
        publisher.open(state_of(checkpoint), Stamp(step=0, sync=0))
        yield publisher
    finally:
        publisher.close()


@functools.cache
def _plain(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def reference(checkpoint: Path, ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
    """Teacher forcing: logprobs of ids[start:] from one plain transformers forward in float32."""
    import torch

    wanted = torch.tensor(list(ids))
    with torch.inference_mode():
        logits = _plain(checkpoint)(wanted[None]).logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, wanted[1:, None])[:, 0]
    return [float(x) for x in logprobs[start - 1 :]]


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Poll until `condition` holds; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def assert_close_to(found: Sequence[float], wanted: Sequence[float], tolerance: float = 1e-4) -> None:
    """Assert equal length and elementwise difference below `tolerance`."""
    assert len(found) == len(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < tolerance


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    """`n` prompts of 1 to 59 ordinary ids."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, int(rng.integers(1, 60))).tolist() for _ in range(n)]
