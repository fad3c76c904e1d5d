"""The samples of a run as a table of pyarrow, which needs no activations."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from activation_extraction.store.json_fields import MOST_PARTS
from activation_extraction.store.sample_table import TableRow

if TYPE_CHECKING:
    import pyarrow

READERS = 16  # tables read at the same time
COLUMNS = ("sample_idx", "tokens", "doc_id", "row", "cut", "text_preview")


def list_samples(read: Callable[[int], Sequence[TableRow]], shards: int) -> "pyarrow.Table":
    """A table with the fields of `TableRow`. read: number of a shard -> its rows.

    Ids, or rows, become texts where they are of several types. Raises what `read` raises.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("the table of samples needs pyarrow: pip install pyarrow") from error
    with ThreadPoolExecutor(READERS) as pool:
        rows = [row for table in pool.map(read, range(shards)) for row in table]
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    return pyarrow.table({name: _column(values) for name, values in columns.items()})


def _column(values: Sequence[Any]) -> Any:
    """An array of pyarrow. Values become texts where they have no type in common, or none there."""
    import pyarrow

    names = {name for value in values if isinstance(value, dict) for name in value}
    kinds = (None, pyarrow.uint64()) if len(names) <= MOST_PARTS else ()
    for kind in kinds:
        with suppress(pyarrow.ArrowException, ValueError, OverflowError):
            return pyarrow.array(values, kind)
    return pyarrow.array([None if value is None else _text(value) for value in values])


def _text(value: Any) -> str:
    """Text that has no form in UTF-8 gets question marks there."""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return text.encode(errors="replace").decode()
