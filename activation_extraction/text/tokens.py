"""Turns the contents of documents into tokens: token ids, and the role and turn of each token.

A long text is tokenised in sections, which needs less memory and uses more threads. It is cut into
sections only at positions where the cut changes no token. `SpecialTokens` are the tokens that the
model's tokenizer adds to a text. samples.py makes samples from the tokens, and tokenizer.py loads
the tokenizer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product

import numpy as np
from tokenizers import Encoding, Tokenizer, models

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.text.rows import TEMPLATE, Content

# A long text is tokenised in sections: parts that end where cutting the text changes no token (see
# `safe_cuts`). Such a position cannot be chosen freely, so a section has at least this number of
# characters, and ends at the next such position. The last section may be smaller.
SECTION_CHARACTERS = 2**16
# The number of sections that are tokenised together. It is limited because the tokenizer's results
# take 100 bytes per token.
SECTIONS_AT_ONCE = 64
# Each key is a pattern of positions where a text might be cut: before a space, or after a newline.
# Its value is a list of texts before the position, and a list of texts after it. `safe_cuts` joins
# each text of the first list with each text of the second list, and checks whether the tokenizer
# splits the result into the same words if it is cut between them. This is the case with tokenizers
# of Qwen and Llama 3, but words of other tokenizers may extend over the position.
CUT_TRIALS = {
    r"(?<=\S)(?= )": (
        ["a", "1", "1234", ".", "!!", "'", "é", "a\u0301", "中", "🙂", "a_", "a\n b"],
        [" ", " b", "  b", "    ", "  \n", " \n\nb", " 1", " 's", " .\n", " \u0301", " \tb", " 中"],
    ),
    r"(?<=\n)(?=\S)": (
        ["\n", "a\n", "a\n\n", "a\n\n\n", "a \n", "a\n \n", ".\n", ".\n\n", "a\r\n\r\n", "\t\n"],
        ["b", "1", "123", ".", "'s", "_", "é", "\u0301", "中", "🙂", "b c\n"],
    ),
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a document, or only the tokens at its beginning.

    Attributes:
        ids: Token ids, int32 (tokens,).
        num_document_tokens: The number of tokens of the whole document, even if `ids` contains
            fewer.
        start_offsets: For each token, the offset in characters at which it begins in the text,
            int32 (tokens,); None if the offsets were not computed.
        token_labels_by_name: Name of a label -> its value for each token of the document, int32
            (num_document_tokens,). The labels are "role", an index into ROLES, and "turn", the
            number of the turn from 0. Empty if the document is no conversation.
    """

    ids: np.ndarray
    num_document_tokens: int
    start_offsets: np.ndarray | None = None
    token_labels_by_name: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that are added around a text.

    Attributes:
        token_ids_before_text: Ids of the tokens that are added before the text.
        token_ids_after_text: Ids of the tokens that are added after the text.
        description: Description for messages and metadata.json, such as "text + <|endoftext|>"; ""
            if no tokens are added.
    """

    token_ids_before_text: tuple[int, ...] = ()
    token_ids_after_text: tuple[int, ...] = ()
    description: str = ""

    def __len__(self) -> int:
        return len(self.token_ids_before_text) + len(self.token_ids_after_text)

    def around(self, tokens: Tokens, num_characters: int) -> Tokens:
        """Returns the tokens of a text with the special tokens around them.

        Args:
            tokens: The tokens of a text, without labels.
            num_characters: The number of characters of the text. It becomes the start offset of the
                special tokens after the text.
        """
        token_ids_before_text = np.array(self.token_ids_before_text, np.int32)
        token_ids_after_text = np.array(self.token_ids_after_text, np.int32)
        all_token_ids = np.concatenate([token_ids_before_text, tokens.ids, token_ids_after_text])
        start_offsets = tokens.start_offsets
        if start_offsets is not None:
            start_offsets_before_text = np.zeros_like(token_ids_before_text)
            start_offsets_after_text = np.full_like(token_ids_after_text, num_characters)
            start_offsets = np.concatenate(
                [start_offsets_before_text, start_offsets, start_offsets_after_text]
            )
        return replace(
            tokens,
            ids=all_token_ids,
            num_document_tokens=tokens.num_document_tokens + len(self),
            start_offsets=start_offsets,
        )


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """Returns the special tokens that a tokenizer adds to a text.

    They are read from the result of the tokenizer's post-processor for a text of one token.

    Raises:
        InputError: If the post-processor repeats the text or leaves it out.
    """
    if tokenizer.post_processor is None:
        return SpecialTokens()
    encoding_of_text = Tokenizer(models.WordLevel({"text": 0}, "text")).encode("text")
    encoding_with_special_tokens = tokenizer.post_processor.process(encoding_of_text)
    if encoding_with_special_tokens.special_tokens_mask.count(0) != 1:
        raise InputError(
            "--special_tokens tokenizer: the post_processor in the model's tokenizer.json repeats "
            "texts or leaves them out; give --special_tokens none, which adds no tokens"
        )
    index_of_first_text_token = encoding_with_special_tokens.special_tokens_mask.index(0)
    token_ids = tuple(encoding_with_special_tokens.ids)
    if len(token_ids) == 1:
        return SpecialTokens()
    token_names = [tokenizer.id_to_token(token_id) or str(token_id) for token_id in token_ids]
    token_names[index_of_first_text_token] = "text"
    return SpecialTokens(
        token_ids[:index_of_first_text_token],
        token_ids[index_of_first_text_token + 1 :],
        " + ".join(token_names),
    )


def tokenise(
    tokenizer: Tokenizer | None,
    contents: Sequence[Content],
    max_tokens: int | None,
    cuts: re.Pattern[str] | None,
) -> list[Tokens | str]:
    """Turns the contents of documents into tokens, without adding special tokens.

    If `max_tokens` is None, the tokens of texts get `start_offsets`. Otherwise, the offsets are
    computed only if one of the documents is a conversation, because the roles of tokens depend on
    them. Computing them makes tokenising slower.

    Args:
        tokenizer: The tokenizer; None if all contents are token ids.
        contents: The content of each document.
        max_tokens: The largest number of tokens to return of each text, from its beginning. None to
            return all tokens. Contents that are token ids are always returned whole.
        cuts: A pattern with a match of length 0 at each position where a long text may be cut into
            sections, from `safe_cuts`; None if texts must not be cut.

    Returns:
        A list with the tokens of each document. If the tokenizer fails on a document, the list
        contains a text with the reason in place of the document's tokens.
    """
    if tokenizer is None:
        token_ids_of_contents = [document_content.token_ids for document_content in contents]
        return [
            Tokens(token_ids, len(token_ids))
            for token_ids in token_ids_of_contents
            if token_ids is not None
        ]
    try:
        return [*_tokenise_all(tokenizer, contents, max_tokens, cuts)]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizer's native code is no Exception
        if len(contents) == 1:
            return [f"the tokenizer cannot take it: {one_line(error):.200}"]
        return [
            tokenise(tokenizer, [document_content], max_tokens, cuts)[0]
            for document_content in contents
        ]


def _tokenise_all(
    tokenizer: Tokenizer,
    contents: Sequence[Content],
    max_tokens: int | None,
    cuts: re.Pattern[str] | None,
) -> list[Tokens]:
    """Turns texts into tokens, as `tokenise` does, but does not handle exceptions of the tokenizer.

    Args:
        tokenizer: The tokenizer.
        contents: The contents of the documents: texts or rendered conversations, but not token ids.
        max_tokens: The largest number of tokens to return of each document, from its beginning.
            None to return all tokens.
        cuts: A pattern with a match of length 0 at each position where a long text may be cut into
            sections, from `safe_cuts`; None if texts must not be cut.

    Returns:
        The tokens of each document. They have `start_offsets` if `max_tokens` is None, or if any of
        the documents is a conversation with roles (`Content.spans`).

    Raises:
        BaseException: If the tokenizer fails on a text. The exception may be of any type.
    """
    section_slices_of_contents = [
        _section_slices(document_content.text, cuts) for document_content in contents
    ]
    section_texts: list[str] = []
    for document_content, section_slices in zip(contents, section_slices_of_contents, strict=True):
        section_texts += [document_content.text[section_slice] for section_slice in section_slices]
    needs_character_offsets = max_tokens is None or any(
        document_content.spans for document_content in contents
    )
    # Tokenising without offsets takes a third of the time.
    encode_texts = (
        tokenizer.encode_batch if needs_character_offsets else tokenizer.encode_batch_fast
    )

    def encode_lazily() -> Iterator[Encoding]:
        for first_section_index in range(0, len(section_texts), SECTIONS_AT_ONCE):
            section_texts_to_encode = section_texts[
                first_section_index : first_section_index + SECTIONS_AT_ONCE
            ]
            yield from encode_texts(section_texts_to_encode, add_special_tokens=False)

    section_encodings = encode_lazily()
    return [
        _tokens_of_sections(
            document_content, section_slices, section_encodings, max_tokens, needs_character_offsets
        )
        for document_content, section_slices in zip(
            contents, section_slices_of_contents, strict=True
        )
    ]


def _tokens_of_sections(
    content: Content,
    sections: Sequence[slice],
    encodings: Iterator[Encoding],
    max_tokens: int | None,
    with_offsets: bool,
) -> Tokens:
    """Returns the tokens of a document, joined from the tokens of the sections of its text.

    Args:
        content: The content of the document.
        sections: The slice of the document's text for each section.
        encodings: The tokenizer's results for the sections of this document and of the documents
            after it. One result is taken from the iterator for each section of this document.
        max_tokens: The largest number of tokens to return, from the beginning; None to return all
            tokens.
        with_offsets: Whether `encodings` contain the offsets of tokens in their section. If not,
            the returned tokens have no offsets and no labels.
    """
    token_ids_of_sections, token_offsets_of_sections = [], []
    for section_slice, section_encoding in zip(
        sections, islice(encodings, len(sections)), strict=True
    ):
        token_ids_of_sections.append(np.asarray(section_encoding.ids, np.int32))
        if with_offsets:
            offsets_in_section = np.asarray(section_encoding.offsets, np.int32).reshape(-1, 2)
            token_offsets_of_sections.append(section_slice.start + offsets_in_section)
    all_token_ids = np.concatenate(token_ids_of_sections)
    num_document_tokens = len(all_token_ids)
    # Without the copy, the slice would keep the ids of all tokens in memory.
    returned_token_ids = all_token_ids[:max_tokens].copy()
    if not with_offsets:
        return Tokens(returned_token_ids, num_document_tokens)
    token_offsets = np.concatenate(token_offsets_of_sections)
    return Tokens(
        returned_token_ids,
        num_document_tokens,
        token_offsets[:max_tokens, 0],
        _labels_of_tokens(content, token_offsets),
    )


def safe_cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns a pattern of the positions where cutting a text does not change its tokens.

    A tokenizer splits a text into words, and tokenises each word by itself. So this function
    checks, with the texts in CUT_TRIALS, whether cutting a text changes its words. Texts for Llama
    2's tokenizers, for example, must not be cut, because they get a prefix and are not split into
    words. Added tokens may contain spaces, or include the spaces beside them. The pattern does not
    match inside an added token, nor next to one that includes the spaces beside it.

    Args:
        tokenizer: The tokenizer. Checking it takes about 10 ms.

    Returns:
        A pattern with a match of length 0 at each position where a text may be cut. None if texts
        must not be cut.
    """
    allowed_cut_patterns = []
    for cut_pattern, (texts_left_of_cut, texts_right_of_cut) in CUT_TRIALS.items():
        text_pairs_around_cut = product(texts_left_of_cut, texts_right_of_cut)
        if all(
            _keeps_words(tokenizer, text_left_of_cut, text_right_of_cut)
            for text_left_of_cut, text_right_of_cut in text_pairs_around_cut
        ):
            allowed_cut_patterns.append(cut_pattern)
    if not allowed_cut_patterns:
        return None
    any_allowed_cut_pattern = f"(?:{'|'.join(allowed_cut_patterns)})"
    # Lookaheads and lookbehinds that forbid cutting a text inside an added token. They also forbid
    # a cut beside an added token that absorbs the spaces on this side (lstrip or rstrip), because
    # such cuts would change the tokens. For an added token "a b", for example, (?!(?<=a) b) forbids
    # the cut between "a" and " b".
    lookarounds_that_forbid_cuts = ""
    for added_token in tokenizer.get_added_tokens_decoder().values():
        if added_token.rstrip:
            lookarounds_that_forbid_cuts += f"(?<!{re.escape(added_token.content)})"
        if added_token.lstrip:
            lookarounds_that_forbid_cuts += f"(?!{re.escape(added_token.content)})"
        for cut_match in re.finditer(any_allowed_cut_pattern, added_token.content):
            token_text_left_of_cut = added_token.content[: cut_match.start()]
            token_text_right_of_cut = added_token.content[cut_match.start() :]
            lookarounds_that_forbid_cuts += (
                f"(?!(?<={re.escape(token_text_left_of_cut)}){re.escape(token_text_right_of_cut)})"
            )
    return re.compile(any_allowed_cut_pattern + lookarounds_that_forbid_cuts)


