"""Reading shards: damage is noticed, and how much a shard may unpack to comes from its JSON."""

import gzip
import pickle
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from extractions import extract, write_records

import extract_activations
from activation_extraction.cli.parser import epilog
from activation_extraction.common.errors import RunError
from activation_extraction.store.formats import format_of
from activation_extraction.store.pickle_file import UnsafeError, read_records

FLIPS = 300


def equal(found, expected):
    assert list(found) == list(expected)
    for key, records in expected.items():
        for ours, theirs in zip(found[key], records, strict=True):
            for name, value in theirs.items():
                np.testing.assert_array_equal(ours[name], value)


def flipped(whole, count=FLIPS):
    """Copies with one bit changed, at positions that are random and always the same."""
    chance = random.Random(3)
    for _ in range(count):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield bytes(data)


def records_in(path, limit=10**9):
    with open(path, "rb") as file:
        return read_records(file, path.name, limit)


def run(code):
    scope: dict = {}
    exec(code, scope)
    return scope["records"]


def shown(text):
    """The first lines of Python for reading that a user is shown."""
    (lines,) = re.findall(r"^ *(import gzip.*)\n *(records = .*)$", text, flags=re.M)
    return "\n".join(lines)


def readme(path):
    """The README's expression, for one shard."""
    text = Path(extract_activations.__file__).with_name("README.md").read_text()
    assert not re.search(r"pickle\.load\(", text)
    (expression,) = re.findall(r"`(pickle\.loads\(.*?\))`", text)
    return f"import gzip, pickle\npath = {str(path)!r}\nrecords = {expression}"


def how_to_read(path, in_bucket):
    found = format_of(Path(path).name)
    assert found is not None
    return found.how_to_read(path, in_bucket)


WAYS = {
    "a run": lambda path: "\n".join(how_to_read(str(path), in_bucket=False)),
    "a run with a bucket": lambda path: "\n".join(how_to_read(str(path), in_bucket=True)),
    "--help": lambda _: shown(epilog()),
    "README": readme,
}


@pytest.mark.parametrize("source", [*WAYS, "read_records"])
def test_a_flipped_bit_never_gives_other_activations(source, tmp_path, monkeypatch):
    """Every way of reading that we name raises, or the data is what it was."""
    path = tmp_path / "out/shard_0001.pkl.gz"
    extract(path.parent)
    monkeypatch.chdir(tmp_path)
    read = partial(run, WAYS[source](path)) if source in WAYS else partial(records_in, path)
    whole = path.read_bytes()
    expected = pickle.loads(gzip.decompress(whole))
    equal(read(), expected)
    raised = 0
    for data in flipped(whole):
        path.write_bytes(data)
        try:
            found = read()
        except Exception:
            raised += 1
        else:
            equal(found, expected)
    assert raised > 0.9 * FLIPS


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # open() without close
def test_a_shard_that_is_not_compressed_is_read_as_a_run_says(tmp_path):
    extract(tmp_path, compress_shards=False)
    path = tmp_path / "shard_0001.pkl"
    for in_bucket in (False, True):
        equal(run("\n".join(how_to_read(str(path), in_bucket))), records_in(path))


@pytest.mark.parametrize("position", [-8, -5, -4, -1])
def test_the_checksum_at_the_end_of_a_large_shard_is_checked(position, tmp_path):
    """Of one that is not read into memory at once."""
    path = tmp_path / "shard_0001.pkl.gz"
    values = np.random.default_rng(0).standard_normal((4, 500, 512)).astype(np.float32)
    write_records(path, {3: [{"activation": each} for each in values]})
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="^shard_0001.pkl.gz: cannot be read: "):
        records_in(path)


@pytest.mark.parametrize("compress", [True, False])
def test_what_follows_the_end_is_damage(compress, tmp_path):
    extract(tmp_path, compress_shards=compress)
    (path,) = tmp_path.glob("shard_0001.pkl*")
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(RunError, match=f"^{path.name}: "):
        records_in(path)


def test_more_bytes_than_the_limit_are_refused(tmp_path):
    extract(tmp_path)
    path = tmp_path / "shard_0001.pkl.gz"
    size = len(gzip.decompress(path.read_bytes()))
    equal(records_in(path, size), pickle.loads(gzip.decompress(path.read_bytes())))
    with pytest.raises(UnsafeError, match=f"unpacks to more than {size - 1} bytes"):
        records_in(path, size - 1)
