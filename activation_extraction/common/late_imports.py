"""This module imports transformers for the code that reads a model's configuration or tokenizer.

The import takes most of a second, so commands that only look at stored activations avoid it.
"""

import importlib
import sys
from types import ModuleType


def transformers() -> ModuleType:
    """Returns the library, imported without PyTorch, which it would load wherever it finds it.

    A process that has imported one of them already keeps it as it is.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("transformers")
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        library = importlib.import_module("transformers")
        _ = library.AutoConfig, library.AutoTokenizer  # these are imported on first use
        return library
    finally:
        del sys.modules["torch"]
