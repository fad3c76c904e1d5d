"""Declares Exported, the counts of what an export wrote and what it left out."""

from typing import NamedTuple


class Exported(NamedTuple):
    """The counts of what an export wrote and what it left out.

    Attributes:
        tokens: Number of tokens in the files. The remaining tokens of the run did not fill a row.
        left_out: Phrases that name anything else of the run that the files lack, with its count,
            such as "3 samples without tokens".
    """

    tokens: int
    left_out: tuple[str, ...] = ()
