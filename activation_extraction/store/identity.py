"""The identity of a run: all settings that decide the content of its shards.

A run can only be continued with the same identity, but its batch size, mesh, devices and folders
may change. The declaration of each flag in cli/flags.py says whether the value of the flag is part
of the identity. For some other flags, the identity contains facts that the run derives from them.
For example, it contains the digest of the model instead of its path. metadata.json records the
identity as one flat JSON object, and the JSON of every shard contains the digest of the identity.

The module also declares `RunFacts`, facts for metadata.json that do not influence shards.
resume.py refuses to continue a run with another identity.
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
from activation_extraction.store.stored_hook import (
    CodeHook,
    DenseHook,
    Float8Hook,
    HookKey,
    StoredHook,
)
from activation_extraction.text.batch import Worker

PER_HOST = {"num_hosts", "machine", "host"}  # fields that may differ between the hosts of a run
MAY_TURN_ON = {"skip_bad_rows"}  # flags that may be turned on when a run is continued
# Fields that decide into which samples and tokens a row of the data set is converted. The digest of
# the tokenizer is left out, because the tokenizers of a base model and a chat model have different
# files, but may produce the same token ids.
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
# Fields that decide which tokens of a sample are stored.
OF_KEPT_TOKENS = ("positions", "drop_token_ids", "roles", "mask_column", "overlap")
BLOCKS = "blocks "  # beginning of the fingerprint of a local file
LOSS = "loss"  # full name of the hook with the loss at each token
# Value of `max_seq_length` in the identity of a program with a loop of its own, which has no such
# flag.
NOT_RECORDED = 0
# Name of a data file -> its size in bytes and its fingerprint.
SizeAndFingerprintByFileName = Mapping[str, tuple[int, str]]


class Difference(NamedTuple):
    """A field in which two identities differ, or a property in which their data files differ.

    Attributes:
        field_name: Name of the field in metadata.json, or a description of the property, such as
            "the size of data file a.jsonl".
        value_in_first_identity: Value for the first identity, as JSON. If a process continues a
            run, the first identity is the stored one.
        value_in_second_identity: Value for the second identity, as JSON.
    """

    field_name: str
    value_in_first_identity: Any
    value_in_second_identity: Any


@dataclass(frozen=True)
class Identity:
    """All settings that decide the content of a run's shards.

    Attributes:
        model_digest: SHA-256 of the model; "" if a program with a loop of its own computes the
            activations.
        lora_digest: SHA-256 of the LoRA adapter; "" for none.
        autoencoder_digest: SHA-256 of the autoencoders; "" for none.
        tokenizer_digest: SHA-256 of the tokenizer's files; "" for none.
        data: Name of the data set; "files" for files; "" if a program with a loop of its own adds
            the samples.
        data_revision: Commit of the data set on the hub; "" for files.
        chat_template: Digest of the chat template and its arguments; "" for none.
        special_tokens: Special tokens that each text gets, such as "text + <|endoftext|>"; "" for
            none.
        text: Flags about text. Flags that do not decide content are set to their defaults. The
            flag drop_token_ids contains ids, not names of tokens.
        storage: Flags about shards. Flags that do not decide content are set to their defaults.
        hooks: Full names of all hooks.
        integer_hooks: Full names of the hooks with indices of experts or with token ids. Their
            values are stored as int32 and have no statistics.
        float32_hooks: Full names of the hooks whose values are no activations and are stored as
            float32.
        code_hooks: Full names of the hooks with codes of autoencoders.
        encode_most: Largest number of features that are stored for a token, for each of
            `code_hooks`.
        keyed_by: Keys of the hooks in shards: "layer" for layer numbers, "hook name" for full
            names, otherwise the list of the keys as strings.
        dtype: Dtype of the computation.
        activation_dtype: Dtype of stored activations, or "float8".
        top_logits: Number of the most likely next tokens that are stored for each token; 0 for
            none.
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
    # This field has the name of the flag --encode_most, under which metadata.json stores it.
    encode_most: tuple[int, ...] = ()
    keyed_by: str | list[str] = "layer"
    dtype: str = ""
    activation_dtype: str = ""
    top_logits: int = 0
    worker: Worker = Worker()

    def __post_init__(self) -> None:
        """Replaces the values of all flags that have no effect on shards by their defaults."""
        for options_field_name in ("text", "storage"):
            text_or_storage_options = getattr(self, options_field_name)
            object.__setattr__(
                self,
                options_field_name,
                type(text_or_storage_options)(**content_flags(text_or_storage_options)),
            )

    @property
    def from_dataset(self) -> bool:
        """Whether the run reads its samples from a data set, which may consist of files.

        If False, a program with a loop of its own adds samples with the numbers 0, 1, 2, ..., and
        the shards have no marks.
        """
        return bool(self.data)

    @property
    def repair_option(self) -> str:
        """The flag or argument with which the user can ask for a repair, for messages."""
        return "--repair" if self.from_dataset else "ActivationStorage(..., repair=True)"

    @property
    def every_token(self) -> bool:
        """Whether the run keeps all tokens of its samples."""
        text_options = self.text
        mask_column_drops_tokens = text_options.mask_column not in (None, ATTENTION_MASK)
        drops_tokens = (
            text_options.drop_token_ids
            or text_options.roles
            or mask_column_drops_tokens
            or text_options.overlap
        )
        return text_options.positions == Positions() and not drops_tokens

    def stored_hook(
        self,
        key: HookKey,
        name: str,
        width: int = 0,
        dtype: str = "",
        max_features_per_token: int = 0,
    ) -> StoredHook:
        """Makes the object that describes one hook of the run.

        The class of the object is `CodeHook` if the hook is one of `code_hooks`, `Float8Hook`
        if `activation_dtype` is "float8" and the hook's values are activations, and otherwise
        `DenseHook`.

        Args:
            key: Key of the hook in pickles.
            name: Full name of the hook.
            width: Number of values of a token; for codes, number of all features. 0 if it is not
                known yet.
            dtype: Name of the dtype of the values in files. "" for the dtype that follows from the
                identity.
            max_features_per_token: Largest number of features that are stored for a token. 0 for
                other values than codes, and while codes are written, because the writer does not
                need this number.
        """
        if name in self.code_hooks:
            return CodeHook(
                key, name, width, value_dtype(self.activation_dtype).name, max_features_per_token
            )
        if name in self.integer_hooks:
            return DenseHook(key, name, width, dtype or "int32", "integers")
        if name in self.float32_hooks:
            meaning_of_values: Literal["loss", "numbers"] = "loss" if name == LOSS else "numbers"
            return DenseHook(key, name, width, dtype or "float32", meaning_of_values)
        if self.activation_dtype == FLOAT8:
            return Float8Hook(key, name, width)
        return DenseHook(key, name, width, dtype or self.activation_dtype)

    def recorded_hook(self, description: Mapping[str, Any]) -> StoredHook:
        """Makes the object that describes one hook, from the JSON that a run has stored.

        Args:
            description: JSON object about the hook, from the list "hooks" in the JSON of a shard or
                in metadata.json, or a dict with the fields of both of these objects.

        Raises:
            ValueError: If the width is not recorded, or the dtype is unknown.
        """
        hook_name = description["name"]
        recorded_width = description.get("width")
        if recorded_width is None:
            raise ValueError(f"the metadata does not record how wide {hook_name} is")
        recorded_dtype = description.get("dtype", "")
        max_features_per_token = description.get("most", 0)
        stored_hook = self.stored_hook(
            description["key"], hook_name, recorded_width, recorded_dtype, max_features_per_token
        )
        try:
            # Reading the property raises TypeError if NumPy does not have the recorded dtype.
            stored_hook.user_dtype  # noqa: B018 (the property is read for its exception)
        except TypeError as error:
            raise ValueError(f"{hook_name}: dtype {recorded_dtype!r}: {error}") from error
        return stored_hook

    @property
    def digest(self) -> str:
        """The SHA-256 of all fields that must not change when a run is continued.

        The JSON of every shard contains this digest.
        """
        digested_value_by_field_name = self.to_json()
        for field_name in MAY_TURN_ON:
            del digested_value_by_field_name[field_name]
        return hashlib.sha256(
            json.dumps(digested_value_by_field_name, sort_keys=True).encode()
        ).hexdigest()

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that must be the same on all hosts of a run, by name, as JSON."""
        shared_value_by_field_name = self.to_json()
        for field_name in PER_HOST | MAY_TURN_ON:
            del shared_value_by_field_name[field_name]
        return shared_value_by_field_name

    def to_json(self) -> dict[str, Any]:
        """Returns the identity as the flat JSON object that metadata.json contains."""
        json_value_by_field_name: dict[str, Any] = {}
        for identity_field in fields(self):
            field_value = getattr(self, identity_field.name)
            if identity_field.name in ("text", "storage"):
                for option_name, option_value in content_flags(field_value).items():
                    json_value_by_field_name[option_name] = _flag_to_json(option_name, option_value)
            elif identity_field.name == "worker":
                json_value_by_field_name["total_machines"] = self.worker.num_machines
                json_value_by_field_name["num_hosts"] = self.worker.num_hosts
                json_value_by_field_name["machine"] = self.worker.machine_number
                json_value_by_field_name["host"] = self.worker.host_number
            elif isinstance(field_value, tuple):
                json_value_by_field_name[identity_field.name] = list(field_value)
            else:
                json_value_by_field_name[identity_field.name] = field_value
        return json_value_by_field_name

    @classmethod
    def from_json(cls, content: Any) -> "Identity":
        """Returns an identity from its JSON object in metadata.json. Missing fields get defaults.

        Args:
            content: JSON object, as `to_json` returned it.

        Raises:
            TypeError: If the content is not a JSON object, or contains an unknown field, which a
                later version of this program may have added.
            ValueError: If the value of a flag cannot be parsed.
        """
        default_identity = cls()
        unread_value_by_field_name = {**default_identity.to_json(), **content}
        value_by_field_name: dict[str, Any] = {}
        for identity_field in fields(cls):
            if identity_field.name in ("text", "storage"):
                default_text_or_storage_options = getattr(default_identity, identity_field.name)
                value_by_flag_name = {
                    flag_name: _flag_from_json(flag_name, unread_value_by_field_name.pop(flag_name))
                    for flag_name in content_flags(default_text_or_storage_options)
                }
                value_by_field_name[identity_field.name] = type(default_text_or_storage_options)(
                    **value_by_flag_name
                )
            elif identity_field.name == "worker":
                value_by_field_name["worker"] = Worker(
                    machine_number=unread_value_by_field_name.pop("machine"),
                    num_machines=unread_value_by_field_name.pop("total_machines"),
                    host_number=unread_value_by_field_name.pop("host"),
                    num_hosts=unread_value_by_field_name.pop("num_hosts"),
                )
            elif identity_field.default == ():
                value_by_field_name[identity_field.name] = tuple(
                    unread_value_by_field_name.pop(identity_field.name)
                )
            else:
                value_by_field_name[identity_field.name] = unread_value_by_field_name.pop(
                    identity_field.name
                )
        if unread_value_by_field_name:
            raise TypeError(f"unknown fields: {', '.join(unread_value_by_field_name)}")
        return cls(**value_by_field_name)

    def compare(self, stored: "Identity", shared_only: bool = False) -> Difference | None:
        """Returns the first field in which another identity differs from this identity.

        Flags that may be turned on when a run is continued (MAY_TURN_ON) do not count as different
        if they are turned on in this identity.

        Args:
            stored: Identity of a stored run.
            shared_only: Whether to compare only the fields that must be the same on all hosts of a
                run.

        Returns:
            The field, with its value in `stored` as the first value and its value in this identity
            as the second. None if there is no difference, so that the stored run may be continued.
        """
        stored_value_by_field_name = stored.to_json()
        for field_name, field_value in self.to_json().items():
            if shared_only:
                may_field_differ = field_name in PER_HOST | MAY_TURN_ON
            else:
                may_field_differ = field_name in MAY_TURN_ON and bool(field_value)
            if field_value != stored_value_by_field_name[field_name] and not may_field_differ:
                return Difference(field_name, stored_value_by_field_name[field_name], field_value)
        return None

    @property
    def kept_tokens(self) -> dict[str, Any]:
        """The fields that decide which tokens of a sample are stored, by name, as JSON."""
        json_value_by_field_name = self.to_json()
        return {field_name: json_value_by_field_name[field_name] for field_name in OF_KEPT_TOKENS}

    def other_samples(
        self,
        other: "Identity",
        files: SizeAndFingerprintByFileName,
        other_files: SizeAndFingerprintByFileName,
    ) -> list[Difference]:
        """Returns the differences in settings and data files that change the samples of a run.

        If both runs record their data and there is no difference, a row of the data set is
        converted to the same samples in both runs.

        Args:
            other: Identity of the other run.
            files: Size in bytes and fingerprint of each file of this run's data, by the file's
                name.
            other_files: Size in bytes and fingerprint of each file of the other run's data, by the
                file's name.

        Returns:
            The differences, each with the value of this run first. The list is empty if there is
            no difference. It is also empty if one of the runs records no data, which means that a
            program with a loop of its own has stored that run.
        """
        if not (self.data and other.data):
            return []
        value_by_field_of_self = self.to_json()
        value_by_field_of_other = other.to_json()
        field_comparisons = [
            Difference(
                field_name, value_by_field_of_self[field_name], value_by_field_of_other[field_name]
            )
            for field_name in OF_SAMPLES
        ]
        for file_name in files.keys() & other_files.keys():
            file_size_bytes, file_fingerprint = files[file_name]
            other_file_size_bytes, other_fingerprint = other_files[file_name]
            field_comparisons.append(
                Difference(
                    f"the size of data file {file_name}", file_size_bytes, other_file_size_bytes
                )
            )
            # Only fingerprints of blocks are compared. The fingerprint of a file at a URL is a
            # version that its server reports, so a copy of the same file in another place may have
            # another fingerprint.
            if file_fingerprint.startswith(BLOCKS) and other_fingerprint.startswith(BLOCKS):
                content_description = f"the content of data file {file_name}"
                field_comparisons.append(
                    Difference(content_description, file_fingerprint, other_fingerprint)
                )
        return [
            comparison
            for comparison in field_comparisons
            if comparison.value_in_first_identity != comparison.value_in_second_identity
        ]


def _flag_to_json(name: str, value: Any) -> Any:
    """Returns the value of a flag in the form that the JSON of an identity contains.

    None becomes "". The values of --positions and --shuffle_documents become strings, and tuples
    become lists.
    """
    if value is None:
        return ""
    if name in ("positions", "shuffle_documents"):
        return str(value)
    return [*value] if isinstance(value, tuple) else value


def _flag_from_json(name: str, value: Any) -> Any:
    """Returns the value of a flag from the JSON value that `_flag_to_json` has made of it."""
    if value == "":
        return None
    if name == "positions":
        return parse_positions(value)
    if name == "shuffle_documents":
        return int(value)
    return tuple(value) if isinstance(value, list) else value


class Sources(Protocol):
    """Interface of an object that describes the files of a data set and checks them for changes.

    The package `store` uses this interface, because it must not import the class that implements it
    (`run.data_files.DataFiles`).
    """

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Checks the files from which some samples come.

        Args:
            rows: The `row` field of each sample's `SampleFacts`. Its key "file", if it exists,
                names the file of the sample.

        Raises:
            RunError: If one of these files has changed since the run began.
        """

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the JSON list that metadata.json contains under "data_files".

        Returns:
            One JSON object for each file of the data set, in the order in which the files are read.
            Its keys are "name" for the name under which rows refer to the file, "bytes" for the
            number of bytes that the run reads from the file, and "fingerprint".
        """


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that metadata.json records in addition to the run's identity.

    They do not influence the content of shards, so they may change when a run is continued.

    Attributes:
        metadata: Fields of metadata.json by name, with values that JSON can represent.
        facts_by_hook_key: Key of a hook -> facts about the hook, such as its aliases, by the name
            of the fact.
        sources: Files of the data set. None if the samples do not come from files.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    facts_by_hook_key: Mapping[HookKey, Mapping[str, Any]] = field(default_factory=dict)
    sources: Sources | None = None
