"""Runs the command line: `python extract_activations.py`, `extract-activations` or `python -m`.

This module parses the flags and looks at stored runs. extract_activations.py does everything that
needs a model. JAX and the libraries that read models and data sets take seconds to import, so no
module is imported before it is needed. --help, messages about wrong flags, and commands that only
look at a run do not need these libraries. The handler of Ctrl-C is set before anything else is
imported.
"""

from activation_extraction.common.interrupts import end_on_ctrl_c

# TYPE_CHECKING is not imported, because importing `typing` takes longer than the start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from activation_extraction.cli.flags import Config


def script() -> "NoReturn":
    """Runs the command line and ends the process with its exit status."""
    end_on_ctrl_c()
    import os
    import sys
    import traceback

    from activation_extraction.common.late_imports import set_library_defaults
    from activation_extraction.common.visible import make_streams_safe, say_error

    make_streams_safe()
    set_library_defaults()
    exit_status = 1
    try:
        exit_status = main()
    except SystemExit as stop:
        # The parser of the flags raises SystemExit after --help or --version.
        exit_status = int(stop.code or 0)
    except BaseException:
        say_error(*traceback.format_exc().splitlines())
    sys.stdout.flush()
    sys.stderr.flush()
    # Native threads of streaming readers, and of jax.distributed after a failure, can hang or abort
    # an ordinary exit. Nothing is lost by skipping it, because all shards are committed by now.
    os._exit(exit_status)


def main(argv: "Sequence[str] | None" = None) -> int:
    """Runs the command line.

    Args:
        argv: The flags. None for the flags with which this process was started.

    Returns:
        The exit status.

    Raises:
        SystemExit: If the flags contain --help or --version.
    """
    from activation_extraction.cli.config import parse_args
    from activation_extraction.common.errors import exit_status

    return exit_status(lambda: _carry_out(parse_args(argv)))


def _carry_out(config: "Config") -> int:
    """Carries out the command that the flags request.

    If the command inspects a stored run without reading files of the model, this function needs no
    slow imports, such as JAX. For every other command, it calls extract_activations.py.

    Args:
        config: The configuration, made from checked flags.

    Returns:
        The exit status.

    Raises:
        InputError: If the request cannot be met, or if a package that it needs is not installed.
        RunError: If an operation of the command fails.
    """
    from activation_extraction.common.errors import InputError, install_extra_advice
    from activation_extraction.common.log import start_logging

    host_options = config.host_options
    host_number = host_options.host_id if host_options.multihost else 0
    start_logging(config.verbose, host_options.machine_id, host_number)
    if config.inspection_options.requested and not config.inspection_options.reads_model_files:
        from activation_extraction.inspect.look import look

        return look(config)
    try:
        from extract_activations import carry_out
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed; running a model needs more packages than reading; "
            + install_extra_advice("extract")
        ) from error
    return carry_out(config)


if __name__ == "__main__":
    script()
