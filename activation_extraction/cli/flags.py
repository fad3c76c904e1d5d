"""Declares all flags, and the configuration that consists of their values.

`Config` describes a run as its user asks for it. It consists of parts, which are frozen dataclasses
of flags. Each part is passed unchanged to the package that uses it. Every flag is declared once,
with its meaning and its default, as a field of a part. Flags that select the action of the program
or its logging are fields of `Config` itself. config.py makes the command line and --help from these
declarations, and checks whether flags are consistent. Every package may import the parts from here,
so this module imports neither argparse nor NumPy.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from activation_extraction.cli.declare import (
    EnvironmentVariables,
    Flag,
    HelpGroup,
    each_once,
    flag,
    gigabytes,
    number,
    pair,
    part,
    seconds,
    several,
    switch,
)
from activation_extraction.cli.values import (
    address,
    argument,
    axes,
    bucket,
    dollars,
    hook_and_path,
    in_bucket,
    layers,
    path,
    path_or_default,
    positive,
    positive_or_0,
    row_count,
    sizes,
    token,
    weighted,
)
from activation_extraction.common.choices import (
    DEFAULT_LAYERS,
    DEFAULT_TOP_LOGITS,
    EXPORTS,
    MESH_AXES,
    ROLES,
    SHARD_FORMATS,
)
from activation_extraction.common.host_memory import available_memory
from activation_extraction.common.positions import ALL, Positions, parse_positions
from activation_extraction.common.visible import plain_url


class HubDataset(NamedTuple):
    """A data set of the Hugging Face hub.

    Attributes:
        name: Name of the data set, such as HuggingFaceFW/fineweb-edu.
        config_name: Name of a configuration of the data set, such as sample-10BT.
        split: Name of a split, such as train.
    """

    name: str
    config_name: str
    split: str


DEFAULT_DATASET = HubDataset("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")
DEMO_MAX_SEQ_LENGTH = 256  # the default of --max_seq_length with --demo, in tokens
INSPECTION_FLAGS = ("status", "verify", "report", "export")  # flags that inspect a stored run
# Flags that select an action. At most one of them may be given, except that --plan and --overwrite
# may be given together.
MODES = (*INSPECTION_FLAGS, "repair", "overwrite", "list_hooks", "plan")
# If one of these flags is given, MACHINE_ID and TOTAL_MACHINES are ignored, because the command
# does not read a machine's own share of the data.
WITHOUT_SHARES = (*INSPECTION_FLAGS, "plan", "list_hooks", "demo")
GIGABYTE = 10**9  # the number of bytes in a GB
# The largest default of --waiting_shards_gb in bytes, unless two shards need more.
MAX_WAITING_BYTES = 16 * GIGABYTE

# The groups of flags in --help.
MODEL = HelpGroup("model")
EXTRACT = HelpGroup("what to extract")
TOKENS = HelpGroup(
    "which tokens to keep", "the model always reads whole samples; only kept tokens are stored"
)
TEXT = HelpGroup("text")
MACHINES = HelpGroup("several machines", "each machine extracts its own share of the data")
COMPUTING = HelpGroup("computing")
HOSTS = HelpGroup("several hosts as one", "start the same command on every host of a pod")
OUTPUT = HelpGroup("output")
UPLOAD = HelpGroup(
    "upload",
    "credentials come from the environment: for Google Cloud, gcloud auth application-default "
    "login, GOOGLE_APPLICATION_CREDENTIALS or the machine's service account; for S3, AWS_* "
    "variables; for Azure, AZURE_STORAGE_* variables. README.md names them",
)
PLAN = HelpGroup(
    "before a machine is rented",
    "give these flags together with the flags of a run, and the run is estimated instead of "
    "started. This needs neither weights nor data nor an accelerator, only the model's "
    "config.json. The sizes of released Qwen models are known even if the hub cannot be reached",
)
INSPECTION = HelpGroup(
    "looking at a run",
    "these flags extract nothing. They look at the run in the bucket if --upload_to_gcs is given, "
    "otherwise at the run in --output_dir, which may be a URL here",
)
GENERAL = HelpGroup("general")
GROUPS = (
    MODEL,
    EXTRACT,
    TOKENS,
    TEXT,
    MACHINES,
    COMPUTING,
    HOSTS,
    OUTPUT,
    UPLOAD,
    PLAN,
    INSPECTION,
    GENERAL,
)


def _all_layers(ranges: list[tuple[int, ...] | str]) -> tuple[int, ...] | str:
    """Returns the layers of several ranges, each layer once; "all" if a range is "all"."""
    if "all" in ranges:
        return "all"
    layer_numbers: list[Any] = []
    for layers_of_range in ranges:
        layer_numbers += layers_of_range
    return each_once(layer_numbers)


def _ids_and_names(tokens: list[int | str]) -> tuple[int | str, ...]:
    """Returns the token ids in ascending order and then the names of tokens, without duplicates."""
    return tuple(sorted(set(tokens), key=lambda token: (isinstance(token, str), token)))


@dataclass(frozen=True)
class ModelOptions:
    """The model and its dtype. The help texts of the flags describe the fields."""

    model_path: str = flag(
        "the checkpoint of a Qwen or Llama 3 model: a folder with config.json, the safetensors "
        "files and the tokenizer, local or in a bucket (gs://BUCKET/FOLDER), or the name of a "
        "model on the Hugging Face hub",
        "Qwen/Qwen2.5-0.5B",
        metavar="PATH",
    )
    model_revision: str | None = flag(
        "the branch, tag or commit of a model on the Hugging Face hub",
        default_is="the newest commit; when a run continues, the commit with which it began",
    )
    lora: str | None = flag(
        "a LoRA adapter in PEFT's format (adapter_config.json, adapter_model.safetensors): a "
        "folder, local or in a bucket, or the name of an adapter on the Hugging Face hub. It is "
        "merged into the weights in float32 while they are read. If a tokenizer or a "
        "chat template is stored with the adapter, it replaces the model's",
        default_is="none",
        metavar="PATH",
    )
    dtype: str = flag(
        "the dtype of the weights and of matrix products, which are accumulated in float32",
        "auto",
        default_is="auto, which is bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )


@dataclass(frozen=True)
class HookOptions:
    """The hooks whose activations or codes are stored, and the dtype of the stored activations.

    The help texts of the flags describe the fields. Attributes lists only fields whose values need
    a further description, such as the meaning of None.

    Attributes:
        layers_to_extract: Numbers of the layers, "all", or None for the default layers.
        encode: Tuple for each autoencoder: the name of its hook, and the path of its files. The
            name is "" if the user has not given it.
    """

    layers_to_extract: tuple[int, ...] | str | None = flag(
        "the layers whose activations are stored, counted from 0: numbers, inclusive ranges such "
        "as 1-3, or all",
        default_is=f"{DEFAULT_LAYERS[0]}-{DEFAULT_LAYERS[-1]}; the last layer replaces layers that "
        "the model lacks",
        parse=layers,
        collect_values=_all_layers,
        nargs="+",
        metavar="N|N-M|all",
    )
    activation_type: str = flag(
        "which activations of the layers in --layers_to_extract are stored. residual: the residual "
        "stream after the layer; attn or mlp: the output of the layer's attention or MLP, which is "
        "added to the residual stream",
        "residual",
        choices=("residual", "mlp", "attn"),
    )
    hook_names: tuple[str, ...] | None = flag(
        "the hooks whose values are stored, instead of --layers_to_extract and --activation_type: "
        "names, or globs that match names. A hook has a name of TransformerLens, such as "
        "blocks.20.mlp.hook_in, and may have a name of Hugging Face, which is the name of a module "
        "and .input or .output, such as model.layers.20.mlp.output. --list_hooks prints all names. "
        "A glob matches hooks with very many values per token, such as logits, only if it ends in "
        "their name. The hook loss is the loss of predicting a token from the tokens before it. "
        "The hooks entropy, logits.top_ids and logits.top_logprobs describe the probabilities of "
        "the next token",
        excluded_flags=("layers_to_extract", "activation_type"),
        nargs="+",
        metavar="GLOB",
    )
    top_logits: int = number(
        "with --hook_names: how many of the most likely next tokens logits.top_ids and "
        "logits.top_logprobs contain",
        DEFAULT_TOP_LOGITS,
        needs="hook_names",
        metavar="K",
    )
    encode: tuple[tuple[str, str], ...] = several(
        "store codes instead of activations. Codes are the active features of sparse autoencoders "
        "or transcoders. SAE is a folder or file, local or in a bucket, or ORG/REPO/FOLDER on the "
        "Hugging Face hub, in the format of Qwen Scope (layerN.sae.pt), SAELens 6, sparsify, "
        "Llamascopium or circuit_tracer. HOOK= is needed if the files do not name the hook, or if "
        "they contain an autoencoder for each layer",
        hook_and_path,
        collect_values=each_once,
        metavar="[HOOK=]SAE",
    )
    encode_most: int | None = number(
        "with --encode: the largest number of features that are stored for each token. If more "
        "features are active, those with the largest values are stored, and the run counts the "
        "rest",
        default_is="k for an autoencoder that keeps the top k features, otherwise 256",
        needs="encode",
        metavar="K",
    )
    keep_activations: bool = switch(
        "with --encode: store the activations as well as their codes", needs="encode"
    )
    activation_dtype: str = flag(
        "the dtype of the stored activations. float8 takes half as many bytes as bfloat16, plus 4 "
        "bytes per token and hook. It needs --shard_format safetensors. When it is read, it is "
        "converted to float32 or another dtype. The run measures the error of float8 on some of "
        "the tokens",
        "auto",
        default_is="auto, which is the dtype of --dtype",
        choices=("auto", "float32", "float16", "bfloat16", "float8"),
    )


@dataclass(frozen=True)
class TextOptions:
    """The text that the model reads, and the choice of the tokens whose activations are stored.

    The help texts of the flags describe the fields. Attributes lists only fields whose values need
    a further description, such as the meaning of None.

    Attributes:
        drop_token_ids: Token ids in ascending order, then names of tokens.
        dataset_name: Name of a data set of the hub; None if the rows come from files or a mixture.
        mix: Name and weight of each source of a mixture.
        chat_template_args: Name and value of each variable.
    """

    positions: Positions = flag(
        "the tokens of each sample that are stored. all; last; first:N or last:N: N tokens; "
        "every:N: positions 0, N, 2N and so on; a slice as in Python, such as 4:-1; random:N, "
        "random:N:SEED or random:N:SEED:FROM, with a whole number N: N random tokens from position "
        "FROM on, or all of them if there are fewer; random:P or random:P:SEED, with a fraction "
        "such as 0.1: each token with the probability P; last_of_turn: the last token of every "
        "turn of a conversation. SEED and FROM are 0 if they are missing. With --roles, "
        "last_of_turn takes the last token with one of the roles in each turn, which is often "
        "<|im_end|>. Without --roles, it is often the newline after <|im_end|>",
        Positions(),
        parse=parse_positions,
        metavar="RULE",
        determines_shards=True,
        help_group=TOKENS,
    )
    roles: tuple[str, ...] = several(
        "with --messages_column: store only the tokens with these roles in the conversation. "
        "--positions then counts only these tokens. <|im_end|> at the end of a message has the "
        "role of the message, </think> has the role thinking, and headers of messages and text "
        "between messages have the role template",
        default_is="all",
        needs="messages_column",
        choices=ROLES,
        collect_values=each_once,
        metavar="ROLE",
        determines_shards=True,
        help_group=TOKENS,
    )
    drop_token_ids: tuple[Any, ...] = several(
        "tokens that are never stored, even if --positions selects them: token ids, or names of "
        "tokens in the tokenizer, such as '<|im_end|>'. A number is always an id",
        token,
        collect_values=_ids_and_names,
        metavar="ID|NAME",
        determines_shards=True,
        help_group=TOKENS,
    )
    dataset_name: str | None = flag(
        "the name of a data set on the Hugging Face hub, whose rows are streamed",
        default_is=DEFAULT_DATASET.name,
    )
    dataset_config: str | None = flag(
        "the configuration of the data set in --dataset_name",
        default_is=f"{DEFAULT_DATASET.config_name} for the default data set, otherwise the data "
        "set's default",
    )
    dataset_split: str = flag("the split of the data set in --dataset_name", DEFAULT_DATASET.split)
    dataset_path: str | None = flag(
        "your own files instead of a data set on the Hugging Face hub: a file, a folder that "
        "contains one split, or a glob, local or as a URL. The files are .jsonl, .ndjson, .json "
        "(an array of objects, or an object on each line) or .csv (with a header), each also "
        "compressed (.gz, .zst, .bz2, .xz); .parquet; .arrow; or files that save_to_disk of the "
        "library `datasets` has written. Files whose names begin with . or _ are left out",
        excluded_flags=("dataset_name", "dataset_config", "dataset_split"),
        metavar="PATH",
    )
    mix: tuple[tuple[str, float], ...] = several(
        "several sources instead of one data set. The number of documents from a source is "
        "proportional to its weight. SOURCE is a path as for --dataset_path, or NAME:CONFIG:SPLIT "
        "of a data set on the Hugging Face hub. If a source has no more documents, the others "
        "continue",
        weighted,
        excluded_flags=("dataset_name", "dataset_config", "dataset_split", "dataset_path"),
        metavar="SOURCE=WEIGHT",
    )
    text_column: str = flag(
        "the column with the text of each row. If a row lacks it but has the columns train and "
        "test of an ARC-AGI task, these columns become a prompt",
        "text",
        determines_shards=True,
    )
    messages_column: str | None = flag(
        "the column with a conversation in each row, instead of --text_column: a list of messages "
        "with the keys role and content, or from and value. The chat template turns them into one "
        "text, together with the tools in the column tools, if there is one. If the template "
        "leaves out text of a message, other than thinking, the row cannot be used. Tokens get a "
        "role and a turn only if the template writes turns between <|im_start|> and <|im_end|>, as "
        "Qwen's templates do",
        excluded_flags=("text_column",),
        determines_shards=True,
    )
    chat_template: str | None = flag(
        "with --messages_column: a file with the chat template for all rows",
        default_is="the template of the adapter or the model. If there are several, the template "
        "tool_use is used for rows with tools, and the template default for other rows",
        needs="messages_column",
        metavar="FILE",
    )
    chat_template_args: tuple[tuple[str, Any], ...] = several(
        "with --messages_column: variables that are passed to the chat template, such as "
        "enable_thinking=false",
        argument,
        needs="messages_column",
        collect_values=lambda arguments: tuple(dict(arguments).items()),
        metavar="NAME=VALUE",
    )
    ids_column: str | None = flag(
        "the column with a list of token ids in each row, instead of --text_column. The ids are "
        "used unchanged, without a tokenizer",
        excluded_flags=("text_column", "messages_column"),
        determines_shards=True,
    )
    mask_column: str | None = flag(
        "with --ids_column: the column with a list of 0 or 1 for each token id. Tokens with 0 are "
        "context, which the model reads but the run does not store. In a column with the name "
        "attention_mask, tokens with 0 are padding, which the model does not read either",
        default_is="all tokens are stored",
        needs="ids_column",
        determines_shards=True,
    )
    id_column: str | None = flag(
        "the column with the id of each row, which is stored as doc_id",
        default_is="id, or task_id of an ARC-AGI task, if a row has it",
        determines_shards=True,
    )
    keep_columns: tuple[str, ...] = several(
        "more columns of the data set that are stored with each sample, such as a label",
        collect_values=each_once,
        determines_shards=True,
    )
    special_tokens: str = flag(
        "the special tokens that are added to plain text. tokenizer: the tokens that the model's "
        "tokenizer adds at the front and at the end; none: no special tokens. Llama 3's tokenizer "
        "adds <|begin_of_text|> at the front, the tokenizer of Qwen's embedding models adds "
        "<|endoftext|> at the end, and the tokenizers of Qwen's chat and base models add nothing. "
        "Nothing is added to conversations and token ids",
        "tokenizer",
        choices=("tokenizer", "none"),
    )
    long_documents: str = flag(
        "how to treat documents that are longer than --max_seq_length. cut: leave out the rest of "
        "the document; split: divide the document into several samples. --max_samples and "
        "--positions then apply to these samples",
        "cut",
        choices=("cut", "split"),
        determines_shards=True,
    )
    overlap: int = number(
        "with --long_documents split: the number of tokens from the end of a sample that the next "
        "sample of the same document repeats. The repeated tokens are only context for the next "
        "tokens, so every token is stored once",
        0,
        least=0,
        unit=" tokens",
        determines_shards=True,
    )
    shuffle_documents: int | None = number(
        "read the documents in a random order that depends on this seed. Files and row groups are "
        "shuffled, and so are the rows in each block of 1,024 rows",
        least=0,
        default_is="the order of the data set",
        metavar="SEED",
        determines_shards=True,
    )
    skip_bad_rows: bool = switch(
        "skip and count rows that cannot be used, for example because they are not JSON, or "
        "because a column is missing or does not contain text. The flag may be added when a run "
        "is continued (default: such a row ends the run)",
        determines_shards=True,
    )
    max_seq_length: int = number(
        "the number of tokens in each row of a batch, and the largest number of tokens of a "
        "sample. --long_documents says how longer documents are treated",
        2048,
        default_is=f"2048 tokens; {DEMO_MAX_SEQ_LENGTH} with --demo",
        metavar="TOKENS",
        determines_shards=True,
        help_group=COMPUTING,
    )


@dataclass(frozen=True)
class ComputingOptions:
    """The options that decide how steps are computed, and change activations only by rounding.

    The help texts of the flags describe the fields. Attributes lists only fields whose values need
    a further description, such as the meaning of None.

    Attributes:
        batch_size: Number of rows per host and step, "auto", or None for the default
            (run/batch_size.py).
        mesh_type: Type of the mesh; None if --mesh_shape is given without --mesh_type.
    """

    batch_size: int | str | None = flag(
        "the number of rows that a host computes in each step. Several samples share a row. auto: "
        "as many rows as fit in the memory of the devices and of the host, at most 512; on a CPU, "
        "auto is the same as the default",
        default_is="8 on TPU and GPU; on a CPU 2,048 / --max_seq_length, but at least 1 and at "
        "most 8, rounded up to a multiple of the number of devices",
        parse=row_count,
        metavar="ROWS|auto",
    )
    mesh_type: str | None = flag(
        "how the devices are arranged in a mesh. auto: a mesh with the axes data, fsdp, expert and "
        "model, on which a step is as short as possible and weights are split as little as "
        "possible; 1d: all devices along the axis model; 2d: data x model, where the size of data "
        "is the number of hosts; on a single host it is 2 if the number of devices is even and at "
        "least 8, otherwise 1; 3d: pipeline x data x model, or the three axes in --mesh_axes. Two "
        "of the three axes have the size 4, and the remaining axis gets all other devices. The "
        "remaining axis is data if the mesh has an axis data, otherwise fsdp if the mesh has an "
        "axis fsdp, otherwise the first axis. If the number of devices is less than 64 or no "
        "multiple of 16, 3d is the same as 2d. --mesh_axes explains the axes",
        "auto",
        choices=("auto", "1d", "2d", "3d"),
    )
    mesh_shape: tuple[int, ...] | None = flag(
        "the number of devices along each axis of the mesh, in the order of --mesh_axes",
        default_is="as --mesh_type determines",
        environment_variables=EnvironmentVariables(
            ("TPU_MESH_CONFIG",), flags_that_disable_variables=("mesh_type", "no_data_parallel")
        ),
        parse=sizes,
        metavar="A,B[,C]",
    )
    mesh_axes: tuple[str, ...] | None = flag(
        f"the names of the axes of the mesh, from {', '.join(MESH_AXES)}. pipeline splits the "
        "layers; data, fsdp and expert split the rows; fsdp and model split the weights; and "
        "expert splits the weights of experts. Needs --mesh_shape or --mesh_type 3d",
        default_is="model if --mesh_shape has one size, data,model if it has two, "
        "pipeline,data,model if it has three",
        environment_variables=EnvironmentVariables(
            ("TPU_AXIS_NAMES",), flag_that_enables_variables="mesh_shape"
        ),
        parse=axes,
        metavar="NAME,...",
    )
    use_data_parallel: bool = pair(
        "use all devices of each host", "no_data_parallel", "use only one device of each host"
    )
    compilation_cache: str | None = flag(
        "the folder in which JAX keeps compiled programs for the next start, or off to keep no "
        "programs. With --multihost, this is a folder or URL that all hosts share",
        default_is="activation_extraction/jax in XDG_CACHE_HOME or ~/.cache; off with --multihost",
        environment_variables=EnvironmentVariables(("JAX_COMPILATION_CACHE_DIR",)),
        parse=path,
        metavar="FOLDER",
        may_differ_by_host=True,
    )


@dataclass(frozen=True)
class HostOptions:
    """Which machine and which host of a run this process is, how hosts connect, and timeouts.

    The help texts of the flags describe the fields.
    """

    machine_id: int = number(
        "the number of this machine, counted from 0. The templates in deploy/ set the number for "
        "each of their tasks. Your own script must set MACHINE_ID and TOTAL_MACHINES, or give "
        "--machine_id and --total_machines. Otherwise, each of its tasks is machine 0 of 1, "
        "because variables in which a scheduler numbers its tasks, such as SLURM_ARRAY_TASK_ID, "
        "are not used. MACHINE_ID and TOTAL_MACHINES are ignored with --demo, --list_hooks, --plan "
        "and the flags that look at a run",
        0,
        least=0,
        environment_variables=EnvironmentVariables(
            ("MACHINE_ID",), flags_that_disable_variables=WITHOUT_SHARES
        ),
        metavar="I",
        help_group=MACHINES,
    )
    total_machines: int = number(
        "the number of independent machines that share the data. It may be much larger than the "
        "number of machines that run at a time",
        1,
        environment_variables=EnvironmentVariables(
            ("TOTAL_MACHINES",), flags_that_disable_variables=WITHOUT_SHARES
        ),
        help_group=MACHINES,
    )
    multihost: bool = switch(
        "run one model together with the other hosts of the pod. On Cloud TPU, GKE and Slurm, this "
        "flag alone is enough. Elsewhere, --coordinator_address, --host_id and --num_hosts are "
        "needed as well"
    )
    coordinator_address: str | None = flag(
        "with --multihost: the address of host 0",
        environment_variables=EnvironmentVariables(
            ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS"),
            flag_that_enables_variables="multihost",
        ),
        needs="multihost",
        parse=address,
        metavar="HOST:PORT",
        may_differ_by_host=True,
    )
    host_id: int | None = number(
        "with --multihost: the number of this host in the pod, counted from 0",
        least=0,
        environment_variables=EnvironmentVariables(
            ("JAX_PROCESS_INDEX", "HOST_ID"), flag_that_enables_variables="multihost"
        ),
        needs="multihost",
        metavar="I",
        may_differ_by_host=True,
    )
    num_hosts: int | None = number(
        "with --multihost: the number of hosts of the pod",
        environment_variables=EnvironmentVariables(
            ("JAX_PROCESS_COUNT", "NUM_HOSTS"), flag_that_enables_variables="multihost"
        ),
        needs="multihost",
    )
    connect_timeout: int = seconds(
        "with --multihost: how long to wait for the other hosts at the start", 300
    )
    heartbeat_timeout: int = seconds(
        "with --multihost: how long a host may be silent before the others consider it dead", 100
    )
    stall_timeout: int = seconds(
        "end the process if no step finishes for this long. Skipping samples that are already "
        "stored counts as progress",
        600,
    )


@dataclass(frozen=True)
class OutputOptions:
    """The folders in which shards are stored. The help texts of the flags describe the fields."""

    output_dir: str = flag(
        "the local folder for the files of the run. To continue a run that was interrupted, give "
        "the same command again",
        "activations",
        path,
        metavar="FOLDER",
        may_differ_by_host=True,
    )
    min_free_gb: float = gigabytes(
        "refuse to start if the disk of --output_dir has less free space than this",
        0.0,
        parse=positive_or_0,
    )
    upload_to_gcs: bool = switch(
        "store the shards in the bucket of --gcs_bucket, directly from memory. A shard counts as "
        "stored only when the bucket has confirmed it",
        needs="gcs_bucket",
        help_group=UPLOAD,
    )
    gcs_bucket: str | None = flag(
        "with --upload_to_gcs: the name of a bucket of Google Cloud Storage, or the URL of any "
        "bucket, which begins with gs://, s3://, s3a://, az://, abfs:// or abfss://",
        parse=bucket,
        needs="upload_to_gcs",
        help_group=UPLOAD,
    )
    gcs_prefix: str = flag(
        "with --upload_to_gcs: the folder in the bucket that contains a folder for each machine "
        "and host",
        "activations",
        in_bucket,
        needs="upload_to_gcs",
        metavar="PATH",
        help_group=UPLOAD,
    )
    upload_timeout: int = number(
        "how long an upload may take, with all its attempts, before the run stops. Time that "
        "is spent on sending bytes is not counted, up to 8 s for each MB",
        300,
        unit=" s",
        metavar="SECONDS",
        help_group=UPLOAD,
    )

    @property
    def bucket_url(self) -> str | None:
        """The URL of the folder of the run in the bucket; None without --upload_to_gcs.

        If --gcs_bucket contains secrets, the URL contains them as well.
        """
        if not self.upload_to_gcs or self.gcs_bucket is None:
            return None
        bucket_name_or_url = self.gcs_bucket.rstrip("/")
        url_of_bucket = (
            bucket_name_or_url if "://" in bucket_name_or_url else f"gs://{bucket_name_or_url}"
        )
        return f"{url_of_bucket}/{self.gcs_prefix.strip('/')}"

    @property
    def location(self) -> str:
        """The URL of the run in the bucket if it is uploaded, otherwise the path of its folder."""
        return self.bucket_url or self.output_dir


@dataclass(frozen=True)
class StorageOptions:
    """The options for storing activations.

    Attributes:
        shard_size_gb: Size of the activations in a shard before compression, in units of 10^9
            bytes. A shard contains at least one sample, however large it is.
        shard_format: Format of the shards, "pickle" or "safetensors".
        compress_shards: Whether pickles are compressed with gzip. Safetensors are never compressed.
        max_samples: Largest number of samples of a run; None for no limit. extract_activations.py
            stops there. An `ActivationStorage` does not stop at the limit. It only refuses, when it
            is opened, a run that has stored more samples.
        max_tokens: Largest number of tokens of a run whose activations are stored; None for no
            limit. It is enforced in the same way as `max_samples`.
        overwrite: Whether to begin a new run in place of a stored run, instead of continuing it.
        delete_local_after_upload: Whether shards are stored only in the bucket. Otherwise they are
            stored in the local folder as well. It has no effect without a bucket.
        writer_threads: Number of threads that compress shards and add up statistics; None for one
            thread per core.
        waiting_shards_gb: Largest amount of memory for activations that wait to be stored, in units
            of 10^9 bytes. None for a quarter of the available memory, but at most 16 GB and at
            least the size of two shards.
    """

    shard_size_gb: float = gigabytes(
        "the size of the activations in a shard, before compression",
        1.0,
        determines_shards=True,
    )
    shard_format: str = flag(
        "the file format of the shards. pickle: a dict that Python reads without this program; "
        "safetensors: one contiguous tensor per hook, so that a hook can be read without the "
        "others. Readers check all bytes of safetensors that they use against a crc32c, and "
        "--verify checks whole files against their sha256",
        "pickle",
        choices=SHARD_FORMATS,
        determines_shards=True,
    )
    compress_shards: bool = pair(
        "compress pickles with gzip. Safetensors are never compressed",
        "no_compress_shards",
        "do not compress pickles, which are then .pkl files",
        determines_shards=True,
    )
    max_samples: int | None = number(
        "store at most N samples on this machine. Each of its hosts stores an equal share of N. A "
        "host with too few rows stores fewer samples, and the run names this host at the end",
        default_is="no limit",
        help_group=TEXT,
    )
    max_tokens: int | None = number(
        "store at most N tokens on this machine. Each of its hosts stores an equal share of N. The "
        "last sample of a host is cut, so that the host stores exactly its share unless it has too "
        "few rows. This sample stays cut if the run is continued with a larger N",
        default_is="no limit",
        help_group=TEXT,
    )
    overwrite: bool = switch(
        "begin a new run, which replaces the run in --output_dir and in the bucket. The files of "
        "the old run are deleted at the end. Each start with this flag begins anew (default: "
        "continue the old run)",
        help_group=OUTPUT,
    )
    delete_local_after_upload: bool = pair(
        "with --upload_to_gcs: write no shards to --output_dir, only metadata.json and "
        "metrics.jsonl",
        "keep_local",
        "with --upload_to_gcs: write the shards to --output_dir as well as to the bucket",
        help_group=UPLOAD,
    )
    writer_threads: int | None = number(
        "the number of threads that compress shards and add up their statistics",
        default_is="one for each core",
    )
    waiting_shards_gb: float | None = gigabytes(
        "the largest amount of memory for activations that wait to be stored. When this memory is "
        "full, the model waits. Two shards must fit in it",
        default_is="a quarter of the available memory, at most 16 GB, but at least two shards",
    )

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest numbers of samples and of tokens to store; None for no limit.

        The keys are "max_samples" and "max_tokens", as in metadata.json.
        """
        return {"max_samples": self.max_samples, "max_tokens": self.max_tokens}

    @property
    def shard_bytes(self) -> float:
        """The size of a shard's activations before compression, in bytes."""
        return self.shard_size_gb * GIGABYTE

    @property
    def waiting_bytes(self) -> float:
        """The largest number of bytes of activations that wait in memory to be stored."""
        if self.waiting_shards_gb is not None:
            return self.waiting_shards_gb * GIGABYTE
        return max(min(available_memory() / 4, MAX_WAITING_BYTES), 2 * self.shard_bytes)

    @property
    def threads(self) -> int:
        """The number of threads that compress shards and add up statistics."""
        num_cpu_cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # Linux may allow a process to use only some cores
            num_cpu_cores = len(os.sched_getaffinity(0))
        return self.writer_threads or num_cpu_cores


