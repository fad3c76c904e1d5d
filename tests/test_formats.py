"""Shard formats: files are known by their names and read by their page; old ones are read for ever.

kept_runs.zip has runs that earlier versions stored, from format 5 on, the first one for which this
holds: four over the same rows, and expected.npz, what was read of them when they were stored, as
RUN/SAMPLE/NAME. Nothing in it is ever replaced; later forms are added.
"""

import gzip
import hashlib
import json
import pickle
import pickletools
import re
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy
from command_line import main
from crc32c import crc32c
from extractions import extract

from activation_extraction import ActivationDataset
from activation_extraction import store as store_package
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.store import sample_table
from activation_extraction.store.formats import FORMAT_BY_SUFFIX, format_of
from activation_extraction.store.run_log import own_files
from activation_extraction.store.statistics import STATISTICS


@pytest.mark.parametrize("each", FORMAT_BY_SUFFIX.values(), ids=lambda each: each.suffix)
def test_files_are_known_by_their_names(each):
    name = f"shard_12345{each.suffix}"
    assert format_of(name) is each
    own = [f".{name}.tmp", name]
    others = [f"{name}.bak", f"x{name}", f"shard_00001{each.suffix}", "shard_0000.json"]
    assert own_files([*own, *others], temporary=True) == own and own_files(own) == [name]
    assert not any(map(format_of, [*others, f".{name}", "shard_0001.json", "metadata.json"]))


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_the_page_of_the_format_is_enough_to_read_it(tmp_path, shard_format):
    """Reading takes what every language has: JSON, gzip, Parquet, safetensors and zip."""
    extract(tmp_path, count=6, shard_format=shard_format)
    page = f"{store_package.__doc__}{sample_table.__doc__}"
    for path in tmp_path.iterdir():
        assert path.name.replace("0002", "0001") in page
    content = json.loads((tmp_path / "shard_0001.json").read_bytes())
    rows = pyarrow.parquet.read_table(tmp_path / "shard_0001.samples.parquet").to_pylist()
    for name in (*content, *content["hooks"][0], *content["samples"], *rows[0]):
        assert re.search(rf"\b{name}\b", page) or name in STATISTICS, name
    assert f"The format ({content['format_version']})" in page
    for name, facts in content["files"].items():
        data = (tmp_path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
    tokens = sum(row["tokens"] for row in rows)
    assert (len(rows), tokens) == (content["samples"]["count"], content["tokens"])
    dataset, shard = ActivationDataset(tmp_path), tmp_path / content["file"]
    assert [row["doc_id"] for row in rows] == [dataset[n].doc_id for n in range(len(rows))]
    hook = content["hooks"][1]
    if shard_format == "safetensors":
        tensors = safetensors.numpy.load_file(shard)
        begin, end = tensors["sample_offsets"][1:3]
        found, ids = tensors[hook["name"]][begin:end], tensors["token_ids"][begin:end]
        check_ranges(shard.read_bytes(), tensors, content["files"][shard.name]["ranges"], page)
    else:
        record = pickle.loads(gzip.decompress(shard.read_bytes()))[hook["key"]][1]
        found, ids = record["activation"], record["token_ids"]
    np.testing.assert_array_equal(found, dataset[1][hook["name"]])
    np.testing.assert_array_equal(ids, dataset[1].token_ids)
    checksum = content.pop("checksum")
    plain = json.dumps(content, sort_keys=True, ensure_ascii=False)
    assert hashlib.sha256(plain.encode()).hexdigest() == checksum


def check_ranges(data, tensors, ranges, page):
    """Asserts that the checksums of ranges of a safetensors shard are those of its bytes.

    Args:
        data: The bytes of the file.
        tensors: The tensors by name.
        ranges: The checksums, as the JSON of the shard records them.
        page: The text that must name their fields.
    """
    for name in ranges:
        assert re.search(rf"\b{name}\b", page), name
    header = 8 + int.from_bytes(data[:8], "little")
    samples = tensors["sample_idx"].nbytes + tensors["sample_offsets"].nbytes
    assert ranges["front"] == header + samples
    assert ranges["front_crc32c"] == f"{crc32c(data[: ranges['front']]):08x}"
    starts = np.repeat(tensors["sample_offsets"][:-1], np.diff(tensors["sample_offsets"]))
    counted = np.arange(len(starts)) - starts
    assert ranges["consecutive"] == np.array_equal(tensors["position"], counted)
    of_tokens = {name for name in tensors if len(tensors[name]) == len(tensors["token_ids"])}
    assert {"token_ids", "position"} < set(ranges["crc32c"]) == of_tokens
    for name, digits in ranges["crc32c"].items():
        blocks = np.split(
            tensors[name], range(ranges["tokens"], len(tensors[name]), ranges["tokens"])
        )
        assert digits == "".join(f"{crc32c(block.tobytes()):08x}" for block in blocks)


def writer_in(path):
    """Returns the id of the process that wrote a file, where the page of its format says it is."""
    data = path.read_bytes()
    if path.suffix == ".npz":
        return str(np.load(path)["writer"])
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_schema(path).metadata[b"writer"].decode()
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, "numpy") as file:
            return file.metadata()["writer"]
    if path.suffix == ".gz":  # RFC 1952
        assert data[:4] == b"\x1f\x8b\x08\x10"
        return data[10 : data.index(b"\0", 10)].decode("latin-1")
    protocol, text, dropped = islice(pickletools.genops(data), 3)
    assert (protocol[0].name, dropped[0].name) == ("PROTO", "POP")
    return text[1]


@pytest.mark.parametrize("each", FORMAT_BY_SUFFIX.values(), ids=lambda each: each.suffix)
def test_the_bytes_of_a_file_are_its_writers_own_and_read_the_same(each, tmp_path, capsys):
    """So the version of an object names one write, even where it is a digest of the content."""
    pickled = "safetensors" not in each.suffix
    given = {"shard_format": "pickle" if pickled else "safetensors"}
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        extract(folder, count=3, compress_shards=each.is_compressed, **given)
    contents = [json.loads((folder / "shard_0001.json").read_bytes()) for folder in folders]
    assert f"shard_0001{each.suffix}" in contents[0]["files"] and len(contents[0]["files"]) == 3
    for name in contents[0]["files"]:
        writers = [writer_in(folder / name) for folder in folders]
        assert writers == [content["owner"] for content in contents] and len({*writers}) == 2
        digests = [content["files"][name]["sha256"] for content in contents]
        assert digests[0] != digests[1]
    if pickled:
        paths = [folder / f"shard_0001{each.suffix}" for folder in folders]
        read = [path.read_bytes() for path in paths]
        if each.is_compressed:
            read = [gzip.open(path).read() for path in paths]
            assert read[0] == read[1]
        np.testing.assert_equal(*map(pickle.loads, read))
    one, other = map(ActivationDataset, folders)
    for sample, same in zip(one, other, strict=True):
        np.testing.assert_equal(dict(sample.activations), dict(same.activations))
    assert one.samples == other.samples and one.samples.schema.metadata is None
    assert main("--verify", "--output_dir", folders[0]) == 0
    assert "0 problems" in capsys.readouterr().out


RUNS = ["pickle", "safetensors", "codes", "float8"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    zipfile.ZipFile(Path(__file__).parent / "kept_runs.zip").extractall(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_is_read(name, kept, capsys):
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
    assert main("--status", "--output_dir", kept / name) == 0
    assert "complete" in capsys.readouterr().out
    assert main("--verify", "--output_dir", kept / name) == 0
