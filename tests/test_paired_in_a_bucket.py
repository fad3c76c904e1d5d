"""Two runs in a bucket, read as one, and how many requests that takes."""

import json
from collections import Counter

import pytest
import torch
from extractions import upload
from runs_of_rows import IDS, Run, check, contents, random_runs
from runs_to_read import FORMATS
from torch.utils.data import DataLoader

from activation_extraction import paired

pytestmark = pytest.mark.long


def in_bucket(runs, tmp_path):
    urls = [f"gs://bucket/runs/{number}" for number, _ in enumerate(runs)]
    for number, (run, url) in enumerate(zip(runs, urls, strict=True)):
        upload(run.store(tmp_path / str(number)), url)
    return paired(*urls)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX has threads in this process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_restored_and_by_workers(bucket, tmp_path):
    """One run has safetensors, the other one pickles."""
    runs = random_runs(7, dtype="float32", hosts=2, shard_gb=8e-6)
    for run, form in zip(runs, ("safetensors", "pickle"), strict=True):
        run.shard_format = form
    pair = in_bucket(runs, tmp_path)
    options = dict(shuffle=0, buffer=64, columns=IDS)
    batches = pair.batches(16, **options)
    before = [next(batches) for _ in range(7)]
    state = json.loads(json.dumps(batches.state()))
    after = list(batches)
    assert len(after) > 5
    check([*before, *after], runs)
    again = paired(*(run.url for run in pair.runs)).batches(16, **options)
    again.restore(state)
    assert list(map(contents, again)) == list(map(contents, after))
    tensors = pair.batches(16, **options).torch()
    usual = dict(batch_size=None, num_workers=2)
    loader = DataLoader(tensors, multiprocessing_context="spawn", **usual)
    check([tuple(batch.map(torch.Tensor.numpy) for batch in read) for read in loader], runs)
    with pytest.raises(OSError, match="forked from one that had used a bucket"):
        next(iter(DataLoader(tensors, multiprocessing_context="fork", **usual)))


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_run_of_three_hosts_takes_about_three_times_the_requests(shard_format, bucket, tmp_path):
    """Samples that lie together are read at once, though the other run mixes those of the hosts;
    and a shard of the first run fetches each pickle that has some of its samples once."""
    rows, like = list(range(60)), dict(shard_gb=1e-5)
    runs = [Run(rows, 0, **like), Run(rows, 1, hosts=3, shard_format=shard_format, **like)]
    pair = in_bucket(runs, tmp_path)

    def asked(batches):
        bucket.asked.clear()
        assert sum(map(len, batches)) == pair.runs[0].tokens
        names = [name.split("/") for _, name in bucket.asked]
        return Counter(name[1] for name in names if len(name) > 1)  # gcsfs may ask for the bucket

    for options in (dict(), dict(shuffle=0)):
        alone = sum(
            (asked(run.batches(16, buffer=1600, **options)) for run in pair.runs), Counter()
        )
        together = asked(first for first, _ in pair.batches(16, buffer=1600, **options))
        assert together["0"] <= alone["0"] and together["1"] <= 4 * alone["1"]
