"""A store in a bucket of the Hugging Face Hub, or of a local Hub (`deltawire hub serve`)."""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import (
    BucketBatchError,
    BucketNotFoundError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from ..errors import ConfigError, CorruptObject, ObjectMissing, StoreUnavailable
from ..layout import check_key
from . import hub_calls
from .base import Content, ObjectInfo, content_size
from .hub_read import Reader, Sink

T = TypeVar("T")

PLAIN_LIMIT = 64 << 20
"""Objects up to this size are read by a plain GET."""
_OPERATIONS = 1000
_PREFIX = "hf://buckets/"
_BUCKET_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHOWN = 3


class HubStore:
    """Objects are files of a bucket, below the folder that `url` (hf://buckets/NAMESPACE/BUCKET/RUN) names.

    `endpoint` and `token`: as huggingface_hub finds them (HF_ENDPOINT; HF_TOKEN or the login) unless given. `lag`: see
    Store. Every call ends within `timeout` seconds, plus one second per `slowest` bytes that it moves and `timeout` per
    further 1,000 keys. With `create` a missing bucket is made, a private one.

    Raises ConfigError at construction when the URL is malformed, the bucket is missing (unless `create`) or the token
    may not read it, or not write it when `writable` or `create` is set; StoreUnavailable when the Hub does not answer.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = False,
        writable: bool = False,
        endpoint: str | None = None,
        token: str | None = None,
        lag: float = 2.0,
        timeout: float = 60.0,
        slowest: float = 1e6,
    ) -> None:
        self._bucket, self._run = parse_url(url)
        self.url = f"{_PREFIX}{self._bucket}/{self._run}"
        self.lag = lag
        self._timeout = timeout
        self._slowest = slowest
        hub_calls.install(token)
        self._api = HfApi(endpoint=endpoint, token=token)
        self._calls = hub_calls.Calls(self.url)
        self._reader = Reader(self._api, self._bucket)
        self._check(create=create, write=writable or create)

    def _check(self, *, create: bool, write: bool) -> None:
        def work() -> bool:
            try:
                self._reader.check_right(write=write)
            except (BucketNotFoundError, RepositoryNotFoundError):
                return False
            except HfHubHTTPError as error:
                if error.response.status_code != 404:
                    raise
                raise ConfigError(
                    f"{self.url}: {self._api.endpoint} knows no buckets; set HF_ENDPOINT to the address of a Hub"
                ) from None
            return True

        if self._call("open for writing" if write else "open", work):
            return
        if not create:
            raise hub_calls.no_bucket(self.url)
        make = lambda: self._api.create_bucket(self._bucket, private=True, exist_ok=True)  # noqa: E731
        self._call("create", lambda: hub_calls.patiently(make))

    def put_batch(self, objects: Mapping[str, Content]) -> None:
        """See Store. One batch request per 1,000 objects; files are read while they are sent."""
        adds = [(c if isinstance(c, Path) else bytes(c), self._path(key)) for key, c in objects.items()]
        if not adds:
            return
        try:
            size = sum(content_size(content) for content in objects.values())
        except OSError as error:
            raise StoreUnavailable(f"{self.url}: cannot read {error.filename} ({error.strerror})") from None
        failures = self._call("write", lambda: self._batch(add=adds), len(adds), size)
        if failures:
            raise StoreUnavailable(f"{self._refused('write', failures)}; write the same bytes again")

    def get(self, key: str, *, limit: int) -> bytes:
        """See Store."""
        buffer = io.BytesIO()
        self._read(key, buffer, limit)
        return buffer.getvalue()

    def fetch(self, key: str, path: Path, *, limit: int) -> None:
        """See Store."""
        self._path(key)
        part = path.with_name(f".part-{secrets.token_hex(8)}")
        try:
            with part.open("wb") as file:
                self._read(key, file, limit)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _read(self, key: str, file: BinaryIO, limit: int) -> None:
        path, sink = self._path(key), Sink(file, key, limit)
        try:
            if limit <= PLAIN_LIMIT:
                return self._call("read", lambda: self._plain(key, path, sink), size=limit)
            found = self._call("look up", lambda: list(self._api.get_bucket_paths_info(self._bucket, [path])))
            if not found or found[0].path != path:
                raise self._missing(key)
            sink.expect(found[0].size)
            size = found[0].size
            if size <= PLAIN_LIMIT:
                return self._call("read", lambda: self._plain(key, path, sink), size=size)
            return self._call("read", lambda: self._reader.in_blocks(found[0], sink), size=size)
        except hub_calls.DiskError as error:
            raise error.error from None

    def _plain(self, key: str, path: str, sink: Sink) -> None:
        try:
            self._reader.plain(path, sink)
        except RemoteEntryNotFoundError:
            raise self._missing(key) from None

    def _missing(self, key: str) -> ObjectMissing:
        return ObjectMissing(f"{self.url} {key}: no such object")

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Store. One request per 1,000 objects below the folder that `prefix` names or lies in."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        folder = "/".join(part for part in (self._run, prefix.rpartition("/")[0]) if part)

        def work() -> list[ObjectInfo]:
            try:
                tree = list(self._api.list_bucket_tree(self._bucket, folder, recursive=True))
            except (BucketNotFoundError, RepositoryNotFoundError):
                raise
            except HfHubHTTPError as error:
                if error.response.status_code == 404:
                    return []  # no such folder
                raise
            return [self._info(entry) for entry in tree if isinstance(entry, BucketFile)]

        return sorted(i for i in self._call("list", work) if i.key.startswith(prefix))

    def info(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """See Store. One request per 1,000 keys."""
        paths = {self._path(key): key for key in keys}

        def work() -> dict[str, ObjectInfo]:
            found = self._api.get_bucket_paths_info(self._bucket, list(paths))
            return {paths[entry.path]: self._info(entry) for entry in found if entry.path in paths}

        return self._call("look up", work, len(paths)) if paths else {}

    def delete(self, keys: Iterable[str]) -> None:
        """See Store. One batch request per 1,000 keys."""
        paths = list(dict.fromkeys(self._path(key) for key in keys))
        if not paths:
            return
        failures = self._call("delete", lambda: self._batch(delete=paths), len(paths))
        left = self.info(map(self._key, failures))  # a Hub may also refuse to delete what is not there
        if left:
            raise StoreUnavailable(f"{self._refused('delete', {self._path(k): failures[self._path(k)] for k in left})}")

    # --- helpers

    def _call(self, what: str, work: Callable[[], T], keys: int = 1, size: int = 0) -> T:
        seconds = self._timeout * (1 + max(0, keys - 1) // _OPERATIONS) + size / self._slowest
        return self._calls.run(what, seconds, work)

    def _batch(self, **operations: Any) -> dict[str, str]:
        """Send a batch; returns path → reason of what was not applied."""
        try:
            self._api.batch_bucket_files(self._bucket, **operations)
        except BucketBatchError as error:
            return {str(failure["path"]): str(failure["error"]) for failure in error.failures}
        return {}

    def _refused(self, what: str, failures: Mapping[str, str]) -> str:
        shown = [f"{self._key(path)} ({hub_calls.scrub(why, 80)})" for path, why in sorted(failures.items())[:_SHOWN]]
        more = f" and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
        return f"{self.url}: the Hub did not {what} {', '.join(shown)}{more}"

    def _path(self, key: str) -> str:
        return f"{self._run}/{check_key(key)}"

    def _key(self, path: str) -> str:
        return path.removeprefix(f"{self._run}/")

    def _info(self, entry: BucketFile) -> ObjectInfo:
        if entry.uploaded_at is None:
            raise ConfigError(
                f"{self.url}: this Hub does not say when an object was written; a run needs one that does"
            )
        stamp = entry.uploaded_at.timestamp()
        return ObjectInfo(self._key(entry.path), entry.size, stamp, f"{entry.xet_hash}-{round(stamp * 1000):x}")


def parse_url(url: str) -> tuple[str, str]:
    """(namespace/bucket, folder of the run) of a run URL; raises ConfigError that shows the form."""
    namespace, bucket, run = (*url.removeprefix(_PREFIX).split("/", 2), "", "")[:3]
    try:
        if not url.startswith(_PREFIX) or not all(_BUCKET_PART.fullmatch(part) for part in (namespace, bucket)):
            raise CorruptObject("no bucket")
        if namespace == "me":
            raise ConfigError(
                f"{url!r}: name the namespace itself; `me` is another one for every token that reads this"
            )
        return f"{namespace}/{bucket}", check_key(run.removesuffix("/"))
    except CorruptObject:
        raise ConfigError(
            f"{url!r}: a run in a bucket is written hf://buckets/NAMESPACE/BUCKET/RUN, its parts of letters, digits, "
            "dot, dash and underscore"
        ) from None
