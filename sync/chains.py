"""The one append primitive for token chains: ids, mask, logprobs and version spans keep one length."""

from __future__ import annotations

from typing import NamedTuple

from .errors import InvalidRequest
from .schema.calls import CallResult, VersionSpan
from .schema.rollouts import Chain


class ChainBuilder:
    """Assembles calls into chains by prefix merging.

    A call whose prompt starts with the whole chain so far extends it: the prompt's new part is context (mask 0), its
    output is trained (mask 1). Any other call forks a new chain. Ids are taken as the engine recorded them; nothing is
    decoded and encoded again.
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the chain extended last (empty before the first call)."""
        return tuple(self._open[-1].ids) if self._open else ()

    def append(self, call: CallResult, *, trained: bool = True) -> None:
        """Add one finished call; one that is not `trained` gets mask 0.

        Raises InvalidRequest when its lists disagree in length or its spans have gaps.
        """
        _check(call)
        prompt = list(call.prompt_ids)
        fits = [i for i, c in enumerate(self._open) if prompt[: len(c.ids)] == c.ids]
        at = max(fits, key=lambda i: len(self._open[i].ids), default=None)
        chain = _Open(self._shared(prompt)) if at is None else self._open.pop(at)
        self._open.append(chain)
        chain.context(prompt[len(chain.ids) :])
        chain.sampled(call, int(trained))

    def chains(self) -> tuple[Chain, ...]:
        """The chains so far, the one extended last at the end."""
        return tuple(
            Chain(ids=tuple(c.ids), mask=tuple(c.mask), logprobs=tuple(c.logprobs), weight_versions=tuple(c.spans))
            for c in self._open
        )

    def origins(self) -> tuple[Origin, ...]:
        """Where each chain of `chains` comes from."""
        return tuple(Origin(tuple(c.calls), c.fork_at) for c in self._open)

    def _shared(self, prompt: list[int]) -> int | None:
        """The longest start that `prompt` has in common with a chain (None: no id)."""
        return max((_common(prompt, chain.ids) for chain in self._open), default=0) or None


class Origin(NamedTuple):
    """`calls` are the ids of a chain's calls; `fork_at` the position where it leaves another chain, None when it
    shares no id with one that was there before."""

    calls: tuple[str, ...]
    fork_at: int | None


def _common(one: list[int], other: list[int]) -> int:
    """How many ids the two have in common from the start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


class _Open:
    def __init__(self, fork_at: int | None) -> None:
        self.fork_at = fork_at
        self.calls: list[str] = []
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []

    def context(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def sampled(self, call: CallResult, mask: int) -> None:
        start = len(self.ids)
        self.calls.append(call.id)
        self.ids += call.output_ids
        self.mask += [mask] * len(call.output_ids)
        self.logprobs += call.logprobs
        self.spans += [
            VersionSpan(version=s.version, start=s.start + start, end=s.end + start) for s in call.weight_versions
        ]


def _check(call: CallResult) -> None:
    if call.error is not None:
        raise InvalidRequest(f"call {call.id} failed ({call.error.code}); it has no tokens to append")
    n = len(call.output_ids)
    if len(call.logprobs) != n:
        raise InvalidRequest(f"call {call.id}: {n} output ids but {len(call.logprobs)} logprobs")
    at = 0
    for span in call.weight_versions:
        if span.start != at or span.end <= span.start:
            raise InvalidRequest(f"call {call.id}: weight version spans leave a gap or overlap at {at}")
        at = span.end
    if at != n:
        raise InvalidRequest(f"call {call.id}: weight version spans cover {at} of {n} output ids")
