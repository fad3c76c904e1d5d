"""The identity of a run: all that decides the content of its shards.

A run that continues must have the same identity, but its batch size, mesh, devices and folders may
change. The declaration of a flag (cli/flags.py) determines whether its value alone decides content;
the identity contains these flags, and what the run derives from other flags, such as the digest of
the model. metadata.json records the identity as one flat JSON object, and the JSON of every shard
has its digest. `RunFacts` are further facts for metadata.json.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

from activation_extraction.cli.flags import StorageOptions, TextOptions, content_flags
from activation_extraction.common.choices import ATTENTION_MASK
from activation_extraction.common.codes import value_dtype
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.positions import Positions, parse_positions
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
# The fields that decide the samples of a row and their tokens. The tokenizer's files are not among
# them: those of a base and a chat model differ, but may give the same ids.
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
# The fields that decide which tokens of its samples a run stores.
OF_KEPT_TOKENS = ("positions", "drop_token_ids", "roles", "mask_column", "overlap")
BLOCKS = "blocks "  # beginning of the fingerprint of a local file
LOSS = "loss"
NOT_RECORDED = 0  # `max_seq_length` of an identity that does not record it
DataFiles = Mapping[str, tuple[int, str]]


class Difference(NamedTuple):
    """A field in which two identities differ.

    Attributes:
        name: Name of the field in metadata.json.
        before: Value in the stored identity, as JSON.
        now: Value in the new identity, as JSON.
    """

    name: str
    before: Any
    now: Any


@dataclass(frozen=True)
class Identity:
    """All that decides the content of a run's shards.

    Attributes:
        model_digest: SHA-256 of the model, "" if a program with a loop of its own computed
            the activations.
        lora_digest: SHA-256 of the adapter, "" for none.
        autoencoder_digest: SHA-256 of the autoencoders, "" for none.
        tokenizer_digest: SHA-256 of the tokenizer's files, "" for none.
        data: Name of the data set, "files", or "" if the samples come from a program of its own.
        data_revision: Commit of the data set on the hub, "" for files.
        chat_template: Digest of the chat template and its arguments, "" for none.
        special_tokens: Special tokens that each text gets, such as "text + <|endoftext|>", ""
            for none.
        text: Flags about text. Those that do not decide content have their default, and
            drop_token_ids are ids.
        storage: Flags about shards. Those that do not decide content have their default.
        hooks: Full names of the hooks.
        integer_hooks: Hooks with numbers of experts or tokens. They are stored as int32 and have no
            statistics.
        float32_hooks: Hooks whose values are no activations and are stored as float32.
        code_hooks: Hooks with the codes of autoencoders.
        encode_most: For each of `code_hooks`, the largest number of features kept for a token.
        keyed_by: Keys of the hooks in shards: "layer", "hook name", or a list of requested names.
        dtype: Dtype of the computation.
        activation_dtype: Dtype of stored activations, or "float8".
        top_logits: How many of the most likely next tokens are stored; 0 if none are.
        worker: Machine and host whose samples are stored.
    """

    model_digest: str = ""
    lora_digest: str = ""
    autoencoder_digest: str = ""
    tokenizer_digest: str = ""
    data: str = ""
    data_revision: str = ""
    chat_template: str = ""
    special_tokens: str = ""
    text: TextOptions = TextOptions(max_seq_length=NOT_RECORDED)
    storage: StorageOptions = StorageOptions()
    hooks: tuple[str, ...] = ()
    integer_hooks: tuple[str, ...] = ()
    float32_hooks: tuple[str, ...] = ()
    code_hooks: tuple[str, ...] = ()
    encode_most: tuple[int, ...] = ()
    keyed_by: str | list[str] = "layer"
    dtype: str = ""
    activation_dtype: str = ""
    top_logits: int = 0
    worker: Worker = Worker()

    def __post_init__(self) -> None:
        """Resets flags that do not decide content to their default."""
        for name in ("text", "storage"):
            options = getattr(self, name)
            object.__setattr__(self, name, type(options)(**content_flags(options)))

    @property
    def from_dataset(self) -> bool:
        """Whether the samples come from a data set.

        Otherwise they come from a program with a loop of its own, which numbers its samples
        0, 1, 2, ... and has no marks.
        """
        return bool(self.data)

    @property
    def repair_option(self) -> str:
        """The option that asks for a repair, for messages."""
        return "--repair" if self.from_dataset else "ActivationStorage(..., repair=True)"

    @property
    def every_token(self) -> bool:
        """Whether the run keeps all tokens of its samples."""
        text = self.text
        masked = text.mask_column not in (None, ATTENTION_MASK)
        selects = text.drop_token_ids or text.roles or masked or text.overlap
        return text.positions == Positions() and not selects

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
        content = {name: value for name, value in self.to_json().items() if name not in MAY_TURN_ON}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that are the same on all hosts of a run, as JSON."""
        return {
            name: value
            for name, value in self.to_json().items()
            if name not in PER_HOST | MAY_TURN_ON
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the identity as metadata.json records it, a flat JSON object."""
        content: dict[str, Any] = {}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if attribute.name in ("text", "storage"):
                for name, value_of_flag in content_flags(value).items():
                    content[name] = _flag_to_json(name, value_of_flag)
            elif attribute.name == "worker":
                content["total_machines"] = value.machines
                content["num_hosts"] = value.hosts
                content["machine"] = value.machine
                content["host"] = value.host
            else:
                content[attribute.name] = [*value] if isinstance(value, tuple) else value
        return content

    @classmethod
    def from_json(cls, content: Any) -> "Identity":
        """Reads the result of `to_json`. Fields that are not recorded get their default.

        Raises:
            TypeError: There is a field that is unknown, which a later version may have added, or
                the content is no JSON object.
            ValueError: A value cannot be read.
        """
        default = cls()
        recorded = {**default.to_json(), **content}
        values: dict[str, Any] = {}
        for attribute in fields(cls):
            if attribute.name in ("text", "storage"):
                options = getattr(default, attribute.name)
                flags = {
                    name: _flag_from_json(name, recorded.pop(name))
                    for name in content_flags(options)
                }
                values[attribute.name] = type(options)(**flags)
            elif attribute.name == "worker":
                values["worker"] = Worker(
                    machine=recorded.pop("machine"),
                    machines=recorded.pop("total_machines"),
                    host=recorded.pop("host"),
                    hosts=recorded.pop("num_hosts"),
                )
            else:
                value = recorded.pop(attribute.name)
                values[attribute.name] = tuple(value) if attribute.default == () else value
        if recorded:
            raise TypeError(f"unknown fields: {', '.join(recorded)}")
        return cls(**values)

    def compare(self, stored: "Identity", shared_only: bool = False) -> Difference | None:
        """Returns the first field in which `stored` differs; None if this run may continue it.

        Args:
            stored: The identity of the stored run.
            shared_only: Whether to ignore the fields that may differ between the hosts of a run.
        """
        stored_values = stored.to_json()
        for name, value in self.to_json().items():
            ignored = name in MAY_TURN_ON and (value or shared_only)
            ignored = ignored or (shared_only and name in PER_HOST)
            if value != stored_values[name] and not ignored:
                return Difference(name, stored_values[name], value)
        return None

    @property
    def kept_tokens(self) -> dict[str, Any]:
        """The fields that decide which tokens of its samples a run stores, as JSON."""
        content = self.to_json()
        return {name: content[name] for name in OF_KEPT_TOKENS}

    def other_samples(
        self, other: "Identity", files: DataFiles, other_files: DataFiles
    ) -> list[Difference]:
        """Returns the differences that show that another run has other samples of the same row.

        Args:
            other: The identity of the other run.
            files: Bytes and fingerprint of every file of this run's data, by its name.
            other_files: Bytes and fingerprint of every file of the other run's data, by its name.

        Returns:
            The differences. An empty list if one of the runs records no data, as a program with a
            loop of its own.
        """
        if not (self.data and other.data):
            return []
        content, other_content = self.to_json(), other.to_json()
        pairs = [(name, content[name], other_content[name]) for name in OF_SAMPLES]
        for name in files.keys() & other_files.keys():
            (size, fingerprint), (other_size, other_fingerprint) = files[name], other_files[name]
            pairs.append((f"the size of data file {name}", size, other_size))
            # The fingerprint of a file at a URL is its store's, and says nothing about a copy.
            if fingerprint.startswith(BLOCKS) and other_fingerprint.startswith(BLOCKS):
                label = f"the content of data file {name}"
                pairs.append((label, fingerprint, other_fingerprint))
        return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def _flag_to_json(name: str, value: Any) -> Any:
    """Returns the value of a flag as the JSON of an identity contains it, "" for None."""
    if value is None:
        return ""
    if name in ("positions", "shuffle_documents"):
        return str(value)
    return [*value] if isinstance(value, tuple) else value


def _flag_from_json(name: str, value: Any) -> Any:
    """Reads the result of `_flag_to_json`."""
    if value == "":
        return None
    if name == "positions":
        return parse_positions(value)
    if name == "shuffle_documents":
        return int(value)
    return tuple(value) if isinstance(value, list) else value


class Sources(Protocol):
    """The files that samples come from."""

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Checks the files of some rows.

        Args:
            rows: Field `row` of the samples whose files are checked.

        Raises:
            RunError: One of these files has changed since the run began.
        """

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the files as metadata.json records them."""


@dataclass(frozen=True)
class RunFacts:
    """Further facts about a run, which metadata.json records.

    Attributes:
        metadata: Fields of metadata.json, with JSON values.
        hooks: Key of a hook -> facts about it, such as its aliases.
        sources: Files that the samples come from; None if they come from no files.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    sources: Sources | None = None
