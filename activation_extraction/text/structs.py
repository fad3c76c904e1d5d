"""Distinguishes Arrow structs from JSON objects, in which a null has another meaning.

In Arrow, all structs of a column have the same keys. A key that only one row had when the data set
was written is null in the structs of the other rows. In JSON, a null is a value that somebody
wrote. So file_rows.py and sources.py turn Arrow structs into `Struct`, and chat.py leaves out the
nulls of Structs.
"""

from collections.abc import Mapping
from typing import Any


class Struct(dict[str, Any]):
    """A dict decoded from an Arrow struct.

    A None in it may stand for a key that the original row lacks, because all structs of a column
    share the same keys.
    """


def as_structs(value: Any, feature: Any = None) -> Any:
    """Converts the dicts in a value of a hub data set to `Struct`, at all levels of nesting.

    The result tells `without_nulls` that a null in these dicts may stand for a missing key.

    Args:
        value: A row, the value of a column, or a value that is nested in it.
        feature: The type of the value, as `datasets` declares it; None if it is unknown.

    Returns:
        The value, with a `Struct` in place of each dict, including dicts in lists and in other
        dicts. `value` itself is not modified. Dicts in values of the type Json are not converted,
        because Arrow stores such values as text, so that no nulls were added to them.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        feature_by_field = feature if isinstance(feature, Mapping) else {}
        converted_struct = Struct()
        for field_name, nested_value in value.items():
            converted_struct[field_name] = as_structs(
                nested_value, feature_by_field.get(field_name)
            )
        return converted_struct
    if isinstance(value, list):
        element_feature = getattr(feature, "feature", None)
        return [as_structs(element, element_feature) for element in value]
    return value


def without_nulls(value: Any) -> Any:
    """Returns a copy of a value in which no Struct has a key whose value is null.

    Structs at all levels of nesting are copied in this way. A Struct is a dict decoded from an
    Arrow struct, in which null may stand for a missing key. Nulls in other dicts and in lists stay,
    because somebody wrote them.
    """
    if isinstance(value, dict):
        drops_nulls = isinstance(value, Struct)
        object_without_nulls = {}
        for field_name, nested_value in value.items():
            if nested_value is not None or not drops_nulls:
                object_without_nulls[field_name] = without_nulls(nested_value)
        return object_without_nulls
    if isinstance(value, list):
        return [without_nulls(element) for element in value]
    return value
