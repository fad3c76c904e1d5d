"""Declares the facts of a sample, which are stored beside its tokens and activations.

`SampleFacts` is the only declaration of these fields. A sample of the stream contains them, and so
do the samples of a shard. The table of samples (store/sample_table.py) has a column for each fact.
Readers return the facts as `StoredSample`, or as the first fields of `SampleActivations`.
samples.py makes them from the rows of a data set; programs with their own loop pass them to
`ActivationStorage.add_activation`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DocId = str | int | float | None


@dataclass(frozen=True)
class SampleFacts:
    """The facts of a sample, which are stored as values of JSON.

    Attributes:
        sample_idx: Number of the sample, unique over all machines and hosts of the run.
        row: Position of the sample's row in the data set. Its keys are, by the kind of data:
            JSON Lines: "file" and "line", counted from 1.
            Parquet: "file", "row_group" and "row", counted from 0.
            Other files: "file" and "row", counted from 0.
            Hub data sets: "row", counted from 0; also "share" if rows are counted within one of
            several shares, and "shard" if they are counted within a shard of a shuffled data set.
            A mixture: also "source".
            Long documents that are split: also "piece", the number of the piece from 0, and
            "start", the position in the document of the piece's first token.
            None if a program with its own loop stored no row.
        doc_id: Id that the row has in the data set; None if it has none.
        text_preview: The first 200 characters of the text; "" if there is no text.
        cut: Number of tokens of the document that were left out at its end.
        columns: Other columns of the row that the run keeps, values of JSON by name.
    """

    sample_idx: int
    row: Mapping[str, Any] | None = None
    doc_id: DocId = None
    text_preview: str = ""
    cut: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredSample:
    """A sample as the table of samples lists it.

    Attributes:
        facts: Facts of the sample. Facts whose columns were not read have their defaults.
        tokens: Number of tokens that are stored, which may be 0.
    """

    facts: SampleFacts
    tokens: int
