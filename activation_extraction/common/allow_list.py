"""Unpickling by a list of names: a pickle can import nothing else, so none of its code runs.

Nor is a size in a pickle believed before its bytes are there. The unpickler takes memory for a
length, or for a number in its memo, as soon as it sees one, and six bytes can claim 64 GB. So an
instruction is read by `pickletools` first, and handed over when it is complete.
"""

import pickle
import pickletools
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

MEMO = "PUT", "BINPUT", "LONG_BINPUT"  # the instructions that choose a number in the memo


class Stream(Protocol):
    """The part of a binary file that unpickling needs."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


class AllowListUnpickler(pickle.Unpickler):
    """Unpickles plain containers and what is listed.

    Attributes:
        allowed: The object that stands for each full name in a pickle.
        error: The exception that is raised for any other name.
        why: The end of its message.
    """

    allowed: ClassVar[Mapping[str, Any]]
    error: ClassVar[type[Exception]]
    why: ClassVar[str]

    def __init__(self, stream: Stream) -> None:
        super().__init__(_CompleteInstructions(stream))

    def find_class(self, module: str, name: str) -> Any:
        if (full_name := f"{module}.{name}") not in self.allowed:
            raise self.error(f"refused: would import {full_name!r:.80}; {self.why}")
        return self.allowed[full_name]


class _CompleteInstructions:
    """A pickle as a stream that contains an instruction when all of its bytes were read."""

    def __init__(self, stream: Stream) -> None:
        self._source = _Recorded(stream)
        source: Any = self._source  # which has all that `genops` needs of a file
        self._instructions = enumerate(pickletools.genops(source))

    def read(self, size: int) -> bytes:
        """Returns the next bytes: `size` of them, or fewer at the end of the pickle.

        Raises:
            ValueError: An instruction is unknown or incomplete, or its number in the memo is larger
                than the number of instructions before it.
        """
        taken: list[bytes] = []
        while size > 0 and self._read_on():
            piece = self._source.pieces.popleft()
            if len(piece) > size:
                self._source.pieces.appendleft(piece[size:])
                piece = piece[:size]
            taken.append(piece)
            size -= len(piece)
        return b"".join(taken)

    def readline(self) -> bytes:
        """Returns the next line, which is an argument of an instruction."""
        return self._source.pieces.popleft() if self._read_on() else b""

    def _read_on(self) -> bool:
        """Reads an instruction if nothing is left of the last one. Returns whether there is one."""
        if self._source.pieces:
            return True
        for number, (instruction, argument, _) in self._instructions:
            if instruction.name in MEMO and not 0 <= int(argument or 0) <= number:
                raise ValueError(f"instruction {number} has number {argument} in the memo")
            return True
        return False


class _Recorded:
    """Everything that was read from a stream, in pieces, until it is taken from there."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.pieces: deque[bytes] = deque()

    def read(self, size: int) -> bytes:
        self.pieces.append(self._stream.read(size))
        return self.pieces[-1]

    def readline(self) -> bytes:
        self.pieces.append(self._stream.readline())
        return self.pieces[-1]
