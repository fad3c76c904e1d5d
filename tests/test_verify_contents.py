"""--verify looks into shards and JSONs whose checksums are right."""

import gzip
import pickle

import numpy as np
import pytest
from extractions import HIDDEN, change_shard, edit, extract, load, replace_shard


def test_a_duplicated_sample_within_a_shard(tmp_path, check):
    extract(tmp_path)

    def repeat(shard):
        for records in shard.values():
            records[2] = dict(records[1])

    change_shard(tmp_path, 2, repeat)
    assert check(tmp_path) == ["shard_0002.pkl.gz: its samples are not those of its JSON"]


def change(name, **changes):
    return lambda folder: edit(folder / name, lambda content: content.update(changes))


def change_nested(name, change):
    return lambda folder: edit(folder / name, change)


WRONG_JSONS = {
    "shards": (change("metadata.json", shards=5), "has 5 shards, there are 4"),
    "samples": (change("metadata.json", samples=11), "has 11 samples, there are 10"),
    "tokens": (change("metadata.json", tokens=99), "has 99 tokens, there are 100"),
    "bytes": (change("metadata.json", bytes=1), "has 1 byte, there are"),
    "statistics of all": (
        change_nested("metadata.json", lambda c: c["hooks"][1].update(mean=1.0)),
        "metadata.json: hook 5: its mean is",
    ),
    "no identity": (
        change_nested("metadata.json", lambda c: c.pop("identity")),
        "metadata.json: lacks identity",
    ),
    "no machines": (
        change_nested("metadata.json", lambda c: c["identity"].pop("total_machines")),
        "shard_0001.json: belongs to another run",
    ),
    "no model": (change_nested("metadata.json", lambda c: c.pop("model")), "'model'"),
    "another version": (change("metadata.json", format_version=1), "written by another version"),
    "version of a shard": (change("shard_0001.json", format_version=1), "by another version"),
    "a field too many": (change("shard_0001.json", more=1), "fields are missing or unknown"),
    "samples of a shard": (
        change("shard_0002.json", samples={"first": 3, "last": 6, "count": 3}),
        "3 samples cannot go from 3 to 6",
    ),
    "a gap": (
        change("shard_0002.json", samples={"first": 4, "last": 6, "count": 3}),
        "shard_0002.json: sample 3 is missing",
    ),
    "tokens of a shard": (change("shard_0002.json", tokens=31), "has 30 tokens, its JSON says 31"),
    "sha256": (change("shard_0002.json", sha256="0" * 64), "its sha256 is not the one in its JSON"),
    "size": (change("shard_0002.json", bytes=7), "bytes, its JSON says 7"),
    "partial": (change("shard_0002.json", partial=True), "is partial, and not the last one"),
    "cursor back": (
        change("shard_0002.json", cursor={"samples": 0, "skip": 0}),
        "shard_0002.json: its cursor does not follow",
    ),
    "cursor ahead": (
        change("shard_0002.json", cursor={"samples": 7, "skip": 0}),
        "shard_0002.json: its cursor does not follow",
    ),
    "taken before the cursor": (
        change("shard_0002.json", cursor={"samples": 4, "skip": 0, "taken": [3]}),
        "shard_0002.json: its cursor does not follow",
    ),
    "taken and not stored": (
        change("shard_0002.json", cursor={"samples": 4, "skip": 0, "taken": [5, 6]}),
        "shard_0002.json: its cursor does not follow",
    ),
    "taken in no order": (
        change("shard_0002.json", cursor={"samples": 2, "skip": 0, "taken": [5, 4]}),
        "shard_0002.json: its cursor does not follow",
    ),
    "statistics": (
        change_nested("shard_0002.json", lambda c: c["hooks"][0].update(max_norm=7.0)),
        "shard_0002.pkl.gz: hook 3: its max_norm is",
    ),
    "hooks": (
        change_nested("shard_0002.json", lambda c: c["hooks"].pop()),
        "has other hooks than its run",
    ),
    "keys of hooks": (
        change_nested("shard_0002.json", lambda c: c["hooks"][0].update(key=4)),
        "shard_0002.pkl.gz: has hooks [3, 5], its JSON says",
    ),
    "names of hooks": (
        change_nested("shard_0002.json", lambda c: c["hooks"][0].update(name="blocks.4")),
        "has other hooks than its run",
    ),
}


