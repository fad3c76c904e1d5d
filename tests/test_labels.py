"""Columns of the rows, and the role and turn of every token, are stored, read, and chosen from."""

import pickle

import numpy as np
import pytest
from runs_of_rows import IDS, Run, columns_of, same, tokens_in
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import ROLES, SHARD_FORMATS

RUN = Run([*range(48)], seed=0, kept="odd", hosts=2)


@pytest.fixture(scope="module", params=SHARD_FORMATS)
def run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    return Run(RUN.rows, seed=0, kept="odd", hosts=2, shard_format=request.param).store(root)


def check_tokens(batches, wanted=lambda row, role: True):
    """Each token that is wanted is there once, with all that is known of it."""
    found = {}
    for batch in batches:
        here = tokens_in(batch)
        assert not found.keys() & here.keys() and (batch.turn == batch.role + 1).all()
        found |= here
    tokens = RUN.tokens().items()
    same(found, {key: each for key, each in tokens if wanted(key[0], ROLES[each[1]])})


def test_everything_is_read_back(run, check):
    dataset = ActivationDataset(run)
    known = {sample.sample_idx: sample for sample in dataset}
    assert len(known) == 48
    for sample in dataset:
        np.testing.assert_array_equal(sample.turn, sample.role + 1)
    check_tokens(dataset.batches(16, columns=IDS))
    for batch in dataset.batches(16, shuffle=1, columns=["tags", "doc_id", "row"]):
        for number, *values in zip(batch.sample_idx, *batch.columns.values(), strict=True):
            sample = known[number]
            assert values == [sample.columns.get("tags"), sample.doc_id, sample.row]
    assert check(run) == []
    table = dataset.samples
    rows = [columns_of(int(doc_id.removeprefix("id-"))) for doc_id in table["doc_id"].to_pylist()]
    assert table.column_names[6:] == ["even", "mixed", "tags"]
    for name in ("even", "tags"):
        assert table[name].to_pylist() == [row.get(name) for row in rows]
    mixed = [row["mixed"] for row in rows]
    assert table["mixed"].to_pylist() == [None if v is None else str(v) for v in mixed]


def even(table):
    return table["even"]


MASKS = {
    "function": lambda table: even,
    "pyarrow": lambda table: table["even"].combine_chunks(),
    "pandas": lambda table: table.to_pandas()["even"],
}


@pytest.mark.parametrize("kind", MASKS)
def test_only_tokens_of_these_samples(run, kind):
    dataset = ActivationDataset(run)
    where = MASKS[kind](dataset.samples)
    for shuffle in (None, 3):
        batches = dataset.batches(16, where=where, shuffle=shuffle, columns=IDS)
        check_tokens(batches, lambda row, _: row % 2 == 0)


@pytest.mark.parametrize("roles", [["template", "user"], "system", ROLES])
def test_only_tokens_of_these_roles(run, roles):
    asked = dict(roles=roles, columns=IDS)
    dataset = ActivationDataset(run)
    for options in ({}, dict(shuffle=1, buffer=40), dict(shuffle=1, max_norm=1e9)):
        check_tokens(dataset.batches(16, **asked, **options), lambda _, role: role in roles)
    shares = [dataset.batches(16, **asked, worker=n, workers=3) for n in range(3)]
    check_tokens((each for share in shares for each in share), lambda _, role: role in roles)
    both = dataset.batches(16, **asked, where=even)
    check_tokens(both, lambda row, role: row % 2 == 0 and role in roles)


def test_columns_and_labels_stay_in_copies_and_as_tensors(run):
    """A function that chooses samples need not be one that pickle takes."""
    options = dict(where=lambda table: table["even"], roles=["user"], columns="doc_id")
    batches = ActivationDataset(run).batches(8, shuffle=0, **options)
    copied = pickle.loads(pickle.dumps(batches))
    check_tokens(copied, lambda row, role: row % 2 == 0 and role == "user")
    batch = next(ActivationDataset(run).batches(8, **options))
    for moved in (batch.torch(), batch.jax(), batch.to("cpu"), batch.map(np.copy)):
        assert moved.columns is batch.columns
        assert moved.role.tolist() == batch.role.tolist()
        assert type(moved.turn) is type(moved.position)


BAD_CHOICES = [
    (dict(where=[True]), r"where: bool, shape \(1,\): expected true or false, never null, for"),
    (dict(where=lambda table: [*table["even"].to_pylist()[1:], None]), "where: object, shape"),
    (dict(where=[False] * 48), "where: chooses none of 48 samples"),
    (dict(columns=["splitt"]), "columns: samples have no 'splitt'; they have sample_idx, "),
    (dict(roles=["user", "critic"]), "roles: user, critic asked for; .* has tokens of template, "),
]


@pytest.mark.parametrize("options,named", BAD_CHOICES)
def test_choices_that_make_no_sense(run, options, named):
    with pytest.raises(ValueError, match=named):
        ActivationDataset(run).batches(8, **options)


def add(storage, number, tokens=3, **known):
    values = np.zeros((tokens, 2), np.float32)
    storage.add_activation(0, values, number, "", np.zeros(tokens, np.int32), **known)


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_a_program_of_ones_own_stores_columns_and_no_roles(tmp_path, shard_format):
    with open_storage(tmp_path / "run", {0: "h"}, shard_format=shard_format) as storage:
        for number in range(4):
            row = {"file": "a", "piece": number % 2, "start": 3 * (number % 2)}
            add(storage, number, row=row, columns={"n": number, "tags": ["a", "b"]})
    dataset = ActivationDataset(tmp_path / "run")
    assert dataset[1].columns == {"n": 1, "tags": ["a", "b"]}
    assert dataset.samples["n"].to_pylist() == [0, 1, 2, 3]
    batch = next(dataset.batches(3, columns="tags"))
    assert batch.columns["tags"].tolist() == 3 * [["a", "b"]]
    assert dataset.document(-1).position.tolist() == [*range(6)]
    assert dataset.document(-1).columns["n"] == 2
    assert dataset[1].role is dataset[1].turn is batch.role is None
    with pytest.raises(ValueError, match="roles: .*run has no roles"):
        dataset.batches(1, roles=["user"])
