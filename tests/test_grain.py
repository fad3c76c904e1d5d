"""Records for grain, whose own loaders find each token once, as it was stored."""

import pickle
from functools import partial

import grain
import numpy as np
import pytest
from absl import flags
from extractions import upload
from runs_of_rows import Run
from runs_to_read import WIDTHS, assert_same, in_order, make_run, stored_tokens

from activation_extraction import ActivationDataset

FIRST, *_, LAST = WIDTHS
flags.FLAGS.mark_as_parsed()  # as absl's app.run does; grain's loaders with workers need it


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two machines, one of them with two hosts."""
    root = tmp_path_factory.mktemp("run")
    return make_run(root, "safetensors", "bfloat16", count=12, machines=(2, 1))


def loader_of(source, **options):
    sampler = grain.samplers.IndexSampler(
        len(source), shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0
    )
    batch = grain.transforms.Batch(16)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[batch], **options)


def concatenated(records):
    records = list(records)
    return {name: np.concatenate([each[name] for each in records]) for name in records[0]}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_every_token_once_in_a_random_order(run, workers):
    found = concatenated(loader_of(ActivationDataset(run.root).grain(), worker_count=workers))
    expected = in_order(stored_tokens(run))
    assert found["sample_idx"].tolist() != expected["sample_idx"].tolist()
    assert found.keys() == expected.keys()
    assert_same(in_order(found), expected)


def test_from_a_bucket(run, bucket):
    upload(run.root, "gs://bucket/run")
    source = ActivationDataset("gs://bucket/run").grain(hooks=[LAST], tokens=8)
    records = [pickle.loads(pickle.dumps(source))[number] for number in range(len(source))]
    expected = stored_tokens(run)
    names = (LAST, "token_ids", "sample_idx", "position")
    assert_same(concatenated(records), {name: expected[name] for name in names})


@pytest.mark.parametrize("tokens", [1, 2, 7, 10**6])
def test_a_record_has_consecutive_tokens_of_a_shard(run, tokens):
    """In the order of the shards, and in that of grain, which reads with several threads."""
    dataset = ActivationDataset(run.root)
    source = dataset.grain(hooks=f"*{FIRST}", tokens=tokens)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    expected = stored_tokens(run)
    expected = {name: expected[name] for name in (FIRST, "token_ids", "sample_idx", "position")}
    numbers = np.arange(len(source), dtype=np.min_scalar_type(len(source)))  # small ones overflow
    records = [source[number] for number in numbers]
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
        assert_same(in_order(concatenated(shuffled.to_iter_dataset())), in_order(expected))


def test_labels_of_tokens(tmp_path):
    run = Run([*range(30)], seed=0, kept="odd")
    dataset, found = ActivationDataset(run.store(tmp_path)), dict()
    rows = {sample.sample_idx: int(sample.doc_id[3:]) for sample in dataset}
    for number in range(len(source := dataset.grain(hooks=[]))):
        record = source[number]
        assert list(record) == ["token_ids", "sample_idx", "position", "role", "turn"]
        row = rows[int(record["sample_idx"])]
        found[row, int(record["position"])] = int(record["token_ids"]), int(record["role"])
        assert record["turn"] == record["role"] + 1
    assert found == {key: token[:2] for key, token in run.tokens().items()}


def test_a_loader_continues_and_refuses_the_state_of_others(run, tmp_path):
    dataset = ActivationDataset(run.root)
    iterator = iter(loader_of(dataset.grain()))
    first = [next(iterator) for _ in range(3)]
    state, rest = iterator.get_state(), concatenated(iterator)
    again = iter(loader_of(ActivationDataset(run.root).grain()))
    again.set_state(state)
    assert_same(concatenated(again), rest)
    assert len(rest["position"]) + 16 * len(first) == dataset.tokens
    make_run(tmp_path, "safetensors", "float16", count=12, machines=(2, 1))
    for other in (dataset.grain(hooks=[FIRST]), ActivationDataset(tmp_path).grain()):
        with pytest.raises(ValueError, match="DataSource in checkpoint does not match"):
            iter(loader_of(other)).set_state(state)


def test_what_is_refused(run, tmp_path):
    dataset = ActivationDataset(run.root)
    pickles = ActivationDataset(make_run(tmp_path, "pickle", count=2).root)
    source = dataset.grain()
    for call, error, told in (
        (partial(dataset.grain, tokens=0), ValueError, "tokens 0: expected 1 or more"),
        (partial(dataset.grain, tokens=1.5), TypeError, "float"),
        (partial(dataset.grain, hooks=["x"]), ValueError, "has no hook 'x'"),
        (pickles.grain, ValueError, f"{tmp_path}: has pickles"),
        (partial(source.__getitem__, -1), IndexError, "record -1: there are"),
        (partial(source.__getitem__, len(source)), IndexError, f"record {len(source)}: there are"),
    ):
        with pytest.raises(error, match=told):
            call()
