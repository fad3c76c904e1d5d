"""Contains the parsers of the values of flags.

Each parser takes the text after a flag, as the user has typed it, and returns the value. It raises
FlagValueError, or ValueError for text that is no number at all. config.py passes the parsers to
argparse. The parser of --positions is in common/positions.py.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

from activation_extraction.common.choices import BUCKET_PROTOCOLS, MESH_AXES
from activation_extraction.common.errors import FlagValueError

MAX_INTEGER = 10**9  # the largest valid whole number, because a larger number is a typo
MAX_LAYER = 10_000  # the largest valid end of a range of layers, so that its numbers fit in memory


def text(typed: str) -> str:
    """Checks a text that the user typed as the value of a flag, and returns it unchanged.

    Raises:
        FlagValueError: If the text is empty, or if it contains bytes that are not UTF-8, which JSON
            cannot store.
    """
    if not typed.strip():
        raise FlagValueError("is empty (an unset variable?)")
    if re.search("[\ud800-\udfff]", typed):
        raise FlagValueError(f"is not UTF-8: {ascii(typed)}")
    return typed


def path(typed: str) -> str:
    """Returns a path, in which a ~ at the beginning is replaced by the home folder.

    Raises:
        FlagValueError: If the home folder is unknown, because a folder with the name ~ would be
            created otherwise.
    """
    expanded_path = os.path.expanduser(text(typed))
    if expanded_path.startswith("~"):  # expanduser has not found a home folder
        raise FlagValueError(
            f"{typed}: no home folder is known for {typed.split('/')[0]}; set HOME, or give a path "
            f"without ~ (./{typed} if this is its name)"
        )
    return expanded_path


def path_or_default(typed: str) -> str:
    """Parses the path after a flag that may also be empty.

    Args:
        typed: The path that the user typed; "" for the default path.

    Returns:
        The path with ~ expanded (see `path`); "" for the default path.

    Raises:
        FlagValueError: If `path` refuses the path.
    """
    return path(typed) if typed else ""


def integer(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers.

    Args:
        least: The smallest valid number. MAX_INTEGER is the largest.
    """

    def parse(typed: str) -> int:
        typed_number = int(typed)
        if not least <= typed_number <= MAX_INTEGER:
            raise FlagValueError(
                f"{typed_number} is not a whole number from {least} to {MAX_INTEGER}"
            )
        return typed_number

    parse.__name__ = "integer"  # messages of argparse contain this name
    return parse


def row_count(typed: str) -> int | str:
    """Parses a number of rows.

    Args:
        typed: The text that the user typed: a positive integer, or "auto".

    Returns:
        The number, or the text "auto".

    Raises:
        FlagValueError: If the number is less than 1.
        ValueError: If the text is neither an integer nor "auto".
    """
    return typed if typed == "auto" else integer(1)(typed)


row_count.__name__ = "integer or auto"


def token(typed: str) -> int | str:
    """Returns a token id if the text is a number, otherwise the text as the name of a token."""
    # Token ids are separated by spaces. Numbers that are separated by commas are also passed to
    # `integer`, because its message explains the mistake. As the name of a token, they would only
    # be reported as an unknown token.
    contains_only_integers = re.fullmatch("[-+]?[0-9]+(,[0-9]+)*", typed) is not None
    return integer(0)(typed) if contains_only_integers else text(typed)


token.__name__ = "token id"


def layers(typed: str) -> tuple[int, ...] | str:
    """Parses a number of a layer such as 5, an inclusive range of layers such as 1-3, or "all".

    Returns:
        The numbers of the layers, or "all".
    """
    if typed == "all":
        return typed
    if typed.startswith("-") or "--" in typed:
        raise FlagValueError(
            f"{typed}: layers are counted from 0, never from the end; expected a number, a range "
            "such as 1-3, or all"
        )
    start_text, range_dash, end_text = typed.partition("-")
    parse_layer = integer(0)
    if not range_dash or not start_text:
        return (parse_layer(typed),)
    first_layer = parse_layer(start_text)
    last_layer = parse_layer(end_text)
    if first_layer > last_layer or last_layer > MAX_LAYER:
        raise FlagValueError(f"{typed} is not a range of layers such as 1-3")
    return tuple(range(first_layer, last_layer + 1))


def sizes(typed: str) -> tuple[int, ...]:
    """Returns the sizes of mesh axes, which are separated by commas."""
    return tuple(map(integer(1), typed.split(",")))


def axes(typed: str) -> tuple[str, ...]:
    """Returns the names of mesh axes, which are separated by commas and must all differ."""
    mesh_axis_names = tuple(typed.split(","))
    if len(set(mesh_axis_names)) < len(mesh_axis_names) or not set(mesh_axis_names) <= set(
        MESH_AXES
    ):
        raise FlagValueError(
            f"{typed!r} is not a list of different names from {', '.join(MESH_AXES)}"
        )
    return mesh_axis_names


