"""--repair as a user meets it: what is stored afterwards is what an undisturbed run stores.

test_exactly_once.py sweeps what may happen to shards and repairs.
"""

import errno
import json
import os
import re
import shutil
import threading
from collections import Counter

import numpy as np
import pytest
from command_line import main
from extractions import edit, flip, shard_file
from small_runs import files_in, set_status

from activation_extraction import ActivationDataset
from activation_extraction.run.hosts import Watchdog
from activation_extraction.store import shard_reader


@pytest.fixture(scope="module")
def flags(demo_inputs):
    return [
        "--model_path",
        demo_inputs / "model",
        "--layers_to_extract",
        1,
        3,
        "--dataset_path",
        demo_inputs / "documents.parquet",
        "--max_seq_length",
        64,
        "--max_samples",
        120,
        "--shard_size_gb",
        0.0008,
        "--no_data_parallel",
    ]


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(*flags, "--output_dir", folder) == 0
    return folder


def values_in(output):
    """Returns the numbers of all samples, in order, and their values at a hook."""
    dataset = ActivationDataset(str(output))
    hook, tokens = next(iter(dataset.hooks)), dataset.tokens
    (batch,) = dataset.batches(tokens, [hook], shuffle=None)
    order = np.lexsort((batch.position, batch.sample_idx))
    return batch.sample_idx[order], batch[hook][order]


def same_values(output, whole):
    for found, due in zip(values_in(output), values_in(whole), strict=True):
        np.testing.assert_array_equal(found, due)


def harm(folder, *numbers):
    for number in numbers:
        path = shard_file(folder, number)
        flip(path, path.stat().st_size // 2)


def test_the_command_repairs_a_folder(flags, undisturbed, tmp_path, capsys):
    """It keeps the limits of the run, and its totals, which are written again if they are wrong."""
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "shard_0004.json").unlink()
    harm(out, 1, 6, 7)
    repair = [*flags, "--output_dir", out, "--repair", "--batch_size", 3]
    assert main(*repair, "--max_samples", 20) == 0
    *_, told, verdict = capsys.readouterr().out.splitlines()
    assert told == f"repaired: shards stored in {out}: 1, 4, 6-7"
    assert verdict.startswith("in order: 1 folder, 10 shards, 120 samples")
    same_values(out, undisturbed)
    edit(out / "metadata.json", lambda content: content.update(tokens=content["tokens"] + 1))
    assert main(*repair) == 0
    first, *_, verdict = capsys.readouterr().out.splitlines()
    assert first.endswith(": none") and verdict.startswith("in order: ")
    set_status(out, "interrupted")  # what comes after the mark of its shards is left to the run
    harm(out, 3, 8, 9, 10)
    assert main(*repair) == 1
    told, left, *_, verdict = capsys.readouterr().out.splitlines()
    assert told.startswith("repaired: ") and verdict.startswith("FAILED")
    assert " 120 samples" not in verdict
    assert left == "the run is not complete: the same command without --repair continues it"
    assert main(*repair) == 0
    same_values(out, undisturbed)
    assert main(*repair, "--layers_to_extract", 2) == 2
    assert "differs in hooks" in capsys.readouterr().err


def test_a_lost_sample_that_a_limit_had_cut_is_stored_whole(flags, tmp_path, capsys):
    """This is told. The same command then finds the run complete, though it exceeds its limit."""
    run = [*flags, "--output_dir", tmp_path, "--max_tokens"]
    assert main(*run, 1000) == 0
    assert main(*run, 3000) == 0
    before, _ = values_in(tmp_path)
    harm(tmp_path, 2, 3)
    assert main(*run, 3000, "--repair") == 0
    _, told, verdict = capsys.readouterr().out.splitlines()[-3:]
    more = re.fullmatch("stored whole: .* --max_tokens had cut, with ([0-9]+) tokens more", told)
    assert verdict.startswith("in order: 1 folder, ")
    after, _ = values_in(tmp_path)
    assert len(after) == 3000 + int(more[1]) and {*after} == {*before}
    assert main(*run, 3000) == 0
    assert len(values_in(tmp_path)[0]) == len(after)


def test_skipping_what_is_stored_is_progress_for_the_watchdog(
    flags, undisturbed, tmp_path, monkeypatch
):
    """However much there is between two bad shards."""
    out, reset = shutil.copytree(undisturbed, tmp_path / "out"), Watchdog.reset
    by_thread = Counter()

    def count(watchdog):
        by_thread[threading.current_thread().name] += 1
        reset(watchdog)

    monkeypatch.setattr(Watchdog, "reset", count)
    harm(out, 1, 10)
    shards = [json.loads((out / f"shard_{n:04d}.json").read_text()) for n in range(2, 10)]
    stored = sum(shard["samples"]["count"] for shard in shards)
    assert main(*flags, "--output_dir", out, "--repair") == 0
    assert stored > 60 and by_thread["prefetch"] >= stored


def test_a_disk_that_cannot_be_read_makes_no_shard_bad(
    flags, undisturbed, tmp_path, monkeypatch, capsys
):
    out = shutil.copytree(undisturbed, tmp_path / "out")
    before = files_in(out)

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shard_reader.mmap, "mmap", fail)
    assert main(*flags, "--output_dir", out, "--repair") == 1
    told = "shard_0001.pkl.gz: cannot be read: Input/output error; shard 1 could not be checked"
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert files_in(out) == before


def test_in_a_bucket(flags, undisturbed, bucket, tmp_path, capsys):
    there = [*flags, "--upload_to_gcs", "--gcs_bucket", "bucket", "--gcs_prefix", "run"]
    local = tmp_path / "local"
    assert main(*there, "--output_dir", local) == 0
    for name in ("shard_0002.pkl.gz", "shard_0003.json", "shard_0010.json", "metadata.json"):
        bucket.delete(f"run/machine_000/{name}")
    (local / "metadata.json").write_text("{")
    assert main(*there, "--output_dir", local, "--repair") == 1  # how far it went is lost
    assert main(*there, "--output_dir", tmp_path / "fresh disk", "--repair") == 0
    same_values("gs://bucket/run", undisturbed)
    assert main("--verify", "--output_dir", "gs://bucket/run") == 0
    assert main(*flags, "--output_dir", tmp_path / "elsewhere", "--repair") == 2
    assert "holds no run" in capsys.readouterr().err.splitlines()[-1]


def test_without_metadata_a_repair_compares_its_flags_with_the_shards(
    flags, undisturbed, tmp_path, capsys
):
    """Otherwise the shards that it stores would have other tokens than those beside them."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    (out / "metadata.json").unlink()
    flip(shard_file(out, 2), 50)
    before = files_in(out)
    for other in (["--positions", "first:8"], ["--dtype", "bfloat16"]):
        assert main(*flags, *other, "--output_dir", out, "--repair") == 2
        told = "metadata.json: is damaged or missing, and the shards were stored with other settin"
        assert told in capsys.readouterr().err.splitlines()[-1]
        assert files_in(out) == before
    main(*flags, "--output_dir", out, "--repair")
    main(*flags, "--output_dir", out)
    same_values(out, undisturbed)
