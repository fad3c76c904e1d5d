"""Runs read as one: the same tokens side by side, or with the hooks of all. What is due is built
from the rows of the data set alone."""

import json
import logging
import pickle

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
    random_run,
    random_runs,
    tokens_of,
)
from torch.utils.data import DataLoader

from activation_extraction import ActivationDataset, paired
from activation_extraction.common.choices import ROLES, SHARD_FORMATS

ONE, TWO = HOOKS.values()


def contents(pair):
    """The bytes of every array of a pair of batches."""
    return [[array.tobytes() for array in batch.arrays] for batch in pair]


def pair_of(runs, tmp_path):
    return paired(*(run.store(tmp_path / str(number)) for number, run in enumerate(runs)))


def is_even(table):
    return table["even"]


def has_many(table):
    return pyarrow.compute.greater(table["tokens"], 4)


@pytest.mark.parametrize("seed", range(2, 6))
def test_every_token_of_random_pairs_that_passes_random_filters(seed, tmp_path):
    """Each filter is there or not, and holds in both runs; workers share what passes all."""
    runs = random_runs(100 + seed)
    pair = pair_of(runs, tmp_path)
    common = set(runs[0].rows) & set(runs[1].rows)
    assert len(pair) == len(common)
    assert pair.unpaired_samples == tuple(len(run.rows) - len(common) for run in runs)
    for run in pair.runs:
        run.shards.is_local = seed % 2 == 0  # otherwise, several chunks are read at the same time
    chance = np.random.default_rng([seed, 1])
    skip_first = int(chance.choice([0, 0, 2]))
    one_for_all = seed % 4 == 1
    limits = {hook: float(chance.choice([2.5, 99])) for hook in HOOKS.values()}
    limits = dict.fromkeys(limits, 2.5) if one_for_all else limits
    roles = [role for role in ROLES if chance.random() < 0.7] or [ROLES[0]]
    where = (is_even, pair.runs[0].samples["even"].to_pylist(), has_many, None)[seed % 4]

    def wanted(key, token):
        return (
            key[1] >= skip_first
            and ROLES[token[1]] in roles
            and (where in (None, has_many) or key[0] % 2 == 0)
            # In each run by its own table, which counts its own tokens.
            and (where is not has_many or all(len(run.positions(key[0])) > 4 for run in runs))
            and all(np.linalg.norm(np.float32(token[2][h])) <= m for h, m in limits.items())
        )

    options = dict(
        skip_first=skip_first,
        max_norm=2.5 if one_for_all else limits,
        roles=roles,
        where=where,
        shuffle=None if seed < 4 else seed,
        buffer=64,
        workers=1 if seed < 4 else int(chance.integers(1, 4)),
        columns=IDS,
    )
    shares = [pair.batches(16, worker=n, **options) for n in range(options["workers"])]
    found = check([batch for share in shares for batch in share], runs, wanted)
    in_order = [(int(s.doc_id[3:]), int(p)) for s in pair.runs[0] for p in s.position]
    assert ([key for key in in_order if key in set(found)] == found) == (seed < 4)


@pytest.mark.parametrize("seed", range(2))
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
    with pytest.raises(ValueError, match="max_norm: hook .* is not read"):
        pair.batches(8, hooks=[ONE], max_norm={TWO: 1})


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
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
        (pair.runs[0].batches(16, **options), "its data is"),
        (paired(pair.runs[0], narrow).batches(16, **options), "its others is"),
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


BLOCKS, OTHER_BLOCKS = (f"blocks {digit * 64}" for digit in "12")


def file_of(size, fingerprint):
    return {"data_files": [{"name": "0.jsonl", "bytes": size, "fingerprint": fingerprint}]}


OTHER_FIELDS = "text_column messages_column ids_column special_tokens long_documents".split()
OTHER_SAMPLES = [  # of another run: what it records of its data, and what is told of both
    ({"data": "org/name d train"}, "data is files in one and org/name d train in the other"),
    ({"data_revision": "2" * 64}, "data_revision is digest 1{12} in one and digest 2{12} in"),
    ({"chat_template": "3" * 64}, "chat_template is nothing in one and digest 3{12} in the other"),
    ({"max_seq_length": 99}, "max_seq_length is 10 in one and 99 in the other"),
    *(({name: "x"}, f"{name} is .* in one and x in the other") for name in OTHER_FIELDS),
    (file_of(5, OTHER_BLOCKS), f"content .* 0.jsonl is {BLOCKS} in one and {OTHER_BLOCKS} in"),
    (file_of(6, "an etag"), "the size of data file 0.jsonl is 5 in one and 6 in the other"),
]
SAME_SAMPLES = [
    {"model_digest": "4" * 64, "tokenizer_digest": "5" * 64, "dtype": "bfloat16"},
    {"roles": ("user",), "drop_token_ids": (5,), "mask_column": "mask"},
    {"data": "", "text_column": "none", "max_seq_length": 0},  # of a program of one's own
    file_of(5, "an etag"),  # elsewhere, so that only the size can be compared
]


