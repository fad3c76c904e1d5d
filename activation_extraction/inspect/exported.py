"""Declares `Exported`, the result of an export.

The functions that write files for trainers return it, and export.py prints it.
"""

from typing import NamedTuple


class Exported(NamedTuple):
    """The result of an export: the numbers of exported and omitted things.

    Attributes:
        tokens: The number of tokens in the files. The remaining tokens of the run did not fill a
            row.
        left_out: Phrases about other things in the run that the files do not contain, such as
            "3 samples without tokens".
    """

    tokens: int
    left_out: tuple[str, ...] = ()
