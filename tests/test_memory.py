"""Peak memory at a real model's size."""

import pytest

from benchmarks.end_to_end import SHAPE_05B, make_documents, make_model, run


@pytest.mark.slow
def test_peak_memory_stays_under_2_2_times_the_weights(tmp_path):
    """The whole process, libraries and buffers included, at 4 x 512 tokens."""
    parameters = make_model(tmp_path / "model", SHAPE_05B)
    make_documents(tmp_path / "documents.jsonl", 4)
    flags = ["--batch_size", "4", "--max_seq_length", "512"]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        found = run(
            *(tmp_path / "model", tmp_path / "documents.jsonl", tmp_path / dtype),
            *(*flags, "--dtype", dtype),
        )
        assert found["samples"] == 4
        assert found["peak_bytes"] < 2.2 * parameters * size, dtype
