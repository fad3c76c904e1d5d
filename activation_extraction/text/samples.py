"""Documents -> samples: cuts or splits tokenised documents, and marks the place of every sample.

Documents are tokenised in chunks. A mark (mark.py) is the state of the documents before a chunk
plus the number of samples to skip within it. A run that continues leaves out the samples that are
stored.
"""

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

import numpy as np
from tokenizers import Tokenizer

from activation_extraction.common.errors import RunError
from activation_extraction.text.batch import Sample
from activation_extraction.text.documents import (
    Document,
    Documents,
    ReadRow,
    RowCounts,
    counts_in,
    log_skipped_row,
    unusable_row,
    with_counts,
)
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts, StoredSample
from activation_extraction.text.token_choice import TokenChoice
from activation_extraction.text.tokens import SpecialTokens, Tokens, safe_cuts, tokenise

CHUNK_ROWS = 64
PREVIEW_CHARACTERS = 200


class ChangedDataError(RunError):
    """The data set gives another row for a sample that is stored."""


@dataclass(frozen=True)
class SampleForm:
    """How documents become samples.

    Attributes:
        length: Most tokens of a sample.
        split: Whether a longer document becomes several samples, its pieces. Otherwise it is cut.
        overlap: Number of tokens at the start of a piece that repeat the end of the piece before
            it. They are context, and are never kept. The first piece has none.
        choice: Tokens whose activations are kept.
        special: Special tokens that are put around a document. A cut document keeps all of them.
    """

    length: int
    split: bool = False
    overlap: int = 0
    choice: TokenChoice = TokenChoice()
    special: SpecialTokens = SpecialTokens()

    def pieces(self, tokens: int) -> list[range]:
        """Returns the range of tokens of each sample of a document.

        Args:
            tokens: Number of tokens of the document.
        """
        if not self.split or tokens <= self.length:
            return [range(min(tokens, self.length))]
        starts = range(0, tokens - self.overlap, self.length - self.overlap)
        return [range(start, min(start + self.length, tokens)) for start in starts]

    def eligible(self, document: Document, tokens: Tokens) -> np.ndarray | None:
        """Returns which tokens of a document may be kept, bool (tokens,); None for all of them."""
        mask = document.content.mask
        if mask is None and not self.overlap and self.choice.everything:
            return None
        return self.choice.eligible(tokens.total, mask, tokens.labels)


def samples(
    documents: Documents,
    tokenizer: Tokenizer | None,
    form: SampleForm,
    max_samples: int | None = None,
    start: Mark | None = None,
    max_tokens: int | None = None,
    stored: Mapping[int, StoredSample] = MappingProxyType({}),
    until: int | None = None,
    limits_from: int = 0,
    on_stored: Callable[[], object] = lambda: None,
) -> Generator[Sample, None, Mark]:
    """Yields the samples of one worker that are not stored.

    The stream stops after `max_samples` samples, or once the samples keep `max_tokens` tokens: the
    last one is cut to end there. Both count from the beginning of the data, with stored samples as
    they are stored. A document without a single token gives no sample, and its row counts as empty;
    the row of a document that the tokenizer cannot take cannot be used.

    Args:
        documents: The documents of the worker.
        tokenizer: The tokenizer; None if documents are token ids.
        form: How documents become samples.
        max_samples: The most samples; None for no limit.
        start: A mark from an earlier iteration over the same data; None for the beginning.
        max_tokens: The most tokens that are kept; None for no limit.
        stored: The samples that are stored and left out, by `sample_idx`.
        until: The number of the first sample that is not read; None to read all.
        limits_from: The number of the first sample that the limits can end the stream at, or cut.
            Where later samples are stored, earlier ones must not be left out.
        on_stored: A function that is called for each sample that is left out. This may be the only
            sign of progress for hours.

    Returns:
        The mark at the end. If all rows were read, it counts every row that gave no sample;
        otherwise those before the last sample, since rows that were only read ahead do not count.

    Raises:
        ChangedDataError: A stored sample now comes from another row.
    """
    most_samples = math.inf if max_samples is None else max_samples
    most_tokens = math.inf if max_tokens is None else max_tokens
    mark = start or Mark(0)

    def is_over() -> bool:
        reached = mark.samples >= most_samples or mark.tokens >= most_tokens
        return mark.samples >= limits_from and reached

    whole = _whole_samples(documents, tokenizer, form, mark, max(most_samples, limits_from))
    while mark.samples != until and not is_over():
        try:
            sample = next(whole)
        except StopIteration as end:  # all rows were read
            return replace(end.value, tokens=mark.tokens)
        before = replace(sample.mark, tokens=mark.tokens)
        stored_sample = stored.get(sample.facts.sample_idx)
        if stored_sample is None:
            count = sample.num_kept
            if before.samples >= limits_from:
                count = int(min(count, most_tokens - before.tokens))
            mark = before.after(count)
            yield _limited(sample, before, count, goes_on=form.split and not is_over())
            continue
        stored_row, row = stored_sample.facts.row, sample.facts.row
        if stored_row != row:
            raise ChangedDataError(
                f"sample {sample.facts.sample_idx}: was stored from row {json.dumps(stored_row)}, "
                f"but the data set now gives it row {json.dumps(row)}",
                remedy="the data set has changed: restore it, or give another --output_dir",
                recurs=True,
            )
        mark = before.after(stored_sample.tokens)
        on_stored()
    return mark


