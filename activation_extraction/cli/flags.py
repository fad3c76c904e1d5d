"""The table of flags, and the configuration that they make.

`Config` is a run as its user asks for it. It consists of parts, which are frozen dataclasses of
flags; each part goes unchanged to the package that uses it. Every flag is declared once, with its
meaning and default: as a field of a part, or of `Config` itself if it selects the program's action
or how the program logs. config.py makes the command line and --help from this table, and checks
whether flags are consistent. Every package may import the parts from here, so this module imports
neither argparse nor NumPy.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from activation_extraction.cli.declare import (
    Flag,
    Group,
    Variables,
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
    rows,
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

DATASET = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")  # name, config, split
DEMO_MAX_SEQ_LENGTH = 256
LOOKING = ("status", "verify", "report", "export")
# At most one of these flags may be given.
MODES = (*LOOKING, "repair", "overwrite", "list_hooks", "plan")
# With these, a machine has no share of the user's data.
WITHOUT_SHARES = (*LOOKING, "plan", "list_hooks", "demo")
GIGABYTE = 10**9
MAX_WAITING_BYTES = 16 * GIGABYTE

# The groups of --help.
MODEL = Group("model")
EXTRACT = Group("what to extract")
TOKENS = Group(
    "which tokens to keep", "the model always reads whole samples; only kept tokens are stored"
)
TEXT = Group("text")
MACHINES = Group("several machines", "each with its own share of the data")
COMPUTING = Group("computing")
HOSTS = Group("several hosts as one", "start the same command on every host of a pod")
OUTPUT = Group("output")
UPLOAD = Group(
    "upload",
    "credentials come from the environment: for Google Cloud, gcloud auth application-default "
    "login, GOOGLE_APPLICATION_CREDENTIALS or the machine's service account; for S3, AWS_* "
    "variables; for Azure, AZURE_STORAGE_* variables. README.md names them",
)
PLAN = Group(
    "before a machine is rented",
    "with these flags beside those of a run, the run is estimated and does not start. This needs "
    "neither weights nor data nor an accelerator, only the model's config.json; the sizes of "
    "released Qwen models are known even if the hub cannot be reached",
)
LOOK = Group(
    "looking at a run",
    "these flags extract nothing. They look at the bucket if --upload_to_gcs is given, otherwise "
    "at --output_dir, which may be a URL here",
)
GENERAL = Group("general")
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
    LOOK,
    GENERAL,
)


def _all_layers(ranges: list[tuple[int, ...] | str]) -> tuple[int, ...] | str:
    return "all" if "all" in ranges else each_once([n for layers in ranges for n in layers])


def _ids_and_names(tokens: list[int | str]) -> tuple[int | str, ...]:
    return tuple(sorted(set(tokens), key=lambda item: (isinstance(item, str), item)))


@dataclass(frozen=True)
class ModelOptions:
    """The model and its dtype. The notes of --help describe all fields."""

    model_path: str = flag(
        "the model, a Qwen or Llama 3 checkpoint: a folder with config.json, safetensors and "
        "tokenizer, local or in a bucket (gs://BUCKET/FOLDER), or the name of a model on the hub "
        "(Hugging Face)",
        "Qwen/Qwen2.5-0.5B",
        metavar="PATH",
    )
    model_revision: str | None = flag(
        "the branch, tag or commit of a model on the hub",
        default_is="the commit that the run began with; for a new one, the newest commit",
    )
    lora: str | None = flag(
        "a LoRA adapter in PEFT's format (adapter_config.json, adapter_model.safetensors): a "
        "folder, local or in a bucket, or the name of an adapter on the hub. It is merged into the "
        "weights in float32 while they are read. If a tokenizer or chat template is stored with "
        "the adapter and differs from the model's, the run uses the adapter's",
        default_is="none",
        metavar="PATH",
    )
    dtype: str = flag(
        "the dtype of the weights and of matrix products, whose sums are float32",
        "auto",
        default_is="auto, which is bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )


@dataclass(frozen=True)
class HookOptions:
    """The hooks whose activations or codes are stored, and the dtype of what is stored.

    The notes of --help describe all fields.

    Attributes:
        layers_to_extract: Layers, "all", or None for the default layers.
        encode: Hook and path of each autoencoder. The hook is "" if it is not given.
    """

    layers_to_extract: tuple[int, ...] | str | None = flag(
        "the layers to extract from, counted from 0: numbers, ranges such as 1-3 (inclusive), or "
        "all",
        default_is=f"{DEFAULT_LAYERS[0]}-{DEFAULT_LAYERS[-1]}, clipped to the model's depth",
        parse=layers,
        collect=_all_layers,
        nargs="+",
        metavar="N|N-M|all",
    )
    activation_type: str = flag(
        "which activations of these layers. residual: the residual stream after the block; attn, "
        "mlp: what the attention or the MLP of the block adds to that stream",
        "residual",
        choices=("residual", "mlp", "attn"),
    )
    hook_names: tuple[str, ...] | None = flag(
        "the hooks to extract, instead of the two flags above: names or globs as in "
        "TransformerLens, such as 'blocks.*.mlp.hook_in', or of inputs and outputs of Hugging Face "
        "modules, such as 'model.layers.20.mlp.output' (--list_hooks prints all). A glob matches "
        "large hooks, such as logits, only if it ends in their name. loss is the loss at each "
        "token, given the tokens before it; entropy, logits.top_ids and logits.top_logprobs "
        "describe the prediction of the token after it",
        excludes=("layers_to_extract", "activation_type"),
        nargs="+",
        metavar="GLOB",
    )
    top_logits: int = number(
        "how many of the most likely next tokens logits.top_ids and logits.top_logprobs contain",
        DEFAULT_TOP_LOGITS,
        needs="hook_names",
        metavar="K",
    )
    encode: tuple[tuple[str, str], ...] = several(
        "store codes, the active features of sparse autoencoders or transcoders, instead of "
        "activations. SAE is a folder or file, local or in a bucket, or ORG/REPO/FOLDER on the "
        "hub, in the format of Qwen Scope (layerN.sae.pt), SAELens 6, sparsify, Llamascopium or "
        "circuit_tracer. HOOK= is needed if the files do not name the hook, or if they hold an "
        "autoencoder for each layer",
        hook_and_path,
        collect=each_once,
        metavar="[HOOK=]SAE",
    )
    encode_most: int | None = number(
        "store at most K features of each token, those with the largest values; the run counts the "
        "features that this leaves out",
        default_is="the k of autoencoders with a top k, otherwise 256",
        needs="encode",
        metavar="K",
    )
    keep_activations: bool = switch(
        "store the activations that are encoded beside their codes", needs="encode"
    )
    activation_dtype: str = flag(
        "the dtype of the stored activations. float8 takes half as many bytes as bfloat16, and 4 "
        "more per token and hook. It needs --shard_format safetensors and is read as float32, "
        "float16 or bfloat16; the run measures its error on some of the tokens",
        "auto",
        default_is="auto, which is the --dtype",
        choices=("auto", "float32", "float16", "bfloat16", "float8"),
    )


@dataclass(frozen=True)
class TextOptions:
    """The text that the model reads, and which of its tokens are stored.

    The notes of --help describe all fields.

    Attributes:
        drop_token_ids: Ids in ascending order, then names of tokens.
        dataset_name: Data set of the hub; None if there are files or a mixture instead.
        mix: Source and weight of each source of a mixture.
        chat_template_args: Name and value of each variable.
    """

    positions: Positions = flag(
        "which tokens of each sample to store. all, last, first:N, last:N; every:N (positions 0, "
        "N, 2N, ...); a slice as in Python, such as 4:-1; random:N, random:N:SEED or "
        "random:N:SEED:FROM with a whole number N, which stores N random tokens of each sample, "
        "from position FROM on (all of these tokens if there are fewer); random:P or random:P:SEED "
        "with a probability P, which stores each token with this probability (SEED and FROM are 0 "
        "unless they are set); last_of_turn, the last token "
        "of every turn of a conversation. With --roles, last_of_turn is the last token that has "
        "one of these roles, such as <|im_end|>; without --roles, it is often the new line after "
        "it",
        Positions(),
        parse=parse_positions,
        metavar="RULE",
        content=True,
        group=TOKENS,
    )
    roles: tuple[str, ...] = several(
        "store only the tokens with these roles in a conversation; --positions then counts only "
        "these tokens. A turn is one message with its header. Its <|im_end|> has the role of the "
        "message, </think> has the role thinking, and headers and text between turns have the role "
        "template",
        default_is="all",
        needs="messages_column",
        choices=ROLES,
        collect=each_once,
        metavar="ROLE",
        content=True,
        group=TOKENS,
    )
    drop_token_ids: tuple[Any, ...] = several(
        "do not store these tokens, even if --positions selects them: ids, or names as in the "
        "tokenizer, such as '<|im_end|>'. A number is always an id",
        token,
        collect=_ids_and_names,
        metavar="ID|NAME",
        content=True,
        group=TOKENS,
    )
    dataset_name: str | None = flag(
        "a data set on the hub, whose rows are streamed", default_is=DATASET[0]
    )
    dataset_config: str | None = flag(
        "the configuration of the data set on the hub",
        default_is=f"{DATASET[1]} for the default data set, otherwise the data set's own",
    )
    dataset_split: str = flag("the split of the data set on the hub", DATASET[2])
    dataset_path: str | None = flag(
        "your own files instead of a data set on the hub: a file, a folder that holds one split, "
        "or a glob, local or as a URL. The files are .jsonl, .ndjson, .json (an array of objects, "
        "or lines) or .csv (with a header), each also compressed (.gz, .zst, .bz2, .xz); .parquet; "
        ".arrow; or what save_to_disk of `datasets` has written. Names that begin with . or _ are "
        "left out",
        excludes=("dataset_name", "dataset_config", "dataset_split"),
        metavar="PATH",
    )
    mix: tuple[tuple[str, float], ...] = several(
        "several sources instead of one, each with its share of the documents. SOURCE is a path as "
        "for --dataset_path, or NAME:CONFIG:SPLIT of a data set on the hub. When a source runs "
        "out, the others continue",
        weighted,
        excludes=("dataset_name", "dataset_config", "dataset_split", "dataset_path"),
        metavar="SOURCE=WEIGHT",
    )
    text_column: str = flag(
        "the column with the text. In rows without this column, the columns train and test of an "
        "ARC-AGI task become a prompt",
        "text",
        content=True,
    )
    messages_column: str | None = flag(
        "the column with a conversation: messages with role and content, or with from and value. "
        "The chat template turns them into one text, together with the tools in the column tools. "
        "If the template leaves out text of a message, other than thinking, the row cannot be "
        "used. Tokens get a role and a turn only if the template writes turns between <|im_start|> "
        "and <|im_end|>, as Qwen's templates do",
        excludes=("text_column",),
        content=True,
    )
    chat_template: str | None = flag(
        "a file with the chat template for all rows",
        default_is="the adapter's or the model's; if it has several, tool_use for rows with tools",
        needs="messages_column",
        metavar="FILE",
    )
    chat_template_args: tuple[tuple[str, Any], ...] = several(
        "extra variables for the chat template, such as enable_thinking=false",
        argument,
        default_is="nothing",
        needs="messages_column",
        collect=lambda arguments: tuple(dict(arguments).items()),
        metavar="NAME=VALUE",
    )
    ids_column: str | None = flag(
        "the column with token ids, which are used as they are, without a tokenizer",
        excludes=("text_column", "messages_column"),
        content=True,
    )
    mask_column: str | None = flag(
        "the column with a 0 or 1 for each token id of --ids_column. Tokens with 0 are context, "
        "which the model reads but the run does not store; in a column called attention_mask, they "
        "are padding, which the model does not read either",
        default_is="all tokens are stored",
        needs="ids_column",
        content=True,
    )
    id_column: str | None = flag(
        "the column with the id of each row, which is stored as doc_id",
        default_is="id, or task_id of ARC-AGI, in rows that have it",
        content=True,
    )
    keep_columns: tuple[str, ...] = several(
        "the columns of the data set that are stored with each sample, such as a label",
        collect=each_once,
        content=True,
    )
    special_tokens: str = flag(
        "which special tokens plain text gets. tokenizer: those that the model's tokenizer adds at "
        "the front and at the end; none: no special tokens. Llama 3's tokenizer adds "
        "<|begin_of_text|> at the front, that of Qwen's embedding models adds <|endoftext|> at the "
        "end, and those of Qwen's chat and base models add nothing. Conversations and token ids "
        "never get any",
        "tokenizer",
        choices=("tokenizer", "none"),
    )
    long_documents: str = flag(
        "what happens to documents that are longer than --max_seq_length. cut: the rest is left "
        "out; split: the document becomes several samples, each of which counts for --max_samples "
        "and has its own --positions",
        "cut",
        choices=("cut", "split"),
        content=True,
    )
    overlap: int = number(
        "with --long_documents split: how many tokens of the previous piece each piece repeats. "
        "They are only context, so every token is stored once",
        0,
        least=0,
        unit=" tokens",
        content=True,
    )
    shuffle_documents: int | None = number(
        "read the documents in a random order that depends on this seed: files and row groups are "
        "shuffled, and so are the rows within blocks of 1,024",
        least=0,
        default_is="the order of the data set",
        metavar="SEED",
        content=True,
    )
    skip_bad_rows: bool = switch(
        "skip and count rows that cannot be used, for example because they are not JSON, or "
        "because their column is missing or does not hold text. The flag may be added when a run "
        "is continued (default: such a row ends the run)",
        content=True,
    )
    max_seq_length: int = number(
        "the number of tokens per row of a batch, and the most per sample; see --long_documents "
        "for longer documents",
        2048,
        default_is=f"2048 tokens; {DEMO_MAX_SEQ_LENGTH} with --demo",
        metavar="TOKENS",
        content=True,
        group=COMPUTING,
    )


@dataclass(frozen=True)
class ComputingOptions:
    """The way in which a step is computed. The values do not depend on it beyond rounding.

    The notes of --help describe all fields.

    Attributes:
        batch_size: Rows per host and step, "auto", or None for the default (run/batch_size.py).
        mesh_type: None if --mesh_shape is given instead.
    """

    batch_size: int | str | None = flag(
        "the number of rows per host and step; several samples share a row. auto: as many rows as "
        "fit in the memory of the devices and of the host, at most 512; on a CPU, the default",
        default_is="8; on a CPU as many as 2,048 tokens fill, at most 8, rounded up to a multiple "
        "of the devices",
        parse=rows,
        metavar="ROWS|auto",
    )
    mesh_type: str | None = flag(
        "how the devices are arranged. auto: as makes the step shortest, with weights split as "
        "little as possible (over the axes data, fsdp, expert and model); 1d: all devices along "
        "the axis model; 2d: data x model, with one host per index of data; 3d: pipeline x data x "
        "model",
        "auto",
        choices=("auto", "1d", "2d", "3d"),
    )
    mesh_shape: tuple[int, ...] | None = flag(
        "the size of each axis of the mesh",
        default_is="as --mesh_type says",
        variables=Variables(("TPU_MESH_CONFIG",), unless=("mesh_type", "no_data_parallel")),
        parse=sizes,
        metavar="A,B[,C]",
    )
    mesh_axes: tuple[str, ...] | None = flag(
        f"the names of the mesh's axes, from {', '.join(MESH_AXES)}. pipeline splits the layers; "
        "data, fsdp and expert split the rows; fsdp and model split the weights, and expert splits "
        "the weights of experts",
        default_is="data,model for two sizes, pipeline,data,model for three",
        variables=Variables(("TPU_AXIS_NAMES",), only_with="mesh_shape"),
        parse=axes,
        metavar="NAME,...",
    )
    use_data_parallel: bool = pair(
        "use all devices of each host", "no_data_parallel", "use only one device of each host"
    )
    compilation_cache: str | None = flag(
        "the folder in which JAX keeps compiled programs for the next start, or off for none. With "
        "--multihost, this is a folder or URL that all hosts share",
        default_is="activation_extraction/jax in XDG_CACHE_HOME or ~/.cache; off with --multihost",
        variables=Variables(("JAX_COMPILATION_CACHE_DIR",)),
        parse=path,
        metavar="FOLDER",
        per_host=True,
    )


@dataclass(frozen=True)
class HostOptions:
    """The number of this process among the machines and hosts of a run, and its timeouts.

    The notes of --help describe all fields.
    """

    machine_id: int = number(
        "the number of this machine, counted from 0. Each machine extracts its own share of the "
        "data. The templates in deploy/ number their tasks. A script of your own must set "
        "MACHINE_ID and TOTAL_MACHINES, or give both flags, because variables of schedulers are "
        "not read: otherwise, each of its tasks is machine 0 of 1. --demo and flags that only look "
        "or plan ignore the two variables",
        0,
        least=0,
        variables=Variables(("MACHINE_ID",), unless=WITHOUT_SHARES),
        metavar="I",
        group=MACHINES,
    )
    total_machines: int = number(
        "the number of independent machines that share the data. It may be much larger than the "
        "number of machines that run at a time",
        1,
        variables=Variables(("TOTAL_MACHINES",), unless=WITHOUT_SHARES),
        group=MACHINES,
    )
    multihost: bool = switch(
        "join the other hosts of the pod. On Cloud TPU, GKE and Slurm, this flag alone is enough; "
        "elsewhere, the three flags below are needed, too"
    )
    coordinator_address: str | None = flag(
        "with --multihost: the address of host 0",
        variables=Variables(
            ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS"), only_with="multihost"
        ),
        needs="multihost",
        parse=address,
        metavar="HOST:PORT",
        per_host=True,
    )
    host_id: int | None = number(
        "with --multihost: the number of this host, counted from 0",
        least=0,
        variables=Variables(("JAX_PROCESS_INDEX", "HOST_ID"), only_with="multihost"),
        needs="multihost",
        metavar="I",
        per_host=True,
    )
    num_hosts: int | None = number(
        "with --multihost: the number of hosts",
        variables=Variables(("JAX_PROCESS_COUNT", "NUM_HOSTS"), only_with="multihost"),
        needs="multihost",
    )
    connect_timeout: int = seconds("how long to wait for the other hosts at the start", 300)
    heartbeat_timeout: int = seconds(
        "how long a host may be silent before the others take it for dead", 100
    )
    stall_timeout: int = seconds(
        "end the process if no step finishes for this long; skipping samples that are already "
        "stored counts as progress",
        600,
    )


@dataclass(frozen=True)
class OutputOptions:
    """The folders that the shards are stored in. The notes of --help describe all fields."""

    output_dir: str = flag(
        "the folder for the shards. To continue a run that was interrupted, give the same command "
        "again",
        "activations",
        path,
        metavar="FOLDER",
        per_host=True,
    )
    min_free_gb: float = gigabytes(
        "refuse to start if the disk of --output_dir has less free space than this",
        0.0,
        parse=positive_or_0,
    )
    upload_to_gcs: bool = switch(
        "store the shards in a bucket, straight from memory. A shard counts as stored only once "
        "the bucket has confirmed it",
        needs="gcs_bucket",
        group=UPLOAD,
    )
    gcs_bucket: str | None = flag(
        "the name of a bucket of Google Cloud Storage, or the URL of any bucket, which begins with "
        "gs://, s3://, s3a://, az://, abfs:// or abfss://",
        parse=bucket,
        needs="upload_to_gcs",
        group=UPLOAD,
    )
    gcs_prefix: str = flag(
        "the folder in the bucket, in which every machine and host gets a folder of its own",
        "activations",
        in_bucket,
        needs="upload_to_gcs",
        metavar="PATH",
        group=UPLOAD,
    )
    upload_timeout: int = number(
        "how long an upload may keep failing, or may wait for an answer once all is sent, before "
        "the run stops. The time for sending it comes on top, at most 8 s per MB",
        300,
        unit=" s",
        metavar="SECONDS",
        group=UPLOAD,
    )

    @property
    def bucket_url(self) -> str | None:
        """The folder in the bucket that contains those of machines and hosts; None without upload.

        The URL has the secrets that --gcs_bucket has.
        """
        if not self.upload_to_gcs or self.gcs_bucket is None:
            return None
        bucket = self.gcs_bucket.rstrip("/")
        return f"{bucket if '://' in bucket else f'gs://{bucket}'}/{self.gcs_prefix.strip('/')}"

    @property
    def location(self) -> str:
        """The URL or path of the run: the bucket's if there is one, otherwise the local folder."""
        return self.bucket_url or self.output_dir


