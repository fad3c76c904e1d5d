"""What a run knows beside activations: columns of the rows, the role and turn of every token, and
the document of a piece. All of it is stored, read back, and chosen from."""

import pickle
import shutil

import numpy as np
import pandas
import pyarrow
import pyarrow.compute
import pytest
from extractions import HIDDEN, HOOKS, open_part
from runs_of_rows import batch_of
from runs_to_read import FORMATS, assert_same
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import ROLES
from activation_extraction.dataset import open_shards
from activation_extraction.text.batch import Cursor, Sample, Worker

NAMES = ("token_ids", "role", "turn")
LENGTH, OVERLAP, FIRST = 10, 2, next(iter(HOOKS.values()))
LENGTHS = (4, 25, 10, 11, 34, 1)  # of documents; one with more than LENGTH tokens has pieces
IDENTITY = {"positions": "first:10"}  # the context of a piece is not stored


def document(number):
    """All that is known of a document: its arrays by name, hooks among them, and its columns."""
    chance, length = np.random.default_rng(number), LENGTHS[number % len(LENGTHS)]
    arrays = {name: chance.integers(0, 6, length, np.int32) for name in NAMES}
    values = np.stack([np.full(length, number), np.arange(length)], 1).repeat(HIDDEN // 2, 1)
    arrays |= {hook: (values + key).astype(np.float32) for key, hook in HOOKS.items()}
    columns = {"split": "test" if number % 3 else "train", "mixed": [number, "ä", None][number % 3]}
    return arrays, columns | ({"tags": [{"a": number}]} if number % 2 else {})


def samples(worker, count):
    """The pieces of documents, and all arrays of each."""
    index = 0
    for number in range(count):
        name = 2 * number + worker.host
        arrays, columns = document(name)
        length = len(arrays["token_ids"])
        for piece, start in enumerate(range(0, max(length - OVERLAP, 1), LENGTH - OVERLAP)):
            row = {"file": "a.jsonl", "line": name} | (
                {"piece": piece, "start": start} if length > LENGTH else {}
            )
            own = {each: values[start : start + LENGTH] for each, values in arrays.items()}
            labels = {label: own[label] for label in ("role", "turn")}
            known = worker.sample_idx(index), own["token_ids"], "text", f"id-{name}"
            cursors = Cursor(index), Cursor(index + 1)
            yield Sample(*known, *cursors, row, columns=columns, labels=labels), own
            index += 1


def make(root, shard_format, count=12, hosts=2, finish=True, **options):
    identity = IDENTITY | {"shard_format": shard_format}
    for host in range(hosts):
        part, worker = (0, host, 1, hosts), Worker(0, 1, host, hosts)
        with open_part(
            root, *part, identity=identity, shard_format=shard_format, **options
        ) as storage:
            for sample, own in samples(worker, count):
                kept = np.arange(len(sample.token_ids))[OVERLAP * bool(sample.row.get("piece")) :]
                values = {key: own[hook][kept] for key, hook in HOOKS.items()}
                storage.add_batch(batch_of(sample, kept, LENGTH), values)
            storage.finalize(complete=finish)
    return root


@pytest.fixture(scope="module", params=FORMATS)
def run(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("run"), request.param)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def tokens_of(batches):
    """document and position -> what is known of each token, from batches or samples."""
    found = {}
    for batch in batches:
        for n, where in enumerate(batch[FIRST]):
            number, position = int(where[0]) - 3, int(where[-1]) - 3
            assert (number, position) not in found
            found[number, position] = (
                *(int(getattr(batch, name)[n]) for name in NAMES),
                batch.columns["doc_id"][n] if "doc_id" in batch.columns else None,
            )
    return found


def expected(wanted=lambda number, position, role: True, doc_ids=False):
    found = {}
    for number in range(24):
        arrays, _ = document(number)
        for position, token in enumerate(zip(*(arrays[n] for n in NAMES), strict=True)):
            if wanted(number, position, ROLES[token[1]]):
                known = f"id-{number}" if doc_ids else None
                found[number, position] = (*map(int, token), known)
    return found


def check_documents(dataset):
    """Each sample leads to its whole document, and knows its columns."""
    seen = set()
    for index, sample in enumerate(dataset):
        number, start = sample.row["line"], sample.row.get("start", 0)
        arrays, columns = document(number)
        whole = dataset.document(index)
        found = {n: getattr(whole, n) for n in NAMES} | whole.activations
        assert_same(found, arrays)
        assert_same({"": whole.position}, {"": np.arange(len(whole.token_ids), dtype=np.int32)})
        assert (whole.doc_id, whole.columns, sample.columns) == (f"id-{number}", columns, columns)
        assert whole.row.get("piece", 0) == whole.row.get("start", 0) == 0
        assert_same({"": sample.role}, {"": arrays["role"][start + sample.position]})
        seen.add(number)
    assert seen == set(range(24))


def test_everything_is_read_back(run, check):
    dataset = ActivationDataset(run)
    check_documents(dataset)
    assert tokens_of(dataset.batches(16)) == expected()
    shuffled = dataset.batches(16, shuffle=0, buffer=64, columns=["doc_id"])
    assert tokens_of(shuffled) == expected(doc_ids=True)
    known = {sample.sample_idx: sample for sample in dataset}  # of two hosts, so not in order
    for batch in dataset.batches(16, shuffle=1, columns=["split", "doc_id", "row"]):
        for number, *values in zip(batch.sample_idx, *batch.columns.values(), strict=True):
            sample = known[number]
            assert values == [sample.columns.get("split"), sample.doc_id, sample.row]
    assert check(run) == []


def test_the_table_of_samples_has_the_columns(run, monkeypatch):
    monkeypatch.setattr(open_shards, "open_shard", None)  # no activation is read
    table = ActivationDataset(run).samples
    rows = [row for host in range(2) for row, _ in samples(Worker(0, 1, host, 2), 12)]
    assert table.column_names[6:] == ["split", "mixed", "tags"]
    assert table["split"].to_pylist() == [row.columns["split"] for row in rows]
    assert table["tags"].to_pylist() == [row.columns.get("tags") for row in rows]
    mixed = [row.columns["mixed"] for row in rows]
    assert table["mixed"].to_pylist() == [None if v is None else str(v) for v in mixed]
    assert table["row"].to_pylist() == [
        {"piece": None, "start": None} | dict(row.row) for row in rows
    ]
    assert set(table.to_pandas()["split"]) == {"train", "test"}


def is_test(table):
    return pyarrow.compute.equal(table["split"], "test")


MASKS = {
    "function": is_test,
    "pyarrow": lambda table: is_test(table).combine_chunks(),
    "list": lambda table: is_test(table).to_pylist(),
    "NumPy": lambda table: np.array(is_test(table)),
    "pandas": lambda table: table.to_pandas()["split"] == "test",
    "nullable": lambda table: pandas.array(is_test(table).to_pylist(), dtype="boolean"),
}


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("kind", MASKS)
def test_only_tokens_of_these_samples(run, kind, shuffle):
    dataset, function = ActivationDataset(run), MASKS[kind]
    where = function if kind == "function" else function(dataset.samples)
    due = expected(lambda number, position, role: number % 3)
    assert tokens_of(dataset.batches(16, where=where, shuffle=shuffle)) == due
    later = dataset.batches(16, where=where, shuffle=shuffle, skip_first=LENGTH, max_norm=1e9)
    with pytest.raises(ValueError, match=f"these filters: skip_first={LENGTH}, max_norm=.*, where"):
        next(later)


@pytest.mark.parametrize("roles", [["assistant"], ["tool", "user"], "thinking", ROLES])
def test_only_tokens_of_these_roles(run, roles):
    dataset = ActivationDataset(run)
    due = expected(lambda number, position, role: role in roles)
    for options in ({}, dict(shuffle=1, buffer=40), dict(shuffle=1, max_norm=1e9)):
        assert tokens_of(dataset.batches(16, roles=roles, **options)) == due
    shares = [dataset.batches(16, roles=roles, worker=n, workers=3) for n in range(3)]
    assert tokens_of(batch for share in shares for batch in share) == due
    test = {key: value for key, value in due.items() if key[0] % 3}
    assert tokens_of(dataset.batches(16, roles=roles, where=is_test)) == test
    with pytest.raises(ValueError, match="where: chooses none of 48 samples"):
        dataset.batches(16, where=[False] * len(dataset))
    with pytest.raises(ValueError, match="roles: none is asked for; expected some of template, "):
        dataset.batches(16, roles=[])


def test_columns_and_labels_stay_in_copies_and_as_tensors(run):
    """A function that chooses samples need not be one that pickle takes."""
    where = lambda table: is_test(table).to_pylist()  # noqa: E731
    options = dict(where=where, roles=["user"], columns="doc_id")
    batches = ActivationDataset(run).batches(8, shuffle=0, **options)
    due = expected(lambda number, _, role: number % 3 and role == "user", doc_ids=True)
    assert tokens_of(pickle.loads(pickle.dumps(batches))) == due
    batch = next(ActivationDataset(run).batches(8, **options))
    for moved in (batch.torch(), batch.jax(), batch.to("cpu"), batch.map(np.copy)):
        assert moved.columns is batch.columns
        assert moved.role.tolist() == batch.role.tolist()
        assert type(moved.turn) is type(moved.position)


@pytest.mark.parametrize(
    "options,named",
    [
        (dict(where=[True]), r"where: bool, shape \(1,\): expected true or false, never null, for"),
        (dict(where=lambda table: table["cut"]), "where: int64, shape"),
        (dict(where=lambda table: table["split"]), "where: object, shape"),
        (
            dict(where=lambda table: [*is_test(table).to_pylist()[:-1], None]),
            "where: object, shape",
        ),
        (dict(where=True), "where: bool, shape"),
        (dict(columns=["splitt"]), "columns: samples have no 'splitt'; they have sample_idx, "),
        (
            dict(roles=["user", "critic"]),
            "roles: unknown role 'critic'; expected some of template, ",
        ),
    ],
)
def test_choices_that_make_no_sense(run, options, named):
    with pytest.raises(ValueError, match=named):
        ActivationDataset(run).batches(8, **options)


def add(storage, number, tokens=3, **known):
    values = np.zeros((tokens, 2), np.float32)
    storage.add_activation(0, values, number, "", np.zeros(tokens, np.int32), **known)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_program_of_ones_own_stores_them_too(tmp_path, shard_format):
    rows = [{"file": "a", "piece": n % 2, "start": 3 * (n % 2)} for n in range(4)]
    with open_storage(tmp_path / "run", {0: "h"}, shard_format=shard_format) as storage:
        for number, row in enumerate(rows):
            labels = {"turn": range(3), "role": [3, 1, 0]}
            columns = {"n": number, "tags": ["a", "b"]}
            add(storage, number, row=row, columns=columns, labels=labels)
    dataset = ActivationDataset(tmp_path / "run")
    assert dataset[1].columns == {"n": 1, "tags": ["a", "b"]}
    assert dataset[1].turn.tolist() == [0, 1, 2]
    assert dataset.samples["n"].to_pylist() == [0, 1, 2, 3]
    batch = next(dataset.batches(3, columns="tags"))
    assert batch.columns["tags"].tolist() == 3 * [["a", "b"]]
    assert dataset.document(-1).position.tolist() == [*range(6)]
    assert dataset.document(-1).columns["n"] == 2
    with open_storage(tmp_path / "plain", {0: "h"}, shard_format=shard_format) as storage:
        add(storage, 0)
    plain = ActivationDataset(tmp_path / "plain")
    assert plain[0].role is plain[0].turn is next(plain.batches(1)).role is None
    assert plain[0].columns == {} and plain.document(0).position.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="roles: .*plain has no roles"):
        plain.batches(1, roles=["user"])


@pytest.mark.parametrize(
    "labels,told",
    [
        ({"role": [0, 1]}, r"role of dtype int32, shape \(2,\): expected int32, \(3,\)"),
        ({"role": [0, 1, 2**31]}, "role of dtype int64"),
        ({"role": [0.0, 1.0, 2.0]}, "role of dtype float64"),
        ({"role": [0, 1, len(ROLES)]}, f"role {len(ROLES)}: expected 0 to {len(ROLES) - 1}"),
        ({"role": [0, 1, -1]}, "role -1: expected 0 to"),
        ({"mood": [0, 1, 2]}, "labels mood: expected "),
        ({}, "labels none: expected role"),
        ({"role": [0] * 3, "turn": [0] * 3}, "labels role, turn: expected role"),
    ],
)
def test_labels_that_cannot_be_stored(tmp_path, labels, told):
    with open_storage(tmp_path, {0: "h"}) as storage:
        if labels.keys() != {"mood"}:
            add(storage, 0, labels={"role": np.zeros(3, np.uint8)})
        with pytest.raises(ValueError, match=f"^sample 1: {told}"):
            add(storage, 1, labels=labels)
        add(storage, 2, tokens=0, labels={"role": []})
