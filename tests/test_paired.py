"""Two runs as one: the same tokens side by side, or with the hooks of both. What is due is built
from the rows of the data set alone."""

import json
import logging
import pickle
from collections import Counter

import numpy as np
import pyarrow.compute
import pytest
from extractions import change_table
from runs_of_rows import (
    HOOKS,
    IDS,
    LENGTH,
    OTHER_HOOKS,
    WIDTHS,
    Run,
    check,
    contents,
    found_in,
    random_runs,
    same,
    some_run,
    tokens_of,
)
from runs_to_read import FORMATS

from activation_extraction import ActivationDataset, paired
from activation_extraction.common.choices import ROLES
from activation_extraction.dataset import open_shards


def pair_of(runs, tmp_path):
    return paired(*(run.store(tmp_path / str(number)) for number, run in enumerate(runs)))


def is_even(table):
    return table["even"]


def is_odd(table):
    return pyarrow.compute.invert(table["even"])


@pytest.mark.parametrize("seed", range(24))
def test_every_token_of_random_pairs(seed, tmp_path):
    runs = random_runs(seed)
    pair = pair_of(runs, tmp_path)
    for run in pair.runs:
        run._local = seed % 2 == 0  # otherwise, several chunks are read at the same time
    common = set(runs[0].rows) & set(runs[1].rows)
    assert len(pair) == len(common)
    assert pair.unpaired_samples == tuple(len(run.rows) - len(common) for run in runs)
    keys = [run.tokens().keys() for run in runs]
    assert pair.unpaired_tokens == tuple(len(k) - len(keys[0] & keys[1]) for k in keys)
    size = int(np.random.default_rng(seed).choice([1, 7, 64]))
    stored = [key for key in expected_order(pair.runs[0]) if key in keys[1]]
    assert check(pair.batches(size, columns=IDS), runs) == stored
    order = check(pair.batches(size, shuffle=seed, buffer=3 * size, columns=IDS), runs)
    assert order == check(pair.batches(size, shuffle=seed, buffer=3 * size, columns=IDS), runs)
    assert len(order) < 50 or size == 1 or order != stored


def expected_order(dataset):
    return [(int(sample.doc_id[3:]), int(p)) for sample in dataset for p in sample.position]


@pytest.mark.parametrize("seed", range(16))
def test_random_filters_of_random_pairs(seed, tmp_path):
    """Each filter is there or not, and holds in both runs; workers share what passes all."""
    runs = random_runs(100 + seed)
    pair = pair_of(runs, tmp_path)
    chance = np.random.default_rng([seed, 1])
    skip_first = int(chance.choice([0, 0, 2, 9]))
    limits = {hook: float(chance.choice([1.5, 2.5, 99])) for hook in HOOKS.values()}
    if seed % 4 == 1:  # one limit for every hook
        limits = dict.fromkeys(limits, 2.5)
    roles = [role for role in ROLES if chance.random() < 0.7] or [ROLES[0]]
    even = (None, is_even, pair.runs[0].samples["even"].to_pylist())[seed % 3]

    def wanted(key, token):
        return (
            key[1] >= skip_first
            and ROLES[token[1]] in roles
            and (key[0] % 2 == 0 or even is None)
            and all(np.linalg.norm(np.float32(token[2][h])) <= m for h, m in limits.items())
        )

    options = dict(
        skip_first=skip_first,
        max_norm=2.5 if seed % 4 == 1 else limits,
        roles=roles,
        where=even,
        shuffle=None if chance.random() < 0.4 else seed,
        buffer=64,
        workers=int(chance.integers(1, 4)),
        columns=IDS,
    )
    shares = [pair.batches(16, worker=n, **options) for n in range(options["workers"])]
    first, second = (run.tokens() for run in runs)
    common = first.keys() & second.keys()
    if len(shares) == 1 and not any(wanted(k, first[k]) and wanted(k, second[k]) for k in common):
        with pytest.raises(ValueError, match="no token passes these filters: "):
            next(shares[0])
        return
    check([batch for share in shares for batch in share], runs, wanted)


