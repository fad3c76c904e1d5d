"""Writes the dataset card of --report, which describes a run to readers on the Hugging Face hub.

The hub shows the file README.md of a repository on the repository's page, and reads the lines of
YAML at its beginning for its search. The card has another name, so that the user decides whether to
rename it. It contains facts from the run's metadata, and no paths of the machine that made the run.
A card that somebody has changed, or a file of the same name that is no card, is never replaced.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from activation_extraction.common.errors import InputError, reason_of
from activation_extraction.common.visible import counted, visible
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.store.folder import FolderError
from activation_extraction.store.local_files import write_file
from activation_extraction.store.run_log import FORMAT_VERSION

CARD_NAME = "dataset_card.md"
# The value of `Identity.data` if the data come from files and not from the hub.
DATA_FROM_FILES = "files"
# Numbers of samples that separate the hub's size categories, such as "1K<n<10K".
SIZE_LIMITS = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
# The last line of a dataset card. It contains the SHA-256 of all lines before it, which shows
# whether somebody has edited the card.
LAST_LINE = "<!-- written by activation-extraction --report; sha256 of the lines above: {} -->\n"
# Descriptions of the files with activations, by the value of --shard_format.
FORMAT_DESCRIPTIONS = {
    "safetensors": "safetensors files (one tensor per hook, with a row per token)",
    "pickle": "pickles (a dict from each hook to a list of samples)",
}
UPLOAD_COMMENT = """\
<!-- To show this card on the page of the data set, upload it with the files of the run as README.md
and add the license of the data to the lines above. -->
"""


def write_card(dataset: ActivationDataset, path: Path) -> bool:
    """Writes the dataset card of a run, unless this would replace a file that must be kept.

    An existing file is kept if it is no dataset card, or if somebody has edited it.

    Args:
        dataset: The run.
        path: The path of the card, in a folder that exists.

    Returns:
        True if the card was written; False if an existing file was kept.

    Raises:
        InputError: If the file cannot be read or written.
    """
    try:
        if path.exists() and not is_unchanged_card(path.read_bytes()):
            return False
        write_file(path, [make_card(dataset).encode()])
    except (OSError, FolderError) as error:
        raise InputError(f"--report: {path}: {reason_of(error)}") from error
    return True


def is_unchanged_card(content: bytes) -> bool:
    """Returns whether a file is a dataset card that nobody has edited since --report wrote it.

    Args:
        content: The content of the file.
    """
    card_lines = content.splitlines(keepends=True)
    digest_without_last_line = hashlib.sha256(b"".join(card_lines[:-1])).hexdigest()
    return card_lines[-1:] == [LAST_LINE.format(digest_without_last_line).encode()]


def make_card(dataset: ActivationDataset) -> str:
    """Returns a run's dataset card: YAML between two lines of `---`, and Markdown after them."""
    card_lines = [*_front_matter(dataset), "", UPLOAD_COMMENT]
    for paragraph in _paragraphs(dataset):
        card_lines += [paragraph, ""]
    card_text = "\n".join(card_lines)
    return card_text + LAST_LINE.format(hashlib.sha256(card_text.encode()).hexdigest())


def size_category(num_samples: int) -> str:
    """Returns the hub's name for the size of a data set, such as "1K<n<10K".

    Args:
        num_samples: Number of samples in the data set.
    """
    # Category 0 is below the first limit, and category k begins at the limit with the index k - 1.
    # The first limit is 1,000, which has four digits, and each next limit has one digit more. So
    # numbers of d digits, at least four, are in category d - 3.
    size_category_index = max(len(str(num_samples)) - 3, 0)
    if size_category_index == 0:
        return f"n<{SIZE_LIMITS[0]}"
    if size_category_index >= len(SIZE_LIMITS):
        return f"n>{SIZE_LIMITS[-1]}"
    return f"{SIZE_LIMITS[size_category_index - 1]}<n<{SIZE_LIMITS[size_category_index]}"


def model_name(dataset: ActivationDataset) -> str:
    """Returns the name of the run's model on the hub, or the last part of its path or URL.

    The name is "" if the metadata does not name the model, for example because a program stored
    activations that it had computed itself.
    """
    model_path = str(_configuration(dataset).get("model_path") or "")
    return model_path if dataset.metadata.get("model_commit") else _last_part(model_path)


