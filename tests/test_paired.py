"""Runs read as one: the same tokens side by side, or with the hooks of all. What is due is built
from the rows of the data set alone."""

import json
import logging
import pickle
from collections import Counter

import numpy as np
import pyarrow.compute
import pytest
import torch
from extractions import change_table, upload
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
from torch.utils.data import DataLoader

from activation_extraction import ActivationDataset, paired
from activation_extraction.common.choices import ROLES

ONE, TWO = HOOKS.values()


def pair_of(runs, tmp_path):
    return paired(*(run.store(tmp_path / str(number)) for number, run in enumerate(runs)))


def is_even(table):
    return table["even"]


@pytest.mark.parametrize("seed", range(10))
def test_every_token_of_random_pairs(seed, tmp_path):
    runs = random_runs(seed)
    pair = pair_of(runs, tmp_path)
    for run in pair.runs:
        run.shards.local = seed % 2 == 0  # otherwise, several chunks are read at the same time
    common = set(runs[0].rows) & set(runs[1].rows)
    assert len(pair) == len(common)
    assert pair.unpaired_samples == tuple(len(run.rows) - len(common) for run in runs)
    size = int(np.random.default_rng(seed).choice([3, 16, 64]))
    order = [(int(s.doc_id[3:]), int(p)) for s in pair.runs[0] for p in s.position]
    theirs = runs[1].tokens()
    stored = [key for key in order if key in theirs]
    assert check(pair.batches(size, columns=IDS), runs) == stored
    shuffled = [
        check(pair.batches(size, shuffle=seed, buffer=3 * size, columns=IDS), runs)
        for _ in range(2)
    ]
    assert shuffled[0] == shuffled[1]
    assert len(stored) < 50 or shuffled[0] != stored


@pytest.mark.parametrize("seed", range(9))
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


def test_a_function_chooses_samples_in_each_run(tmp_path):
    """By their own tables, which count other tokens."""
    runs = [Run(list(range(20)), 0), Run(list(range(20)), 1, kept="odd")]
    many = dict(where=lambda table: pyarrow.compute.greater(table["tokens"], 4), columns=IDS)

    def wanted(key, token):
        return all(len(run.positions(key[0])) > 4 for run in runs)

    assert check(pair_of(runs, tmp_path).batches(8, **many), runs, wanted)
    pair = paired(tmp_path / "1", tmp_path / "0")
    assert check(pair.batches(8, **many), runs[::-1], wanted)


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_token_is_found(seed, tmp_path):
    """Any token that both runs have may be it; the error names the sample and the position."""
    runs = random_runs(200 + seed)
    keys = sorted(runs[0].tokens().keys() & runs[1].tokens().keys())
    row, position = keys[np.random.default_rng(seed).integers(len(keys))]
    runs[seed % 2].changed = row, position
    pair = pair_of(runs, tmp_path)
    numbers = [run.samples["doc_id"].to_pylist().index(f"id-{row}") for run in pair.runs]
    first, second = (run[n].sample_idx for run, n in zip(pair.runs, numbers, strict=True))
    ids = [tokens_of(row)[0][position] + (seed % 2 == number) for number in range(2)]
    told = f"the token at position {position} of the same row is {ids[0]} in sample {first} of .*/0"
    told += f" but {ids[1]} in sample {second} of .*/1"
    for options in (dict(shuffle=seed), dict(skip_first=LENGTH - 1), dict(hooks=HOOKS[2])):
        with pytest.raises(ValueError, match=told):
            list(pair.batches(16, **options))
    where = dict(where=lambda table: pyarrow.compute.not_equal(table["doc_id"], f"id-{row}"))
    check(pair.batches(8, columns=IDS, **where), runs, lambda key, token: key[0] != row)


