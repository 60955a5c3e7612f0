"""What `trl_adapter` relies on in TRL. A failure here after an update of TRL says what to look at in the adapter."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from support_tiny import make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sync.codec import encode_delta
from trainer_node.config import Sparsity, TrainConfig
from trainer_node.inbox import RolloutInbox
from trainer_node.model import checkpoint_tensors, published_bits
from trainer_node.run import _arguments
from trainer_node.samples import TokenSample
from trainer_node.sparsity import measure
from trainer_node.transfer import WeightTransfer
from trainer_node.trl_adapter import DeltawireTrainer, RolloutSample, _FreshQueue, install_cpu_shims, tree_sdpa

pytestmark = pytest.mark.unit
trl_module = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
packing = importlib.import_module("trl.experimental.async_grpo.packing")


# --- names and signatures


def test_the_pinned_version() -> None:
    assert importlib.metadata.version("trl").startswith("1.16.")


def test_the_sample_has_the_fields_that_ours_extends() -> None:
    names = [field.name for field in dataclasses.fields(RolloutSample)]
    assert names == [
        "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version",
        "group_id", "metrics", "enqueued_at",
    ]  # fmt: skip
    added = [field.name for field in dataclasses.fields(TokenSample)][len(names) :]
    assert added == ["token_advantages", "token_class", "group"]


def test_module_globals_that_are_replaced() -> None:
    loader = trl_module.AsyncGRPOTrainer.get_train_dataloader.__code__.co_names
    assert {"RolloutQueueDataset", "DataCollatorForRollout", "FixedCountBatcher"} <= set(loader)
    built = trl_module.AsyncGRPOTrainer.__init__.__code__.co_names
    assert {"register_tree_attention", "get_peak_flops_per_device"} <= set(built)
    assert {"register_tree_attention", "get_peak_flops_per_device"} <= set(vars(trl_module))
    assert packing.TREE_ATTENTION == "tree_fa3"


def test_signatures() -> None:
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    trainer = trl_module.AsyncGRPOTrainer
    assert {"model", "args", "train_dataset", "processing_class", "rollout_worker", "weight_transfer"} <= set(
        parameters(trainer.__init__)
    )
    assert parameters(trainer.compute_loss)[:3] == ["self", "model", "inputs"]
    assert parameters(trainer.training_step) == ["self", "model", "inputs", "num_items_in_batch"]
    assert parameters(trainer._sync_weight) == ["self"]
    assert parameters(trl_module.DataCollatorForRollout.torch_call) == ["self", "examples"]
    assert "rollout_queue" in parameters(trl_module.RolloutQueueDataset.__init__)
    ours = set(parameters(tree_sdpa)) - {"_"}
    assert ours <= set(parameters(packing.tree_attention)), "our attention takes what TRL's takes"


@pytest.mark.parametrize(
    ("protocol", "ours"),
    [(trl_module.RolloutWorkerProtocol, RolloutInbox), (trl_module.WeightTransferProtocol, WeightTransfer)],
)
def test_our_objects_follow_the_protocols(protocol: Any, ours: Any) -> None:
    methods = {name: f for name, f in vars(protocol).items() if inspect.isfunction(f) and name[0] != "_"}
    assert methods
    for name, theirs in methods.items():
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(getattr(ours, name)).parameters)
    assert set(methods) in (
        {"start", "stop", "update_model_version", "check_health"},
        {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"},
    )


# --- a real trainer on hand-made samples


class Ended(Exception):
    """The queue is empty and the test wants no more."""


class Worker:
    """TRL's rollout worker: samples that are there from the start."""

    def __init__(self, log: list[str]) -> None:
        self.rollout_buffer: queue.Queue[TokenSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.log = log

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")

    def update_model_version(self, model_version: int) -> None:
        self.log.append(f"version {model_version}")

    def check_health(self, stale_after_s: float) -> None:
        raise Ended(stale_after_s)


class Transfer:
    """TRL's weight transfer: keeps what was sent."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.sent = log, list[dict[str, torch.Tensor]]()

    def init_weight_transfer(self) -> None:
        self.log.append("init")

    def pause(self) -> None:
        self.log.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.log.append("send")
        self.sent.append({name: tensor.clone() for name, tensor in iterator})

    def resume(self) -> None:
        self.log.append("resume")

    def destroy(self) -> None:
        self.log.append("destroy")


class Recording(DeltawireTrainer):
    """Notes the model version at which each micro-batch is trained, and the inputs of each loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trained_at: list[int] = []
        self.inputs: list[dict[str, torch.Tensor]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        self.trained_at.append(self.model_version)
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.inputs.append(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


class Rig:
    """A trainer, its worker and transfer, and the order of what happened."""

    def __init__(self, folder: Path, out: Path, *, max_age: int = 4, **settings: Any) -> None:
        install_cpu_shims()
        base: dict[str, Any] = {
            "run": "unused", "env_urls": ["http://unused"], "policy_url": "http://unused", "report": "none",
            "out": out, "groups_per_step": 2, "group_size": 4, "steps": 3,
        }  # fmt: skip
        self.config = TrainConfig.model_validate(base | settings)
        self.log: list[str] = []
        self.trained: list[list[str]] = []
        self.stale: list[str] = []
        self.worker, self.transfer = Worker(self.log), Transfer(self.log)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.trainer = Recording(
            model=str(folder), args=_arguments(self.config, 8), processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]}),
            rollout_worker=self.worker, weight_transfer=self.transfer, max_age=max_age, keep_inputs=4,
            on_stale=self.stale.append, on_trained=self._trained,
        )  # fmt: skip
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.remove_callback(ProgressCallback)

    def _trained(self, groups: list[str]) -> None:
        if groups:
            self.log.append("trained")
            self.trained.append(groups)

    def put(self, *samples: TokenSample) -> None:
        for sample in samples:
            self.worker.rollout_buffer.put(sample)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), initializer_range=0.1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sample(ids: Sequence[int], mask: Sequence[int], group: str, version: int = 1, start: int = 0) -> TokenSample:
    """A sample whose every token has a logprob, an advantage and a class of its own, all told by one number."""
    marks = np.asarray(mask, np.int64)
    number = np.arange(start, start + len(ids))
    return TokenSample(
        prompt=[], completion=[], input_ids=np.asarray(ids, np.int64), completion_mask=marks,
        old_log_probs=(-number / 64 * marks).astype(np.float32), advantage=99.0, model_version=version,
        group_id=sum(group.encode()), metrics={"reward": 0.0}, enqueued_at=None,
        token_advantages=(advantage_of(number) * marks).astype(np.float32),
        token_class=class_of(number) * marks, group=group,
    )  # fmt: skip


