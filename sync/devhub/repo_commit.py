"""The body of a commit request: lines of JSON, read one at a time, checked, and applied together or not at all.

Contents of regular files are staged on disk while the body arrives and published just before the transaction; a body
that is refused leaves nothing behind.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

from starlette.concurrency import run_in_threadpool

from .blobs import SHA256, Blobs, Staged
from .repo_trees import Editor, FileEntry, check_path, git_id, pointer
from .repos import LookUp
from .responses import HubError
from .xet.cas import Cas

MAX_REGULAR_BYTES = 10 << 20
MAX_LINE_BYTES = MAX_REGULAR_BYTES * 4 // 3 + 16384
MAX_OPERATIONS = 50_000
MAX_MESSAGE = 65536
LFS_SUFFIXES = (
    "7z", "arrow", "avro", "bin", "bz2", "ckpt", "flac", "ftz", "gguf", "gz", "h5", "jpeg", "jpg", "joblib", "lz4",
    "mds", "mlmodel", "model", "mp3", "mp4", "msgpack", "npy", "npz", "ogg", "onnx", "ot", "parquet", "pb", "pcm",
    "pickle", "pkl", "png", "pt", "pth", "rar", "safetensors", "sqlite3", "tar", "tflite", "tgz", "wasm", "wav",
    "webm", "webp", "xz", "zip", "zst",
)  # fmt: skip


class Contents:
    """Where the contents of LFS files are: xet storage, or the files that were uploaded over Git LFS."""

    def __init__(self, cas: Cas, blobs: Blobs) -> None:
        self._cas = cas
        self._blobs = blobs

    def find(self, sha256: str) -> tuple[int, str | None] | None:
        """(size, hash in xet storage if it is there) of a content; None when it was never uploaded."""
        xet = self._cas.by_sha256(sha256)
        size = None if xet is None else self._cas.size(xet)
        if size is not None:
            return size, xet
        size = self._blobs.size(sha256)
        return None if size is None else (size, None)

    def entry(self, sha256: object, size: object) -> FileEntry:
        """The tree entry for an LFS file. Raises HubError 400 unless it was uploaded with this size (None: any)."""
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise HubError(400, "oid must be a sha256: 64 lower-case hex digits")
        found = self.find(sha256)
        if found is None:
            raise HubError(400, f"no content with the oid {sha256} was uploaded; upload it before the commit")
        if size is not None and size != found[0]:
            raise HubError(400, f"the content {sha256} has {found[0]} bytes, the commit says {size!r}")
        return FileEntry(git_id("blob", pointer(sha256, found[0])), found[0], sha256, lfs=True, xet=found[1])


class Operation(NamedTuple):
    """One line of a commit. `source`: (path, revision) of what is copied."""

    kind: Literal["put", "copy", "remove_file", "remove_folder"]
    path: str
    entry: FileEntry | None = None
    source: tuple[str, str | None] = ("", None)


class Draft:
    """A commit that is being received. Call `discard` in every case at the end."""

    def __init__(self, contents: Contents, blobs: Blobs) -> None:
        self._contents = contents
        self._blobs = blobs
        self._staged: list[Staged] = []
        self._hashes: set[str] = set()
        self._seen = False
        self.title = ""
        self.text = ""
        self.parent: str | None = None
        self.operations: list[Operation] = []

    def add(self, line: bytes) -> None:
        """Take one line. Raises HubError 400 that says what is wrong with it."""
        try:
            item = json.loads(line)
            key, value = item["key"], item["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise HubError(400, 'a line of the commit is not JSON of the form {"key": …, "value": …}') from None
        if not isinstance(value, dict):
            raise HubError(400, f"the value of {key!r} must be a JSON object")
        if (key == "header") == self._seen:
            raise HubError(400, "a commit has one header, in its first line")
        if key == "header":
            self._header(value)
        else:
            self._operation(key, value)

    def publish(self) -> None:
        """Make the staged contents readable. Raises HubError 400 for a body without a header or operations."""
        if not self._seen:
            raise HubError(400, "the commit has no header line")
        self._blobs.publish(self._staged)

    def apply(self, editor: Editor, look_up: LookUp) -> None:
        """Change a tree as the operations say, in their order; `look_up` finds a file by path and revision."""
        for operation in self.operations:
            entry = operation.entry
            if operation.kind == "copy":
                entry = look_up(*operation.source)
                if entry is None:
                    raise HubError(404, f"A file with this name doesn't exist: {operation.source[0]}", "EntryNotFound")
            if entry is not None:
                editor.put(operation.path, entry)
            elif operation.kind == "remove_file":
                editor.remove_file(operation.path)
            else:
                editor.remove_folder(operation.path)

    def lfs(self) -> set[str]:
        """The sha256 of every LFS file that is added."""
        return {op.entry.sha256 for op in self.operations if op.entry is not None and op.entry.lfs}

    def discard(self) -> None:
        """Drop what was staged and not published."""
        for staged in self._staged:
            staged.discard()

    def _header(self, value: dict[str, Any]) -> None:
        self._seen = True
        self.title = check_text(value.get("summary"), "summary") or "Update"
        self.text = check_text(value.get("description"), "description")
        parent = value.get("parentCommit")
        if parent is not None and not isinstance(parent, str):
            raise HubError(400, "parentCommit must be the id of a commit")
        self.parent = parent

    def _operation(self, key: object, value: dict[str, Any]) -> None:
        if len(self.operations) >= MAX_OPERATIONS:
            raise HubError(413, f"a commit has at most {MAX_OPERATIONS} operations; split it")
        path = value.get("path")
        if key in ("deletedFile", "deletedFolder"):
            kind: Literal["remove_file", "remove_folder"] = "remove_file" if key == "deletedFile" else "remove_folder"
            path = path.rstrip("/") if isinstance(path, str) else path
            self.operations.append(Operation(kind, check_path(path)))
        elif key == "file":
            self.operations.append(Operation("put", check_path(path), self._regular(value)))
        elif key == "lfsFile":
            entry = self._contents.entry(value.get("oid"), value.get("size"))
            self.operations.append(Operation("put", check_path(path), entry))
        elif key == "copyFile":
            revision = value.get("srcRevision")
            if revision is not None and not isinstance(revision, str):
                raise HubError(400, "srcRevision must be the name of a branch, tag or commit")
            source = (check_path(value.get("srcPath")), revision)
            self.operations.append(Operation("copy", check_path(path), source=source))
        else:
            raise HubError(400, f"unknown operation {key!r}")

    def _regular(self, value: dict[str, Any]) -> FileEntry:
        content, encoding = value.get("content"), value.get("encoding", "utf-8")
        if not isinstance(content, str) or encoding not in ("base64", "utf-8"):
            raise HubError(400, "content must be a text, and encoding base64 or utf-8")
        try:
            data = base64.b64decode(content, validate=True) if encoding == "base64" else content.encode()
        except (binascii.Error, ValueError) as error:
            raise HubError(400, f"the content is not valid {encoding} ({error})") from None
        if len(data) > MAX_REGULAR_BYTES:
            raise HubError(400, f"the file has {len(data)} bytes; above {MAX_REGULAR_BYTES} upload it as an LFS file")
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 not in self._hashes and self._blobs.size(sha256) is None:
            self._hashes.add(sha256)
            staged = self._blobs.stage()
            self._staged.append(staged)
            staged.write(data)
            staged.seal()
        return FileEntry(git_id("blob", data), len(data), sha256, lfs=False, xet=None)


async def receive(draft: Draft, stream: AsyncIterator[bytes]) -> None:
    """Read a whole body into `draft`; at most one line is in memory. Raises HubError 400 or 413."""
    rest = bytearray()
    async for piece in stream:
        searched = len(rest)
        rest += piece
        while (end := rest.find(b"\n", searched)) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            searched = 0
            if line.strip():
                await run_in_threadpool(draft.add, line)
        if len(rest) > MAX_LINE_BYTES:
            raise HubError(413, f"a line of the commit is longer than {MAX_LINE_BYTES} bytes; send large files as LFS")
    if rest.strip():
        await run_in_threadpool(draft.add, bytes(rest))


def upload_mode(path: str, size: int, sample: bytes) -> str:
    """`lfs` for what is large or binary, by its name or its first bytes; else `regular`."""
    if size > MAX_REGULAR_BYTES or PurePosixPath(path.lower()).suffix[1:] in LFS_SUFFIXES or b"\0" in sample:
        return "lfs"
    return "regular"


def check_text(value: object, name: str) -> str:
    """A text that can be kept ("" for None); raises HubError 400."""
    text = "" if value is None else value
    if not isinstance(text, str) or len(text) > MAX_MESSAGE:
        raise HubError(400, f"{name} must be a text of at most {MAX_MESSAGE} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HubError(400, f"{name} is not valid Unicode") from None
    return text
