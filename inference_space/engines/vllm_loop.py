"""The one thread that steps vLLM's core: admits calls, gathers what it samples, stops between two steps.

Ours is the queue (vLLM gets no more calls than run at once, so what waits has touched no weights); ours are the
versions: a step is taken under one version, which names every token of it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence

from sync.errors import DeltawireError, InvalidRequest, PeerUnavailable, StopError
from sync.schema.base import Identity

from .base import Scores
from .limits import check_queue, model_changed, not_finite
from .rows import Meter, Running, ScoreJob
from .vllm_core import Core, Delta

KV_POLICIES = ("recompute", "drain", "salt")


class Loop:
    """Runs calls and scores on a core; starts paused and without one, see `install`.

    kv: what becomes of keys computed with older weights. `recompute`: dropped, running calls are prefilled again, so
    that every later token is exactly the new version's. `drain`: a pause first lets running calls end, under the
    version they began with. `salt`: running calls keep theirs, new ones share none with older versions.
    `failure` says why the thread ended; then every call fails with StopError.
    """

    def __init__(self, *, max_slots: int, max_queued: int, pause_seconds: float, kv: str) -> None:
        self.failure = ""
        self.meter = Meter()
        self._max_slots, self._max_queued, self._pause_seconds, self._kv = max_slots, max_queued, pause_seconds, kv
        self._core: Core | None = None
        self._identity: Identity | None = None
        self._ends: list[int] = []
        self._names = itertools.count()
        self._waiting: deque[Running] = deque()
        self._running: dict[str, Running] = {}
        self._jobs: deque[ScoreJob] = deque()
        self._scoring: dict[str, int] = {}
        self._spoiled = False
        self._unread: set[str] = set()
        self._changed = threading.Condition()
        self._paused, self._idle, self._stop = True, False, False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    # Any thread

    def submit(self, core: Core, calls: Sequence[Running], jobs: Sequence[ScoreJob] = ()) -> None:
        """Queue all, or none (InvalidRequest): they exceed the queue, or were checked against another `core`."""
        new = len(calls) + sum(len(job.sequences) for job in jobs)
        with self._changed:
            self._require_alive()
            if core is not self._core:
                raise model_changed()
            check_queue(self._queued(), new, self._max_queued)
            self._waiting.extend(calls)
            self._jobs.extend(jobs)
            self._changed.notify_all()

    def pause(self) -> None:
        """Return when no step is taken (drain: and no call is under way). Raises PeerUnavailable at the deadline."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._idle or bool(self.failure), self._pause_seconds):
                raise PeerUnavailable(
                    f"vLLM did not pause within {self._pause_seconds:g} s (setting pause_seconds; kv_policy "
                    f"is {self._kv})"
                )
            self._require_alive()

    @property
    def paused(self) -> bool:
        """True when no step is taken and none will be before `resume`."""
        with self._changed:
            return self._paused and self._idle

    def install(self, core: Core | None, ends: Sequence[int]) -> None:
        """While paused: run this core from now on; what runs or waits on another one fails."""
        with self._changed:
            if core is not self._core:
                self._fail_all(model_changed())
            self._core, self._ends = core, list(ends)

    def changed_weights(self, identity: Identity) -> None:
        """While paused: tokens sampled from now on are of this version."""
        core = self._core
        assert core is not None
        self._look_at_keys(core, list(self._unread))
        self._restart_score(core)  # one answer has one version
        self._identity = identity
        if self._kv != "salt":
            self._forget_keys(core)

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
                "active": len(self._running),
                "queued": self._queued(),
                "output_tokens": self.meter.output_tokens,
                "prompt_tokens": self.meter.prompt_tokens,
                "tokens_per_second": round(self.meter.rate(), 1),
                "steps": self.meter.steps,
                "recomputed_tokens": self.meter.recomputed_tokens,
                "scored_tokens": self.meter.scored_tokens,
                "kv_policy": self._kv,
                "failure": self.failure,
            }

    def close(self) -> None:
        """Stop after the step under way and fail what is not answered."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(self._pause_seconds)

    def _queued(self) -> int:
        return len(self._waiting) + sum(len(job.sequences) for job in self._jobs)

    def _require_alive(self) -> None:
        if self.failure:
            raise StopError(self.failure)

    def _restart_score(self, core: Core) -> None:
        self._forget(core, list(self._scoring))
        self._scoring.clear()

    def _forget(self, core: Core, names: Sequence[str]) -> None:
        """Abort calls in the core."""
        self._look_at_keys(core, [name for name in names if name in self._unread])
        core.abort(names)
        self._unread.difference_update(names)

    def _look_at_keys(self, core: Core, names: Sequence[str]) -> None:
        """What a call without a token since its prefill began has left in its blocks of keys, nobody has looked at."""
        if names and not self._spoiled:
            self._spoiled = not core.keys_finite(names)

    def _forget_keys(self, core: Core) -> None:
        core.forget_keys(zero=self._spoiled)
        self.meter.recomputed_tokens += sum(len(c.prompt) + len(c.output) for c in self._running.values())
        self._unread.update(self._running)
        self._spoiled = False

    # The loop's own thread

    def _main(self) -> None:
        reason: DeltawireError = PeerUnavailable("the engine is shutting down; send the call to another replica")
        try:
            while self._wait():
                self._step()
        except Exception as error:  # noqa: BLE001 - handed to every waiting caller, to new ones and to /ready
            text = f"vLLM stopped: {type(error).__name__}: {error}; restart the Space"
            reason = StopError(text)
        with self._changed:
            self.failure = str(reason)
            self._fail_all(reason)
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False means stop. While it sleeps, no step is taken (`_idle`)."""
        with self._changed:
            if not self._busy():
                self._idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stop or self._busy())
                self._idle = False
            return not self._stop

    def _busy(self) -> bool:
        under_way = bool(self._running or self._scoring)
        if self._paused:
            return under_way and self._kv == "drain"
        return under_way or bool(self._waiting or self._jobs)

    def _fail_all(self, reason: Exception) -> None:
        if self._core is not None and not self.failure:
            self._core.abort([*self._running, *self._scoring])
        for call in [*self._running.values(), *self._waiting]:
            call.fail(reason)
        for job in self._jobs:
            job.fail(reason)
        for held in (self._running, self._waiting, self._scoring, self._jobs, self._unread):
            held.clear()

    def _step(self) -> None:
        core, identity = self._core, self._identity
        if core is None or identity is None:
            raise RuntimeError("resumed without a model")
        self.meter.steps += 1
        gone = [name for name, call in self._running.items() if call.future.cancelled()]
        self._leave(core, gone)
        if self._spoiled:  # the next owner of a block of keys attends past what the last one left in it
            self._restart_score(core)
            self._forget_keys(core)
        if not self._paused:
            self._admit(core)
            self._begin_score(core, identity)
        made = 0
        for delta in core.step():
            if delta.name in self._scoring:
                self._scored(core, identity, delta)
            elif delta.name in self._running:
                self._took(core, identity, delta)
                made += len(delta.ids)
        if made:
            self.meter.output(made)

    def _leave(self, core: Core, names: Sequence[str]) -> None:
        """Take calls that nobody waits for out of the core."""
        if names:
            self._forget(core, names)
            with self._changed:
                for name in names:
                    del self._running[name]

    def _admit(self, core: Core) -> None:
        salt = str(self._identity) if self._kv == "salt" else ""
        while True:
            with self._changed:
                if not self._waiting or len(self._running) >= self._max_slots:
                    return
                call, name = self._waiting.popleft(), f"call-{next(self._names)}"
                if call.future.cancelled():
                    continue
                self._running[name] = call
            self._unread.add(name)
            ends = self._ends
            try:
                core.add(name, call.prompt, temperature=call.temperature, tokens=call.limit, ends=ends, salt=salt)
            except ValueError as error:
                self._unread.discard(name)
                with self._changed:
                    del self._running[name]
                call.fail(InvalidRequest(f"vLLM refuses the call: {error}", code="unsupported"))
                continue
            self.meter.prompt_tokens += len(call.prompt)

    def _took(self, core: Core, identity: Identity, delta: Delta) -> None:
        """Tokens of a call."""
        call = self._running[delta.name]
        self._unread.discard(delta.name)
        call.under(identity)
        call.output += delta.ids
        call.logprobs += delta.logprobs
        finite = len(delta.logprobs) == len(delta.ids) and all(map(math.isfinite, delta.logprobs))
        stopped = finite and call.met_stop()
        if delta.reason is None and finite and not stopped:
            return
        if delta.reason is None:
            core.abort([delta.name])
        with self._changed:
            del self._running[delta.name]
        if not finite:
            self._spoiled = True
            call.fail(not_finite(identity))
        elif stopped or delta.reason in ("stop", "length"):
            call.stopped = stopped or delta.reason == "stop"
            call.finish()
        else:
            call.fail(InvalidRequest(f"vLLM ended the call ({delta.reason})", status=500, code="internal"))

    def _begin_score(self, core: Core, identity: Identity) -> None:
        """One job at a time: it has one temperature."""
        if self._scoring or not self._jobs:
            return
        job = self._jobs[0]
        if job.future.cancelled():
            with self._changed:
                self._jobs.popleft()
            return
        job.under(identity)
        core.temper(job.temperature)
        for number, sequence in enumerate(job.sequences):
            name = f"score-{next(self._names)}"
            self._scoring[name] = number
            self._unread.add(name)
            core.add_score(name, sequence.ids)

    def _scored(self, core: Core, identity: Identity, delta: Delta) -> None:
        """A sequence that was read."""
        if delta.prompt is None:
            return
        job, number = self._jobs[0], self._scoring.pop(delta.name)
        self._unread.discard(delta.name)
        job.logprobs[number] = delta.prompt[job.sequences[number].start - 1 :]
        self.meter.scored_tokens += len(job.logprobs[number])
        if delta.reason is None:
            core.abort([delta.name])
        if job.future.cancelled():
            self._restart_score(core)
        if self._scoring:
            return
        with self._changed:
            self._jobs.popleft()
        if all(math.isfinite(value) for values in job.logprobs for value in values):
            job.finish(Scores(identity, job.logprobs))
        else:
            self._spoiled = True
            job.fail(not_finite(identity))
