"""The promise about files: later versions read these runs for ever.

`kept_runs.zip` has two small runs as the first promised version stored them: conversations in
safetensors, as float8 with predictions; every second token on two machines, in pickles of bfloat16,
with cursors that leave samples out. This test may get more runs, but none may change.
"""

import gzip
import hashlib
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_line import main

from activation_extraction import ActivationDataset

RUNS = {  # the digests of all that each run has stored
    "safetensors_float8": "ad8480b606b2f3cc77f1ede1571073f8af45dc44ea2e54c19c265c820030d09c",
    "pickle_bfloat16": "db5f043a514be744ab1bcfb1271ab993d4d0f674d0884cef59a56f48fb51cdb2",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    with zipfile.ZipFile(Path(__file__).with_name("kept_runs.zip")) as archive:
        archive.extractall(folder)
    assert {path.name for path in folder.iterdir()} == {*RUNS}
    return folder


def digest_of(dataset):
    """SHA-256 of everything that a dataset has, sample by sample."""
    digest = hashlib.sha256()
    for sample in dataset:
        arrays = [sample[hook] for hook in dataset.hooks]
        arrays += [sample.token_ids, sample.position]
        arrays += [each for each in (sample.role, sample.turn) if each is not None]
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        facts = sample.sample_idx, sample.text_preview, sample.doc_id, sample.cut
        digest.update(repr((*facts, sample.row, dict(sample.columns))).encode())
    for hook, statistics in dataset.statistics.items():
        overall = statistics.overall_mean, statistics.overall_variance
        digest.update(repr((hook, statistics.tokens, *overall, statistics.max_norm)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("name", RUNS)
def test_what_was_stored_is_read(name, kept, capsys):
    dataset = ActivationDataset(kept / name)
    assert digest_of(dataset) == RUNS[name]
    tokens = sum(len(batch) for batch in dataset.batches(8, shuffle=0, dtype="float32"))
    assert tokens == dataset.tokens == sum(dataset.samples["tokens"].to_pylist())
    for mode in ("--verify", "--status"):
        assert main(mode, "--output_dir", kept / name) == 0
    assert "0 problems" in capsys.readouterr().out


def test_pickles_are_read_without_this_program(kept):
    folder = kept / "pickle_bfloat16"
    (path, *_) = sorted(folder.glob("machine_000/shard_*.pkl.gz"))
    dataset = {sample.sample_idx: sample for sample in ActivationDataset(folder)}
    for of_hook in pickle.loads(gzip.open(path).read()).values():
        for record in of_hook:
            found = dataset[record["sample_idx"]][record["hook"]]
            np.testing.assert_array_equal(found, record["activation"])
