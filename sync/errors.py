"""Every error Deltawire raises on purpose, as one tree split by what the caller should do next.

    DeltawireError
    ├── RetryError                 the same call may work later
    │   ├── StoreUnavailable       the bucket did not answer, or not in time
    │   └── PeerUnavailable        another process did not answer, or not in time
    ├── ResyncError                this state cannot be extended; take an anchor
    │   ├── BaseMismatch           a delta was made for another state than the one held
    │   ├── Pruned                 the version asked for is below the floor
    │   └── EngineFailed           an engine broke off an update; it is reloaded from the mirror
    ├── StopError                  this process must stop what it does
    │   └── Fenced                 another writer owns the channel
    ├── RejectError                the input is wrong; nothing was applied
    │   ├── CorruptObject          an object does not match its size, hash or check
    │   ├── InvalidPatch           a delta payload breaks the format
    │   ├── SchemaChanged          tensors were renamed, reshaped or changed dtype
    │   ├── ObjectMissing          a key that should exist does not
    │   └── InvalidRequest         a body or argument that the callee refuses (HTTP 4xx)
    └── ConfigError                a setting must be changed; the message names it

A message says what was found, what was expected, and what to do next.
"""

from __future__ import annotations


class DeltawireError(Exception):
    """Root of every error that Deltawire raises on purpose."""


class RetryError(DeltawireError):
    """The same call may work later."""


class StoreUnavailable(RetryError):
    """The bucket did not answer, or not before the deadline."""


class PeerUnavailable(RetryError):
    """Another process did not answer, or not before the deadline; the message names it."""


class ResyncError(DeltawireError):
    """The state held cannot be extended; take the newest anchor."""


class BaseMismatch(ResyncError):
    """A delta was made for another state than the one held."""


class Pruned(ResyncError):
    """The version asked for is below the channel's floor."""


class EngineFailed(ResyncError):
    """An engine broke off an update, or holds other bits than were written; it is reloaded from the mirror."""


class StopError(DeltawireError):
    """This process must stop what it is doing."""


class Fenced(StopError):
    """Another writer owns the channel, or claimed it meanwhile."""


class RejectError(DeltawireError):
    """The input is wrong; nothing was applied."""


class CorruptObject(RejectError):
    """An object does not match its declared size, hash or check; the message names its key."""


class InvalidPatch(RejectError):
    """A delta payload breaks the format."""


class SchemaChanged(RejectError):
    """Tensor names, shapes or dtypes differ from the base's; only an anchor can carry this state."""


class ObjectMissing(RejectError):
    """A key that should exist in the store does not."""


class InvalidRequest(RejectError):
    """A request that the callee refuses; `status` is the HTTP status it answers with."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ConfigError(DeltawireError):
    """A setting must be changed; the message names the setting and the fix."""
