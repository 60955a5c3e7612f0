"""The torch engine: transformers models with continuous batching at token level, for tests and small machines.

One scheduler thread owns the model. At every step new sequences join (prefill), all running ones advance by one token
(decode), finished and cancelled ones leave. After new weights are applied, running sequences are prefilled again with
prompt and output so far, so that every later token's logprob is that of teacher forcing under its own version.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable, StopError
from sync.schema.base import Identity
from sync.schema.calls import ScoreSequence

from .base import Call, Generation, Scores, TensorPatch
from .forward import Passes
from .rows import Meter, Rows, ScoreJob, Running
from .sampling import sample, uniforms
from .weights import Weights

_SCORE_LOGITS = 1 << 26


class TorchEngine:
    """See `base.Engine` for the contract.

    dtype: auto | float32 | bfloat16, what the model computes in; the weights are the published values in any case.
    max_slots sequences run at once, each of at most max_len tokens; max_queued more may wait (score sequences count).
    prefill_tokens bounds the padded tokens of one prefill pass (a longer sequence is prefilled alone). A call may ask
    for more output than max_len leaves room for: it then ends there with finish reason `length`.
    """

    def __init__(
        self,
        *,
        max_slots: int = 256,
        max_len: int = 1024,
        max_queued: int = 4096,
        prefill_tokens: int = 16384,
        dtype: str = "auto",
        device: str = "auto",
        pause_seconds: float = 120.0,
    ) -> None:
        self.max_len = max_len
        self.failure = ""
        self._max_slots, self._max_queued, self._prefill_tokens = max_slots, max_queued, prefill_tokens
        self._pause_seconds = pause_seconds
        self._dtype = dtype
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._tokenizer: Any = None
        self._weights: Weights | None = None
        self._passes: Passes | None = None
        self._identity: Identity | None = None
        self._ends: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)
        self._rows = Rows(max_slots)
        self._meter = Meter()
        self._waiting: deque[Running] = deque()
        self._jobs: deque[ScoreJob] = deque()
        self._changed = threading.Condition()
        self._paused, self._idle, self._stale, self._stop = True, False, False, False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    # Requests

    @property
    def tokenizer(self) -> Any:
        """The loaded checkpoint's tokenizer."""
        if self._tokenizer is None:
            raise PeerUnavailable("the engine holds no weights yet; wait until /ready answers 200")
        return self._tokenizer

    def generate(self, calls: Sequence[Call]) -> list[Future[Generation]]:
        """See `base.Engine.generate`."""
        accepted, futures = [], []
        for call in calls:
            future: Future[Generation] = Future()
            futures.append(future)
            try:
                self._check_prompt(call.ids)
            except InvalidRequest as error:
                future.set_exception(error)
                continue
            sampling = call.sampling
            seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
            limit = min(sampling.max_tokens, self.max_len - len(call.ids))
            accepted.append(Running(list(call.ids), sampling, seed, limit, future))
        with self._changed:
            self._admit(len(accepted))
            self._waiting.extend(accepted)
            self._changed.notify_all()
        return futures

    def score(self, sequences: Sequence[ScoreSequence], temperature: float) -> Future[Scores]:
        """See `base.Engine.score`."""
        for number, sequence in enumerate(sequences):
            self._check_ids(sequence.ids, f"sequence {number}")
            if len(sequence.ids) > self.max_len or sequence.start >= len(sequence.ids):
                raise InvalidRequest(
                    f"sequence {number} has {len(sequence.ids)} ids and start {sequence.start}; at most "
                    f"{self.max_len} ids (setting max_len) and a start below their number are possible",
                    code="sequence_too_long" if len(sequence.ids) > self.max_len else "invalid_request",
                )
        most = max(1, min(self._prefill_tokens, _SCORE_LOGITS // self._loaded().vocabulary))
        job = ScoreJob(sequences, temperature, Future(), most)
        with self._changed:
            self._admit(len(sequences))
            self._jobs.append(job)
            self._changed.notify_all()
        return job.future

    def _loaded(self) -> Passes:
        if self._passes is None:
            raise PeerUnavailable("the engine holds no weights yet; wait until /ready answers 200")
        return self._passes

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidRequest(
                "the prompt is empty: send messages, or ids in prefix_ids", code="empty_prompt"
            )
        if len(ids) >= self.max_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; at most {self.max_len - 1} leave room for output (setting "
                f"max_len = {self.max_len}); prompts are never cut",
                code="prompt_too_long",
            )
        self._check_ids(ids, "the prompt")

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        vocabulary = self._loaded().vocabulary
        if max(ids) >= vocabulary or min(ids) < 0:
            raise InvalidRequest(
                f"{what} holds id {max(ids)}, the vocabulary ends at {vocabulary - 1}; send ids of this model's "
                "tokenizer",
                code="unknown_token",
            )

    def _admit(self, new: int) -> None:
        self._require_alive()
        queued = self._queued()
        if queued + new > self._max_queued:
            raise InvalidRequest(
                f"{queued} calls are waiting and {new} more would exceed {self._max_queued} (setting max_queued); "
                "try again later or send fewer",
                status=429,
                code="overloaded",
            )

    def _queued(self) -> int:
        return len(self._waiting) + sum(len(job.sequences) for job in self._jobs)

    def _require_alive(self) -> None:
        if self.failure:
            raise StopError(self.failure)

    # Weights (the follower's side)

    def load(self, folder: Path, identity: Identity) -> None:
        """See `base.Engine.load`. Running sequences go on under the new weights when the model has the same shape."""
        from transformers import AutoTokenizer

        self.pause()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._identity, self._stale = identity, True
        if self._weights is not None and self._weights.same_shape(folder):
            self._weights.refill(folder)
        else:
            self._weights = self._passes = None  # freed first: two models may not fit
            self._fail_all(
                InvalidRequest(
                    "the model changed its shape while this call ran; send it again",
                    status=503,
                    code="model_changed",
                )
            )
            weights = Weights(folder, dtype=self._dtype, device=self._device)
            self._passes = Passes(weights.model, self._max_slots, self.max_len)
            self._weights = weights
        self._ends = _end_ids(self._weights.config, tokenizer, folder)
        self._tokenizer = tokenizer

    def pause(self) -> None:
        """See `base.Engine.pause`."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._idle or bool(self.failure), self._pause_seconds):
                raise PeerUnavailable(
                    f"the engine's scheduler did not pause within {self._pause_seconds:g} s"
                )
            self._require_alive()

    def apply(self, patches: Mapping[str, TensorPatch], identity: Identity) -> None:
        """See `base.Engine.apply`."""
        weights = self._held()
        weights.apply(patches)
        self._identity, self._stale = identity, True

    def read(self, name: str, index: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        """See `base.Engine.read`."""
        return self._held().read(name, index)

    def resume(self) -> None:
        """See `base.Engine.resume`."""
        self._held()
        with self._changed:
            self._require_alive()
            self._paused = False
            self._changed.notify_all()

    def _held(self) -> Weights:
        if not (self._paused and self._idle) or self._weights is None:
            raise StopError(
                "the engine's weights are touched only between pause and resume, and after a load"
            )
        return self._weights

    def status(self) -> dict[str, float | int | str]:
        """See `base.Engine.status`."""
        meter = self._meter
        with self._changed:
            return {
                "active": len(self._rows),
                "queued": self._queued(),
                "max_slots": self._max_slots,
                "max_len": self.max_len,
                "output_tokens": meter.output_tokens,
                "prompt_tokens": meter.prompt_tokens,
                "tokens_per_second": round(meter.rate(), 1),
                "steps": meter.steps,
                "recomputed_tokens": meter.recomputed_tokens,
                "scored_tokens": meter.scored_tokens,
                "device": self._device,
                "dtype": "" if self._weights is None else str(self._weights.compute).removeprefix("torch."),
                "failure": self.failure,
            }

    def close(self) -> None:
        """See `base.Engine.close`."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(self._pause_seconds)

    # The scheduler thread

    def _main(self) -> None:
        reason: DeltawireError = PeerUnavailable(
            "the engine is shutting down; send the call to another replica"
        )
        try:
            with torch.inference_mode():
                while self._wait():
                    self._step()
        except Exception as error:  # noqa: BLE001 - handed to every waiting caller, to new ones and to /ready
            reason = StopError(
                f"the engine's scheduler stopped: {type(error).__name__}: {error}; restart the Space"
            )
        with self._changed:
            self.failure = str(reason)
            self._fail_all(reason)
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False means stop. Paused or sleeping, no pass runs: `_idle`."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._stop
                    or (not self._paused and bool(self._rows.sequences or self._waiting or self._jobs))
                )
            )
            self._idle = False
            return not self._stop

    def _fail_all(self, reason: Exception) -> None:
        for sequence in [*self._rows.clear(), *self._waiting]:
            sequence.fail(reason)
        for job in self._jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(reason)
        self._waiting.clear()
        self._jobs.clear()

    def _step(self) -> None:
        passes, identity = self._loaded(), self._identity
        if identity is None:
            raise RuntimeError("resumed without an identity")
        self._meter.steps += 1
        if self._stale:
            self._requeue(passes)
        self._leave(
            np.array([s.future.cancelled() for s in self._rows.sequences], dtype=bool),
            lambda s: s.fail(_GONE),
        )
        if joining := self._take():
            self._prefill(passes, joining, identity)
        if len(self._rows):
            n = len(self._rows)
            logits = passes.decode(self._rows.last[:n], self._rows.length[:n])
            self._rows.length[:n] += 1
            self._advance(logits, 0)
        if self._jobs:
            self._score(passes, self._jobs[0], identity)

    def _requeue(self, passes: Passes) -> None:
        """Keys computed with older weights are worthless: run these sequences through prefill again, first of all."""
        self._stale = False
        passes.cache.clear()
        with self._changed:
            running = self._rows.clear()
            self._meter.recomputed_tokens += sum(len(s.prompt) + len(s.output) for s in running)
            self._waiting.extendleft(reversed(running))

    def _take(self) -> list[Running]:
        """The waiting sequences that fit into free slots and into one prefill pass."""
        taken: list[Running] = []
        longest = 0
        with self._changed:
            while self._waiting and len(self._rows) + len(taken) < self._max_slots:
                sequence = self._waiting[0]
                longest = max(longest, len(sequence.prompt) + len(sequence.output))
                if taken and longest * (len(taken) + 1) > self._prefill_tokens:
                    break
                self._waiting.popleft()
                if not sequence.future.cancelled():
                    taken.append(sequence)
        return taken

    def _prefill(self, passes: Passes, joining: Sequence[Running], identity: Identity) -> None:
        first = len(self._rows)
        for sequence in joining:
            sequence.under(identity)
        with self._changed:
            self._rows.join(joining)
        self._meter.prompt_tokens += sum(len(s.prompt) for s in joining if not s.output)
        self._advance(passes.prefill(first, [s.ids for s in joining]), first)

    def _advance(self, logits: torch.Tensor, first: int) -> None:
        """Sample one token for rows first.. and let the finished leave."""
        rows, n = self._rows, len(self._rows)
        noise = uniforms(rows.seed[first:n], rows.count[first:n].astype(np.uint64))
        ids, logprobs = sample(
            logits,
            torch.from_numpy(rows.temperature[first:n]).to(logits.device),
            torch.from_numpy(noise).to(logits.device),
        )
        tokens, values = ids.cpu().numpy(), logprobs.cpu().numpy()
        bad = np.zeros(n, dtype=bool)
        bad[first:] = ~np.isfinite(values)
        if bad.any():
            self._leave(bad, lambda s: s.fail(_not_finite(self._identity)))
            tokens, values = tokens[~bad[first:]], values[~bad[first:]]
            n = len(rows)
        for sequence, token, value in zip(
            rows.sequences[first:], tokens.tolist(), values.tolist(), strict=True
        ):
            sequence.output.append(token)
            sequence.logprobs.append(value)
        rows.last[first:n] = tokens
        rows.count[first:n] += 1
        self._meter.output(len(tokens))
        ended = np.isin(rows.last[:n], self._ends) | (rows.count[:n] >= rows.limit[:n])
        ends = set(self._ends.tolist())
        self._leave(ended, lambda s: s.finish("stop" if s.output[-1] in ends else "length"))

    def _leave(self, gone: np.ndarray[Any, Any], answer: Callable[[Running], None]) -> None:
        if not gone.any():
            return
        with self._changed:
            leaving = [self._rows.sequences[row] for row in np.flatnonzero(gone)]
            kept = np.flatnonzero(~gone)
            if kept.size:
                self._loaded().cache.keep(kept, int(self._rows.length[kept].max()))
            self._rows.keep(kept)
        for sequence in leaving:
            answer(sequence)

    def _score(self, passes: Passes, job: ScoreJob, identity: Identity) -> None:
        """One pass of the oldest score job."""
        job.under(identity)
        taken = job.batch(self._prefill_tokens)
        prefixes = [job.sequences[i].ids[: end - 1] for i, _, end in taken]
        rows = np.concatenate([np.full(end - start, row) for row, (_, start, end) in enumerate(taken)])
        places = np.concatenate([np.arange(start, end) for _, start, end in taken])
        wanted = np.concatenate([np.array(job.sequences[i].ids[start:end]) for i, start, end in taken])
        logits = passes.score(prefixes, rows, places - 1)
        logprobs = torch.log_softmax(logits / job.temperature, dim=-1)
        target = torch.from_numpy(wanted).to(logits.device)
        values = iter(logprobs.gather(1, target[:, None])[:, 0].cpu().tolist())
        for i, start, end in taken:
            job.logprobs[i] += [next(values) for _ in range(end - start)]
        self._meter.scored_tokens += len(wanted)
        if job.future.cancelled() or not job.todo:
            with self._changed:
                self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                self._answer(job, identity)

    def _answer(self, job: ScoreJob, identity: Identity) -> None:
        if all(np.isfinite(values).all() for values in job.logprobs):
            job.future.set_result(Scores(identity, job.logprobs))
        else:
            job.future.set_exception(_not_finite(identity))


_GONE = PeerUnavailable("the caller is gone")


def _not_finite(identity: Identity | None) -> InvalidRequest:
    return InvalidRequest(
        f"version {identity} gives logits that are not finite here; roll the weights back or publish better ones",
        status=500,
        code="not_finite",
    )


def _end_ids(config: Any, tokenizer: Any, folder: Path) -> np.ndarray[Any, Any]:
    """The ids that end a sequence: the tokenizer's end token, the model's and the generation config's."""
    from transformers import GenerationConfig

    found = {tokenizer.eos_token_id}
    sources = [config.get_text_config()]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder))
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found |= set(value) if isinstance(value, list) else {value}
    return np.array(sorted(i for i in found if i is not None), dtype=np.int64)