@dataclass(frozen=True)
class PlanOptions:
    """The accelerators for which --plan estimates a run, with their speed and their price.

    The help texts of the flags describe the fields. Attributes lists only fields whose values need
    a further description, such as the meaning of None.

    Attributes:
        plan: Topology, which is the type and the number of the accelerator chips, as a text such
            as "v5e:8x8" or "h100-8"; None without --plan.
    """

    plan: str | None = flag(
        "estimate the run of the other flags on a machine, such as v5e:8x8, v5litepod-64, v4-32, "
        "h100 or h100-8: whether it fits in memory, how many bytes it stores, and how many hours "
        "it takes (a guess without --tokens_per_second). The estimate is for --mesh_type auto and "
        "for the mesh that the other flags describe. If the package libtpu is installed, the TPU "
        "compiler also checks whether the program fits",
        metavar="TOPOLOGY",
    )
    chips_per_host: int | None = number(
        "with --plan: the number of chips of each host",
        default_is="4 for TPUs, but all chips of v5e-1, v5e-8, v6e-1 and v6e-8, which are one "
        "host; for GPUs all of them, at most 8",
        needs="plan",
    )
    tokens_per_second: float | None = flag(
        "with --plan: the number of tokens that each host stores per second. To measure it, run "
        "with --max_samples 200 on such a machine. The line that begins with 'time:' at the end "
        "of the output contains the number",
        default_is="a guess from the peak speed of the chips",
        parse=positive,
        needs="plan",
        metavar="X",
    )
    chip_hour_dollars: tuple[float, ...] | None = flag(
        "with --plan: the price in dollars of a chip for an hour, on demand and, after a comma, on "
        "a spot machine. The estimate then contains the price of the run",
        default_is="none",
        parse=dollars,
        needs="plan",
        metavar="X[,Y]",
    )


