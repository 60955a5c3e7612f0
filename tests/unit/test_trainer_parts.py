"""The trainer's parts, each by itself: advantages, curriculum, samples, the published form, publishing, warm start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from support_groups import chain, group, rollout
from support_tiny import make_checkpoint

from env_space.environments.guess import Guess
from inference_space.render import render
from sync import Publisher, state_digest
from sync.errors import ConfigError, InvalidRequest
from sync.heads import newest, read_head
from sync.schema.artifacts import Curriculum, CurriculumEntry
from sync.schema.base import Identity
from sync.schema.calls import Message
from sync.schema.rollouts import Group
from sync.schema.wire import Harness
from sync.stores import Content, MemoryStore
from trainer_node.advantages import EPSILON, grpo, has_spread, useful_pair_share
from trainer_node.config import WarmStart
from trainer_node.curriculum import TaskStats, next_curriculum
from trainer_node.evaluate import _score
from trainer_node.model import checkpoint_tensors, published_bits, resolve, side_files, tiny_model, tiny_tokenizer
from trainer_node.samples import ACTION, CONTEXT, group_samples, inspect_group
from trainer_node.transfer import WeightTransfer
from trainer_node.warmstart import IGNORED, encode_conversation, warm_start

pytestmark = pytest.mark.unit


# --- advantages and curriculum


def test_advantages_by_hand() -> None:
    assert grpo([1.0, 0.0]) == pytest.approx([0.5 / (0.5**0.5 + EPSILON), -0.5 / (0.5**0.5 + EPSILON)])
    assert grpo([3.0, 1.0, 2.0]) == pytest.approx([1 / (1 + EPSILON), -1 / (1 + EPSILON), 0.0])
    assert grpo([0.3, 0.3, 0.3]) == pytest.approx([0.0, 0.0, 0.0])
    assert grpo([0.7]) == [0.0]
    assert grpo([]) == []


def test_advantages_equal_the_torch_formula() -> None:
    rng = Random(0)
    for size in (2, 3, 8, 16):
        rewards = [rng.choice((0.0, 0.1, 0.3, 1.0, -0.2)) for _ in range(size)]
        r = torch.tensor(rewards, dtype=torch.float64)
        assert grpo(rewards) == pytest.approx(((r - r.mean()) / (r.std() + 1e-4)).tolist())


def test_useful_pairs_and_spread() -> None:
    assert useful_pair_share([1, 0]) == 1
    assert useful_pair_share([1, 0, 0]) == pytest.approx(2 / 3)
    assert useful_pair_share([1, 1, 0, 0]) == pytest.approx(4 / 6)
    assert useful_pair_share([1, 1, 1]) == useful_pair_share([1]) == useful_pair_share([]) == 0
    assert has_spread([1, 1, 0])
    assert not has_spread([0.1, 0.1])
    assert not has_spread([1])


def test_next_curriculum_floors_smooths_and_keeps_unseen_tasks() -> None:
    before = Curriculum(
        environment="guess",
        tasks={
            "old": CurriculumEntry(weight=0.8, groups=4, useful_share=0.8, success=0.5),
            "unseen": CurriculumEntry(weight=0.6, groups=2, useful_share=0.6, success=0.1),
            "given": CurriculumEntry(weight=3.0),
        },
    )
    stats = {
        "old": TaskStats(groups=2, useful=0.4, success=2.0),
        "new": TaskStats(groups=4, useful=2.0, success=1.0),
        "given": TaskStats(groups=1, useful=0.9, success=0.0),
        "solved": TaskStats(groups=3, useful=0.0, success=3.0),
        "empty": TaskStats(),
    }
    after = next_curriculum(before, stats, floor=0.25)
    assert after.tasks["old"] == CurriculumEntry(weight=0.5, groups=6, useful_share=0.5, success=1.0)
    assert after.tasks["new"] == CurriculumEntry(weight=0.5, groups=4, useful_share=0.5, success=0.25)
    assert after.tasks["given"] == CurriculumEntry(weight=0.9, groups=1, useful_share=0.9, success=0.0)
    assert after.tasks["solved"] == CurriculumEntry(weight=0.25, groups=3, useful_share=0.0, success=1.0)
    assert after.tasks["unseen"] == before.tasks["unseen"]
    assert "empty" not in after.tasks
    assert (after.environment, after.default_weight) == ("guess", 1.0)
    assert before.tasks["old"].groups == 4, "the old curriculum is not changed"


def test_task_stats_add_up() -> None:
    stats = TaskStats()
    stats.add(0.5, 1.0)
    stats.add(0.25, 0.0)
    assert stats == TaskStats(groups=2, useful=0.75, success=1.0)


# --- groups to samples

SYNCS = {Identity(1, 0): 1, Identity(1, 1): 3}


def test_a_group_is_inspected() -> None:
    facts = inspect_group(group("g", [1.0, 0.0, 0.0, None]), SYNCS.get, 8)
    assert facts == pytest.approx((True, 2 / 3, 1 / 3))
    assert not inspect_group(group("g", [0.3, 0.3]), SYNCS.get, 8).spread


def test_a_group_that_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"rollout g\.0: weights version 9@9 is not an ancestor"):
        inspect_group(group("g", [1.0, 0.0], "9@9"), SYNCS.get, 8)
    with pytest.raises(InvalidRequest, match=r"rollout g\.0: token id 7, the vocabulary has 7"):
        inspect_group(group("g", [1.0, 0.0]), SYNCS.get, 7)
    with pytest.raises(InvalidRequest, match="group g has no usable rollout"):
        inspect_group(group("g", [None, None]), SYNCS.get, 8)
    context = chain([5, 6], [0, 0])
    untrainable = Group(id="g", run="r", task="t", rollouts=(rollout("g", 0, 1.0, context),))
    with pytest.raises(InvalidRequest, match="no usable rollout"):
        inspect_group(untrainable, SYNCS.get, 8)


def test_a_chain_without_tokens_harms_nobody() -> None:
    made = Group(
        id="g", run="r", task="t",
        rollouts=(rollout("g", 0, 1.0, chain([5, 1], [0, 1]), chain([], [])), rollout("g", 1, 0.0)),
    )  # fmt: skip
    assert inspect_group(made, SYNCS.get, 8).spread
    assert len(group_samples(made, SYNCS.get)) == 2


def test_samples_carry_per_token_truth() -> None:
    first = chain([5, 6, 7, 1, 3, 2], [0, 0, 1, 1, 0, 1], "1@1")
    fork = chain([5, 4], [0, 1], "0@1")
    context = chain([5, 6], [0, 0])
    rollouts = (
        rollout("g", 0, 1.0, first, fork, context, rewards={"found": 1.0, "reward": 9.0}),
        rollout("g", 1, None),
        rollout("g", 2, 0.0),
    )
    made = group_samples(Group(id="g", run="r", task="secret-1", rollouts=rollouts), SYNCS.get)
    assert len(made) == 3, "one per chain with a sampled token; the rollout without a reward gives none"
    up, down = grpo([1.0, 0.0])
    assert [s.advantage for s in made] == pytest.approx([up, up, down]), "an unknown reward is in no mean"
    assert made[0].input_ids.tolist() == list(first.ids)
    assert made[0].completion_mask.tolist() == list(first.mask)
    assert made[0].old_log_probs.tolist() == list(first.logprobs)
    assert made[0].token_advantages.tolist() == pytest.approx([0, 0, up, up, 0, up])
    assert made[0].token_class.tolist() == [CONTEXT, CONTEXT, ACTION, ACTION, CONTEXT, ACTION]
    dtypes = [a.dtype for a in (made[0].input_ids, made[0].completion_mask, made[0].old_log_probs)]
    assert [dtype.name for dtype in dtypes] == ["int64", "int64", "float32"]
    assert [made[0].token_advantages.dtype.name, made[0].token_class.dtype.name] == ["float32", "int64"]
    assert {s.model_version for s in made} == {1}, "the oldest version of the group, for all of it"
    assert {s.group for s in made} == {"g"}
    assert len({s.group_id for s in made}) == 1
    assert made[0].metrics == {"reward": 1.0, "reward_std": 0.5, "success": 1.0, "rewards/found": 1.0}
    assert made[0].prompt == [{"role": "user", "content": "guess 1-7"}]
    assert made[0].completion == [{"role": "assistant", "content": "4"}]


# --- the published form


def test_published_bits_round_to_nearest_even_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    ties = (rng.integers(0, 1 << 15, 4_096, dtype=np.uint32) << 16) | 0x8000
    anything = rng.integers(0, 1 << 32, 65_536, dtype=np.uint32)
    values = np.concatenate([ties, anything]).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, 65_280.0, 1.00390625], np.float32)
    tensor = torch.from_numpy(np.concatenate([values, special]))
    (found,) = published_bits({"w": tensor}).values()
    assert found.dtype == np.uint16
    assert np.array_equal(found, tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    raw = tensor.numpy().view(np.uint32).astype(np.uint64)
    even = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
    finite = ~np.isnan(tensor.numpy())
    assert np.array_equal(found[finite], even[finite])
    assert found[len(values) + 1] == 0x8000, "the sign of zero stays"


def test_published_bits_keep_other_dtypes_and_layouts() -> None:
    square = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    found = published_bits({
        "transposed": square.T, "half": torch.tensor([1.5], dtype=torch.float16), "count": torch.tensor(7),
        "brain": torch.tensor([1.5], dtype=torch.bfloat16),
    })  # fmt: skip
    assert found["transposed"].shape == (3, 2)
    assert np.array_equal(found["transposed"], published_bits({"w": square})["w"].T)
    assert [found["half"].dtype.name, found["count"].dtype.name] == ["float16", "int64"]
    assert found["count"].shape == ()
    assert found["brain"].tolist() == [0x3FC0]


def test_checkpoint_tensors_name_tied_tensors_once_and_all_buffers(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, seed=1)
    model.model.register_buffer("counter", torch.tensor([3]))
    tensors = checkpoint_tensors(model)
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    assert tensors["model.counter"].tolist() == [3]
    assert {n for n, _ in model.named_parameters()} | {"model.counter"} == set(tensors)
    assert not any(t.requires_grad for t in tensors.values())
    model.config.tie_word_embeddings = False
    assert "lm_head.weight" in checkpoint_tensors(model)


def test_the_tiny_model_comes_from_its_seed(tokenizer: Any) -> None:
    one, same, other = (checkpoint_tensors(tiny_model(tokenizer, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not all(torch.equal(one[n], other[n]) for n in one)


def test_side_files_are_those_of_a_bf16_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "float32", "hidden_size": 64}')
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(name.encode())
    files = side_files(tmp_path)
    assert set(files) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert json.loads(files["config.json"]) == {"model_type": "qwen3", "hidden_size": 64, "dtype": "bfloat16"}
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json; give --model"):
        side_files(tmp_path)


def test_resolve_says_what_is_wrong_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such model folder; give --model"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        resolve(str(tmp_path))
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    assert resolve(str(checkpoint)) == checkpoint
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"checkpoint: cannot be loaded \(.*give --model"):
        resolve(str(checkpoint))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="model 'no-such-owner/no-such-model' is no folder and cannot be downloaded"):
        resolve("no-such-owner/no-such-model")
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        resolve("not a repo id")


# --- publishing


class GatedStore(MemoryStore):
    """A store whose writes wait while the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        assert self.gate.wait(60)
        super().put_batch(objects)