def test_hooks_limits_and_dtypes(tmp_path):
    runs = random_runs(4)
    pair = pair_of(runs, tmp_path)
    for hooks, due in ((ONE, [ONE]), ([ONE, TWO], [ONE, TWO]), ([], []), (["*resid*"], [ONE])):
        assert [list(batch) for batch in next(pair.batches(8, hooks=hooks))] == [due] * 2
    one, two = pair.runs
    each = paired(ActivationDataset(one.url, [ONE]), ActivationDataset(two.url, [TWO]))
    first, second = next(each.batches(8, max_norm={TWO: 9}, dtype="float16"))
    assert ([*first], [*second]) == ([ONE], [TWO])
    assert first[ONE].dtype == second[TWO].dtype == np.float16
    for wrong, told in (
        (dict(hooks=["x"]), "has no hook 'x'"),
        (dict(hooks=[ONE], max_norm={TWO: 1}), "max_norm: hook .* is not read"),
        (dict(buffer=9), "must hold two batches"),
        (dict(where=[True]), "where: bool"),
    ):
        with pytest.raises(ValueError, match=told):
            pair.batches(8, **wrong)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_restored_at_every_batch_and_copied(shard_format, tmp_path):
    pair = pair_of(random_runs(5, shard_format=shard_format), tmp_path)
    options = dict(shuffle=2, buffer=64, roles=ROLES[:3], where=is_even)
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
    odd = dict(where=lambda table: pyarrow.compute.invert(table["even"]))
    narrow = ActivationDataset(pair.runs[1].url, [ONE])
    for different, told in (
        (paired(pair.runs[1], pair.runs[0]).batches(16, **options), "its data is"),
        (paired(pair.runs[0], narrow).batches(16, **options), "its others is"),
        (pair.runs[0].batches(16, **options), "its data is"),
        (pair.batches(16, **options | dict(roles=[ROLES[0]])), "its roles is"),
        (pair.batches(16, **options | odd), "its where is"),
    ):
        with pytest.raises(ValueError, match=f"the state is of other batches: {told}"):
            different.restore(states[1])


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
    caplog.clear()
    paired(tmp_path / "0", ActivationDataset(tmp_path / "0", hooks=[ONE]))
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
    "special_tokens": "an end after the text",
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


def test_runs_that_store_the_same_samples_in_another_way_are_paired(tmp_path):
    Run([1, 2], 0).store(tmp_path / "one")
    for name, identity in {
        "model": {"model_digest": "4" * 64, "tokenizer_digest": "5" * 64, "dtype": "bfloat16"},
        "tokens": {"roles": ("user",), "drop_token_ids": (5,), "mask_column": "mask"},
        "own program": {"data": "", "text_column": "none", "max_seq_length": 0},
    }.items():
        other = Run([2, 1], 1, identity=identity).store(tmp_path / name)
        assert len(paired(tmp_path / "one", other)) == 2


def test_files_of_the_same_name_are_compared(tmp_path):
    """By their size and, where both are local, by their fingerprint."""
    one, two = (f"blocks {digit * 64}" for digit in "12")
    for number, (size, known, name, told) in enumerate(
        (
            (5, two, "0.jsonl", f"the content of data file 0.jsonl is {one} in one and {two} in"),
            (6, "an etag", "0.jsonl", "the size of data file 0.jsonl is 5 in one and 6 in the"),
            (5, "an etag", "0.jsonl", None),
            (6, two, "another.jsonl", None),
        )
    ):
        files = [{"name": "0.jsonl", "bytes": 5, "fingerprint": one}]
        others = [{"name": name, "bytes": size, "fingerprint": known}]
        stored = [
            Run([1, 2], n, hosts=2, data_files=each).store(tmp_path / f"{number}_{n}")
            for n, each in enumerate((files, others))
        ]
        if told is None:
            assert len(paired(*stored)) == 2
        else:
            with pytest.raises(ValueError, match=told):
                paired(*stored)


def due_of(runs):
    """The tokens that all runs have, with the values of each."""
    every = [run.tokens() for run in runs]
    return {
        key: (*token[:2], {hook: value for of in every for hook, value in of[key][2].items()})
        for key, token in every[0].items()
        if all(key in of for of in every)
    }


def tokens_in(batches):
    """The tokens of joined batches, each of which comes once."""
    found = [found_in(batch) for batch in batches]
    every = {key: token for batch in found for key, token in batch.items()}
    assert sum(map(len, found)) == len(every)
    return every


@pytest.mark.parametrize("seed", range(5))
def test_join(seed, tmp_path):
    chance = np.random.default_rng(seed)
    runs = some_run(chance, 0), some_run(chance, 1, hooks=OTHER_HOOKS)
    one, two = (ActivationDataset(run.store(tmp_path / str(n))) for n, run in enumerate(runs))
    joined, due = one.join(two), due_of(runs)
    assert list(joined.hooks.items()) == list(WIDTHS.items()) and len(joined.dtypes) == 3
    for shuffle in (None, 0):
        same(tokens_in(joined.batches(16, shuffle=shuffle, columns=IDS)), due)
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
    for only in ([hook], [TWO, hook]):
        narrow = {k: (*v[:2], {h: v[2][h] for h in only}) for k, v in due.items()}
        same(tokens_in(joined.batches(16, only, shuffle=1, columns=IDS)), narrow)
    small = {k: v for k, v in due.items() if k[0] % 2 == 0 and np.linalg.norm(v[2][hook]) <= 2.5}
    for where in (is_even, joined.samples["even"].to_pylist()):
        options = dict(where=where, max_norm={hook: 2.5}, columns=IDS)
        same(tokens_in(joined.batches(16, **options)), small)
    with pytest.raises(ValueError, match=f"hook '{ONE}' is in more than one of the runs"):
        one.join(tmp_path / "0")
    with pytest.raises(IndexError):
        joined[len(joined)]