@dataclass(frozen=True)
class StorageOptions:
    """How activations are stored.

    Attributes:
        shard_size_gb: Size of a shard's activations before compression, in 10^9 bytes. A shard has
            at least one sample.
        shard_format: "pickle" or "safetensors".
        compress_shards: Whether pickles are compressed with gzip. Safetensors never are.
        max_samples: The most samples that the caller adds; None for any number. No sample is
            refused for this limit, but a run that already has more is refused when it begins.
        max_tokens: The most tokens of all these samples, with the same meaning.
        overwrite: Whether to begin anew instead of continuing what is stored already.
        delete_local_after_upload: Whether shards are stored in the bucket alone, if there is one,
            and not locally as well.
        writer_threads: Number of threads that compress shards and add up statistics. None for one
            for each core.
        waiting_shards_gb: The most memory for activations that wait to be stored, in 10^9 bytes.
            None for a quarter of the available memory, but at most 16 GB and at least two shards.
    """

    shard_size_gb: float = gigabytes(
        "the size of the activations in a shard, before compression",
        1.0,
        content=True,
    )
    shard_format: str = flag(
        "pickle: a dict that Python reads without this program; safetensors: one contiguous tensor "
        "per hook, so that one hook is read without the others. Readers compare every MiB with its "
        "crc32c, and --verify compares the whole file with its sha256",
        "pickle",
        choices=SHARD_FORMATS,
        content=True,
    )
    compress_shards: bool = pair(
        "compress pickles with gzip; safetensors are never compressed",
        "no_compress_shards",
        "write pickles as plain .pkl files",
        content=True,
    )
    max_samples: int | None = number(
        "store at most N samples on this machine. Its hosts have equal shares of N. A host that "
        "runs out of rows stores fewer samples, and the run names it at the end",
        default_is="all",
        group=TEXT,
    )
    max_tokens: int | None = number(
        "store at most N tokens on this machine, shared among its hosts like --max_samples. The "
        "last sample is cut, so that a host stores exactly its share unless it runs out of rows; "
        "it stays cut if N is raised later",
        default_is="all",
        group=TEXT,
    )
    overwrite: bool = switch(
        "begin a new run at every start, in place of the one in --output_dir and in the bucket, of "
        "which nothing is left at the end (default: continue that run)",
        group=OUTPUT,
    )
    delete_local_after_upload: bool = pair(
        "with --upload_to_gcs: write no shards to --output_dir, only metadata.json and "
        "metrics.jsonl",
        "keep_local",
        "write the shards to --output_dir as well, beside those in the bucket",
        group=UPLOAD,
    )
    writer_threads: int | None = number(
        "the number of threads that compress shards and add up their statistics",
        default_is="one for each core",
    )
    waiting_shards_gb: float | None = gigabytes(
        "the most memory for activations that wait to be stored. When it is full, computing waits. "
        "It has to hold two shards",
        default_is="a quarter of the available memory, at most 16, but at least two shards",
    )

    @property
    def limits(self) -> dict[str, int | None]:
        """The most samples and tokens to store, by the names that metadata.json has for them."""
        return {"max_samples": self.max_samples, "max_tokens": self.max_tokens}

    @property
    def shard_bytes(self) -> float:
        """The size of a shard's activations before compression, in bytes."""
        return self.shard_size_gb * GIGABYTE

    @property
    def waiting_bytes(self) -> float:
        """The most bytes that may wait in memory to be stored."""
        if self.waiting_shards_gb is not None:
            return self.waiting_shards_gb * GIGABYTE
        return max(min(available_memory() / 4, MAX_WAITING_BYTES), 2 * self.shard_bytes)

    @property
    def threads(self) -> int:
        """The number of threads that compress shards and add up statistics."""
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
            cores = len(os.sched_getaffinity(0))
        return self.writer_threads or cores


