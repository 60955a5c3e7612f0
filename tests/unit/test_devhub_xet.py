"""The store of the local Hub: hashes, xorbs of every scheme, shards, plans, and what it refuses, without a server."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest

from sync.devhub.xet import formats, reconstruction, shards
from sync.devhub.xet.cas import PIECE, Cas
from sync.devhub.xet.crc64 import crc64nvme, file_crc64nvme
from sync.devhub.xet.formats import EMPTY_FILE, HEADER, Layout, hash_bytes, hash_hex, unpack, walk
from sync.errors import CorruptObject, InvalidRequest, ObjectMissing

pytestmark = pytest.mark.unit

BOOKEND = b"\xff" * 32 + bytes(16)
HEAD = shards.write_shard([shards.ShardXorb(bytes(32), 0, np.zeros(0, shards.CHUNK))], 0, 0)[:48]


def chunk(data: bytes, scheme: int) -> bytes:
    packed = data
    if scheme == 2:
        packed = b"".join(data[n::4] for n in range(4))
    if scheme:
        packed = lz4.frame.compress(packed)
    return header(len(packed), len(data), scheme) + packed


def header(packed: int, length: int, scheme: int, version: int = 0) -> bytes:
    return bytes([version]) + packed.to_bytes(3, "little") + bytes([scheme]) + length.to_bytes(3, "little")


def name_of(data: bytes) -> bytes:
    """Any 32 bytes that stand for `data`; the store takes the clients' word for hashes."""
    return hashlib.blake2b(data, digest_size=32).digest()


def file_record(name: bytes, terms: list[tuple[bytes, int, int, int]], sha256: str | None = None) -> bytes:
    flags = 1 << 31 | (1 << 30 if sha256 else 0)
    out = name + struct.pack("<IIQ", flags, len(terms), 0)
    out += b"".join(xorb + struct.pack("<4I", 0, length, start, end) for xorb, length, start, end in terms)
    out += bytes(48 * len(terms))
    return out + (hash_bytes(sha256) + bytes(16) if sha256 else b"")


def xorb_record(name: bytes, chunks: list[bytes], flags: int = 0, names: list[bytes] | None = None) -> bytes:
    out = name + struct.pack("<4I", 0, len(chunks), sum(map(len, chunks)), 0)
    offset = 0
    for n, data in enumerate(chunks):
        out += (names[n] if names else name_of(data)) + struct.pack("<4I", offset, len(data), flags, 0)
        offset += len(data)
    return out


def shard(files: list[bytes], xorbs: list[bytes]) -> bytes:
    return HEAD + b"".join(files) + BOOKEND + b"".join(xorbs) + BOOKEND


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "xet"


@pytest.fixture
def cas(folder: Path) -> Iterator[Cas]:
    store = Cas(folder)
    yield store
    store.close()


def add_xorb(cas: Cas, name: bytes, body: bytes) -> bool:
    descriptor, path = cas.new_file()
    try:
        os.write(descriptor, body)
        return cas.add_xorb(name, descriptor, path)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def add_shard(cas: Cas, body: bytes) -> bool:
    path = cas.tmp / "shard"
    path.write_bytes(body)
    try:
        return cas.add_shard(path)
    finally:
        path.unlink()


def add_chunks(cas: Cas, chunks: list[bytes], schemes: list[int] | None = None) -> bytes:
    """Store a xorb of these chunks; returns its name."""
    schemes = schemes or [0] * len(chunks)
    body = b"".join(chunk(data, scheme) for data, scheme in zip(chunks, schemes, strict=True))
    name = name_of(body)
    assert add_xorb(cas, name, body)
    return name


def walked(tmp_path: Path, body: bytes) -> Layout:
    path = tmp_path / "xorb"
    path.write_bytes(body)
    with path.open("rb") as file:
        return walk(file.fileno(), len(body))


def some_chunks(seed: int, count: int, most: int) -> list[bytes]:
    source = random.Random(seed)
    pick = (source.randbytes, lambda n: bytes([source.randrange(256)]) * n)
    return [source.choice(pick)(source.randint(1, most)) for _ in range(count)]


