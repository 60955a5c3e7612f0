"""The one append primitive for token chains: ids, mask, logprobs and version spans keep one length."""

from __future__ import annotations

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

    def append(self, call: CallResult) -> None:
        """Add one finished call. Raises InvalidRequest when its lists disagree in length or its spans have gaps."""
        _check(call)
        prompt = list(call.prompt_ids)
        fits = [i for i, c in enumerate(self._open) if prompt[: len(c.ids)] == c.ids]
        at = max(fits, key=lambda i: len(self._open[i].ids), default=None)
        chain = _Open() if at is None else self._open.pop(at)
        self._open.append(chain)
        chain.context(prompt[len(chain.ids) :])
        chain.sampled(call)

    def chains(self) -> tuple[Chain, ...]:
        """The chains so far, the one extended last at the end."""
        return tuple(
            Chain(ids=tuple(c.ids), mask=tuple(c.mask), logprobs=tuple(c.logprobs), weight_versions=tuple(c.spans))
            for c in self._open
        )


class _Open:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []

    def context(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def sampled(self, call: CallResult) -> None:
        start = len(self.ids)
        self.ids += call.output_ids
        self.mask += [1] * len(call.output_ids)
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
