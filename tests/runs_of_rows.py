"""Stores runs over the rows of one imaginary data set in many ways, and tells what they contain.

A row of the data set is a number, which determines its tokens and its facts. So a test can compare
what is read from a run with what was stored, without reading any file itself.
"""

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes  # also registers the name "bfloat16" in NumPy
import numpy as np
from extractions import changed_identity, folder_name, identity_of
from storages import kill, open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.text.batch import Batch, PlacedSample, Sample, Worker
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts

LENGTH = 24
HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_attn_out"}
OTHER_HOOKS = {3: "blocks.3.hook_mlp_out"}
IDS = ["doc_id"]  # the column that `tokens_in` needs in a batch
WIDTHS = {HOOKS[1]: 6, HOOKS[2]: 4, OTHER_HOOKS[3]: 8}
OTHER_WIDTH = 256  # of hooks that are not in WIDTHS


def tokens_of(row):
    """Returns the token ids and the roles of the tokens of a row; their number varies."""
    chance, count = np.random.default_rng(row), 1 + row * 7 % LENGTH
    return chance.integers(0, 50, count, np.int32), chance.integers(0, 3, count, np.int32)


def row_of(row):
    return {"file": f"{row % 3}.jsonl", "line": row} | (
        {"piece": row % 2, "start": 16 * (row % 2)} if row % 5 == 0 else {}
    )


def columns_of(row):
    """Returns the kept columns of a row.

    `mixed` has values of several types, and `tags` is missing in some rows.
    """
    tags = {"tags": [{"a": row}]} if row % 3 else {}
    return {"even": row % 2 == 0, "mixed": [row, "ä", None][row % 3], **tags}


