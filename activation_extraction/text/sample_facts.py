"""Declares the facts of a sample, such as its number and the row of the data set it comes from.

The facts are stored beside the tokens and activations of the sample. samples.py makes the facts
from the rows of a data set. Programs that compute activations themselves pass the facts to
`ActivationStorage.add_activation`. The table of samples in each shard (store/sample_table.py) has a
column for each fact. When a run is read, the facts are part of `StoredSample` and of
`SampleActivations`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DocId = str | int | float | None  # the id of a row in the data set; None if it has no id


@dataclass(frozen=True)
class SampleFacts:
    """The number of a sample, its row in the data set, and other facts that are stored with it.

    All values can be written as JSON.

    Attributes:
        sample_idx: Number of the sample, unique over all machines and hosts of the run.
        row: Position of the sample's row in the data set; None if the program that stored the
            sample gave no row. The keys depend on the data set:
            JSON Lines: "file", and "line", counted from 1.
            Parquet: "file", "row_group", and "row" in the row group, both counted from 0.
            Other files: "file", and "row", counted from 0.
            Hub data sets: "row", counted from 0. "share" is present if rows are counted within a
            share of the data set, and "shard" if they are counted within what `datasets` calls a
            shard of a shuffled data set.
            Mixtures of data sets: also "source", the name of the data set.
            Runs with --long_documents split: also "piece", the number of the piece counted from 0,
            and "start", the position of the piece's first token in the document.
        doc_id: Id of the row in the data set; None if the row has no id.
        text_preview: The first 200 characters of the sample's text; "" if there is no text.
        cut: Number of tokens that were left out at the end of the document.
        columns: Columns of the row that --keep_columns names, JSON values by name.
    """

    sample_idx: int
    row: Mapping[str, Any] | None = None
    doc_id: DocId = None
    text_preview: str = ""
    cut: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredSample:
    """A stored sample, as it is listed in the table of samples of a shard.

    Attributes:
        facts: Facts of the sample. Facts whose columns were not read from the table have their
            defaults.
        num_kept_tokens: Number of tokens whose activations are stored, which may be 0.
    """

    facts: SampleFacts
    num_kept_tokens: int
