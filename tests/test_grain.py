"""Records for grain, whose own loaders find each token once, as it was stored."""

import pickle
from functools import partial

import grain
import numpy as np
import pytest
from absl import flags
from extractions import upload
from runs_of_rows import WIDTHS, Run
from runs_to_read import SHARED, assert_same, in_order, joined, stored_tokens

from activation_extraction import ActivationDataset

FIRST = next(iter(WIDTHS))
flags.FLAGS.mark_as_parsed()  # as absl's app.run does; grain's loaders with workers need it


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two machines, one of them with two hosts."""
    run = Run([*range(36)], 0, kept="odd", hosts=(2, 1), dtype="bfloat16")
    run.store(tmp_path_factory.mktemp("run"))
    return run


def loader_of(source, **options):
    sampler = grain.samplers.IndexSampler(
        len(source), shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0
    )
    batch = grain.transforms.Batch(16)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[batch], **options)


def concatenated(records):
    records = list(records)
    return {name: np.concatenate([each[name] for each in records]) for name in records[0]}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_every_token_once_in_a_random_order(run, workers):
    found = concatenated(loader_of(ActivationDataset(run.root).grain(), worker_count=workers))
    expected = stored_tokens(run)
    assert found["sample_idx"].tolist() != expected["sample_idx"].tolist()
    assert found.keys() == expected.keys()
    assert_same(in_order(found), expected)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_record_has_consecutive_tokens_of_a_shard(run, tokens):
    """The order is that of the shards, or that of grain, which reads with several threads."""
    dataset = ActivationDataset(run.root)
    source = dataset.grain(hooks=f"*{FIRST}", tokens=tokens)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    expected = joined(dataset.batches(50, hooks=[FIRST]))
    numbers = np.arange(len(source), dtype=np.min_scalar_type(len(source)))  # small ones overflow
    records = [{n: source[number][n] for n in (FIRST, *SHARED)} for number in numbers]
    if tokens == 1:
        assert {name: each.shape for name, each in records[3].items()} == {
            name: values.shape[1:] for name, values in expected.items()
        }
        records = [{name: each[None] for name, each in record.items()} for record in records]
    assert_same(concatenated(records), expected)
    shards = [commit.tokens for commit in dataset.shards.commits]
    sizes = [min(tokens, each - at) for each in shards for at in range(0, each, tokens)]
    assert [len(record["position"]) for record in records] == sizes
    assert all(each.flags.writeable for each in source[0].values())  # no view of the file
    if tokens > 1:
        shuffled = grain.MapDataset.source(source).shuffle(seed=0).batch(4, batch_fn=concatenated)
        found = in_order(concatenated(shuffled.to_iter_dataset()))
        assert_same(found, stored_tokens(run))


def test_a_loader_continues_and_refuses_the_state_of_others(run, tmp_path, bucket):
    """It continues, too, where the same run is read from a bucket."""
    dataset = ActivationDataset(run.root)
    upload(run.root, "gs://bucket/run")
    iterator = iter(loader_of(dataset.grain()))
    first = [next(iterator) for _ in range(3)]
    state, rest = iterator.get_state(), concatenated(iterator)
    assert len(rest["position"]) + 16 * len(first) == dataset.tokens
    source = pickle.loads(pickle.dumps(ActivationDataset("gs://bucket/run").grain()))
    again = iter(loader_of(source))
    again.set_state(state)
    assert_same(concatenated(again), rest)
    Run(run.rows, 0, kept="odd", hosts=(2, 1), dtype="float16").store(tmp_path)
    for other in (dataset.grain(hooks=[FIRST]), ActivationDataset(tmp_path).grain()):
        with pytest.raises(ValueError, match="DataSource in checkpoint does not match"):
            iter(loader_of(other)).set_state(state)


def test_what_is_refused(run, tmp_path):
    dataset = ActivationDataset(run.root)
    pickles = ActivationDataset(Run([1, 2], 0, shard_format="pickle").store(tmp_path))
    source = dataset.grain()
    for call, error, told in (
        (partial(dataset.grain, tokens=0), ValueError, "tokens 0: expected 1 or more"),
        (partial(dataset.grain, hooks=["x"]), ValueError, "has no hook 'x'"),
        (pickles.grain, ValueError, f"{tmp_path}: has pickles"),
        (partial(source.__getitem__, len(source)), IndexError, f"record {len(source)}: there are"),
    ):
        with pytest.raises(error, match=told):
            call()
