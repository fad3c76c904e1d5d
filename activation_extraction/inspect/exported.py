"""Exported: what a form of --export wrote, and what it left out."""

from typing import NamedTuple


class Exported(NamedTuple):
    """The content of an export.

    Attributes:
        tokens: Number of tokens in the files. The others were too few for a row of them.
        left_out: Everything else that the run has and the files have not, one phrase with a count
            for each kind.
    """

    tokens: int
    left_out: tuple[str, ...] = ()
