"""Makes batches of the text of a run, as the flags ask: of one host's share of a data set.

A thread prepares the next batches while the devices compute.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from tokenizers import Tokenizer

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError, RunError, near_miss, one_line
from activation_extraction.common.tokenizer_files import WHOLE
from activation_extraction.model.repository import Repository
from activation_extraction.model.repository_files import ADAPTER
from activation_extraction.run.hosts import Watchdog
from activation_extraction.run.open_data import Dataset, open_dataset
from activation_extraction.run.tokenizer_choice import (
    ChosenTokenizer,
    choose_templates,
    choose_tokenizer,
)
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Worker
from activation_extraction.text.chat import ChatTemplate, MessagesColumn
from activation_extraction.text.documents import (
    Documents,
    DocumentStream,
    Mixture,
    check_dataset,
    with_remedy,
)
from activation_extraction.text.mark import Mark
from activation_extraction.text.packing import pack, rows_of_group
from activation_extraction.text.readers import ArcTask, IdsColumn, TextColumn
from activation_extraction.text.roles import END, START
from activation_extraction.text.rows import Reader, RowForm
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.token_choice import TokenChoice
from activation_extraction.text.tokenizer import read_tokenizer
from activation_extraction.text.tokens import SpecialTokens, special_tokens_of

T = TypeVar("T")
R = TypeVar("R")
BATCHES_AHEAD = 4
POLL = 0.2  # seconds between checks whether to stop
PATIENCE = 10.0  # seconds; a host that skips samples then takes part in a step without a batch


@dataclass(frozen=True)
class _End(Generic[R]):
    """The end of the items that a thread prepares.

    Attributes:
        result: Value that the generator of the items has returned. None if it has failed.
        error: Exception that it has raised. None if it has not failed.
    """

    result: R | None = None
    error: BaseException | None = None


class Prefetch(Generic[T, R]):
    """Yields the items of a generator, of which a background thread prepares some in advance.

    An exception in the generator is raised here when its turn comes, whatever kind it is.

    Attributes:
        result: Value that the generator has returned. None until its last item was taken here and
            the next one was asked for, however much of it was prepared.
    """

    def __init__(
        self,
        items: Generator[T, None, R],
        depth: int,
        skipping: threading.Event | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Starts the thread.

        Args:
            items: The generator.
            depth: The most items that are prepared.
            skipping: An event that is set again and again while the generator leaves out samples
                that are stored. As long as it does, None is yielded from time to time, so that the
                other hosts of a pod, which wait for this one, can go on. None to wait for an item,
                however long it takes.
            patience: The seconds after which None is yielded.
        """
        self.result: R | None = None
        self._skipping, self._patience = skipping, patience
        self._head: T | None = None
        self._ready: queue.Queue[T | _End[R]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Generator[T, None, R]) -> None:
        end: _End[R]
        try:
            while True:
                self._ready.put(next(items))
        except StopIteration as stop:
            end = _End(result=stop.value)
        except BaseException as error:  # otherwise the consumer would wait forever
            end = _End(error=error)
        self._ready.put(end)

    @property
    def ready(self) -> int:
        return self._ready.qsize()

    def peek(self) -> T | None:
        """Returns the next item, without consuming it; None at the end, or if it is not ready yet
        because samples are skipped."""
        if self._head is None:
            self._head = next(iter(self), None)
        return self._head

    def __iter__(self) -> Iterator[T | None]:
        return self.until(lambda: False)

    def until(self, stopped: Callable[[], object]) -> Iterator[T | None]:
        """Yields items until `stopped` returns true, which is called several times a second.

        Yields None in the place of an item that is not ready because samples are skipped.
        """
        waiting_since = time.monotonic()
        while not stopped():
            if (head := self._head) is not None:
                self._head = None
                yield head
                waiting_since = time.monotonic()
                continue
            try:
                item = self._ready.get(timeout=POLL)
            except queue.Empty:
                waited = time.monotonic() - waiting_since
                skipping = self._skipping
                if skipping is not None and skipping.is_set() and waited >= self._patience:
                    skipping.clear()
                    yield None
                    waiting_since = time.monotonic()
                continue
            if isinstance(item, _End):
                error = item.error
                self._ready.put(replace(item, error=None))  # the next iteration ends as well
                if isinstance(error, Exception):
                    raise error
                if error is not None:
                    raise RunError(f"preparing batches failed: {one_line(error)}") from error
                self.result = item.result
                return
            yield item
            waiting_since = time.monotonic()