@pytest.mark.parametrize("name", WRONG_JSONS)
def test_wrong_jsons_with_right_checksums(name, tmp_path, check):
    spoil, named = WRONG_JSONS[name]
    extract(tmp_path)
    spoil(tmp_path)
    assert named in "\n".join(check(tmp_path))


def of_records(change):
    """Applies `change` to the second record of every hook of the third shard."""

    def spoil(folder):
        def of_shard(shard):
            for records in shard.values():
                change(records[1])

        change_shard(folder, 3, of_shard)

    return spoil


WRONG_RECORDS = {
    "dtype": (
        lambda r: r.update(activation=r["activation"].astype(np.float64)),
        "sample 7: dtype float64, expected float32",
    ),
    "shape": (
        lambda r: r.update(activation=r["activation"][:, :-1], shape=(10, 15)),
        "sample 7: shape (10, 15), expected (10, 16)",
    ),
    "told shape": (
        lambda r: r.update(shape=(9, HIDDEN)),
        "sample 7: shape (10, 16), its record says (9, 16)",
    ),
    "vocabulary": (
        lambda r: r.update(token_ids=r["token_ids"] + np.int32(50)),
        "sample 7: token ids outside the vocabulary",
    ),
    "negative id": (
        lambda r: r.update(token_ids=-1 - r["token_ids"]),
        "sample 7: token ids outside the vocabulary",
    ),
    "type of ids": (
        lambda r: r.update(token_ids=r["token_ids"].astype(np.int64)),
        "sample 7: token ids of dtype int64",
    ),
    "too long": (
        lambda r: r.update(
            activation=np.ones((11, HIDDEN), np.float32),
            token_ids=np.zeros(11, np.int32),
            shape=(11, HIDDEN),
        ),
        "sample 7: 11 tokens",
    ),
    "hook": (
        lambda r: r.update(hook="blocks.3.hook_mlp_out"),
        "sample 7: names hook 'blocks.3.hook_mlp_out', expected blocks.3.hook_resid_post",
    ),
    "order": (lambda r: r.update(sample_idx=8), "its samples are not those of its JSON"),
    "text for a number": (lambda r: r.update(shape="x"), "sample 7: shape"),
    "field missing": (lambda r: r.pop("token_ids"), "its records lack fields or are malformed"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_wrong_records_with_right_checksums(name, tmp_path, check):
    spoil, named = WRONG_RECORDS[name]
    extract(tmp_path)
    of_records(spoil)(tmp_path)
    found = check(tmp_path)
    assert named in "\n".join(found)
    assert any(problem.startswith("shard_0003.pkl.gz: ") for problem in found)


@pytest.mark.parametrize(
    "shard",
    [
        [],
        {3: {}, 5: {}},
        {3: [], 5: []},
        {3: [1, 2, 3], 5: [1, 2, 3]},
        {3: [{"sample_idx": 3}], 5: None},
        {"3": [], "5": []},
        "empty",
    ],
)
def test_shards_that_are_none(shard, tmp_path, check):
    extract(tmp_path)
    if shard == "empty":  # as many records, of nothing
        shard = load(tmp_path, 2)
        for record in (record for records in shard.values() for record in records):
            record |= {"activation": np.zeros((0, HIDDEN), np.float32), "shape": (0, HIDDEN)}
            record |= {"token_ids": np.zeros(0, np.int32)}
    replace_shard(tmp_path, 2, gzip.compress(pickle.dumps(shard, protocol=4)))
    found = check(tmp_path)
    assert found and all(problem.startswith("shard_0002.pkl.gz: ") for problem in found)
