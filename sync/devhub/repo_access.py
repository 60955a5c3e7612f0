"""Which repository a request is about, and whether its caller may see or change it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request

from .auth import Caller, check_read, check_write, may_read
from .repos import TYPES, Repo, Repos, check_id
from .responses import HubError, not_found, segments

if TYPE_CHECKING:
    from .app import Hub


class Target(NamedTuple):
    """What a request names: `rest` are the unquoted parts of its path behind `…/namespace/name/action/`."""

    caller: Caller
    repo: Repo
    rest: list[str]

    @property
    def revision(self) -> str:
        """The revision that stands first behind the action."""
        return self.rest[0] if self.rest else ""

    @property
    def path(self) -> str:
        """The path that stands behind the revision."""
        return "/".join(self.rest[1:])


class Access:
    """The repositories of a Hub, as requests reach them."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.repos = Repos(hub.db)

    def readable(self, request: Request) -> Target:
        """Raises HubError 401 for an unknown token, and 404 for what is not there or not for this caller."""
        caller = self.hub.caller(request)
        kind, id_, rest = _parse(request)
        return Target(caller, self.visible(caller, kind, id_), rest)

    def writable(self, request: Request) -> Target:
        """Like `readable`, and 403 for what the caller may see but not change."""
        target = self.readable(request)
        check_write(target.caller, target.repo.namespace)
        return target

    def visible(self, caller: Caller, kind: str, id_: str) -> Repo:
        """The repository with this id, if `caller` may see it; raises HubError 404 (RepoNotFound)."""
        namespace, _, name = id_.partition("/")
        if kind not in TYPES or not id_.isascii():
            raise not_found("The repository")
        repo = self.repos.find(kind, namespace, name)
        check_read(caller, private=repo.private, namespace=namespace, what=f"The {kind} {id_}")
        return repo

    def listed(self, caller: Caller, kind: str, author: str | None, search: str) -> list[Repo]:
        """The repositories of a type that `caller` may see."""
        found = self.repos.listed(kind, namespace=author, search=search)
        return [repo for repo in found if may_read(caller, private=repo.private, namespace=repo.namespace)]

    def is_readable(self, caller: Caller, kind: str, id_: str) -> bool:
        """Whether there is such a repository for `caller`."""
        try:
            self.visible(caller, kind, id_)
        except HubError:
            return False
        return True


def new_id(caller: Caller, namespace: object, name: object) -> tuple[str, str]:
    """(namespace, name) for a body that names both; the namespace is the caller's own by default.

    Raises HubError 400, 401 or 403.
    """
    owner = caller.name if namespace is None else namespace
    if caller.role == "anonymous":
        raise HubError(401, "Invalid username or password: send a token")
    if not isinstance(owner, str) or not isinstance(name, str):
        raise HubError(400, "the name of a repository must be a text")
    check_id(owner, name)
    check_write(caller, owner)
    return owner, name


def _parse(request: Request) -> tuple[str, str, list[str]]:
    parts = segments(request)
    if parts[0] == "api":
        kind, parts = parts[1][:-1], parts[2:]
    elif parts[0] in ("datasets", "spaces"):
        kind, parts = parts[0][:-1], parts[1:]
    else:
        kind = "model"
    return kind, "/".join(parts[:2]).removesuffix(".git"), parts[3:]