def advantage_of(number: Any) -> Any:
    """The advantage of the token with that number."""
    return number / 8 - 3


def class_of(number: Any) -> Any:
    """The class of the token with that number."""
    return 1 + number % 5


def forked(version: int = 1) -> list[TokenSample]:
    """Eight samples of two groups: shared openings, forks in the middle, a prefix of another, two that are equal."""
    opening, other = [10, 11, 12, 13], [20, 21]
    return [
        sample([*opening, 30, 31, 32], [0, 0, 0, 0, 1, 1, 1], "a", version, 0),
        sample([*opening, 30, 31, 33, 34], [0, 0, 0, 0, 1, 1, 0, 1], "a", version, 10),
        sample([*opening, 40, 41], [0, 0, 0, 0, 1, 1], "a", version, 20),
        sample([*opening, 30], [0, 0, 0, 0, 1], "a", version, 30),
        sample([*other, 50, 51, 52], [0, 0, 1, 0, 1], "b", version, 40),
        sample([*other, 50, 51, 52], [0, 0, 1, 0, 1], "b", version, 50),
        sample([60, 61, 62], [1, 1, 1], "b", version, 60),
        sample([*other, 50, 60, 61, 62], [0, 0, 0, 1, 0, 1], "b", version, 70),
    ]


def group_of(version: int, name: str) -> list[TokenSample]:
    """One step's worth: eight samples of one group."""
    return [sample([10, 11, 12 + i], [0, 1, 1], name, version, 8 * i) for i in range(8)]


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A trainer after three steps on the forked samples."""
    rig = Rig(checkpoint, tmp_path_factory.mktemp("trained"))
    for version in (1, 1, 2, 3):
        rig.put(*forked(version))
    rig.trainer.train()
    return rig


def test_token_fields_reach_the_loss_in_trls_own_order(trained: Rig) -> None:
    assert len(trained.trainer.inputs) == 3
    for inputs in trained.trainer.inputs:
        selected = inputs["token_index"] >= 0
        numbers = (-64 * inputs["old_log_probs"][selected]).round().long()
        trained_numbers = [n for s in forked() for n in (-64 * s.old_log_probs)[1:][s.completion_mask[1:] == 1]]
        assert sorted(numbers.tolist()) == sorted(trained_numbers), "every sampled token but one without a context"
        assert inputs["advantages"][selected].tolist() == advantage_of(numbers).tolist()
        assert inputs["token_class"][selected].tolist() == class_of(numbers).tolist()
        assert inputs["advantages"].dtype == torch.float32
        assert inputs["token_class"].dtype == torch.int64
        assert inputs["token_class"].shape == inputs["advantages"].shape == inputs["token_index"].shape
        labels = inputs["shift_labels"][0][inputs["token_index"][selected]]
        ids = {int(n): i for s in forked() for i, n in zip(s.input_ids, -64 * s.old_log_probs, strict=True) if n}
        assert [ids[n] for n in numbers.tolist() if n] == [
            int(label) for label, n in zip(labels, numbers.tolist(), strict=True) if n
        ]


def test_shared_prefixes_are_forwarded_once(trained: Rig) -> None:
    (inputs, *_) = trained.trainer.inputs
    assert inputs["input_ids"].shape[1] < sum(len(s.input_ids) for s in forked())
    assert float(inputs["global_n_tokens"][0]) == sum(int(s.completion_mask[1:].sum()) for s in forked())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probs_and_loss_equal_plain_ones(checkpoint: Path, tmp_path: Path, temperature: float) -> None:
    rig = Rig(checkpoint, tmp_path, temperature=temperature)
    rig.put(*forked(), *forked())
    rig.trainer.model_version = rig.trainer.current_gradient_accumulation_steps = 1
    inputs = next(iter(rig.trainer.get_train_dataloader()))
    model = rig.trainer.model
    model.train()
    index = inputs["token_index"][0]
    with torch.no_grad():
        out = model(
            input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], shift_labels=inputs["shift_labels"],
            fused_lm_head=True, tree_kv_index=inputs["tree_kv_index"][0],
            tree_cu_seqlens_q=inputs["tree_cu_seqlens_q"][0], tree_cu_seqlens_k=inputs["tree_cu_seqlens_k"][0],
            tree_max_seqlen_q=int(inputs["tree_max_seqlens"][0, 0]),
            tree_max_seqlen_k=int(inputs["tree_max_seqlens"][0, 1]),
        )  # fmt: skip
        loss = rig.trainer.compute_loss(model, inputs)
    found = out.log_probs.flatten()[index]
    plain = plain_log_probs(checkpoint, temperature)
    numbers = (-64 * inputs["old_log_probs"][0]).round().long().tolist()
    wanted = torch.tensor([plain[n] for n in numbers])
    assert float((found - wanted).abs().max()) <= 1e-5
    ratio = torch.exp(wanted - inputs["old_log_probs"][0])
    advantages = torch.tensor([advantage_of(n) for n in numbers])
    by_hand = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / len(numbers)
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-4)


def plain_log_probs(checkpoint: Path, temperature: float) -> dict[int, float]:
    """Number of a trained token → its log-prob by one plain forward of its own sample."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    found: dict[int, float] = {}
    for made in forked():
        ids = torch.from_numpy(made.input_ids)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0] / temperature
        logprobs = torch.log_softmax(logits, -1)
        for at in np.flatnonzero(made.completion_mask[1:]) + 1:
            found[round(-64 * float(made.old_log_probs[at]))] = float(logprobs[at - 1, ids[at]])
    return found