class Weights:
    """A trainer's tensors, harness versions and step, as WeightTransfer asks for them."""

    def __init__(self, compare: Literal["host", "device"] = "host") -> None:
        self.store = GatedStore()
        self.tensors = {"a": torch.ones(64), "b": torch.zeros(3, 5)}
        self.frozen = {"c": torch.full((4,), 2.5)}
        self.step = 0
        self.harness: Harness = {}
        self.publisher = Publisher(self.store, side_files={"config.json": b"{}"}, on_commit=self.committed)
        self.transfer = WeightTransfer(self.publisher, lambda: self.step, self._take, compare=compare)
        self.transfer.freeze(self.frozen)

    def committed(self, done: Any) -> None:
        self.transfer.committed(done)

    def _take(self) -> Harness:
        taken, self.harness = self.harness, {}
        return taken

    def train(self, value: float, **harness: tuple[str, ...]) -> None:
        """One optimizer step and the sync after it."""
        self.step += 1
        self.tensors["a"][int(value) % 64] = value
        self.harness = dict(harness)
        self.transfer.send_weights(iter(self.tensors.items()))

    def open(self) -> Identity:
        """What the run does before the first step."""
        first = self.transfer.publish_first(self.tensors, takeover=False)
        self.transfer.send_weights(iter(self.tensors.items()))
        return first

    def digest(self) -> str:
        """The digest of what the trainer holds now."""
        return state_digest(published_bits(self.tensors | self.frozen))

    def head_digest(self) -> str:
        """The digest that the newest manifest declares."""
        ((key, _),) = newest(self.store.list("heads/"))["weights"]
        manifest = read_head(self.store, key).manifest
        assert manifest is not None
        return manifest.state_digest


