"""Two runs as one: the same tokens side by side, or with the hooks of both. What is due is built
from the rows of the data set alone."""

import json
import logging
import pickle
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow.compute
import pytest
import torch
from extractions import change_table, folder_name, identity_of
from runs_to_read import FORMATS
from storages import open_storage
from torch.utils.data import DataLoader

from activation_extraction import ActivationDataset, paired
from activation_extraction.common.choices import ROLES
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.text.batch import Batch, Cursor, Placed, Sample, Worker

LENGTH = 24
HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_attn_out"}
OTHER_HOOKS = {3: "blocks.3.hook_mlp_out"}
IDS = ["doc_id"]  # the column that batches come with
WIDTHS = {HOOKS[1]: 6, HOOKS[2]: 4, OTHER_HOOKS[3]: 8}


def tokens_of(row):
    """The ids and roles of the tokens of a row of the data set; their number varies."""
    chance, count = np.random.default_rng(row), 1 + row * 7 % LENGTH
    return chance.integers(0, 50, count, np.int32), chance.integers(0, 3, count, np.int32)


def row_of(row):
    return {"file": f"{row % 3}.jsonl", "line": row} | (
        {"piece": row % 2, "start": 16 * (row % 2)} if row % 5 == 0 else {}
    )


@dataclass
class Run:
    """What a run stores. rows: in its order. kept: row -> which positions. shards: how large."""

    rows: list[int]
    seed: int
    kept: str = "all"
    shard_format: str = "safetensors"
    shard_gb: float = 4e-6
    machines: int = 1
    hosts: int = 1
    hooks: dict = field(default_factory=lambda: HOOKS)
    changed: tuple[int, int] | None = None  # row and position of a token with another id
    dtype: str = "float32"

    def positions(self, row):
        every = np.arange(len(tokens_of(row)[0]))
        if self.kept == "random":
            return every[np.random.default_rng([self.seed, row]).random(len(every)) < 0.5]
        return {"all": every, "first": every[:9], "odd": every[1::2]}[self.kept]

    def values(self, row, hook):
        """(tokens, width), of all tokens of the row."""
        shape = len(tokens_of(row)[0]), WIDTHS[hook]
        chance = np.random.default_rng([self.seed, row, len(hook)])
        return chance.standard_normal(shape, np.float32).astype(self.dtype)

    def tokens(self):
        """row and position -> token id, role and the values by hook."""
        return {
            (row, int(p)): (*(int(a[p]) for a in tokens_of(row)), {h: v[p] for h, v in of.items()})
            for row in self.rows
            for of in [{hook: self.values(row, hook) for hook in self.hooks.values()}]
            for p in self.positions(row)
        }

    def store(self, root):
        workers = [(m, h) for m in range(self.machines) for h in range(self.hosts)]
        for number, (machine, host) in enumerate(workers):
            part = machine, host, self.machines, self.hosts
            identity = replace(
                identity_of(*part),
                activation_dtype=self.dtype,
                shard_format=self.shard_format,
                positions="all" if self.kept == "all" else f"random:0.{self.seed + 1}",
            )
            worker = Worker(machine, self.machines, host, self.hosts)
            with open_storage(
                root / folder_name(*part),
                self.hooks,
                identity=identity,
                shard_format=self.shard_format,
                shard_size_gb=self.shard_gb,
                hook_facts={key: {"width": WIDTHS[hook]} for key, hook in self.hooks.items()},
            ) as storage:
                for index, row in enumerate(self.rows[number :: len(workers)]):
                    self._add(storage, index, worker.sample_idx(index), row)
                storage.finalize()
        return root

    def _add(self, storage, index, sample_idx, row):
        ids, roles = tokens_of(row)
        if self.changed is not None and self.changed[0] == row:
            ids[self.changed[1]] += 1
        known = sample_idx, ids, f"text {row}", f"id-{row}", Cursor(index), Cursor(index + 1)
        labels = {"role": roles, "turn": roles + 1}
        sample = Sample(*known, row_of(row), columns={"even": row % 2 == 0}, labels=labels)
        kept = np.zeros((1, LENGTH), bool)
        kept[0, self.positions(row)] = True
        blank = np.zeros((1, LENGTH), np.int32)
        batch = Batch(blank, blank, blank, (Placed(sample, 0, 0),), kept)
        values = {k: self.values(row, hook)[self.positions(row)] for k, hook in self.hooks.items()}
        storage.add_batch(batch, values)


