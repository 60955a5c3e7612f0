"""The web page of the Hub: what is here, and every file with its size and a link. Plain HTML, no scripts.

Everything that came from users is escaped, and the policy of the page loads nothing from anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from . import listing
from .auth import Caller, check_read, may_read
from .buckets import Entry as BucketEntry
from .repo_access import Access
from .repo_trees import FileEntry
from .repos import MAIN, TYPES
from .responses import HubError, iso, segments

if TYPE_CHECKING:
    from .app import Hub

MAX_ROWS = 1000
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --muted: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
small { color: var(--muted); }
"""

Row = tuple[str, str, str]
"""(link, text, what stands right of it), none of them escaped yet."""


def routes(hub: Hub) -> list[BaseRoute]:
    """`/` and the pages of buckets and repositories; behind all other routes."""
    known = _Pages(hub)
    found: list[BaseRoute] = [Route("/", known.home, methods=["GET"])]
    pages: list[tuple[str, Callable[[Request], Response]]] = [
        ("/buckets", known.bucket), ("/datasets", known.repo), ("/spaces", known.repo), ("", known.repo),
    ]  # fmt: skip
    for prefix, page in pages:
        one = prefix + "/{namespace}/{name}"
        found += [Route(one, page, methods=["GET"]), Route(one + "/tree/{rest:path}", page, methods=["GET"])]
    return found


class _Pages:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._access = Access(hub)

    def home(self, request: Request) -> Response:
        """All that the caller may see."""
        return self._answer(request, self._home)

    def bucket(self, request: Request) -> Response:
        """The files of a bucket, one folder at a time."""
        return self._answer(request, self._bucket)

    def repo(self, request: Request) -> Response:
        """The files of a repository, one folder at a time."""
        return self._answer(request, self._repo)

    def _answer(self, request: Request, page: Callable[[Request, Caller], tuple[str, str]]) -> Response:
        try:
            title, body = page(request, self._hub.caller(request))
            status = 200
        except HubError as error:
            title, body, status = "Not here", f"<p>{escape(error.message)}</p>", error.status
        html = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
            f'<body><p><a href="/">Hub</a></p><h1>{escape(title)}</h1>{body}</body></html>'
        )
        return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=_HEADERS)

    def _home(self, _request: Request, caller: Caller) -> tuple[str, str]:
        body = ""
        for kind in TYPES:
            repos = self._access.listed(caller, kind, None, "")
            rows = [(f"/{repo.path}", repo.id, _seen(iso(repo.updated), private=repo.private)) for repo in repos]
            body += _section(f"{kind.capitalize()}s", rows)
        buckets = [
            (f"/buckets/{b.id}", b.id, _seen(f"{b.files} files, {_size(b.size)}", private=b.private))
            for b in self._hub.buckets.listed()
            if may_read(caller, private=b.private, namespace=b.namespace)
        ]
        return "Hub", body + _section("Buckets", buckets)

    def _bucket(self, request: Request, caller: Caller) -> tuple[str, str]:
        _, namespace, name, *rest = segments(request)
        bucket = self._hub.buckets.find(namespace, name)
        check_read(caller, private=bucket.private, namespace=namespace, what=f"Bucket {bucket.id}")
        base, path, cursor = f"/buckets/{bucket.id}", "/".join(rest[1:]), request.query_params.get("cursor")
        prefix = f"{path}/" if path else ""
        with self._hub.buckets.view(bucket) as view:
            items, more = listing.page(view, prefix, recursive=False, cursor=cursor, limit=MAX_ROWS)
        rows: list[Row] = []
        for item in items:
            if isinstance(item, BucketEntry):
                rows.append((f"{base}/resolve/{quote(item.path)}", item.path[len(prefix) :], _size(item.size)))
            else:
                rows.append((f"{base}/tree/{quote(item[0])}", item[0][len(prefix) :] + "/", ""))
        return f"{bucket.id}/{path}".rstrip("/"), _section("Files", rows, more)

    def _repo(self, request: Request, caller: Caller) -> tuple[str, str]:
        parts = segments(request)
        kind, parts = (parts[0][:-1], parts[1:]) if parts[0] in ("datasets", "spaces") else ("model", parts)
        repo = self._access.visible(caller, kind, "/".join(parts[:2]))
        revision, path = (parts[3:4] or [MAIN])[0], "/".join(parts[4:])
        after, at = request.query_params.get("cursor", ""), quote(revision, safe="")
        with self._access.repos.view(repo) as view:
            commit = view.commit(revision)
            walk = view.trees.walk(commit.tree, path, recursive=False, after=after)
            found = list(itertools.islice(walk, MAX_ROWS + 1))
        rows: list[Row] = []
        for full, entry in found[:MAX_ROWS]:
            name = full.rpartition("/")[2]
            if isinstance(entry, FileEntry):
                rows.append((f"/{repo.path}/resolve/{at}/{quote(full)}", name, _size(entry.size)))
            else:
                rows.append((f"/{repo.path}/tree/{at}/{quote(full)}", name + "/", ""))
        more = found[MAX_ROWS - 1][0] if len(found) > MAX_ROWS else None
        about = f"<p><small>{escape(revision)} at {commit.sha}: {escape(commit.title)}</small></p>"
        return f"{repo.path}/{path}".rstrip("/"), about + _section("Files", rows, more)


def _section(title: str, rows: Iterable[Row], cursor: str | None = None) -> str:
    lines = "".join(
        f'<tr><td><a href="{escape(link)}">{escape(text)}</a></td><td class="n">{escape(aside)}</td></tr>'
        for link, text, aside in rows
    )
    more = f'<p><a href="?{escape(urlencode({"cursor": cursor}))}">more</a></p>' if cursor else ""
    return f"<h2>{escape(title)}</h2>" + (f"<table>{lines}</table>{more}" if lines else "<p>none</p>")


def _seen(text: str, *, private: bool) -> str:
    return f"{text} · private" if private else text


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