@dataclass(frozen=True)
class InspectionOptions:
    """The flags that inspect a stored run, instead of extracting activations.

    The help texts of the flags describe the fields. Attributes lists only fields whose values need
    a further description, such as the meaning of None.

    Attributes:
        verify_samples: Number of samples that --verify recomputes; 0 without --model_path.
        report: File to which the report is written, or "" for the default file; None without
            --report.
    """

    status: bool = switch(
        "show what all machines and hosts have stored, how fast they are and when they will be "
        "done, also during a run. Exits with status 1 if files are damaged or missing, if a host "
        "has failed, or if a host has written nothing for 15 minutes (or for the time in which it "
        "stores five shards, if this is longer)"
    )
    aggregate: bool = switch(
        "with --status: also write the totals of all machines and hosts to "
        "aggregated_metadata.json, in the folder of the run",
        needs="status",
    )
    json: bool = switch(
        "with --status or --plan: print one JSON object instead of text. With --plan, its keys are "
        "meshes, best (the fastest mesh that fits), hours and dollars (each as [least, most]), and "
        "terabytes (before compression). Unknown values are null, such as dollars without "
        "--chip_hour_dollars",
        needs="status or plan",
    )
    verify: bool = switch(
        "compare every shard with its sha256 and its JSON file, and check that every sample is "
        "stored once. With --model_path (and with --lora and --encode, if the run has them), also "
        "recompute some samples. Lists every problem, and exits with status 1 if there is one. If "
        "--output_dir contains hidden states of another program (hidden_states/hs_*.safetensors of "
        "speculators, or rows_*/data_*.ckpt of SpecForge) instead of a run, random rows are "
        "compared with hidden states of --model_path, computed in --dtype. The last layer in a row "
        "has to be the output of the last block or, for SpecForge, of the final norm. The other "
        "layers have to be the hooks of --layers_to_extract or --hook_names (default: the hooks "
        "that most rows match). The output tells what is wrong with a row, such as another layer, "
        "shifted tokens, another row, zeros, or too few tokens"
    )
    verify_samples: int = number(
        "with --verify and --model_path: the number of random samples to recompute, or of random "
        "rows if the hidden states are those of another program",
        8,
        needs="verify",
    )
    report: str | None = flag(
        "write an HTML page about the activations to FILE, also during a run. It shows norms by "
        "layer and position, outlier tokens and dimensions, lengths of documents, and throughput",
        default_is="report.html in --output_dir, or in the working directory if the run is in a "
        "bucket",
        parse=path_or_default,
        nargs="?",
        const="",
        metavar="FILE",
    )
    export: str | None = flag(
        "copy a finished run to --export_dir in the file format of another program. sae_lens: the "
        "cached activations of SAELens. speculators or specforge: files for training EAGLE-3 draft "
        "models, one for each sample. Their loss mask comes from the column loss_mask, if "
        "--keep_columns has stored it, otherwise from the roles. delphi: the cache of codes from "
        "which delphi explains features, without codes of at most 1e-5, and without the last "
        "tokens of a sample that do not fill a row of 64. nla: for natural language autoencoders, "
        "a Parquet file with each stored token of one hook blocks.K.hook_resid_post and the text "
        "before the token. If the run does not store all tokens, nla reads the data of the run "
        "again (from --dataset_path, if the data has been moved). --hook_names selects the hooks "
        "to export; without it, all hooks that the format can contain are exported. specforge "
        "needs ln_final.hook_out and blocks.K.hook_resid_post of exactly three layers, speculators "
        "needs the last block and at least one other block, and nla needs a single hook. "
        "speculators, specforge and delphi need a run that stores every token. The command prints "
        "how many tokens and codes are left out",
        needs="export_dir",
        choices=EXPORTS,
    )
    export_dir: str | None = flag(
        "with --export: the folder to create for the exported files. It must not exist yet",
        parse=path,
        needs="export",
        metavar="FOLDER",
    )
    export_dtype: str | None = flag(
        "the dtype of the hidden states that --export speculators writes. float8 (e4m3, with a "
        "scale for each token) halves the files of a run in bfloat16; hs_connectors 0.9 and later "
        "read them",
        default_is="float8 if the run stores float8, otherwise the dtype of the run",
        choices=("float8",),
        needs="export",
    )

    @property
    def requested(self) -> bool:
        """Returns whether one of these flags asks to inspect a stored run, not to extract."""
        return self.status or self.verify or self.report is not None or self.export is not None

    @property
    def reads_model_files(self) -> bool:
        """Returns whether the flags ask for an inspection that reads files of the model.

        Returns:
            True for --verify with samples to recompute (`verify_samples` is not 0), which reads the
            weights, and for --export nla, which reads the tokenizer. False otherwise.
        """
        return self.verify_samples > 0 or self.export == "nla"


