"""What a storage is told of a run: Identity, the settings that decide the content of its shards;
StorageOptions, how these are stored; RunFacts, what metadata.json records besides.

A run that continues must have the same identity, but its batch size, mesh, devices and folders may
change.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

from activation_extraction.common.choices import ATTENTION_MASK
from activation_extraction.common.codes import value_dtype
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.host_memory import available_memory
from activation_extraction.store.hook_values import (
    CodeValues,
    DenseValues,
    Float8Values,
    HookValues,
    Key,
)
from activation_extraction.text.batch import Worker

PER_HOST = {"num_hosts", "machine", "host"}  # fields that differ between the hosts of a run
MAY_TURN_ON = {"skip_bad_rows"}  # fields that a run that continues may turn on
# What decides the samples of a row and their tokens. The tokenizer's files are not among it: those
# of a base and a chat model differ, but may give the same ids.
OF_SAMPLES = (
    "data",
    "data_revision",
    "text_column",
    "messages_column",
    "ids_column",
    "chat_template",
    "special_tokens",
    "max_seq_length",
    "long_documents",
    "overlap",
)
BLOCKS = "blocks "  # what the fingerprint of a local file begins with
LOSS = "loss"
DataFiles = Mapping[str, tuple[int, str]]


class Difference(NamedTuple):
    """The name of a field in which two identities differ, and both of its values."""

    name: str
    before: Any
    now: Any


@dataclass(frozen=True)
class Identity:
    """The settings that decide the content of a run's shards.

    model_digest, lora_digest, autoencoder_digest, tokenizer_digest: SHA-256 of the files, "" for
    none. data: the data set, or "files". data_revision: its commit on the hub, "" for files. hooks:
    their full names. integer_hooks, float32_hooks: those whose values are no activations; they are
    stored as int32 or float32, whatever `activation_dtype` is. Integers are numbers of experts or
    tokens, and have no statistics. code_hooks: those that hold codes; encode_most: how many
    features of a token each of these keeps at most. keyed_by: the keys of the hooks in the shards:
    "layer", "hook name", or a list of the requested names. activation_dtype: a dtype, or "float8".
    positions, drop_token_ids, roles, mask_column, overlap: which tokens are kept. num_hosts: the
    number of hosts of this machine. chat_template: digest of the template and its arguments.
    shuffle_documents: the seed, "" for none. special_tokens: what texts get, as in "text +
    <|endoftext|>", "" for nothing. top_logits: how many of the most likely next tokens are stored,
    0 if none are.
    """

    model_digest: str = ""
    lora_digest: str = ""
    autoencoder_digest: str = ""
    tokenizer_digest: str = ""
    data: str = ""
    data_revision: str = ""
    text_column: str = "text"
    skip_bad_rows: bool = False
    max_seq_length: int = 0  # 0: not recorded
    hooks: tuple[str, ...] = ()
    integer_hooks: tuple[str, ...] = ()
    float32_hooks: tuple[str, ...] = ()
    code_hooks: tuple[str, ...] = ()
    encode_most: tuple[int, ...] = ()
    keyed_by: str | list[str] = "layer"
    dtype: str = ""
    activation_dtype: str = ""
    shard_size_gb: float = 1.0
    shard_format: str = "pickle"
    compress_shards: bool = True
    positions: str = "all"
    drop_token_ids: tuple[int, ...] = ()
    total_machines: int = 1
    num_hosts: int = 1
    machine: int = 0
    host: int = 0
    id_column: str = ""
    keep_columns: tuple[str, ...] = ()
    messages_column: str = ""
    chat_template: str = ""
    ids_column: str = ""
    mask_column: str = ""
    special_tokens: str = ""
    long_documents: str = "cut"
    overlap: int = 0
    shuffle_documents: str = ""
    roles: tuple[str, ...] = ()
    top_logits: int = 0

    @property
    def worker(self) -> Worker:
        """The host whose samples are stored."""
        return Worker(self.machine, self.total_machines, self.host, self.num_hosts)

    @property
    def from_dataset(self) -> bool:
        """Whether the samples come from a data set, rather than from a program with a loop of its
        own, which numbers its samples 0, 1, 2, ... and has no marks."""
        return bool(self.data)

    @property
    def repair_option(self) -> str:
        """The option that asks for a repair, for messages."""
        return "--repair" if self.from_dataset else "ActivationStorage(..., repair=True)"

    @property
    def every_token(self) -> bool:
        """Whether the run keeps all tokens of its samples."""
        masked = self.mask_column not in ("", ATTENTION_MASK)
        some = self.drop_token_ids or self.roles or masked or self.overlap
        return self.positions == Identity.positions and not some

    def hook_values(
        self, key: Key, name: str, width: int = 0, dtype: str = "", most: int = 0
    ) -> HookValues:
        """Returns the values at a hook, of the kind that the settings give it.

        Args:
            key: What pickles call the hook.
            name: Full name of the hook.
            width: Number of values of a token; of codes, the number of all features. 0 if it is not
                known yet.
            dtype: Dtype of the values in files; "" for the one that follows from the settings.
            most: The most features that are stored of a token; 0 for values other than codes, and
                where codes are only written.
        """
        if name in self.code_hooks:
            return CodeValues(key, name, width, value_dtype(self.activation_dtype).name, most)
        if name in self.integer_hooks:
            return DenseValues(key, name, width, dtype or "int32", "integers")
        if name in self.float32_hooks:
            content: Literal["loss", "numbers"] = "loss" if name == LOSS else "numbers"
            return DenseValues(key, name, width, dtype or "float32", content)
        if self.activation_dtype == FLOAT8:
            return Float8Values(key, name, width)
        return DenseValues(key, name, width, dtype or self.activation_dtype)

    def recorded_hook(self, recorded: Mapping[str, Any]) -> HookValues:
        """Returns the values at a hook that a run has recorded.

        Args:
            recorded: What a shard's JSON or metadata.json says of the hook, or both.

        Raises:
            ValueError: The width is not recorded, or the dtype is unknown.
        """
        name = recorded["name"]
        width = recorded.get("width")
        if width is None:
            raise ValueError(f"the metadata does not record how wide {name} is")
        dtype, most = recorded.get("dtype", ""), recorded.get("most", 0)
        hook = self.hook_values(recorded["key"], name, width, dtype, most)
        try:
            hook.dtype  # noqa: B018
        except TypeError as error:
            raise ValueError(f"{name}: dtype {dtype!r}: {error}") from error
        return hook

    @property
    def digest(self) -> str:
        """The SHA-256 of all fields that must stay as they are, which every shard's JSON has."""
        content = {name: each for name, each in self.to_json().items() if name not in MAY_TURN_ON}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that are the same on all hosts of a run, as JSON."""
        content = self.to_json().items()
        return {name: each for name, each in content if name not in PER_HOST | MAY_TURN_ON}

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as metadata.json records them."""
        content = asdict(self).items()
        return {name: [*each] if isinstance(each, tuple) else each for name, each in content}

    @classmethod
    def from_json(cls, content: Any) -> "Identity":
        """Reads what `to_json` returned; a field that is not recorded gets its default. Raises
        TypeError or AttributeError for an unknown field, which a later version may have added."""
        names = [each.name for each in fields(cls) if each.default == ()]
        tuples = {name: tuple(content.get(name, ())) for name in names}
        return cls(**{**content, **tuples})

    def compare(self, stored: "Identity", shared_only: bool = False) -> Difference | None:
        """Returns the first field in which `stored` differs; None if this run may continue it.

        shared_only: ignores the fields that may differ between the hosts of a run.
        """
        for name in (each.name for each in fields(self)):
            now, before = getattr(self, name), getattr(stored, name)
            ignored = name in MAY_TURN_ON and (now or shared_only)
            if now != before and not (ignored or (shared_only and name in PER_HOST)):
                return Difference(name, before, now)
        return None

    @property
    def kept_tokens(self) -> tuple[Any, ...]:
        """What decides which tokens of its samples a run stores."""
        return self.positions, self.drop_token_ids, self.roles, self.mask_column, self.overlap

    def other_samples(
        self, other: "Identity", files: DataFiles, other_files: DataFiles
    ) -> list[Difference]:
        """Returns what says that the samples of the same row are not the same in another run.

        files, other_files: the bytes and the fingerprint of every file of the data, by its name.
        Nothing says so for a program that stores activations of its own and records no data.
        """
        if not (self.data and other.data):
            return []
        found = [(name, getattr(self, name), getattr(other, name)) for name in OF_SAMPLES]
        for name in files.keys() & other_files.keys():
            (size, known), (other_size, other_known) = files[name], other_files[name]
            found.append((f"the size of data file {name}", size, other_size))
            # That of a file at a URL is its store's, and says nothing about a copy elsewhere.
            if known.startswith(BLOCKS) and other_known.startswith(BLOCKS):
                found.append((f"the content of data file {name}", known, other_known))
        return [Difference(*each) for each in found if each[1] != each[2]]


