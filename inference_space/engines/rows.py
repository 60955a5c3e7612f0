"""Bookkeeping of the torch engine, without a model: sequences, the per-row arrays, score jobs, counters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sync.schema.base import Identity
from sync.schema.calls import ScoreSequence, VersionSpan

from .base import Generation, Scores


class StopTexts:
    """Watches an output for texts that end it. `found` is the first of them to be complete, "" before."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.found = ""
        self._tokenizer, self._texts = tokenizer, texts
        self._window = max(len(text.encode()) for text in texts) + 1
        """Ids that can hold a text: each one but a special token stands for a byte at least."""

    @classmethod
    def of(cls, tokenizer: Any, texts: Sequence[str]) -> StopTexts | None:
        """None where no text can end the call."""
        return cls(tokenizer, texts) if texts else None

    def ends(self, output: Sequence[int]) -> bool:
        """True when the newest id of `output` completes a stop text."""
        recent = self._tokenizer.decode(list(output[-self._window :]), skip_special_tokens=False)
        at = {text: recent.find(text) for text in self._texts}
        self.found = min((text for text in at if at[text] >= 0), key=lambda text: at[text], default="")
        return bool(self.found)


@dataclass(eq=False)
class Running:
    """One call under way. `limit` is the most output tokens; spans before `open_at` are closed."""

    prompt: list[int]
    temperature: float
    seed: int
    limit: int
    future: Future[Generation]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    open_at: int = 0
    identity: Identity | None = None
    stopped: bool = False
    stops: StopTexts | None = None

    @property
    def ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    def under(self, identity: Identity | None) -> None:
        """From here on tokens are sampled under `identity`; closes the span before."""
        end = len(self.output)
        if end > self.open_at and self.identity != identity:
            self.spans.append(VersionSpan(version=str(self.identity), start=self.open_at, end=end))
            self.open_at = end
        self.identity = identity

    def met_stop(self) -> bool:
        """True when the newest id completes a stop text; then the call is `stopped`."""
        self.stopped = self.stopped or (self.stops is not None and self.stops.ends(self.output))
        return self.stopped

    def finish(self) -> None:
        """Answer the call: finish reason `stop` after an end token or a stop text (`stopped`), else `length`."""
        self.under(None)
        if self.future.set_running_or_notify_cancel():
            reason = "stop" if self.stopped else "length"
            found = self.stops.found if self.stops is not None else ""
            self.future.set_result(Generation(self.output, self.logprobs, tuple(self.spans), reason, found))

    def fail(self, error: Exception) -> None:
        """Refuse the call."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Rows:
    """The running sequences, row i of every array belonging to `sequences[i]`; one entry per slot.

    length: tokens whose keys are in the slot; last: the newest token, whose keys are not; count: output tokens.
    """

    def __init__(self, slots: int) -> None:
        self.sequences: list[Running] = []
        self.length = np.zeros(slots, dtype=np.int64)
        self.last = np.zeros(slots, dtype=np.int64)
        self.count = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.zeros(slots, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequences: Sequence[Running]) -> None:
        """Append sequences in the rows after the last; their keys are being filled by a prefill."""
        for row, sequence in enumerate(sequences, start=len(self.sequences)):
            self.length[row] = len(sequence.prompt) + len(sequence.output)
            self.count[row] = len(sequence.output)
            self.limit[row] = sequence.limit
            self.seed[row] = sequence.seed
            self.temperature[row] = sequence.temperature
        self.sequences.extend(sequences)

    def keep(self, rows: np.ndarray[Any, Any]) -> None:
        """Drop every row not in `rows` (strictly increasing) and close the holes."""
        for array in (self.length, self.last, self.count, self.limit, self.seed, self.temperature):
            array[: len(rows)] = array[rows]
        self.sequences = [self.sequences[row] for row in rows]

    def clear(self) -> list[Running]:
        """Drop every row; returns the sequences."""
        running, self.sequences = self.sequences, []
        return running


@dataclass(eq=False)
class ScoreJob:
    """One score request; `todo` holds (sequence, from, to): positions in ids whose logprob is wanted."""

    sequences: Sequence[ScoreSequence]
    temperature: float
    future: Future[Scores]
    most: int
    identity: Identity | None = None
    todo: deque[tuple[int, int, int]] = field(default_factory=deque)
    logprobs: list[list[float]] = field(default_factory=list)

    def under(self, identity: Identity) -> None:
        """Start, or start again when the weights changed: one answer has one version."""
        if self.identity == identity:
            return
        self.identity = identity
        self.logprobs = [[] for _ in self.sequences]
        self.todo = deque(
            (i, at, min(at + self.most, len(s.ids)))
            for i, s in enumerate(self.sequences)
            for at in range(s.start, len(s.ids), self.most)
        )

    def batch(self, tokens: int) -> list[tuple[int, int, int]]:
        """Take ranges of at most `tokens` padded tokens in prefixes and at most `most` positions together."""
        taken = [self.todo.popleft()]
        longest, wanted = taken[0][2], taken[0][2] - taken[0][1]
        while self.todo:
            _, start, end = self.todo[0]
            longest, wanted = max(longest, end), wanted + end - start
            if longest * (len(taken) + 1) > tokens or wanted > self.most:
                break
            taken.append(self.todo.popleft())
        return taken

    def finish(self, scores: Scores) -> None:
        """Answer the request."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(scores)

    def fail(self, error: Exception) -> None:
        """Refuse the request."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Meter:
    """Counters, and output tokens per second over the last `window` seconds."""

    def __init__(self, window: float = 10.0) -> None:
        self.output_tokens = self.prompt_tokens = self.recomputed_tokens = self.scored_tokens = self.steps = 0
        self._window = window
        self._recent: deque[tuple[float, int]] = deque()

    def output(self, tokens: int) -> None:
        """Note tokens sampled just now."""
        self.output_tokens += tokens
        now = time.monotonic()
        if self._recent and now - self._recent[-1][0] < 0.1:
            tokens += self._recent.pop()[1]
        self._recent.append((now, tokens))
        while self._recent[0][0] < now - self._window:
            self._recent.popleft()

    def rate(self) -> float:
        """Output tokens per second over the window."""
        since = time.monotonic() - self._window
        return sum(n for at, n in list(self._recent) if at >= since) / self._window
