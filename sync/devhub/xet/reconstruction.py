"""How a client puts a range of a file together: a plan, and the two forms in which it is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .formats import Layout, hash_hex
from .shards import Records

RANGES_PER_URL = 64
"""Byte ranges that one request may name; more of one xorb are fetched by further requests."""


class Term(NamedTuple):
    """Chunks from `start` to `end` (exclusive) of a xorb; `length` bytes when unpacked."""

    xorb: bytes
    length: int
    start: int
    end: int


class Plan(NamedTuple):
    """The terms that hold a range of a file, in whole chunks: its first byte is `skip` bytes into the first term."""

    skip: int
    terms: list[Term]


Layouts = Callable[[bytes], Layout]
Urls = Callable[[bytes], str]
Spans = dict[bytes, list[tuple[int, int]]]


def make_plan(terms: Records, layouts: Layouts, start: int, end: int) -> Plan:
    """Plan the bytes from `start` to `end`, with 0 <= start < end <= size of the file."""
    stops = np.cumsum(terms["length"], dtype=np.int64)
    first, last = (int(n) for n in np.searchsorted(stops, [start, end - 1], side="right"))
    plan = [
        Term(t["xorb"].tobytes(), int(t["length"]), int(t["start"]), int(t["end"])) for t in terms[first : last + 1]
    ]
    surplus = int(stops[last]) - end
    skip = start - (int(stops[first]) - plan[0].length)
    plan[-1] = _cut_tail(plan[-1], layouts(plan[-1].xorb), surplus)
    plan[0], skip = _cut_head(plan[0], layouts(plan[0].xorb), skip)
    return Plan(skip, plan)


def _cut_tail(term: Term, layout: Layout, surplus: int) -> Term:
    """Drop the chunks that lie wholly in the last `surplus` bytes."""
    wanted = int(layout.content[term.end]) - surplus
    end = int(np.searchsorted(layout.content, wanted, side="left"))
    return Term(term.xorb, layout.length(term.start, end), term.start, end)


def _cut_head(term: Term, layout: Layout, skip: int) -> tuple[Term, int]:
    """Drop the chunks that lie wholly in the first `skip` bytes; also returns what is still to skip."""
    wanted = int(layout.content[term.start]) + skip
    start = int(np.searchsorted(layout.content, wanted, side="right")) - 1
    return Term(term.xorb, layout.length(start, term.end), start, term.end), wanted - int(layout.content[start])


def answer_v2(plan: Plan, layouts: Layouts, urls: Urls) -> dict[str, Any]:
    """The body of GET /v2/reconstructions: several ranges per URL, for requests with several byte ranges."""
    xorbs = {}
    for name, spans in _spans(plan.terms).items():
        layout, fetches = layouts(name), []
        for n in range(0, len(spans), RANGES_PER_URL):
            ranges = [
                {"chunks": {"start": start, "end": end}, "bytes": _bytes(layout, start, end)}
                for start, end in spans[n : n + RANGES_PER_URL]
            ]
            fetches.append({"url": urls(name), "ranges": ranges})
        xorbs[hash_hex(name)] = fetches
    return {"offset_into_first_range": plan.skip, "terms": _terms(plan.terms), "xorbs": xorbs}


def answer_v1(plan: Plan, layouts: Layouts, urls: Urls) -> dict[str, Any]:
    """The body of GET /v1/reconstructions: one URL per range."""
    info = {}
    for name, spans in _spans(plan.terms).items():
        layout, url = layouts(name), urls(name)
        info[hash_hex(name)] = [
            {"range": {"start": start, "end": end}, "url": url, "url_range": _bytes(layout, start, end)}
            for start, end in spans
        ]
    return {"offset_into_first_range": plan.skip, "terms": _terms(plan.terms), "fetch_info": info}


def _terms(terms: Iterable[Term]) -> list[dict[str, Any]]:
    return [
        {"hash": hash_hex(t.xorb), "unpacked_length": t.length, "range": {"start": t.start, "end": t.end}}
        for t in terms
    ]


def _bytes(layout: Layout, start: int, end: int) -> dict[str, int]:
    """Where the chunks lie in the xorb, both ends inclusive."""
    return {"start": int(layout.packed[start]), "end": int(layout.packed[end]) - 1}


def _spans(terms: Iterable[Term]) -> Spans:
    """The chunks needed of each xorb, as ranges in order that neither overlap nor touch."""
    spans: Spans = {}
    for term in sorted(terms, key=lambda term: (term.start, term.end)):
        found = spans.setdefault(term.xorb, [])
        if found and term.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], term.end))
        else:
            found.append((term.start, term.end))
    return spans
