"""The samples of a run as a table of pyarrow, which needs no activations."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from activation_extraction.store.sample_table import TableRow

if TYPE_CHECKING:
    import pyarrow

READERS = 16  # tables read at the same time


def list_samples(read: Callable[[int], Sequence[TableRow]], shards: int) -> "pyarrow.Table":
    """A table with the fields of `TableRow`. read: number of a shard -> its rows.

    Ids become texts where a run has ids of several types. Raises what `read` raises.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("the table of samples needs pyarrow: pip install pyarrow") from error
    with ThreadPoolExecutor(READERS) as pool:
        rows = [row for table in pool.map(read, range(shards)) for row in table]
    ids = [row.doc_id for row in rows]
    if len({type(each) for each in ids if each is not None}) > 1:
        ids = [None if each is None else str(each) for each in ids]
    columns: dict[str, Any] = {
        "sample_idx": pyarrow.array([row.sample_idx for row in rows], pyarrow.int64()),
        "tokens": pyarrow.array([row.tokens for row in rows], pyarrow.int64()),
        "doc_id": pyarrow.array(list(map(_sound, ids))),
        "row": pyarrow.array([row.row for row in rows]),
        "cut": pyarrow.array([row.cut for row in rows], pyarrow.int64()),
        "text_preview": pyarrow.array(list(map(_sound, [row.text_preview for row in rows]))),
    }
    return pyarrow.table(columns)


def _sound(value: Any) -> Any:
    """Text that has no form in UTF-8 gets question marks there."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
