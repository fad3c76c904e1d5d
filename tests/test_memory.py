"""Memory at a real model's size."""

import pytest

from benchmarks.inputs import make_documents, make_model
from benchmarks.processes import extract
from benchmarks.shapes import SHAPES


@pytest.mark.slow
def test_peak_memory_stays_under_2_2_times_the_weights(tmp_path):
    """The whole process, libraries and buffers included, at 4 x 512 tokens."""
    model = tmp_path / "model"
    parameters = make_model(model, SHAPES["0.5B"])
    make_documents(tmp_path / "documents.jsonl", 4)
    flags = ["--model_path", str(model), "--dataset_path", str(tmp_path / "documents.jsonl")]
    flags += ["--batch_size", "4", "--max_seq_length", "512"]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        found = extract(tmp_path / dtype, [*flags, "--dtype", dtype])
        assert found["samples"] == 4
        assert found["peak_bytes"] < 2.2 * parameters * size, dtype