@pytest.mark.parametrize("seed", range(6))
def test_a_changed_token_is_found(seed, tmp_path):
    """Any token that both runs have may be it; the error names the sample and the position."""
    runs = random_runs(200 + seed)
    keys = sorted(runs[0].tokens().keys() & runs[1].tokens().keys())
    row, position = keys[np.random.default_rng(seed).integers(len(keys))]
    runs[seed % 2].changed = row, position
    pair = pair_of(runs, tmp_path)
    numbers = [run.samples["doc_id"].to_pylist().index(f"id-{row}") for run in pair.runs]
    first, second = (run[n].sample_idx for run, n in zip(pair.runs, numbers, strict=True))
    token = tokens_of(row)[0][position]
    in_each = (f"{token + 1} in one and {token}", f"{token} in one and {token + 1}")[seed % 2]
    told = f"sample {first} of .*/0 and sample {second} of .*/1 come from the same row, but the "
    told += f"token at position {position} is {in_each} in"
    for options in (dict(shuffle=seed), dict(), dict(skip_first=LENGTH - 1), dict(hooks=HOOKS[2])):
        with pytest.raises(ValueError, match=told):
            list(pair.batches(16, **options))
    with pytest.raises(ValueError, match=told):
        print(pair.unpaired_tokens)
    where = dict(where=lambda table: pyarrow.compute.not_equal(table["doc_id"], f"id-{row}"))
    check(pair.batches(8, columns=IDS, **where), runs, lambda key, token: key[0] != row)


def test_hooks_for_both_or_for_each(tmp_path):
    runs = random_runs(4)
    pair = pair_of(runs, tmp_path)
    one, two = HOOKS.values()
    for hooks, due in (
        ([one], ([one], [one])),
        (one, ([one], [one])),
        ((one, two), ([one, two], [one, two])),
        (([one], [two]), ([one], [two])),
        (([], [two]), ([], [two])),
        ([], ([], [])),
        ((None, [two]), ([one, two], [two])),
        ([None, two], ([one, two], [two])),
        ((["*resid*"], None), ([one], [one, two])),
    ):
        assert tuple(map(list, next(pair.batches(8, hooks=hooks)))) == due
    first, second = next(pair.batches(8, hooks=([one], [two]), max_norm={two: 9}, dtype="float16"))
    assert first[one].dtype == second[two].dtype == np.float16
    for wrong, told in (
        (dict(hooks=[[one]] * 3), "or a list for each of two runs"),
        (dict(hooks=["x"]), "has no hook 'x'"),
        (dict(hooks=([one], [one]), max_norm={two: 1}), "max_norm: hook .* is not read"),
        (dict(buffer=9), "must hold two batches"),
        (dict(where=[True]), "where: bool"),
    ):
        with pytest.raises(ValueError, match=told):
            pair.batches(8, **wrong)


@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize(
    "options",
    [dict(shuffle=2, buffer=64), dict(skip_first=2), dict(roles=ROLES[:3], where=is_even), dict()],
)
def test_restored_at_every_batch_and_copied(shard_format, options, tmp_path):
    runs = random_runs(5, shard_format=shard_format)
    pair = pair_of(runs, tmp_path)
    batches = pair.batches(16, **options)
    states, due = [batches.state()], []
    for batch in batches:
        due.append(contents(batch))
        states.append(batches.state())
    assert len(due) > 2
    continued = pickle.loads(pickle.dumps(pair)).batches(16, **options)
    for number, state in enumerate(states):
        continued.restore(json.loads(json.dumps(state)))
        assert [contents(batch) for batch in continued] == due[number:]
    next(batches := pair.batches(16, **options))
    copy = pickle.loads(pickle.dumps(batches))
    assert [contents(batch) for batch in copy] == due[1:]
    other = paired(pair.runs[1], pair.runs[0]).batches(16, **options)
    for different, told in (
        (other, "its data is"),
        (pair.batches(16, hooks=(None, [HOOKS[1]]), **options), "its others is"),
        (pair.runs[0].batches(16, **options), "its data is"),
        (pair.batches(16, **options | dict(roles=[ROLES[0]])), "its roles is"),
        (pair.batches(16, **options | dict(where=is_odd)), "its where is"),
    ):
        with pytest.raises(ValueError, match=f"the state is of other batches: {told}"):
            different.restore(states[1])


def test_both_batches_of_a_pair_are_arrays_of_jax(tmp_path):
    """test_paired_in_a_bucket.py has those of torch, from a loader's workers."""
    runs = random_runs(6, dtype="float32")
    batches = pair_of(runs, tmp_path).batches(16, shuffle=0, columns=IDS).jax()
    check([tuple(batch.map(np.asarray) for batch in both) for both in batches], runs)


