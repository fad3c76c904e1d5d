"""Digests show every byte of small files, and fingerprints what lies in the samples of large ones.

That they are the same for a model at a URL is tested in test_remote_weights.py.
"""

import json
import os
import shutil

import pytest

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.digests import (
    BLOCK,
    BLOCKS,
    digest_files,
    file_fingerprint,
    model_digest,
    sampled_blocks,
)

LARGE = 10 * 2**20  # bytes; more than all blocks
BETWEEN = BLOCK + 1000  # a byte behind the first block, and before the second one of a large file


@pytest.fixture
def large(tmp_path):
    """A large file, which takes no room on the disk."""
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(LARGE)
    return path


def flip(path, at):
    """Changes a byte. at: counted from the end if it is negative."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, BLOCK * BLOCKS])
def test_a_small_file_is_read_whole(size):
    bounds = [0, *(bound for block in sampled_blocks(size) for bound in block), size]
    assert bounds[::2] == bounds[1::2]  # a block begins where the one before ends


@pytest.mark.parametrize("size", [BLOCK * BLOCKS + 1, LARGE, 40 * 10**9, 10**15 + 7])
def test_blocks_are_spread_over_a_large_file(size):
    starts, stops = zip(*sampled_blocks(size), strict=True)
    assert len(starts) == BLOCKS and {b - a for a, b in sampled_blocks(size)} == {BLOCK}
    assert starts[0] == 0 and stops[-1] == size
    gaps = {after - before for before, after in zip(starts, starts[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    "at,is_seen",
    [
        *((0, True), (BLOCK - 1, True), (BETWEEN, False)),
        *((next(start for start, _ in list(sampled_blocks(LARGE))[30:]), True), (LARGE - 1, True)),
    ],
)
def test_an_edit_is_seen_in_a_block_alone(large, at, is_seen):
    before = file_fingerprint(large, LARGE)
    flip(large, at)
    assert (file_fingerprint(large, LARGE) != before) == is_seen


def test_the_fingerprint_is_that_of_the_first_bytes(large):
    before = file_fingerprint(large, LARGE)
    with open(large, "ab") as file:
        file.write(b"more")
    assert file_fingerprint(large, LARGE) == before != file_fingerprint(large, LARGE + 4)
    os.truncate(large, LARGE - 1)
    assert file_fingerprint(large, LARGE) != before
    os.truncate(large, LARGE)
    assert file_fingerprint(large, LARGE) != file_fingerprint(large, LARGE - 1)  # all bytes are 0


def test_names_and_contents_count_and_folders_do_not(tmp_path):
    for folder, names in (("a", ("x", "y")), ("b", ("x", "y")), ("c", ("x", "z"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name)
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    (tmp_path / "d/y").write_text("x")
    a, b, c, d = (digest_files(sorted((tmp_path / name).iterdir())) for name in "abcd")
    assert a == b and len({a, c, d}) == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for read in (lambda path: digest_files([path]), lambda path: file_fingerprint(path, 1)):
        with pytest.raises(InputError, match="/nothing: cannot be read: No such file"):
            read(tmp_path / "nothing")


@pytest.fixture
def model(tmp_path):
    """A folder with a configuration and one large tensor, whose header is longer than a block."""
    (tmp_path / "model").mkdir()
    tensor = {"dtype": "F32", "shape": [LARGE // 4], "data_offsets": [0, LARGE]}
    notes = {"note": "x" * 2 * BLOCK}
    header = json.dumps({"__metadata__": notes, "tensor": tensor}).encode()
    with open(tmp_path / "model/model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + LARGE)
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


def digest_of(folder):
    checkpoint = Checkpoint(str(folder))
    assert checkpoint.tensors == {"tensor"}  # this checks the weights
    return model_digest(checkpoint)


@pytest.mark.parametrize(
    "change,is_seen",
    [
        (lambda folder: flip(folder / "model.safetensors", BETWEEN), True),  # in the header
        (lambda folder: flip(folder / "model.safetensors", 3 * BLOCK + BETWEEN), False),
        (lambda folder: flip(folder / "model.safetensors", -1), True),
        (lambda folder: (folder / "config.json").write_text("{ }"), True),
        (lambda folder: os.utime(folder / "model.safetensors", (1, 1)), False),
        (lambda folder: (folder / "README.md").write_text("more"), False),
    ],
    ids=["header", "between blocks", "last byte", "configuration", "time", "another file"],
)
def test_a_model_is_known_by_its_header_samples_and_configuration(model, tmp_path, change, is_seen):
    before = digest_of(model)
    shutil.copytree(model, tmp_path / "copy")
    assert digest_of(tmp_path / "copy") == before
    change(model)
    assert (digest_of(model) != before) == is_seen
