"""Digests show every byte of small files, and fingerprints what lies in the samples of large ones.

That they are the same for a model at a URL is tested in test_remote_weights.py.
"""

import json
import os

import pytest

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.digests import digest_files, file_fingerprint, model_digest

BLOCK, SMALL, LARGE = 2**16, 2**22, 10 * 2**20  # bytes; up to SMALL, a file is read whole
THIRTIETH = (LARGE - BLOCK) * 30 // 63  # where that block of a large file begins


def flip(path, at):
    """Changes a byte. at: counted from the end if it is negative."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "size,at,is_seen",
    [
        *((1, 0, True), (BLOCK + 1, BLOCK, True), (SMALL, BLOCK + 1000, True), (SMALL, -1, True)),
        *((LARGE, 0, True), (LARGE, BLOCK - 1, True), (LARGE, -1, True), (LARGE, -BLOCK, True)),
        *((LARGE, THIRTIETH, True), (LARGE, THIRTIETH + BLOCK - 1, True)),
        *((LARGE, BLOCK, False), (LARGE, THIRTIETH - 1, False), (LARGE, -BLOCK - 1, False)),
    ],
)
def test_an_edit_is_seen_in_a_block_alone(tmp_path, size, at, is_seen):
    """64 blocks are spread evenly over a large file, which takes no room on the disk."""
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(size)
    before = file_fingerprint(path, size)
    flip(path, at)
    assert (file_fingerprint(path, size) != before) == is_seen


def test_names_and_contents_count_and_folders_do_not(tmp_path):
    folders = {"a": {"x": "x", "y": "y"}, "b": {"x": "x", "y": "y"}}
    folders |= {"c": {"x": "x", "z": "y"}, "d": {"x": "x", "y": "x"}}
    for folder, files in folders.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    a, b, c, d = (digest_files(sorted((tmp_path / name).iterdir())) for name in folders)
    assert a == b and len({a, c, d}) == 3
    for read in (lambda path: digest_files([path]), lambda path: file_fingerprint(path, 1)):
        with pytest.raises(InputError, match="/nothing: cannot be read: No such file"):
            read(tmp_path / "nothing")


def test_a_model_is_known_by_its_header_samples_and_configuration(tmp_path):
    """The header is longer than a block, and all of it counts."""
    weights = tmp_path / "model.safetensors"
    tensor = {"dtype": "F32", "shape": [LARGE // 4], "data_offsets": [0, LARGE]}
    header = json.dumps({"__metadata__": {"note": "x" * 2 * BLOCK}, "tensor": tensor}).encode()
    with open(weights, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + LARGE)
    (tmp_path / "config.json").write_text("{}")

    def digest():
        checkpoint = Checkpoint(str(tmp_path))
        assert {*checkpoint.tensors} == {"tensor"}  # this checks the weights
        return model_digest(checkpoint)

    for change, is_seen in (
        (lambda: flip(weights, BLOCK + 1000), True),  # in the header
        (lambda: flip(weights, 4 * BLOCK + 1000), False),  # between blocks
        (lambda: flip(weights, -1), True),
        (lambda: (tmp_path / "config.json").write_text("{ }"), True),
        (lambda: os.utime(weights, (1, 1)), False),
        (lambda: (tmp_path / "README.md").write_text("more"), False),
    ):
        before = digest()
        change()
        assert (digest() != before) == is_seen
