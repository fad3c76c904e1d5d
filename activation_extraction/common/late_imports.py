"""This module imports transformers for the code that reads a model's configuration or tokenizer.

The import takes most of a second, so commands that only look at stored activations avoid it. Before
it, or `datasets`, is imported anywhere, `set_library_defaults` sets variables that both read.
"""

import importlib
import os
import sys
from types import ModuleType


def set_library_defaults() -> None:
    """Sets environment variables that the libraries read when they are imported.

    Otherwise `datasets` would load PyTorch wherever it is installed, and transformers would warn
    that it has none. Without a home folder, they would make a folder called ~.
    """
    os.environ.setdefault("USE_TORCH", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~").startswith("~"):
        os.environ["XDG_CACHE_HOME"] = os.devnull


def transformers() -> ModuleType:
    """Returns the library, imported without PyTorch, which it would load wherever it finds it.

    Where PyTorch is installed, a whole run of the demo with 8 samples takes 5.2 CPU seconds in this
    way, and 8.1 without it. The modules of AutoConfig and AutoTokenizer import PyTorch, and no
    setting of transformers prevents it. A process that has imported one of the two already keeps it
    as it is.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("transformers")
    # This makes Python raise ImportError for PyTorch, as if it were not installed.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        library = importlib.import_module("transformers")
        _ = library.AutoConfig, library.AutoTokenizer  # these are imported on first use
        return library
    finally:
        del sys.modules["torch"]
