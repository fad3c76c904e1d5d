"""Shard formats: each one's files are known by their names, and hold what was written."""

import gzip
import hashlib
import json
import pickle
import re

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy
from extractions import activations_of, batches, open_part

from activation_extraction import ActivationDataset
from activation_extraction import store as store_package
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.store import sample_table
from activation_extraction.store.formats import BY_SUFFIX, format_of
from activation_extraction.store.metadata import own_files
from activation_extraction.store.statistics import STATISTICS


@pytest.mark.parametrize("each", BY_SUFFIX.values(), ids=lambda each: each.suffix)
def test_files_are_known_by_their_names(each):
    name = f"shard_12345{each.suffix}"
    assert format_of(name) is each
    own = [f".{name}.tmp", name]
    others = [f"{name}.bak", f"x{name}", f"{name}x", "shard_1.pkl", "shard_0000.json"]
    others += [f"shard_{number}{each.suffix}" for number in ("00001", "٠٠٠١")]
    assert own_files([*own, *others], temporary=True) == own and own_files(own) == [name]
    assert not any(map(format_of, [*others, f".{name}", "shard_0001.json", "metadata.json"]))


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_the_page_of_the_format_is_enough_to_read_it(tmp_path, shard_format):
    """With what every language has: JSON, gzip, Parquet, safetensors and zip."""
    with open_part(tmp_path, shard_format=shard_format) as storage:
        for batch in batches(4):
            storage.add_batch(batch, activations_of(batch))
    page = f"{store_package.__doc__}{sample_table.__doc__}"
    for path in tmp_path.iterdir():
        assert path.name.replace("0002", "0001") in page
    content = json.loads((tmp_path / "shard_0001.json").read_bytes())
    for name in (*content, *content["hooks"][0], *content["samples"]):
        assert re.search(rf"\b{name}\b", page) or name in STATISTICS, name
    assert f"The format ({content['format_version']})" in page
    for name, facts in content["files"].items():
        data = (tmp_path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
    table = tmp_path / "shard_0001.samples.parquet"
    rows = pyarrow.parquet.read_table(table).to_pylist()
    assert all(re.search(rf"\b{name}\b", page) for name in rows[0])
    tokens = sum(row["tokens"] for row in rows)
    assert (len(rows), tokens) == (content["samples"]["count"], content["tokens"])
    expected = ActivationDataset(tmp_path)
    assert [row["doc_id"] for row in rows] == [expected[n].doc_id for n in range(len(rows))]
    shard = tmp_path / content["file"]
    if shard_format == "safetensors":
        tensors = safetensors.numpy.load_file(shard)
        hook = tensors[content["hooks"][1]["name"]]
        begin, end = tensors["sample_offsets"][1:3]
        found, ids = hook[begin:end], tensors["token_ids"][begin:end]
    else:
        record = pickle.loads(gzip.decompress(shard.read_bytes()))[content["hooks"][1]["key"]][1]
        found, ids = record["activation"], record["token_ids"]
    np.testing.assert_array_equal(found, expected[1][content["hooks"][1]["name"]])
    np.testing.assert_array_equal(ids, expected[1].token_ids)
    checksum = content.pop("checksum")
    plain = json.dumps(content, sort_keys=True, ensure_ascii=False)
    assert hashlib.sha256(plain.encode()).hexdigest() == checksum