def found_in(batch):
    """row and position -> what `Run.tokens` has, of the tokens of a batch."""
    assert set(batch.columns["doc_id"]) <= {f"id-{n}" for n in range(1000)}
    return {
        (int(batch.columns["doc_id"][t][3:]), int(batch.position[t])): (
            int(batch.token_ids[t]),
            int(batch.role[t]),
            {hook: batch[hook][t] for hook in batch},
        )
        for t in range(len(batch))
    }


def same(found, due):
    assert found.keys() == due.keys()
    for key, (token_id, role, values) in found.items():
        assert (token_id, role) == due[key][:2] and values.keys() == due[key][2].keys()
        for hook in values:
            assert values[hook].tobytes() == due[key][2][hook].tobytes()
            assert values[hook].dtype == due[key][2][hook].dtype


def check(batches, runs, wanted=lambda key, token: True):
    """Every token that both runs have and want is there once, with the values of each run."""
    every = [run.tokens() for run in runs]
    keys = {
        key
        for key in every[0]
        if key in every[1] and all(wanted(key, tokens[key]) for tokens in every)
    }
    order = []
    found = [dict(), dict()]
    for pair in batches:
        assert isinstance(pair, tuple) and len(pair) == 2
        here = [found_in(batch) for batch in pair]
        assert list(here[0]) == list(here[1])
        assert len(here[0]) == len(pair[0]) == len(pair[1])
        order += here[0]
        for of_run, more in zip(found, here, strict=True):
            assert not of_run.keys() & more.keys()
            of_run |= more
    for of_run, tokens in zip(found, every, strict=True):
        same(of_run, {key: tokens[key] for key in keys})
    return order


def some_run(chance, seed, like=None, **given):
    """A run of random rows in a random order, cut and stored in a random way."""
    rows = chance.permutation(60)[: chance.integers(25, 60)].tolist()
    if chance.random() < 0.4:
        rows = sorted(rows)
    options = dict(
        kept=str(chance.choice(["all", "first", "odd", "random"])),
        shard_format=str(chance.choice(FORMATS)),
        shard_gb=float(chance.choice([5e-7, 2e-6, 8e-6, 1e-3])),
        machines=int(chance.integers(1, 3)),
        hosts=int(chance.integers(1, 3)),
        dtype=str(chance.choice(["float32", "bfloat16"])),
    )
    return Run(rows, seed, **(options | given))


def random_runs(seed, **given):
    chance = np.random.default_rng(seed)
    return [some_run(chance, number, **given) for number in range(2)]


def pair_of(runs, tmp_path):
    return paired(*(run.store(tmp_path / str(number)) for number, run in enumerate(runs)))


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


@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize("shuffle", [None, 1])
def test_filters_hold_in_both_runs(shard_format, shuffle, tmp_path):
    runs = random_runs(3, shard_format=shard_format, kept="all", dtype="float32")
    pair = pair_of(runs, tmp_path)
    options = dict(shuffle=shuffle, columns=IDS)

    def small(limits):
        return lambda key, token: all(np.linalg.norm(token[2][h]) <= m for h, m in limits.items())

    every = dict.fromkeys(HOOKS.values(), 2.5)
    lengths = [
        len(check(pair.batches(16, max_norm=2.5, **options), runs, small(every))),
        len(check(pair.batches(16, max_norm=every, **options), runs, small(every))),
    ]
    total = len(check(pair.batches(16, **options), runs))
    assert 0 < lengths[0] == lengths[1] < 0.6 * total
    only = {HOOKS[2]: 1.5}
    assert len(check(pair.batches(16, max_norm=only, **options), runs, small(only))) < total
    check(pair.batches(16, skip_first=3, **options), runs, lambda key, token: key[1] >= 3)
    roles = ["user", "assistant"]
    check(
        pair.batches(16, roles=roles, **options), runs, lambda key, token: ROLES[token[1]] in roles
    )
    even = pair.batches(16, where=lambda table: table["even"], **options)
    check(even, runs, lambda key, token: key[0] % 2 == 0)
    mask = pair.runs[0].samples["even"].to_pylist()
    check(pair.batches(16, where=mask, **options), runs, lambda key, token: key[0] % 2 == 0)
    assert list(pair.batches(16, where=lambda table: [False] * len(table))) == []
    assert list(pair.batches(16, skip_first=LENGTH)) == []


