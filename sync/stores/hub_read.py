"""How an object's bytes come from the Hub: small ones by one plain GET, large ones in blocks through hf_xet.

A plain GET is one request, or two where the Hub redirects to its storage; hf_xet needs three before the first byte but
fetches blocks in parallel.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import hf_xet
from huggingface_hub import BucketFile, HfApi, get_session
from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented, but not marked as exported
    build_hf_headers,
    hf_raise_for_status,
    http_backoff,
)

from ..errors import CorruptObject
from .hub_calls import DiskError, patiently, time_left, xet_status

_PIECE = 1 << 16
_MOST_HOPS = 5
_TOKEN_MARGIN = 60


class _Short(RuntimeError):
    """A stream ended before its size."""


class Sink:
    """Where the bytes of one object go: at most `limit`, to a file that only this object uses."""

    def __init__(self, file: BinaryIO, key: str, limit: int) -> None:
        self._file = file
        self._key = key
        self._limit = limit
        self._size = 0

    def expect(self, size: int) -> None:
        """Raise CorruptObject when an object of `size` bytes is larger than the limit."""
        if size > self._limit:
            raise CorruptObject(f"{self._key}: {size} bytes, expected at most {self._limit}")

    def restart(self) -> None:
        """Forget what was written."""
        self._size = 0
        with _disk():
            self._file.seek(0)
            self._file.truncate()

    def write(self, piece: bytes) -> None:
        """Append; raises CorruptObject above the limit, DiskError when the disk refuses, GivenUp after the deadline."""
        time_left()
        self._size += len(piece)
        self.expect(self._size)
        with _disk():
            self._file.write(piece)

    def complete(self, size: int) -> None:
        """Raise a RuntimeError unless `size` bytes were written."""
        if self._size != size:
            raise _Short(f"{self._key} ended after {self._size} of {size} bytes")


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(error) from None


class _Access(NamedTuple):
    url: str
    token: str
    expiry: int


class Reader:
    """Reads objects of one bucket, by their paths in it. Its methods run inside a call of `Calls`. Thread-safe."""

    def __init__(self, api: HfApi, bucket: str) -> None:
        self._api = api
        self._bucket = bucket
        self._endpoint: str = api.endpoint
        self._lock = threading.Lock()
        self._access: _Access | None = None
        self._session: tuple[int, hf_xet.XetSession] | None = None

    def check_right(self, *, write: bool) -> None:
        """Ask for a token for contents, which shows the bucket and the right to read or write it and changes nothing.

        Raises HfHubHTTPError.
        """
        access = self._ask_access("write" if write else "read")
        if not write:
            self._access = access

    def plain(self, path: str, sink: Sink) -> None:
        """Read by GET; raises RemoteEntryNotFoundError when there is no such object, before that CorruptObject when it
        is larger than the sink takes."""
        patiently(lambda: self._plain_once(path, sink))

    def _plain_once(self, path: str, sink: Sink) -> None:
        sink.restart()
        url = f"{self._endpoint}/buckets/{self._bucket}/resolve/{quote(path, safe='')}"
        headers = {**build_hf_headers(token=self._api.token), "Accept-Encoding": "identity"}
        for hop in range(_MOST_HOPS):
            with get_session().stream("GET", url, headers=headers, follow_redirects=False) as response:
                if hop and response.status_code in (401, 403, 404):
                    raise RuntimeError(f"the storage answered HTTP {response.status_code}")  # not the Hub's own verdict
                hf_raise_for_status(response)
                declared = response.headers.get("x-linked-size") or response.headers.get("content-length")
                if not response.has_redirect_location:
                    if declared is not None:
                        sink.expect(int(declared))
                    for piece in response.iter_raw(_PIECE):
                        sink.write(piece)
                    return
                if "x-linked-size" in response.headers:
                    sink.expect(int(response.headers["x-linked-size"]))
                url, headers = _follow(url, response.headers["location"], headers)
        raise RuntimeError(f"more than {_MOST_HOPS} redirects")

    def in_blocks(self, file: BucketFile, sink: Sink) -> None:
        """Read through hf_xet what a look-up named; raises OSError or RuntimeError (short streams too)."""
        if file.size == 0:
            return
        try:
            self._in_blocks_once(file, sink)
        except (ConnectionError, hf_xet.XetAuthenticationError, _Short) as error:
            # hf_xet now and then ends a refused stream without saying why
            if not isinstance(error, _Short) and xet_status(error) not in (401, 403):
                raise
            self._access = None  # refused before its time: ask once for another
            self._in_blocks_once(file, sink)

    def _in_blocks_once(self, file: BucketFile, sink: Sink) -> None:
        sink.restart()
        access = self._current_access()
        headers = build_hf_headers(token=self._api.token)
        group = self._xet_session().new_download_stream_group(
            endpoint=access.url,
            token=access.token,
            token_expiry_unix_secs=access.expiry,
            token_refresh_url=self._access_url("read"),
            token_refresh_headers=headers,
            custom_headers={"user-agent": headers["user-agent"]},
        )
        try:
            for piece in group.download_stream(hf_xet.XetFileInfo(file.xet_hash, file.size)):
                sink.write(piece)
        except BaseException:
            group.abort()
            raise
        group.finish()
        sink.complete(file.size)

    def _current_access(self) -> _Access:
        access = self._access
        if access is None or access.expiry < time.time() + _TOKEN_MARGIN:
            access = self._access = self._ask_access("read")
        return access

    def _ask_access(self, kind: str) -> _Access:
        response = http_backoff("GET", self._access_url(kind), headers=build_hf_headers(token=self._api.token))
        hf_raise_for_status(response)
        found = response.json()
        return _Access(str(found["casUrl"]), str(found["accessToken"]), int(found["exp"]))

    def _access_url(self, kind: str) -> str:
        return f"{self._endpoint}/api/buckets/{self._bucket}/xet-{kind}-token"

    def _xet_session(self) -> hf_xet.XetSession:
        with self._lock:
            if self._session is None or self._session[0] != os.getpid():  # a runtime does not survive a fork
                self._session = (os.getpid(), hf_xet.XetSession())
            return self._session[1]


def _follow(url: str, location: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where a redirect leads, and the headers to send there: another origin gets no token."""
    target = urljoin(url, location)
    old, new = urlsplit(url), urlsplit(target)
    if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
        raise RuntimeError(f"a redirect from {old.scheme} to {new.scheme} is not followed")
    if (old.scheme, old.netloc) == (new.scheme, new.netloc):
        return target, headers
    return target, {name: value for name, value in headers.items() if name.lower() in ("accept-encoding", "user-agent")}
