"""Turns one host's share of a data set into samples and batches.

`Text` opens the data, the tokenizer and the chat template that the flags name. It connects the
stages of the package `text`, which turn rows into documents, documents into samples, and samples
into packed batches. prefetch.py prepares batches while the devices compute.
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
from activation_extraction.common.tokenizer_files import TOKENIZER_JSON
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
from activation_extraction.text.rows import Reader, RowSchema
from activation_extraction.text.samples import SampleSettings, samples
from activation_extraction.text.token_choice import TokenChoice
from activation_extraction.text.tokenizer import read_tokenizer
from activation_extraction.text.tokens import SpecialTokens, special_tokens_of

# Number of batches that are prepared in advance, in addition to the batches of the next group of
# samples.
BATCHES_AHEAD = 4


@dataclass(frozen=True)
class Text:
    """The text pipeline of a run, which makes samples and batches from the rows of its data set.

    The tokenizer, the chat template and the data set are opened when their properties are first
    read. If one of them cannot be opened, reading the property raises InputError.

    Attributes:
        options: The flags about text.
        model_repository: The files of the model.
        vocabulary_size: The number of token ids that the model has.
        metadata_of_earlier_outputs: The content of each metadata.json that this run has stored
            already, in the local folder and in the bucket. Empty for a new run.
        source_names: The names of the sources of a mixture. Empty to take them from the flags.
        adapter_repository: The files of the LoRA adapter. None without an adapter.
    """

    options: TextOptions
    model_repository: Repository
    vocabulary_size: int
    metadata_of_earlier_outputs: Sequence[Mapping[str, Any]] = ()
    source_names: Sequence[str] = ()
    adapter_repository: Repository | None = None

    @cached_property
    def chosen_tokenizer(self) -> ChosenTokenizer | None:
        """The tokenizer of the run, with the files of the model or the adapter that contain it.

        `choose_tokenizer` documents when the adapter's tokenizer is used instead of the model's.
        None if the data set has token ids.
        """
        if self.options.ids_column:
            return None
        return choose_tokenizer(
            self.model_repository, self.adapter_repository, self.vocabulary_size
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer object that turns text into token ids, the `backend` of `chosen_tokenizer`.

        None if the data set contains token ids, so that the run needs no tokenizer.
        """
        chosen_tokenizer = self.chosen_tokenizer
        return None if chosen_tokenizer is None else chosen_tokenizer.backend

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, which renders conversations. None without --messages_column."""
        text_options = self.options
        if not text_options.messages_column:
            return None
        chosen_tokenizer = self.chosen_tokenizer
        if chosen_tokenizer is None:
            return None
        template_arguments = dict(text_options.chat_template_args)
        if text_options.chat_template is not None:
            return ChatTemplate.of_file(
                chosen_tokenizer.pretrained_tokenizer,
                text_options.chat_template,
                template_arguments,
            )
        repository_of_templates, jinja_source_by_template_name = choose_templates(
            self.model_repository, self.adapter_repository
        )
        return ChatTemplate.of_model(
            chosen_tokenizer.pretrained_tokenizer,
            jinja_source_by_template_name,
            repository_of_templates.flag_with_value,
            template_arguments,
        )

    @cached_property
    def row_schema(self) -> RowSchema:
        """The settings by which rows become documents: the columns and their readers."""
        text_options = self.options
        row_readers: tuple[Reader, ...] = (TextColumn(text_options.text_column), ArcTask())
        if self.template is not None and text_options.messages_column:
            conversation_reader = MessagesColumn(text_options.messages_column, self.template)
            row_readers = (conversation_reader, ArcTask(self.template))
        elif text_options.ids_column:
            mask_column = text_options.mask_column or ""
            row_readers = (IdsColumn(text_options.ids_column, mask_column, self.vocabulary_size),)
        return RowSchema(row_readers, text_options.id_column, text_options.keep_columns)

    @cached_property
    def sample_settings(self) -> SampleSettings:
        """The settings by which documents become samples."""
        text_options = self.options
        token_choice = TokenChoice(text_options.positions, self.drop_token_ids, text_options.roles)
        splits_documents = text_options.long_documents == "split"
        special_tokens_of_run = special_tokens(text_options, self.tokenizer)
        return SampleSettings(
            text_options.max_seq_length,
            splits_documents,
            text_options.overlap,
            token_choice,
            special_tokens_of_run,
        )

    @cached_property
    def drop_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that --drop_token_ids gives by their ids or names, ascending."""
        return dropped_ids(self.options.drop_token_ids, self.tokenizer, self.vocabulary_size)

    @cached_property
    def dataset(self) -> Dataset:
        """The open data of the run: one data set, or all data sets of a mixture."""
        return open_dataset(
            self.options, self.row_schema, self.metadata_of_earlier_outputs, self.source_names
        )

    def check(self) -> None:
        """Checks the chat template, and the first row of each data set.

        Raises:
            InputError: If the template cannot render conversations, if the flags need the roles of
                tokens but the template does not show them, or if the first row of a data set cannot
                be used.
        """
        if self.template is not None:
            check_roles(self.options, self.template)
            self.template.check()
        for data_source in self.dataset.sources:
            try:
                check_dataset(data_source.row_stream, self.row_schema, self.options.skip_bad_rows)
            except InputError as error:
                if data_source.name_in_mixture is None:
                    raise
                raise InputError(f"--mix {data_source.name_in_mixture}: {error}") from error

    def documents(self, worker: Worker) -> Documents:
        """Returns the stream of documents in a worker's share of the data.

        Args:
            worker: The worker (a host of a machine) whose share is read.
        """
        data_sources = self.dataset.sources
        text_options = self.options
        document_streams = [
            DocumentStream(
                data_source.row_stream,
                self.row_schema,
                worker,
                skip_bad_rows=text_options.skip_bad_rows,
                file_end_callback=self.dataset.files.check,
                shuffle=text_options.shuffle_documents,
                source=data_source.name_in_mixture,
            )
            for data_source in data_sources
        ]
        if data_sources[0].name_in_mixture is None:
            return document_streams[0]
        source_names = [str(data_source.name_in_mixture) for data_source in data_sources]
        return Mixture(
            document_streams,
            source_names,
            [data_source.weight_in_mixture for data_source in data_sources],
        )

    def open(
        self,
        worker: Worker,
        shape: tuple[int, int],
        storage: ActivationStorage,
        watchdog: Watchdog,
    ) -> Prefetch[Batch, Mark | None]:
        """Opens the stream of batches that contain the samples that are not stored yet.

        Args:
            worker: The worker (a host of a machine) whose share is read.
            shape: The number of rows of a batch, and the number of tokens of a row.
            storage: The storage of the host, which knows the samples that are stored already.
            watchdog: The watchdog, which ends the process if the first batch does not come in time.
                Each stored sample that is skipped counts as progress.

        Returns:
            An iterable of batches, which a background thread prepares. After the last batch, its
            attribute `generator_result` is the mark at the end of the data or at the limits of the
            run. This attribute is None if everything is stored already.

        Raises:
            InputError: If the first batch cannot be read, or if the data set contains no text.
        """
        rows_per_batch, tokens_per_row = shape
        if storage.complete:
            return Prefetch(pack((), rows_per_batch, tokens_per_row), BATCHES_AHEAD)
        sample_skipped_event = threading.Event()

        def on_stored() -> None:
            watchdog.reset()
            sample_skipped_event.set()

        sample_stream = samples(
            self.documents(worker),
            self.tokenizer,
            self.sample_settings,
            start=storage.plan.mark,
            stored=storage.stored_after_mark,
            until=storage.plan.num_samples_to_read,
            limits_from=storage.plan.end_of_stored(worker),
            on_stored=on_stored,
            **storage.limits,
        )
        # This number is large enough that the whole next group of samples is read while the devices
        # compute the batches of the current group.
        num_batches_ahead = BATCHES_AHEAD + rows_of_group(tokens_per_row) // rows_per_batch
        prefetched_batches = Prefetch(
            pack(sample_stream, rows_per_batch, tokens_per_row),
            num_batches_ahead,
            sample_skipped_event if worker.num_hosts > 1 else None,
            min(PATIENCE, watchdog.max_silent_seconds / 4),
        )
        try:
            with watchdog:
                first_batch = prefetched_batches.peek()
        except RunError as error:
            raise with_remedy(error) from error
        if first_batch is None and worker == Worker() and not storage.totals.samples:
            raise InputError("the data set is empty: no row has text; expected at least one")
        return prefetched_batches


