"""Pickled shards: written without copies, read without running what they say; damage is noticed."""

import gzip
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from extractions import HOOKS, extract, records_in, replace_shard

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model.torch_file import read_torch_file
from activation_extraction.store.formats import chosen_format
from activation_extraction.store.pickle_file import pickle_pieces, records_of
from activation_extraction.store.shard import Shard, ShardSample
from activation_extraction.store.stored_hook import DenseHook
from activation_extraction.text.sample_facts import SampleFacts


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
    facts = [SampleFacts(n, text_preview="text") for n in range(len(values))]
    samples = [ShardSample(each, ids, ids) for each in facts]
    hooks = {
        key: DenseHook(key, name, values[0].shape[1], values[0].dtype.name)
        for key, name in HOOKS.items()
    }
    return Shard(samples, hooks, {key: list(values) for key in HOOKS})


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_arrays_are_pickled_as_by_numpy(dtype):
    shard = shard_of(random(2, 100, 1024).astype(dtype))
    written = b"".join(pickle_pieces(shard))
    assert written[:2] == pickle.PROTO + b"\5"
    assert written[2:] == pickle.dumps(records_of(shard), protocol=4)[2:]
    values = random(5, 8).astype(dtype)
    layouts = [values.copy("F"), np.repeat(values, 2, axis=1)[:, ::2], values[::-1][::-1]]
    for record in pickle.loads(b"".join(pickle_pieces(shard_of(layouts))))[3]:
        np.testing.assert_array_equal(record["activation"], values)


def packed(shard, threads):
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(chosen_format("pickle", True).pack(shard, pool).buffers)


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


@pytest.mark.parametrize("gadget", GADGETS.values(), ids=GADGETS)
def test_what_we_do_not_write_is_refused_and_does_not_run(gadget, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = product((gadget, {3: [{"doc_id": gadget}]}), range(6))
    path = tmp_path / "shard_0001.pkl"
    for content, protocol in contents:
        path.write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(RunError, match="^shard_0001.pkl: refused: ") as refused:
            records_in(path, 10**6)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 200
    assert not (tmp_path / "ran").exists()


def read_fails(path, told, limit=10**6):
    with pytest.raises(RunError, match=told):
        records_in(path, limit)


def test_a_decompression_bomb_takes_little_memory(tmp_path):
    extract(tmp_path)
    size, path = 25 * 2**20, tmp_path / "shard_0002.pkl.gz"
    bomb = b"\x80\x04\x8e" + struct.pack("<Q", size) + bytes(size) + b"."
    replace_shard(tmp_path, 2, gzip.compress(bomb, 1), unpacked=9000)
    assert peak_of(lambda: read_fails(path, "unpacks to more than 1000000 b")) < 10**7
    with pytest.raises(OSError, match="shard_0002.pkl.gz: unpacks to more than 9000 bytes"):
        ActivationDataset(tmp_path)[3]


# Pickles of less than 30 bytes that claim as many MB or more.
CLAIMS = {
    "a number in the memo": b"\x80\x02]r" + struct.pack("<I", 2**24) + b".",
    "a number in the memo in digits": b"\x80\x02]p16777216\n.",
    "a negative number in the memo": b"\x80\x02]p-1\n.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**28) + b"few.",
    "bytes of a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**28) + b"few.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**28) + b"few.",
    "a number of many digits": b"\x80\x02\x8b" + struct.pack("<i", 2**28) + b"few.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**28) + b"].",
}


@pytest.mark.parametrize("content", CLAIMS.values(), ids=CLAIMS)
def test_a_claimed_size_takes_no_memory_before_its_bytes_are_there(content, tmp_path):
    shard, saved = tmp_path / "shard_0001.pkl", tmp_path / "saved.pt"
    shard.write_bytes(content)
    assert peak_of(lambda: read_fails(shard, "^shard_0001.pkl: ")) < 2 * 10**6
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("saved/data.pkl", content)

    def fails():
        with pytest.raises(InputError, match="^saved.pt: not a file of PyTorch tensors: "):
            read_torch_file(saved, "saved.pt")

    assert peak_of(fails) < 2 * 10**6


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
