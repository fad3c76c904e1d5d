"""Batches of tokens: shuffled, filtered, restored, divided between workers, in bounded memory."""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc

import jax
import numpy as np
import pytest
import torch
from cloud import REPOSITORY
from runs_to_read import (
    DTYPES,
    FORMATS,
    WIDTHS,
    assert_same,
    in_order,
    joined,
    make_run,
    stored_tokens,
)

from activation_extraction import ActivationDataset, BatchOptions
from activation_extraction.dataset import windows
from activation_extraction.dataset.paired import JoinedRuns, PairedRuns
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.dataset.token_source import TokenSource

FIRST, SECOND, THIRD = WIDTHS


@pytest.fixture(scope="module", params=FORMATS)
def run(request, tmp_path_factory):
    """Two machines with different numbers of hosts."""
    root = tmp_path_factory.mktemp("run")
    return make_run(root, request.param, "bfloat16", count=12, machines=(2, 1))


def batch_arrays(batch):
    names = ("token_ids", "sample_idx", "position")
    return {name: getattr(batch, name) for name in names} | dict(batch.activations)


def assert_equal_batches(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(batch_arrays(ours), batch_arrays(theirs))


def test_sizes_and_seeds(run):
    dataset = ActivationDataset(run.root)
    for size, buffer in ((1, 2), (7, 100), (100, None), (10**4, 10**5)):
        sizes = [len(batch) for batch in dataset.batches(size, shuffle=0, buffer=buffer)]
        assert sum(sizes) == dataset.tokens
        assert set(sizes[:-1]) <= {size} and 0 < sizes[-1] <= size
    orders = [joined(dataset.batches(50, shuffle=seed))["sample_idx"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    buffers = [dataset.batches(size).options.buffer for size in (100, 2**22)]
    assert buffers == [6400, 2**23]  # 64 batches, or a gigabyte with room for two batches


@pytest.mark.parametrize("shard_format", FORMATS)
def test_tokens_are_mixed_over_shards_and_within_the_buffer(shard_format, tmp_path):
    """A batch of 64 has tokens of many samples, and no neighbours are left together."""
    make_run(tmp_path, shard_format, count=200, shard_size_gb=4e-5)
    dataset = ActivationDataset(tmp_path)
    assert len(list(tmp_path.glob("shard_*.json"))) > 10
    for batch in [*dataset.batches(64, shuffle=0, buffer=1000)][:-1]:
        assert len(set(batch.sample_idx)) > 10
        together = (np.diff(batch.sample_idx) == 0) & (np.diff(batch.position) == 1)
        assert together.mean() < 0.2


def test_filters(run):
    dataset = ActivationDataset(run.root)
    tokens = stored_tokens(run, skip_first=2)
    norms = {hook: np.linalg.norm(tokens[hook].astype(np.float32), axis=1) for hook in WIDTHS}
    small = {hook: norms[hook] <= 40 for hook in WIDTHS}
    every = np.logical_and.reduce(list(small.values()))
    for limit, keep in ((40, every), ({SECOND: 40.0}, small[SECOND]), (None, every | True)):
        assert keep.any() and (limit is None or not keep.all())
        options = dict(skip_first=2, max_norm=limit)
        expected = {name: values[keep] for name, values in tokens.items()}
        assert_same(joined(dataset.batches(16, **options)), expected)
        found = joined(dataset.batches(16, shuffle=3, buffer=64, **options))
        assert_same(in_order(found), in_order(expected))


def test_tokens_without_activations_and_another_dtype(run):
    dataset, stored = ActivationDataset(run.root), stored_tokens(run)
    assert_same(joined(dataset.batches(16, hooks=[]), hooks=()), stored)
    for dtype in ("float32", np.float16, "bfloat16"):
        batch = next(dataset.batches(50, hooks=FIRST, dtype=dtype))
        assert_same({"": batch[FIRST]}, {"": stored[FIRST][:50].astype(dtype)})


@pytest.mark.parametrize(
    "options",
    [
        dict(shuffle=0, buffer=60, hooks=[SECOND]),
        dict(shuffle=5, buffer=90, skip_first=1, max_norm=60.0, hooks=[FIRST, THIRD]),
        dict(shuffle=1, buffer=61, worker=1, workers=3),
    ],
)
def test_restored_at_every_step_and_all_that_follows(run, options):
    """The state goes through JSON, and into a dataset that was opened anew."""
    batches = ActivationDataset(run.root).batches(20, **options)
    states, expected = [batches.state()], []
    for batch in batches:
        expected.append(batch)
        states.append(batches.state())
    assert len(expected) > 5
    continued = ActivationDataset(run.root).batches(20, **options)
    for number, state in enumerate(states):
        continued.restore(json.loads(json.dumps(state)))
        assert continued.state() == state
        assert_equal_batches(list(continued), expected[number:])
    next(again := ActivationDataset(run.root).batches(20, **options))
    copy = pickle.loads(pickle.dumps(again))
    assert_equal_batches(list(copy), expected[1:])
    again.restore(states[3])  # back and forth, while a thread reads ahead
    assert_equal_batches([next(again)], expected[3:4])
    again.restore(states[0])
    assert_equal_batches(list(again), expected)


def test_a_state_of_other_batches_is_refused(run, tmp_path):
    dataset = ActivationDataset(run.root)
    state = dataset.batches(20, shuffle=0).state()
    for options, named in (
        (dict(size=21, shuffle=0), "its size is 20, not 21"),
        (dict(size=20, shuffle=1), "its shuffle is 0, not 1"),
        (dict(size=20, shuffle=0, hooks=[FIRST]), "its hooks is "),
        (dict(size=20, shuffle=0, max_norm=3), "its max_norm is "),
    ):
        with pytest.raises(ValueError, match=f"of other batches: {named}"):
            dataset.batches(**options).restore(state)
    make_run(tmp_path, run.format, "bfloat16", count=13, machines=(2, 1))
    with pytest.raises(ValueError, match="its data is "):
        ActivationDataset(tmp_path).batches(20, shuffle=0).restore(state)


@pytest.mark.parametrize("workers", [2, 5, 40])
def test_workers_share_all_tokens_without_overlap(run, workers):
    dataset = ActivationDataset(run.root)
    batches = [
        batch
        for worker in range(workers)
        for batch in dataset.batches(16, shuffle=0, worker=worker, workers=workers)
    ]
    assert_same(in_order(joined(batches)), in_order(stored_tokens(run)))


def test_filters_that_leave_nothing_are_told(run, caplog):
    """A worker alone cannot know it of the run, and logs it of its share."""
    options = dict(max_norm={FIRST: 0.5}, skip_first=1)
    told = f"no token passes these filters: skip_first=1, max_norm={{'{FIRST}': 0.5}}"
    batches = ActivationDataset(run.root).batches(16, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(told)):
            next(batches)
    assert not caplog.records
    assert list(ActivationDataset(run.root).batches(16, **options, worker=1, workers=2)) == []
    assert f"in the share of worker 1 of 2, {told}" in caplog.text


def to_numpy(values):
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view("bfloat16")
    return values.numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_jax_share_the_memory(dtype, tmp_path):
    run = make_run(tmp_path, "safetensors", dtype, count=6)
    dataset = ActivationDataset(run.root)
    for batch in dataset.batches(16):
        tensors, arrays = batch.torch(), batch.jax()
        assert [*batch] == [*batch.keys()] == list(dataset.hooks)
        assert_same(batch_arrays(tensors.map(to_numpy)), batch_arrays(batch))
        assert_same(batch_arrays(arrays.map(np.asarray)), batch_arrays(batch))
        assert str(tensors[FIRST].dtype) == f"torch.{dtype}" and arrays[FIRST].dtype == dtype
        for name, values in batch_arrays(batch).items():
            assert batch_arrays(tensors)[name].data_ptr() == values.ctypes.data
            if name != "sample_idx":
                shared = batch_arrays(arrays)[name].unsafe_buffer_pointer()
                assert shared == values.ctypes.data
        for moved in (batch.to("cpu"), batch.torch().to("cpu")):
            assert_same(batch_arrays(moved.map(to_numpy)), batch_arrays(batch))
        assert batch.to("meta").token_ids.device.type == "meta"
    for batches in (dataset.batches(16).torch(), dataset.batches(16).jax()):
        assert sum(len(batch) for batch in batches) == dataset.tokens
    assert isinstance(next(dataset.batches(16).jax())[FIRST], jax.Array)
    assert_same(joined(dataset.batches(16)), stored_tokens(run))


@pytest.mark.parametrize("keep", [TokenBatch.map, TokenBatch.torch, TokenBatch.jax])
def test_a_batch_is_the_callers(run, keep):
    """It may be changed, and does not change while the reading goes on."""
    dataset = ActivationDataset(run.root)
    arguments = (lambda values: values[:],) if keep is TokenBatch.map else ()
    kept, spoilt = [], []
    for number, batch in enumerate(dataset.batches(16, shuffle=0, buffer=64)):
        if number % 2:
            kept.append(keep(batch, *arguments))
        else:
            kept.append(batch.map(np.copy))
            spoilt += batch_arrays(batch).values()
        for values in spoilt:
            values[...] = 0
    assert len(kept) > 20
    kept = [b.map(to_numpy if isinstance(b[FIRST], torch.Tensor) else np.asarray) for b in kept]
    assert_same(in_order(joined(kept)), in_order(stored_tokens(run)))


@pytest.fixture(scope="module")
def large_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("large")
    hooks = {layer: f"blocks.{layer}.hook_mlp_out" for layer in range(10)}
    return make_run(root, "safetensors", "float32", count=400, hooks=hooks, shard_size_gb=2e-3)


@pytest.mark.parametrize("place", ["local", "another file system"])
@pytest.mark.parametrize("hooks,skip_first", [(2, 0), (10, 1)])
def test_memory_stays_within_the_buffer(large_run, place, hooks, skip_first):
    """Arrays are counted: at most a fifth more than the buffer, and the batch in hand.

    Files on the local disk are mapped, and their pages are not counted: they are the page cache's.
    """
    names = [f"blocks.{layer}.hook_mlp_out" for layer in range(hooks)]
    dataset = ActivationDataset(large_run.root)
    if place != "local":
        dataset.shards.local = False
    buffer, size = 1600, 32
    row = hooks * 256 * 4 + 16
    assert dataset.tokens > 2.5 * buffer
    options = dict(hooks=names, shuffle=0, buffer=buffer, skip_first=skip_first)
    batches = dataset.batches(size, **options)
    tracemalloc.start()
    try:
        for batch in batches:
            assert batch[names[0]].shape[1] == 256
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * buffer * row < peak < 1.2 * buffer * row + 3 * size * row


def test_the_default_buffer(run):
    dataset = ActivationDataset(run.root)
    for local, shuffle, hooks, tokens in (
        (True, None, [FIRST], 64 * 8),
        (True, 0, [FIRST], 64 * 8),
        (False, None, [FIRST], 2**26 // 32),  # bytes of a token
        (False, 0, [FIRST], 2**28 // 32),
        (False, 0, None, 3 * 2**28 // 128),
    ):
        dataset.shards.local = local
        options = dataset.batches(8, hooks, shuffle=shuffle).options
        assert options.buffer == tokens, (local, shuffle, hooks)


def test_in_order_tokens_are_copied_once(large_run, monkeypatch):
    """From the mapped file to their batch. Of shuffled ones, whole windows are in memory."""
    monkeypatch.setattr(windows, "LEAST_HELD", 2**10)
    dataset, peaks = ActivationDataset(large_run.root), {}
    for seed in (None, 0):
        tracemalloc.start()
        found = sum(map(len, dataset.batches(32, shuffle=seed, buffer=1600)))
        peaks[seed] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == dataset.tokens
    assert peaks[None] < 0.3 * peaks[0]


def test_tokens_side_by_side_are_copied_as_one_slice(run, monkeypatch):
    dataset, stored = ActivationDataset(run.root), stored_tokens(run)
    monkeypatch.setattr(np, "take", None)
    assert_same(joined(dataset.batches(16)), stored)
    batch = next(dataset.batches(16, dtype="float64"))
    assert_same({"": batch[FIRST]}, {"": stored[FIRST][:16].astype("float64")})
    assert len(next(dataset.batches(16, shuffle=0, buffer=64))) == 16


@pytest.mark.parametrize("shuffle,ahead", [(0, 32), (None, 18)])
def test_as_many_bytes_are_on_their_way_in_either_order(shuffle, ahead, run):
    """They are 32 ranges of 8 MiB, or 18 of 14 MiB."""
    (dataset := ActivationDataset(run.root)).shards.local = False
    dataset.shards.by_ranges = True
    assert dataset.batches(8, [FIRST], shuffle=shuffle)._share().ahead == ahead


@pytest.mark.parametrize(
    "tokens,size,sizes", [(0, 3, []), (9, 90, [9]), (9, 6, [4, 5]), (9, 8, [9]), (3, 1, [1, 1, 1])]
)
def test_chunks_are_cut_into_equal_pieces(tokens, size, sizes):
    found = windows.cut(windows.Chunk(7, 100, 100 + tokens), size)
    assert [len(each) for each in found] == sizes
    rows = [row for each in found for row in range(each.start, each.stop)]
    assert rows == [*range(100, 100 + tokens)]


def test_a_window_waits_for_none_of_the_next(large_run, monkeypatch):
    """So that requests are on their way while it is used."""
    original, used = TokenSource.tokens, threading.Event()

    def wait(source, chunks):
        assert chunks[0].shard == 0 or used.wait(60), "the first window was not handed out"
        return original(source, chunks)

    monkeypatch.setattr(TokenSource, "tokens", wait)
    dataset = ActivationDataset(large_run.root)
    dataset.shards.local = False  # several chunks are read at the same time
    size = dataset.shards.commits[0].tokens
    batches = dataset.batches(size, hooks=[], buffer=2 * size)
    found = [next(batches)]
    used.set()
    assert sum(map(len, [*found, *batches])) == dataset.tokens


@pytest.mark.parametrize(
    "options,named",
    [
        (dict(size=0), "size 0: expected 1 or more"),
        (dict(size=8, buffer=15), "buffer 15: it must hold two batches of 8 tokens"),
        (dict(size=8, worker=2, workers=2), "worker 2: expected 0 to 1, of 2 workers"),
        (dict(size=8, shuffle=True), "shuffle True: expected a seed"),
        (dict(size=8, shuffle=-1), "shuffle -1: expected a seed"),
        (dict(size=8, dtype="float17"), "dtype 'float17': "),
        (dict(size=8, dtype="int8"), "dtype 'int8': expected float16, bfloat16, float32, float64"),
        (dict(size=8, dtype=object), "dtype <class 'object'>: expected float16"),
        (dict(size=8, skip_first=-1), "skip_first -1: expected 0 or more"),
        (dict(size=8, max_norm=-1.0), "max_norm -1.0: expected 0 or more"),
        (dict(size=8, max_norm={FIRST: float("nan")}), "max_norm .*nan.*: expected 0 or more"),
        (dict(size=8, hooks=[FIRST], max_norm={SECOND: 1}), f"max_norm: hook '{SECOND}' is not"),
    ],
)
def test_arguments_that_make_no_sense(run, options, named):
    with pytest.raises(ValueError, match=named):
        ActivationDataset(run.root).batches(**options)


def test_every_option_is_described_once():
    paragraphs = re.findall(r"\n\n    ([a-z_, ]+): ", BatchOptions.__doc__)
    described = [name for names in paragraphs for name in names.split(", ")]
    assert described == [field.name for field in dataclasses.fields(BatchOptions)]
    for reader in (ActivationDataset, PairedRuns, JoinedRuns):
        assert "BatchOptions describes all arguments" in reader.batches.__doc__


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_the_background_reaches_the_loop(run, monkeypatch, error):
    """At the batch that could not be read, and every time one is asked for."""
    original = TokenSource.tokens

    def fail(source, chunks):
        if chunks[0].shard == 3:
            raise error("the network is gone")
        return original(source, chunks)

    monkeypatch.setattr(TokenSource, "tokens", fail)
    batches = ActivationDataset(run.root).batches(8, buffer=16)
    with pytest.raises(error, match="the network is gone"):
        list(batches)
    with pytest.raises(error, match="the network is gone"):
        next(batches)
    monkeypatch.setattr(TokenSource, "tokens", original)
    rest = [next(batches)]
    batches.close()  # and goes on where it stood
    rest += batches
    assert len(rest) > 5
    assert_equal_batches(rest, list(ActivationDataset(run.root).batches(8))[-len(rest) :])


LEAVE = """
import sys, time
from activation_extraction import ActivationDataset, BatchOptions
from activation_extraction.dataset.token_source import TokenSource
original = TokenSource.tokens
def slowly(*arguments):
    time.sleep(0.01)
    return original(*arguments)
TokenSource.tokens = slowly
batches = ActivationDataset(sys.argv[1]).batches(8, shuffle=0, buffer=128)
"""


@pytest.mark.parametrize(
    "how",
    [
        "for batch in batches: sys.exit()",
        "loop = (batch for batch in batches); next(loop)",
        "next(batches); cycle = [batches]; cycle.append(cycle); del batches, cycle",
    ],
)
def test_the_program_may_end_in_the_middle_of_a_loop(how, tmp_path):
    """And prints nothing then."""
    make_run(tmp_path, "safetensors")
    command = [sys.executable, "-c", LEAVE + how, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
