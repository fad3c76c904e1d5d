"""The text of a run: one host's share of a data set, as samples and batches.

`Text` opens the data, the tokenizer and the chat template that the flags name, and puts the stages
of the text room together: rows, documents, samples, packed batches. prefetch.py prepares batches
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

BATCHES_AHEAD = 4


@dataclass(frozen=True)
class Text:
    """Turns the rows of a data set into samples and batches, as the flags ask.

    The tokenizer, the template and the data set are opened when they are first needed, which raises
    InputError.

    Attributes:
        options: The flags about text.
        model: The files of the model.
        vocabulary: How many token ids the model has.
        earlier: The metadata that hosts of the run have stored already; see `open_dataset`.
        names: The names of the sources of a mixture; see `open_dataset`.
        adapter: The files of the LoRA adapter; None without one.
    """

    options: TextOptions
    model: Repository
    vocabulary: int
    earlier: Sequence[Mapping[str, Any]] = ()
    names: Sequence[str] = ()
    adapter: Repository | None = None

    @cached_property
    def chosen_tokenizer(self) -> ChosenTokenizer | None:
        """The tokenizer of the model or its adapter; None if the data set has token ids."""
        if self.options.ids_column:
            return None
        return choose_tokenizer(self.model, self.adapter, self.vocabulary)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The object that makes token ids of texts; None if the data set has token ids."""
        chosen = self.chosen_tokenizer
        return None if chosen is None else chosen.backend

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, which renders conversations; None if there are none."""
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
        """The form of rows: which columns are read, and how they become a document."""
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
        """The ids of the tokens to drop, which the flags name by id or by name."""
        return dropped_ids(self.options.drop_token_ids, self.tokenizer, self.vocabulary)

    @cached_property
    def dataset(self) -> Dataset:
        """The open data."""
        return open_dataset(self.options, self.row_form, self.earlier, self.names)

    def check(self) -> None:
        """Checks the chat template, and the first row of each source.

        Raises:
            InputError: The template cannot render conversations or does not show the roles of
                tokens that the flags name, or the first row of a source cannot be used.
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
        """Returns a worker's documents."""
        sources, options = self.dataset.sources, self.options
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
        """Returns the batches whose samples are not stored yet.

        Args:
            worker: Machine and host.
            shape: Rows of a batch, and tokens of a row.
            storage: Storage of the host, which says what is stored already.
            watchdog: Watchdog, which also watches over the wait for the first batch. Every stored
                sample that is skipped is progress.

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
            self.sample_form,
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
    """Returns the special tokens that every document gets. Only plain text gets any.

    Args:
        options: Flags about text.
        tokenizer: Tokenizer; None if there is none, and then there are no special tokens.

    Raises:
        InputError: A document that is cut would have no other token.
    """
    plain = not (options.messages_column or options.ids_column)
    if tokenizer is None or not plain or options.special_tokens == "none":
        return SpecialTokens()
    special, length = special_tokens_of(tokenizer), options.max_seq_length
    if len(special) >= length and options.long_documents == "cut":
        raise InputError(
            f"--max_seq_length {length}: has no room for a text and the special tokens around it, "
            f"{special.template}; give at least {len(special) + 1}, or --special_tokens none"
        )
    return special


def known_special_tokens(config: Config) -> SpecialTokens:
    """Returns the special tokens of the model for --list_hooks, where there is no run.

    Returns none if neither the adapter nor the model has a tokenizer.json that can be read.
    """
    tokenizer, model = None, config.model
    if not (config.demo or config.text.ids_column):
        with suppress(InputError):  # a run says what is wrong
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
        tokens: Ids and names of tokens.
        tokenizer: Tokenizer; None only if no token has a name.
        vocabulary: Number of token ids that the model has.

    Raises:
        InputError: There is no such token, or no token would be left.
    """
    token_ids = {token for token in tokens if isinstance(token, int)}
    for name in (token for token in tokens if isinstance(token, str)):
        assert tokenizer is not None  # cli/config.py refuses names where there is none
        token_id = tokenizer.token_to_id(name)
        if token_id is None:
            added_tokens = tokenizer.get_added_tokens_decoder().values()
            added = [str(token.content) for token in added_tokens]
            raise InputError(
                f"--drop_token_ids {name}: the tokenizer has no token of this name"
                f"{near_miss(name, added)}"
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
    """Raises InputError if the flags name roles, but the template's turns do not show them."""
    needed = f"--roles {' '.join(options.roles)}" if options.roles else ""
    if options.positions.last_of_turn:
        needed = f"--positions {options.positions}"
    if needed and not template.has_roles:
        raise InputError(
            f"{needed}: {template.where} writes no turns between {START} and {END}, by which the "
            "roles of tokens are known; give another template with --chat_template"
        )