def test_what_only_one_run_has_is_said_once(tmp_path, caplog):
    runs = [Run(list(range(20)), 0), Run(list(range(3, 25)), 1)]
    with caplog.at_level(logging.WARNING):
        pair = pair_of(runs, tmp_path)
        list(pickle.loads(pickle.dumps(pair)).batches(8))
    lost = [sum(len(tokens_of(row)[0]) for row in rows) for rows in (range(3), range(20, 25))]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/0: 3 samples ({lost[0]} tokens) left out: not all runs have them",
        f"{tmp_path}/1: 5 samples ({lost[1]} tokens) left out: not all runs have them",
    ]
    assert (pair.unpaired_samples, pair.unpaired_tokens) == ((3, 5), tuple(lost))
    caplog.clear()
    paired(tmp_path / "0", ActivationDataset(tmp_path / "0", hooks=[HOOKS[1]]))
    assert caplog.records == []
    paired(tmp_path / "0", Run(list(range(20)), 2, kept="odd").store(tmp_path / "2"))
    assert "store different tokens of the same samples" in caplog.records[0].getMessage()


def test_runs_that_cannot_be_paired(tmp_path):
    one = Run([1, 2, 3], 0).store(tmp_path / "one")
    two = Run([4, 5], 0).store(tmp_path / "two")
    with pytest.raises(ValueError, match="/one and .*/two: no row of the data set has a sample in"):
        paired(one, two)
    change_table(one, 1, lambda rows: rows[1].update(row=rows[0]["row"]))
    with pytest.raises(ValueError, match="/one: sample 1 has the row of another sample"):
        paired(one, one)
    change_table(one, 1, lambda rows: [row.update(row=None) for row in rows])
    with pytest.raises(ValueError, match="no row of the data set has a sample in each of them"):
        paired(one, one)


OTHER_SAMPLES = {
    "data": "org/name default train",
    "data_revision": "2" * 64,
    "text_column": "content",
    "messages_column": "messages",
    "ids_column": "input_ids",
    "chat_template": "3" * 64,
    "max_seq_length": 99,
    "long_documents": "split",
    "overlap": 3,
}


@pytest.mark.parametrize("name", OTHER_SAMPLES)
def test_runs_over_other_data_are_refused(name, tmp_path):
    """Rows of other data may have the same names, and even the same tokens where few are stored."""
    one = ActivationDataset(Run([1, 2], 0).store(tmp_path / "one"))
    other = Run([1, 2], 1, hooks=OTHER_HOOKS, identity={name: OTHER_SAMPLES[name]})
    two = ActivationDataset(other.store(tmp_path / "two"))
    before, now = (
        f"digest {value[:12]}" if len(value) == 64 else value or "nothing"
        for value in (str(run.metadata["identity"][name]) for run in (one, two))
    )
    told = f"/one and .*/two: their samples are not those of the same data: {name} is {before} in "
    told += f"one and {now} in the other"
    for together in (paired, ActivationDataset.join):
        with pytest.raises(ValueError, match=told):
            together(one, two)


@pytest.mark.parametrize(
    "identity",
    [
        {"model_digest": "4" * 64, "tokenizer_digest": "5" * 64, "dtype": "bfloat16"},
        {"skip_bad_rows": True, "shuffle_documents": "7", "id_column": "name"},
        {"roles": ("user",), "drop_token_ids": (5,), "mask_column": "mask"},
        {"data": "", "text_column": "none", "max_seq_length": 0},  # of a program of one's own
    ],
)
def test_runs_that_store_the_same_samples_in_another_way_are_paired(identity, tmp_path):
    runs = [Run([1, 2], 0), Run([2, 1], 1, identity=identity)]
    assert len(pair_of(runs, tmp_path)) == 2


def test_files_of_the_same_name_are_compared(tmp_path):
    """By their size and, where both are local, by their fingerprint."""

    def file(size, fingerprint, name="0.jsonl"):
        return [{"name": name, "bytes": size, "fingerprint": fingerprint}]

    one, two = (f"blocks {digit * 64}" for digit in "12")
    cases = [
        (file(5, one), file(5, two), f"5 bytes, {one} in one and 5 bytes, {two} in the other"),
        (file(5, one), file(6, two), f"5 bytes, {one} in one and 6 bytes, {two} in the other"),
        (file(5, one), file(6, "an etag"), "0.jsonl is 5 bytes in one and 6 bytes in the other"),
        (file(5, one), file(5, "an etag"), None),
        (file(5, one), file(6, two, "another.jsonl"), None),
        (file(5, one), file(5, one) + file(9, two, "more.jsonl"), None),
    ]
    for number, (*files, told) in enumerate(cases):
        runs = [Run([1, 2], n, hosts=2, data_files=each) for n, each in enumerate(files)]
        stored = [run.store(tmp_path / f"{number}_{n}") for n, run in enumerate(runs)]
        if told is None:
            assert len(paired(*stored)) == 2
        else:
            with pytest.raises(ValueError, match=told):
                paired(*stored)


@pytest.fixture
def opened(monkeypatch):
    """The folder and number of every shard that is opened."""
    numbers, original = [], open_shards.open_shard

    def open_one(folder, commit, hooks):
        numbers.append((folder.url, commit.number))
        return original(folder, commit, hooks)

    monkeypatch.setattr(open_shards, "open_shard", open_one)
    return numbers