def test_the_order_of_sync_and_training(trained: Rig) -> None:
    sync = ["pause", "send", "resume"]
    expected = ["init", *sync, "version 1", "start"]
    for step in (1, 2, 3):
        expected += ["trained", *sync, f"version {step + 1}"]
    assert trained.log == [*expected, "stop", "destroy"]
    assert trained.trainer.model_version == 4


def test_what_is_streamed_is_the_checkpoint(trained: Rig) -> None:
    first, *_, last = trained.transfer.sent
    tensors = checkpoint_tensors(trained.trainer.model)
    assert set(first) == set(last) == set(tensors)
    assert all(t.dtype == torch.float32 for t in first.values())
    assert all(torch.equal(last[n], tensors[n]) for n in tensors), "the last sync has the last step"
    assert any(not torch.equal(first[n], last[n]) for n in tensors)


def test_each_step_names_what_it_trained(trained: Rig) -> None:
    assert [Counter(groups) for groups in trained.trained] == [Counter(a=4, b=4)] * 3


def test_sparse_deltas_are_measured_on_the_last_batches(trained: Rig) -> None:
    before = published_bits(checkpoint_tensors(trained.trainer.model))
    assert measure(trained.trainer, Sparsity(steps=0), "fast") is None
    size = measure(trained.trainer, Sparsity(steps=2, learning_rate=1e-6), "fast")
    assert size is not None
    after = published_bits(checkpoint_tensors(trained.trainer.model))
    assert (size.steps, size.learning_rate, size.full) == (2, 1e-6, sum(b.nbytes for b in before.values()))
    assert 0 < size.changed < 0.2
    assert 0.5 < size.one_ulp <= 1
    assert 0 < size.payload < 0.3 * size.full
    assert len(encode_delta(before, after, "fast")) < 2 * size.payload + 4_096
    trained.trainer.recent_inputs.clear()
    assert measure(trained.trainer, Sparsity(steps=2), "fast") is None


