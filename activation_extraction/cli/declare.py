"""How a flag of the table (flags.py) is declared.

A flag is a field of a dataclass. Its type and default are those of the field; `Flag` in the field's
metadata has everything else. The functions below make such fields, one for each kind of flag.
values.py parses what is typed after a flag, and config.py makes argparse's parser from all flags.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from activation_extraction.cli.values import integer, positive, text


class Group(NamedTuple):
    """A group of flags in --help.

    Attributes:
        title: Title of the group.
        note: Text below the title; None for no text.
    """

    title: str
    note: str | None = None


@dataclass(frozen=True)
class Variables:
    """Environment variables that replace a missing flag.

    Attributes:
        names: Names of the variables. The first one that is set is used.
        only_with: Flag without which the variables are ignored; "" for none.
        unless: Flags any of which makes the variables be ignored.
    """

    names: tuple[str, ...]
    only_with: str = ""
    unless: tuple[str, ...] = ()

    def count_with(self, typed: Collection[str]) -> bool:
        """Returns whether the variables are used.

        Args:
            typed: Names of the flags on the command line.
        """
        has_needed = not self.only_with or self.only_with in typed
        return has_needed and not any(name in typed for name in self.unless)


@dataclass(frozen=True)
class Flag:
    """The declaration of a flag, without its name, type and default.

    Attributes:
        options: Arguments of argparse's `add_argument`. `type` is a parser of values.py.
        group: Group in --help; None for the group of the part that contains the flag.
        needs: Flag that this one requires, or several flags with " or " between them, one of which
            is enough; "" for none.
        excludes: Flags that cannot be used together with this one.
        variables: Environment variables that replace the flag if it is missing; None for none.
        opposite: Name and help of the flag that sets the field to False; None for no such flag.
        collect: Function that makes the field's value from the list of a flag's values, for flags
            that take several.
        content: Whether the value of the flag determines the content of shards. A run that
            continues must have the same value (see Identity).
        per_host: Whether the flag may differ between the hosts of a run.
    """

    options: dict[str, Any]
    group: Group | None = None
    needs: str = ""
    excludes: tuple[str, ...] = ()
    variables: Variables | None = None
    opposite: tuple[str, str] | None = None
    collect: Callable[[list[Any]], Any] = tuple
    content: bool = False
    per_host: bool = False


def flag(
    help: str,
    default: Any = None,
    parse: Callable[[str], Any] = text,
    *,
    unit: str = "",
    default_is: str = "",
    group: Group | None = None,
    needs: str = "",
    excludes: tuple[str, ...] = (),
    variables: Variables | None = None,
    collect: Callable[[list[Any]], Any] = tuple,
    content: bool = False,
    per_host: bool = False,
    **options: Any,
) -> Any:
    """Declares a flag that takes a value.

    Args:
        help: Text of --help, without the default.
        default: Default. None if there is none, or if config.py or the run determines it.
        parse: Parser of the value (values.py). Not used for a flag with `choices`.
        unit: Unit of the default, for --help.
        default_is: Description of the default for --help; "" to show the default itself.
        group: See `Flag`.
        needs: See `Flag`.
        excludes: See `Flag`.
        variables: See `Flag`.
        collect: See `Flag`.
        content: See `Flag`.
        per_host: See `Flag`.
        options: Further arguments of argparse's `add_argument`.

    Returns:
        The field of a dataclass.
    """
    shown = default_is
    if not shown and default is not None:
        shown = f"{default}{unit}"
    alternatives = [" or ".join(variables.names)] if variables is not None else []
    if shown:
        alternatives.append(shown)
    if alternatives:
        help += f" (default: {', else '.join(alternatives)})"
    if "choices" not in options:
        options = {"type": parse, "metavar": "NAME", **options}
    declared = Flag(
        {"help": help, **options},
        group,
        needs,
        excludes,
        variables,
        collect=collect,
        content=content,
        per_host=per_host,
    )
    return field(default=default, metadata={"flag": declared})


def switch(
    help: str,
    *,
    group: Group | None = None,
    needs: str = "",
    excludes: tuple[str, ...] = (),
    content: bool = False,
    per_host: bool = False,
) -> Any:
    """Declares a boolean flag that is false by default.

    Args:
        help: Text of --help.
        group: See `Flag`.
        needs: See `Flag`.
        excludes: See `Flag`.
        content: See `Flag`.
        per_host: See `Flag`.

    Returns:
        The field of a dataclass.
    """
    options = {"help": help, "action": "store_true"}
    declared = Flag(options, group, needs, excludes, content=content, per_host=per_host)
    return field(default=False, metadata={"flag": declared})


def pair(
    help: str,
    opposite: str,
    opposite_help: str,
    *,
    group: Group | None = None,
    content: bool = False,
) -> Any:
    """Declares a boolean flag that is true by default, and the flag that makes it false.

    Args:
        help: Text of --help.
        opposite: Name of the flag that makes it false.
        opposite_help: Text of --help for that flag.
        group: See `Flag`.
        content: See `Flag`.

    Returns:
        The field of a dataclass.
    """
    options = {"help": f"{help} (default)", "action": "store_true"}
    declared = Flag(options, group, opposite=(opposite, opposite_help), content=content)
    return field(default=True, metadata={"flag": declared})


def each_once(values: list[Any]) -> tuple[Any, ...]:
    """Returns the values without repetitions, in the order of their first occurrence."""
    return tuple(dict.fromkeys(values))


def several(
    help: str, parse: Callable[[str], Any] = text, *, default_is: str = "none", **options: Any
) -> Any:
    """Declares a flag that takes one or more values, with an empty tuple as default.

    Args:
        help: Text of --help, without the default.
        parse: Parser of one value (values.py).
        default_is: Description of the default for --help.
        options: Further arguments of `flag`.

    Returns:
        The field of a dataclass.
    """
    return flag(help, (), parse, default_is=default_is, nargs="+", **options)


def number(
    help: str, default: int | None = None, *, least: int = 1, metavar: str = "N", **options: Any
) -> Any:
    """Declares a flag that takes a whole number.

    Args:
        help: Text of --help, without the default.
        default: Default; None if there is none.
        least: Smallest valid number.
        metavar: Name of the number in --help.
        options: Further arguments of `flag`.

    Returns:
        The field of a dataclass.
    """
    return flag(help, default, integer(least), metavar=metavar, **options)


def seconds(help: str, default: int) -> Any:
    """Declares a flag that takes a whole number of seconds, at least 1.

    Args:
        help: Text of --help, without the default.
        default: Default in seconds.

    Returns:
        The field of a dataclass.
    """
    return number(help, default, unit=" s", metavar="SECONDS")


def gigabytes(
    help: str,
    default: float | None = None,
    *,
    parse: Callable[[str], Any] = positive,
    **options: Any,
) -> Any:
    """Declares a flag that takes a size in GB, 10^9 bytes.

    Args:
        help: Text of --help, without the unit and the default.
        default: Default in GB; None if there is none.
        parse: Parser of the number (values.py).
        options: Further arguments of `flag`.

    Returns:
        The field of a dataclass.
    """
    help = f"{help}. The unit is 10^9 bytes"
    return flag(help, default, parse, unit=" GB", metavar="GB", **options)


def part(kind: type[Any], group: Group) -> Any:
    """Declares a part of the configuration.

    Args:
        kind: Dataclass whose fields are flags.
        group: Group in --help of the flags of `kind` that do not name another group.

    Returns:
        The field of a dataclass.
    """
    return field(default_factory=kind, metadata={"part": kind, "group": group})
