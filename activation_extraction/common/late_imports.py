"""transformers, which is imported only by what reads a model's configuration or tokenizer.

Importing it takes most of a second; looking at stored activations does without it.
"""

import importlib
import sys
from types import ModuleType


def transformers() -> ModuleType:
    """The library, without PyTorch, which it would import wherever that is installed.

    A process that has transformers already keeps it as it is.
    """
    if "transformers" not in sys.modules and "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # looks as if it were not installed
        try:
            return _load()
        finally:
            del sys.modules["torch"]
    return _load()


def _load() -> ModuleType:
    library = importlib.import_module("transformers")
    for name in ("AutoConfig", "AutoTokenizer"):  # it imports these when they are asked for
        getattr(library, name)
    return library