@dataclass(frozen=True)
class PlanOptions:
    """The machine that --plan estimates a run for, and what is known of it.

    The notes of --help describe all fields.

    Attributes:
        plan: Name of the machine; None if nothing is estimated.
    """

    plan: str | None = flag(
        "estimate what this run would take on a machine, such as v5e:8x8, v5litepod-64, v4-32, "
        "h100 or h100-8: whether it fits, how many bytes it stores, and how many hours it takes, "
        "which is a guess without --tokens_per_second. The estimate is for the mesh of auto and "
        "for the one that the flags ask for. If the package libtpu is installed, the TPU compiler "
        "also says whether the program fits",
        metavar="TOPOLOGY",
    )
    chips_per_host: int | None = number(
        "with --plan: the number of chips of each host",
        default_is="4 TPU chips, but all of v5e-1, v5e-8, v6e-1 and v6e-8; up to 8 GPUs",
        needs="plan",
    )
    tokens_per_second: float | None = flag(
        "with --plan: the stored tokens per second of each host. A run with --max_samples 200 on "
        "such a machine prints them at its end, in the line that begins with 'time:'",
        default_is="a guess from the chips' peak speed",
        parse=positive,
        needs="plan",
        metavar="X",
    )
    chip_hour_dollars: tuple[float, ...] | None = flag(
        "with --plan: the price in dollars of a chip for an hour, on demand and, after a comma, on "
        "a spot machine. The estimate then contains dollars, too",
        default_is="none",
        parse=dollars,
        needs="plan",
        metavar="X[,Y]",
    )


