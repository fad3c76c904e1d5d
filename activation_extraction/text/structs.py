"""Tells Arrow's objects from those of JSON, because they differ in the meaning of null.

In Arrow, all objects of a column have the same keys. A key that only one of them had when the data
set was written is null in the others. In JSON, a null is a value that somebody wrote. Arrow's
objects are marked as `Struct` where rows are read, in file_rows.py, sources.py and documents.py;
chat.py leaves out their nulls.
"""

from collections.abc import Mapping
from typing import Any


class Struct(dict[str, Any]):
    """An object out of Arrow, in which a null may be a key that it lacks."""


def as_structs(value: Any, feature: Any = None) -> Any:
    """Returns a value of a hub data set with its objects out of Arrow as Structs, at every depth.

    Args:
        value: The value.
        feature: The type of the value in `datasets`; None if it is unknown. Values of the type Json
            are text in Arrow, so they are returned unchanged.
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
    """Returns a value with the null keys of its Structs left out, at every depth.

    Nulls in other objects, and in lists, stay: they are values.
    """
    if isinstance(value, Struct):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