def test_micro_batches_are_one_step(checkpoint: Path, tmp_path: Path) -> None:
    rig = Rig(checkpoint, tmp_path, micro_batches=2, steps=2)
    for version in (1, 1, 2):
        rig.put(*forked(version))
    rig.trainer.train()
    assert [Counter(groups) for groups in rig.trained] == [Counter(a=4, b=4)] * 2
    assert len(rig.trainer.inputs) == 4


def test_syncs_at_a_longer_interval(checkpoint: Path, tmp_path: Path) -> None:
    rig = Rig(checkpoint, tmp_path, publishing={"every": 2}, steps=3)
    for _ in range(4):
        rig.put(*forked())
    rig.trainer.train()
    assert [entry for entry in rig.log if entry in ("trained", "send")] == [
        "send",
        "trained",
        "trained",
        "send",
        "trained",
    ]
    assert rig.trainer.model_version == 2


# --- staleness


def test_no_sample_is_older_than_max_age_when_it_is_trained(checkpoint: Path, tmp_path: Path) -> None:
    rig = Rig(checkpoint, tmp_path, max_age=2)
    for number in range(5):
        rig.put(*group_of(1, f"old-{number}"))
    rig.put(*group_of(3, "fresh"))
    rig.trainer.train()
    assert [set(groups) for groups in rig.trained] == [{"old-0"}, {"old-1"}, {"old-2"}]
    ages = [at - 1 for at in rig.trainer.trained_at]
    assert ages == [0, 1, 2], "one sync older in training than when it was read; the bound is reached, never passed"
    assert Counter(rig.stale) == {"old-3": 8, "old-4": 8}, "every sample that was dropped is reported"
    assert rig.worker.rollout_buffer.empty()


def test_max_age_one_trains_what_is_one_sync_old(checkpoint: Path, tmp_path: Path) -> None:
    rig = Rig(checkpoint, tmp_path, max_age=1, steps=2)
    rig.put(*group_of(1, "one"), *group_of(1, "two"), *group_of(1, "late"), *group_of(2, "next"))
    rig.trainer.train()
    assert [set(groups) for groups in rig.trained] == [{"one"}, {"two"}]
    assert rig.trainer.trained_at == [1, 2]
    assert Counter(rig.stale) == {"late": 8}


def test_a_group_is_dropped_or_kept_whole_although_a_sync_comes_between() -> None:
    source: queue.Queue[Any] = queue.Queue()
    dropped: list[str] = []
    version = [4]
    fresh = _FreshQueue(source, lambda: version[0], 3, dropped.append)
    for name, born in [("kept", 1), ("late", 0), ("kept", 1), ("late", 0), ("kept", 1)]:
        source.put(SimpleNamespace(model_version=born, group=name))
    assert fresh.get(timeout=1).group == "kept"
    version[0] = 5  # now "kept" would be too old, were it judged again
    assert [fresh.get(timeout=1).group for _ in range(2)] == ["kept", "kept"]
    assert dropped == ["late", "late"]


def test_a_queue_of_stale_samples_still_ends_the_wait() -> None:
    source: queue.Queue[Any] = queue.Queue()
    dropped: list[str] = []

    def drop_and_send_more(group: str) -> None:
        dropped.append(group)
        source.put(SimpleNamespace(model_version=1, group=f"g{len(dropped)}"))

    source.put(SimpleNamespace(model_version=1, group="g0"))
    fresh = _FreshQueue(source, lambda: 9, 4, drop_and_send_more)
    with pytest.raises(queue.Empty):
        fresh.get(timeout=0.05)
    assert dropped[:2] == ["g0", "g1"]
    source.put(SimpleNamespace(model_version=5, group="young"))
    assert _FreshQueue(source, lambda: 5, 4, dropped.append).get(timeout=1).model_version == 1
    assert fresh.qsize() == source.qsize()


def test_a_worker_that_is_ill_ends_the_training(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(checkpoint, tmp_path)
    made = trl_module.RolloutQueueDataset.__init__

    def impatient(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs, poll_interval_s=0.05)

    monkeypatch.setattr(trl_module.RolloutQueueDataset, "__init__", impatient)
    rig.put(*forked())
    with pytest.raises(Ended):
        rig.trainer.train()
    assert rig.log[-2:] == ["stop", "destroy"]
