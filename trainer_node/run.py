"""The training run, top to bottom: model, first version, evaluation, training, last version, evaluation."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sync.artifacts import ArtifactPublisher
from sync.errors import InvalidRequest, PeerUnavailable
from sync.events import Emit
from sync.publisher import Published, Publisher, PublisherOptions
from sync.schema.artifacts import Curriculum
from sync.schema.base import Identity
from sync.schema.calls import Message, SyncStatus
from sync.schema.rollouts import RunInfo, RunRequest, ServiceStatus
from sync.stores import Store, open_store
from sync.term import TermOptions

from .config import Publishing, TrainConfig, make_folder
from .curriculum import next_curriculum
from .evaluate import Score, evaluate
from .inbox import NOT_FOUND, InboxSettings, RolloutInbox
from .model import checkpoint_tensors, resolve, side_files, tiny_model, tiny_tokenizer
from .peers import Peer
from .sparsity import measure
from .summary import Summary, summarize
from .transfer import WeightTransfer
from .trl_adapter import AsyncGRPOConfig, DeltawireTrainer, install_cpu_shims
from .warmstart import warm_start


def train(config: TrainConfig, token: str, emit: Emit) -> Summary:
    """Train as `config` says and write `summary.json`. Raises DeltawireError for what a user can mend."""
    started = time.monotonic()
    torch.set_num_threads(config.threads)
    make_folder(config.out)
    store = open_store(config.run, create=True)
    if config.model != "tiny":
        resolve(config.model)  # a model that cannot be used is named before anything is waited for
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(Peer(url, token))) for url in config.env_urls]
        policy = stack.enter_context(closing(Peer(config.policy_url, token)))
        for env in envs:
            emit("waiting", what="environment Space", url=env.url, seconds=config.peer_seconds)
            env.wait_for("the environment Space coming up", partial(_alive, env), config.peer_seconds)
        folder = _prepare_model(config, envs[0], emit)
        run = _Run(config, store, envs, policy, folder, emit)
        run.started = started
        stack.callback(run.close)
        return run.run()


def _publisher_options(said: Publishing) -> PublisherOptions:
    term = TermOptions(settle=said.settle, keep_anchors=said.keep_anchors, grace=said.grace)
    return PublisherOptions(
        codec=said.codec, anchor_share=said.anchor_share, largest_span=said.largest_span, term=term
    )  # fmt: skip


class _Run:
    """The parts of one run and the order in which they are used."""

    def __init__(
        self, config: TrainConfig, store: Store, envs: list[Peer], policy: Peer, folder: Path, emit: Emit
    ) -> None:
        self.config, self.envs, self.policy, self.emit = config, envs, policy, emit
        self.started = time.monotonic()
        options = _publisher_options(config.publishing)
        self.publisher = Publisher(
            store, side_files=side_files(folder), options=options, emit=emit, on_commit=self._committed,
            on_sent=self._poke, work=config.out / "publisher",
        )  # fmt: skip
        self.curriculum = ArtifactPublisher(store, "curriculum", options=options.term, work=config.out / "publisher")
        self.curriculum_state = Curriculum(environment=config.environment)
        self.curriculum_versions = 0
        self.behind = ThreadPoolExecutor(1, thread_name_prefix="artifacts")
        self.publishing: Future[None] | None = None
        self.pokes_failed = 0
        tag = self.publisher_tag = format(time.time_ns() // 1_000_000, "x")
        self.rollout_run = f"train-{tag}"
        self.trainer, self.inbox, self.transfer = self._build(folder)

    def _build(self, folder: Path) -> tuple[DeltawireTrainer, RolloutInbox, WeightTransfer]:
        config = self.config
        install_cpu_shims()
        samples = config.groups_per_step * config.group_size
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.padding_side = "left"
        inbox_settings = InboxSettings(
            run=self.rollout_run, samples_per_step=samples, group_size=config.group_size, oversample=config.oversample,
            vocabulary=len(tokenizer), peer_seconds=config.peer_seconds,
        )  # fmt: skip
        inbox = RolloutInbox(self.envs, inbox_settings, self._sync_of, self._ask_for_rollouts, self.emit)
        transfer = WeightTransfer(
            self.publisher, lambda: self.trainer.state.global_step, inbox.take_harness,
            compare=config.publishing.compare,
        )  # fmt: skip
        trainer = DeltawireTrainer(
            model=str(folder),
            args=_arguments(config, samples),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]}),
            processing_class=tokenizer,
            rollout_worker=inbox,
            weight_transfer=transfer,
            max_age=config.max_staleness,
            on_stale=inbox.stale,
            on_trained=inbox.trained,
            keep_inputs=min(config.sparsity.steps * config.micro_batches, 64),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(_StepCallback(self))
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        tensors = checkpoint_tensors(trainer.model)
        transfer.freeze({name: t for name, t in tensors.items() if name not in trained})
        return trainer, inbox, transfer

    # --- the order of things

    def start_at_rest(self) -> Identity:
        """Claim the channels, publish the first version of each, and wait until it is served."""
        takeover = self.config.publishing.takeover
        # weights first: a live trainer's weights head is always young, so a second trainer is refused before it claims
        first = self.transfer.publish_first(checkpoint_tensors(self.trainer.model), takeover=takeover)
        self.curriculum.open(takeover=takeover)
        self._publish_curriculum(self.curriculum_state, first, step=0)
        self._wait_for_version(first)
        return first

    def run(self) -> Summary:
        """Publish, evaluate, train, publish, evaluate, measure, summarize."""
        config = self.config
        first = self.start_at_rest()
        before = self._evaluate("before", first)
        trained_from = time.monotonic()
        self.trainer.train()
        seconds = time.monotonic() - trained_from
        last = self.transfer.flush()
        self._settle_curriculum()
        for env in self.envs:
            env.wait_for("stopping the rollout run", partial(self._stopped, env), config.peer_seconds)
        self._wait_for_version(last)
        after = self._evaluate("after", last)
        status = self.policy.get("/sync/status", SyncStatus)
        sparse = measure(self.trainer, config.sparsity, config.publishing.codec)
        self.close()
        result = summarize(self, before, after, status, sparse, seconds)
        (config.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        shown = ("success_before", "success_after", "versions", "digest_checks", "digest_failures", "total_seconds")
        self.emit("finished", **{k: result[k] for k in shown}, summary=config.out / "summary.json")
        return result

    def close(self) -> None:
        """Close both channels (their heads say so); safe to call twice."""
        self.behind.shutdown()
        try:
            self.publisher.close()
        finally:
            self.curriculum.close()

    def step_ended(self, step: int, logs: dict[str, Any]) -> None:
        """After an optimizer step: curriculum when it is due, and one event line."""
        every = self.config.curriculum.every
        if every and step % every == 0:
            self._settle_curriculum()
            self.curriculum_state = next_curriculum(
                self.curriculum_state, self.inbox.take_stats(), self.config.curriculum.floor
            )
            self.publishing = self.behind.submit(
                self._publish_curriculum, self.curriculum_state, self.publisher.identity, step
            )
        self.emit("step", **self._step_facts(step, logs))

    def _step_facts(self, step: int, logs: dict[str, Any]) -> dict[str, Any]:
        last = self.publisher.history[-1]
        picked = {
            "reward": "reward", "success": "success", "staleness": "sample/staleness_mean", "step_s": "perf/step_s",
            "wait_s": "perf/rollout_wait_s", "publish_s": "perf/weight_sync_s", "kl": "kl",
        }  # fmt: skip
        facts = {name: round(float(logs[key]), 4) for name, key in picked.items() if logs.get(key) is not None}
        return {
            "step": step, "steps": self.config.steps, **facts, "version": str(last.identity),
            "delta_bytes": last.payload if last.kind == "delta" else 0, "full_bytes": last.full,
            "changed": round(last.changed / last.elements, 4),
            "queue": self.inbox.rollout_buffer.qsize(),
        }  # fmt: skip

    # --- helpers

    def _ask_for_rollouts(self, env: Peer) -> None:
        config = self.config
        request = RunRequest(
            name=self.rollout_run,
            environment=config.environment,
            policy_url=config.policy_url,
            group_size=config.group_size,
            concurrent_groups=config.concurrent_groups,
            ready_groups=config.ready_groups,
            seed=config.seed,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            artifacts=config.run,
        )
        env.post("/v1/runs", request, RunInfo)
        self.emit("rollouts_asked_for", run=self.rollout_run, space=env.url)

    def _stopped(self, env: Peer) -> None:
        try:
            env.call("DELETE", f"/v1/runs/{self.rollout_run}")
        except InvalidRequest as error:
            if error.status != NOT_FOUND:  # a Space that lost its disk rolls nothing
                raise

    def _evaluate(self, when: str, version: Identity) -> Score | None:
        if not self.config.evaluation.episodes:
            return None
        score = evaluate(self.envs[0], self.config, f"eval-{when}-{self.publisher_tag}", version)
        self.emit("evaluated", when=when, **score._asdict())
        return score

    def _sync_of(self, identity: Identity) -> int | None:
        return self.transfer.sync_of(identity)

    def _committed(self, done: Published) -> None:
        self.transfer.committed(done)
        self._poke()  # once more: the look after the first may have been too early

    def _poke(self) -> None:
        try:
            self.policy.call("POST", "/sync/poke", seconds=2.0)
        except (PeerUnavailable, InvalidRequest):
            self.pokes_failed += 1  # a hint only, and the version is committed: followers poll by themselves

    def _publish_curriculum(self, curriculum: Curriculum, against: Identity | None, step: int) -> None:
        identity = self.curriculum.publish(curriculum, measured_against=against, step=step)
        self.curriculum_versions += 1
        self.emit("curriculum", version=str(identity), step=step)

    def _settle_curriculum(self) -> None:
        if self.publishing is not None:
            self.publishing.result()
            self.publishing = None

    def _wait_for_version(self, version: Identity) -> None:
        def check() -> str | None:
            status = self.policy.get("/sync/status", SyncStatus)
            if status.ready and status.version == str(version):
                return None
            return f"ready={status.ready} version={status.version} {status.reason} {status.last_error}"

        self.emit("waiting", what=f"version {version}", url=self.policy.url, seconds=self.config.peer_seconds)
        self.policy.wait_for(f"serving version {version}", check, self.config.peer_seconds)


class _StepCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the run of each logged step."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        if logs and "loss" in logs:
            self._run.step_ended(state.global_step, logs)


def _tail(steps: int) -> dict[str, Any]:
    """Constant for two thirds of the steps, then linear to a tenth of the rate."""
    return {"num_decay_steps": max(1, steps // 3), "min_lr_ratio": 0.1, "decay_type": "linear"}


def _arguments(config: TrainConfig, samples: int) -> AsyncGRPOConfig:
    on_gpu = torch.cuda.is_available()
    return AsyncGRPOConfig(
        output_dir=str(config.out / "trl"),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        dtype="float32",
        activation_checkpointing=on_gpu,
        token_budget=0,
        per_device_train_batch_size=max(1, samples // config.micro_batches),
        gradient_accumulation_steps=config.micro_batches,
        num_generations=config.group_size,
        max_steps=config.steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="warmup_stable_decay" if config.schedule == "tail" else "constant",
        lr_scheduler_kwargs=_tail(config.steps) if config.schedule == "tail" else {},
        weight_sync_steps=config.publishing.every,
        max_staleness=1_000_000,  # the adapter drops stale samples, so that the inbox hears of them
        temperature=config.temperature,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=config.seed,
        heartbeat_stale_after_s=config.peer_seconds,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="trackio" if config.report == "trackio" else "none",
        project="deltawire",
        run_name=config.out.name,
    )


def _prepare_model(config: TrainConfig, env: Peer, emit: Emit) -> Path:
    """The checkpoint folder to train from; `tiny` builds and warm-starts one from the environment's demonstrations."""
    if config.model != "tiny":
        return resolve(config.model)
    settings = config.warm_start
    answer = env.call(
        "GET", "/v1/demonstrations", environment=config.environment, count=settings.conversations, seed=config.seed
    )
    talks = [[Message.model_validate(m) for m in talk] for talk in answer["conversations"]]
    tokenizer = tiny_tokenizer(m.content for talk in talks for m in talk)
    model = tiny_model(tokenizer, config.seed)

    def progress(step: int, loss: float) -> None:
        if step % 10 == 0 or step == settings.steps:
            emit("warm_start", step=step, steps=settings.steps, loss=round(loss, 4))

    if settings.steps:
        warm_start(model, tokenizer, talks, settings, config.seed, progress)
    folder = config.out / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _alive(peer: Peer) -> str | None:
    peer.get("/v1/status", ServiceStatus)
    return None
