"""Runs over the rows of one data set, stored in many ways, and what each of them holds."""

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes  # also gives NumPy its bfloat16
import numpy as np
from extractions import changed_identity, folder_name, identity_of
from storages import kill, open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.text.batch import Batch, Placed, Sample, Worker
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts

LENGTH = 24
HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_attn_out"}
OTHER_HOOKS = {3: "blocks.3.hook_mlp_out"}
IDS = ["doc_id"]  # the column that batches come with
WIDTHS = {HOOKS[1]: 6, HOOKS[2]: 4, OTHER_HOOKS[3]: 8}
OTHER_WIDTH = 256  # of any other hook


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


def decoded(x):
    """Returns x as it is read back from float8: e4m3 as NumPy rounds it, and a scale per token."""
    scales = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 448)
    return (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales


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
    hosts: int | tuple[int, ...] = 1  # of each machine
    hooks: dict = field(default_factory=lambda: HOOKS)
    changed: tuple[int, int] | None = None  # row and position of a token with another id
    dtype: str = "float32"  # or float8
    identity: dict = field(default_factory=dict)  # what it records of where its rows come from
    data_files: list = field(default_factory=list)

    def positions(self, row):
        every = np.arange(len(tokens_of(row)[0]))
        if self.kept == "random":
            return every[np.random.default_rng([self.seed, row]).random(len(every)) < 0.5]
        return {"all": every, "first": every[:9], "odd": every[1::2]}[self.kept]

    def given(self, row, hook):
        """Returns what is to be stored of all tokens of the row, (tokens, width)."""
        shape = len(tokens_of(row)[0]), WIDTHS.get(hook, OTHER_WIDTH)
        chance = np.random.default_rng([self.seed, row, len(hook)])
        values = chance.standard_normal(shape, np.float32)
        return values if self.dtype == "float8" else values.astype(self.dtype)

    def values(self, row, hook):
        """Returns what is read back of them."""
        given = self.given(row, hook)
        return decoded(given) if self.dtype == "float8" else given

    def tokens(self):
        """row and position -> token id, role and the values by hook."""
        return {
            (row, int(p)): (*(int(a[p]) for a in tokens_of(row)), {h: v[p] for h, v in of.items()})
            for row in self.rows
            for of in [{hook: self.values(row, hook) for hook in self.hooks.values()}]
            for p in self.positions(row)
        }

    def parts(self):
        """Machine, host, machines and hosts of each part, and the rows that it stores."""
        several = isinstance(self.hosts, tuple)
        hosts = self.hosts if several else (self.hosts,) * self.machines
        every = [(m, h, len(hosts), n) for m, n in enumerate(hosts) for h in range(n)]
        return [(part, self.rows[first :: len(every)]) for first, part in enumerate(every)]

    def sample_numbers(self):
        """row -> sample_idx"""
        return {
            row: Worker(machine, machines, host, hosts).sample_idx(index)
            for (machine, host, machines, hosts), rows in self.parts()
            for index, row in enumerate(rows)
        }

    def store(self, root: Path, only: int | None = None, finish: bool = True):
        """Stores the run, or only one of its parts. finish: whether it ends, or goes on."""
        self.root, numbers = root, self.sample_numbers()
        for part, rows in self.parts()[slice(only, None if only is None else only + 1)]:
            identity = changed_identity(
                identity_of(*part),
                activation_dtype=self.dtype,
                shard_format=self.shard_format,
                positions="all" if self.kept == "all" else f"random:0.{self.seed + 1}",
                **self.identity,
            )
            facts = {key: {"width": self.given(0, h).shape[1]} for key, h in self.hooks.items()}
            configuration = {"model_path": "some/model"}
            storage = open_storage(
                root / folder_name(*part),
                self.hooks,
                identity=identity,
                shard_format=self.shard_format,
                shard_size_gb=self.shard_gb,
                hook_facts=facts,
                metadata={"data_files": self.data_files, "configuration": configuration},
            )
            storage.open()
            for index in out_of_order(len(rows)):
                self._add(storage, index, numbers[rows[index]], rows[index])
            if finish:
                storage.finalize()
            else:
                kill(storage)
        return root

    def _add(self, storage, index, sample_idx, row):
        ids, roles = tokens_of(row)
        if self.changed is not None and self.changed[0] == row:
            ids[self.changed[1]] += 1
        facts = SampleFacts(
            sample_idx,
            row_of(row),
            doc_id=f"id-{row}",
            text_preview=f"text {row} ä",
            columns=columns_of(row),
        )
        labels = {"role": roles, "turn": roles + 1}
        sample = Sample(facts, ids, Mark(index), labels)
        kept = self.positions(row)
        values = {key: self.given(row, hook)[kept] for key, hook in self.hooks.items()}
        storage.add_batch(batch_of(sample, kept, LENGTH), values)


def batch_of(sample, kept, length):
    """Returns a batch with one sample, of which these positions are stored."""
    mask = np.zeros((1, length), bool)
    mask[0, kept] = True
    blank = np.zeros((1, length), np.int32)
    placed = (Placed(sample, 0, 0, sample.mark_after),)
    return Batch(blank, blank, blank, placed, mask)


def found_in(batch, hooks=None):
    """row and position -> what `Run.tokens` has, of the tokens of a batch at these hooks."""
    hooks = [hook for hook in batch if hooks is None or hook in hooks]
    assert set(batch.columns["doc_id"]) <= {f"id-{n}" for n in range(1000)}
    return {
        (int(batch.columns["doc_id"][t][3:]), int(batch.position[t])): (
            int(batch.token_ids[t]),
            int(batch.role[t]),
            {hook: batch[hook][t] for hook in hooks},
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


def check(batches, runs, wanted=lambda key, token: True, hooks=tuple(WIDTHS)):
    """Every token that all runs have and want is in pairs of batches, or in batches of the joined
    runs, once, with the values of each run at these hooks. Returns the tokens in their order."""
    every = [run.tokens() for run in runs]
    keys = {
        key
        for key in every[0]
        if all(key in tokens and wanted(key, tokens[key]) for tokens in every)
    }
    order, found = [], [dict() for _ in runs]
    for batch in batches:
        each = batch if isinstance(batch, tuple) else [batch] * len(runs)
        here = [found_in(one, run.hooks.values()) for one, run in zip(each, runs, strict=True)]
        for of_run, one, more in zip(found, each, here, strict=True):
            assert list(more) == list(here[0]) and len(more) == len(one)
            assert not of_run.keys() & more.keys()
            of_run |= more
        order += here[0]
    for of_run, tokens in zip(found, every, strict=True):
        due = {}
        for key in keys:
            token_id, role, values = tokens[key]
            due[key] = token_id, role, {hook: values[hook] for hook in values if hook in hooks}
        same(of_run, due)
    return order


def some_run(chance, seed, **given):
    """A run of random rows in a random order, cut and stored in a random way."""
    rows = chance.permutation(60)[: chance.integers(25, 60)].tolist()
    options = dict(
        kept=str(chance.choice(["all", "first", "odd", "random"])),
        shard_format=str(chance.choice(SHARD_FORMATS)),
        shard_gb=float(chance.choice([5e-7, 2e-6, 8e-6, 1e-3])),
        machines=int(chance.integers(1, 3)),
        hosts=int(chance.integers(1, 3)),
        dtype=str(chance.choice(["float32", "bfloat16"])),
    )
    return Run(sorted(rows) if chance.random() < 0.4 else rows, seed, **(options | given))


def random_runs(seed, **given):
    chance = np.random.default_rng(seed)
    return [some_run(chance, number, **given) for number in range(2)]