@pytest.mark.parametrize("known,told", OTHER_SAMPLES + [(known, None) for known in SAME_SAMPLES])
def test_runs_over_other_data_are_refused(known, told, tmp_path):
    """Rows of other data may have the same names, and even the same tokens where few are stored."""
    files, identity = known.get("data_files", []), dict(known)
    identity.pop("data_files", None)
    runs = [
        Run([1, 2], 0, **file_of(5, BLOCKS), hosts=2),
        Run([2, 1], 1, hooks=OTHER_HOOKS, identity=identity, data_files=files, hosts=2),
    ]
    one, two = (run.store(tmp_path / str(number)) for number, run in enumerate(runs))
    for together in (paired, lambda *urls: ActivationDataset(urls[0]).join(urls[1])):
        if told is None:
            assert len(together(one, two)) == 2
        else:
            said = f"/0 and .*/1: their samples are not those of the same data: .*{told}"
            with pytest.raises(ValueError, match=said):
                together(one, two)


@pytest.mark.parametrize("seed", range(2))
def test_join(seed, tmp_path):
    chance = np.random.default_rng(seed)
    runs = random_run(chance, 0), random_run(chance, 1, hooks=OTHER_HOOKS)
    one, two = (ActivationDataset(run.store(tmp_path / str(n))) for n, run in enumerate(runs))
    joined = one.join(two)
    assert list(joined.hooks.items()) == list(WIDTHS.items()) and len(joined.dtypes) == 3
    for shuffle in (None, 0):
        check(joined.batches(16, shuffle=shuffle, columns=IDS), runs)
    whole, samples = next(joined.batches(10**4)), [*joined]
    for name in ("token_ids", "position", "role"):
        found = np.concatenate([getattr(sample, name) for sample in samples])
        np.testing.assert_array_equal(found, getattr(whole, name))
    for name in WIDTHS:
        np.testing.assert_array_equal(np.concatenate([s[name] for s in samples]), whole[name])
    assert joined.samples["doc_id"].to_pylist() == [sample.doc_id for sample in samples]
    assert [s.doc_id for s in joined[-2:]] == joined.samples["doc_id"].to_pylist()[-2:]
    assert joined.statistics[OTHER_HOOKS[3]] == two.statistics[OTHER_HOOKS[3]]
    (hook,) = OTHER_HOOKS.values()
    for only in ([hook], [TWO, hook]):
        check(joined.batches(16, only, shuffle=1, columns=IDS), runs, hooks=only)

    def small(key, token):
        return key[0] % 2 == 0 and np.linalg.norm(token[2].get(hook, 0)) <= 2.5

    for where in (is_even, joined.samples["even"].to_pylist()):
        options = dict(where=where, max_norm={hook: 2.5}, columns=IDS)
        check(joined.batches(16, **options), runs, small)
    with pytest.raises(ValueError, match=f"hook '{ONE}' is in more than one of the runs"):
        one.join(tmp_path / "0")
    with pytest.raises(IndexError):
        joined[len(joined)]


def test_three_runs_that_store_other_tokens_are_joined(tmp_path):
    """A token comes only if all have it, with the values that each has for it."""
    hooks, rows = [{key: hook} for key, hook in (HOOKS | OTHER_HOOKS).items()], list(range(12))
    kept = zip(("all", "odd", "first"), hooks, strict=True)
    runs = [Run(rows, n, each, hooks=own) for n, (each, own) in enumerate(kept)]
    runs.append(Run(rows[::-1], 2, hooks=OTHER_HOOKS, changed=(5, 3)))
    one, two, three, changed = (run.store(tmp_path / str(n)) for n, run in enumerate(runs))
    joined = ActivationDataset(one).join(two).join(three)
    check(joined.batches(16, columns=IDS), runs[:3])
    every = ActivationDataset(one).join(two).join(changed)
    for read in (lambda: list(every.batches(8)), lambda: every[5]):
        with pytest.raises(ValueError, match="position 3 .* sample 5 of .*/0 .* sample 6 of .*/3"):
            print(read())
    assert list(every[4].activations) == list(WIDTHS)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.rare)])
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX has threads in this process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_pair_in_a_bucket_by_workers(method, bucket, tmp_path):
    """One run has safetensors, the other one pickles."""
    runs = random_runs(7, dtype="float32", hosts=2, shard_gb=8e-6)
    for run, shard_format in zip(runs, ("safetensors", "pickle"), strict=True):
        run.shard_format = shard_format
        upload(run.store(tmp_path / shard_format), f"gs://bucket/{shard_format}")
    pair = paired("gs://bucket/safetensors", "gs://bucket/pickle")
    batches = pair.batches(16, shuffle=0, buffer=64, columns=IDS)
    usual = dict(batch_size=None, num_workers=1, multiprocessing_context=method)
    loader = DataLoader(batches.torch(), **usual)
    if method == "spawn":
        check([tuple(batch.map(torch.Tensor.numpy) for batch in read) for read in loader], runs)
        return
    with pytest.raises(OSError, match="forked from one that had used a bucket"):
        next(iter(loader))
    check([tuple(b.map(np.asarray) for b in both) for both in batches.jax()], runs)