def decoded(x):
    """Returns `x` as it is read after storing it in float8 (e4m3 with a scale per token)."""
    scales = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 448)
    return (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales


def out_of_order(count):
    """Returns the numbers from 0 in an order in which packing may store samples.

    Groups of 16 are shuffled, so that the numbers of several shards interleave.
    """
    chance = np.random.default_rng(0)
    groups = np.split(np.arange(count), range(16, count, 16))
    return [int(number) for group in groups for number in chance.permutation(group)]


@dataclass
class Run:
    """A run over rows of the data set.

    Attributes:
        rows: The rows in the order of the run.
        seed: Determines the activations and, with `kept` "random", the positions.
        kept: The stored positions: "all", "first" (nine), "odd" or "random".
        shard_format: "safetensors" or "pickle".
        shard_gb: The size of a shard in GB.
        machines: The number of machines.
        hosts: The number of hosts of each machine, or a tuple with one number for each machine.
        hooks: Key -> the name of a hook.
        changed: The row and the position of a token with another id. None for no such token.
        dtype: The dtype of activations, such as "float32" or "float8".
        identity: Changed fields of the identity.
        data_files: The `data_files` in metadata.json.
    """

    rows: list[int]
    seed: int
    kept: str = "all"
    shard_format: str = "safetensors"
    shard_gb: float = 4e-6
    machines: int = 1
    hosts: int | tuple[int, ...] = 1
    hooks: dict = field(default_factory=lambda: HOOKS)
    changed: tuple[int, int] | None = None
    dtype: str = "float32"
    identity: dict = field(default_factory=dict)
    data_files: list = field(default_factory=list)

    def positions(self, row):
        positions = np.arange(len(tokens_of(row)[0]))
        if self.kept == "random":
            return positions[np.random.default_rng([self.seed, row]).random(len(positions)) < 0.5]
        return {"all": positions, "first": positions[:9], "odd": positions[1::2]}[self.kept]

    def computed(self, row, hook):
        """Returns the activations of a row's tokens before they are stored, (tokens, width)."""
        shape = len(tokens_of(row)[0]), WIDTHS.get(hook, OTHER_WIDTH)
        chance = np.random.default_rng([self.seed, row, len(hook)])
        values = chance.standard_normal(shape, np.float32)
        return values if self.dtype == "float8" else values.astype(self.dtype)

    def values(self, row, hook):
        """Returns the activations of a row's tokens as they are read, (tokens, width)."""
        activations = self.computed(row, hook)
        return decoded(activations) if self.dtype == "float8" else activations

    def tokens(self):
        """Returns the stored tokens.

        Returns:
            (row, position) -> (token id, role, {hook: activation}).
        """
        tokens = {}
        for row in self.rows:
            ids, roles = tokens_of(row)
            values = {hook: self.values(row, hook) for hook in self.hooks.values()}
            for position in map(int, self.positions(row)):
                activations = {hook: array[position] for hook, array in values.items()}
                tokens[row, position] = int(ids[position]), int(roles[position]), activations
        return tokens

    def parts(self):
        """Returns the parts of the run.

        Returns:
            A list of ((machine, host, machines, hosts), rows): the number of a part, as
            extractions.py defines it, and the rows that it stores.
        """
        several = isinstance(self.hosts, tuple)
        hosts = self.hosts if several else (self.hosts,) * self.machines
        parts = [(m, h, len(hosts), n) for m, n in enumerate(hosts) for h in range(n)]
        return [(part, self.rows[first :: len(parts)]) for first, part in enumerate(parts)]

    def sample_numbers(self):
        """Returns the sample_idx of each row."""
        return {
            row: Worker(machine, machines, host, hosts).sample_idx(index)
            for (machine, host, machines, hosts), rows in self.parts()
            for index, row in enumerate(rows)
        }

    def store(self, root: Path, only: int | None = None, finish: bool = True):
        """Stores the run.

        Args:
            root: The folder of the run, which is also returned.
            only: The index of the only part to store. None for all parts.
            finish: Whether the run is complete at the end. Otherwise it is left as if killed.
        """
        self.root, numbers = root, self.sample_numbers()
        for part, rows in self.parts()[slice(only, None if only is None else only + 1)]:
            identity = changed_identity(
                identity_of(*part),
                activation_dtype=self.dtype,
                shard_format=self.shard_format,
                positions="all" if self.kept == "all" else f"random:0.{self.seed + 1}",
                **self.identity,
            )
            facts = {key: {"width": self.computed(0, h).shape[1]} for key, h in self.hooks.items()}
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
        values = {key: self.computed(row, hook)[kept] for key, hook in self.hooks.items()}
        storage.add_batch(batch_of(sample, kept, LENGTH), values)


def batch_of(sample, kept, length):
    """Returns a batch with one sample.

    Args:
        sample: The sample.
        kept: The positions of its stored tokens.
        length: The number of tokens of the batch's only row.
    """
    mask = np.zeros((1, length), bool)
    mask[0, kept] = True
    blank = np.zeros((1, length), np.int32)
    placed = (PlacedSample(sample, 0, 0, sample.mark_after),)
    return Batch(blank, blank, blank, placed, mask)


def tokens_in(batch, hooks=None):
    """Returns the tokens of a batch in the form of `Run.tokens`.

    Args:
        batch: The batch, which must have the column doc_id.
        hooks: The names of the hooks to return. None for all.
    """
    hooks = [hook for hook in batch if hooks is None or hook in hooks]
    assert set(batch.columns["doc_id"]) <= {f"id-{n}" for n in range(1000)}
    tokens = {}
    for index in range(len(batch)):
        row = int(batch.columns["doc_id"][index].removeprefix("id-"))
        activations = {hook: batch[hook][index] for hook in hooks}
        token = int(batch.token_ids[index]), int(batch.role[index]), activations
        tokens[row, int(batch.position[index])] = token
    return tokens


def same(tokens, expected):
    assert tokens.keys() == expected.keys()
    for key, (token_id, role, values) in tokens.items():
        assert (token_id, role) == expected[key][:2] and values.keys() == expected[key][2].keys()
        for hook in values:
            assert values[hook].tobytes() == expected[key][2][hook].tobytes()
            assert values[hook].dtype == expected[key][2][hook].dtype


def check(batches, runs, wanted=lambda key, token: True, hooks=tuple(WIDTHS)):
    """Asserts that batches contain the right tokens of several runs once, with the right values.

    The right tokens are the wanted ones among those that all runs have stored.

    Args:
        batches: Tuples with a batch of each run, or batches with the hooks of all runs.
        runs: The runs.
        wanted: Takes the (row, position) and the entry of a token in `Run.tokens`; returns whether
            the batches should contain the token.
        hooks: The names of the hooks that the batches should contain, if a run has them.

    Returns:
        The (row, position) of each token, in the order of the batches.
    """
    tokens_of_runs = [run.tokens() for run in runs]
    keys = {
        key
        for key in tokens_of_runs[0]
        if all(key in tokens and wanted(key, tokens[key]) for tokens in tokens_of_runs)
    }
    order, read_of_runs = [], [dict() for _ in runs]
    for entry in batches:
        batch_of_runs = entry if isinstance(entry, tuple) else [entry] * len(runs)
        order_of_batch = None
        for run, read, batch in zip(runs, read_of_runs, batch_of_runs, strict=True):
            tokens = tokens_in(batch, run.hooks.values())
            order_of_batch = order_of_batch or list(tokens)
            assert list(tokens) == order_of_batch and len(tokens) == len(batch)
            assert not read.keys() & tokens.keys()
            read |= tokens
        order += order_of_batch
    for read, tokens in zip(read_of_runs, tokens_of_runs, strict=True):
        expected = {}
        for key in keys:
            token_id, role, values = tokens[key]
            activations = {hook: array for hook, array in values.items() if hook in hooks}
            expected[key] = token_id, role, activations
        same(read, expected)
    return order


def random_run(chance, seed, **changes):
    """Returns a run of random rows in a random order, stored in a random way.

    Args:
        chance: The generator of all random choices.
        seed: The seed of the run.
        changes: Attributes that are not random.
    """
    rows = chance.permutation(60)[: chance.integers(25, 60)].tolist()
    options = dict(
        kept=str(chance.choice(["all", "first", "odd", "random"])),
        shard_format=str(chance.choice(SHARD_FORMATS)),
        shard_gb=float(chance.choice([5e-7, 2e-6, 8e-6, 1e-3])),
        machines=int(chance.integers(1, 3)),
        hosts=int(chance.integers(1, 3)),
        dtype=str(chance.choice(["float32", "bfloat16"])),
    )
    return Run(sorted(rows) if chance.random() < 0.4 else rows, seed, **(options | changes))


def random_runs(seed, **changes):
    chance = np.random.default_rng(seed)
    return [random_run(chance, number, **changes) for number in range(2)]
