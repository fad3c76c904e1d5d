"""Unpickles files that may come from other people, without running code that they contain.

A pickle can only import the names of an allow-list. Sizes in a pickle are not trusted, either.
Python's unpickler allocates memory for a length, or for an index in its memo, as soon as it reads
the number, so six bytes can make it allocate 64 GB. Therefore `pickletools` reads each instruction
of the pickle first, and the unpickler gets only instructions whose bytes are all there. The modules
that read pickles determine which names are listed.
"""

import pickle
import pickletools
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

# The instructions of a pickle that store an object in the unpickler's memo, at the index that is
# their argument.
MEMO_INSTRUCTIONS = "PUT", "BINPUT", "LONG_BINPUT"


class Stream(Protocol):
    """The methods of a binary file that unpickling needs."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


class AllowListUnpickler(pickle.Unpickler):
    """An unpickler of plain containers and of listed classes and functions.

    Subclasses define the attributes.

    Attributes:
        replacement_by_allowed_name: Full name in a pickle ("module.name") -> object that is used in
            its place.
        error_type: Type of the exception for a name that is not listed.
        refusal_reason: Reason why names that are not listed are refused. It ends the exception's
            message.
    """

    replacement_by_allowed_name: ClassVar[Mapping[str, Any]]
    error_type: ClassVar[type[Exception]]
    refusal_reason: ClassVar[str]

    def __init__(self, stream: Stream) -> None:
        super().__init__(_CompleteInstructions(stream))

    def find_class(self, module: str, name: str) -> Any:
        """Returns the object that the allow-list contains for a name in the pickle.

        Args:
            module: The module that the pickle would import.
            name: The name of an object in the module.

        Raises:
            Exception: If the allow-list does not contain the name. The type of the exception is
                `error_type`.
        """
        full_name = f"{module}.{name}"
        if full_name not in self.replacement_by_allowed_name:
            raise self.error_type(f"refused: would import {full_name!r:.80}; {self.refusal_reason}")
        return self.replacement_by_allowed_name[full_name]


class _CompleteInstructions:
    """A file object from which an unpickler reads only complete instructions of a pickle.

    Python's unpickler allocates as much memory as an instruction asks for, even if the file is too
    short. Therefore this object first reads a whole instruction, and checks that it is known, that
    none of its bytes is missing, and that it asks for no large memo. Only then does it pass the
    bytes on to the unpickler.
    """

    def __init__(self, stream: Stream) -> None:
        self._recorded_stream = _RecordedStream(stream)
        # The type is Any because `genops` is declared to need a file, although it only calls
        # `read` and `readline`.
        pickle_file: Any = self._recorded_stream
        self._numbered_instructions = enumerate(pickletools.genops(pickle_file))

    def read(self, size: int) -> bytes:
        """Returns the next bytes of the pickle.

        Before that, this method reads and checks each instruction to which these bytes belong.

        Args:
            size: The number of bytes to return. Fewer bytes are returned at the end of the pickle.

        Raises:
            ValueError: If such an instruction is unknown or incomplete, or if it stores an
                object in the memo at an index that is larger than the number of instructions before
                it.
        """
        returned_blocks: list[bytes] = []
        while size > 0 and self._ensure_checked_bytes():
            oldest_pending_block = self._recorded_stream.pending_blocks.popleft()
            returned_bytes = oldest_pending_block[:size]
            returned_blocks.append(returned_bytes)
            if len(oldest_pending_block) > size:
                self._recorded_stream.pending_blocks.appendleft(oldest_pending_block[size:])
            size -= len(returned_bytes)
        return b"".join(returned_blocks)

    def readline(self) -> bytes:
        """Returns the next line of the pickle; b"" at the end of the pickle.

        The unpickler calls this method if an argument of an instruction is a line. The instruction
        is checked as in `read`.

        Raises:
            ValueError: If the instruction is refused, for the same reasons as in `read`.
        """
        return (
            self._recorded_stream.pending_blocks.popleft() if self._ensure_checked_bytes() else b""
        )

    def _ensure_checked_bytes(self) -> bool:
        """Makes sure that checked bytes of the pickle are ready for the unpickler.

        If the unpickler has received all bytes of the previous instruction, this method reads and
        checks the next instruction.

        Returns:
            Whether bytes are ready. False if the pickle has ended.

        Raises:
            ValueError: If the next instruction is unknown or incomplete, or if it stores an object
                in the memo at an index that is larger than the number of instructions before it.
        """
        if self._recorded_stream.pending_blocks:
            return True
        for instruction_number, (instruction, argument, _) in self._numbered_instructions:
            if instruction.name in MEMO_INSTRUCTIONS:
                if not 0 <= int(argument or 0) <= instruction_number:
                    raise ValueError(
                        f"instruction {instruction_number} has the index {argument} in the memo"
                    )
            return True
        return False


class _RecordedStream:
    """A stream of a pickle that records the bytes that `pickletools` reads from it.

    `pickletools.genops` reads the bytes of an instruction, but does not return them, and they can
    only be read once. So they are recorded here until `_CompleteInstructions`, the file object from
    which the unpickler reads, passes them on to the unpickler.

    Attributes:
        pending_blocks: Bytes that were read but not passed on yet, in order. Each call of `read`
            or `readline` appends a block, and `_CompleteInstructions` removes the blocks that it
            passes on.
    """

    def __init__(self, stream: Stream) -> None:
        self._pickle_stream = stream
        self.pending_blocks: deque[bytes] = deque()

    def read(self, size: int) -> bytes:
        self.pending_blocks.append(self._pickle_stream.read(size))
        return self.pending_blocks[-1]

    def readline(self) -> bytes:
        self.pending_blocks.append(self._pickle_stream.readline())
        return self.pending_blocks[-1]
