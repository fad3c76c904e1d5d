"""This module imports transformers for the code that reads a model's configuration or tokenizer.

The import takes most of a second, so commands that only look at stored activations avoid it.
"""

import importlib
import sys
from types import ModuleType


def transformers() -> ModuleType:
    """Returns the library, imported without PyTorch, which it would load wherever that is
    installed.

    A process that has imported transformers already keeps it as it is.
    """
    hide_torch = "transformers" not in sys.modules and "torch" not in sys.modules
    if hide_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        library = importlib.import_module("transformers")
        for name in ("AutoConfig", "AutoTokenizer"):  # transformers imports these on first use
            getattr(library, name)
        return library
    finally:
        if hide_torch:
            del sys.modules["torch"]
