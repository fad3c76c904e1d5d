"""Extracts activations from language models and reads them back.

extract_activations.py, beside this package, is the story of a run. The folders here hold its parts:
`run` knows them all; `model`, `text` and `store` share only a few types; `dataset` reads what
`store` wrote, and `inspect` looks at it; `cli` is what the user types and sees; `common` is below
everything. Each folder's `__init__.py` names the files to begin with.

`ActivationDataset` reads what a run has stored, `paired` reads two runs as one, and
`ActivationStorage` stores activations, also those of another program; the other names are what they
take and return. They are imported when they are first used, so importing this package costs
nothing; none of them needs JAX or PyTorch.
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
