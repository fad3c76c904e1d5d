"""Unpickling by a list of names: a pickle can import nothing else, so none of its code runs."""

import pickle
from collections.abc import Mapping
from typing import Any, ClassVar


class AllowListUnpickler(pickle._Unpickler):
    """Unpickles plain containers and what `allowed` has, by full name.

    The base class is the unpickler in Python: in the one in C, six bytes can claim 64 GB. error:
    what is raised for any other name; why: the end of its message.
    """

    allowed: ClassVar[Mapping[str, Any]]
    error: ClassVar[type[Exception]]
    why: ClassVar[str]
    # A bytearray would take memory for as many bytes as the pickle claims to have.
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}
    del dispatch[pickle.BYTEARRAY8[0]]

    def find_class(self, module: str, name: str) -> Any:
        if (full_name := f"{module}.{name}") not in self.allowed:
            raise self.error(f"refused: would import {full_name!r:.80}; {self.why}")
        return self.allowed[full_name]