def special_tokens(options: TextOptions, tokenizer: Tokenizer | None) -> SpecialTokens:
    """Returns the special tokens that are added to each document.

    No special tokens are returned if the documents are conversations or token ids, because special
    tokens are added only to plain text.

    Args:
        options: The flags about text.
        tokenizer: The tokenizer, which determines the special tokens. None to add none.

    Raises:
        InputError: If a document that is cut to --max_seq_length would have only special tokens.
    """
    is_plain_text = not (options.messages_column or options.ids_column)
    if tokenizer is None or not is_plain_text or options.special_tokens == "none":
        return SpecialTokens()
    tokenizer_special_tokens = special_tokens_of(tokenizer)
    max_sample_tokens = options.max_seq_length
    if len(tokenizer_special_tokens) >= max_sample_tokens and options.long_documents == "cut":
        raise InputError(
            f"--max_seq_length {max_sample_tokens}: has no room for a text and the special tokens "
            f"around it, {tokenizer_special_tokens.description}; give at least "
            f"{len(tokenizer_special_tokens) + 1}, or --special_tokens none"
        )
    return tokenizer_special_tokens


def known_special_tokens(config: Config) -> SpecialTokens:
    """Returns the special tokens of the model for --list_hooks, which prepares no run.

    Args:
        config: The configuration.

    Returns:
        The special tokens that the adapter's tokenizer.json declares or, if the adapter has no such
        file, the model's tokenizer.json. No special tokens if the file is missing or cannot be
        read.

    Raises:
        InputError: If a document that is cut to --max_seq_length would have only special tokens.
    """
    tokenizer_from_file = None
    model_options = config.model_options
    if not (config.demo or config.text_options.ids_column):
        with suppress(InputError):  # an unreadable tokenizer is reported when a run is started
            tokenizer_path = None
            if model_options.lora:
                tokenizer_path = Repository(model_options.lora, kind=ADAPTER).find(TOKENIZER_JSON)
            if tokenizer_path is None:
                model_repository = Repository(
                    model_options.model_path, model_options.model_revision
                )
                tokenizer_path = model_repository.find(TOKENIZER_JSON)
            if tokenizer_path is not None:
                tokenizer_from_file = read_tokenizer(tokenizer_path)
    return special_tokens(config.text_options, tokenizer_from_file)


