"""What an output folder or a bucket holds already: what is continued, refused or replaced.

test_exactly_once.py shows that whatever is continued or repaired holds every sample once;
test_verify.py, that what is damaged is not continued.
"""

import json

import numpy as np
import pytest
from extractions import edit, extract, open_part
from memory_bucket import MemoryBucket, MemoryFolder, Process
from small_runs import HIDDEN, HOOKS, files_in, run_over, status, stream_of, write_texts
from storages import open_storage

from activation_extraction.common.errors import InputError
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_log import RunLog
from activation_extraction.store.totals import Totals

IDENTITY = Identity(model_digest="tiny")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("rows") / "rows.jsonl", 40)


@pytest.fixture
def run(byte_tokenizer, rows):
    """Runs all but the model."""

    def run(folder, **options):
        usual = {"identity": IDENTITY, "shard_size_gb": 1.5e-6}
        return run_over(stream_of(rows), byte_tokenizer, folder, **usual | options)

    return run


@pytest.fixture
def bucket():
    return MemoryFolder(MemoryBucket(), Process())


def samples_in(folder):
    stored = RunLog.read(folder if isinstance(folder, Folder) else Folder(str(folder)))
    assert not stored.problems
    return Totals.of_log(stored).samples


def test_a_complete_run_is_left_alone(run, rows, tmp_path):
    """It is left alone even if it is opened because other hosts go on. Its totals are those of the
    data."""
    whole = run(tmp_path / "whole").folder
    before = files_in(whole)
    assert run(whole).complete
    lengths = [len(json.loads(line)["text"]) for line in rows.read_text().splitlines()]
    cut = [n - 24 for n in lengths if n > 24]
    totals = Totals.of_log(RunLog.read(Folder(str(whole))))
    assert (totals.cut_samples, totals.cut_tokens) == (len(cut), sum(cut))
    assert totals.tokens == sum(lengths) - sum(cut)
    with open_storage(whole, HOOKS, identity=IDENTITY, shard_size_gb=1.5e-6) as place:
        with pytest.raises(ValueError, match="holds a complete run of 36 samples"):
            place.add_activation(1, np.zeros((3, HIDDEN), np.float32), 1000, "")
        place.finalize(False)
    assert status(whole) == "complete" and files_in(whole) == before


def test_limits_may_grow_and_not_shrink(run, tmp_path):
    for most in (7, 20):
        assert run(tmp_path, max_samples=most).totals.samples == most == samples_in(tmp_path)
    with pytest.raises(InputError, match="--max_samples: .* already holds 20 samples, more than t"):
        run(tmp_path, max_samples=19)
    run(tmp_path)
    assert samples_in(tmp_path) == 36


def test_a_damaged_table_is_refused_where_it_is_needed(run, tmp_path):
    """The samples after the mark are found in it."""
    run(tmp_path, stop_after=5)
    for path in tmp_path.glob("*.parquet"):
        path.write_bytes(b"?" + path.read_bytes()[1:])
    with pytest.raises(InputError, match=r"samples.parquet: is damaged.*repair=True"):
        run(tmp_path)


def test_with_a_local_copy_both_have_every_shard(run, bucket, tmp_path):
    options = {"remote": bucket, "delete_local_after_upload": False}
    run(tmp_path, stop_after=5, **options)
    run(tmp_path, **options)
    for name, (data, _) in bucket.bucket.objects.items():
        path = tmp_path / name.removeprefix("mem://bucket/")
        assert path.suffix == ".json" or path.read_bytes() == data
    assert samples_in(bucket) == 36


def test_nothing_is_overwritten_that_is_nowhere_else(run, bucket, tmp_path):
    """Shards of a local run, or the only word on which bucket has the shards."""
    local, moved = tmp_path / "local", tmp_path / "moved"
    run(local, stop_after=5)
    before = files_in(local)
    with pytest.raises(InputError, match="its shards are here, not in mem://bucket; give --upload"):
        run(local, remote=bucket)
    assert files_in(local) == before and not bucket.files()
    run(moved, stop_after=5, remote=bucket)
    with pytest.raises(InputError, match="were uploaded to mem://bucket; .*give --upload_to_gcs"):
        run(moved)
    with pytest.raises(InputError, match="were uploaded to mem://bucket, not in mem://bucket/oth"):
        run(moved, remote=bucket.child("other"))


def test_a_json_that_a_listing_lacks_is_asked_for_by_its_name(run, bucket, tmp_path, monkeypatch):
    """A listing that comes in pages is no snapshot."""
    run(tmp_path, remote=bucket)
    whole = RunLog.read(bucket)
    listings = [bucket.listing(), bucket.listing()]
    del listings[-1]["shard_0002.json"], listings[-1]["shard_0002.npz"]
    monkeypatch.setattr(bucket, "listing", listings.pop)
    found = RunLog.read(bucket)
    assert found.commit_by_shard_number == whole.commit_by_shard_number and not found.problems


@pytest.mark.parametrize("data,told", [(None, "was replaced"), (b"1", "has 1 bytes")])
def test_a_run_is_complete_only_if_its_files_are_those_committed(run, tmp_path, data, told):
    memory, path = MemoryBucket(), "mem://bucket/shard_0001.npz"

    def disturb(number, request):
        if request == "listing" and path in memory.objects:
            memory.objects[path] = data or memory.objects[path][0], "another version"

    message = f"{path}: {told} although shard 1 is committed"
    with pytest.raises(FolderError, match=message):
        run(tmp_path, remote=MemoryFolder(memory, Process(disturb)))


def test_overwriting_removes_the_metrics_of_the_earlier_run(run, bucket, tmp_path):
    place = open_storage(tmp_path, HOOKS, identity=IDENTITY, remote=bucket)
    place.open()
    place.record({"line": 1})
    place.close()
    run(tmp_path, remote=bucket)
    assert RunLog.read(bucket).metrics
    run(tmp_path, remote=bucket, overwrite=True)
    assert not RunLog.read(bucket).metrics and not (tmp_path / "metrics.jsonl").exists()


def test_a_run_that_continues_reads_the_tables_after_its_mark_alone(tmp_path):
    """The tables of the other shards are unreadable here, and nothing refuses to continue."""
    extract(tmp_path, count=10)
    edit(tmp_path / "metadata.json", lambda metadata: metadata.update(status="running"))
    with open_part(tmp_path) as storage:
        plan = storage.plan
        marks = [commit.mark.samples for commit in plan.commits if commit.mark is not None]
        assert plan.mark is not None and plan.mark.samples == max(marks) > 0
        before_mark = [commit for commit in plan.commits if commit.last < plan.mark.samples]
        assert before_mark
        for commit in before_mark:
            path = tmp_path / commit.table_file
            path.write_bytes(bytes(path.stat().st_size))
        stored = storage.stored_after_mark
        assert {number for number in stored if number >= plan.mark.samples} == {
            *range(plan.mark.samples, 10)
        }
