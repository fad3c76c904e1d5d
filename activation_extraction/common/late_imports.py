"""Imports transformers for code that reads the configuration or the tokenizer of a model.

The import takes most of a second, so commands that only read stored activations avoid it. This
module also sets the environment variables that transformers and `datasets` read when they are
imported.
"""

import importlib
import os
import sys
from types import ModuleType


def set_library_defaults() -> None:
    """Sets environment variables that transformers and `datasets` read when they are imported.

    This function must be called before either library is imported. Without these variables,
    `datasets` would load PyTorch if it is installed, and transformers would warn if PyTorch is not
    installed. If the user has no home folder, both libraries would create a folder called ~.
    """
    os.environ.setdefault("USE_TORCH", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~").startswith("~"):
        os.environ["XDG_CACHE_HOME"] = os.devnull


def transformers() -> ModuleType:
    """Returns the package transformers, which is imported without PyTorch.

    The modules of AutoConfig and AutoTokenizer import PyTorch if it is installed, and no setting of
    transformers prevents that. With PyTorch installed, a run of the demo with 8 samples takes 8.1
    CPU seconds if PyTorch is imported, and 5.2 if it is not. A process that has already imported
    transformers or PyTorch gets the ordinary import.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("transformers")
    # None makes Python raise ImportError for PyTorch, as if it were not installed. The type of
    # sys.modules does not allow None (type: ignore).
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        transformers_package = importlib.import_module("transformers")
        # These classes are imported now, while `import torch` raises ImportError. Otherwise,
        # transformers would import them, and PyTorch with them, when they are first used.
        _ = transformers_package.AutoConfig, transformers_package.AutoTokenizer
        return transformers_package
    finally:
        del sys.modules["torch"]
