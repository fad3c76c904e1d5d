"""Extracts activations from language models and reads them back.

extract_activations.py, beside this package, is the story of a run. The folders here hold its parts:
`run` knows them all; `model`, `text` and `store` share only a few types; `dataset` reads what
`store` wrote, and `inspect` looks at it; `cli` is what the user types and sees; `common` is below
everything. Each folder's `__init__.py` lists its modules.

`ActivationDataset` reads what a run has stored, `paired` reads two runs as one, and
`ActivationStorage` stores activations, also those of another program; the other names are what they
take and return. They are imported when they are first used, so importing this package costs
nothing; none of them needs JAX or PyTorch.

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

TYPE_CHECKING = False  # that of `typing`, which takes longer to import than Python takes to start
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
__version__ = "0.1.0"  # of the package, too: pyproject.toml reads it here


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
