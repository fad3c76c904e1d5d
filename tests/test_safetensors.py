"""Headers of safetensors files: those of the safetensors library are read, and it reads ours."""

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.safetensors import DTYPES, pack_header, read_header

VALUES = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.array([7, 8], np.int64)}


def header_of(data, error=RunError):
    return read_header(lambda start, stop: data[start:stop], len(data), "file", error)


def test_headers_of_the_library_are_read():
    data = save({**VALUES, "number": np.array(5, np.float32)}, metadata={"format": "pt"})
    header = header_of(data)
    assert header.metadata == {"format": "pt"}
    for name, values in VALUES.items():
        tensor = header.tensors[name]
        assert (tensor.dtype, tensor.shape) == (values.dtype, values.shape)
        start, stop = tensor.byte_range(1, 2)
        assert data[start:stop] == values[1:2].tobytes()
        assert tensor.end - tensor.offset == values.nbytes
    assert header.tensors["number"].shape == (1,)


@pytest.mark.parametrize("metadata", [{}, {"writer": "é", "format": "2"}])
def test_the_library_reads_headers_that_are_written_here(metadata):
    shapes = {name: (values.dtype, values.shape) for name, values in VALUES.items()}
    start = pack_header(shapes, metadata)
    data = start + b"".join(values.tobytes() for values in VALUES.values())
    assert len(start) % 8 == 0 and header_of(data).end_offset == len(start)
    assert header_of(data).metadata == metadata and [*header_of(data).tensors] == [*VALUES]
    for name, values in load(data).items():
        np.testing.assert_array_equal(values, VALUES[name])


def file_with(**changes):
    """A file with one tensor of 8 bytes, of whose entry in the header fields are changed."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


BAD_FILES = {
    "empty": (b"", "not a complete safetensors file: has 0 bytes, its header would have 0"),
    "a length alone": (bytes([9, *[0] * 7]), "has 8 bytes, its header would have 9"),
    "no JSON": ((8).to_bytes(8, "little") + b"garbage!", "not a safetensors file: JSONDecodeError"),
    "no object": ((2).to_bytes(8, "little") + b"[]", "not a safetensors file: "),
    "cut short": (file_with()[:-1], "its header describes "),
    "too long": (file_with() + b"x", "its header describes "),
    "no shape": (file_with(shape=None), "not a safetensors file: TypeError"),
    "a negative size": (
        file_with(shape=[-2]),
        "-2 in its header, expected a whole number from 0 on",
    ),
    "no whole number": (
        file_with(shape=[2.0]),
        "2.0 in its header, expected a whole number from 0 on",
    ),
    "another size": (file_with(shape=[3]), "size does not follow from its shape"),
    "another dtype": (file_with(dtype="F4"), "tensor a is F4, which is not read"),
}


@pytest.mark.parametrize("error", [InputError, RunError])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_its_name(name, error):
    data, message = BAD_FILES[name]
    with pytest.raises(error, match=f"^file: .*{message}"):
        header_of(data, error)


def test_a_header_that_is_longer_than_the_first_request_is_read(monkeypatch):
    monkeypatch.setattr("activation_extraction.common.safetensors.FIRST_BYTES", 16)
    header = header_of(save(VALUES))
    assert header.tensors.keys() == VALUES.keys()


def test_every_dtype_is_known_by_one_name():
    assert len(set(DTYPES.values())) == len(DTYPES)