def address(typed: str) -> str:
    """Returns an address HOST:PORT unchanged if it is valid.

    HOST is a name, an IPv4 address, or an IPv6 address in brackets.

    Raises:
        FlagValueError: If the address is not valid.
    """
    address_match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w-]+(?:\.[\w-]+)*):(\d+)", typed)
    if address_match is None or not 0 < int(address_match[2]) < 65536:
        raise FlagValueError(f"{typed}: expected HOST:PORT of host 0, such as 10.0.0.1:8476")
    return typed


def positive(typed: str) -> float:
    """Parses a positive finite number."""
    typed_number = float(typed)
    if not 0 < typed_number < float("inf"):
        raise FlagValueError(f"{typed} is not a positive number")
    return typed_number


def positive_or_0(typed: str) -> float:
    """Parses a finite number of at least 0."""
    return positive(typed) if float(typed) else 0.0


positive.__name__ = positive_or_0.__name__ = "number"


def dollars(typed: str) -> tuple[float, ...]:
    """Parses the price of a chip for an hour, in dollars, such as 1.2 or 1.2,0.4.

    Returns:
        The price of a chip that is rented on demand. If there are two prices, the second one is the
        price of a chip in a spot machine.
    """
    if typed.count(",") > 1:
        raise FlagValueError(f"{typed!r} is not one or two prices such as 1.2,0.4")
    return tuple(map(positive, typed.split(",")))


def argument(typed: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, a variable for the chat template.

    Returns:
        A tuple of:
            The name, which is a Python identifier.
            The value, which is decoded if it is JSON. Otherwise it is the text.
    """
    argument_name, equals_sign, value_text = typed.partition("=")
    if not equals_sign or not argument_name.isidentifier():
        raise FlagValueError(f"{typed!r} is not NAME=VALUE")
    try:
        decoded_value = json.loads(value_text)
    except (ValueError, RecursionError):
        decoded_value = value_text
    # Python decodes NaN, 1e999 and half of a surrogate pair, but metadata.json cannot store them.
    try:
        json.dumps(decoded_value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise FlagValueError(
            f"{typed!r} is not NAME=VALUE with a finite number, or with text in Unicode"
        ) from error
    return argument_name, decoded_value


def weighted(typed: str) -> tuple[str, float]:
    """Parses SOURCE=WEIGHT, a source of a mixture of data sets.

    Returns:
        A tuple of:
            The source.
            Its weight, a positive number.
    """
    source_text, _, weight_text = text(typed).rpartition("=")
    try:
        return text(source_text), positive(weight_text)
    except ValueError as error:
        raise FlagValueError(
            f"{typed!r} is not SOURCE=WEIGHT with a positive weight, such as texts.jsonl=0.7"
        ) from error


def hook_and_path(typed: str) -> tuple[str, str]:
    """Parses [HOOK=]PATH, the path of an autoencoder and the hook whose values it encodes.

    Returns:
        A tuple of:
            The name of the hook, which contains no slash; "" if it is missing.
            The path.
    """
    hook_name, equals_sign, path_text = text(typed).partition("=")
    if not equals_sign or "/" in hook_name:
        return "", path(typed)
    if not hook_name:
        raise FlagValueError(f"{typed!r} is not [HOOK=]SAE")
    return hook_name, path(path_text)


def in_bucket(typed: str) -> str:
    """Returns the path of a folder in a bucket unchanged if it is valid in every kind of bucket.

    Raises:
        FlagValueError: If the client library of a kind of bucket would interpret the path in
            another way or change it.
    """
    if re.search(r"[*?\[\]#;\\\s]|::", text(typed)) or not typed.isprintable():
        raise FlagValueError(
            f"{typed!r}: contains a space, a wildcard, a control character, '#', ';', '\\' or "
            "'::'; choose another name"
        )
    folder_names = typed.strip("/").split("/")
    if len(folder_names) > 1 and "" in folder_names or {".", ".."}.intersection(folder_names):
        raise FlagValueError(
            f"{typed}: has a folder without a name, or called . or ..; expected names with one / "
            "between them"
        )
    return typed


def bucket(typed: str) -> str:
    """Returns the name of a bucket, or the URL of a bucket or of a folder in it, unchanged.

    Raises:
        FlagValueError: If the text is neither a name nor such a URL.
    """
    protocol, protocol_separator, url_without_protocol = typed.partition("://")
    in_bucket(url_without_protocol or typed)
    if protocol_separator and (protocol not in BUCKET_PROTOCOLS or not url_without_protocol):
        raise FlagValueError(
            f"{typed}: is not the URL of a bucket; expected a name, or a URL such as s3://bucket, "
            f"which begins with one of {', '.join(BUCKET_PROTOCOLS)}"
        )
    if not protocol_separator and "/" in typed.rstrip("/"):
        raise FlagValueError(
            f"{typed}: is a path; give only the bucket's name here, and the folder in it as "
            "--gcs_prefix"
        )
    return typed