def _keeps_words(tokenizer: Tokenizer, ending: str, beginning: str) -> bool:
    """Returns whether a tokenizer finds the same words in a text if the text is cut in two.

    Args:
        tokenizer: The tokenizer, which splits texts into words.
        ending: The text before the cut.
        beginning: The text after the cut.
    """
    words_of_both_texts = _words_of_text(tokenizer, ending) + _words_of_text(tokenizer, beginning)
    return _words_of_text(tokenizer, ending + beginning) == words_of_both_texts


def _words_of_text(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the words (pre-tokens) into which a tokenizer splits a text before it makes tokens.

    Args:
        tokenizer: The tokenizer.
        text: The text, which contains no added tokens.
    """
    normalized_text = text
    if tokenizer.normalizer is not None:
        normalized_text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [normalized_text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized_text)]


def _section_slices(text: str, cuts: re.Pattern[str] | None) -> list[slice]:
    """Divides a text into sections, which are tokenised separately.

    Args:
        text: The text.
        cuts: Pattern of the positions where the text may be cut; None if it must not be cut.

    Returns:
        The slice of the text for each section. A short text is a single section.
    """
    section_boundaries = [0]
    while section_boundaries[-1] < len(text) or len(section_boundaries) == 1:
        cut_match = (
            None if cuts is None else cuts.search(text, section_boundaries[-1] + SECTION_CHARACTERS)
        )
        section_boundaries.append(len(text) if cut_match is None else cut_match.end())
    return [
        slice(section_start, section_end)
        for section_start, section_end in pairwise(section_boundaries)
    ]


def _labels_of_tokens(content: Content, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the role and turn of each token of a document.

    If a token begins in text of the template and ends in a message, it belongs to the message.

    Args:
        content: The content of the document.
        offsets: Offsets in characters at which each token begins and ends, int32 (tokens, 2).

    Returns:
        A dict with two labels, or an empty dict if `content.spans` is empty:
            "role": Index of the role of each token in ROLES, int32 (tokens,).
            "turn": Number of the turn of each token, counted from 0, int32 (tokens,). Each token of
            the template belongs to a turn, too.
    """
    if not content.spans:
        return {}
    span_start_offsets, span_role_indices, span_turn_numbers = np.array(content.spans, np.int32).T
    first_character_offsets = offsets[:, 0]
    last_character_offsets = np.maximum(offsets[:, 1] - 1, first_character_offsets)
    first_span_indices = np.searchsorted(span_start_offsets, first_character_offsets, "right") - 1
    last_span_indices = np.searchsorted(span_start_offsets, last_character_offsets, "right") - 1
    token_begins_in_template_mask = span_role_indices[first_span_indices] == TEMPLATE
    span_indices_of_tokens = np.where(
        token_begins_in_template_mask, last_span_indices, first_span_indices
    )
    return {
        "role": span_role_indices[span_indices_of_tokens],
        "turn": span_turn_numbers[span_indices_of_tokens],
    }
