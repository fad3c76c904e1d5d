"""Runs that earlier versions stored are read: format 5, the first one for which this holds.

kept_runs.zip has four runs over the same rows, and expected.npz, what was read of them when they
were stored, as RUN/SAMPLE/NAME. Nothing in it is ever replaced; later forms are added.
"""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_line import main

from activation_extraction import ActivationDataset

RUNS = ["pickle", "safetensors", "codes", "float8"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    zipfile.ZipFile(Path(__file__).parent / "kept_runs.zip").extractall(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_every_value_is_what_it_was(name, kept):
    found, dataset = {}, ActivationDataset(kept / name)
    for sample in dataset:
        values = {"token_ids": sample.token_ids, "position": sample.position, **sample.activations}
        for key, value in values.items():
            value = value.to_scipy().toarray() if key.endswith(".codes") else value
            found[f"{name}/{sample.sample_idx}/{key}"] = value
    with np.load(kept / "expected.npz") as file:
        expected = dict(file)
    assert {key for key in expected if key.startswith(f"{name}/")} == found.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value.astype(expected[key].dtype), expected[key])
    table = dataset.samples.to_pydict()
    assert table["doc_id"] == ["doc 0", "doc 1", "doc 3"] and table["label"] == [0, 1, 1]
    assert table["cut"][0] > 0 and table["text_preview"][1] == "Two birds, one tree"


@pytest.mark.parametrize("name", RUNS)
def test_its_state_and_checksums_are_understood(name, kept, capsys):
    assert main("--status", "--output_dir", kept / name) == 0
    assert "complete" in capsys.readouterr().out
    assert main("--verify", "--output_dir", kept / name) == 0
