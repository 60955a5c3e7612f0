"""Configuration of every process: TOML file, then environment, then flags; later wins, unknown keys are refused.

A role's settings are a frozen pydantic model (nested models make TOML tables). Field `host` of the role `inference`
is `host` in the file, `DELTAWIRE_INFERENCE_HOST` in the environment and `--host` as a flag; a nested field
`policy.url` is a table entry, `…_POLICY__URL` and `--policy.url`. Secrets are never settings: tokens are read from
the environment alone, see `token_from_environment`.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from .errors import ConfigError

TOKEN_VARIABLE = "DELTAWIRE_TOKEN"  # noqa: S105 - the variable's name, not a secret


class Settings(BaseModel):
    """Base of every settings model: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


S = TypeVar("S", bound=Settings)


def token_from_environment(environ: Mapping[str, str] | None = None) -> str:
    """Return the shared bearer token from `DELTAWIRE_TOKEN`; raises ConfigError when it is unset or too short."""
    token = (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "")
    if len(token) < 16:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is {'too short' if token else 'not set'}: put the same random token of at least 16 "
            f"characters into every process, e.g. export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
        )
    if not token.isascii() or not token.isprintable() or any(c in token for c in " /?#%"):
        raise ConfigError(f"{TOKEN_VARIABLE} may hold printable ASCII without spaces and / ? # % only")
    return token


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], FieldInfo]:
    """Map the path of every leaf field to what pydantic knows of it."""
    found: dict[tuple[str, ...], FieldInfo] = {}
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            found |= leaves(nested, (*prefix, name))
        else:
            found[(*prefix, name)] = field
    return found


def add_flags(parser: argparse.ArgumentParser, model: type[Settings]) -> None:
    """Add `--config`, `--print-config` and one flag per leaf field to a command line."""
    parser.add_argument("--config", metavar="FILE.toml", help="settings file; environment and flags override it")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and exit")
    group = parser.add_argument_group("settings")
    for path, field in leaves(model).items():
        flag = "--" + ".".join(path).replace("_", "-")
        about = f"{field.description or ''} ({_default(field)})".strip()
        several = "append" if get_origin(field.annotation) is tuple else "store"
        group.add_argument(
            flag, dest="set:" + ".".join(path), metavar="VALUE", action=several, help=about.replace("%", "%%")
        )


def load(model: type[S], role: str, args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> S:
    """Resolve the settings of `role` from `args` (made by `add_flags`) and the environment.

    Raises ConfigError with one line that names the key, where it came from and what is wrong with it.
    """
    return validated(model, *_given(model, role, args, environ))


def print_config(model: type[S], role: str, args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> str:
    """The resolved settings as TOML, what --print-config shows. Required settings that are not given stand as comments,
    so that the text is a file to fill in; anything else that is wrong raises as in `load`."""
    given, origin = _given(model, role, args, environ)
    try:
        return to_toml(model.model_validate(given))
    except ValidationError as error:
        if any(e["type"] != "missing" for e in error.errors()):
            raise ConfigError(_explain(model, error, origin)) from None
    missing = [name for name, field in model.model_fields.items() if field.is_required() and name not in given]
    optional: dict[str, Any] = dict.fromkeys(missing, (Any, None))
    lenient = create_model("Lenient", __base__=model, **optional).model_validate(given)
    lines = [f"# {name} =   # required: {model.model_fields[name].description or ''}\n" for name in missing]
    return "".join(lines) + to_toml(lenient)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default()
    return "none" if value is None else f"default {value}"


def _given(
    model: type[BaseModel], role: str, args: argparse.Namespace, environ: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """What file, environment and flags say, and where each setting was said."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if args.config:
        merged = _read_toml(Path(args.config))
        _note(merged, f"in {args.config}", origin)
    env = os.environ if environ is None else environ
    prefix = f"DELTAWIRE_{role.upper()}_"
    known = {prefix + "__".join(path).upper() for path in leaves(model)}
    for name in sorted(env.keys() - known):
        if name.startswith(prefix):
            raise ConfigError(f"unknown setting ${name}; known: {', '.join(sorted(known))}")
    for path in leaves(model):
        variable = prefix + "__".join(path).upper()
        if variable in env:
            _put(merged, path, _value(env[variable]))
            origin[".".join(path)] = f"in ${variable}"
        flag = getattr(args, "set:" + ".".join(path), None)
        if flag is not None:
            one = flag[0] if isinstance(flag, list) and len(flag) == 1 else flag
            _put(merged, path, one if isinstance(one, list) else _value(one))
            origin[".".join(path)] = f"in --{'.'.join(path).replace('_', '-')}"
    return merged, origin


def validated(model: type[S], values: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> S:
    """Build `model` from plain values; raises ConfigError naming the first wrong key and its origin."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(model, error, origin or {})) from None


def to_toml(settings: Settings) -> str:
    """Render settings as TOML that `load` reads back to an equal model (None fields are left out)."""
    lines: list[str] = []
    _render(settings.model_dump(mode="json", exclude_none=True), (), lines)
    return "\n".join(lines) + "\n"


def _render(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    if path:
        lines.append(f"\n[{'.'.join(path)}]")
    for key, value in plain.items():  # JSON text is TOML but for two things: surrogate escapes, and a bare DEL
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{key} = {text}")
    for key, value in table.items():
        if isinstance(value, Mapping):
            _render(value, (*path, key), lines)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such settings file; write one with --print-config > {path.name}") from None
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}") from None


def _note(table: Mapping[str, Any], where: str, origin: dict[str, str], prefix: str = "") -> None:
    for key, value in table.items():
        if isinstance(value, Mapping):
            _note(value, where, origin, f"{prefix}{key}.")
        origin[prefix + key] = where


def _put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} is a table of settings, found {inner!r}")
        table = inner
    table[path[-1]] = value


def _value(text: str) -> Any:
    """Lists and objects may be given as JSON; everything else stays text and pydantic converts it."""
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _explain(model: type[BaseModel], error: ValidationError, origin: Mapping[str, str]) -> str:
    order = {"extra_forbidden": 0, "missing": 2}  # a typo explains a missing setting, never the other way round
    first = min(error.errors(include_url=False), key=lambda e: order.get(e["type"], 1))
    key = ".".join(str(p) for p in first["loc"])
    where = origin.get(key, "in the settings")
    if first["type"] == "extra_forbidden":
        known = ", ".join(".".join(p) for p in leaves(model))
        return f"unknown setting {key!r} {where}; known: {known}"
    if first["type"] == "missing":
        flag = "--" + key.replace("_", "-")
        return f"setting {key!r} is missing; give it in the --config file or as {flag}"
    return f"setting {key!r} {where}: {first['msg']} (found {first.get('input')!r})"
