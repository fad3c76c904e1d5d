"""What ActivationDataset reads from a bucket, and how few bytes it touches for one hook of many."""

import pytest
from extractions import upload
from runs_to_read import (
    FORMATS,
    assert_same,
    check_samples,
    in_order,
    joined,
    make_run,
    stored_tokens,
)

from activation_extraction import ActivationDataset
from activation_extraction.store import shard_reader


@pytest.mark.long
@pytest.mark.parametrize("shard_format", FORMATS)
def test_from_a_bucket(shard_format, tmp_path, bucket):
    run = make_run(tmp_path, shard_format, "bfloat16", count=12, machines=(2, 1))
    upload(run.root, "gs://bucket/some/run")
    dataset = ActivationDataset("gs://bucket/some/run")
    check_samples(dataset, run)
    found = joined(dataset.batches(64, shuffle=0))
    assert_same(in_order(found), in_order(stored_tokens(run)))


@pytest.fixture(scope="module")
def fourteen_hooks(tmp_path_factory):
    hooks = {layer: f"blocks.{layer}.hook_mlp_out" for layer in range(14)}
    root = tmp_path_factory.mktemp("fourteen")
    run = make_run(root, "safetensors", "float16", count=60, hooks=hooks, shard_size_gb=9e-4)
    return run, hooks[9]


def test_one_hook_of_many_touches_little_more_than_its_bytes(fourteen_hooks, monkeypatch):
    """At most 1.1 times; counted where a local file is read."""
    run, hook = fourteen_hooks
    touched = 0
    original = shard_reader._ranges_of

    def counting(*arguments):
        read = original(*arguments)

        def count(start, stop):
            nonlocal touched
            touched += stop - start
            return read(start, stop)

        return count

    monkeypatch.setattr(shard_reader, "_ranges_of", counting)
    dataset = ActivationDataset(run.root)
    found = joined(dataset.batches(100, hooks=[hook], shuffle=0), [hook])
    assert len(found[hook]) == dataset.tokens
    assert found[hook].nbytes <= touched <= 1.1 * found[hook].nbytes


def test_one_hook_of_many_in_a_bucket(fourteen_hooks, bucket):
    """The bucket serves at most 1.1 times its bytes."""
    run, hook = fourteen_hooks
    upload(run.root, "gs://bucket/run")
    dataset = ActivationDataset("gs://bucket/run")
    bucket.served = 0
    found = joined(dataset.batches(100, hooks=[hook], shuffle=0), [hook])
    assert len(found[hook]) == dataset.tokens
    assert found[hook].nbytes <= bucket.served <= 1.1 * found[hook].nbytes
