"""Extracts activations of language models, and reads them back.

`ActivationDataset` reads what a run has stored. Importing this package imports nothing else: the
name is looked up when it is first used, and reading needs neither JAX nor PyTorch. Each folder
begins with what it owns.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from activation_extraction.reading.dataset import ActivationDataset

__all__ = ["ActivationDataset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from activation_extraction.reading import dataset

    return getattr(dataset, name)