def test_pickles_are_unpacked_once_for_each_shard_of_the_first_run(tmp_path, opened):
    """Whatever their order; and none that has no token which is wanted."""
    runs = [Run(list(range(60)), 0, shard_format="pickle")]
    runs.append(Run(list(range(20, 60))[::-1], 1, shard_format="pickle", hosts=3, shard_gb=8e-6))
    pair = pair_of(runs, tmp_path)
    first, second = (len(run._commits) for run in pair.runs)
    for shuffle in (None, 0):
        opened.clear()
        list(pair.batches(8, shuffle=shuffle, buffer=32))
        counts = Counter(url.removeprefix(f"{tmp_path}/")[0] for url, _ in opened)
        assert counts["0"] < first and counts["1"] <= counts["0"] * second
        opened.clear()
        not_in_both = [True] + [False] * 59
        with pytest.raises(ValueError, match="no token passes these filters: where"):
            next(pair.batches(8, shuffle=shuffle, where=not_in_both))
        assert opened == []


@pytest.mark.parametrize("seed", range(8))
def test_join(seed, tmp_path):
    chance = np.random.default_rng(seed)
    runs = some_run(chance, 0), some_run(chance, 1, hooks=OTHER_HOOKS)
    one, two = (ActivationDataset(run.store(tmp_path / str(n))) for n, run in enumerate(runs))
    joined = one.join(two)
    every = [run.tokens() for run in runs]
    due = {
        key: (*token[:2], token[2] | every[1][key][2])
        for key, token in every[0].items()
        if key in every[1]
    }
    assert list(joined.hooks.items()) == list(WIDTHS.items()) and len(joined.dtypes) == 3
    for shuffle in (None, 0):
        found = [found_in(batch) for batch in joined.batches(16, shuffle=shuffle, columns=IDS)]
        same({key: token for batch in found for key, token in batch.items()}, due)
        assert sum(map(len, found)) == len(due)
    samples = {}
    for sample in joined:
        for t, position in enumerate(sample.position):
            values = {hook: sample[hook][t] for hook in sample.activations}
            token = int(sample.token_ids[t]), int(sample.role[t]), values
            samples[int(sample.doc_id[3:]), int(position)] = token
    same(samples, due)
    assert joined.samples["doc_id"].to_pylist() == [sample.doc_id for sample in joined]
    assert [s.doc_id for s in joined[-2:]] == joined.samples["doc_id"].to_pylist()[-2:]
    assert joined.statistics[OTHER_HOOKS[3]] == two.statistics[OTHER_HOOKS[3]]
    (hook,) = OTHER_HOOKS.values()
    for only in ([hook], [HOOKS[1]], [HOOKS[2], hook]):
        found = [found_in(batch) for batch in joined.batches(16, only, shuffle=1, columns=IDS)]
        narrow = {k: (*v[:2], {h: v[2][h] for h in only}) for k, v in due.items()}
        same({key: token for batch in found for key, token in batch.items()}, narrow)
    even = joined.batches(16, where=lambda table: table["even"], max_norm={hook: 2.5}, columns=IDS)
    found = {key: token for batch in even for key, token in found_in(batch).items()}
    small = {k: v for k, v in due.items() if k[0] % 2 == 0 and np.linalg.norm(v[2][hook]) <= 2.5}
    same(found, small)
    with pytest.raises(ValueError, match=f"hook '{HOOKS[1]}' is in more than one of the runs"):
        one.join(tmp_path / "0")
    with pytest.raises(IndexError):
        joined[len(joined)]


def test_three_runs_are_joined_and_a_changed_token_is_found(tmp_path):
    rows = list(range(12))
    one, two = HOOKS.items()
    runs = [Run(rows, n, hooks=dict([hook])) for n, hook in enumerate((one, two))]
    runs.append(Run(rows[::-1], 2, hooks=OTHER_HOOKS, changed=(5, 3)))
    urls = [run.store(tmp_path / str(number)) for number, run in enumerate(runs)]
    joined = ActivationDataset(urls[0]).join(urls[1])
    assert list(joined.join(urls[2]).hooks) == list(WIDTHS)
    assert sum(map(len, joined.batches(8))) == len(runs[0].tokens())
    every = joined.join(urls[2])
    for read in (lambda: list(every.batches(8)), lambda: every[5]):
        with pytest.raises(ValueError, match="sample 5 of .*/0 and sample 6 of .*/2 .* position 3"):
            print(read())
    assert list(every[4].activations) == list(WIDTHS)
