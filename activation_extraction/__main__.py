"""The command `extract-activations`, which `pip install` makes; also `python -m`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs extract_activations.py, or says which package it lacks."""
    try:
        from extract_activations import script
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error.name} is not installed; extracting needs more packages than reading; "
            "run: pip install 'activation-extraction[extract]'"
        )
    script()


if __name__ == "__main__":
    main()
