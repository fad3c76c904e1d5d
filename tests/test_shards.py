"""Pickled shards: written without copies, read without running what they say; damage is noticed."""

import gzip
import os
import pickle
import re
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from extractions import HOOKS, extract, records_in, replace_shard, write_records

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.common.errors import RunError
from activation_extraction.store.formats import chosen_format
from activation_extraction.store.pickle_file import pickle_pieces, records_of
from activation_extraction.store.shard import SampleRow, Shard


def peak_of(action):
    """The most bytes that Python had allocated."""
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def shard_of(values):
    """Two hooks, which share token ids and activations."""
    ids = np.arange(len(values[0]), dtype=np.int32)
    rows = [SampleRow(n, ids, ids, "text") for n in range(len(values))]
    return Shard(rows, {key: list(values) for key in HOOKS})


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_arrays_are_pickled_as_by_numpy(dtype):
    shard = shard_of(random(2, 100, 1024).astype(dtype))
    written = b"".join(pickle_pieces(shard, HOOKS))
    assert written[:2] == pickle.PROTO + b"\5"
    assert written[2:] == pickle.dumps(records_of(shard, HOOKS), protocol=4)[2:]
    values = random(5, 8).astype(dtype)
    layouts = [values.copy("F"), np.repeat(values, 2, axis=1)[:, ::2], values[::-1][::-1]]
    for record in pickle.loads(b"".join(pickle_pieces(shard_of(layouts), HOOKS)))[3]:
        np.testing.assert_array_equal(record["activation"], values)


def packed(shard, threads):
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(chosen_format("pickle", True).pack(shard, HOOKS, pool).parts)


def test_packing_copies_nothing_and_does_not_depend_on_the_number_of_threads():
    """Each thread has a few blocks of 4 MB ahead of what is written; the rest is compressed."""
    shard = shard_of(np.zeros((8, 2048, 1024), np.float32))
    assert peak_of(lambda: packed(shard, 1)) < 30e6 < 64e6
    shard = shard_of(random(3, 999, 1024).astype(np.float16))
    assert packed(shard, 1) == packed(shard, 3)


class Gadget:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


GADGETS = {  # objects whose unpickling makes a file `ran`, or which no shard of ours has
    "os.system": Gadget(os.system, "touch ran"),
    "getattr": Gadget(getattr, Gadget(__import__, "os"), "system"),
    "method of NumPy": Gadget(np.ndarray.tofile, np.zeros(1), "ran"),
    "objects in an array": np.array([Gadget(os.system, "touch ran")], dtype=object),
    "fields in an array": np.zeros(1, [("a", "f4")]),
    "another byte order": np.ones(1, ">f4"),
}


def name_of(module, name):
    return b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name)) + b"\x93"


DTYPE, ARRAY = name_of(b"numpy", b"dtype"), name_of(b"numpy", b"ndarray")
BFLOAT16 = name_of(b"ml_dtypes", b"bfloat16")
FLOAT32 = DTYPE + b"\x8c\x02f4\x85R"
EMPTY = name_of(b"numpy._core.multiarray", b"_reconstruct") + ARRAY + b"K\x00\x85C\x01b\x87R"
BY_HAND = {
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "a line in a name": b"\x80\x04" + name_of(b"a\nb\x1b[2J", b"\xed\xa0\x80") + b".",
    "attributes of a class": b"\x80\x04" + DTYPE + b"N}\x8c\x0c__defaults__)s\x86b.",
    "another bfloat16": b"\x80\x04" + BFLOAT16 + b"}\x8c\x05dtype" + FLOAT32 + b"sb.",
    "another float32": b"\x80\x04" + FLOAT32 + b"(K\x03\x8c\x01>NNNK\x00K\x00K\x3ftb.",
    "array of addresses": b"\x80\x04" + DTYPE + b"\x8c\x02O8\x89\x88\x87R.",
}


