"""Makes samples from documents: tokenises, cuts or splits them, and makes the mark of each sample.

Rows are read and tokenised in chunks of CHUNK_ROWS. A mark (mark.py) contains the place in the data
where a chunk starts, and the number of samples to skip within the chunk. A run that continues
leaves out the samples that are stored already. token_choice.py chooses which tokens of a sample are
kept, which means that their activations are stored.
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

# The number of rows that are tokenised together. A run that continues may have to read up to this
# number of rows again.
CHUNK_ROWS = 64
PREVIEW_CHARACTERS = 200  # the largest length of SampleFacts.text_preview


class ChangedDataError(RunError):
    """Raised if the data set has changed since samples were stored.

    If the run continued, the numbers of its stored samples would belong to other rows now.
    """


@dataclass(frozen=True)
class SampleSettings:
    """The settings by which documents become samples.

    Attributes:
        max_sample_tokens: Largest number of tokens of a sample.
        splits_documents: Whether a document with more than `max_sample_tokens` tokens is split into
            several samples. Otherwise it is cut to `max_sample_tokens` tokens.
        overlap: Number of tokens at the end of a piece that the next piece of the same document
            repeats at its start. The next piece uses them as context and never keeps them.
        token_choice: Choice of the kept tokens, which are the tokens whose activations are stored.
        special_tokens: Special tokens that are added around a document. They count as tokens of the
            document. A document that is cut still contains all of them.
    """

    max_sample_tokens: int
    splits_documents: bool = False
    overlap: int = 0
    token_choice: TokenChoice = TokenChoice()
    special_tokens: SpecialTokens = SpecialTokens()

    def pieces(self, num_tokens: int) -> list[range]:
        """Divides the tokens of a document among samples.

        Args:
            num_tokens: Number of tokens of the document.

        Returns:
            For each sample of the document, the range of the indices that the sample's tokens have
            in the document.
        """
        if not self.splits_documents or num_tokens <= self.max_sample_tokens:
            return [range(min(num_tokens, self.max_sample_tokens))]
        piece_starts = range(0, num_tokens - self.overlap, self.max_sample_tokens - self.overlap)
        return [
            range(piece_start, min(piece_start + self.max_sample_tokens, num_tokens))
            for piece_start in piece_starts
        ]

    def eligible(self, document: Document, tokens: Tokens) -> np.ndarray | None:
        """Returns a mask of the tokens of a document that may be kept.

        Args:
            document: The document.
            tokens: The tokens of the document, including special tokens.

        Returns:
            A mask of all tokens of the document, including special tokens, bool
            (tokens.num_document_tokens,). None if every sample keeps all of its tokens.
        """
        storable_token_mask = document.content.storable_token_mask
        if storable_token_mask is None and not self.overlap and self.token_choice.keeps_everything:
            return None
        return self.token_choice.eligible(
            tokens.num_document_tokens, storable_token_mask, tokens.token_labels_by_name
        )


def samples(
    documents: Documents,
    tokenizer: Tokenizer | None,
    settings: SampleSettings,
    max_samples: int | None = None,
    start: Mark | None = None,
    max_tokens: int | None = None,
    stored: Mapping[int, StoredSample] = MappingProxyType({}),
    until: int | None = None,
    limits_from: int = 0,
    on_stored: Callable[[], object] = lambda: None,
) -> Generator[Sample, None, Mark]:
    """Yields the samples of one worker that are not stored yet.

    The stream ends after `max_samples` samples, or when the samples keep `max_tokens` tokens. In
    the second case, the last sample is cut. Both limits count from the beginning of the data.
    Samples that are stored already count as well, with the number of their stored tokens. A
    document without a single token has no sample, and its row counts as empty. If the tokenizer
    fails on a document, the document's row cannot be used.

    Args:
        documents: The documents of the worker.
        tokenizer: The tokenizer; None if documents are token ids.
        settings: The settings by which documents become samples.
        max_samples: The limit of the number of samples; None for no limit.
        start: A mark from an earlier iteration over the same data; None for the beginning.
        max_tokens: The limit of the number of kept tokens; None for no limit.
        stored: The samples that are stored already and left out, by `sample_idx`.
        until: The number of the sample before which the stream ends; None to read all samples.
        limits_from: The number of the first sample to which the limits apply. A repair sets it to
            the number after the last stored sample, so that no limit cuts or drops an earlier
            sample.
        on_stored: A function that is called for each sample that is left out. These calls may be
            the only sign of progress for hours.

    Yields:
        The samples, in order.

    Returns:
        The mark at the end. If all rows were read, it counts all skipped and empty rows. Otherwise
        it counts only such rows before the last sample, because later rows were only read ahead.

    Raises:
        ChangedDataError: If a stored sample now comes from another row.
        RunError: If reading fails, or if a row cannot be used and `documents.skip_bad_rows` is
            false.
    """
    sample_limit = math.inf if max_samples is None else max_samples
    token_limit = math.inf if max_tokens is None else max_tokens
    current_mark = start or Mark(0)

    def is_over() -> bool:
        """Returns whether a limit of samples or tokens ends the stream at the current mark."""
        is_limit_reached = (
            current_mark.samples >= sample_limit or current_mark.tokens >= token_limit
        )
        return current_mark.samples >= limits_from and is_limit_reached

    sample_iterator = _samples_without_token_limit(
        documents, tokenizer, settings, current_mark, max(sample_limit, limits_from)
    )
    while current_mark.samples != until and not is_over():
        try:
            sample = next(sample_iterator)
        except StopIteration as end:  # all rows were read
            return replace(end.value, tokens=current_mark.tokens)
        mark_before_sample = replace(sample.mark, tokens=current_mark.tokens)
        stored_sample = stored.get(sample.facts.sample_idx)
        if stored_sample is None:
            num_kept_tokens = sample.num_kept
            if mark_before_sample.samples >= limits_from:
                num_kept_tokens = int(min(num_kept_tokens, token_limit - mark_before_sample.tokens))
            current_mark = mark_before_sample.after(num_kept_tokens)
            yield _with_limited_tokens(
                sample,
                mark_before_sample,
                num_kept_tokens,
                continues=settings.splits_documents and not is_over(),
            )
            continue
        stored_row_position = stored_sample.facts.row
        sample_row_position = sample.facts.row
        if stored_row_position != sample_row_position:
            raise ChangedDataError(
                f"sample {sample.facts.sample_idx}: was stored from row "
                f"{json.dumps(stored_row_position)}, but the data set now gives it row "
                f"{json.dumps(sample_row_position)}",
                remedy="the data set has changed: restore it, or give another --output_dir",
                is_recurring=True,
            )
        current_mark = mark_before_sample.after(stored_sample.num_kept_tokens)
        on_stored()
    return current_mark


def _samples_without_token_limit(
    documents: Documents,
    tokenizer: Tokenizer | None,
    settings: SampleSettings,
    start: Mark,
    sample_limit: float,
) -> Generator[Sample, None, Mark]:
    """Yields the samples of one worker without applying the limit of tokens.

    Two values in the yielded samples are preliminary, and the caller of this function replaces
    them. `SampleFacts.cut` counts all tokens of the document after the sample, even if a later
    piece contains them. `Mark.tokens` is 0.

    Args:
        documents: The documents of the worker.
        tokenizer: The tokenizer; None if documents are token ids.
        settings: The settings by which documents become samples.
        start: The mark before the first sample to yield.
        sample_limit: The number of the worker's samples, from the beginning of the data, after
            which no more rows are read; infinite for no limit. The last row may yield more samples,
            which the caller must leave out.

    Yields:
        The samples, in order.

    Returns:
        The mark after all rows, whose `tokens` is 0.

    Raises:
        RunError: If reading fails, or if a row cannot be used and `documents.skip_bad_rows` is
            false.
    """
    next_sample_number = start.samples - start.skip
    document_stream_state = start.stream or documents.beginning
    row_counts = counts_in(start.stream) if start.stream else RowCounts()
    # The iterator also yields the rows without a document, which are counted.
    row_iterator = documents.read(document_stream_state)
    cut_pattern = None if tokenizer is None else safe_cuts(tokenizer)
    max_document_tokens = (
        None
        if settings.splits_documents
        else settings.max_sample_tokens - len(settings.special_tokens)
    )
    read_error: RunError | None = None
    is_last_chunk = False
    while not is_last_chunk:
        state_before_chunk = with_counts(document_stream_state, row_counts)
        first_sample_number_of_chunk = next_sample_number
        max_chunk_rows = int(min(CHUNK_ROWS, sample_limit - next_sample_number))
        chunk_rows: list[ReadRow] = []
        try:
            for row in islice(row_iterator, max_chunk_rows):
                chunk_rows.append(row)
        except RunError as error:
            # The error is raised again after the samples of the earlier rows have been yielded.
            read_error = error
        is_last_chunk = read_error is not None or len(chunk_rows) < max_chunk_rows
        document_contents = [row.document.content for row in chunk_rows if row.document is not None]
        tokens_of_contents = tokenise(
            tokenizer, document_contents, max_document_tokens, cut_pattern
        )
        for row, tokens_or_problem in zip(
            chunk_rows, _tokens_of_rows(chunk_rows, tokens_of_contents), strict=True
        ):
            document_stream_state = row.document_stream_state
            if isinstance(tokens_or_problem, str):
                if not documents.skip_bad_rows:
                    raise unusable_row(tokens_or_problem)
                log_skipped_row(tokens_or_problem, row_counts.skipped)
                row_counts = row_counts._replace(skipped=row_counts.skipped + 1)
                continue
            if row.document is None or tokens_or_problem is None:
                row_counts = row_counts._replace(empty=row_counts.empty + 1)
                continue
            document_tokens = settings.special_tokens.around(
                tokens_or_problem, len(row.document.content.text)
            )
            eligible_token_mask = settings.eligible(row.document, document_tokens)
            for piece_number, token_range in enumerate(
                settings.pieces(document_tokens.num_document_tokens)
            ):
                if next_sample_number >= start.samples:
                    yield _sample_of_tokens(
                        sample_idx=documents.worker.sample_idx(next_sample_number),
                        document=row.document,
                        tokens=document_tokens,
                        eligible_token_mask=eligible_token_mask,
                        settings=settings,
                        piece_number=piece_number,
                        token_range=token_range,
                        mark=Mark(
                            next_sample_number,
                            next_sample_number - first_sample_number_of_chunk,
                            row_counts.skipped,
                            row_counts.empty,
                            state_before_chunk,
                        ),
                    )
                next_sample_number += 1
    if read_error is not None:
        raise read_error
    return Mark(
        next_sample_number,
        0,
        row_counts.skipped,
        row_counts.empty,
        with_counts(document_stream_state, row_counts),
    )


def _tokens_of_rows(
    rows: Sequence[ReadRow], tokens_of_contents: Sequence[Tokens | str]
) -> Iterator[Tokens | str | None]:
    """Yields the tokens of each row.

    Args:
        rows: The rows.
        tokens_of_contents: For each row that has a document, the tokens of the document, or a text
            with the reason why it cannot be tokenised.

    Yields:
        For each row, the tokens of its document, or None if the row has no document or the document
        is empty. If the row cannot be used, a text with the position of the row and the reason.
    """
    remaining_tokens_of_contents = iter(tokens_of_contents)
    for row in rows:
        if row.document is None:
            yield row.skip_reason or None
            continue
        tokens_or_problem = next(remaining_tokens_of_contents)
        if isinstance(tokens_or_problem, str):
            yield f"{row.document.location_phrase}: {tokens_or_problem}"
        else:
            yield tokens_or_problem if len(tokens_or_problem.ids) else None


def _sample_of_tokens(
    sample_idx: int,
    document: Document,
    tokens: Tokens,
    eligible_token_mask: np.ndarray | None,
    settings: SampleSettings,
    piece_number: int,
    token_range: range,
    mark: Mark,
) -> Sample:
    """Returns the sample that consists of a document or of a piece of it.

    Args:
        sample_idx: The number of the sample in the whole run.
        document: The document.
        tokens: The tokens of the document, including special tokens.
        eligible_token_mask: Mask of the document's tokens that may be kept, bool
            (tokens.num_document_tokens,); None if every sample keeps all of its tokens.
        settings: The settings by which documents become samples.
        piece_number: The number of the piece in the document, counted from 0; 0 for a whole
            document.
        token_range: The range of the sample's tokens, as indices of the tokens of the document.
        mark: The mark before the sample.
    """
    token_slice = slice(token_range.start, token_range.stop)
    token_ids = tokens.ids[token_slice]
    labels_of_sample_by_name = {
        label_name: labels_of_tokens[token_slice]
        for label_name, labels_of_tokens in tokens.token_labels_by_name.items()
    }
    kept_positions_or_none = None
    if eligible_token_mask is not None:
        eligible_token_mask_of_sample = eligible_token_mask[token_slice].copy()
        if piece_number:
            eligible_token_mask_of_sample[: settings.overlap] = False
        kept_positions_or_none = settings.token_choice.kept(
            sample_idx, token_ids, eligible_token_mask_of_sample
        )
    preview_start_offset = 0
    if piece_number and tokens.start_offsets is not None:
        preview_start_offset = int(tokens.start_offsets[token_range.start])
    row_position_fields = document.row_position_fields
    if settings.splits_documents:
        row_position_fields = {
            **row_position_fields,
            "piece": piece_number,
            "start": token_range.start,
        }
    sample_facts = SampleFacts(
        sample_idx=sample_idx,
        row=row_position_fields,
        doc_id=document.doc_id,
        text_preview=document.content.text[
            preview_start_offset : preview_start_offset + PREVIEW_CHARACTERS
        ],
        cut=tokens.num_document_tokens - token_range.stop,
        columns=document.stored_value_by_column,
    )
    return Sample(sample_facts, token_ids, mark, labels_of_sample_by_name, kept_positions_or_none)


def _with_limited_tokens(sample: Sample, mark: Mark, max_kept: int, continues: bool) -> Sample:
    """Returns a sample that keeps only the first `max_kept` of its kept tokens.

    If this leaves out kept tokens, the returned sample ends with the last token that it keeps,
    because later tokens do not change the activations of earlier tokens.

    Args:
        sample: The sample.
        mark: The mark before the returned sample, which replaces the mark in `sample`. Its `tokens`
            counts the kept tokens of all earlier samples.
        max_kept: The largest number of tokens that the returned sample keeps.
        continues: Whether the next sample continues with the remaining tokens of the document. If
            so, `SampleFacts.cut` of the returned sample is 0, because no token is left out.
            Otherwise it counts the remaining tokens.
    """
    kept_positions_or_none = sample.kept_positions_or_none
    num_tokens_after_shortening = len(sample.token_ids)
    if max_kept < sample.num_kept:
        if kept_positions_or_none is None:
            num_tokens_after_shortening = max_kept
        else:
            kept_positions_or_none = kept_positions_or_none[:max_kept]
            num_tokens_after_shortening = int(kept_positions_or_none[-1]) + 1
    num_cut_tokens = (
        0 if continues else sample.facts.cut + len(sample.token_ids) - num_tokens_after_shortening
    )
    if not max_kept:
        # If no token is kept, the model need not read the sample, so no tokens are returned.
        num_tokens_after_shortening = 0
    return replace(
        sample,
        facts=replace(sample.facts, cut=num_cut_tokens),
        token_ids=sample.token_ids[:num_tokens_after_shortening],
        mark=mark,
        token_labels_by_name={
            label_name: labels_of_tokens[:num_tokens_after_shortening]
            for label_name, labels_of_tokens in sample.token_labels_by_name.items()
        },
        kept_positions_or_none=kept_positions_or_none,
    )