@dataclass(frozen=True)
class Text:
    """Turns the rows of a data set into samples and batches, as the flags ask.

    The tokenizer, the template and the data set are opened when they are first needed, which raises
    InputError.

    Attributes:
        config: The flags of the run.
        model: The files of the model.
        vocabulary: How many token ids the model has.
        earlier: The metadata that hosts of the run have stored already; see `open_dataset`.
        names: The names of the sources of a mixture; see `open_dataset`.
        adapter: The files of the LoRA adapter; None without one.
    """

    config: Config
    model: Repository
    vocabulary: int
    earlier: Sequence[Mapping[str, Any]] = ()
    names: Sequence[str] = ()
    adapter: Repository | None = None

    @cached_property
    def chosen_tokenizer(self) -> ChosenTokenizer | None:
        """Returns the tokenizer of the model or its adapter; None if the data set has token ids."""
        if self.config.ids_column:
            return None
        return choose_tokenizer(self.model, self.adapter, self.vocabulary)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Returns what makes token ids of texts; None if the data set has token ids."""
        chosen = self.chosen_tokenizer
        return None if chosen is None else chosen.backend

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Returns what renders conversations; None if there are none."""
        config = self.config
        if not config.messages_column:
            return None
        chosen = self.chosen_tokenizer
        if chosen is None:
            return None
        arguments = dict(config.chat_template_args)
        if config.chat_template is not None:
            return ChatTemplate.of_file(chosen.pretrained, config.chat_template, arguments)
        home, sources = choose_templates(self.model, self.adapter)
        return ChatTemplate.of_model(chosen.pretrained, sources, home.where, arguments)

    @cached_property
    def rows(self) -> RowForm:
        """Returns what is read of every row of the data set."""
        config = self.config
        readers: tuple[Reader, ...] = (TextColumn(config.text_column), ArcTask())
        if self.template is not None and config.messages_column:
            conversations = MessagesColumn(config.messages_column, self.template)
            readers = (conversations, ArcTask(self.template))
        elif config.ids_column:
            mask = config.mask_column or ""
            readers = (IdsColumn(config.ids_column, mask, self.vocabulary),)
        return RowForm(readers, config.id_column, config.keep_columns)

    @cached_property
    def form(self) -> SampleForm:
        """Returns how documents become samples."""
        config = self.config
        choice = TokenChoice(config.positions, self.drop_token_ids, config.roles)
        split, special = config.long_documents == "split", special_tokens(config, self.tokenizer)
        return SampleForm(config.max_seq_length, split, config.overlap, choice, special)

    @cached_property
    def drop_token_ids(self) -> tuple[int, ...]:
        """Returns the ids of the tokens to drop, be they given by id or by name."""
        return dropped_ids(self.config.drop_token_ids, self.tokenizer, self.vocabulary)

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(self.config, self.rows, self.earlier, self.names)

    def check(self) -> None:
        """Raises InputError unless the template renders conversations and has the roles that are
        asked for, and the first row of each source can be used."""
        if self.template is not None:
            check_roles(self.config, self.template)
            self.template.check()
        for source in self.dataset.sources:
            try:
                check_dataset(source.rows, self.rows, self.config.skip_bad_rows)
            except InputError as error:
                if source.name is None:
                    raise
                raise InputError(f"--mix {source.name}: {error}") from error

    def documents(self, worker: Worker) -> Documents:
        """Returns a worker's documents."""
        sources, config = self.dataset.sources, self.config
        streams = [
            DocumentStream(
                source.rows,
                self.rows,
                worker,
                skip_bad_rows=config.skip_bad_rows,
                leave=self.dataset.files.check,
                shuffle=config.shuffle_documents,
                source=source.name,
            )
            for source in sources
        ]
        if sources[0].name is None:
            return streams[0]
        return Mixture(streams, [str(s.name) for s in sources], [s.weight for s in sources])

    def open(
        self,
        worker: Worker,
        shape: tuple[int, int],
        storage: ActivationStorage,
        watchdog: Watchdog,
    ) -> Prefetch[Batch, Mark | None]:
        """Returns the batches whose samples are not stored yet.

        Args:
            worker: The host.
            shape: The rows of a batch, and the tokens of a row.
            storage: What is stored already.
            watchdog: The watchdog, which also watches over the wait for the first batch. Every
                stored sample that is skipped is progress.

        Returns:
            The batches; their `result` is the mark at the end of the data, or of what the limits
            allow. It stays None if everything is stored already.

        Raises:
            InputError: The first batch cannot be read, or there is no text at all.
        """
        rows, length = shape
        if storage.complete:
            return Prefetch(pack((), rows, length), BATCHES_AHEAD)
        skipping = threading.Event()

        def on_stored() -> None:
            watchdog.reset()
            skipping.set()

        stream = samples(
            self.documents(worker),
            self.tokenizer,
            self.form,
            start=storage.plan.mark,
            stored=storage.stored_after_mark,
            until=storage.plan.until,
            limits_from=storage.plan.end_of_stored(worker),
            on_stored=on_stored,
            **storage.limits,
        )
        # While the devices compute the batches of a group, the next one is read.
        ahead = BATCHES_AHEAD + rows_of_group(length) // rows
        batches = Prefetch(
            pack(stream, rows, length),
            ahead,
            skipping if worker.hosts > 1 else None,
            min(PATIENCE, self.config.stall_timeout / 4),
        )
        try:
            with watchdog:
                first = batches.peek()
        except RunError as error:
            raise with_remedy(error) from error
        if first is None and worker == Worker() and not storage.totals.samples:
            raise InputError("the data set is empty: no row has text; expected at least one")
        return batches


