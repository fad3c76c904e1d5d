"""The command line: `python extract_activations.py`, `extract-activations` and `python -m`.

It parses the flags and looks at stored runs; extract_activations.py does what needs a model.
Nothing is imported before it is needed. JAX and the libraries that read models and data sets take
seconds, and --help, a wrong flag and looking at a run do without them. Ctrl-C is taken care of
before anything else is imported.
"""

from activation_extraction.common.interrupts import end_on_ctrl_c

TYPE_CHECKING = False  # that of `typing`, which takes longer to import than Python takes to start
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
    status = 1
    try:
        status = main()
    except SystemExit as stop:  # --help
        status = int(stop.code or 0)
    except BaseException:
        say_error(*traceback.format_exc().splitlines())
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything that can be committed has been. Native threads of streaming readers, and those of
    # jax.distributed after a failure, can hang or abort an ordinary exit.
    os._exit(status)


def main(argv: "Sequence[str] | None" = None) -> int:
    """Runs the command line.

    Args:
        argv: The flags. None for those that this process was started with.

    Returns:
        The exit status.

    Raises:
        SystemExit: After --help or --version.
    """
    from activation_extraction.cli.config import parse_args
    from activation_extraction.common.errors import exit_status

    return exit_status(lambda: _carry_out(parse_args(argv)))


def _carry_out(config: "Config") -> int:
    """Looks at a stored run, or hands over to extract_activations.py. Returns the exit status.

    Raises:
        InputError: If a package that a model needs is not installed.
    """
    from activation_extraction.common.errors import InputError, install_extra
    from activation_extraction.common.log import start_logging

    hosts = config.hosts
    host = hosts.host_id if hosts.multihost else 0
    start_logging(config.verbose, hosts.machine_id, host)
    if config.looking.requested and not config.looking.verify_samples:
        from activation_extraction.inspect.look import look

        return look(config)
    try:
        from extract_activations import carry_out
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed; running a model needs more packages than reading; "
            + install_extra("extract")
        ) from error
    return carry_out(config)


if __name__ == "__main__":
    script()
