"""How many requests a bucket gets: they grow with what is new, not with what is stored."""

import pytest
from gcs_server import MUTATIONS
from small_runs import Killed, content

from activation_extraction.common.errors import RunError
from activation_extraction.store import run_record
from activation_extraction.store.commit import METADATA
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.sealed_json import seal, unseal
from benchmarks.requests import NAME, ROOT, count, fill, measure_run, resume, status

URL = f"{ROOT}/{NAME}"


@pytest.mark.parametrize("action", [status, resume])
def test_they_do_not_grow_with_what_is_stored(bucket, action):
    counts = []
    for shards in (20, 200):
        fill(bucket, shards, outline=True)
        counts.append({kind: n for kind, n in count(bucket, action).items() if kind != "seconds"})
    small, large = counts
    if action is status:  # the output, the folder, and its metadata.json
        assert small == large == {"listings": 2, "reads": 1, "writes": 0}
    else:
        # Requests that gcsfs sends at the same time may share a listing, or not.
        assert {small["listings"], large["listings"]} <= {4, 5}
        assert small["writes"] == large["writes"] == 2  # the claim and metadata.json
        assert max(small["reads"], large["reads"]) < 12


@pytest.mark.long
def test_a_folder_of_an_earlier_version_is_read_as_before(bucket, capsys):
    """JSON by JSON, and to the same end."""
    printed = []
    for outline in (True, False):
        fill(bucket, 30, outline)
        found = count(bucket, lambda: printed.append(read_stored(Folder(URL), brief=True)))
        assert (found["reads"] > 30) == (not outline)
    brief, full = printed
    assert brief.totals == full.totals and len(full.commits) == 30 and not brief.commits
    assert brief.missing() == full.missing() == ([], [], [])
    assert list(brief.outline.recent)[-1].cursor == full.in_order[-1].cursor


@pytest.mark.parametrize(
    "lost,seen",
    [
        ("shard_0007.json", ([range(7, 8)], [], [])),
        ("shard_0007.pkl.gz", ([], [7], [])),
        ("shard_0007.npz", ([], [], [7])),
    ],
)
def test_what_is_missing_is_seen(bucket, lost, seen):
    fill(bucket, 30, outline=True)
    bucket.delete(f"run/{NAME}/{lost}")
    assert read_stored(Folder(URL), brief=True).missing() == seen


def test_a_partial_shard_without_statistics_is_seen(run, bucket, tmp_path):
    run(tmp_path, interrupt_after=9, remote=Folder(URL))
    partial = read_stored(Folder(URL), brief=True)
    assert partial.outline.partial and partial.missing() == ([], [], [])
    bucket.delete(f"run/{NAME}/{partial.outline.partial.statistics_file}")
    number = partial.outline.partial.number
    assert read_stored(Folder(URL), brief=True).missing() == ([], [], [number])


def test_an_outline_that_claims_too_much_is_not_believed(bucket):
    fill(bucket, 30, outline=True)
    path = f"run/{NAME}/{METADATA}"
    metadata = unseal(bucket.objects()[path], "")
    metadata["outline"]["json_bytes"] += 1
    bucket.put(path, seal(metadata))
    stored = read_stored(Folder(URL), brief=True)
    assert not stored.outline.shards and len(stored.commits) == 30


@pytest.mark.long
@pytest.mark.parametrize("every", [0, 1e9])  # seconds between outlines
def test_a_run_killed_and_continued_from_its_outline_stores_the_same(
    run, whole, bucket, tmp_path, monkeypatch, every
):
    """On empty disks; what it counts is what the JSONs say."""
    monkeypatch.setattr(run_record, "OUTLINE_SECONDS", every)
    for number in range(3, 31, 9):
        with pytest.raises(Killed):
            run(tmp_path / str(number), kill_after=number, remote=Folder(URL))
        check_sums()
    run(tmp_path / "partial", interrupt_after=32, remote=Folder(URL))
    check_sums()
    last = run(tmp_path / "last", remote=Folder(URL))
    check_sums()
    assert last.totals.samples == read_stored(Folder(URL)).metadata["samples"]
    for name in Folder(URL).files():
        Folder(URL).fetch(name, tmp_path / "last")
    assert content(tmp_path / "last") == whole


@pytest.mark.long
@pytest.mark.parametrize("at", range(1, 11))
def test_killed_after_any_write_while_it_takes_over(run, whole, bucket, tmp_path, at):
    """A run whose last shard was partial is continued by one that comes to `at` writes."""
    run(tmp_path / "a", interrupt_after=9, remote=Folder(URL))
    writes = []

    def before(method, name):
        writes.extend([name] * (method in MUTATIONS))
        if len(writes) == at:
            bucket.faults, bucket.rate = ("403",), 1.0

    bucket.before = before
    with pytest.raises(RunError):
        run(tmp_path / "b", remote=Folder(URL))
    bucket.rate, bucket.before = 0.0, lambda method, name: None
    check_sums()
    run(tmp_path / "c", remote=Folder(URL))
    check_sums()
    for name in Folder(URL).files():
        Folder(URL).fetch(name, tmp_path / "c")
    assert content(tmp_path / "c") == whole


def test_status_of_a_run_lists_and_reads_each_folder_once(monkeypatch, capsys):
    for name in ("STORAGE_EMULATOR_HOST", "FSSPEC_GCS"):
        monkeypatch.setenv(name, "{}")  # restored afterwards
    found = measure_run(3, 2, 9)
    assert (found["listings"], found["reads"]) == (1 + 6, 6)


def check_sums():
    brief, full = (read_stored(Folder(URL), brief=brief) for brief in (True, False))
    assert brief.totals == full.totals
    last = [*brief.outline.recent, *brief.in_order][-1:]
    assert [c.position for c in last] == [c.position for c in full.in_order[-1:]]