GIGABYTE = 10**9
MAX_WAITING_BYTES = 16 * GIGABYTE


@dataclass(frozen=True)
class StorageOptions:
    """How activations are stored.

    shard_size_gb: the size of a shard's activations before compression, in 10^9 bytes; a shard
    holds at least one sample. shard_format: "pickle", which `compress_shards` gzips, or
    "safetensors". max_samples, max_tokens: the most samples, and tokens of them, that the caller
    adds; no sample is refused for them, but a run is that holds more when it begins. overwrite:
    begins anew instead of continuing what is stored already. delete_local_after_upload: False also
    writes local shards when there is a bucket. writer_threads: how many threads compress and sum;
    None means one for each core. waiting_shards_gb: how much may wait in memory to be stored; None
    means a quarter of the available memory, at most 16 GB, and at least two shards.
    """

    shard_size_gb: float = 1.0
    shard_format: str = "pickle"
    compress_shards: bool = True
    max_samples: int | None = None
    max_tokens: int | None = None
    overwrite: bool = False
    delete_local_after_upload: bool = True
    writer_threads: int | None = None
    waiting_shards_gb: float | None = None

    @property
    def limits(self) -> dict[str, int | None]:
        """The most samples and tokens to store, by the names that metadata.json has for them."""
        return {"max_samples": self.max_samples, "max_tokens": self.max_tokens}

    @property
    def shard_bytes(self) -> float:
        return self.shard_size_gb * GIGABYTE

    @property
    def waiting_bytes(self) -> float:
        """The most bytes that may wait in memory to be stored."""
        if self.waiting_shards_gb is not None:
            return self.waiting_shards_gb * GIGABYTE
        return max(min(available_memory() / 4, MAX_WAITING_BYTES), 2 * self.shard_bytes)

    @property
    def threads(self) -> int:
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
            cores = len(os.sched_getaffinity(0))
        return self.writer_threads or cores


class Sources(Protocol):
    """The files that samples come from. `check` raises RunError if one of those that samples with
    these `row`s come from has changed since the run began."""

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def to_json(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class RunFacts:
    """Optional facts about a run that metadata.json records beside its identity.

    metadata: any JSON. hooks: further facts about a hook, such as its aliases, by its key. sources:
    the files that the samples come from.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    sources: Sources | None = None