@pytest.fixture(params=["host", "device"])
def weights(request: pytest.FixtureRequest) -> Iterator[Weights]:
    made = Weights(request.param)
    yield made
    made.store.gate.set()
    made.publisher.close()


def test_a_copy_on_the_device_in_doubt_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights("device")
    weights.open()
    weights.train(3.0)
    weights.publisher.wait()
    copy = weights.transfer._copy
    assert copy is not None
    assert copy._base is not None
    assert copy._digest == weights.head_digest()
    damaged = copy._base
    damaged._held["b"][0, 0] = 7.0  # what it holds is not what was committed
    weights.tensors["b"][0, 0] = 5.0
    weights.train(4.0)
    weights.publisher.wait()
    assert copy._base is not damaged
    assert weights.head_digest() == weights.digest()
    weights.publisher.close()


def test_a_copy_on_the_device_that_is_damaged_in_flight_ends_nothing() -> None:
    weights = Weights("device")
    weights.open()
    weights.train(3.0)
    weights.publisher.wait()
    weights.store.gate.clear()
    weights.train(4.0)  # the difference is taken, the upload waits
    copy = weights.transfer._copy
    assert copy is not None
    assert copy._base is not None
    copy._base._held["a"][4] = 7.0
    weights.store.gate.set()
    weights.publisher.wait()
    assert weights.head_digest() == weights.digest()
    weights.train(5.0)
    weights.publisher.wait()
    assert weights.head_digest() == weights.digest()
    assert weights.publisher.base._elsewhere is None
    weights.publisher.close()


