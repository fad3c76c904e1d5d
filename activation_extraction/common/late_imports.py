"""Imports transformers for the code that reads a model's configuration or tokenizer.

The import takes most of a second, so commands that only read stored activations avoid it.
`set_library_defaults` must be called before transformers or `datasets` is imported anywhere,
because both read environment variables when they are imported.
"""

import importlib
import os
import sys
from types import ModuleType


def set_library_defaults() -> None:
    """Sets environment variables that the libraries read when they are imported.

    Otherwise `datasets` would load PyTorch if it is installed, and transformers would warn if it is
    not installed. Without a home folder, both would create a folder called ~.
    """
    os.environ.setdefault("USE_TORCH", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~").startswith("~"):
        os.environ["XDG_CACHE_HOME"] = os.devnull


def transformers() -> ModuleType:
    """Imports transformers without PyTorch and returns it.

    The modules of AutoConfig and AutoTokenizer import PyTorch if it is installed, and no setting of
    transformers prevents it. Where PyTorch is installed, a run of the demo with 8 samples takes 5.2
    CPU seconds without the import and 8.1 with it. A process that has already imported transformers
    or PyTorch gets the ordinary import.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("transformers")
    # This makes Python raise ImportError for PyTorch, as if it were not installed.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        library = importlib.import_module("transformers")
        _ = library.AutoConfig, library.AutoTokenizer  # triggers their import, which is lazy
        return library
    finally:
        del sys.modules["torch"]
