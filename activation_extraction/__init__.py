"""Extracts activations from language models and reads them back.

extract_activations.py, beside this package, contains the main steps of a run. The packages here
contain its parts:

    cli      flags, configuration and progress
    text     rows of a data set, which become samples and batches
    model    the model, its hooks and its weights
    store    shards, commits and everything else that is written
    run      connects the model, the text and the store to a run
    dataset  reads stored runs, for training on them
    inspect  status, verification, reports and exports of stored runs
    common   shared by all others, and uses none of them

The `__init__.py` of each package lists its modules.

`ActivationDataset` reads a stored run, `paired` reads two runs as one, and `ActivationStorage`
stores activations, also those of another program. The other names in `__all__` are types of their
arguments and results. A name is imported when it is first used, so importing this package costs
nothing. None of them needs JAX or PyTorch.

These words have a meaning of their own in the code, its messages and README.

A run, and who computes it:

    run          One extraction, on all of its machines and hosts, however often its commands are
                 killed and given again.
    machine      An independent part of a run with its own part of the data; it is one host, or
                 several hosts that run one model together (a pod).
    host         A process of a machine; it reads its own rows and stores their activations.
    worker       A host of a machine, as the one that a share of the data belongs to
                 (`text.batch.Worker`).
    share        The part of the data that one worker reads.
    folder       The place for all files of one worker, local or in a bucket
                 (`store.folder.Folder`).
    identity     All that decides what a run stores; it must be the same when the run continues
                 (`store.identity.Identity`).
    fingerprint  The size of a file with a digest of some of its blocks, by which it is recognised.

From a data set to the model:

    row          An entry of a data set or of a table; a row of a batch holds the tokens of one or
                 more samples.
    column       A field of the rows of a data set or of a table.
    document     The content of one row of the data set: a text, a conversation, or token ids.
    sample       A document, cut to --max_seq_length tokens if it is longer, or a piece of one;
                 samples are numbered, and each is stored once.
    piece        One of the samples into which --long_documents split divides a long document.
    group        Consecutive samples of the stream that are packed into rows together.
    batch        The rows that a host feeds to the model in one step; when a run is read, tokens
                 with their activations (`dataset.token_batch.TokenBatch`).
    mark         A place in a worker's stream of samples from which the run can continue
                 (`text.mark.Mark`).

From the model to the files:

    hook         A point in the model whose values can be stored, under TransformerLens's name.
    kind         Of hooks: the same point in every layer (`model.hooks.HookKind`). Of values:
                 dense, float8 or codes (`store.hook_values.HookValues`).
    codes        The active features of an autoencoder for each token, with their values.
    key          The name of a hook in pickles: its layer, or its name with --hook_names.
    shard        A numbered set of files with the activations of some samples.
    run log      metadata.json and the JSON files of the shards, which say what is stored
                 (`store.run_log`).
    commit       The JSON file of a shard; a shard without one does not exist.
    reservation  A JSON file under the name of the next commit, which keeps earlier processes from
                 committing.
    owner        The one process that may write to a folder; metadata.json names it.
"""

TYPE_CHECKING = False  # not imported, because importing `typing` takes longer than Python's start
if TYPE_CHECKING:
    from typing import Any

    from activation_extraction.cli.flags import StorageOptions
    from activation_extraction.common.choices import ROLES
    from activation_extraction.common.codes import Codes
    from activation_extraction.dataset.batches import Batches
    from activation_extraction.dataset.dataset import ActivationDataset, paired
    from activation_extraction.dataset.token_batch import SampleActivations, TokenBatch
    from activation_extraction.dataset.token_source import BatchOptions
    from activation_extraction.store.statistics import HookStatistics
    from activation_extraction.store.storage import ActivationStorage

__all__ = [
    "ActivationDataset",
    "ActivationStorage",
    "BatchOptions",
    "Batches",
    "Codes",
    "HookStatistics",
    "ROLES",
    "SampleActivations",
    "StorageOptions",
    "TokenBatch",
    "paired",
]
# The module of each name, which `__getattr__` imports.
HOMES = {
    "ActivationDataset": "dataset.dataset",
    "ActivationStorage": "store.storage",
    "BatchOptions": "dataset.token_source",
    "Batches": "dataset.batches",
    "Codes": "common.codes",
    "HookStatistics": "store.statistics",
    "ROLES": "common.choices",
    "SampleActivations": "dataset.token_batch",
    "StorageOptions": "cli.flags",
    "TokenBatch": "dataset.token_batch",
    "paired": "dataset.dataset",
}
__version__ = "0.1.0"  # pyproject.toml reads the version of the distribution here


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
