"""A shard in memory, and the table of its samples.

A shard is a list of samples, and one array of activations per hook and sample. Every shard format
writes and reads this. The table, `shard_0001.samples.jsonl.gz` beside the shard, has a line of JSON
for every sample, in the order of the shard, so that samples can be listed without reading their
activations. Its bytes depend on the content and the version of zlib.
"""

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from isal import igzip

from activation_extraction.common.choices import MAX_COLUMNS
from activation_extraction.common.encodings import decode
from activation_extraction.common.errors import RunError, StorageError, one_line

Key = int | str  # a hook's name in a shard: its layer number, or the name the user asked for
DocId = str | int | float | None
COMPRESSION_LEVEL = 1
MAX_GZIP_RATIO = 1032  # the most bytes that gzip can unpack from one byte
GZIP = 31  # the `wbits` of zlib for a gzip header without a time, and a window of 32 KiB
GROUP_BYTES = 32 * 2**20
MAX_LINE_BYTES = 2**20
UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, OSError, EOFError, zlib.error)
SCALARS: tuple[type, ...] = (type(None), bool, int, float, str)
MAX_FIELDS = 64  # of the `row` of a sample


@dataclass(frozen=True)
class SampleRow:
    """A sample of a shard, without its activations.

    token_ids and positions: int32, shape (tokens,); positions count from 0 at the start of the
    sample. token_ids: None if the caller gave none. The other fields are in the table of samples,
    and have their defaults until the table is read; but a pickle has text_preview and doc_id
    itself. doc_id: the `id` of the row in the data set. row: identifies that row. cut: how many
    tokens were left out at the end of the document. columns: other columns of the row, JSON values
    by name. labels: of every token (see labels.py).
    """

    sample_idx: int
    token_ids: np.ndarray | None
    positions: np.ndarray
    text_preview: str | None = None
    doc_id: DocId = None
    row: Mapping[str, Any] | None = None
    cut: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Samples in ascending order; `slices[key][i]` is sample i at that hook, (tokens, width).

    some_tokens: whether the run keeps only some tokens of its samples. scales: for the hooks whose
    slices are encoded (common/encodings.py), `scales[key][i]` has the scales of sample i, (tokens,
    1).
    """

    samples: list[SampleRow]
    slices: dict[Key, list[np.ndarray]]
    some_tokens: bool = False
    scales: dict[Key, list[np.ndarray]] = field(default_factory=dict)

    def activation(self, key: Key, number: int) -> np.ndarray:
        """Returns sample `number` at a hook: float32 if it is encoded, else as it is stored."""
        values = self.slices[key][number]
        return decode(values, self.scales[key][number]) if key in self.scales else values

    def groups(self, key: Key) -> Iterator[slice]:
        """Yields groups of consecutive samples that have about GROUP_BYTES at one hook, which a
        thread handles at a time."""
        begin = size = 0
        for number, values in enumerate(self.slices[key], 1):
            size += values.nbytes
            if size >= GROUP_BYTES or number == len(self.samples):
                yield slice(begin, number)
                begin, size = number, 0

    @property
    def needs_positions(self) -> bool:
        """Whether positions have to be stored, because they need not be 0, 1, 2 and so on."""
        return self.some_tokens or not all(
            np.array_equal(sample.positions, np.arange(len(sample.positions)))
            for sample in self.samples
        )

    @property
    def positions(self) -> list[np.ndarray]:
        """The positions of the tokens of each sample."""
        return [sample.positions for sample in self.samples]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.positions))

    @property
    def offsets(self) -> np.ndarray:
        """int64 (samples + 1,); sample i has the tokens offsets[i] to offsets[i + 1]."""
        lengths = list(map(len, self.positions))
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True)
class TableRow:
    """A row of the table. tokens: how many are stored. The other fields are those of SampleRow."""

    sample_idx: int
    tokens: int
    doc_id: DocId
    row: Mapping[str, Any] | None
    cut: int
    text_preview: str
    columns: Mapping[str, Any] = field(default_factory=dict)


def pack_table(samples: Sequence[SampleRow]) -> bytes:
    """Returns the content of the table's file. Raises StorageError for values that do not fit."""
    return zlib.compress(b"".join(map(_line, samples)), COMPRESSION_LEVEL, GZIP)


def _line(sample: SampleRow) -> bytes:
    """Returns a line of the table in ASCII. An id may be NaN, or text that UTF-8 cannot encode."""
    content = {
        "sample_idx": sample.sample_idx,
        "tokens": len(sample.positions),
        "doc_id": sample.doc_id,
        "row": sample.row,
        "cut": sample.cut,
        "text_preview": sample.text_preview or "",
    }
    if sample.columns:
        content["columns"] = sample.columns
    _check_line(content)
    try:
        line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"sample {sample.sample_idx}: its columns are no JSON values: {one_line(error)}"
        ) from error
    if len(line) > MAX_LINE_BYTES:
        columns, fewer = (", columns", " or keep fewer columns") if sample.columns else ("", "")
        raise StorageError(
            f"sample {sample.sample_idx}: its id, row{columns} and text preview take "
            f"{len(line):,} bytes; there is room for {MAX_LINE_BYTES:,}",
            remedy=f"shorten the row's id{fewer}, and start anew with --overwrite",
        )
    return line


def _check_line(content: Mapping[str, Any]) -> None:
    """Raises StorageError for values that another program gave, and that the table cannot have."""
    row, columns = content["row"], content.get("columns", {})
    flat = type(row) is dict and {*map(type, row.values())} <= {*SCALARS}
    for name, fits, expected in (
        ("doc_id", type(content["doc_id"]) in SCALARS, "a number, text or null"),
        (
            "row",
            row is None or (flat and len(row) <= MAX_FIELDS),
            f"an object of at most {MAX_FIELDS} plain values, or null",
        ),
        ("cut", type(content["cut"]) is int and content["cut"] >= 0, "a whole number, 0 or larger"),
        ("text_preview", type(content["text_preview"]) is str, "text"),
        (
            "columns",
            type(columns) is dict and len(columns) <= MAX_COLUMNS,
            f"an object of at most {MAX_COLUMNS} JSON values",
        ),
    ):
        if not fits:
            value = f"{type(content[name]).__name__} {ascii(content[name]):.80}"
            raise StorageError(
                f"sample {content['sample_idx']}: its {name} is {value}, expected {expected}"
            )


def unpack_table(data: bytes, count: int, where: str) -> list[TableRow]:
    """Reads what `pack_table` returned, for `count` samples. It ignores unknown fields.

    where: names the file in messages. Raises RunError if the data is damaged.
    """
    rows: list[TableRow] = []
    names = [each.name for each in fields(TableRow)]
    try:
        with igzip.IGzipFile(fileobj=io.BytesIO(data)) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(rows) == count or len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"more than {count} lines, or one that is too long")
                content = {"columns": {}, **json.loads(line)}
                rows.append(TableRow(*(content[name] for name in names)))
        if len(rows) < count:
            raise ValueError(f"it has {len(rows)} lines, expected {count}")
    except UNREADABLE as error:
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error
    return rows
