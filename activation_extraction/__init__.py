"""Extracts activations from language models and reads them back.

extract_activations.py, beside this package, contains the main steps of a run. The packages in this
package contain the rest:

    cli      flags, the configuration that is made from them, and progress
    text     makes samples of the rows of a data set, and packs samples into batches
    model    the model, its hooks and its weights
    store    writes shards with activations, and the log of a run
    run      combines the model, the text and the store into a run
    dataset  reads stored activations, to train on them
    inspect  status, verification, reports and exports of stored activations
    common   modules that all other packages may use

The `__init__.py` of each package lists its modules. A module may only import from the packages that
tests/test_rooms.py lists for its package.

`ActivationDataset` reads a stored run, `paired` reads two runs side by side, and
`ActivationStorage` stores activations, also those of another program. The other names in `__all__`
are types of their arguments and results. A name is imported when it is first used, so importing
this package takes little time. None of these names needs JAX or PyTorch.

The following words have a fixed meaning in the code, in its messages and in README.

A run and its processes:

    run          One extraction, by all of its machines. It remains the same run if commands are
                 killed and given again.
    machine      A part of a run that works alone on its own part of the data. It is one host, or
                 several hosts that compute one model together (a pod).
    host         A process of a machine. It reads its own rows and stores their activations.
    worker       A host as the reader of its share: the part of the data that only this host reads
                 (`text.batch.Worker`).
    folder       A place for files, on a disk or in a bucket (`store.folder.Folder`). Each worker
                 stores its files in a folder of its own.
    identity     All settings and inputs that decide the content of a run's shards. A run can only
                 continue with the same identity, except that --skip_bad_rows may be turned on
                 (`store.identity.Identity`).
    fingerprint  A digest of the size of a file and of some of its blocks, or of all blocks if it is
                 small. It shows whether two runs read the same file.

A program with a loop of its own is a user's program that computes activations itself and stores
them with `ActivationStorage`. Its run has no data set.

From a data set to the model:

    row          An entry of a data set or of a table of samples. A row of a batch contains the
                 tokens of one or more samples.
    partition    A part of a data set that can be read by itself: a row group of a Parquet file, or
                 any other file (`text.sources`).
    document     The content of one row of the data set: a text, a conversation, or token ids.
    sample       A document, cut to --max_seq_length tokens if it is longer, or a piece of a
                 document. Samples are numbered, and each sample is stored once.
    piece        One of the samples into which --long_documents split divides a long document.
    position     The index of a token in its sample, from 0. The position of a row is its place in
                 the data set, such as a file and a line number (`text.sample_facts`).
    kept token   A token whose activations are stored. All tokens of a sample are kept, unless flags
                 such as --positions, --roles or --drop_token_ids select some of them.
    group        Consecutive samples of a worker that are packed together into rows of batches.
    batch        The rows that a host feeds to the model in one step. A step computes the model on
                 one batch of each host of a machine. When activations are read, a batch is some
                 tokens with their activations (`dataset.token_batch.TokenBatch`).
    mark         A point in a worker's stream of samples, from which the stream can continue
                 (`text.mark.Mark`).

From the model to the files:

    hook         A point in the model whose values can be stored. Its name is the name in
                 TransformerLens. A shard in the format pickle contains the values at a hook under
                 a key: the number of the layer if --layers_to_extract selects the hooks, one in
                 each layer, or the name of the hook if --hook_names or --encode selects it.
    kind         A kind of hook is the same point in all layers that have it, or a point outside of
                 the layers (`model.hooks.HookKind`). The values at a hook are of one of three
                 kinds: dense, float8 or codes (`store.stored_hook.StoredHook`).
    codes        The active features of an autoencoder for each token, with their values
                 (`common.codes.Codes`).
    shard        A numbered set of files with the activations of some samples.
    run log      metadata.json and the JSON files of all shards in a folder, which record the stored
                 shards (`store.run_log`).
    commit       The JSON file of a shard, which lists the other files of the shard. A shard without
                 a commit does not exist.
    reservation  A JSON file with the name of a commit, which prevents an earlier process from
                 committing a shard under this name.
    owner        The one process that may write to a folder. metadata.json names it.
"""

# TYPE_CHECKING is not imported, because importing `typing` takes longer than the start of Python.
TYPE_CHECKING = False
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
# Name in `__all__` -> the module that declares it, from which `__getattr__` imports it.
MODULE_OF_NAME = {
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
# pyproject.toml reads the version of the distribution from here.
__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULE_OF_NAME[name]}"), name)