def _whole_samples(
    documents: Documents,
    tokenizer: Tokenizer | None,
    form: SampleForm,
    start: Mark,
    most_samples: float,
) -> Generator[Sample, None, Mark]:
    """Yields the samples of one worker as if no limit cut any of them.

    The `cut` of a sample is the number of tokens that follow it in its document, and marks do not
    count kept tokens.

    Args:
        documents: The documents of the worker.
        tokenizer: The tokenizer; None if documents are token ids.
        form: How documents become samples.
        start: The mark before the first sample to yield.
        most_samples: The number of the worker's samples for which rows are read ahead at most.

    Returns:
        The mark at the end of the data.
    """
    number = start.samples - start.skip
    state = start.stream or documents.beginning
    counts = counts_in(start.stream) if start.stream else RowCounts()
    rows = documents.read(state)
    cuts = None if tokenizer is None else safe_cuts(tokenizer)
    most_tokens = None if form.split else form.length - len(form.special)
    failure: RunError | None = None
    is_end = False
    while not is_end:
        stream, begin = with_counts(state, counts), number
        wanted = int(min(CHUNK_ROWS, most_samples - number))
        chunk: list[ReadRow] = []
        try:
            for row in islice(rows, wanted):
                chunk.append(row)
        except RunError as error:  # the rows before it are read
            failure = error
        is_end = failure is not None or len(chunk) < wanted
        contents = [row.document.content for row in chunk if row.document is not None]
        of_documents = tokenise(tokenizer, contents, most_tokens, cuts)
        for row, tokens in zip(chunk, _tokens_of_rows(chunk, of_documents), strict=True):
            state = row.state
            if isinstance(tokens, str):
                if not documents.skip_bad_rows:
                    raise unusable_row(tokens)
                log_skipped_row(tokens, counts.skipped)
                counts = counts._replace(skipped=counts.skipped + 1)
                continue
            if row.document is None or tokens is None:
                counts = counts._replace(empty=counts.empty + 1)
                continue
            tokens = form.special.around(tokens, len(row.document.content.text))
            eligible = form.eligible(row.document, tokens)
            for piece, span in enumerate(form.pieces(tokens.total)):
                if number >= start.samples:
                    mark = Mark(number, number - begin, counts.skipped, counts.empty, stream)
                    index = documents.worker.sample_idx(number)
                    yield _sample(index, row.document, tokens, eligible, form, piece, span, mark)
                number += 1
    if failure is not None:
        raise failure
    return Mark(number, 0, counts.skipped, counts.empty, with_counts(state, counts))


def _tokens_of_rows(
    rows: Sequence[ReadRow], of_documents: Sequence[Tokens | str]
) -> Iterator[Tokens | str | None]:
    """Yields, for each row, its tokens; None if it has none; the reason if it cannot be used.

    Args:
        rows: The rows.
        of_documents: What `tokenise` has returned for the documents in the rows.
    """
    remaining = iter(of_documents)
    for row in rows:
        if row.document is None:
            yield row.problem or None
            continue
        tokens = next(remaining)
        if isinstance(tokens, str):
            yield f"{row.document.where}: {tokens}"
        else:
            yield tokens if len(tokens.ids) else None


def _sample(
    sample_idx: int,
    document: Document,
    tokens: Tokens,
    eligible: np.ndarray | None,
    form: SampleForm,
    piece: int,
    span: range,
    mark: Mark,
) -> Sample:
    part = slice(span.start, span.stop)
    ids, labels = tokens.ids[part], {name: values[part] for name, values in tokens.labels.items()}
    kept = None
    if eligible is not None:
        eligible = eligible[part].copy()
        eligible[: form.overlap if piece else 0] = False
        kept = form.choice.kept(sample_idx, ids, eligible)
    at = int(tokens.starts[span.start]) if piece and tokens.starts is not None else 0
    facts = SampleFacts(
        sample_idx=sample_idx,
        row=document.row | ({"piece": piece, "start": span.start} if form.split else {}),
        doc_id=document.doc_id,
        text_preview=document.content.text[at : at + PREVIEW_CHARACTERS],
        cut=tokens.total - span.stop,
        columns=document.columns,
    )
    return Sample(facts, ids, mark, labels, kept)


def _limited(sample: Sample, mark: Mark, count: int, goes_on: bool) -> Sample:
    """Returns a sample with only some of the tokens that it keeps.

    What comes after a token does not change its activations, so the sample ends with the last token
    that is kept.

    Args:
        sample: The sample.
        mark: The mark before it.
        count: The number of tokens to keep, which are the first ones.
        goes_on: Whether the next sample has the rest of the document.
    """
    kept, stop = sample.kept, len(sample.token_ids)
    if count < sample.num_kept:
        kept = None if kept is None else kept[:count]
        stop = count if kept is None else int(kept[-1]) + 1
    cut = 0 if goes_on else sample.facts.cut + len(sample.token_ids) - stop
    stop = stop if count else 0
    return replace(
        sample,
        facts=replace(sample.facts, cut=cut),
        token_ids=sample.token_ids[:stop],
        mark=mark,
        labels={name: values[:stop] for name, values in sample.labels.items()},
        kept=kept,
    )
