"""Loops of PyTorch over batches: DataLoader and torchdata's StatefulDataLoader, with workers.

Workers are forked from a server without threads: in a fork of this process, a lock that one of
JAX's threads holds would never be released.
"""

import multiprocessing
import pickle
import re
import subprocess
import sys
from itertools import islice

import pytest
from runs_of_rows import WIDTHS, Run
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from activation_extraction import ActivationDataset, paired

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata
multiprocessing.set_forkserver_preload(
    ["torch.utils.data", "activation_extraction.dataset.dataset"]
)
OPTIONS = dict(shuffle=0, buffer=64, hooks=[next(iter(WIDTHS))])
FORKED = dict(num_workers=2, multiprocessing_context="forkserver")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run([*range(20)], 0, shard_format="pickle").store(tmp_path_factory.mktemp("run"))


def batches_of(run):
    return ActivationDataset(run).batches(16, **OPTIONS)


def tokens_of(batches):
    """Returns the sample and position of every token, in order."""
    pairs = [zip(b.sample_idx.tolist(), b.position.tolist(), strict=True) for b in batches]
    return [token for batch in pairs for token in batch]


def refused(loader, error, told):
    try:
        next(iter(loader))
    except error as raised:
        assert re.search(told, str(raised))
        # It would keep the workers until it is collected, in any thread, which takes 5 s for each.
        raised.__traceback__ = None
    else:
        pytest.fail(f"expected {told}")


@pytest.mark.parametrize("workers", [{}, FORKED | dict(persistent_workers=True)])
def test_every_epoch_has_each_token_once(run, workers):
    """An epoch after one that was broken off does, too. Workers read shares of their own, so where
    this process stands says nothing of theirs."""
    every = sorted(tokens_of(batches_of(run)))
    loader = DataLoader(batches_of(run).torch(), batch_size=None, **workers)
    tokens_of(islice(loader, 2))
    for _ in range(2):
        assert sorted(tokens_of(loader)) == every
    before, batches = batches_of(run), batches_of(run)
    first = tokens_of(islice(before, 5))
    batches.restore(before.state())
    for middle in (before, batches):
        loader = DataLoader(middle.torch(), batch_size=None, **workers)
        if workers:
            refused(loader, ValueError, "these batches stand in the middle of the data")
        else:
            assert sorted(first + tokens_of(loader)) == every
            assert sorted(tokens_of(loader)) == every
    batches.restore(batches_of(run).state())
    assert sorted(tokens_of(DataLoader(batches.torch(), batch_size=None, **workers))) == every


def test_a_state_that_only_workers_know_is_refused(run):
    """Saved and restored, it would let every epoch begin anew, without a word."""
    batches = batches_of(run)
    start = batches.state()
    loader = iter(DataLoader(batches.torch(), batch_size=None, **FORKED))
    next(loader)
    for ask in (batches.state, batches.torch().state_dict):
        with pytest.raises(ValueError, match="workers of a DataLoader have read these batches"):
            ask()
    del loader
    batches.restore(start)
    assert batches.state() == start
    next(iter(batches.torch()))
    assert batches.state() != start


FORK = """
import sys
from torch.utils.data import DataLoader
from activation_extraction import ActivationDataset
batches = ActivationDataset(sys.argv[1]).batches(16)
start = batches.state()
workers = dict(num_workers=1, multiprocessing_context="fork")
loader = DataLoader(batches.torch(), batch_size=None, **workers)
assert batches.state() == start
next(iter(loader))
batches.state()
"""


def test_so_is_that_of_workers_that_are_forked(run):
    """Nothing is pickled for these. They are forked from a process of their own, without JAX."""
    done = subprocess.run([sys.executable, "-c", FORK, str(run)], capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: workers of a DataLoader have" in done.stderr


@pytest.mark.parametrize("workers", [{}, FORKED])
def test_a_stateful_loader_continues_and_replays_nothing(run, workers, caplog):
    """The state was stored, and the loader is made anew; the next epoch is whole."""

    def loader_of(batches):
        return StatefulDataLoader(batches.torch(), batch_size=None, **workers)

    whole = tokens_of(loader_of(batches_of(run)))
    assert sorted(whole) == sorted(tokens_of(batches_of(run)))
    for steps in (0, 7, 10**6):
        loader = loader_of(batches_of(run))
        first = tokens_of(islice(loader, steps))
        state = pickle.dumps(loader.state_dict())
        again = loader_of(batches_of(run))
        again.load_state_dict(pickle.loads(state))
        rest = whole if steps == 10**6 else whole[len(first) :]  # then a new epoch begins
        assert tokens_of(again) == rest
    assert tokens_of(again) == whole
    assert "naively fast-forwarding" not in caplog.text  # torchdata logs that it replays
    if not workers:
        other = ActivationDataset(run).batches(8, **OPTIONS).torch()
        loader = StatefulDataLoader(other, batch_size=None)
        loader.load_state_dict(loader_of(batches_of(run)).state_dict())
        refused(loader, ValueError, "the state is of other batches: its size is 16, not 8")


def test_a_loader_that_would_make_batches_of_batches_refuses_them(run):
    for batches in (batches_of(run), paired(run, run).batches(16)):
        loader = DataLoader(batches.torch(), batch_size=2)
        refused(loader, TypeError, "found <class '.*TokenBatch'>")
        assert len(list(DataLoader(batches.torch(), batch_size=None))) > 5