@dataclass(frozen=True)
class LookingOptions:
    """What to do with a stored run. The notes of --help describe all fields.

    Attributes:
        verify_samples: Number of samples that --verify recomputes; 0 without --model_path.
        report: File to write the report to, "" for the default one; None without --report.
    """

    status: bool = switch(
        "show what all machines and hosts have stored, how fast they are and when they will be "
        "done, also during a run. Exits with status 1 if files are damaged or missing, or if a "
        "host has failed or has been silent for 15 minutes (or as long as five of its shards take, "
        "if this is longer)"
    )
    aggregate: bool = switch(
        "with --status: also write the totals to aggregated_metadata.json, in the same place as "
        "the run",
        needs="status",
    )
    json: bool = switch(
        "with --status or --plan: print one JSON object. With --plan, it contains meshes, best "
        "(the fastest mesh that fits), hours and dollars as [least, most], and terabytes before "
        "compression; null stands for what is unknown, such as dollars without --chip_hour_dollars",
        needs="status or plan",
    )
    verify: bool = switch(
        "compare every shard with its sha256 and its JSON file, and check that every sample is "
        "there once. With --model_path (and the --lora and --encode of the run), also recompute "
        "some samples. Lists every problem, and exits with status 1 if there is any"
    )
    verify_samples: int = number(
        "with --verify and --model_path: how many random samples to recompute", 8, needs="verify"
    )
    report: str | None = flag(
        "write an HTML page about the activations, also during a run: norms by layer and position, "
        "outlier tokens and dimensions, lengths of documents, throughput",
        default_is="report.html in --output_dir, or in the working directory for a bucket",
        parse=path_or_default,
        nargs="?",
        const="",
        metavar="FILE",
    )
    export: str | None = flag(
        "copy a finished run to --export_dir, in the files of another program. sae_lens: cached "
        "activations of SAELens. speculators, specforge: for training EAGLE-3 draft models, a file "
        "for each sample, in which the kept column loss_mask or the roles make the mask of the "
        "loss. delphi: the cache of codes from which delphi explains features, without codes of at "
        "most 1e-5 and without the last tokens of a sample that do not fill a row of 64. nla: for "
        "natural language autoencoders, a Parquet file with each stored token of one hook "
        "blocks.K.hook_resid_post and the text before it; unless the run stores all tokens, its "
        "data is read again (from --dataset_path if it has moved). --hook_names chooses hooks (all "
        "without it). The command prints how many tokens and codes it leaves out",
        needs="export_dir",
        choices=EXPORTS,
    )
    export_dir: str | None = flag(
        "the folder that --export creates; it must not exist yet",
        parse=path,
        needs="export",
        metavar="FOLDER",
    )

    @property
    def requested(self) -> bool:
        """Whether to look at what is stored instead of extracting."""
        return self.status or self.verify or self.report is not None or self.export is not None

    @property
    def needs_model(self) -> bool:
        """Whether looking needs the model, to recompute samples, or its tokenizer, for texts."""
        return self.verify_samples > 0 or self.export == "nla"