def test_the_cold_sync_adds_nothing(weights: Weights) -> None:
    first = weights.open()
    assert str(first) == "0@1"
    assert (weights.transfer.syncs, len(weights.publisher.history)) == (1, 1)
    assert weights.transfer.sync_of(first) == 1
    assert weights.head_digest() == weights.digest()


def test_each_sync_publishes_with_its_stamp(weights: Weights) -> None:
    weights.open()
    weights.train(3.0, curriculum=("0@1",))
    weights.publisher.wait()
    done = weights.publisher.history[-1]
    assert (done.identity, done.kind, done.changed) == (Identity(1, 1), "delta", 1)
    assert (done.stamp.step, done.stamp.sync, done.stamp.harness) == (1, 2, {"curriculum": ("0@1",)})
    assert weights.transfer.sync_of(Identity(1, 1)) == 2
    assert weights.transfer.sync_of(Identity(1, 2)) is None
    assert weights.transfer.sync_of(Identity(2, 1)) is None
    assert weights.head_digest() == weights.digest()


def test_a_sync_during_a_publish_is_merged_into_the_next(weights: Weights) -> None:
    weights.open()
    weights.store.gate.clear()
    weights.train(3.0, curriculum=("0@1",))
    weights.train(4.0, curriculum=("10@1",))
    weights.train(5.0, curriculum=("2@1",), rubric=("0@1",))
    assert weights.transfer.skipped == 2
    weights.store.gate.set()
    weights.publisher.wait()
    weights.train(6.0, curriculum=("10@1",))
    weights.publisher.wait()
    one, two = weights.publisher.history[1:]
    assert (one.stamp.sync, one.changed, one.stamp.harness) == (2, 1, {"curriculum": ("0@1",)})
    assert (two.stamp.sync, two.stamp.step, two.changed) == (5, 4, 3)
    assert two.stamp.harness == {"curriculum": ("2@1", "10@1"), "rubric": ("0@1",)}, "ordered by version"
    assert weights.head_digest() == weights.digest()
    weights.train(7.0)
    weights.publisher.wait()
    assert weights.publisher.history[-1].stamp.harness == {}, "what was carried over is not named again"


def test_flush_publishes_the_last_state_bit_for_bit(weights: Weights) -> None:
    weights.open()
    weights.store.gate.clear()
    weights.train(3.0, curriculum=("0@1",))
    weights.train(4.0, curriculum=("1@1",))
    last = weights.digest()
    weights.tensors["a"] += 1.0  # what happens to the tensors afterwards does not matter
    weights.store.gate.set()
    assert str(weights.transfer.flush()) == "2@1"
    assert weights.head_digest() == last
    assert weights.publisher.history[-1].stamp == (2, 3, {"curriculum": ("1@1",)})


def test_flush_without_a_skipped_sync_publishes_nothing(weights: Weights) -> None:
    weights.open()
    weights.train(3.0)
    assert str(weights.transfer.flush()) == "1@1"
    assert len(weights.publisher.history) == 2


