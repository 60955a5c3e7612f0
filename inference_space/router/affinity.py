"""Which replica a call would like: where calls with the same beginning went. Pure."""

from __future__ import annotations

import functools
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from sync.schema.calls import CallResult, GenerateCall

_CHARACTERS_PER_ID = 4
_LEADING = ("system", "instructions", "tools", "prompt", "messages", "input")


class Wish(NamedTuple):
    """`key` ranks the replicas; `last` is the one that answered the call before in this conversation, or ""."""

    key: bytes
    last: str = ""


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """`names`, the best for `key` first: rendezvous hashing (Thaler and Ravishankar 1998).

    A name that is added or taken away moves only the keys that it gets or had, whatever the order of the names.
    """
    return sorted(names, key=lambda name: (blake2b(key, digest_size=16, key=_seed(name)).digest(), name), reverse=True)


class Affinity:
    """Keys of calls. Calls that share their first `prefix` token ids, or four times as many characters of their
    opening (everything up to the first user message), have one key. `most`: conversations remembered, the latest."""

    def __init__(self, prefix: int, most: int) -> None:
        self._prefix = prefix
        self._most = most
        self._answered_by: OrderedDict[bytes, str] = OrderedDict()

    def of_call(self, call: GenerateCall) -> Wish:
        """Where a native call wants to go."""
        if not call.prefix_ids:
            return Wish(self._text([m.model_dump() for m in call.messages]))
        return Wish(self.of_ids(call.prefix_ids).key, self._answered_by.get(_digest(call.prefix_ids), ""))

    def of_ids(self, ids: Sequence[int]) -> Wish:
        """Where a prompt of token ids wants to go."""
        return Wish(_digest(ids[: self._prefix]))

    def of_body(self, body: bytes) -> Wish:
        """Where a body in one of the dialects wants to go: by what a prompt begins with, so that a conversation that
        grows keeps its key. What is no such body has a key too."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return Wish(_short(body.decode("latin-1")))
        if not isinstance(asked, dict):
            return Wish(_short(body.decode("latin-1")))
        return Wish(self._text([_opening(asked[name]) for name in _LEADING if name in asked]))

    def learn(self, result: CallResult, replica: str) -> None:
        """Note who answered: the next call of this conversation begins with exactly these ids."""
        if self._most and result.output_ids:
            self._answered_by[_digest(result.prompt_ids + result.output_ids)] = replica
            if len(self._answered_by) > self._most:
                self._answered_by.popitem(last=False)

    def _text(self, parts: list[Any]) -> bytes:
        return _short(json.dumps(_opening(parts))[: _CHARACTERS_PER_ID * self._prefix])


def _opening(value: Any) -> Any:
    """A list of messages up to the first of the user; anything else as it is."""
    if not isinstance(value, list):
        return value
    for i, message in enumerate(value):
        if isinstance(message, dict) and message.get("role") == "user":
            return value[: i + 1]
    return value


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("I", ids).tobytes(), digest_size=16).digest()


@functools.lru_cache(maxsize=1_024)
def _seed(name: str) -> bytes:
    return _short(name)


def _short(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
