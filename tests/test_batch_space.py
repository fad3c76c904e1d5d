"""The memory of batches: which of them are handed out without a copy, and who copies into it."""

import threading
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from runs_to_read import WIDTHS, make_run

from activation_extraction import ActivationDataset
from activation_extraction.dataset.batch_space import HELD
from activation_extraction.dataset.shared_work import SharedWork

FIRST = next(iter(WIDTHS))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    return ActivationDataset(make_run(root, "safetensors", "bfloat16", count=40).root)


def lies_in_its_slot(batch, batches):
    return np.shares_memory(batch[FIRST], batches._window.space._rows[FIRST])


def test_batches_are_handed_out_where_they_lie_until_too_many_are_held(dataset):
    batches = dataset.batches(16, shuffle=0, buffer=64)
    held = [next(batches) for _ in range(HELD)]
    assert all(lies_in_its_slot(batch, batches) for batch in held)
    assert not lies_in_its_slot(next(batches), batches)
    width = held.pop()[FIRST]  # one array is enough to hold the batch
    assert not lies_in_its_slot(next(batches), batches)
    del width
    assert lies_in_its_slot(next(batches), batches)
    held.clear()
    assert all(lies_in_its_slot(batch, batches) for batch in batches)


def test_a_batch_in_another_dtype_does_not_hold_its_slot(dataset):
    batches = dataset.batches(16, shuffle=0, buffer=64, dtype="float32")
    held = [next(batches) for _ in range(20)]
    assert not any(lies_in_its_slot(batch, batches) for batch in held)
    assert not batches._window.space._lent


def test_restoring_gives_back_the_slots_that_are_left_out(dataset):
    """Else there would be none for the windows that follow."""
    batches = dataset.batches(16, shuffle=0, buffer=128)
    expected = [batch.sample_idx for batch in batches]
    batches.restore(dataset.batches(16, shuffle=0, buffer=128).state())
    for _ in range(3):
        next(batches)
    batches.restore(batches.state())
    found = [batch.sample_idx for batch in batches]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected[3:]))


@pytest.mark.parametrize("threads", [1, 2])
def test_shared_work_is_done_once_and_its_errors_are_raised(threads):
    work, done, failing = SharedWork(threads), [], threading.Event()

    def fail():
        failing.set()
        raise OSError("the disk is gone")

    with closing(work):
        work.begin([partial(done.append, number) for number in range(50)])
        work.finish()
        assert sorted(done) == list(range(50))
        with pytest.raises(OSError, match="the disk is gone"):
            work.begin([fail])  # is left to the other thread, if there is one
            assert failing.wait(60)
            work.finish()
