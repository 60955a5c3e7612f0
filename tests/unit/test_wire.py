"""Pure parts of the wire: canonical JSON, identities, keys, planning, settings, chains."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from sync.canonical import canonical_json, seal, sha256_hex, unseal
from sync.chains import ChainBuilder
from sync.errors import ConfigError, CorruptObject, DeltawireError, InvalidRequest, Pruned
from sync.events import emitter
from sync.heads import newest
from sync.layout import HeadKey, catchup_key, check_key, folder_of, head_key, parse_head_key, version_name
from sync.plan import Held, plan
from sync.schema.base import Identity
from sync.schema.calls import CallResult, ErrorBody, VersionSpan
from sync.schema.rollouts import Chain
from sync.schema.wire import Head, Manifest, ObjectEntry, Parent, Ref, parse
from sync.settings import Settings, add_flags, load, to_toml, token_from_environment
from sync.stores import ObjectInfo

pytestmark = pytest.mark.unit

UID, WRITER = "0123456789abcdef", "fedcba9876543210"


def digest(n: int) -> str:
    return f"sd1:{n:032x}"


def manifest(**changes: object) -> Manifest:
    facts: dict[str, object] = {
        "channel": "weights", "channel_uid": UID, "epoch": 2, "version": 12, "writer": WRITER, "kind": "delta",
        "parent": Parent(epoch=1, version=11, sha256="a" * 64), "base_digest": digest(1), "state_digest": digest(2),
        "objects": (ObjectEntry(name="delta.safetensors", size=9, sha256="b" * 64),), "step": 3, "codec": "fast",
        "harness": {"curriculum": ("1@1",)}, "created_at": 1.25,
    }  # fmt: skip
    return Manifest.model_validate(facts | changes)


# --- canonical JSON and its seal

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcé🎯", max_size=3), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("abcé🎯", max_size=3), json_values, max_size=5))
def test_unseal_is_the_inverse_of_seal(body: dict[str, object]) -> None:
    data = seal(body)
    assert unseal(data, "k") == json.loads(canonical_json(body))
    assert seal({**body, "check": "old"}) == data
    assert json.loads(data)["check"] == sha256_hex(canonical_json(body))


@pytest.mark.parametrize("data", [seal({"a": 1, "b": ["x", 1.5, None], "é": "ü"}), manifest().to_bytes()])
def test_every_flipped_bit_and_every_cut_is_seen(data: bytes) -> None:
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(CorruptObject, match=r"some/key"):
                unseal(bytes(changed), "some/key")
        with pytest.raises(CorruptObject):
            unseal(data[:at], "some/key")
    for extra in (b" ", b"\n", b"{}", b"\0"):
        for grown in (data + extra, extra + data):
            with pytest.raises(CorruptObject):
                unseal(grown, "some/key")


@pytest.mark.parametrize(
    "data",
    [
        b"[]", b"null", b"3", b'"x"', b"\xff", b"", b"{}", b'{"check":3}', b'{"a":NaN,"check":"x"}', b"[" * 100_000,
        b'{"a":1e999,"check":"x"}', b'{"a":"\\ud800","check":"x"}', b'{"a":' + b"9" * 5_000 + b"}",
        '{"a":1}'.encode("utf-16"), b'{"a":' * 100_000,
    ],
)  # fmt: skip
def test_anything_else_is_a_corrupt_object(data: bytes) -> None:
    with pytest.raises(CorruptObject, match="k"):
        unseal(data, "k")


def test_nan_is_never_written() -> None:
    for value in (float("nan"), float("inf"), [float("-inf")]):
        with pytest.raises(ValueError, match="JSON"):
            canonical_json({"a": value})


def test_wire_models_round_trip_and_refuse_what_they_do_not_know() -> None:
    one = manifest()
    assert parse(Manifest, one.to_bytes(), "k") == one
    assert parse(Manifest, one.to_bytes(), "k").sha256() == one.sha256() == sha256_hex(one.to_bytes())
    ref = Ref.to(one, "weights/versions/x/manifest.json")
    assert (ref.identity, ref.payload, ref.size) == (Identity(2, 12), 9, len(one.to_bytes()))
    head = Head(channel="weights", channel_uid=UID, epoch=2, writer=WRITER, version=12, manifest=one, catchup=None,
                recent=(ref,))  # fmt: skip
    assert parse(Head, head.to_bytes(), "k") == head
    assert head.identity == Identity(2, 12)
    for change in (
        {"format": 2}, {"kind": "patch"}, {"extra": 1}, {"version": -1}, {"version": 10**10}, {"epoch": 10**6},
        {"state_digest": "md5:0"}, {"writer": "xyz"}, {"channel": "Weights"}, {"created_at": -1},
        {"objects": [{"name": "../x", "size": 1, "sha256": "a" * 64}]}, {"harness": {"curriculum": ["1"]}},
    ):  # fmt: skip
        body = one.model_dump(mode="json") | change
        with pytest.raises(CorruptObject, match="k: not a Manifest of format 1: "):
            parse(Manifest, seal(body), "k")
    wrongs: list[dict[str, object]] = [
        {"kind": "anchor"}, {"from_version": 12}, {"from_version": None}, {"base_digest": None},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(CorruptObject, match="k: not a Head of format 1: recent"):
            parse(Head, seal(head.model_dump(mode="json") | {"recent": [ref.model_dump(mode="json") | wrong]}), "k")


# --- identities and keys


def test_identities_order_by_epoch_and_print_version_at_epoch() -> None:
    ids = [Identity(1, 12), Identity(2, 3), Identity(2, 11), Identity(10, 0)]
    assert sorted([ids[2], ids[0], ids[3], ids[1]]) == ids
    assert [str(i) for i in ids] == ["12@1", "3@2", "11@2", "0@10"]
    assert [Identity.parse(str(i)) for i in ids] == ids
    for text in ("", "12", "12@", "@1", "1@2@3", "-1@2", "1 @2", "1@2\n", "12345678901@1", "1@1234567", "１@2", "1@x"):
        with pytest.raises(ValueError, match="identity"):
            Identity.parse(text)


channels = st.from_regex(r"\A[a-z][a-z0-9_]{0,31}\Z")
writers = st.from_regex(r"\A[0-9a-f]{16}\Z")


@settings(max_examples=100, deadline=None)
@given(channels, st.integers(0, 999_999), writers)
def test_head_keys_are_built_and_parsed_as_inverses(channel: str, epoch: int, writer: str) -> None:
    key = head_key(channel, epoch, writer)
    assert parse_head_key(key) == HeadKey(channel, epoch, writer)
    assert check_key(key) == key


@settings(max_examples=100, deadline=None)
@given(st.from_regex(re.compile(r"\Aheads/[a-z0-9_]{1,33}-\d{6}-[0-9a-f]{15,17}\.json\Z")) | st.text(max_size=20))
def test_what_parses_as_a_head_key_is_built_again(text: str) -> None:
    parts = parse_head_key(text)
    if parts is not None:
        assert head_key(*parts) == text


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab.-_/ é\0\\~0\n")) | st.text())
def test_a_checked_key_stays_inside_its_folder(text: str) -> None:
    try:
        key = check_key(text)
    except CorruptObject:
        return
    root = Path("/run")
    assert (root / key).resolve() == root / key
    assert key.isascii()
    assert not key.startswith(("/", "."))


def test_names_sort_like_versions() -> None:
    names = [version_name(v, e, WRITER) for v, e in ((0, 1), (9, 1), (10, 1), (10, 2), (1_000_000_000, 1))]
    assert names == sorted(names)
    assert folder_of("w/versions/x/manifest.json") == "w/versions/x/"
    assert check_key(catchup_key("w", names[0])) == f"w/catchup/{names[0]}.json"


def test_the_newest_heads_are_those_of_the_highest_epoch_of_each_channel() -> None:
    keys = [head_key("a", 1, WRITER), head_key("a", 2, WRITER), head_key("a", 2, UID), head_key("b", 9, UID)]
    keys += ["heads/readme.txt", "heads/a-1-x.json", "heads/deep/a-000003-0123456789abcdef.json"]
    found = newest([ObjectInfo(k, 1, 0.0, "") for k in keys])
    assert {c: [(k.epoch, k.writer) for k, _ in hs] for c, hs in found.items()} == {
        "a": [(2, WRITER), (2, UID)],
        "b": [(9, UID)],
    }


# --- planning

MEGA = 1_000_000


def ref(kind: str, version: int, *, epoch: int = 1, base: int | None = None, state: int, payload: int = 10,
        since: int | None = None) -> Ref:  # fmt: skip
    key = f"weights/{kind}s/{version}-{epoch}-{state}-{since}/manifest.json"
    return Ref.model_validate(
        {
            "kind": kind, "key": key, "size": 1, "sha256": "0" * 64, "payload": payload * MEGA, "epoch": epoch,
            "from_version": since if since is not None else None if base is None else version - 1,
            "version": version, "base_digest": None if base is None else digest(base), "state_digest": digest(state),
        }
    )  # fmt: skip


CHAIN = [ref("anchor", 0, state=100, payload=1000)] + [ref("delta", v, base=99 + v, state=100 + v) for v in range(1, 9)]
MIDDLE = ref("anchor", 5, state=105, payload=1000)


def steps(found: Sequence[Ref]) -> list[str]:
    return [f"{r.kind[0]}{r.version}" for r in found]


def held(version: int, state: int, epoch: int = 1) -> Held:
    return Held(Identity(epoch, version), digest(state))


def test_a_plan_walks_deltas_from_what_is_held() -> None:
    assert steps(plan(CHAIN, Identity(1, 8), held(5, 105))) == ["d6", "d7", "d8"]
    assert steps(plan(CHAIN, Identity(1, 4), held(3, 103))) == ["d4"]
    assert plan(CHAIN, Identity(1, 8), held(8, 108)) == ()


def test_a_plan_takes_the_way_of_fewest_bytes() -> None:
    assert steps(plan([*CHAIN, MIDDLE], Identity(1, 8), None)) == ["a5", "d6", "d7", "d8"]
    assert steps(plan([*CHAIN, MIDDLE], Identity(1, 8), held(0, 100)))[0] == "d1"
    light = MIDDLE.model_copy(update={"payload": 5 * MEGA})
    assert steps(plan([*CHAIN, light], Identity(1, 8), held(0, 100)))[0] == "a5"
    assert steps(plan([*CHAIN, light], Identity(1, 5), held(0, 100))) == ["a5"]


def test_a_plan_takes_spans_where_they_cost_less() -> None:
    spans = [ref("span", 4, since=0, base=100, state=104, payload=20), ref("span", 8, since=4, base=104, state=108)]
    assert steps(plan([*CHAIN, *spans], Identity(1, 8), held(0, 100))) == ["s4", "s8"]
    assert steps(plan([*CHAIN, *spans], Identity(1, 7), held(3, 103))) == ["d4", "d5", "d6", "d7"]
    assert steps(plan([*CHAIN, *spans], Identity(1, 8), held(3, 103), {spans[1].key}))[1:] == ["d5", "d6", "d7", "d8"]
    heavy = spans[0].model_copy(update={"payload": 41 * MEGA})
    assert steps(plan([*CHAIN, heavy], Identity(1, 4), held(0, 100))) == ["d1", "d2", "d3", "d4"]


def test_a_long_plan_is_found_in_one_pass_over_the_references() -> None:
    chain = [ref("delta", v, base=v - 1, state=v) for v in range(1, 20_001)]
    found = plan([ref("anchor", 0, state=0), *chain], Identity(1, 20_000), held(0, 0))
    assert [r.version for r in found] == list(range(1, 20_001))


def test_a_plan_goes_round_what_is_damaged() -> None:
    avoid = {CHAIN[4].key}
    assert steps(plan([*CHAIN, MIDDLE], Identity(1, 8), held(0, 100), avoid)) == ["a5", "d6", "d7", "d8"]
    assert steps(plan([*CHAIN, MIDDLE], Identity(1, 8), None, {MIDDLE.key}))[0] == "a0"
    with pytest.raises(Pruned, match="8@1"):
        plan([*CHAIN, MIDDLE], Identity(1, 8), held(0, 100), {CHAIN[8].key})
    assert steps(plan([*CHAIN, ref("anchor", 8, state=108)], Identity(1, 8), None, {CHAIN[8].key})) == ["a8"]


def test_what_cannot_be_reached_is_pruned_by_name() -> None:
    with pytest.raises(Pruned, match="nothing nor any live anchor"):
        plan(CHAIN[1:], Identity(1, 8), None)
    with pytest.raises(Pruned, match="3@1"):  # a gap: version 5 is missing
        plan([r for r in CHAIN[1:] if r.version != 5], Identity(1, 8), held(3, 103))
    with pytest.raises(Pruned, match="no usable reference"):
        plan(CHAIN, Identity(1, 9), held(3, 103))
    with pytest.raises(Pruned):
        plan([], Identity(1, 0), None)


def test_a_state_off_the_chain_is_never_patched() -> None:
    assert steps(plan([*CHAIN, MIDDLE], Identity(1, 8), held(6, 999))) == ["a5", "d6", "d7", "d8"]
    assert steps(plan(CHAIN, Identity(1, 8), held(6, 106, epoch=2)))[0] == "a0"
    with pytest.raises(Pruned):
        plan(CHAIN[5:], Identity(1, 8), held(9, 109))


def test_a_plan_crosses_epochs_along_the_digests() -> None:
    other = [ref("delta", 9, epoch=2, base=108, state=209), ref("delta", 10, epoch=2, base=209, state=210)]
    assert steps(plan([*CHAIN, *other], Identity(2, 10), held(7, 107))) == ["d8", "d9", "d10"]
    fork = ref("anchor", 9, epoch=2, state=300)
    assert steps(plan([*CHAIN, fork], Identity(2, 9), held(9, 300))) == ["a9"]  # equal bits of a fork: not that version
    assert plan([*CHAIN, fork], Identity(2, 9), held(9, 300, epoch=2)) == ()


def test_a_circle_of_equal_digests_ends() -> None:
    same = [ref("delta", v, base=7, state=7) for v in range(1, 6)]
    assert steps(plan(same, Identity(1, 5), held(2, 7))) == ["d3", "d4", "d5"]
    with pytest.raises(Pruned):
        plan(same, Identity(1, 5), held(9, 7))


# --- settings


class Policy(Settings):
    url: str = Field(description="where")
    tries: int = Field(default=3, ge=1)


class Example(Settings):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    share: float = 0.5
    fast: bool = False
    names: tuple[str, ...] = ()
    folder: Path | None = None
    max_body: int = 10
    policy: Policy


def loaded(words: Sequence[str] = (), environ: dict[str, str] | None = None) -> Example:
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    return load(Example, "example", parser.parse_args(words), environ or {})


def toml(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "s.toml").write_text(text)
    return ["--config", str(tmp_path / "s.toml")]


def test_flags_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    words = toml(tmp_path, 'port = 1\nhost = "file"\nmax_body = 1\n[policy]\nurl = "file"\ntries = 1\n')
    env = {"DELTAWIRE_EXAMPLE_HOST": "env", "DELTAWIRE_EXAMPLE_MAX_BODY": "2", "DELTAWIRE_EXAMPLE_POLICY__TRIES": "2"}
    flags = ["--max-body", "3", "--policy.url", "flag"]
    assert loaded(words).policy == Policy(url="file", tries=1)
    one = loaded([*words, *flags], env)
    assert (one.port, one.host, one.max_body) == (1, "env", 3)
    assert one.policy == Policy(url="flag", tries=2)
    lists = loaded(["--names", '["a","b"]', "--policy.url", "u", "--fast", "true"], {})
    assert (lists.names, lists.fast) == (("a", "b"), True)


@pytest.mark.parametrize(
    ("text", "words", "env", "message"),
    [
        ("pots = 3", ["--policy.url", "u"], {}, r"unknown setting 'pots' in .*s\.toml; known: host, port"),
        ("[policy]\nurl = 'u'\nurn = 1", [], {}, r"unknown setting 'policy\.urn'"),
        ("port = 'x'", ["--policy.url", "u"], {}, r"setting 'port' in .*s\.toml: .*integer.*found 'x'"),
        ("", ["--policy.url", "u", "--port", "70000"], {}, r"setting 'port' in --port: .*65535"),
        ("", ["--policy.url", "u"], {"DELTAWIRE_EXAMPLE_SHARE": "much"}, r"in \$DELTAWIRE_EXAMPLE_SHARE: .*'much'"),
        ("", ["--policy.url", "u"], {"DELTAWIRE_EXAMPLE_POLICY__TRIES": "0"}, r"'policy\.tries' in \$DELTAWIRE"),
        ("port = 1", [], {}, r"setting 'policy' is missing"),
        ("[policy]\ntries = 2", [], {}, r"setting 'policy\.url' is missing; .*--policy\.url"),
        ("policy = 3", ["--policy.url", "u"], {}, r"policy is a table"),
        ("port = ", [], {}, r"not a readable TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_origin(
    text: str, words: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded([*toml(tmp_path, text), *words], env)


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such settings file"):
        loaded(["--config", str(tmp_path / "none.toml")])


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.text("a\"\\'\n\t\x7f\x1f🎯é]"), max_size=3), st.none() | st.just(Path("/a b/ü")), st.booleans(),
)  # fmt: skip
def test_printed_settings_load_back(
    tmp_path_factory: pytest.TempPathFactory, host: str, share: float, names: list[str], folder: Path | None, fast: bool
) -> None:
    one = Example(host=host, share=share, names=tuple(names), folder=folder, fast=fast, policy=Policy(url=host))
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(to_toml(one), encoding="utf-8", newline="")
    assert loaded(["--config", str(path)]) == one


def test_settings_are_frozen() -> None:
    one = loaded(["--policy.url", "u"])
    with pytest.raises(ValidationError):
        one.port = 3  # type: ignore[misc]


def test_the_token_comes_from_the_environment_alone() -> None:
    assert token_from_environment({"DELTAWIRE_TOKEN": "0123456789abcdef"}) == "0123456789abcdef"
    for bad, text in [("", "not set"), ("short", "too short"), ("0123456789abcde f", "ASCII"), ("é" * 16, "ASCII")]:
        with pytest.raises(ConfigError, match=text):
            token_from_environment({"DELTAWIRE_TOKEN": bad})


def test_events_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    emitter("trainer", "json")("publish", version=Identity(2, 12), bytes=5)
    emitter("trainer")("publish", version=Identity(2, 12))
    emitter("trainer", "none")("publish")
    first, second = capsys.readouterr().err.splitlines()
    line = json.loads(first)
    assert (line["role"], line["event"], line["bytes"]) == ("trainer", "publish", 5)
    assert second == "trainer: publish version=12@2"


# --- chains


def call(prompt: Sequence[int], output: Sequence[int], *spans: tuple[int, int, str], name: str = "c") -> CallResult:
    found = spans or ((0, len(output), "1@1"),)
    return CallResult(
        id=name,
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        logprobs=tuple(-0.5 - i for i in range(len(output))),
        weight_versions=tuple(VersionSpan(version=v, start=a, end=b) for a, b, v in found if b > a),
        finish_reason="stop",
    )


def test_a_call_that_continues_extends_and_any_other_forks() -> None:
    builder = ChainBuilder()
    assert list(builder.ids) == []
    builder.append(call([1, 2], [3, 4]))
    builder.append(call([1, 2, 3, 4, 9], [5, 6], (0, 1, "1@1"), (1, 2, "2@1")))
    (chain,) = builder.chains()
    assert chain.ids == (1, 2, 3, 4, 9, 5, 6)
    assert list(builder.ids) == [1, 2, 3, 4, 9, 5, 6]
    assert chain.mask == (0, 0, 1, 1, 0, 1, 1)
    assert chain.logprobs == (0.0, 0.0, -0.5, -1.5, 0.0, -0.5, -1.5)
    assert [(s.version, s.start, s.end) for s in chain.weight_versions] == [("1@1", 2, 4), ("1@1", 5, 6), ("2@1", 6, 7)]
    builder.append(call([1, 2, 3, 7], [8]))  # another output after the same prompt
    assert [c.ids for c in builder.chains()] == [(1, 2, 3, 4, 9, 5, 6), (1, 2, 3, 7, 8)]
    builder.append(call([1, 2, 3, 4, 9, 5, 6, 1], [2]))  # back to the first
    assert [len(c.ids) for c in builder.chains()] == [5, 9]
    assert builder.ids[-2:] == (1, 2)


def test_a_call_joins_the_longest_chain_that_it_continues() -> None:
    builder = ChainBuilder()
    builder.append(call([1], [2]))
    builder.append(call([7], [8]))
    builder.append(call([1, 2, 3], [4]))
    assert [c.ids for c in builder.chains()] == [(7, 8), (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (call([1], [2, 3]).model_copy(update={"logprobs": (0.0,)}), "2 output ids but 1 logprobs"),
        (call([1], [2, 3], (0, 1, "1@1")), "cover 1 of 2"),
        (call([1], [2, 3], (1, 2, "1@1")), "gap or overlap at 0"),
        (call([1], [2, 3], (0, 2, "1@1"), (1, 2, "1@1")), "gap or overlap at 2"),
        (call([1], [2, 3], (0, 3, "1@1")), "cover 3 of 2"),
        (call([1], []).model_copy(update={"error": ErrorBody(code="aborted", message="x")}), "aborted"),
    ],
)
def test_a_call_that_does_not_add_up_is_refused_and_changes_nothing(bad: CallResult, text: str) -> None:
    builder = ChainBuilder()
    builder.append(call([1], [2]))
    before = builder.chains()
    with pytest.raises(InvalidRequest, match=text):
        builder.append(bad)
    assert builder.chains() == before


tokens = st.lists(st.integers(0, 2), max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), tokens, tokens, st.integers(0, 4)), max_size=8))
def test_any_order_of_calls_keeps_the_lengths_and_counts_every_sampled_token(
    plans: list[tuple[bool, list[int], list[int], int]],
) -> None:
    builder, sampled = ChainBuilder(), 0
    for extend, prompt, output, cut in plans:
        ids = [*builder.ids, *prompt] if extend else prompt
        at = min(cut, len(output))
        builder.append(call(ids, output, (0, at, "1@1"), (at, len(output), "2@1")))
        sampled += len(output)
        assert list(builder.ids) == ids + output
        chains = builder.chains()
        assert sum(sum(c.mask) for c in chains) == sampled
        for chain in chains:
            assert len(chain.ids) == len(chain.mask) == len(chain.logprobs)
            covered = {i for s in chain.weight_versions for i in range(s.start, s.end)}
            assert covered == {i for i, m in enumerate(chain.mask) if m}
            assert all(lp == 0.0 for lp, m in zip(chain.logprobs, chain.mask, strict=True) if not m)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": (0,)}, {"logprobs": ()}, {"mask": (1, 1)}, {"mask": (0, 2)},
        {"weight_versions": ({"version": "1@1", "start": 0, "end": 3},)},
        {"weight_versions": ({"version": "1@1", "start": 1, "end": 1},)},
        {"weight_versions": ({"version": "1@1", "start": 1, "end": 2}, {"version": "2@1", "start": 1, "end": 2})},
    ],
)  # fmt: skip
def test_chains_that_do_not_add_up_are_refused(change: dict[str, object]) -> None:
    good = {"ids": (1, 2), "mask": (0, 1), "logprobs": (0.0, -1.0),
            "weight_versions": ({"version": "1@1", "start": 1, "end": 2},)}  # fmt: skip
    assert Chain.model_validate(good).mask == (0, 1)
    with pytest.raises(ValidationError):
        Chain.model_validate(good | change)


def test_the_error_tree_has_one_root() -> None:
    from sync import errors

    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(found) > 15
    assert all(issubclass(e, DeltawireError) for e in found)
    tree = errors.__doc__ or ""
    assert all(e.__name__ in tree for e in found)
