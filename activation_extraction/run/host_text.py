"""Turns one host's share of a data set into samples and batches.

`Text` opens the data, the tokenizer and the chat template that the flags name, and connects the
stages of the package `text`: rows, documents, samples, packed batches. prefetch.py prepares batches
while the devices compute.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from activation_extraction.cli.flags import Config, TextOptions
from activation_extraction.common.errors import InputError, RunError, near_miss
from activation_extraction.common.tokenizer_files import WHOLE
from activation_extraction.model.repository import Repository
from activation_extraction.model.repository_files import ADAPTER
from activation_extraction.run.hosts import Watchdog
from activation_extraction.run.open_data import Dataset, open_dataset
from activation_extraction.run.prefetch import PATIENCE, Prefetch
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

BATCHES_AHEAD = 4  # batches that are prepared in advance, besides those of the next group


@dataclass(frozen=True)
class Text:
    """The text of a run, whose rows become samples and batches as the flags ask.

    The tokenizer, the template and the data set are opened when they are first needed. Reading
    these properties raises InputError if that fails.

    Attributes:
        options: The flags about text.
        model: The files of the model.
        vocabulary: The number of token ids that the model has.
        earlier: The metadata that hosts of the run have stored already; see `open_dataset`.
        names: The names of the sources of a mixture; see `open_dataset`.
        adapter: The files of the LoRA adapter. None without an adapter.
    """

    options: TextOptions
    model: Repository
    vocabulary: int
    earlier: Sequence[Mapping[str, Any]] = ()
    names: Sequence[str] = ()
    adapter: Repository | None = None

    @cached_property
    def chosen_tokenizer(self) -> ChosenTokenizer | None:
        """The tokenizer of the model or the adapter. None if the data set has token ids."""
        if self.options.ids_column:
            return None
        return choose_tokenizer(self.model, self.adapter, self.vocabulary)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The object that turns text into token ids. None if the data set has token ids."""
        chosen = self.chosen_tokenizer
        return None if chosen is None else chosen.backend

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, which renders conversations. None without --messages_column."""
        options = self.options
        if not options.messages_column:
            return None
        chosen = self.chosen_tokenizer
        if chosen is None:
            return None
        arguments = dict(options.chat_template_args)
        if options.chat_template is not None:
            return ChatTemplate.of_file(chosen.pretrained, options.chat_template, arguments)
        home, sources = choose_templates(self.model, self.adapter)
        return ChatTemplate.of_model(chosen.pretrained, sources, home.where, arguments)

    @cached_property
    def row_form(self) -> RowForm:
        """The form of rows: the columns to read, and the readers that make documents of them."""
        options = self.options
        readers: tuple[Reader, ...] = (TextColumn(options.text_column), ArcTask())
        if self.template is not None and options.messages_column:
            conversations = MessagesColumn(options.messages_column, self.template)
            readers = (conversations, ArcTask(self.template))
        elif options.ids_column:
            mask = options.mask_column or ""
            readers = (IdsColumn(options.ids_column, mask, self.vocabulary),)
        return RowForm(readers, options.id_column, options.keep_columns)

    @cached_property
    def sample_form(self) -> SampleForm:
        """The form of samples: how documents become samples."""
        options = self.options
        choice = TokenChoice(options.positions, self.drop_token_ids, options.roles)
        split = options.long_documents == "split"
        special = special_tokens(options, self.tokenizer)
        return SampleForm(options.max_seq_length, split, options.overlap, choice, special)

    @cached_property
    def drop_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens of --drop_token_ids, which names them by id or by name."""
        return dropped_ids(self.options.drop_token_ids, self.tokenizer, self.vocabulary)

    @cached_property
    def dataset(self) -> Dataset:
        """The open data sets of the run."""
        return open_dataset(self.options, self.row_form, self.earlier, self.names)

    def check(self) -> None:
        """Checks the chat template, and the first row of each source.

        Raises:
            InputError: The template cannot render conversations, or the flags need the roles of
                tokens and the template does not show them, or the first row of a source cannot be
                used.
        """
        if self.template is not None:
            check_roles(self.options, self.template)
            self.template.check()
        for source in self.dataset.sources:
            try:
                check_dataset(source.rows, self.row_form, self.options.skip_bad_rows)
            except InputError as error:
                if source.name is None:
                    raise
                raise InputError(f"--mix {source.name}: {error}") from error

    def documents(self, worker: Worker) -> Documents:
        """Returns the stream of a worker's documents.

        Args:
            worker: The machine and host, which read a share of the data.
        """
        sources = self.dataset.sources
        options = self.options
        streams = [
            DocumentStream(
                source.rows,
                self.row_form,
                worker,
                skip_bad_rows=options.skip_bad_rows,
                leave=self.dataset.files.check,
                shuffle=options.shuffle_documents,
                source=source.name,
            )
            for source in sources
        ]
        if sources[0].name is None:
            return streams[0]
        names = [str(source.name) for source in sources]
        return Mixture(streams, names, [source.weight for source in sources])

    def open(
        self,
        worker: Worker,
        shape: tuple[int, int],
        storage: ActivationStorage,
        watchdog: Watchdog,
    ) -> Prefetch[Batch, Mark | None]:
        """Returns the batches of the samples that are not stored yet, prepared in advance.

        Args:
            worker: The machine and host.
            shape: Rows of a batch, and tokens of a row.
            storage: The storage of the host, which knows the samples that are stored already.
            watchdog: The watchdog, which also watches over the wait for the first batch. Every
                stored sample that is skipped counts as progress.

        Returns:
            The batches. Their `result` is the mark at the end of the data, or at the limits of the
            run. It stays None if everything is stored already.

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
            self.sample_form,
            start=storage.plan.mark,
            stored=storage.stored_after_mark,
            until=storage.plan.samples_to_read,
            limits_from=storage.plan.end_of_stored(worker),
            on_stored=on_stored,
            **storage.limits,
        )
        # Batches are prepared so far ahead that the whole next group of samples is read while the
        # devices compute the batches of the current group.
        ahead = BATCHES_AHEAD + rows_of_group(length) // rows
        batches = Prefetch(
            pack(stream, rows, length),
            ahead,
            skipping if worker.hosts > 1 else None,
            min(PATIENCE, watchdog.seconds / 4),
        )
        try:
            with watchdog:
                first = batches.peek()
        except RunError as error:
            raise with_remedy(error) from error
        if first is None and worker == Worker() and not storage.totals.samples:
            raise InputError("the data set is empty: no row has text; expected at least one")
        return batches


def special_tokens(options: TextOptions, tokenizer: Tokenizer | None) -> SpecialTokens:
    """Returns the special tokens that are added to every document. Only plain text gets any.

    Args:
        options: The flags about text.
        tokenizer: The tokenizer. None for no tokenizer and so no special tokens.

    Raises:
        InputError: A document that is cut to --max_seq_length would have only special tokens.
    """
    plain = not (options.messages_column or options.ids_column)
    if tokenizer is None or not plain or options.special_tokens == "none":
        return SpecialTokens()
    special = special_tokens_of(tokenizer)
    length = options.max_seq_length
    if len(special) >= length and options.long_documents == "cut":
        raise InputError(
            f"--max_seq_length {length}: has no room for a text and the special tokens around it, "
            f"{special.template}; give at least {len(special) + 1}, or --special_tokens none"
        )
    return special


def known_special_tokens(config: Config) -> SpecialTokens:
    """Returns the special tokens of the model for --list_hooks, where there is no run.

    Args:
        config: The configuration.

    Returns:
        No special tokens if the tokenizer.json of the adapter or else of the model is missing or
        cannot be read.

    Raises:
        InputError: A document that is cut to --max_seq_length would have only special tokens.
    """
    tokenizer = None
    model = config.model
    if not (config.demo or config.text.ids_column):
        with suppress(InputError):  # a run reports why it cannot be read
            path = None
            if model.lora:
                path = Repository(model.lora, kind=ADAPTER).find(WHOLE)
            if path is None:
                path = Repository(model.model_path, model.model_revision).find(WHOLE)
            if path is not None:
                tokenizer = read_tokenizer(path)
    return special_tokens(config.text, tokenizer)


def dropped_ids(
    tokens: Sequence[int | str], tokenizer: Tokenizer | None, vocabulary: int
) -> tuple[int, ...]:
    """Returns the ids of the tokens to drop, in ascending order.

    Args:
        tokens: The ids and names of tokens.
        tokenizer: The tokenizer, which knows the names. None only if all tokens are ids.
        vocabulary: The number of token ids that the model has.

    Raises:
        InputError: The tokenizer or the model lacks a token, or no token would be left.
    """
    token_ids = {token for token in tokens if isinstance(token, int)}
    token_names = [token for token in tokens if isinstance(token, str)]
    for token_name in token_names:
        assert tokenizer is not None  # cli/config.py refuses names where there is none
        token_id = tokenizer.token_to_id(token_name)
        if token_id is None:
            added_tokens = tokenizer.get_added_tokens_decoder().values()
            added = [str(token.content) for token in added_tokens]
            raise InputError(
                f"--drop_token_ids {token_name}: the tokenizer has no token of this name"
                f"{near_miss(token_name, added)}"
            )
        token_ids.add(token_id)
    if (largest := max(token_ids, default=0)) >= vocabulary:
        raise InputError(
            f"--drop_token_ids {largest}: the model has token ids 0 to {vocabulary - 1}"
        )
    if len(token_ids) == vocabulary:
        raise InputError("--drop_token_ids: names every token of the model; nothing is left")
    return tuple(sorted(token_ids))


def check_roles(options: TextOptions, template: ChatTemplate) -> None:
    """Checks that the chat template shows the roles of tokens if the flags need them.

    Args:
        options: The flags about text; --roles and some rules of --positions need roles.
        template: The chat template.

    Raises:
        InputError: The flags need roles that the turns of the template do not show.
    """
    needed = f"--roles {' '.join(options.roles)}" if options.roles else ""
    if options.positions.last_of_turn:
        needed = f"--positions {options.positions}"
    if needed and not template.has_roles:
        raise InputError(
            f"{needed}: {template.where} writes no turns between {START} and {END}, by which the "
            "roles of tokens are known; give another template with --chat_template"
        )
