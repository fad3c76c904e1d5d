"""Extracts activations from language models and reads them back.

extract_activations.py, beside this package, is the story of a run. The folders here hold its parts:
`run` knows them all; `model`, `text` and `store` share only a few types; `dataset` reads what
`store` wrote, and `inspect` looks at it; `cli` is what the user types and sees; `common` is below
everything. Each folder's `__init__.py` names the files to begin with.

`ActivationDataset` reads what a run has stored. It is imported when it is first used, so importing
this package costs nothing, and reading needs neither JAX nor PyTorch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from activation_extraction.dataset.dataset import ActivationDataset

__all__ = ["ActivationDataset"]
__version__ = "0.1.0"  # of the package, too: pyproject.toml reads it here


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from activation_extraction.dataset import dataset

    return getattr(dataset, name)