def special_tokens(config: Config, tokenizer: Tokenizer | None) -> SpecialTokens:
    """Returns what every document gets: nothing but for plain text. Raises InputError if a cut
    document would have no other token."""
    plain = not (config.messages_column or config.ids_column)
    if tokenizer is None or not plain or config.special_tokens == "none":
        return SpecialTokens()
    special, length = special_tokens_of(tokenizer), config.max_seq_length
    if len(special) >= length and config.long_documents == "cut":
        raise InputError(
            f"--max_seq_length {length}: has no room for a text and the special tokens around it, "
            f"{special.template}; give at least {len(special) + 1}, or --special_tokens none"
        )
    return special


def known_special_tokens(config: Config) -> SpecialTokens:
    """Returns the special tokens of the model for --list_hooks, where there is no run.

    Returns none if neither the adapter nor the model has a tokenizer.json that can be read.
    """
    tokenizer = None
    if not (config.demo or config.ids_column):
        with suppress(InputError):  # a run says what is wrong
            path = Repository(config.lora, kind=ADAPTER).find(WHOLE) if config.lora else None
            path = path or Repository(config.model_path, config.model_revision).find(WHOLE)
            tokenizer = None if path is None else read_tokenizer(path)
    return special_tokens(config, tokenizer)


def dropped_ids(
    tokens: Sequence[int | str], tokenizer: Tokenizer | None, vocabulary: int
) -> tuple[int, ...]:
    """Returns the ids of the tokens to drop, of a model that has `vocabulary` token ids.

    Raises InputError if it has no such token, or no other one.
    """
    token_ids = {token for token in tokens if isinstance(token, int)}
    for name in (token for token in tokens if isinstance(token, str)):
        assert tokenizer is not None  # cli/config.py refuses names where there is none
        if (found := tokenizer.token_to_id(name)) is None:
            added = [str(each.content) for each in tokenizer.get_added_tokens_decoder().values()]
            raise InputError(
                f"--drop_token_ids {name}: the tokenizer has no token of this name"
                f"{near_miss(name, added)}"
            )
        token_ids.add(found)
    if (largest := max(token_ids, default=0)) >= vocabulary:
        raise InputError(
            f"--drop_token_ids {largest}: the model has token ids 0 to {vocabulary - 1}"
        )
    if len(token_ids) == vocabulary:
        raise InputError("--drop_token_ids: names every token of the model; nothing is left")
    return tuple(sorted(token_ids))


def check_roles(config: Config, template: ChatTemplate) -> None:
    """Raises InputError if roles are asked for and the template's turns do not show them."""
    needed = f"--roles {' '.join(config.roles)}" if config.roles else ""
    if config.positions.last_of_turn:
        needed = f"--positions {config.positions}"
    if needed and not template.has_roles:
        raise InputError(
            f"{needed}: {template.where} writes no turns between {START} and {END}, by which the "
            "roles of tokens are known; give another template with --chat_template"
        )
