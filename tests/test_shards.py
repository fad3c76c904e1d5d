"""Shards as files: whole or absent, written without copies, read without running what they say."""

import copyreg
import gzip
import os
import pickle
import struct
import subprocess
import tracemalloc
from collections import deque

import ml_dtypes
import numpy as np
import pytest
from extractions import HOOKS, extract, records_in, replace_shard, write_records
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import RunError
from activation_extraction.store.formats import Threads, gzipped
from activation_extraction.store.pickle_file import UnsafeError, pieces_of

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def peak_of(action):
    """The most bytes that Python had allocated."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def shard_of(values):
    """Two hooks, which share token ids and, in their first record, the activation."""
    ids = np.arange(values.shape[1], dtype=np.int32)
    records = [
        {"sample_idx": n, "activation": each, "shape": each.shape, "token_ids": ids}
        for n, each in enumerate(values)
    ]
    return {3: records, 5: records[:1]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_pickled_as_by_numpy(dtype):
    shard = shard_of(np.random.default_rng(0).standard_normal((2, 100, 1024)).astype(dtype))
    written = b"".join(pieces_of(shard))
    assert written[:2] == pickle.PROTO + b"\5"
    assert written[2:] == pickle.dumps(shard, protocol=4)[2:]


def packed(shard, threads):
    pool = Threads(threads)
    with pool.pool:
        yield from gzipped(pieces_of(shard), pool)


def test_arrays_are_not_copied():
    """Each thread has a few blocks of 4 MB ahead of what is written."""
    shard = shard_of(np.random.default_rng(0).standard_normal((8, 2048, 1024)).astype(np.float32))
    assert peak_of(lambda: pieces_of(shard)) < 1e6
    assert peak_of(lambda: deque(packed(shard, 1), maxlen=0)) < 30e6 < 64e6


def test_the_bytes_do_not_depend_on_the_number_of_threads():
    shard = shard_of(np.random.default_rng(0).standard_normal((3, 999, 1024)).astype(np.float16))
    found = {b"".join(packed(shard, threads)) for threads in (1, 2, 5)}
    assert len(found) == 1 and gzip.decompress(*found) == b"".join(pieces_of(shard))


@pytest.mark.parametrize("shape", [(0, 8), (5, 8)])
def test_arrays_of_any_layout_in_memory_are_stored(shape, tmp_path):
    values = np.arange(40.0).reshape(5, 8)[: shape[0]]
    layouts = [values, values.copy("F"), np.repeat(values, 2, axis=1)[:, ::2], values[::-1][::-1]]
    layouts.append(np.broadcast_to(values, shape))
    write_records(tmp_path / "shard.pkl", {3: [{"activation": each} for each in layouts]}, False)
    for record in records_in(tmp_path / "shard.pkl", 10**5)[3]:
        np.testing.assert_array_equal(record["activation"], values)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("doc_id", ["<urn:ä𝄞>", 7, -(2**70), 0.5, None, "x" * 70_000])
def test_what_we_write_is_read_back(dtype, doc_id, compress, tmp_path):
    values = np.random.default_rng(0).standard_normal((300, 64)).astype(dtype)
    with open_storage(tmp_path, HOOKS, compress_shards=compress) as storage:
        for sample, tokens in ((0, 300), (2**40, 1)):
            for key in HOOKS:
                token_ids = np.arange(tokens, dtype=np.int32)
                text = "Grüße, 世界 \u2028\n\0 𝄞" * sample.bit_length()
                storage.add_activation(key, values[:tokens] + key, sample, text, token_ids, doc_id)
    (path,) = tmp_path.glob("shard_0001.pkl*")
    found = records_in(path, 10**6)
    expected = pickle.loads(gzip.decompress(path.read_bytes()) if compress else path.read_bytes())
    assert list(found) == list(expected) == list(HOOKS)
    for key in HOOKS:
        for ours, theirs in zip(found[key], expected[key], strict=True):
            assert list(ours) == list(theirs)
            for name in ("sample_idx", "shape", "text_preview", "doc_id"):
                assert ours[name] == theirs[name]
                assert type(ours[name]) is type(theirs[name])
            for name in ("activation", "token_ids"):
                assert type(ours[name]) is np.ndarray and ours[name].flags.writeable
                assert ours[name].dtype == theirs[name].dtype
                np.testing.assert_array_equal(ours[name], theirs[name])
    assert found[3][0]["activation"].dtype == dtype


class Gadget:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def gadgets(path):
    """Name -> an object whose unpickling makes a file at `path`."""
    touch = f"open({str(path)!r}, 'w')"
    return {
        "os.system": Gadget(os.system, f"touch {path}"),
        "eval": Gadget(eval, touch),
        "exec": Gadget(exec, touch),
        "subprocess": Gadget(subprocess.check_call, ["touch", str(path)]),
        "open": Gadget(open, str(path), "w"),
        "getattr": Gadget(getattr, Gadget(__import__, "os"), "system"),
        "method of NumPy": Gadget(np.ndarray.tofile, np.zeros(1), str(path)),
        "objects in an array": np.array([Gadget(os.system, f"touch {path}")], dtype=object),
        "fields in an array": np.zeros(1, [("a", "f4")]),
        "array subclass": np.ma.masked_array([1.0]),
        "class": Gadget,
        "complex": 1j,
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", gadgets(""))
def test_pickles_that_run_code_are_refused_and_do_not_run(name, protocol, tmp_path):
    ran = tmp_path / "ran"
    data = pickle.dumps(gadgets(ran)[name], protocol)
    path = tmp_path / "shard_0001.pkl"
    for nested in (False, True):
        if nested:
            data = pickle.dumps({3: [{"doc_id": gadgets(ran)[name]}]}, protocol)
        path.write_bytes(data)
        with pytest.raises(UnsafeError, match=r"^shard_0001.pkl: refused: ") as refused:
            records_in(path, 10**6)
        assert "\n" not in str(refused.value)
    assert not ran.exists()


def name_of(module, name):
    return b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name)) + b"\x93"


DTYPE, RECONSTRUCT = (
    name_of(b"numpy", b"dtype"),
    name_of(b"numpy._core.multiarray", b"_reconstruct"),
)
ARRAY, BFLOAT16 = name_of(b"numpy", b"ndarray"), name_of(b"ml_dtypes", b"bfloat16")
FLOAT32 = DTYPE + b"\x8c\x02f4\x85R"
EMPTY = RECONSTRUCT + ARRAY + b"K\x00\x85C\x01b\x87R"
BY_HAND = {
    "persistent id": b"\x80\x04}Q.",
    "persistent id, old": b"Pmy id\n.",
    "extension": b"\x80\x04\x82\xf0.",
    "extension of four bytes": b"\x80\x04\x84\xf0\0\0\0.",
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch ran'\no.",
    "NEWOBJ": b"\x80\x04" + name_of(b"os", b"system") + b")\x81.",
    "NEWOBJ_EX": b"\x80\x04" + ARRAY + b")}\x92.",
    "a line in a name": b"\x80\x04" + name_of(b"a\nb\x1b[2J", b"\xed\xa0\x80") + b".",
    "attributes of a function": b"\x80\x04" + DTYPE + b"N}\x8c\x0c__defaults__)s\x86b.",
    "another bfloat16": b"\x80\x04" + BFLOAT16 + b"}\x8c\x05dtype" + FLOAT32 + b"sb.",
    "another float32": b"\x80\x04" + FLOAT32 + b"(K\x03\x8c\x01>NNNK\x00K\x00K\x3ftb.",
    "array of what": b"\x80\x04" + EMPTY + b"(K\x01K\x01\x85" + ARRAY + b"\x89C\x04abcdtb.",
    "array of a list": b"\x80\x04" + EMPTY + b"(K\x01K\x01\x85" + FLOAT32 + b"\x89]tb.",
    "array of addresses": b"\x80\x04" + DTYPE + b"\x8c\x02O8\x89\x88\x87R.",
    "not an empty array": b"\x80\x04" + RECONSTRUCT + ARRAY + b"K\x09\x85C\x01b\x87R.",
    "subclass of array": b"\x80\x04" + RECONSTRUCT + FLOAT32 + b"K\x00\x85C\x01b\x87R.",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_pickles_made_by_hand_are_refused(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("os", "system", 0xF0)
    request.addfinalizer(lambda: copyreg.remove_extension("os", "system", 0xF0))
    cache = copyreg._extension_cache  # type: ignore[attr-defined]
    monkeypatch.setitem(cache, 0xF0, os.system)  # as after an earlier use
    path = tmp_path / "shard_0001.pkl"
    path.write_bytes(BY_HAND[name])
    with pytest.raises(RunError, match="^shard_0001.pkl: (refused|cannot be read): ") as refused:
        records_in(path, 10**6)
    message = str(refused.value)
    assert message.isprintable() and len(message) < 200
    assert not (tmp_path / "ran").exists()
    # Nothing has changed for who comes next.
    write_records(path, {0: [{"activation": np.ones((2, 2), ml_dtypes.bfloat16)}]}, False)
    assert records_in(path, 10**6)[0][0]["activation"].dtype == ml_dtypes.bfloat16
    assert np.frombuffer(b"\0\0\x80?", "f4") == 1


def array(shape, data):
    """An array in a list, in a dict."""
    state = b"(K\x01" + shape + FLOAT32 + b"\x89C" + bytes([len(data)]) + data + b"tb"
    return b"\x80\x04" + EMPTY + state + b"."


def long(number):
    return b"\x8a\x08" + struct.pack("<q", number)


HUGE = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40),
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**28),
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40),
    "integer": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1),
    "memo": b"\x80\x04]r" + struct.pack("<I", 2**24) + b".",  # in C: 256 MB, or 64 GB
    "line": b"I" + b"1" * 2_000_000,
    "a key that is an array": b"\x80\x04}" + EMPTY + b"Ns.",
    "(5e9, 0)": array(long(5 * 10**9) + b"K\x00\x86", b""),
    "(0, 5e9), again and again": b"\x80\x04]("
    + (EMPTY + b"(K\x01K\x00" + long(5 * 10**8) + b"\x86" + FLOAT32 + b"\x89C\x00tb") * 500
    + b"e.",
    "two negative sizes": array(long(-1) + long(-1) + b"\x86", b"abcd"),
    "a product of sizes that overflows": array(long(2**62) + b"K\x08\x86", b""),
    "more values than bytes": array(long(10**9) + b"\x85", b"abcd"),
    "the same bytes in every array": b"\x80\x04](B"
    + struct.pack("<I", 1000)
    + bytes(1000)
    + b"\x94"
    + (EMPTY + b"(K\x01K\xfa\x85" + FLOAT32 + b"\x89h\x00tb") * 20_000
    + b"e.",
    "a list in itself": b"\x80\x04}K\x03]\x94h\x00as.",
    "items of an array": b"\x80\x04" + EMPTY + b"K\x00K\x01s.",
    "a new array of a huge size": b"\x80\x04" + ARRAY + long(10**12) + b"\x85\x81.",
    "a call of the array type": b"\x80\x04" + ARRAY + long(10**12) + b"\x85\x85R.",
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", HUGE)
def test_huge_claims_take_little_memory(name, compress, tmp_path):
    path = tmp_path / ("shard_0001.pkl.gz" if compress else "shard_0001.pkl")
    path.write_bytes(gzip.compress(HUGE[name]) if compress else HUGE[name])

    def refused():
        with pytest.raises(RunError, match="^shard_0001.pkl"):
            records_in(path, 10**6)

    assert peak_of(refused) < 2 * 10**7


def test_a_decompression_bomb_takes_little_memory(tmp_path):
    extract(tmp_path)
    size = 25 * 2**20
    bomb = b"\x80\x04\x8e" + struct.pack("<Q", size) + bytes(size) + b"."
    many = b"\x80\x04](" + b"K\x00" * (size // 2) + b"e."
    for data in (bomb, many):
        replace_shard(tmp_path, 2, gzip.compress(data, 1), unpacked=9000)
        assert peak_of(lambda: read_records_fails(tmp_path)) < 10**7
        with pytest.raises(OSError, match="shard_0002.pkl.gz: unpacks to more than 9000 bytes"):
            ActivationDataset(tmp_path)[3]


def read_records_fails(folder):
    with pytest.raises(UnsafeError, match="unpacks to more"):
        records_in(folder / "shard_0002.pkl.gz", 10**6)


def test_what_is_cut_short_or_no_pickle_is_told(tmp_path):
    extract(tmp_path)
    path = tmp_path / "shard_0001.pkl.gz"
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RunError, match="^shard_0001.pkl.gz: cannot be read: "):
            records_in(path, 10**6)
    for data in (b"", b"garbage", gzip.compress(b""), gzip.compress(b"."), whole[::-1]):
        path.write_bytes(data)
        with pytest.raises(RunError, match="^shard_0001.pkl.gz: "):
            records_in(path, 10**6)
