"""Unpickles files with an allow-list: a pickle can import only listed names, so it runs no code.

Sizes in a pickle are not trusted, either. Python's unpickler allocates memory for a length, or for
an index in its memo, as soon as it reads the number, and six bytes can claim 64 GB. So
`pickletools` reads every instruction first, and the unpickler gets only complete instructions.
"""

import pickle
import pickletools
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

MEMO = "PUT", "BINPUT", "LONG_BINPUT"  # the instructions with an index in the unpickler's memo


class Stream(Protocol):
    """The part of a binary file that unpickling needs."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


class AllowListUnpickler(pickle.Unpickler):
    """An unpickler of plain containers and of listed classes and functions.

    Attributes:
        allowed: The class or function to use for each full name ("module.name") in a pickle.
        error: The type of the exception for a name that is not listed.
        why: The reason, which is the end of the exception's message.
    """

    allowed: ClassVar[Mapping[str, Any]]
    error: ClassVar[type[Exception]]
    why: ClassVar[str]

    def __init__(self, stream: Stream) -> None:
        super().__init__(_CompleteInstructions(stream))

    def find_class(self, module: str, name: str) -> Any:
        """Returns the listed object of this name, or raises `error` if the name is not listed."""
        if (full_name := f"{module}.{name}") not in self.allowed:
            raise self.error(f"refused: would import {full_name!r:.80}; {self.why}")
        return self.allowed[full_name]


class _CompleteInstructions:
    """A stream that passes on an instruction of a pickle once all of its bytes have been read."""

    def __init__(self, stream: Stream) -> None:
        self._source = _Recorded(stream)
        # Any: `genops` is declared to need a file, but only calls `read` and `readline`.
        source: Any = self._source
        self._instructions = enumerate(pickletools.genops(source))

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, or fewer at the end of the pickle.

        Raises:
            ValueError: An instruction is unknown or incomplete, or its index in the memo is larger
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
        """Reads the next instruction unless bytes of the last one are left.

        Returns:
            Whether there are bytes to pass on; false at the end of the pickle.
        """
        if self._source.pieces:
            return True
        for number, (instruction, argument, _) in self._instructions:
            if instruction.name in MEMO and not 0 <= int(argument or 0) <= number:
                raise ValueError(f"instruction {number} has the index {argument} in the memo")
            return True
        return False


class _Recorded:
    """A stream that also keeps the bytes that are read from it.

    Attributes:
        pieces: The bytes of each read, in order. The reader of the pickle removes them.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.pieces: deque[bytes] = deque()

    def read(self, size: int) -> bytes:
        self.pieces.append(self._stream.read(size))
        return self.pieces[-1]

    def readline(self) -> bytes:
        self.pieces.append(self._stream.readline())
        return self.pieces[-1]