def _front_matter(dataset: ActivationDataset) -> Iterator[str]:
    """Yields the lines of YAML at the beginning of a run's dataset card."""
    name_of_model = model_name(dataset)
    hub_tags = ["activations", "interpretability"]
    if name_of_model:
        hub_tags.append(_last_part(name_of_model))
    yield "---"
    if name_of_model and dataset.metadata.get("model_commit"):
        yield f"base_model: {_quoted(name_of_model)}"
    yield f"size_categories: {_quoted(size_category(len(dataset)))}"
    yield "tags:"
    yield from (f"- {_quoted(hub_tag)}" for hub_tag in hub_tags)
    # This section makes the hub show the tables of samples on the page of the data set.
    yield "configs:"
    yield "- config_name: samples"
    yield '  data_files: "**/*.samples.parquet"'
    yield "---"


def _paragraphs(dataset: ActivationDataset) -> Iterator[str]:
    """Yields the headings and paragraphs of a run's dataset card, in Markdown."""
    name_of_model = model_name(dataset)
    model_phrase = _code(_last_part(name_of_model)) if name_of_model else "an unnamed model"
    yield f"# Activations of {model_phrase}"
    yield "## Model"
    yield " ".join(_model_sentences(dataset))
    yield "## Data"
    yield " ".join(_data_sentences(dataset))
    yield "## Hooks"
    hook_table_rows = ["| hook | width | dtype |", "|---|---|---|"]
    for hook_name, width in dataset.hooks.items():
        dtype_phrase = _dtype_phrase(dataset, hook_name)
        hook_table_rows.append(f"| {_code(hook_name)} | {width:,} | {dtype_phrase} |")
    yield "\n".join(hook_table_rows)
    yield "## Tokens and samples"
    yield " ".join(_token_sentences(dataset))
    yield "## Format"
    yield (
        f"Format {FORMAT_VERSION} of activation-extraction, in {_files(dataset)}. Each file has "
        "a table of its samples, sums for statistics of every dimension, and checksums beside it."
    )
    yield "## How to read it"
    yield (
        "With the packages activation-extraction and huggingface_hub, and the name of this "
        "repository in place of `ORG/NAME`:"
    )
    yield (
        "```python\n"
        "from activation_extraction import ActivationDataset\n"
        'dataset = ActivationDataset("hf://datasets/ORG/NAME")\n'
        "batch = next(dataset.batches(1024, shuffle=0))\n"
        "```"
    )


def _model_sentences(dataset: ActivationDataset) -> Iterator[str]:
    value_by_recorded_flag = _configuration(dataset)
    name_of_model = model_name(dataset)
    model_commit_hash = dataset.metadata.get("model_commit")
    if not name_of_model:
        yield "The metadata of the run does not name the model."
    elif model_commit_hash:
        yield f"{_code(name_of_model)} at commit {_code(model_commit_hash)}."
    else:
        yield f"{_code(name_of_model)}, from a folder of the author."
    model_fields = dataset.metadata.get("model") or {}
    if "model_type" in model_fields:
        model_type = _code(model_fields["model_type"])
        yield f"It is a {model_type} model of {model_fields['num_hidden_layers']} layers."
    if adapter_path := value_by_recorded_flag.get("lora"):
        yield f"The LoRA adapter {_code(_public_name(adapter_path))} was merged into it."
    autoencoder_paths = [
        autoencoder_path for _, autoencoder_path in value_by_recorded_flag.get("encode") or ()
    ]
    if autoencoder_paths:
        autoencoders_phrase = ", ".join(
            _code(_public_name(autoencoder_path)) for autoencoder_path in autoencoder_paths
        )
        yield f"Autoencoders: {autoencoders_phrase}."
    if dataset.identity.dtype:
        yield f"Computed in {_code(dataset.identity.dtype)}."


