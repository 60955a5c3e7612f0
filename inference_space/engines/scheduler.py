"""Continuous batching at token level: one thread that owns the passes over a model.

At every step new sequences join (prefill), all running ones advance by one token (decode), finished and
cancelled ones leave. After the weights changed, running sequences are prefilled again with prompt and output so
far, so that every later token's logprob is that of teacher forcing under its own version.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sync.errors import DeltawireError, PeerUnavailable, StopError
from sync.schema.base import Identity

from .base import Scores
from .forward import Passes
from .limits import check_queue, model_changed, not_finite
from .rows import Meter, Rows, Running, ScoreJob
from .sampling import sample, uniforms

_GONE = PeerUnavailable("the caller is gone")


class Scheduler:
    """Runs sequences and score jobs; starts paused and without a model, see `install`.

    `failure` says why the thread ended; then every call fails with StopError.
    """

    def __init__(self, *, max_slots: int, max_queued: int, prefill_tokens: int, pause_seconds: float) -> None:
        self.failure = ""
        self.meter = Meter()
        self._max_slots, self._max_queued = max_slots, max_queued
        self._prefill_tokens, self._pause_seconds = prefill_tokens, pause_seconds
        self._passes: Passes | None = None
        self._identity: Identity | None = None
        self._ends: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)
        self._rows = Rows(max_slots)
        self._waiting: deque[Running] = deque()
        self._jobs: deque[ScoreJob] = deque()
        self._changed = threading.Condition()
        self._paused, self._idle, self._stale, self._stop = True, False, False, False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    # Any thread

    def submit(self, passes: Passes, sequences: Sequence[Running], jobs: Sequence[ScoreJob] = ()) -> None:
        """Queue all, or none (InvalidRequest): they exceed the queue, or were checked against other `passes`."""
        new = len(sequences) + sum(len(job.sequences) for job in jobs)
        with self._changed:
            self._require_alive()
            if passes is not self._passes:
                raise model_changed()
            check_queue(self._queued(), new, self._max_queued)
            self._waiting.extend(sequences)
            self._jobs.extend(jobs)
            self._changed.notify_all()

    def pause(self) -> None:
        """Return when no pass runs. Raises PeerUnavailable at the deadline."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._idle or bool(self.failure), self._pause_seconds):
                raise PeerUnavailable(
                    f"the engine's scheduler did not pause within {self._pause_seconds:g} s (setting pause_seconds)"
                )
            self._require_alive()

    @property
    def paused(self) -> bool:
        """True when no pass runs and none will start before `resume`."""
        with self._changed:
            return self._paused and self._idle

    def install(self, passes: Passes | None, ends: np.ndarray[Any, Any]) -> None:
        """While paused: run this model from now on; what runs or waits on another one fails."""
        with self._changed:
            if passes is not self._passes:
                self._fail_all(model_changed())
            self._passes, self._ends = passes, ends

    def changed_weights(self, identity: Identity) -> None:
        """While paused: tokens sampled from now on are of this version."""
        self._identity, self._stale = identity, True

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._require_alive()
            self._paused = False
            self._changed.notify_all()

    def counts(self) -> dict[str, float | int | str]:
        """Counters for the engine's status."""
        with self._changed:
            return {
                "active": len(self._rows),
                "queued": self._queued(),
                "output_tokens": self.meter.output_tokens,
                "prompt_tokens": self.meter.prompt_tokens,
                "tokens_per_second": round(self.meter.rate(), 1),
                "steps": self.meter.steps,
                "recomputed_tokens": self.meter.recomputed_tokens,
                "scored_tokens": self.meter.scored_tokens,
                "failure": self.failure,
            }

    def close(self) -> None:
        """Stop after the pass under way and fail what is not answered."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(self._pause_seconds)

    def _queued(self) -> int:
        return len(self._waiting) + sum(len(job.sequences) for job in self._jobs)

    def _require_alive(self) -> None:
        if self.failure:
            raise StopError(self.failure)

    # The scheduler's own thread

    def _main(self) -> None:
        reason: DeltawireError = PeerUnavailable("the engine is shutting down; send the call to another replica")
        try:
            with torch.inference_mode():
                while self._wait():
                    self._step()
        except Exception as error:  # noqa: BLE001 - handed to every waiting caller, to new ones and to /ready
            text = f"the engine's scheduler stopped: {type(error).__name__}: {error}; restart the Space"
            reason = StopError(text)
        with self._changed:
            self.failure = str(reason)
            self._fail_all(reason)
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False means stop. While it sleeps, no pass runs (`_idle`)."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._stop or (not self._paused and bool(self._rows.sequences or self._waiting or self._jobs))
            )
            self._idle = False
            return not self._stop

    def _fail_all(self, reason: Exception) -> None:
        for sequence in [*self._rows.clear(), *self._waiting]:
            sequence.fail(reason)
        for job in self._jobs:
            job.fail(reason)
        self._waiting.clear()
        self._jobs.clear()

    def _step(self) -> None:
        passes, identity = self._passes, self._identity
        if passes is None or identity is None:
            raise RuntimeError("resumed without a model")
        self.meter.steps += 1
        if self._stale:
            self._requeue(passes)
        cancelled = np.array([s.future.cancelled() for s in self._rows.sequences], dtype=bool)
        self._leave(passes, cancelled, lambda s: s.fail(_GONE))
        if joining := self._take():
            self._prefill(passes, joining, identity)
        if n := len(self._rows):
            logits = passes.decode(self._rows.last[:n], self._rows.length[:n])
            self._rows.length[:n] += 1
            self._advance(passes, logits, 0)
        if self._jobs:
            self._score(passes, self._jobs[0], identity)

    def _requeue(self, passes: Passes) -> None:
        """Keys of older weights are worthless: these sequences pass through prefill again, before all others."""
        self._stale = False
        passes.cache.clear()
        with self._changed:
            again = self._rows.clear()
            self.meter.recomputed_tokens += sum(len(s.prompt) + len(s.output) for s in again)
            self._waiting.extendleft(reversed(again))

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
        self.meter.prompt_tokens += sum(len(s.prompt) for s in joining if not s.output)
        self._advance(passes, passes.prefill(first, [s.ids for s in joining]), first)

    def _advance(self, passes: Passes, logits: torch.Tensor, first: int) -> None:
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
            passes.cache.wipe(np.flatnonzero(bad))
            self._leave(passes, bad, lambda s: s.fail(not_finite(self._identity)))
            tokens, values = tokens[~bad[first:]], values[~bad[first:]]
            n = len(rows)
        for sequence, token, value in zip(rows.sequences[first:], tokens.tolist(), values.tolist(), strict=True):
            sequence.output.append(token)
            sequence.logprobs.append(value)
        rows.last[first:n] = tokens
        rows.count[first:n] += 1
        self.meter.output(len(tokens))
        stopped = np.isin(tokens, self._ends)
        ended = np.zeros(n, dtype=bool)
        ended[first:] = stopped | (rows.count[first:n] >= rows.limit[first:n])
        for row in np.flatnonzero(stopped):
            rows.sequences[first + row].stopped = True
        for place, sequence in enumerate(rows.sequences[first:], start=first):
            if sequence.stops is not None and sequence.met_stop():
                ended[place] = True
        self._leave(passes, ended, lambda s: s.finish())

    def _leave(self, passes: Passes, gone: np.ndarray[Any, Any], answer: Callable[[Running], None]) -> None:
        if not gone.any():
            return
        kept = np.flatnonzero(~gone)
        leaving = [self._rows.sequences[row] for row in np.flatnonzero(gone)]
        if kept.size:
            passes.cache.keep(kept, int(self._rows.length[kept].max()))
        with self._changed:
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
        logprobs = torch.log_softmax(passes.score(prefixes, rows, places - 1) / job.temperature, dim=-1)
        target = torch.from_numpy(wanted).to(logprobs.device)
        values = iter(logprobs.gather(1, target[:, None])[:, 0].cpu().tolist())
        for i, start, end in taken:
            job.logprobs[i] += [next(values) for _ in range(end - start)]
        self.meter.scored_tokens += len(wanted)
        if job.future.cancelled() or not job.todo:
            with self._changed:
                self._jobs.popleft()
            if all(np.isfinite(v).all() for v in job.logprobs):
                job.finish(Scores(identity, job.logprobs))
            else:
                job.fail(not_finite(identity))