class TestHashes:
    def test_each_word_is_printed_as_a_number(self) -> None:
        text = "07060504030201000f0e0d0c0b0a090817161514131211101f1e1d1c1b1a1918"
        assert hash_hex(bytes(range(32))) == text
        assert hash_bytes(text) == bytes(range(32)) == hash_bytes(text.upper())

    def test_round_trip(self) -> None:
        text = hashlib.sha256(b"x").hexdigest()
        assert hash_hex(hash_bytes(text)) == text
        assert hash_bytes(text) != bytes.fromhex(text)

    @pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "g" * 64, "+" + "0" * 63, "0" * 63 + "\n", "٠" * 64])
    def test_other_texts_are_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="64 hexadecimal"):
            hash_bytes(text)


class TestCrc64:
    def test_the_published_check_value(self) -> None:
        assert crc64nvme(b"123456789") == 0xAE8B14860A799888
        assert crc64nvme(b"") == 0

    @pytest.mark.parametrize("size", [1, 7, 8, 1023, 1024, 1025, 4096, 5000, 33_333])
    def test_equals_the_definition(self, size: int) -> None:
        data = random.Random(size).randbytes(size)
        state = (1 << 64) - 1
        for octet in data:
            state ^= octet
            for _ in range(8):
                state = state >> 1 ^ (0x9A6C9329AC4BC9B5 if state & 1 else 0)
        assert crc64nvme(data) == state ^ (1 << 64) - 1

    def test_a_file_of_several_blocks(self, tmp_path: Path) -> None:
        data = random.Random(1).randbytes((9 << 20) + 12345)
        (tmp_path / "f").write_bytes(data)
        assert file_crc64nvme(tmp_path / "f") == crc64nvme(data)


class TestXorbs:
    @pytest.mark.parametrize("scheme", [0, 1, 2])
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1000, 131_072, formats.MAX_CHUNK])
    def test_every_scheme_and_length(self, tmp_path: Path, scheme: int, size: int) -> None:
        data = [random.Random(size).randbytes(size), bytes(size), b"abcdefg" * (size // 7) + b"z" * (size % 7)]
        body = b"".join(chunk(part, scheme) for part in data)
        layout = walked(tmp_path, body)
        assert layout.chunks == 3
        assert layout.content.tolist() == [0, size, 2 * size, 3 * size]
        assert list(unpack(memoryview(body), layout, 0, 3)) == data
        assert list(unpack(memoryview(body)[int(layout.packed[1]) :], layout, 1, 2)) == data[1:2]

    def test_a_footer_ends_the_chunks(self, tmp_path: Path) -> None:
        body = chunk(b"hello", 0)
        footer = b"XETBLOB" + bytes(40)
        layout = walked(tmp_path, body + footer + len(footer).to_bytes(4, "little"))
        assert layout.packed.tolist() == [0, len(body)]

    def test_bytes_and_back(self, tmp_path: Path) -> None:
        layout = walked(tmp_path, chunk(b"ab", 0) + chunk(b"cde", 1))
        again = Layout.from_bytes(layout.to_bytes())
        assert again.packed.tolist() == layout.packed.tolist()
        assert again.content.tolist() == [0, 2, 5]

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "no chunk"),
            (b"\0\0\0", "expected a header"),
            (chunk(b"abc", 0) + b"\0", "expected a header"),
            (header(3, 3, 0, version=1) + b"abc", "version 1"),
            (header(3, 3, 3) + b"abc", "scheme 3"),
            (header(3, 3, 255) + b"abc", "scheme 255"),
            (header(0, 0, 0), "0 bytes unpacked"),
            (header(20, 0, 1) + bytes(20), "0 bytes unpacked"),
            (header(20, formats.MAX_CHUNK + 1, 1) + bytes(20), "bytes unpacked"),
            (header(20, 0xFFFFFF, 2) + bytes(20), "bytes unpacked"),
            (header(2, 3, 0) + b"abc", "stored as they are"),
            (header(4, 4, 0) + b"abc", "4 bytes announced, 3 are left"),
            (header(0xFFFFFF, formats.MAX_CHUNK, 1) + b"abc", "too many"),
            (header(1000, 10, 1) + bytes(1000), "too many"),
            (chunk(b"abc", 0) + b"XETBLOB" + bytes(40), "footer"),
            (chunk(b"abc", 0) + b"XETBLOB", "footer"),
            (b"XETBLOB" + bytes(40) + (47).to_bytes(4, "little"), "no chunk"),
            (chunk(b"a", 0) * (formats.MAX_CHUNKS + 1), "more than 16384 chunks"),
            (chunk(bytes(formats.MAX_CHUNK), 1) * 66, "unpacks to more"),
        ],
    )
    def test_hostile_headers(self, tmp_path: Path, body: bytes, reason: str) -> None:
        with pytest.raises(InvalidRequest, match=reason):
            walked(tmp_path, body)

    @pytest.mark.parametrize(
        "packed",
        [
            lz4.frame.compress(bytes(10 << 20)),
            lz4.frame.compress(bytes(99)),
            lz4.frame.compress(bytes(101)),
            lz4.frame.compress(b""),
            lz4.frame.compress(random.Random(1).randbytes(100))[:-30],
            lz4.frame.compress(random.Random(1).randbytes(100))[:-4],
            bytes(40),
            b"",
        ],
    )
    @pytest.mark.parametrize("scheme", [1, 2])
    def test_a_chunk_unpacks_to_its_length_or_not_at_all(self, packed: bytes, scheme: int) -> None:
        layout = Layout(np.array([0, HEADER + len(packed)], np.uint32), np.array([0, 100], np.uint32))
        body = memoryview(header(len(packed) & 0xFFFFFF, 100, scheme) + packed)
        with pytest.raises(CorruptObject, match="upload the file again"):
            list(unpack(body, layout, 0, 1))

    def test_a_bomb_is_not_inflated(self) -> None:
        packed = lz4.frame.compress(bytes(64 << 20))
        assert len(formats.decode(1, memoryview(packed), 100)) <= 101


