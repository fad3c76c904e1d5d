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

CARD = "dataset_card.md"
FILES = "files"  # value of `Identity.data` if the data come from files and not from the hub
# Numbers of samples between which the hub's size categories lie.
SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
# The last line of a card. It contains the SHA-256 of all lines before it.
LAST_LINE = "<!-- written by activation-extraction --report; sha256 of the lines above: {} -->\n"
# Descriptions of the files with activations, by the value of --shard_format.
FORMATS = {
    "safetensors": "safetensors files (one tensor per hook, with a row per token)",
    "pickle": "pickles (a dict from each hook to a list of samples)",
}
FIRST_COMMENT = """\
<!-- To show this card on the page of the data set, upload it with the files of the run as README.md
and add the license of the data to the lines above. -->
"""


def write_card(dataset: ActivationDataset, path: Path) -> bool:
    """Writes the card of a run, unless the path has a file that was edited or is no card.

    Args:
        dataset: The run.
        path: The path of the card, in a folder that exists.

    Returns:
        Whether the card was written. If False, the existing file is left as it is.

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
    """Returns whether a file is a card that nobody has edited since it was written.

    Args:
        content: The content of the file.
    """
    lines = content.splitlines(keepends=True)
    digest = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    return lines[-1:] == [LAST_LINE.format(digest).encode()]


def make_card(dataset: ActivationDataset) -> str:
    """Returns the card of a run: YAML between two lines of `---`, and Markdown after them."""
    lines = [*_front_matter(dataset), "", FIRST_COMMENT]
    for paragraph in _paragraphs(dataset):
        lines += [paragraph, ""]
    text = "\n".join(lines)
    return text + LAST_LINE.format(hashlib.sha256(text.encode()).hexdigest())


def size_category(samples: int) -> str:
    """Returns the hub's name for the size of a data set, such as "1K<n<10K".

    Args:
        samples: Number of samples in the data set.
    """
    # SIZES begins with 1,000, which has four digits, and every next size has one digit more.
    category = len(str(samples)) - 3
    if category <= 0:
        return f"n<{SIZES[0]}"
    if category >= len(SIZES):
        return f"n>{SIZES[-1]}"
    return f"{SIZES[category - 1]}<n<{SIZES[category]}"


def model_name(dataset: ActivationDataset) -> str:
    """Returns the name of the run's model on the hub, or the last part of its path or URL.

    It is "" if the metadata does not name the model, as for a program with a loop of its own.
    """
    path = str(_configuration(dataset).get("model_path") or "")
    return path if dataset.metadata.get("model_commit") else _last_part(path)


def _front_matter(dataset: ActivationDataset) -> Iterator[str]:
    """Yields the lines of YAML at the beginning of a card."""
    name = model_name(dataset)
    tags = ["activations", "interpretability"]
    if name:
        tags.append(_last_part(name))
    yield "---"
    if name and dataset.metadata.get("model_commit"):
        yield f"base_model: {_quoted(name)}"
    yield f"size_categories: {_quoted(size_category(len(dataset)))}"
    yield "tags:"
    yield from (f"- {_quoted(tag)}" for tag in tags)
    # The page of the data set then shows the tables of samples.
    yield "configs:"
    yield "- config_name: samples"
    yield '  data_files: "**/*.samples.parquet"'
    yield "---"


def _paragraphs(dataset: ActivationDataset) -> Iterator[str]:
    """Yields the headings and paragraphs of a card."""
    name = model_name(dataset)
    yield f"# Activations of {_code(_last_part(name)) if name else 'an unnamed model'}"
    yield "## Model"
    yield " ".join(_model_sentences(dataset))
    yield "## Data"
    yield " ".join(_data_sentences(dataset))
    yield "## Hooks"
    rows = ["| hook | width | dtype |", "|---|---|---|"]
    for hook, width in dataset.hooks.items():
        rows.append(f"| {_code(hook)} | {width:,} | {dataset.dtypes[hook].name} |")
    yield "\n".join(rows)
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
    configuration = _configuration(dataset)
    name = model_name(dataset)
    commit = dataset.metadata.get("model_commit")
    if not name:
        yield "The metadata of the run does not name the model."
    elif commit:
        yield f"{_code(name)} at commit {_code(commit)}."
    else:
        yield f"{_code(name)}, from a folder of the author."
    model = dataset.metadata.get("model") or {}
    if "model_type" in model:
        yield f"It is a {_code(model['model_type'])} model of {model['num_hidden_layers']} layers."
    if adapter := configuration.get("lora"):
        yield f"The LoRA adapter {_code(_public_name(adapter))} was merged into it."
    autoencoders = [path for _, path in configuration.get("encode") or ()]
    if autoencoders:
        names = ", ".join(_code(_public_name(path)) for path in autoencoders)
        yield f"Autoencoders: {names}."
    if dataset.identity.dtype:
        yield f"Computed in {_code(dataset.identity.dtype)}."


def _data_sentences(dataset: ActivationDataset) -> Iterator[str]:
    identity = dataset.identity
    configuration = _configuration(dataset)
    if not identity.from_dataset:
        yield "A program with a loop of its own has stored the samples."
        return
    mixture = configuration.get("mix") or ()
    if mixture:
        revisions = dict(entry.rsplit("@", 1) for entry in identity.data_revision.split())
        sources = []
        for source, weight in mixture:
            revision = revisions.get(source)
            shown_name = _code(source if revision else _last_part(source))
            commit = f" at commit {_code(revision)}" if revision else ""
            sources.append(f"{shown_name}{commit} (weight {weight:g})")
        yield f"A mixture of {', '.join(sources)}."
    elif identity.data == FILES:
        path = str(configuration.get("dataset_path") or FILES)
        yield f"Files: {_code(path if path.startswith('hf://') else _last_part(path))}."
    else:
        yield f"{_code(identity.data)} at commit {_code(identity.data_revision)}."
    length = f"{identity.text.max_seq_length:,}"
    if identity.text.long_documents == "split":
        yield f"Rows of more than {length} tokens are split into several samples."
    else:
        yield f"A sample is one row, cut to its first {length} tokens."


def _token_sentences(dataset: ActivationDataset) -> Iterator[str]:
    text = dataset.identity.text
    commits = dataset.shards.commits
    size = sum(commit.bytes for commit in commits)
    yield (
        f"{counted(dataset.tokens, 'token')} of {counted(len(dataset), 'sample')}, in "
        f"{counted(len(commits), 'shard')} ({size / 1e6:,.1f} MB)."
    )
    if not dataset.complete:
        yield "The run is not complete."
    if str(text.positions) != "all":
        yield f"Only some positions of each sample are stored: {_code(text.positions)}."
    if text.roles:
        yield f"Only tokens with these roles are stored: {', '.join(text.roles)}."
    if text.drop_token_ids:
        yield f"Tokens with these ids are left out: {', '.join(map(str, text.drop_token_ids))}."
    if text.keep_columns:
        yield f"Columns kept from the data: {', '.join(map(_code, text.keep_columns))}."


def _files(dataset: ActivationDataset) -> str:
    """Returns a description of the files that contain the activations."""
    storage = dataset.identity.storage
    compressed = "gzipped " if storage.shard_format == "pickle" and storage.compress_shards else ""
    return compressed + FORMATS[storage.shard_format]


def _configuration(dataset: ActivationDataset) -> dict[str, Any]:
    """Returns the flags of the run; {} for a program with a loop of its own."""
    return dataset.metadata.get("configuration") or {}


def _public_name(path: str) -> str:
    """Returns a name on the hub as it is; for a local path or a URL, returns its last part."""
    is_private = "://" in path or path[:1] in "/.~"
    return _last_part(path) if is_private else path


def _last_part(path: str) -> str:
    """Returns the last part of a path, or of a URL without its secrets."""
    return PurePath(visible(path)).name


def _code(text: object) -> str:
    """Returns text as Markdown code, which may stand in a table."""
    return f"`{visible(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _quoted(text: str) -> str:
    """Returns text as a string in YAML, for which the syntax of JSON is valid, too."""
    return json.dumps(visible(text), ensure_ascii=False)