def content_flags(options: Any) -> dict[str, Any]:
    """Returns the values of those flags of a part that decide the content of shards, by name."""
    return {
        item.name: getattr(options, item.name)
        for item in fields(options)
        if item.metadata["flag"].content
    }


@dataclass(frozen=True)
class Config:
    """A run, as the user asks for it.

    It consists of the parts, and of the flags that select the program's action or how it logs.
    """

    model: ModelOptions = part(ModelOptions, MODEL)
    hooks: HookOptions = part(HookOptions, EXTRACT)
    text: TextOptions = part(TextOptions, TEXT)
    computing: ComputingOptions = part(ComputingOptions, COMPUTING)
    hosts: HostOptions = part(HostOptions, HOSTS)
    output: OutputOptions = part(OutputOptions, OUTPUT)
    storage: StorageOptions = part(StorageOptions, OUTPUT)
    planning: PlanOptions = part(PlanOptions, PLAN)
    looking: LookingOptions = part(LookingOptions, LOOK)
    list_hooks: bool = switch(
        "print the hooks of the model with all their names, widths, dtypes and bytes per token, "
        "then exit. Reads no weights: only config.json, the special tokens in tokenizer.json and, "
        "in a local folder, the names of the tensors",
        group=EXTRACT,
    )
    repair: bool = switch(
        "together with the flags of the run: compute the samples of damaged and missing shards "
        "again, then verify the folder, and exit with status 1 if anything is still wrong",
        group=OUTPUT,
    )
    demo: bool = switch(
        "make a tiny model and sample documents in --output_dir/demo_inputs, and extract from them",
        excludes=(
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
        group=GENERAL,
    )
    log_every: int = number(
        "the time between two lines of metrics.jsonl and, where the output is no terminal, between "
        "two lines of progress",
        30,
        unit=" s",
        metavar="SECONDS",
        group=GENERAL,
    )
    verbose: bool = switch(
        "log every step and shard, on all hosts (default: hosts other than 0 log only problems)",
        per_host=True,
        group=GENERAL,
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Config":
        """Makes the configuration of the values of flags.

        Args:
            values: Name of a flag -> value. A flag that is left out gets its default. Names that
                are no flags are ignored.
        """
        content = {}
        for item in fields(cls):
            if kind := item.metadata.get("part"):
                content[item.name] = kind(**_present(kind, values))
            elif item.name in values:
                content[item.name] = values[item.name]
        return cls(**content)

    @property
    def values(self) -> dict[str, Any]:
        """The values of all flags by their names."""
        values: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            values |= vars(value) if "part" in item.metadata else {item.name: value}
        return values

    def to_json(self) -> dict[str, Any]:
        """Returns the configuration as metadata.json records it: by flag, URLs without secrets."""
        content = {
            name: plain_url(value) if isinstance(value, str) else value
            for name, value in {**self.values, "bucket_url": self.output.bucket_url}.items()
        }
        mix = [(plain_url(source), weight) for source, weight in self.text.mix]
        encode = [(hook, plain_url(name)) for hook, name in self.hooks.encode]
        positions = str(self.text.positions)
        return {**content, "mix": mix, "encode": encode, "positions": positions}

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any]) -> "Config":
        """Reads the result of `to_json`, perhaps of another version with other flags.

        Flags that are not recorded get their default, and recorded ones that are unknown now are
        ignored.
        """
        values = {name: _as_tuple(value) for name, value in recorded.items()}
        return cls.of({**values, "positions": parse_positions(recorded.get("positions", ALL))})


def _present(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the values that are for fields of a dataclass."""
    return {item.name: values[item.name] for item in fields(kind) if item.name in values}


def _as_tuple(value: Any) -> Any:
    """Returns a list of values, or of pairs, as the tuple that it was before it became JSON."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _declared_flags() -> dict[str, Flag]:
    """Returns all flags by their names, each with its group, in the order of --help."""
    flags: list[tuple[str, Flag]] = []
    for item in fields(Config):
        if "flag" in item.metadata:
            flags.append((item.name, item.metadata["flag"]))
            continue
        for declared in fields(item.metadata["part"]):
            flag = declared.metadata["flag"]
            group = flag.group or item.metadata["group"]
            flags.append((declared.name, replace(flag, group=group)))
    return dict(sorted(flags, key=lambda item: GROUPS.index(item[1].group)))


FLAGS = _declared_flags()  # name -> flag
