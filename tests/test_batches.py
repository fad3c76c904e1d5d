"""Batches of tokens: shuffled, filtered, restored, divided between workers, in bounded memory."""

import json
import pickle
import re
import tracemalloc

import jax
import numpy as np
import pytest
import torch
from extractions import shard_file
from runs_of_rows import WIDTHS
from runs_to_read import SHARED, assert_same, in_order, joined, run_of, stored_tokens

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.dataset.token_batch import TokenBatch

FIRST, SECOND, THIRD = WIDTHS
WIDE = "blocks.9.mlp.hook_post"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two machines with different numbers of hosts."""
    run = run_of("pickle", "bfloat16", 36, hosts=(2, 1))
    run.store(tmp_path_factory.mktemp("run"))
    return run


def batch_arrays(batch):
    return {name: getattr(batch, name) for name in SHARED} | dict(batch.activations)


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
    shares = [dataset.batches(16, shuffle=0, worker=n, workers=20) for n in range(20)]
    found = joined(batch for share in shares for batch in share)  # more shares than shards
    assert_same(in_order(found), stored_tokens(run))
    buffers = [dataset.batches(size).options.buffer for size in (100, 2**22)]
    assert buffers == [6400, 2**30 // 36]  # 64 batches, or a gigabyte of bytes


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_tokens_are_mixed_over_shards_and_within_the_buffer(shard_format, tmp_path):
    """A batch of 64 has tokens of many samples, and no neighbours are left together."""
    run_of(shard_format, count=200, shard_gb=1e-5).store(tmp_path)
    dataset = ActivationDataset(tmp_path)
    assert len(list(tmp_path.glob("shard_*.json"))) > 10
    for batch in [*dataset.batches(64, shuffle=0, buffer=1000)][:-1]:
        assert len(set(batch.sample_idx)) > 10
        together = (np.diff(batch.sample_idx) == 0) & (np.diff(batch.position) == 1)
        assert together.mean() < 0.2


@pytest.mark.parametrize(
    "options",
    [
        dict(shuffle=5, buffer=90, skip_first=1, max_norm=3.0, hooks=[FIRST, THIRD]),
        dict(shuffle=1, buffer=61, worker=1, workers=2),
    ],
)
def test_restored_at_every_step_and_all_that_follows(run, options):
    """The state goes through JSON, and into a dataset that was opened anew."""
    batches = ActivationDataset(run.root).batches(30, **options)
    states, expected = [batches.state()], []
    for batch in batches:
        expected.append(batch)
        states.append(batches.state())
    assert len(expected) > 4
    continued = ActivationDataset(run.root).batches(30, **options)
    for number, state in enumerate(states):
        continued.restore(json.loads(json.dumps(state)))
        assert continued.state() == state
        assert_equal_batches(list(continued), expected[number:])
    next(again := ActivationDataset(run.root).batches(30, **options))
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
        (dict(size=20, shuffle=0, hooks=[FIRST]), "its hooks is "),
        (dict(size=20, shuffle=0, max_norm=3), "its max_norm is "),
    ):
        with pytest.raises(ValueError, match=f"of other batches: {named}"):
            dataset.batches(**options).restore(state)
    run_of("pickle", "bfloat16", 37, hosts=(2, 1)).store(tmp_path)
    with pytest.raises(ValueError, match="its data is "):
        ActivationDataset(tmp_path).batches(20, shuffle=0).restore(state)


def test_filters_that_leave_nothing_are_told(run, caplog):
    """A worker alone cannot know it of the run, and logs it of its share."""
    options = dict(max_norm={FIRST: 0.1}, skip_first=1)
    told = f"no token passes these filters: skip_first=1, max_norm={{'{FIRST}': 0.1}}"
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_and_jax_have_the_same_values_and_torch_the_same_memory(dtype, tmp_path):
    run = run_of("safetensors", dtype, hooks={1: FIRST, 9: WIDE})
    dataset = ActivationDataset(run.store(tmp_path))
    batch = next(dataset.batches(64))
    tensors, arrays, values = batch.torch(), batch.jax(), batch_arrays(batch)
    assert [*batch] == [*batch.keys()] == list(dataset.hooks)
    assert str(tensors[FIRST].dtype) == f"torch.{dtype}" and arrays[FIRST].dtype == dtype
    for moved in (tensors, batch.to("cpu"), tensors.to("cpu")):
        assert_same(batch_arrays(moved.map(to_numpy)), values)
    assert_same(batch_arrays(arrays.map(np.asarray)), values)
    assert batch.to("meta").token_ids.device.type == "meta"
    for name, array in values.items():
        assert batch_arrays(tensors)[name].data_ptr() == array.ctypes.data
    for batches in (dataset.batches(16).torch(), dataset.batches(16).jax()):
        assert sum(len(batch) for batch in batches) == dataset.tokens
    assert isinstance(next(dataset.batches(16).jax())[FIRST], jax.Array)


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
    assert_same(in_order(joined(kept)), stored_tokens(run))


@pytest.fixture(scope="module")
def large_run(tmp_path_factory):
    hooks = {layer: f"blocks.{layer}.mlp.hook_post" for layer in range(10)}
    run = run_of("safetensors", count=400, hooks=hooks, shard_gb=2e-3)
    return ActivationDataset(run.store(tmp_path_factory.mktemp("large")))


@pytest.mark.parametrize("local,hooks,skip_first", [(True, 10, 1), (False, 2, 0)])
def test_memory_stays_within_the_buffer(large_run, local, hooks, skip_first):
    """Arrays are counted: at most a fifth more than the buffer, and the batch in hand.

    Files on the local disk are mapped, and their pages are not counted: they are the page cache's.
    """
    names, dataset = list(large_run.hooks)[:hooks], pickle.loads(pickle.dumps(large_run))
    dataset.shards.is_local = local
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


@pytest.mark.parametrize(
    "options,named",
    [
        (dict(size=0), "size 0: expected 1 or more"),
        (dict(size=8, buffer=15), "buffer 15: it must hold two batches of 8 tokens"),
        (dict(size=8, worker=2, workers=2), "worker 2: expected 0 to 1, of 2 workers"),
        (dict(size=8, shuffle=True), "shuffle True: expected a seed"),
        (dict(size=8, dtype="int8"), "dtype 'int8': expected float16, bfloat16, float32, float64"),
        (dict(size=8, max_norm=-1.0), "max_norm -1.0: expected 0 or more"),
        (dict(size=8, hooks=[FIRST], max_norm={SECOND: 1}), f"max_norm: hook '{SECOND}' is not"),
    ],
)
def test_arguments_that_make_no_sense(run, options, named):
    with pytest.raises(ValueError, match=named):
        ActivationDataset(run.root).batches(**options)


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_an_error_in_the_background_reaches_the_loop(shard_format, tmp_path):
    """It does so at the batch that could not be read, whenever that is asked for."""
    run_of(shard_format).store(tmp_path)
    batches = ActivationDataset(tmp_path).batches(8, buffer=16)
    path = shard_file(tmp_path, 3)
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    for read in (list, next):
        with pytest.raises(OSError, match=f"{path.name}: is damaged"):
            read(batches)
    path.write_bytes(content)
    rest = [next(batches)]
    batches.close()  # and goes on where it stood
    rest += batches
    assert len(rest) > 5
    assert_equal_batches(rest, list(ActivationDataset(tmp_path).batches(8))[-len(rest) :])
