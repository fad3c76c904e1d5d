"""Contains the functions with which flags.py declares its flags.

A flag is a field of a dataclass. The field determines the name, type and default of the flag. All
other properties are in a `Flag` in the metadata of the field. There is a function for each kind of
flag, which returns such a field. values.py parses the text after a flag, and config.py makes
argparse's parser from all flags.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from activation_extraction.cli.values import integer, positive, text


class HelpGroup(NamedTuple):
    """A group of flags in --help.

    Attributes:
        title: Title of the group.
        text_below_title: Text of --help below the title; None for no text.
    """

    title: str
    text_below_title: str | None = None


@dataclass(frozen=True)
class EnvironmentVariables:
    """Environment variables from which a flag gets its value if it is not on the command line.

    Attributes:
        variable_names: Names of the variables. The first variable that is set is used.
        flag_that_enables_variables: Name of a flag without which the variables are ignored; "" if
            the variables do not depend on a flag.
        flags_that_disable_variables: Names of flags. The variables are ignored if one of these
            flags is set.
    """

    variable_names: tuple[str, ...]
    flag_that_enables_variables: str = ""
    flags_that_disable_variables: tuple[str, ...] = ()

    def are_read_with(self, flag_names: Collection[str]) -> bool:
        """Returns whether these environment variables may give a missing flag its value.

        The variables are ignored if the flag `flag_that_enables_variables` is not set, or if one of
        `flags_that_disable_variables` is set.

        Args:
            flag_names: Names of the flags that are set, on the command line or by other environment
                variables.
        """
        has_needed_flag = (
            not self.flag_that_enables_variables or self.flag_that_enables_variables in flag_names
        )
        return has_needed_flag and not any(
            flag_name in flag_names for flag_name in self.flags_that_disable_variables
        )


@dataclass(frozen=True)
class Flag:
    """The declaration of a flag, except its name, type and default.

    A flag is a field of a dataclass of options, which has the name, the type and the default.

    Attributes:
        argparse_options: Arguments of argparse's `add_argument` by name. `type` is a parser of
            values.py.
        help_group: Group of the flag in --help; None for the group that the function `part` sets
            for all flags of the dataclass.
        needs: Name of another flag without which this flag is refused, or several names with
            " or " between them if any of these flags is enough; "" if no other flag is needed.
        excluded_flags: Names of flags that cannot be used together with this flag.
        environment_variables: Environment variables that replace the flag if it is missing; None if
            there are no such variables.
        negated_name_and_help: Name and help text of the flag that sets the field to False; None if
            there is no such flag.
        collect_values: Function that turns the list of values after the flag into the value of the
            field. Only flags that take several values use it.
        determines_shards: Whether the value of the flag determines the content of shards. A run
            that continues must have the same value (see `store.identity.Identity`).
        may_differ_by_host: Whether the value may differ between the hosts of a run.
    """

    argparse_options: dict[str, Any]
    help_group: HelpGroup | None = None
    needs: str = ""
    excluded_flags: tuple[str, ...] = ()
    environment_variables: EnvironmentVariables | None = None
    negated_name_and_help: tuple[str, str] | None = None
    collect_values: Callable[[list[Any]], Any] = tuple
    determines_shards: bool = False
    may_differ_by_host: bool = False


def flag(
    help: str,
    default: Any = None,
    parse: Callable[[str], Any] = text,
    *,
    unit: str = "",
    default_is: str = "",
    help_group: HelpGroup | None = None,
    needs: str = "",
    excluded_flags: tuple[str, ...] = (),
    environment_variables: EnvironmentVariables | None = None,
    collect_values: Callable[[list[Any]], Any] = tuple,
    determines_shards: bool = False,
    may_differ_by_host: bool = False,
    **options: Any,
) -> Any:
    """Declares a flag that takes a value.

    Args:
        help: Help text, without the default.
        default: Default value. None if there is no default, or if config.py or the run determines
            it.
        parse: Parser of the value (values.py). It is not used for a flag with `choices`.
        unit: Unit of the default, with a space in front, for the help text.
        default_is: Description of the default for the help text; "" to show the value of `default`.
        help_group: Group of the flag in --help; None for the group that the function `part` sets
            for all flags of the dataclass.
        needs: Name of another flag that this flag needs; "" if it needs none (see `Flag`).
        excluded_flags: Names of flags that cannot be used together with this flag.
        environment_variables: Environment variables that replace the flag if it is missing; None if
            there are no such variables.
        collect_values: Function that turns a list of values into the value of the field (see
            `Flag`).
        determines_shards: Whether the value of the flag determines the content of shards (see
            `Flag`).
        may_differ_by_host: Whether the value may differ between the hosts of a run.
        options: Further arguments of argparse's `add_argument`.

    Returns:
        The field of a dataclass.
    """
    default_phrase = default_is
    if not default_phrase and default is not None:
        default_phrase = f"{default}{unit}"
    default_phrases = []
    if environment_variables is not None:
        default_phrases.append(" or ".join(environment_variables.variable_names))
    if default_phrase:
        default_phrases.append(default_phrase)
    if default_phrases:
        help += f" (default: {', else '.join(default_phrases)})"
    if "choices" not in options:
        options = {"type": parse, "metavar": "NAME", **options}
    flag_declaration = Flag(
        {"help": help, **options},
        help_group,
        needs,
        excluded_flags,
        environment_variables,
        collect_values=collect_values,
        determines_shards=determines_shards,
        may_differ_by_host=may_differ_by_host,
    )
    return field(default=default, metadata={"flag": flag_declaration})


def switch(
    help: str,
    *,
    help_group: HelpGroup | None = None,
    needs: str = "",
    excluded_flags: tuple[str, ...] = (),
    determines_shards: bool = False,
    may_differ_by_host: bool = False,
) -> Any:
    """Declares a boolean flag that is false by default.

    Args:
        help: Help text.
        help_group: Group of the flag in --help; None for the group that the function `part` sets
            for all flags of the dataclass.
        needs: Name of another flag that this flag needs; "" if it needs none (see `Flag`).
        excluded_flags: Names of flags that cannot be used together with this flag.
        determines_shards: Whether the value of the flag determines the content of shards (see
            `Flag`).
        may_differ_by_host: Whether the value may differ between the hosts of a run.

    Returns:
        The field of a dataclass.
    """
    argparse_options = {"help": help, "action": "store_true"}
    flag_declaration = Flag(
        argparse_options,
        help_group,
        needs,
        excluded_flags,
        determines_shards=determines_shards,
        may_differ_by_host=may_differ_by_host,
    )
    return field(default=False, metadata={"flag": flag_declaration})


def pair(
    help: str,
    negated_name: str,
    negated_help: str,
    *,
    help_group: HelpGroup | None = None,
    determines_shards: bool = False,
) -> Any:
    """Declares a boolean flag that is true by default, and a second flag that makes it false.

    Args:
        help: Help text of the flag.
        negated_name: Name of the second flag.
        negated_help: Help text of the second flag.
        help_group: Group of flags in --help; None for the group that `part` sets for all flags of
            the dataclass.
        determines_shards: Whether the value of the flag determines the content of shards (see
            `Flag`).

    Returns:
        The field of a dataclass.
    """
    argparse_options = {"help": f"{help} (default)", "action": "store_true"}
    flag_declaration = Flag(
        argparse_options,
        help_group,
        negated_name_and_help=(negated_name, negated_help),
        determines_shards=determines_shards,
    )
    return field(default=True, metadata={"flag": flag_declaration})


def each_once(values: list[Any]) -> tuple[Any, ...]:
    """Returns the values without repetitions, in the order of their first occurrence."""
    return tuple(dict.fromkeys(values))


def several(
    help: str, parse: Callable[[str], Any] = text, *, default_is: str = "none", **options: Any
) -> Any:
    """Declares a flag that takes one or more values, with an empty tuple as default.

    Args:
        help: Help text, without the default.
        parse: Parser of one value (values.py).
        default_is: Description of the default for the help text.
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
        help: Help text, without the default.
        default: Default value; None if there is no default.
        least: Smallest valid number.
        metavar: Name of the number in the help text.
        options: Further arguments of `flag`.

    Returns:
        The field of a dataclass.
    """
    return flag(help, default, integer(least), metavar=metavar, **options)


def seconds(help: str, default: int) -> Any:
    """Declares a flag that takes a whole number of seconds, at least 1.

    Args:
        help: Help text, without the default.
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
    """Declares a flag that takes a size in GB, which are 10^9 bytes.

    Args:
        help: Help text, without the unit and the default.
        default: Default in GB; None if there is no default.
        parse: Parser of the number (values.py).
        options: Further arguments of `flag`.

    Returns:
        The field of a dataclass.
    """
    help = f"{help}. The unit is 10^9 bytes"
    return flag(help, default, parse, unit=" GB", metavar="GB", **options)


def part(options_class: type[Any], help_group: HelpGroup) -> Any:
    """Declares a field of `Config` that contains several flags.

    Args:
        options_class: Dataclass whose fields are flags.
        help_group: Group in --help of the flags in `options_class` that name no other group.

    Returns:
        The field of a dataclass.
    """
    return field(
        default_factory=options_class, metadata={"part": options_class, "help_group": help_group}
    )
