"""Rows of activations in Arrow's format, as Hugging Face's `datasets` reads them from a folder.

`datasets` is not needed: these are the types that it has had since before version 3, under the
names that files have for them (`Sequence` has since become `List`).
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow

END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, in Arrow's IPC format


def features(hook: str, context: int, width: int, dtype: str) -> dict[str, Any]:
    """Returns the types of the columns, as `datasets` writes them in JSON: an Array2D (context,
    width) with the name of the hook, and `token_ids`, int32 (context,)."""
    value = {"dtype": "int32", "_type": "Value"}
    return {
        hook: {"shape": [context, width], "dtype": dtype, "_type": "Array2D"},
        "token_ids": {"feature": value, "length": context, "_type": "Sequence"},
    }


def rows_of(hook: str, activations: np.ndarray, token_ids: np.ndarray) -> "pyarrow.RecordBatch":
    """Returns rows with the columns of `features`. activations: (rows, context, width), of a dtype
    that Arrow knows; token_ids: int32 (rows, context)."""
    import pyarrow

    _, context, width = activations.shape
    column = pyarrow.array(activations.reshape(-1))
    for size in (width, context):
        offsets = np.arange(0, len(column) + 1, size, dtype=np.int32)
        column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), column)
    ids = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(token_ids.reshape(-1)), context)
    types = features(hook, context, width, activations.dtype.name)
    extension = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([types[hook]["shape"], types[hook]["dtype"]]),
    }
    fields = [
        pyarrow.field(hook, column.type, metadata=extension),
        pyarrow.field("token_ids", ids.type),
    ]
    schema = pyarrow.schema(fields, {"huggingface": json.dumps({"info": {"features": types}})})
    return pyarrow.record_batch([column, ids], schema)


def size_of(rows: "pyarrow.RecordBatch") -> int:
    """Returns the bytes of the parts that `parts_of` returns."""
    import pyarrow

    return rows.schema.serialize().size + pyarrow.ipc.get_record_batch_size(rows) + len(END)


def parts_of(rows: "pyarrow.RecordBatch") -> list[np.ndarray]:
    """Returns the bytes of a stream of these rows, in parts."""
    parts = rows.schema.serialize(), rows.serialize(), END
    return [np.frombuffer(part, np.uint8) for part in parts]
