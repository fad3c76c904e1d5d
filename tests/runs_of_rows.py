"""Runs over the rows of one data set, stored in many ways, and what each of them holds."""

from dataclasses import dataclass, field, replace

import numpy as np
from extractions import folder_name, identity_of
from runs_to_read import FORMATS
from storages import open_storage

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


def columns_of(row):
    """Returns the columns to keep: one lacks a value in some rows, and one has several types."""
    tags = {"tags": [{"a": row}]} if row % 3 else {}
    return {"even": row % 2 == 0, "mixed": [row, "ä", None][row % 3], **tags}


def out_of_order(count):
    """The numbers from 0 on as packing may order samples: those of several shards interleave."""
    chance = np.random.default_rng(0)
    groups = np.split(np.arange(count), range(16, count, 16))
    return [int(number) for group in groups for number in chance.permutation(group)]


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
    identity: dict = field(default_factory=dict)  # what it records of where its rows come from
    data_files: list = field(default_factory=list)

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
                **self.identity,
            )
            worker = Worker(machine, self.machines, host, self.hosts)
            with open_storage(
                root / folder_name(*part),
                self.hooks,
                identity=identity,
                shard_format=self.shard_format,
                shard_size_gb=self.shard_gb,
                hook_facts={key: {"width": WIDTHS[hook]} for key, hook in self.hooks.items()},
                metadata={"data_files": self.data_files},
            ) as storage:
                rows = self.rows[number :: len(workers)]
                for index in out_of_order(len(rows)):
                    self._add(storage, index, worker.sample_idx(index), rows[index])
                storage.finalize()
        return root

    def _add(self, storage, index, sample_idx, row):
        ids, roles = tokens_of(row)
        if self.changed is not None and self.changed[0] == row:
            ids[self.changed[1]] += 1
        known = sample_idx, ids, f"text {row}", f"id-{row}", Cursor(index), Cursor(index + 1)
        labels = {"role": roles, "turn": roles + 1}
        sample = Sample(*known, row_of(row), columns=columns_of(row), labels=labels)
        kept = self.positions(row)
        values = {key: self.values(row, hook)[kept] for key, hook in self.hooks.items()}
        storage.add_batch(batch_of(sample, kept, LENGTH), values)


def batch_of(sample, kept, length):
    """Returns a batch with one sample, of which these positions are stored."""
    mask = np.zeros((1, length), bool)
    mask[0, kept] = True
    blank = np.zeros((1, length), np.int32)
    placed = (Placed(sample, 0, 0, sample.next_cursor),)
    return Batch(blank, blank, blank, placed, mask)


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
    """Every token that both runs have and want is in the pairs of batches once, with the values of
    each run. Returns these tokens in the order of the pairs."""
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


def contents(pair):
    """The bytes of every array of a pair of batches."""
    return [[array.tobytes() for array in batch.arrays] for batch in pair]


def some_run(chance, seed, **given):
    """A run of random rows in a random order, cut and stored in a random way."""
    rows = chance.permutation(60)[: chance.integers(25, 60)].tolist()
    options = dict(
        kept=str(chance.choice(["all", "first", "odd", "random"])),
        shard_format=str(chance.choice(FORMATS)),
        shard_gb=float(chance.choice([5e-7, 2e-6, 8e-6, 1e-3])),
        machines=int(chance.integers(1, 3)),
        hosts=int(chance.integers(1, 3)),
        dtype=str(chance.choice(["float32", "bfloat16"])),
    )
    return Run(sorted(rows) if chance.random() < 0.4 else rows, seed, **(options | given))


def random_runs(seed, **given):
    chance = np.random.default_rng(seed)
    return [some_run(chance, number, **given) for number in range(2)]
