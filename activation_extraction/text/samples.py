"""Makes samples from documents: tokenises, cuts or splits them, and makes the mark of each sample.

Documents are tokenised in chunks. A mark (mark.py) contains the state of the documents before a
chunk and the number of samples to skip within the chunk. A run that continues leaves out the
samples that are stored. token_choice.py chooses the tokens to keep.
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

CHUNK_ROWS = 64  # the number of rows to tokenise together
PREVIEW_CHARACTERS = 200  # the length of SampleFacts.text_preview


class ChangedDataError(RunError):
    """The data set has changed: a stored sample would now come from another row."""


@dataclass(frozen=True)
class SampleForm:
    """The settings by which documents become samples.

    Attributes:
        length: Largest number of tokens of a sample.
        split: Whether a document with more tokens becomes several samples. Otherwise it is cut.
        overlap: Number of tokens at the start of each piece but the first that repeat the end of
            the previous piece. They are context, and never kept.
        choice: Choice of the tokens to keep.
        special: Special tokens around a document, which count as tokens of the document. A document
            that is cut keeps all of them.
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
        """Returns which tokens of a document may be kept.

        Args:
            document: The document.
            tokens: The tokens of the document, including special tokens.

        Returns:
            A mask, bool (tokens.total,). None if all tokens of each sample are kept.
        """
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

    The stream ends after `max_samples` samples, or once the samples keep `max_tokens` tokens; then
    the last sample is cut. Both limits count from the beginning of the data, and stored samples
    count with the tokens that are stored of them. A document without a single token has no sample,
    and its row counts as empty. If the tokenizer fails on a document, its row cannot be used.

    Args:
        documents: The documents of the worker.
        tokenizer: The tokenizer; None if documents are token ids.
        form: The settings by which documents become samples.
        max_samples: The limit of samples; None for no limit.
        start: A mark from an earlier iteration over the same data; None for the beginning.
        max_tokens: The limit of tokens that are kept; None for no limit.
        stored: The samples that are stored and left out, by `sample_idx`.
        until: The number of the sample before which to stop; None to read all.
        limits_from: The number of the first sample to which the limits apply. A repair sets it
            behind the last stored sample, so that no limit cuts or drops an earlier one.
        on_stored: A function that is called for each sample that is left out, which may be the
            only sign of progress for hours.

    Yields:
        The samples, in order.

    Returns:
        The mark at the end. If all rows were read, it counts all rows without samples. Otherwise it
        counts those before the last sample, because rows that were only read ahead do not count.

    Raises:
        ChangedDataError: A stored sample now comes from another row.
        RunError: Reading fails, or a row cannot be used and is not to be skipped.
    """
    most_samples = math.inf if max_samples is None else max_samples
    most_tokens = math.inf if max_tokens is None else max_tokens
    mark = start or Mark(0)

    def is_over() -> bool:
        """Returns whether a limit ends the stream at the mark."""
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
    """Yields samples as if no limit of tokens cut them.

    The `cut` of a sample counts all tokens that follow it in its document, and `Mark.tokens` is
    not set.

    Args:
        documents: The documents of the worker.
        tokenizer: The tokenizer; None if documents are token ids.
        form: The settings by which documents become samples.
        start: The mark of the first sample.
        most_samples: The number of samples at which reading ahead stops; infinite for no limit.

    Returns:
        The mark at the end of the data, without the number of tokens.
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
        stream = with_counts(state, counts)
        first_number = number
        wanted = int(min(CHUNK_ROWS, most_samples - number))
        chunk: list[ReadRow] = []
        try:
            for row in islice(rows, wanted):
                chunk.append(row)
        except RunError as error:  # raised below, after the samples of the rows before it
            failure = error
        is_end = failure is not None or len(chunk) < wanted
        contents = [row.document.content for row in chunk if row.document is not None]
        tokens_of_contents = tokenise(tokenizer, contents, most_tokens, cuts)
        for row, tokens in zip(chunk, _tokens_of_rows(chunk, tokens_of_contents), strict=True):
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
                    skip = number - first_number
                    mark = Mark(number, skip, counts.skipped, counts.empty, stream)
                    index = documents.worker.sample_idx(number)
                    yield _sample(index, row.document, tokens, eligible, form, piece, span, mark)
                number += 1
    if failure is not None:
        raise failure
    return Mark(number, 0, counts.skipped, counts.empty, with_counts(state, counts))


def _tokens_of_rows(
    rows: Sequence[ReadRow], tokens_of_contents: Sequence[Tokens | str]
) -> Iterator[Tokens | str | None]:
    """Yields the tokens of each row.

    Args:
        rows: The rows.
        tokens_of_contents: The result of `tokenise` for the contents of the rows with documents.

    Yields:
        The tokens; None if the row has none; or a text with the position of a row that cannot be
        used, and the reason.
    """
    remaining = iter(tokens_of_contents)
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
    """Returns the sample of a document, or of a piece of it.

    Args:
        sample_idx: The index of the sample.
        document: The document.
        tokens: The tokens of the document, including special tokens.
        eligible: The tokens of the document that may be kept, as `SampleForm.eligible` returns
            them.
        form: The settings by which documents become samples.
        piece: The number of the piece, from 0.
        span: The tokens of the sample in the document.
        mark: The mark before the sample.
    """
    part = slice(span.start, span.stop)
    ids = tokens.ids[part]
    labels = {name: label[part] for name, label in tokens.labels.items()}
    kept = None
    if eligible is not None:
        eligible = eligible[part].copy()
        eligible[: form.overlap if piece else 0] = False
        kept = form.choice.kept(sample_idx, ids, eligible)
    first_character = 0
    if piece and tokens.starts is not None:
        first_character = int(tokens.starts[span.start])
    facts = SampleFacts(
        sample_idx=sample_idx,
        row=document.row | ({"piece": piece, "start": span.start} if form.split else {}),
        doc_id=document.doc_id,
        text_preview=document.content.text[first_character : first_character + PREVIEW_CHARACTERS],
        cut=tokens.total - span.stop,
        columns=document.columns,
    )
    return Sample(facts, ids, mark, labels, kept)


def _limited(sample: Sample, mark: Mark, count: int, goes_on: bool) -> Sample:
    """Returns a sample that keeps only its first `count` tokens to keep.

    If that cuts the sample, it ends with the last token that is kept, because later tokens do not
    change the activations of earlier ones.

    Args:
        sample: The sample.
        mark: The mark before it, with the number of tokens.
        count: The number of tokens to keep.
        goes_on: Whether the stream continues with the remaining tokens of the document. If so, they
            do not count as cut.
    """
    kept = sample.kept
    stop = len(sample.token_ids)
    if count < sample.num_kept:
        kept = None if kept is None else kept[:count]
        stop = count if kept is None else int(kept[-1]) + 1
    cut = 0 if goes_on else sample.facts.cut + len(sample.token_ids) - stop
    if not count:
        stop = 0  # no token is kept, so none is needed as context
    return replace(
        sample,
        facts=replace(sample.facts, cut=cut),
        token_ids=sample.token_ids[:stop],
        mark=mark,
        labels={name: label[:stop] for name, label in sample.labels.items()},
        kept=kept,
    )
