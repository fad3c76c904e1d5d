"""Identity: what decides the content of a run's shards, and so may not change when it continues;
and StorageOptions: how they are stored.

Batch size, mesh, devices and folders may change. A mark on a field says that it differs between the
hosts of one run (`per_host`), or that a run that continues may turn it on (`may_turn_on`).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from activation_extraction.store.sealed_json import (
    COUNT,
    LARGEST_WIDTH,
    TEXT,
    DamagedError,
    Flag,
    Positive,
    Text,
    any_of,
    check_fields,
    digest_of,
    integer,
    kinds_of,
    list_of,
)

MOST_MACHINES, MOST_HOSTS = 100_000, 10_000  # --status and --verify name all of them
PER_HOST, MAY_TURN_ON = MARKS = "per_host", "may_turn_on"


def _marked(mark: str, default: Any) -> Any:
    return field(default=default, metadata={mark: True})


@dataclass(frozen=True)
class Difference:
    """The first field in which two identities differ: its value before, and now."""

    name: str
    before: Any
    now: Any


@dataclass(frozen=True)
class Identity:
    """model_digest, tokenizer_digest: SHA-256 of the files. data: the data set, or "files".
    data_revision: its commit on the hub, or a digest of the list of files. hooks: full names.
    integer_hooks: those that number something; they are stored as int32, whatever
    `activation_dtype` is, and have no statistics. keyed_by: what the shards call a hook: "layer",
    "hook name", or a list of the names that were asked for. positions, drop_token_ids: the tokens
    that are kept. num_hosts: of this machine.
    """

    model_digest: Text = ""
    tokenizer_digest: Text = ""
    data: Text = ""
    data_revision: Text = ""
    text_column: Text = "text"
    skip_bad_rows: Flag = _marked(MAY_TURN_ON, False)  # changes nothing that is stored already
    max_seq_length: Annotated[int, integer(0, LARGEST_WIDTH)] = 0  # 0: not recorded
    hooks: Annotated[tuple[str, ...], list_of(TEXT)] = ()
    integer_hooks: Annotated[tuple[str, ...], list_of(TEXT)] = ()
    keyed_by: Annotated[str | list[str], any_of(TEXT, list_of(TEXT))] = "layer"
    dtype: Text = ""
    activation_dtype: Text = ""
    shard_size_gb: Positive = 1.0
    shard_format: Text = "pickle"
    compress_shards: Flag = True
    positions: Text = "all"
    drop_token_ids: Annotated[tuple[int, ...], list_of(COUNT)] = ()
    total_machines: Annotated[int, integer(1, MOST_MACHINES)] = 1
    num_hosts: Annotated[int, integer(1, MOST_HOSTS)] = _marked(PER_HOST, 1)
    machine: Annotated[int, integer(0, MOST_MACHINES - 1)] = _marked(PER_HOST, 0)
    host: Annotated[int, integer(0, MOST_HOSTS - 1)] = _marked(PER_HOST, 0)

    @property
    def run(self) -> str:
        """Digest of the fields that never change."""
        return run_of(self.to_json())

    @property
    def every_token(self) -> bool:
        """Whether the run keeps all tokens of its samples."""
        return self.positions == Identity.positions and not self.drop_token_ids

    def dtype_of(self, hook: str) -> str:
        """Returns the dtype in which a hook is stored."""
        return "int32" if hook in self.integer_hooks else self.activation_dtype

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that are the same on all hosts of a run, as JSON."""
        content = {"integer_hooks": [], **self.to_json()}
        return {name: content[name] for name in content if name not in _marked_fields(*MARKS)}

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as metadata.json records them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name != "integer_hooks" or value  # older versions do not know it
        }

    @classmethod
    def from_json(cls, content: Any, where: str) -> "Identity":
        """The inverse of `to_json`; a field that is not recorded gets its default.

        Raises DamagedError for fields that this version does not know; `where` names the file.
        """
        try:
            lists = "hooks", "integer_hooks", "drop_token_ids"
            tuples = {name: tuple(content.get(name, ())) for name in lists}
            made = cls(**{**content, **tuples})
        except (TypeError, AttributeError) as error:
            raise DamagedError(f"{where}: its identity cannot be read: {error}") from error
        check_fields(vars(made), kinds_of(cls), f"{where}: its identity")
        return made

    def compare(self, stored: "Identity") -> Difference | None:
        """Returns the first field in which `stored` differs; None if this run may continue it."""
        for each in fields(self):
            now, before = getattr(self, each.name), getattr(stored, each.name)
            if now != before and not (each.name in _marked_fields(MAY_TURN_ON) and now):
                return Difference(each.name, before, now)
        return None

    def compare_shared(self, stored: "Identity") -> Difference | None:
        """Like `compare`, for what another host or machine of the same run has stored."""
        own = {name: getattr(stored, name) for name in _marked_fields(*MARKS)}
        return replace(self, **own).compare(stored)


def _marked_fields(*marks: str) -> set[str]:
    """The names of the fields that have any of these marks."""
    return {each.name for each in fields(Identity) if not each.metadata.keys().isdisjoint(marks)}


def run_of(recorded: Mapping[str, Any]) -> str:
    """Returns the digest of the fields of a recorded identity that never change."""
    turned_on = _marked_fields(MAY_TURN_ON)
    return digest_of({name: value for name, value in recorded.items() if name not in turned_on})


GIGABYTE = 10**9
MOST_WAITING = 16 * GIGABYTE
MEMORY = Path("/proc/meminfo")
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class StorageOptions:
    """shard_size_gb: the activations of a shard before compression, in 10^9 bytes; a shard holds at
    least one sample. shard_format: "pickle", which `compress` gzips, or "safetensors". max_samples:
    the most samples to store. overwrite: delete what is stored already, instead of continuing it.
    keep_local: with a bucket, write local shards as well. threads: how many compress and add up;
    None: as many as there are cores. waiting_gb: the most that may wait in memory to be stored;
    None: a quarter of the memory at hand, at most 16 GB, and at least two shards.
    """

    shard_size_gb: float = 1.0
    shard_format: str = "pickle"
    compress: bool = True
    max_samples: int | None = None
    overwrite: bool = False
    keep_local: bool = False
    threads: int | None = None
    waiting_gb: float | None = None

    @property
    def shard_bytes(self) -> float:
        return self.shard_size_gb * GIGABYTE

    @property
    def waiting_bytes(self) -> float:
        """The most bytes that may wait in memory to be stored."""
        if self.waiting_gb is not None:
            return self.waiting_gb * GIGABYTE
        return max(min(memory_at_hand() / 4, MOST_WAITING), 2 * self.shard_bytes)

    @property
    def writer_threads(self) -> int:
        if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
            return self.threads or len(os.sched_getaffinity(0))
        return self.threads or os.cpu_count() or 1


def memory_at_hand() -> int:
    """Returns the bytes of memory that this process can still have, as far as the system tells."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if MEMORY.exists() and (
        available := re.search(r"MemAvailable: *([0-9]+) kB", MEMORY.read_text())
    ):
        found.append(int(available[1]) * 1024)
    if all(path.exists() for path in LIMITS):  # of a container
        limit, used = (path.read_text().strip() for path in LIMITS)
        if limit.isdecimal():
            found.append(max(int(limit) - int(used), 0))
    return min(found)