class TestShards:
    def test_what_is_written_is_read(self) -> None:
        described = [shards.ShardXorb(name_of(bytes([n])), 77, self.chunks(n)) for n in (3, 1, 2)]
        data = shards.write_shard(described, 1000, 2000)
        files, xorbs = shards.parse_shard(data)
        assert files == []
        assert [(x.hash, x.packed_size, x.chunks.tobytes()) for x in xorbs] == [
            (x.hash, x.packed_size, x.chunks.tobytes()) for x in described
        ]

    def test_lookup_tables_and_footer_lead_to_every_chunk(self) -> None:
        described = [shards.ShardXorb(name_of(bytes([n])), 77, self.chunks(n)) for n in (3, 1, 2)]
        data = shards.write_shard(described, 1000, 2000)
        assert struct.unpack("<QQ", data[32:48]) == (2, 200)
        words = struct.unpack("<9Q32x2Q48x4Q", data[-200:])
        version, files_at, xorbs_at, file_table, n_files, xorb_table, n_xorbs, chunk_table, n_chunks = words[:9]
        assert (version, files_at, n_files, n_xorbs, n_chunks) == (1, 48, 0, 3, 6)
        assert (words[9], words[10], words[14]) == (1000, 2000, len(data) - 200)
        assert file_table == xorb_table
        assert data[files_at : files_at + 32] == b"\xff" * 32
        rows = [struct.unpack_from("<QI", data, xorb_table + 12 * n) for n in range(3)]
        assert rows == sorted(rows)
        for word, index in rows:
            at = xorbs_at + 48 * index
            assert data[at : at + 32] in {x.hash for x in described}
            assert word == int.from_bytes(data[at : at + 8], "little")
        entries = [struct.unpack_from("<QII", data, chunk_table + 16 * n) for n in range(6)]
        assert [e[0] for e in entries] == sorted(e[0] for e in entries)
        for word, index, place in entries:
            at = xorbs_at + 48 * (index + 1 + place)
            assert word == int.from_bytes(data[at : at + 8], "little")

    @staticmethod
    def chunks(count: int) -> Any:
        records = np.zeros(count, shards.CHUNK)
        for n in range(count):
            records[n] = (np.void(name_of(bytes([count, n]))), 10 * n, 10, 0, 0)
        return records

    def test_files_with_and_without_sha256(self) -> None:
        sha256 = hashlib.sha256(b"x").hexdigest()
        first, second = name_of(b"1"), name_of(b"2")
        body = shard([file_record(first, [(bytes(32), 5, 0, 1)] * 3, sha256), file_record(second, [])], [])
        files, xorbs = shards.parse_shard(body + b"what a footer would be")
        assert xorbs == []
        assert [(f.hash, f.size, f.sha256 and hash_hex(f.sha256)) for f in files] == [
            (first, 15, sha256),
            (second, 0, None),
        ]

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "not a shard"),
            (bytes(500), "not a shard"),
            (HEAD[:40], "ends after"),
            (HEAD[:32] + struct.pack("<QQ", 3, 0), "version 3"),
            (HEAD, "ends after"),
            (HEAD + BOOKEND, "ends after"),
            (HEAD + bytes(32) + struct.pack("<IIQ", 0, 0xFFFFFFFF, 0) + BOOKEND * 2, "middle of 4294967295"),
            (HEAD + bytes(32) + struct.pack("<IIQ", 3 << 30, 1, 0) + BOOKEND * 2, "ends after"),
            (HEAD + BOOKEND + bytes(32) + struct.pack("<IIQ", 0, 5, 0) + BOOKEND, "ends after"),
        ],
    )
    def test_hostile_shards(self, body: bytes, reason: str) -> None:
        with pytest.raises(InvalidRequest, match=reason):
            shards.parse_shard(body)


