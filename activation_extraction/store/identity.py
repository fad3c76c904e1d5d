"""Identity: what decides the content of a run's shards, and so may not change when it continues.

Batch size, mesh, devices and folders may change. A mark on a field says that it differs between the
hosts of one run (`per_host`), or that a run that continues may turn it on (`may_turn_on`).
"""

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any

from activation_extraction.store.json_fields import (
    COUNT,
    FLAG,
    LARGEST_WIDTH,
    POSITIVE,
    TEXT,
    any_of,
    check_fields,
    integer,
    list_of,
)
from activation_extraction.store.sealed_json import DamagedError, digest_of

MOST_MACHINES, MOST_HOSTS = 100_000, 10_000  # --status and --verify name all of them
FIELDS = {
    "model_digest": TEXT,
    "tokenizer_digest": TEXT,
    "data": TEXT,
    "data_revision": TEXT,
    "text_column": TEXT,
    "skip_bad_rows": FLAG,
    "max_seq_length": integer(0, LARGEST_WIDTH),
    "hooks": list_of(TEXT),
    "keyed_by": any_of(TEXT, list_of(TEXT)),
    "dtype": TEXT,
    "activation_dtype": TEXT,
    "shard_size_gb": POSITIVE,
    "shard_format": TEXT,
    "compress_shards": FLAG,
    "positions": TEXT,
    "drop_token_ids": list_of(COUNT),
    "total_machines": integer(1, MOST_MACHINES),
    "num_hosts": integer(1, MOST_HOSTS),
    "machine": integer(0, MOST_MACHINES - 1),
    "host": integer(0, MOST_HOSTS - 1),
}
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
    keyed_by: what the shards call a hook: "layer", "hook name", or a list of the names that were
    asked for. positions, drop_token_ids: the tokens that are kept. num_hosts: of this machine.
    """

    model_digest: str = ""
    tokenizer_digest: str = ""
    data: str = ""
    data_revision: str = ""
    text_column: str = "text"
    skip_bad_rows: bool = _marked(MAY_TURN_ON, False)  # changes nothing that is stored already
    max_seq_length: int = 0  # 0: not recorded
    hooks: tuple[str, ...] = ()
    keyed_by: str | list[str] = "layer"
    dtype: str = ""
    activation_dtype: str = ""
    shard_size_gb: float = 1.0
    shard_format: str = "pickle"
    compress_shards: bool = True
    positions: str = "all"
    drop_token_ids: tuple[int, ...] = ()
    total_machines: int = 1
    num_hosts: int = _marked(PER_HOST, 1)
    machine: int = _marked(PER_HOST, 0)
    host: int = _marked(PER_HOST, 0)

    @property
    def run(self) -> str:
        """Digest of the fields that never change."""
        return run_of(self.to_json())

    @property
    def every_token(self) -> bool:
        """Whether the run keeps all tokens of its samples."""
        return self.positions == Identity.positions and not self.drop_token_ids

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that are the same on all hosts of a run, as JSON."""
        content = self.to_json()
        return {name: content[name] for name in content if name not in _marked_fields(*MARKS)}

    def to_json(self) -> dict[str, Any]:
        """The fields as metadata.json records them."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Any, where: str) -> "Identity":
        """The inverse of `to_json`; a field that is not recorded gets its default.

        Raises DamagedError for fields that this version does not know; `where` names the file.
        """
        try:
            tuples = {name: tuple(content.get(name, ())) for name in ("hooks", "drop_token_ids")}
            made = cls(**{**content, **tuples})
        except (TypeError, AttributeError) as error:
            raise DamagedError(f"{where}: its identity cannot be read: {error}") from error
        check_fields(vars(made), FIELDS, f"{where}: its identity")
        return made

    def compare(self, stored: "Identity") -> Difference | None:
        """The first field in which `stored` differs; None if this run may continue it."""
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
    def has_mark(each: Field[Any]) -> bool:
        return any(mark in each.metadata for mark in marks)

    return {each.name for each in fields(Identity) if has_mark(each)}


def run_of(recorded: Mapping[str, Any]) -> str:
    """Digest of the fields of a recorded identity that never change."""
    turned_on = _marked_fields(MAY_TURN_ON)
    return digest_of({name: value for name, value in recorded.items() if name not in turned_on})


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value