def test_hooks_for_both_or_for_each(tmp_path):
    runs = random_runs(4)
    pair = pair_of(runs, tmp_path)
    one, two = HOOKS.values()
    for hooks, due in (
        ([one], ([one], [one])),
        (one, ([one], [one])),
        ((one, two), ([one, two], [one, two])),
        (([one], [two]), ([one], [two])),
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
@pytest.mark.parametrize("options", [dict(shuffle=2, buffer=64), dict(skip_first=2), dict()])
def test_restored_at_every_batch_and_copied(shard_format, options, tmp_path):
    runs = random_runs(5, shard_format=shard_format)
    pair = pair_of(runs, tmp_path)
    batches = pair.batches(16, **options)
    states, due = [batches.state()], []
    for batch in batches:
        due.append(contents(batch))
        states.append(batches.state())
    assert len(due) > 4
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
    ):
        with pytest.raises(ValueError, match=f"the state is of other batches: {told}"):
            different.restore(states[1])


def contents(pair):
    return [[array.tobytes() for array in batch.arrays] for batch in pair]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX has threads in this process
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("shard_format", FORMATS)
def test_shares_and_workers_of_a_data_loader(shard_format, tmp_path):
    runs = random_runs(6, shard_format=shard_format, dtype="float32")
    pair = pair_of(runs, tmp_path)
    options = dict(shuffle=0, columns=IDS)
    shares = [list(pair.batches(16, worker=n, workers=3, **options)) for n in range(3)]
    check([batch for share in shares for batch in share], runs)
    tensors = pair.batches(16, worker=0, workers=2, **options).torch()
    loader = DataLoader(tensors, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        read = [[batch.map(torch.Tensor.numpy) for batch in pair] for pair in loader]
        rest = pair.batches(16, worker=1, workers=2, **options)
        check([*map(tuple, read), *rest], runs)
    check(
        [tuple(batch.map(np.asarray) for batch in p) for p in pair.batches(16, **options).jax()],
        runs,
    )


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_changed_token_is_found(shard_format, tmp_path):
    rows = list(range(30))
    runs = [Run(rows, 0, shard_format=shard_format), Run(rows[::-1], 1, changed=(17, 20))]
    assert len(tokens_of(17)[0]) > 20
    pair = pair_of(runs, tmp_path)
    told = r"sample 17 of .*/0 and sample 12 of .*/1 come from the same row, but the token at "
    told += rf"position 20 is {tokens_of(17)[0][20]} in one and {tokens_of(17)[0][20] + 1} in"
    for options in (dict(), dict(shuffle=0), dict(skip_first=22), dict(hooks=[HOOKS[2]])):
        with pytest.raises(ValueError, match=told):
            list(pair.batches(8, **options))
    with pytest.raises(ValueError, match=told):
        print(pair.unpaired_tokens)
    where = dict(where=lambda table: pyarrow.compute.not_equal(table["doc_id"], "id-17"))
    check(pair.batches(8, columns=IDS, **where), runs, lambda key, token: key[0] != 17)


def test_what_only_one_run_has_is_said_once(tmp_path, caplog):
    runs = [Run(list(range(20)), 0), Run(list(range(3, 25)), 1)]
    with caplog.at_level(logging.WARNING):
        pair = pair_of(runs, tmp_path)
        list(pickle.loads(pickle.dumps(pair)).batches(8))
    lost = [sum(len(tokens_of(row)[0]) for row in rows) for rows in (range(3), range(20, 25))]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/0: 3 samples ({lost[0]} tokens) are left out: not all runs have them",
        f"{tmp_path}/1: 5 samples ({lost[1]} tokens) are left out: not all runs have them",
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


@pytest.mark.parametrize("shard_format", FORMATS)
def test_runs_of_the_same_cut_are_read_once(shard_format, tmp_path, monkeypatch):
    """And each range of bytes too: a pair costs what both runs cost."""
    rows = list(range(60))
    pair = pair_of([Run(rows, n, shard_format=shard_format) for n in range(2)], tmp_path)
    opened = []
    original = OpenShards.open
    monkeypatch.setattr(
        OpenShards,
        "open",
        lambda shards, number, hooks=None: (
            opened.append((shards.url, number)) or original(shards, number, hooks)
        ),
    )
    for shuffle in (None, 0):
        opened.clear()
        list(pickle.loads(pickle.dumps(pair)).batches(16, shuffle=shuffle))
        assert len(opened) == len(set(opened)) == sum(len(r._commits) for r in pair.runs) > 8


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
