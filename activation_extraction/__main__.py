"""The command `extract-activations`, which `pip install` makes; also `python -m`."""

import sys
from typing import NoReturn

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError, exit_status, install_extra
from activation_extraction.common.log import start_logging
from activation_extraction.common.visible import make_streams_safe


def main() -> NoReturn:
    """Runs extract_activations.py; where a package of the model is missing, only looks."""
    try:
        from extract_activations import script
    except ModuleNotFoundError as error:
        missing = str(error.name)
        make_streams_safe()
        sys.exit(exit_status(lambda: look_without(missing)))
    script()


def look_without(missing: str) -> int:
    """What works without a package. Raises InputError if the flags ask for more than looking."""
    config = parse_args()
    if not config.looking or config.verify_samples:
        raise InputError(
            f"{missing} is not installed; running a model needs more packages than reading; "
            + install_extra("extract")
        )
    from activation_extraction.inspect.look import look

    start_logging(config.verbose, config.machine_id, 0)
    return look(config)


if __name__ == "__main__":
    main()