def _data_sentences(dataset: ActivationDataset) -> Iterator[str]:
    identity = dataset.identity
    value_by_recorded_flag = _configuration(dataset)
    if not identity.from_dataset:
        yield "A program with a loop of its own has stored the samples."
        return
    sources_and_weights = value_by_recorded_flag.get("mix") or ()
    if sources_and_weights:
        revision_by_source = dict(
            source_and_revision.rsplit("@", 1)
            for source_and_revision in identity.data_revision.split()
        )
        source_phrases = []
        for source_path, weight in sources_and_weights:
            source_revision = revision_by_source.get(source_path)
            source_name = _code(source_path if source_revision else _last_part(source_path))
            commit_phrase = f" at commit {_code(source_revision)}" if source_revision else ""
            source_phrases.append(f"{source_name}{commit_phrase} (weight {weight:g})")
        yield f"A mixture of {', '.join(source_phrases)}."
    elif identity.data == DATA_FROM_FILES:
        data_source_text = str(value_by_recorded_flag.get("dataset_path") or DATA_FROM_FILES)
        public_data_source_text = (
            data_source_text
            if data_source_text.startswith("hf://")
            else _last_part(data_source_text)
        )
        yield f"Files: {_code(public_data_source_text)}."
    else:
        yield f"{_code(identity.data)} at commit {_code(identity.data_revision)}."
    max_tokens_phrase = f"{identity.text.max_seq_length:,}"
    if identity.text.long_documents == "split":
        yield f"Rows of more than {max_tokens_phrase} tokens are split into several samples."
    else:
        yield f"A sample is one row, cut to its first {max_tokens_phrase} tokens."


def _token_sentences(dataset: ActivationDataset) -> Iterator[str]:
    text_options = dataset.identity.text
    shard_commits = dataset.shards.commits
    stored_bytes = sum(commit.bytes for commit in shard_commits)
    yield (
        f"{counted(dataset.tokens, 'token')} of {counted(len(dataset), 'sample')}, in "
        f"{counted(len(shard_commits), 'shard')} ({stored_bytes / 1e6:,.1f} MB)."
    )
    if not dataset.complete:
        yield "The run is not complete."
    if str(text_options.positions) != "all":
        yield f"Only some positions of each sample are stored: {_code(text_options.positions)}."
    if text_options.roles:
        yield f"Only tokens with these roles are stored: {', '.join(text_options.roles)}."
    if text_options.drop_token_ids:
        dropped_ids_text = ", ".join(map(str, text_options.drop_token_ids))
        yield f"Tokens with these ids are left out: {dropped_ids_text}."
    if text_options.keep_columns:
        yield f"Columns kept from the data: {', '.join(map(_code, text_options.keep_columns))}."


def _dtype_phrase(dataset: ActivationDataset, hook_name: str) -> str:
    """Returns the dtype of the values at a hook, in words, such as "bfloat16".

    If the values are stored in another form, the words name this form, too, such as "float8 (e4m3),
    read as float32".

    Args:
        dataset: The run.
        hook_name: The name of the hook.
    """
    dtype_name = dataset.dtypes[hook_name].name
    stored_hook = dataset.shards.stored_hook_by_name[hook_name]
    if not stored_hook.values_are_array:
        return f"codes: the values of active features, {dtype_name}"
    if stored_hook.values_are_float8:
        return f"float8 (e4m3), read as {dtype_name}"
    return dtype_name


def _files(dataset: ActivationDataset) -> str:
    """Returns a phrase for the dataset card about the format of a run's activation files."""
    storage_options = dataset.identity.storage
    compression_phrase = (
        "gzipped "
        if storage_options.shard_format == "pickle" and storage_options.compress_shards
        else ""
    )
    return compression_phrase + FORMAT_DESCRIPTIONS[storage_options.shard_format]


def _configuration(dataset: ActivationDataset) -> dict[str, Any]:
    """Returns the recorded flags of the run; {} for the run of a user's program."""
    return dataset.metadata.get("configuration") or {}


def _public_name(path: str) -> str:
    """Returns the name of an adapter or autoencoder for the dataset card, without private parts.

    The card is public, so it must not contain folders or secrets of the person who made the run.

    Args:
        path: A name on the hub, which is returned as it is, or a local path or a URL, of which the
            last part is returned.
    """
    is_path_or_url = "://" in path or path[:1] in "/.~"
    return _last_part(path) if is_path_or_url else path


def _last_part(path: str) -> str:
    """Returns the last part of a path, or of a URL without its secrets."""
    return PurePath(visible(path)).name


def _code(text: object) -> str:
    """Returns text as inline code in Markdown. It may be used in tables, because `|` is escaped."""
    return f"`{visible(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _quoted(text: str) -> str:
    """Returns a text as a quoted YAML string. It is written as in JSON, which YAML accepts, too."""
    return json.dumps(visible(text), ensure_ascii=False)
