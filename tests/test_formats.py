"""Shard formats: each one's files are known by their names, and hold what was written."""

import ml_dtypes
import numpy as np
import pytest

from activation_extraction.cli.errors import RunError
from activation_extraction.output.formats import FORMATS, format_of, write_shard
from activation_extraction.output.metadata import own_files
from activation_extraction.output.shard import SampleRow, Shard

NAMES: dict[int | str, str] = {3: "blocks.3.hook_resid_post", 5: "blocks.5.hook_mlp_out"}


def shard_of(dtype=np.float32):
    """Samples of 3 and 5 tokens; hooks of different widths."""
    chance = np.random.default_rng(0)
    rows = []
    for number, tokens in enumerate((3, 5)):
        ids = chance.integers(0, 50, tokens, np.int32)
        rows.append(SampleRow(number, ids, np.arange(tokens, dtype=np.int32), "ä", f"id-{number}"))
    slices = {
        key: [chance.standard_normal((len(row.positions), width)).astype(dtype) for row in rows]
        for key, width in ((3, 4), (5, 2))
    }
    return Shard(rows, slices)


def equal(found, expected):
    assert list(found.slices) == list(expected.slices)
    for ours, theirs in zip(found.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.positions, theirs.positions)
        for name in ("sample_idx", "text_preview", "doc_id"):
            assert getattr(ours, name) == getattr(theirs, name)
    for key, slices in expected.slices.items():
        for ours, theirs in zip(found.slices[key], slices, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_what_is_written_is_read_back(each, dtype, tmp_path):
    path = tmp_path / each.file_name(7)
    written = write_shard(path, shard_of(dtype), NAMES, each)
    assert written["bytes"] == path.stat().st_size
    limit = each.largest_size(written["bytes"], written["unpacked"])
    equal(each.read(path, NAMES, limit), shard_of(dtype))


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_other_hooks_and_larger_shards_are_refused(each, tmp_path):
    path = tmp_path / each.file_name(1)
    written = write_shard(path, shard_of(), NAMES, each)
    with pytest.raises(RunError, match="hook"):
        each.read(path, {3: NAMES[3]}, written["unpacked"])
    with pytest.raises(RunError, match="hook"):
        each.read(path, {3: NAMES[3], 6: "blocks.6.hook_mlp_out"}, written["unpacked"])
    with pytest.raises(RunError, match="more than"):
        each.read(path, NAMES, written["unpacked"] - 1)


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_files_are_known_by_their_names(each):
    name = each.file_name(12345)
    assert name == f"shard_12345{each.suffix}" and format_of(name) is each
    own = [name, f".{name}.tmp"]
    assert sorted(own_files([*own, f"{name}.bak", f"x{name}", "shard_1.pkl"])) == sorted(own)
    for other in (f"{name}x", f".{name}", "shard_0001.json", "metadata.json"):
        assert format_of(other) is None


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # open() without close
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_the_lines_that_a_run_prints_read_a_shard(each, tmp_path):
    path = tmp_path / each.file_name(1)
    write_shard(path, shard_of(), NAMES, each)
    scope: dict = {}
    exec("\n".join(each.how_to_read(str(path), False)), scope)
    assert scope