class TestStore:
    def test_the_empty_file_is_always_there(self, cas: Cas) -> None:
        sha256 = hashlib.sha256(b"").hexdigest()
        assert (cas.size(EMPTY_FILE), cas.sha256(EMPTY_FILE), cas.by_sha256(sha256)) == (0, sha256, EMPTY_FILE)
        assert list(cas.read(EMPTY_FILE)) == []

    def test_unknown_files(self, cas: Cas) -> None:
        name = "1" * 64
        assert (cas.size(name), cas.sha256(name), cas.by_sha256(name)) == (None, None, None)
        with pytest.raises(ObjectMissing, match="upload it first"):
            cas.read(name)

    def test_any_range_of_a_file_across_xorbs(self, cas: Cas) -> None:
        source = random.Random(7)
        parts = [some_chunks(seed, 40, 5000) for seed in range(3)] + [[source.randbytes(700_000) for _ in range(5)]]
        names = [add_chunks(cas, part, [source.randrange(3) for _ in part]) for part in parts]
        terms, whole = [], b""
        for _ in range(25):
            n = source.randrange(4)
            start = source.randrange(len(parts[n]))
            end = source.randint(start + 1, len(parts[n]))
            data = b"".join(parts[n][start:end])
            terms.append((names[n], len(data), start, end))
            whole += data
        file = name_of(whole)
        assert add_shard(cas, shard([file_record(file, terms)], []))
        key = hash_hex(file)
        assert cas.size(key) == len(whole)
        pieces = list(cas.read(key))
        assert b"".join(pieces) == whole
        assert all(0 < len(piece) <= PIECE for piece in pieces)
        edges = [0, 1, len(whole) - 1, len(whole), terms[0][1], terms[0][1] + 1]
        for _ in range(200):
            start, end = sorted(source.choice(edges) if source.random() < 0.3 else source.randrange(len(whole))
                                for _ in range(2))  # fmt: skip
            assert b"".join(cas.read(key, start, end)) == whole[start:end], (start, end)
        assert b"".join(cas.read(key, 5)) == whole[5:]
        assert b"".join(cas.read(key, len(whole) - 3, len(whole) + 9)) == whole[-3:]
        assert list(cas.read(key, len(whole), len(whole) + 9)) == []

    def test_plans_name_only_the_chunks_that_are_needed(self, cas: Cas) -> None:
        chunks = [bytes([n]) * 10 for n in range(10)]
        xorb = add_chunks(cas, chunks)
        file = name_of(b"planned")
        add_shard(cas, shard([file_record(file, [(xorb, 50, 5, 10), (xorb, 30, 0, 3)])], []))
        key = hash_hex(file)
        term = reconstruction.Term
        assert cas.plan(key, 0, 80) == (0, [term(xorb, 50, 5, 10), term(xorb, 30, 0, 3)])
        assert cas.plan(key, 25, 26) == (5, [term(xorb, 10, 7, 8)])
        assert cas.plan(key, 10, 20) == (0, [term(xorb, 10, 6, 7)])
        assert cas.plan(key, 49, 51) == (9, [term(xorb, 10, 9, 10), term(xorb, 10, 0, 1)])
        assert cas.plan(key, 50, 80) == (0, [term(xorb, 30, 0, 3)])

    def test_answers_join_what_touches_and_split_what_is_much(self, cas: Cas) -> None:
        chunks = [bytes([n % 256, n // 256]) * 5 for n in range(400)]
        xorb = add_chunks(cas, chunks)
        terms = [(xorb, 10, n, n + 1) for n in range(398, -1, -2)] + [(xorb, 20, 0, 2), (xorb, 10, 1, 2)]
        file = name_of(b"scattered")
        add_shard(cas, shard([file_record(file, terms)], []))
        plan = cas.plan(hash_hex(file), 0, 10 * 200 + 30)
        answer = reconstruction.answer_v2(plan, cas.layout, hash_hex)
        fetches = answer["xorbs"][hash_hex(xorb)]
        assert [len(f["ranges"]) for f in fetches] == [64, 64, 64, 7]
        assert fetches[0]["ranges"][0] == {"chunks": {"start": 0, "end": 3}, "bytes": {"start": 0, "end": 18 * 3 - 1}}
        assert fetches[0]["ranges"][1] == {"chunks": {"start": 4, "end": 5}, "bytes": {"start": 72, "end": 89}}
        assert len(answer["terms"]) == 202
        first = reconstruction.answer_v1(plan, cas.layout, hash_hex)["fetch_info"][hash_hex(xorb)]
        assert len(first) == 199
        assert first[0]["range"] == {"start": 0, "end": 3}

    def test_a_second_upload_changes_nothing(self, cas: Cas) -> None:
        body = chunk(b"first", 0)
        assert add_xorb(cas, name_of(body), body)
        assert not add_xorb(cas, name_of(body), chunk(b"other", 0))
        assert cas.xorb_path(name_of(body)).read_bytes() == body
        assert list(cas.tmp.iterdir()) == []

    def test_many_at_once(self, cas: Cas) -> None:
        body = b"".join(chunk(part, 0) for part in some_chunks(1, 50, 4000))
        with ThreadPoolExecutor(8) as pool:
            inserted = list(pool.map(lambda _: add_xorb(cas, name_of(body), body), range(16)))
        assert sum(inserted) == 1
        assert cas.xorb_path(name_of(body)).read_bytes() == body

    def test_refused_xorbs_leave_nothing(self, cas: Cas, folder: Path) -> None:
        with pytest.raises(InvalidRequest):
            add_xorb(cas, name_of(b"bad"), b"no xorb at all")
        assert not cas.has_xorb(name_of(b"bad"))
        assert [path for path in folder.rglob("*") if path.is_file() and "index" not in path.name] == []

    @pytest.mark.parametrize(
        ("term", "reason"),
        [
            ((name_of(b"nobody"), 3, 0, 1), "no xorb"),
            ((None, 3, 0, 4), "chunks 0 to 4 of a xorb that has 3"),
            ((None, 0, 1, 1), "chunks 1 to 1"),
            ((None, 3, 2, 1), "chunks 2 to 1"),
            ((None, 0xFFFFFFFF, 0, 1), "4294967295 bytes announced, its chunks have 3"),
        ],
    )
    def test_shards_that_do_not_fit_the_xorbs(
        self, cas: Cas, term: tuple[bytes | None, int, int, int], reason: str
    ) -> None:
        xorb = add_chunks(cas, [b"abc", b"de", b"f"])
        good, bad = name_of(b"good"), name_of(b"bad")
        files = [file_record(good, [(xorb, 6, 0, 3)]), file_record(bad, [(term[0] or xorb, *term[1:])])]
        with pytest.raises(InvalidRequest, match=reason):
            add_shard(cas, shard(files, []))
        assert cas.size(hash_hex(good)) is None
        assert add_shard(cas, shard(files[:1], []))
        assert b"".join(cas.read(hash_hex(good))) == b"abcdef"

    def test_shards_that_describe_other_xorbs(self, cas: Cas) -> None:
        xorb = add_chunks(cas, [b"abc", b"de", b"f"])
        for chunks in ([b"abc", b"de"], [b"abc", b"d", b"ef"], [b"abc", b"de", b"f", b"g"]):
            with pytest.raises(InvalidRequest, match="not those that were uploaded"):
                add_shard(cas, shard([], [xorb_record(xorb, chunks)]))
        with pytest.raises(InvalidRequest, match="no xorb"):
            add_shard(cas, shard([], [xorb_record(name_of(b"nobody"), [b"abc"])]))

    def test_a_shard_sent_again_is_known(self, cas: Cas) -> None:
        xorb = add_chunks(cas, [b"abc"])
        body = shard([file_record(name_of(b"f"), [(xorb, 3, 0, 1)])], [xorb_record(xorb, [b"abc"])])
        assert [add_shard(cas, body), add_shard(cas, body)] == [True, False]

    def test_chunks_that_others_may_find(self, cas: Cas) -> None:
        parts = [b"begin", b"plain", b"even", b"start"]
        names = [name_of(part) for part in parts]
        names[2] = names[2][:24] + struct.pack("<Q", 5 * 1024)
        xorb, other = add_chunks(cas, parts), add_chunks(cas, [b"neighbour"])
        files = [file_record(name_of(b"1"), [(xorb, 5, 0, 1)]), file_record(name_of(b"2"), [(xorb, 5, 3, 4)])]
        described = [xorb_record(other, [b"neighbour"]), xorb_record(xorb, parts, names=names)]
        add_shard(cas, shard(files, described))
        for n in (0, 2, 3):
            answer = cas.find_chunk(hash_hex(names[n]))
            assert answer is not None
            found = shards.parse_shard(answer)[1]
            assert {x.hash for x in found} == {xorb, other}
            assert names[n] in {h.tobytes() for x in found for h in x.chunks["hash"]}
        assert cas.find_chunk(hash_hex(names[1])) is None
        assert cas.find_chunk(hash_hex(name_of(b"neighbour"))) is None
        marked = add_chunks(cas, [b"marked"])
        add_shard(cas, shard([], [xorb_record(marked, [b"marked"], flags=1 << 31)]))
        assert cas.find_chunk(hash_hex(name_of(b"marked"))) is not None

    def test_false_claims_of_a_sha256(self, cas: Cas) -> None:
        truth = hashlib.sha256(b"true").hexdigest()
        liar, honest = name_of(b"liar"), name_of(b"honest")
        xorb = add_chunks(cas, [b"lies", b"true"])
        add_shard(cas, shard([file_record(liar, [(xorb, 4, 0, 1)], truth)], []))
        add_shard(cas, shard([file_record(honest, [(xorb, 4, 1, 2)], truth)], []))
        assert cas.by_sha256(truth) == hash_hex(honest)
        assert cas.sha256(hash_hex(liar)) == hashlib.sha256(b"lies").hexdigest()
        add_shard(cas, shard([file_record(honest, [(xorb, 4, 1, 2)], "1" * 64)], []))
        assert cas.sha256(hash_hex(honest)) == truth
        assert cas.by_sha256("1" * 64) is None

    def test_a_sha256_told_later(self, cas: Cas) -> None:
        xorb, file, truth = add_chunks(cas, [b"data"]), name_of(b"f"), hashlib.sha256(b"data").hexdigest()
        add_shard(cas, shard([file_record(file, [(xorb, 4, 0, 1)])], []))
        assert cas.sha256(hash_hex(file)) is None
        add_shard(cas, shard([file_record(file, [(xorb, 4, 0, 1)], truth)], []))
        assert (cas.sha256(hash_hex(file)), cas.by_sha256(truth)) == (truth, hash_hex(file))
        add_shard(cas, shard([file_record(file, [(xorb, 4, 0, 1)]), file_record(name_of(b"g"), [])], []))
        assert cas.by_sha256(truth) == hash_hex(file)

    def test_open_again(self, cas: Cas, folder: Path) -> None:
        xorb, file = add_chunks(cas, [b"kept"]), name_of(b"kept")
        add_shard(cas, shard([file_record(file, [(xorb, 4, 0, 1)])], [xorb_record(xorb, [b"kept"])]))
        (cas.tmp / "half").write_bytes(b"of an upload")
        cas.close()
        again = Cas(folder)
        try:
            assert b"".join(again.read(hash_hex(file))) == b"kept"
            assert again.find_chunk(hash_hex(name_of(b"kept"))) is not None
            assert (again.secret, list(again.tmp.iterdir())) == (cas.secret, [])
        finally:
            again.close()

    def test_a_file_that_a_kill_left_behind_is_replaced(self, cas: Cas) -> None:
        body = chunk(b"whole", 0)
        path = cas.xorb_path(name_of(body))
        path.parent.mkdir()
        path.write_bytes(b"left by a process that was killed before it noted the xorb")
        assert not cas.has_xorb(name_of(body))
        assert add_xorb(cas, name_of(body), body)
        assert path.read_bytes() == body

    def test_a_damaged_xorb_is_an_error_not_other_bytes(self, cas: Cas) -> None:
        parts = [b"q" * 5000, b"r" * 5000]
        xorb, file = add_chunks(cas, parts, [1, 1]), name_of(b"f")
        add_shard(cas, shard([file_record(file, [(xorb, 10_000, 0, 2)])], []))
        path = cas.xorb_path(xorb)
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(CorruptObject):
            list(cas.read(hash_hex(file)))

    def test_the_secret_is_private(self, cas: Cas, folder: Path) -> None:
        assert len(cas.secret) == 32
        for path in folder.glob("index.sqlite3*"):
            assert path.stat().st_mode & 0o077 == 0, path
