"""Shard formats: each one's files are known by their names, and hold what was written."""

import json
from contextlib import nullcontext
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from storages import open_storage

from activation_extraction.cli.output_flags import SHARD_FORMATS
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.store import shard_cutter
from activation_extraction.store.formats import FORMATS, format_of
from activation_extraction.store.metadata import own_files
from activation_extraction.store.shard import SampleRow, Shard, same_content
from activation_extraction.store.shard_files import write_shard

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
    assert written.bytes == path.stat().st_size
    limit = each.largest_size(written.bytes, written.unpacked)
    equal(each.read(path, NAMES, limit), shard_of(dtype))


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_other_hooks_and_larger_shards_are_refused(each, tmp_path):
    path = tmp_path / each.file_name(1)
    written = write_shard(path, shard_of(), NAMES, each)
    with pytest.raises(RunError, match="hook"):
        each.read(path, {3: NAMES[3]}, written.unpacked)
    with pytest.raises(RunError, match="hook"):
        each.read(path, {3: NAMES[3], 6: "blocks.6.hook_mlp_out"}, written.unpacked)
    with pytest.raises(RunError, match="more than"):
        each.read(path, NAMES, written.unpacked - 1)


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_files_are_known_by_their_names(each):
    name = each.file_name(12345)
    assert name == f"shard_12345{each.suffix}" and format_of(name) is each
    own = [name, f".{name}.tmp"]
    others = [f"{name}.bak", f"x{name}", "shard_1.pkl", "shard_0000.json"]
    others += [f"shard_{number}{each.suffix}" for number in ("00001", "٠٠٠١")]
    assert sorted(own_files([*own, *others])) == sorted(own)
    assert not any(map(format_of, others))
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
    lines = each.how_to_read(str(path), False)
    exec("\n".join(lines), scope)
    assert not lines or list(scope["records"]) == list(NAMES)


@pytest.mark.parametrize("doc_id", [None, 7, 1.5, float("nan"), "\ud800", "ä" * 300])
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_every_document_id_is_read_back(each, doc_id, tmp_path):
    shard = shard_of()
    rows = [replace(row, doc_id=doc_id) for row in shard.samples]
    path = tmp_path / each.file_name(1)
    written = write_shard(path, Shard(rows, shard.slices), NAMES, each)
    found = each.read(path, NAMES, written.unpacked)
    assert [repr(row.doc_id) for row in found.samples] == [repr(doc_id)] * 2


def test_a_shard_is_cut_before_its_texts_exceed_the_header(tmp_path, monkeypatch):
    """Shards of few values and many texts: one header holds 100 MB at most."""
    monkeypatch.setattr(shard_cutter, "LARGEST_TEXTS", 1000)
    for shard_format in SHARD_FORMATS:
        folder = tmp_path / shard_format
        with open_storage(folder, {0: "h"}, shard_format=shard_format) as storage:
            for number in range(20):
                values = np.zeros((1, 2), np.float32)
                storage.add_activation(0, values, number, "ä" * 20, np.zeros(1, np.int32))
        counts = [json.loads(p.read_text())["samples"]["count"] for p in folder.glob("shard*.json")]
        assert sum(counts) == 20
        assert max(counts) == 20 if shard_format == "pickle" else 1 < max(counts) < 10


def test_a_sample_whose_texts_exceed_the_header_is_named(tmp_path, monkeypatch):
    """The samples before it are stored."""
    monkeypatch.setattr(shard_cutter, "LARGEST_TEXTS", 1000)
    for shard_format in SHARD_FORMATS:
        folder, values = tmp_path / shard_format, np.zeros((1, 2), np.float32)
        expected = nullcontext()
        if shard_format == "safetensors":
            expected = pytest.raises(
                StorageError, match="^sample 2: its id and text .* 1,0.. bytes"
            )
        with expected:
            with open_storage(folder, {0: "h"}, shard_format=shard_format) as storage:
                for number, length in enumerate((0, 900, 1000, 0)):
                    ids, doc_id = np.zeros(1, np.int32), "x" * length
                    storage.add_activation(0, values, number, "text", ids, doc_id)
        counts = [json.loads(p.read_text())["samples"]["count"] for p in folder.glob("shard*.json")]
        assert sum(counts) == (2 if shard_format == "safetensors" else 4)


def test_safetensors_need_token_ids(tmp_path):
    storage = open_storage(tmp_path, {0: "h"}, shard_format="safetensors")
    with pytest.raises(ValueError, match="sample 0: has no token ids"):
        storage.add_activation(0, np.zeros((1, 2), np.float32), 0, "")


def test_every_difference_between_two_shards_is_seen():
    shard = shard_of()
    assert same_content(shard, shard_of())
    row = shard.samples[1]
    others = [
        replace(row, sample_idx=5),
        replace(row, token_ids=row.token_ids + np.int32(1)),
        replace(row, token_ids=None),
        replace(row, positions=row.positions[::-1]),
        replace(row, text_preview="b"),
        replace(row, doc_id=1),
    ]
    changed = [replace(shard, samples=[shard.samples[0], other]) for other in others]
    first, second = shard.slices[3]
    slices = [
        {**shard.slices, 3: [first, -second]},
        {**shard.slices, 3: [first, second.astype(np.float64)]},
        {**shard.slices, 3: [first, second[:-1]]},
        {3: shard.slices[3]},
    ]
    changed += [replace(shard, slices=each) for each in slices]
    changed.append(Shard(shard.samples[:1], {key: v[:1] for key, v in shard.slices.items()}))
    assert not any(same_content(shard, other) for other in changed)
