"""Makes batches of one host's share of a data set, as the flags ask.

A thread prepares the next batches while the devices compute.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokenizers import Tokenizer

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.model.checkpoint import Checkpoint, read_json
from activation_extraction.run.open_data import Dataset, TextRequest
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Worker
from activation_extraction.text.chat import ChatTemplate
from activation_extraction.text.documents import Documents, with_remedy
from activation_extraction.text.messages import MessagesColumn
from activation_extraction.text.packing import pack, rows_of_group
from activation_extraction.text.rows import IdsColumn, Reader, RowForm, TextColumn
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.token_choice import TokenChoice
from activation_extraction.text.tokenizer import (
    SpecialTokens,
    load_tokenizer,
    pretrained,
    read_tokenizer,
    special_tokens_of,
    tokenizer_file,
)

T = TypeVar("T")
BATCHES_AHEAD = 4
POLL = 0.2  # seconds between checks whether to stop
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
PROCESSOR_TEMPLATE = "chat_template.json"  # of models that also take images; some have no other


class Prefetch(Generic[T]):
    """Yields the items of an iterator, of which a background thread prepares up to `depth`.

    An exception in the iterator is raised here when its turn comes, whatever kind it is.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._head: T | None = None
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._ready.put((item, None))
        except BaseException as error:  # otherwise the consumer would wait forever
            self._ready.put((None, error))
        self._ready.put((None, None))

    @property
    def ready(self) -> int:
        return self._ready.qsize()

    def peek(self) -> T | None:
        """Returns the next item, without consuming it; None at the end."""
        if self._head is None:
            self._head = next(iter(self), None)
        return self._head

    def __iter__(self) -> Iterator[T]:
        return self.until(lambda: False)

    def until(self, stopped: Callable[[], object]) -> Iterator[T]:
        """Yields items until `stopped` returns true; it is called several times a second."""
        while not stopped():
            if (head := self._head) is not None:
                self._head = None
                yield head
                continue
            try:
                item, error = self._ready.get(timeout=POLL)
            except queue.Empty:
                continue
            if isinstance(error, Exception):
                raise error
            if error is not None:
                raise RunError(f"preparing batches failed: {one_line(error)}") from error
            if item is None:
                self._ready.put((None, None))  # the next iteration ends as well
                return
            yield item


def load_text_files(
    request: TextRequest, checkpoint: Checkpoint, vocabulary: int
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Loads what a request needs to make token ids: nothing if the data set has them, and a
    chat template for conversations alone. Raises InputError."""
    if request.ids_column:
        return None, None
    files, name = checkpoint.tokenizer_files(), checkpoint.model_path
    if request.messages_column:
        for beside in TEMPLATE_FILES:  # transformers looks for them when it loads the tokenizer
            checkpoint.find(beside)
    tokenizer = load_tokenizer(files, name, vocabulary)
    if not request.messages_column:
        return tokenizer, None
    own, arguments = pretrained(tokenizer_file(files, name)), dict(request.chat_template_args)
    if not own.chat_template and (path := checkpoint.find(PROCESSOR_TEMPLATE)) is not None:
        template = read_json(path).get("chat_template")
        own.chat_template = template if isinstance(template, str) else None
    return tokenizer, ChatTemplate.load(own, name, request.chat_template, arguments)


def row_form(request: TextRequest, template: ChatTemplate | None, vocabulary: int) -> RowForm:
    """Returns what is read of every row. vocabulary: how many token ids the model has."""
    reader: Reader = TextColumn(request.text_column)
    if template is not None and request.messages_column:
        reader = MessagesColumn(request.messages_column, template)
    elif request.ids_column:
        reader = IdsColumn(request.ids_column, request.mask_column or "", vocabulary)
    return RowForm(reader, request.id_column, request.keep_columns)


def special_tokens(request: TextRequest, tokenizer: Tokenizer | None) -> SpecialTokens:
    """Returns what every document gets: nothing but for plain text. Raises InputError if a cut
    document would have no other token."""
    plain = not (request.messages_column or request.ids_column)
    if tokenizer is None or not plain or request.special_tokens == "none":
        return SpecialTokens()
    special, length = special_tokens_of(tokenizer), request.max_seq_length
    if len(special) >= length and request.long_documents == "cut":
        raise InputError(
            f"--max_seq_length {length}: has no room for a text and the special tokens around it, "
            f"{special.template}; give at least {len(special) + 1}, or --special_tokens none"
        )
    return special


def known_special_tokens(config: Config) -> SpecialTokens:
    """Returns the same without a run: nothing if there is no tokenizer.json that can be read."""
    tokenizer = None
    if not (config.demo or config.ids_column):
        checkpoint = Checkpoint(config.model_path, config.model_revision)
        with suppress(InputError):  # a run says what is wrong
            if (path := checkpoint.find("tokenizer.json")) is not None:
                tokenizer = read_tokenizer(path)
    return special_tokens(config.part(TextRequest), tokenizer)


def sample_form(request: TextRequest, tokenizer: Tokenizer | None) -> SampleForm:
    choice = TokenChoice(request.positions, request.drop_token_ids, request.roles)
    split, special = request.long_documents == "split", special_tokens(request, tokenizer)
    return SampleForm(request.max_seq_length, split, request.overlap, choice, special)


@dataclass(frozen=True)
class HostText:
    """Turns one host's share of a data set into batches, as the flags ask.

    tokenizer: None if the data set has token ids. shape: rows of a batch, and tokens of a row.
    """

    request: TextRequest
    dataset: Dataset
    rows: RowForm
    tokenizer: Tokenizer | None
    worker: Worker
    shape: tuple[int, int]

    @property
    def form(self) -> SampleForm:
        return sample_form(self.request, self.tokenizer)

    @property
    def max_samples(self) -> int | None:
        """Returns the most samples that this host stores; None: no limit."""
        return self._share(self.request.max_samples)

    @property
    def max_tokens(self) -> int | None:
        """Returns the most tokens that this host stores; None: no limit."""
        return self._share(self.request.max_tokens)

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else len(range(self.worker.host, limit, self.worker.hosts))

    def open(
        self, storage: ActivationStorage, watchdog: AbstractContextManager[object]
    ) -> tuple[Documents, Prefetch[Batch]]:
        """Returns the host's documents, and the batches whose samples are not stored yet.

        watchdog: watches over the wait for the first batch. Raises InputError if that one cannot be
        read, or if there is no text at all.
        """
        request, (rows, length) = self.request, self.shape
        documents = self.dataset.documents(
            self.rows, self.worker, request.skip_bad_rows, request.shuffle_documents
        )
        if storage.complete:
            return documents, Prefetch(iter(()), BATCHES_AHEAD)
        stream = samples(
            documents,
            self.tokenizer,
            self.form,
            start=storage.plan.mark,
            stored=storage.stored_after_mark,
            until=storage.plan.until,
            **storage.limits,
        )
        # While the devices compute the batches of a group, the next one is read.
        ahead = BATCHES_AHEAD + rows_of_group(length) // rows
        batches = Prefetch(pack(stream, rows, length), ahead)
        try:
            with watchdog:
                first = batches.peek()
        except RunError as error:
            raise with_remedy(error) from error
        if first is None and self.worker == Worker() and not storage.totals.samples:
            raise InputError("the data set is empty: no row has text; expected at least one")
        return documents, batches
