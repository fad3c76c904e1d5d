"""Distinguishes objects of Arrow from objects of JSON, because null differs in meaning.

In Arrow, all objects of a column have the same keys. A key that only one object had when the data
set was written is null in the others. In JSON, a null is a value that somebody wrote. Objects of
Arrow become `Struct` where rows are read, in file_rows.py, sources.py and documents.py; chat.py
leaves out their nulls.
"""

from collections.abc import Mapping
from typing import Any


class Struct(dict[str, Any]):
    """An object of Arrow, in which null may stand for a missing key."""


def as_structs(value: Any, feature: Any = None) -> Any:
    """Turns the objects in a value of a hub data set into Structs, at all levels.

    Args:
        value: A row, or the value of a column or of a part of it.
        feature: The type of the value in `datasets`; None if it is unknown. Values of the type Json
            are returned unchanged, because Arrow stores them as text.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        features = feature if isinstance(feature, Mapping) else {}
        return Struct({key: as_structs(item, features.get(key)) for key, item in value.items()})
    if isinstance(value, list):
        item_feature = getattr(feature, "feature", None)
        return [as_structs(item, item_feature) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Returns a value without the null keys of its Structs, at all levels.

    Nulls in other objects and in lists stay, because somebody wrote them.
    """
    if isinstance(value, Struct):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