def test_a_version_that_is_served_before_its_commit_is_noted_is_known(weights: Weights) -> None:
    weights.open()
    noting = threading.Event()

    def slow_commit(done: Any) -> None:
        noting.set()
        assert resume.wait(60)
        weights.transfer.committed(done)

    resume = threading.Event()
    weights.publisher._on_commit = slow_commit
    weights.train(3.0)
    assert noting.wait(60), "the head names 1@1 now, and a follower may serve it"
    timer = threading.Timer(0.2, resume.set)
    timer.start()
    assert weights.transfer.sync_of(Identity(1, 1)) == 2
    timer.join()


def test_a_commit_between_the_look_and_the_busy_flag_is_not_missed(weights: Weights) -> None:
    weights.open()

    class Busy(Publisher):
        """Its flag is read only after what was in flight has ended."""

        @property
        def busy(self) -> bool:
            was = super().busy
            weights.store.gate.set()
            self.settled(60)
            return was and super().busy

    weights.store.gate.clear()
    weights.train(3.0)
    weights.publisher.__class__ = Busy
    assert weights.transfer.sync_of(Identity(1, 1)) == 2


def test_training_cannot_sync_before_the_first_version(weights: Weights) -> None:
    weights.transfer.send_weights(iter(weights.tensors.items()))
    with pytest.raises(InvalidRequest, match="publish_first must come before training"):
        weights.train(3.0)


# --- evaluation


def test_an_evaluation_with_other_weights_is_refused() -> None:
    rollouts = [*group("g", [1.0, 0.3]).rollouts, rollout("h", 0, None)]
    score = _score(rollouts, "0@1")
    assert (score.success, score.reward, score.episodes, score.unscored) == (0.5, 0.65, 3, 1)
    with pytest.raises(InvalidRequest, match=r"evaluation rollout g\.0 used weights \['0@1'\], expected 1@1"):
        _score(rollouts, "1@1")
    with pytest.raises(InvalidRequest, match="no scored episode"):
        _score([rollout("h", 0, None)], "0@1")


# --- warm start


@pytest.fixture(scope="module")
def talks() -> list[list[Message]]:
    return [Guess().demonstrate(f"secret-{1 + i % 7}", Random(i)) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(talks: list[list[Message]]) -> Any:
    return tiny_tokenizer(message.content for talk in talks for message in talk)


def test_labels_are_exactly_the_assistant_turns(tokenizer: Any, talks: list[list[Message]]) -> None:
    for talk in talks[:10]:
        ids, labels = encode_conversation(tokenizer, talk)
        learned = tokenizer.decode([i for i in labels if i != IGNORED])
        assert learned == "".join(f"{m.content}<|end|>" for m in talk if m.role == "assistant")
        assert all(label in (IGNORED, i) for i, label in zip(ids, labels, strict=True))
        whole = "".join(f"<|{m.role}|>{m.content}<|end|>" for m in talk)
        assert tokenizer.decode(ids) == whole


def test_ids_are_those_that_sampling_would_record(tokenizer: Any, talks: list[list[Message]]) -> None:
    for talk in talks[:10]:
        recorded: list[int] = []
        new: list[Message] = []
        for message in talk:
            if message.role != "assistant":
                new.append(message)
                continue
            recorded = render(tokenizer, recorded, new)
            recorded += [*tokenizer.encode(message.content, add_special_tokens=False), tokenizer.eos_token_id]
            new = []
        assert encode_conversation(tokenizer, talk)[0] == recorded


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any, talks: list[list[Message]]) -> None:
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages|length }}" + kept
    try:
        with pytest.raises(ValueError, match="does not preserve prefixes"):
            encode_conversation(tokenizer, next(t for t in talks if len(t) > 2))
    finally:
        tokenizer.chat_template = kept


def test_the_warm_start_lowers_the_loss(tokenizer: Any, talks: list[list[Message]]) -> None:
    model = tiny_model(tokenizer, seed=0)
    seen: list[tuple[int, float]] = []
    settings = WarmStart(steps=20, batch=16, learning_rate=5e-3)
    with one_thread():
        tail = warm_start(model, tokenizer, talks, settings, 0, lambda step, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == list(range(1, 21))
    assert tail == pytest.approx((seen[-1][1] + seen[-2][1]) / 2)
    assert tail < 0.6 * seen[0][1]
    assert not model.training


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
