"""The table of a shard's samples: `shard_0001.samples.jsonl.gz`, beside the shard.

It has a line of JSON for every sample, in the order of the shard. So what a run knows of its
samples is read without their activations. The bytes depend on the content and the version of zlib.
"""

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isal import igzip

from activation_extraction.common.errors import RunError, StorageError, one_line
from activation_extraction.common.visible import counted
from activation_extraction.store.blocks import COMPRESSION_LEVEL, GZIP
from activation_extraction.store.json_fields import (
    COUNT,
    MOST_PARTS,
    SCALARS,
    TEXT,
    Kind,
    check_fields,
    optional,
)
from activation_extraction.store.shard import DocId, SampleRow, Shard

LONGEST_LINE = 2**20  # bytes
UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, OSError, EOFError, zlib.error)
FLAT = Kind(
    f"an object of at most {MOST_PARTS} plain values",
    lambda value: (
        type(value) is dict
        and len(value) <= MOST_PARTS
        and all(type(each) in SCALARS for each in value.values())
    ),
)
FIELDS = {
    "sample_idx": COUNT,
    "tokens": COUNT,
    "doc_id": Kind("a number, text or null", lambda value: type(value) in SCALARS),
    "row": optional(FLAT),
    "cut": COUNT,
    "text_preview": TEXT,
}


@dataclass(frozen=True)
class TableRow:
    """A sample in the table. tokens: how many of it are stored; the rest as in SampleRow."""

    sample_idx: int
    tokens: int
    doc_id: DocId
    row: Mapping[str, Any] | None
    cut: int
    text_preview: str

    @classmethod
    def of(cls, sample: SampleRow) -> "TableRow":
        tokens = len(sample.positions)
        own = sample.doc_id, sample.row, sample.cut, sample.text_preview or ""
        return cls(sample.sample_idx, tokens, *own)


def table_name(number: int) -> str:
    """Name of the file of shard `number`."""
    return f"shard_{number:04d}.samples.jsonl.gz"


def pack_table(samples: Sequence[SampleRow]) -> bytes:
    """The content of the file.

    Raises StorageError for a sample of which too much is known, or what cannot be in the table.
    """
    lines = b"".join(map(_line, samples))
    return zlib.compress(lines, COMPRESSION_LEVEL, GZIP)


def _line(sample: SampleRow) -> bytes:
    """In ASCII, because an id may be text that has no form in UTF-8. It may be NaN, too."""
    content = vars(TableRow.of(sample))
    for name, kind in FIELDS.items():
        if not kind.fits(content[name]):
            found = f"{type(content[name]).__name__} {ascii(content[name]):.80}"
            raise StorageError(
                f"sample {sample.sample_idx}: its {name} is {found}, expected {kind.words}"
            )
    line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    if len(line) > LONGEST_LINE:
        raise StorageError(
            f"sample {sample.sample_idx}: its id, row and text preview take {len(line):,} bytes; "
            f"there is room for {LONGEST_LINE:,}",
            remedy="shorten the row's id, and start anew with --overwrite",
        )
    return line


def unpack_table(data: bytes, count: int, where: str) -> list[TableRow]:
    """The inverse of `pack_table`, for so many samples.

    Raises RunError when the data is not what was written. where: names the file.
    """
    rows: list[TableRow] = []
    try:
        with igzip.IGzipFile(fileobj=io.BytesIO(data)) as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(rows) == count or len(line) > LONGEST_LINE:
                    raise ValueError(f"more than {count} lines, or one that is too long")
                rows.append(_row(line, f"{where}: line {len(rows) + 1}"))
        if len(rows) < count:
            raise ValueError(f"it has {len(rows)} lines, expected {count}")
    except UNREADABLE as error:
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error
    return rows


def _row(line: bytes, where: str) -> TableRow:
    """Fields that later versions add are left out."""
    content = json.loads(line)
    if type(content) is not dict:
        raise ValueError("a line that is not an object")
    check_fields(content, FIELDS, where)
    return TableRow(**{name: content[name] for name in FIELDS})


def with_table(shard: Shard, table: Sequence[TableRow], where: str) -> Shard:
    """The same shard with what the table says. Raises RunError if that is of other samples.

    where: names the file of the table.
    """
    if len(shard.samples) != len(table):
        raise RunError(f"{where}: is of {counted(len(table), 'sample')}, not {len(shard.samples)}")
    samples = []
    for sample, row in zip(shard.samples, table, strict=True):
        same = (sample.sample_idx, len(sample.positions)) == (row.sample_idx, row.tokens)
        texts = [(each.text_preview, repr(each.doc_id)) for each in (sample, row)]
        if not same or (sample.text_preview is not None and texts[0] != texts[1]):
            raise RunError(f"{where}: says something else of sample {sample.sample_idx}")
        own = {name: getattr(row, name) for name in ("text_preview", "doc_id", "row", "cut")}
        samples.append(replace(sample, **own))
    return replace(shard, samples=samples)
