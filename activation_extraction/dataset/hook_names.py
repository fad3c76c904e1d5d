"""The names of hooks: a stored hook is found by each of its names, and by globs.

metadata.json records them all: the canonical name, the key, which is what was asked for, and the
other names. Values by hook keep the canonical name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class ByHook(dict[str, T]):
    """A value for each hook, by its canonical name; looking one up works by any of its names.

    aliases: other name -> canonical name.
    """

    def __init__(self, values: Mapping[str, T], aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.aliases = dict(aliases or {})

    def __missing__(self, name: str) -> T:
        if self.aliases.get(name) not in self:
            raise KeyError(name)
        return self[self.aliases[name]]

    def map(self, convert: Callable[[T], U]) -> "ByHook[U]":
        """`convert` applied to every value."""
        return ByHook({hook: convert(value) for hook, value in self.items()}, self.aliases)

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """The hooks that have a name which any glob matches, in the order of the globs.

        Raises KeyError with the first glob that matches nothing.
        """
        names = {hook: [hook] for hook in self}
        for alias, hook in self.aliases.items():
            names.get(hook, []).append(alias)
        found: list[str] = []
        for pattern in patterns:
            hooks = [h for h, known in names.items() if any(fnmatchcase(n, pattern) for n in known)]
            if not hooks:
                raise KeyError(pattern)
            found += [hook for hook in hooks if hook not in found]
        return found


def recorded_aliases(hooks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every other name of the hooks that metadata.json describes -> the canonical one."""
    return {
        alias: hook["name"]
        for hook in hooks
        for alias in (*hook.get("aliases", ()), hook.get("module"), hook["key"])
        if isinstance(alias, str) and alias != hook["name"]
    }
