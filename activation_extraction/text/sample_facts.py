"""The facts of a sample: all that is known of it beside its tokens and activations.

`SampleFacts` is the only declaration of these fields. A sample of the stream contains them, and so
do the samples of a shard. The table of samples (store/sample_table.py) has a column for each, and a
reader gets them back as `StoredSample`, or as the first fields of `SampleActivations`. samples.py
makes them from the rows of a data set; programs with a loop of their own give them to
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
        row: Row of the data set that the sample comes from: {"file", "line"} of JSON Lines, counted
            from 1; {"file", "row_group", "row"} of Parquet, from 0; {"file", "row"} of other files,
            from 0; {"row"} of a data set on the hub, from 0, with {"share"} if it is counted within
            one share of several, and {"shard"} if it is counted within one shard of a shuffled data
            set. In a mixture it has the {"source"}, too. The pieces of a long document have the
            same row but for {"piece", "start"}: the number of the piece, from 0, and the position
            in the document of its first token. None if a program has stored no row.
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
        facts: Facts of the sample. A fact whose column was not read has its default.
        tokens: Number of tokens that are stored, which may be 0.
    """

    facts: SampleFacts
    tokens: int