def content_flags(options: Any) -> dict[str, Any]:
    """Returns the values of the flags that determine the content of shards, by name.

    Args:
        options: A part of the configuration, such as TextOptions.
    """
    value_by_flag_name = {}
    for option_field in fields(options):
        if option_field.metadata["flag"].determines_shards:
            value_by_flag_name[option_field.name] = getattr(options, option_field.name)
    return value_by_flag_name


@dataclass(frozen=True)
class Config:
    """The configuration of a run, as its user asks for it.

    It consists of parts, and of flags that select the action of the program or its logging. The
    help texts describe the flags.

    Attributes:
        model_options: The model and its dtype.
        hook_options: The hooks whose activations or codes are stored.
        text_options: The text that the model reads, and the choice of stored tokens.
        computing_options: The way in which steps are computed.
        host_options: The number of this process among the machines and hosts, and timeouts.
        output_options: The folders in which the shards are stored.
        storage_options: The options for storing activations.
        plan_options: The accelerators for which --plan estimates the run, their speed and price.
        inspection_options: The flags that inspect a stored run.
    """

    model_options: ModelOptions = part(ModelOptions, MODEL)
    hook_options: HookOptions = part(HookOptions, EXTRACT)
    text_options: TextOptions = part(TextOptions, TEXT)
    computing_options: ComputingOptions = part(ComputingOptions, COMPUTING)
    host_options: HostOptions = part(HostOptions, HOSTS)
    output_options: OutputOptions = part(OutputOptions, OUTPUT)
    storage_options: StorageOptions = part(StorageOptions, OUTPUT)
    plan_options: PlanOptions = part(PlanOptions, PLAN)
    inspection_options: InspectionOptions = part(InspectionOptions, INSPECTION)
    list_hooks: bool = switch(
        "print the hooks of the model with all their names, widths, dtypes and bytes per token, "
        "then exit. This reads no weights, but only config.json, the special tokens in "
        "tokenizer.json and, if the model is in a local folder, the names of the tensors",
        help_group=EXTRACT,
    )
    repair: bool = switch(
        "together with the flags of a stored run: compute the samples of damaged and missing "
        "shards again, then verify the folder, and exit with status 1 if a problem is left",
        help_group=OUTPUT,
    )
    demo: bool = switch(
        "create a tiny model and some documents in --output_dir/demo_inputs, and extract their "
        "activations",
        excluded_flags=(
            "model_path",
            "model_revision",
            "lora",
            "dataset_name",
            "dataset_config",
            "dataset_split",
            "dataset_path",
            "mix",
            "messages_column",
            "ids_column",
            "id_column",
            "keep_columns",
        ),
        help_group=GENERAL,
    )
    log_every: int = number(
        "the time between two lines of metrics.jsonl and, if the output is not a terminal, between "
        "two lines of progress in the log",
        30,
        unit=" s",
        metavar="SECONDS",
        help_group=GENERAL,
    )
    verbose: bool = switch(
        "log every step and shard, on all hosts (default: hosts other than 0 log only problems)",
        may_differ_by_host=True,
        help_group=GENERAL,
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Config":
        """Makes the configuration from the values of the flags.

        Args:
            values: The values by the names of the flags. A flag that is missing gets its default.
                Names that are no flags are ignored.
        """
        value_by_field = {}
        for config_field in fields(cls):
            options_class = config_field.metadata.get("part")
            if options_class is not None:
                value_by_field[config_field.name] = options_class(
                    **_values_of_part(options_class, values)
                )
            elif config_field.name in values:
                value_by_field[config_field.name] = values[config_field.name]
        return cls(**value_by_field)

    @property
    def values(self) -> dict[str, Any]:
        """The values of all flags by their names."""
        value_by_flag_name: dict[str, Any] = {}
        for config_field in fields(self):
            field_value = getattr(self, config_field.name)
            if "part" in config_field.metadata:
                value_by_flag_name |= vars(field_value)
            else:
                value_by_flag_name[config_field.name] = field_value
        return value_by_flag_name

    def to_json(self) -> dict[str, Any]:
        """Returns the configuration as metadata.json stores it.

        Returns:
            The values of the flags by name, without secrets in URLs. The key "bucket_url", which is
            no flag, contains the URL of the bucket.
        """
        json_value_by_flag_name = {**self.values, "bucket_url": self.output_options.bucket_url}
        for flag_name, flag_value in json_value_by_flag_name.items():
            if isinstance(flag_value, str):
                json_value_by_flag_name[flag_name] = plain_url(flag_value)
        json_value_by_flag_name["mix"] = [
            (plain_url(source), weight) for source, weight in self.text_options.mix
        ]
        json_value_by_flag_name["encode"] = [
            (hook_name, plain_url(autoencoder_path))
            for hook_name, autoencoder_path in self.hook_options.encode
        ]
        json_value_by_flag_name["positions"] = str(self.text_options.positions)
        return json_value_by_flag_name

    @classmethod
    def from_json(cls, stored_values: Mapping[str, Any]) -> "Config":
        """Returns the configuration in metadata.json, which another version may have written.

        Args:
            stored_values: The result of `to_json`. A flag that is missing gets its default. Names
                that are no flags in this version are ignored.
        """
        value_by_flag_name = {
            flag_name: _as_tuple(stored_value) for flag_name, stored_value in stored_values.items()
        }
        value_by_flag_name["positions"] = parse_positions(stored_values.get("positions", ALL))
        return cls.of(value_by_flag_name)


def _values_of_part(options_class: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns only the values of the flags of one part of the configuration, by name.

    Args:
        options_class: The dataclass of the part.
        values: The values of flags by name.
    """
    option_names = [option_field.name for option_field in fields(options_class)]
    return {
        option_name: values[option_name] for option_name in option_names if option_name in values
    }


def _as_tuple(value: Any) -> Any:
    """Turns a list from JSON, and the lists in it, into tuples; returns other values unchanged."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(element) if isinstance(element, list) else element for element in value)


def _declared_flags() -> dict[str, Flag]:
    """Returns the declarations of all flags by name, with their groups, in the order of --help."""
    names_and_flags: list[tuple[str, Flag]] = []
    for config_field in fields(Config):
        if "flag" in config_field.metadata:
            names_and_flags.append((config_field.name, config_field.metadata["flag"]))
            continue
        for option_field in fields(config_field.metadata["part"]):
            flag = option_field.metadata["flag"]
            help_group = flag.help_group or config_field.metadata["help_group"]
            names_and_flags.append((option_field.name, replace(flag, help_group=help_group)))
    return dict(
        sorted(names_and_flags, key=lambda name_and_flag: GROUPS.index(name_and_flag[1].help_group))
    )


FLAGS = _declared_flags()  # name of a flag -> its declaration