def test_three_runs_are_joined_and_a_changed_token_is_found(tmp_path):
    rows = list(range(12))
    runs = [Run(rows, n, hooks=dict([hook])) for n, hook in enumerate(HOOKS.items())]
    runs.append(Run(rows[::-1], 2, hooks=OTHER_HOOKS, changed=(5, 3)))
    urls = [run.store(tmp_path / str(number)) for number, run in enumerate(runs)]
    joined = ActivationDataset(urls[0]).join(urls[1])
    assert sum(map(len, joined.batches(8))) == len(runs[0].tokens())
    every = joined.join(urls[2])
    for read in (lambda: list(every.batches(8)), lambda: every[5]):
        with pytest.raises(ValueError, match="position 3 .* sample 5 of .*/0 .* sample 6 of .*/2"):
            print(read())
    assert list(every[4].activations) == list(WIDTHS)


def test_three_runs_that_store_other_tokens_are_joined(tmp_path):
    """A token comes only if all have it, with the values that each has for it."""
    hooks, rows = [{key: hook} for key, hook in (HOOKS | OTHER_HOOKS).items()], list(range(12))
    kept = zip(("all", "odd", "first"), hooks, strict=True)
    runs = [Run(rows, n, each, hooks=own) for n, (each, own) in enumerate(kept)]
    one, *others = (run.store(tmp_path / str(number)) for number, run in enumerate(runs))
    joined = ActivationDataset(one).join(others[0]).join(others[1])
    same(tokens_in(joined.batches(16, columns=IDS)), due_of(runs))


def in_bucket(runs, tmp_path):
    urls = [f"gs://bucket/runs/{number}" for number, _ in enumerate(runs)]
    for number, (run, url) in enumerate(zip(runs, urls, strict=True)):
        upload(run.store(tmp_path / str(number)), url)
    return paired(*urls)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX has threads in this process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_pair_in_a_bucket_by_workers(bucket, tmp_path):
    """One run has safetensors, the other one pickles."""
    runs = random_runs(7, dtype="float32", hosts=2, shard_gb=8e-6)
    for run, form in zip(runs, ("safetensors", "pickle"), strict=True):
        run.shard_format = form
    batches = in_bucket(runs, tmp_path).batches(16, shuffle=0, buffer=64, columns=IDS)
    usual = dict(batch_size=None, num_workers=2)
    loader = DataLoader(batches.torch(), multiprocessing_context="spawn", **usual)
    check([tuple(batch.map(torch.Tensor.numpy) for batch in read) for read in loader], runs)
    with pytest.raises(OSError, match="forked from one that had used a bucket"):
        next(iter(DataLoader(batches.torch(), multiprocessing_context="fork", **usual)))
    check([tuple(b.map(np.asarray) for b in both) for both in batches.jax()], runs)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_run_of_three_hosts_takes_about_three_times_the_requests(shard_format, bucket, tmp_path):
    """Samples that lie together are read at once, though the other run mixes those of the hosts;
    and a shard of the first run fetches each pickle that has some of its samples once."""
    rows, like = list(range(60)), dict(shard_gb=1e-5)
    runs = [Run(rows, 0, **like), Run(rows, 1, hosts=3, shard_format=shard_format, **like)]
    pair = in_bucket(runs, tmp_path)

    def asked(batches):
        bucket.asked.clear()
        assert sum(map(len, batches)) == pair.runs[0].tokens
        names = [name.split("/") for _, name in bucket.asked]
        return Counter(name[1] for name in names if len(name) > 1)  # gcsfs may ask for the bucket

    for options in (dict(), dict(shuffle=0)):
        alone = sum(
            (asked(run.batches(16, buffer=1600, **options)) for run in pair.runs), Counter()
        )
        together = asked(first for first, _ in pair.batches(16, buffer=1600, **options))
        assert together["0"] <= alone["0"] and together["1"] <= 4 * alone["1"]
    bucket.asked.clear()
    with pytest.raises(ValueError, match="no token passes these filters: "):
        next(pair.batches(16, where=[n == 0 for n in range(60)], skip_first=LENGTH))
    assert {name.rsplit("/")[-1] for _, name in bucket.asked if "shard_" in name} <= {
        "shard_0001.safetensors", "shard_0001.pkl.gz"
    }  # fmt: skip