def dropped_ids(
    tokens: Sequence[int | str], tokenizer: Tokenizer | None, vocabulary_size: int
) -> tuple[int, ...]:
    """Returns the ids of the tokens whose activations are not stored, in ascending order.

    Args:
        tokens: The ids or names of these tokens, as --drop_token_ids gives them.
        tokenizer: The tokenizer, which knows the names. May be None if `tokens` are all ids.
        vocabulary_size: The number of token ids that the model has.

    Raises:
        InputError: If a name is not in the tokenizer's vocabulary, if an id is not in the model's
            vocabulary, or if all tokens of the model would be dropped.
    """
    dropped_token_ids = {
        token_id_or_name for token_id_or_name in tokens if isinstance(token_id_or_name, int)
    }
    dropped_token_names = [
        token_id_or_name for token_id_or_name in tokens if isinstance(token_id_or_name, str)
    ]
    for dropped_token_name in dropped_token_names:
        # The tokenizer is None only with --ids_column, and cli/config.py refuses names of tokens
        # together with this flag.
        assert tokenizer is not None
        dropped_token_id = tokenizer.token_to_id(dropped_token_name)
        if dropped_token_id is None:
            added_tokens = tokenizer.get_added_tokens_decoder().values()
            added_token_names = [str(added_token.content) for added_token in added_tokens]
            raise InputError(
                f"--drop_token_ids {dropped_token_name}: the tokenizer has no token of this name"
                f"{near_miss(dropped_token_name, added_token_names)}"
            )
        dropped_token_ids.add(dropped_token_id)
    if (largest_dropped_id := max(dropped_token_ids, default=0)) >= vocabulary_size:
        raise InputError(
            f"--drop_token_ids {largest_dropped_id}: the model has token ids 0 to "
            f"{vocabulary_size - 1}"
        )
    if len(dropped_token_ids) == vocabulary_size:
        raise InputError("--drop_token_ids: names every token of the model; nothing is left")
    return tuple(sorted(dropped_token_ids))


def check_roles(options: TextOptions, template: ChatTemplate) -> None:
    """Checks that the chat template lets the run determine roles of tokens, if flags need them.

    Args:
        options: The flags about text. --roles and some rules of --positions need roles.
        template: The chat template.

    Raises:
        InputError: If the flags need roles, but the template does not write the turns of a
            conversation between <|im_start|> and <|im_end|>, by which the roles are determined.
    """
    role_dependent_flag_text = f"--roles {' '.join(options.roles)}" if options.roles else ""
    if options.positions.keeps_only_last_token_of_turn:
        role_dependent_flag_text = f"--positions {options.positions}"
    if role_dependent_flag_text and not template.has_roles:
        raise InputError(
            f"{role_dependent_flag_text}: {template.template_flag_phrase} writes no turns between "
            f"{START} and {END}, by which the roles of tokens are known; give another template "
            "with --chat_template"
        )