@pytest.mark.parametrize("name", [*GADGETS, *BY_HAND])
def test_what_we_do_not_write_is_refused_and_does_not_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told, contents = "(refused|cannot be read)", [BY_HAND.get(name, b"")]
    if name in GADGETS:
        told, gadgets = "refused", (GADGETS[name], {3: [{"doc_id": GADGETS[name]}]})
        contents = [pickle.dumps(each, protocol) for each in gadgets for protocol in range(6)]
    path = tmp_path / "shard_0001.pkl"
    for data in contents:
        path.write_bytes(data)
        with pytest.raises(RunError, match=f"^shard_0001.pkl: {told}: ") as refused:
            records_in(path, 10**6)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 200
    assert not (tmp_path / "ran").exists()
    # Nothing has changed for who comes next.
    write_records(path, {0: [{"activation": np.ones((2, 2), ml_dtypes.bfloat16)}]}, False)
    assert records_in(path, 10**6)[0][0]["activation"].dtype == ml_dtypes.bfloat16
    assert np.frombuffer(b"\0\0\x80?", "f4") == 1


def long(number):
    return b"\x8a\x08" + struct.pack("<q", number)


HUGE = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40),
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**28),
    "memo": b"\x80\x04]r" + struct.pack("<I", 2**24) + b".",  # in C: 256 MB, or 64 GB
    "line": b"I" + b"1" * 2_000_000,
    "more values than bytes": (
        b"\x80\x04" + EMPTY + b"(K\x01" + long(10**9) + b"\x85" + FLOAT32 + b"\x89C\0tb."
    ),
    "a call of the array type": b"\x80\x04" + ARRAY + long(10**12) + b"\x85\x85R.",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_claims_take_little_memory(name, tmp_path):
    path = tmp_path / "shard_0001.pkl.gz"
    path.write_bytes(gzip.compress(HUGE[name]))
    assert peak_of(lambda: read_fails(path, "^shard_0001.pkl.gz: ")) < 2 * 10**7


def read_fails(path, told, limit=10**6):
    with pytest.raises(RunError, match=told):
        records_in(path, limit)


def test_a_decompression_bomb_takes_little_memory(tmp_path):
    extract(tmp_path)
    size, path = 25 * 2**20, tmp_path / "shard_0002.pkl.gz"
    bomb = b"\x80\x04\x8e" + struct.pack("<Q", size) + bytes(size) + b"."
    many = b"\x80\x04](" + b"K\x00" * (size // 2) + b"e."
    for data in (bomb, many):
        replace_shard(tmp_path, 2, gzip.compress(data, 1), unpacked=9000)
        assert peak_of(lambda: read_fails(path, "unpacks to more than 1000000 b")) < 10**7
        with pytest.raises(OSError, match="shard_0002.pkl.gz: unpacks to more than 9000 bytes"):
            ActivationDataset(tmp_path)[3]


def test_a_flipped_bit_never_gives_other_activations(tmp_path):
    """Where a shard is read as the README says: it raises, or the data is what it was."""
    extract(tmp_path)
    path, chance, raised = tmp_path / "shard_0001.pkl.gz", np.random.default_rng(3), 0
    readme = Path(extract_activations.__file__).with_name("README.md").read_text()
    (expression,) = re.findall(r"`(pickle\.loads\(.*?\))`", readme)
    read = eval(f"lambda path: {expression}", {"gzip": gzip, "pickle": pickle})
    whole, expected = path.read_bytes(), read(path)
    size = len(gzip.decompress(whole))
    np.testing.assert_equal(records_in(path, size), expected)
    read_fails(path, f"unpacks to more than {size - 1} bytes", size - 1)
    record = records_in(path)[3][0]
    assert {type(record[name]) for name in ("activation", "token_ids")} == {np.ndarray}
    for _ in range(100):
        data = bytearray(whole)
        data[chance.integers(len(data))] ^= 1 << chance.integers(8)
        path.write_bytes(data)
        try:
            found = read(path)
        except Exception:
            raised += 1
        else:
            np.testing.assert_equal(found, expected)
    assert raised > 90
