"""Compares the hidden states of another program with the states of the model, for --verify.

The other program has stored a file for each row of its data set. The file contains the token ids of
the row's sample and, for each of some layers, an array with the hidden state of each token. In this
module, "a layer of a file" means one of these arrays, not a layer of the model.

hidden_states.py reads the files and compare_states.py compares arrays. This module chooses random
rows, determines the hook whose states each layer of their files should contain, and describes
layers with wrong states.

The files do not tell at which hooks of the model their states were taken. If --layers_to_extract or
--hook_names name the hooks, each layer of a file must contain the states at the hook that the flags
name. Otherwise the hook of each layer is guessed: for each row, the hook is found at which the
states of the model are nearest to the layer, and the hook that is nearest in the most rows is
taken. A guess hides one mistake: if the other program took the states of a layer at a wrong hook in
all rows, this hook is the guess, and no row counts as wrong. But a line names the hook of each
layer, so the user can see the mistake. The hook of the last layer is never guessed, because it
follows from the program that wrote the folder, which is speculators or SpecForge.

A layer of a file is wrong if it does not contain the state of each token of the row's sample at the
expected hook, apart from differences that rounding explains (`RowComparison.is_right`). Each wrong
layer is described. For this, the layer is compared with the states of the row's sample at all hooks
first, and then with the states of other samples: the samples of the rows before and after this row,
and of the other chosen rows.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted, say
from activation_extraction.inspect.compare_states import (
    MIN_ERROR_RATIO,
    Alignment,
    HookMatch,
    Limits,
    align,
    best_alignments,
    match_hooks,
)
from activation_extraction.inspect.draft_files import (
    FINAL_NORM_HOOK,
    hooks_by_hidden_state_index,
    last_residual_stream_hook,
)
from activation_extraction.inspect.hidden_states import StatesFolder, StoredRow
from activation_extraction.store.chosen_samples import StatesRecomputer

# A function that loads the model, and returns the object that recomputes hidden states with it. Its
# arguments are the token ids of all samples that may be computed, (tokens,) each, and the width of
# the stored states.
StatesRecomputerLoader = Callable[[Sequence[np.ndarray], int], StatesRecomputer]
# How well the states in one layer of a file match computed states. A mapping:
# (name of a hook, token offset) -> match with the computed states at this hook and offset (see
# `HookMatch.token_offset_from_state`).
MatchByHookAndOffset = Mapping[tuple[str, int], HookMatch]


class ExpectedHook(NamedTuple):
    """The hook whose states a layer of another program's files should contain.

    Attributes:
        name: Name of the hook. If the hook could not be determined, it is a guess: the hook whose
            states, as the model computes them, are nearest to the layer in the most rows.
        is_hook_determined: Whether the hook could be determined. A flag or the program that wrote
            the files may determine it. Otherwise it is determined if the stored states of the layer
            match the computed states at a hook in at least one row, apart from differences that
            rounding explains.
    """

    name: str
    is_hook_determined: bool = True


@dataclass
class RowComparison:
    """The result of comparing the hidden states in one file with the states of the model.

    Another program has stored the file for one row of its data set. The file contains the token ids
    of the row's sample, and the hidden states of some layers.

    Attributes:
        row_number: Number of the row in the other program's data set.
        row: Content of the file.
        error_limits: Largest differences that rounding explains.
        matches_of_layers: A dict for each layer of the file: (name of a hook, token offset) -> how
            well the layer's hidden states match the states that the model computes for the sample
            at this hook. The stored state with index i is compared with the computed state of the
            token with index i + token offset.
    """

    row_number: int
    row: StoredRow
    error_limits: Limits
    matches_of_layers: list[MatchByHookAndOffset] = field(default_factory=list)

    def best(self, layer_index: int) -> HookMatch:
        """Returns the match with the smallest error for a layer of the file.

        The match names the hook and the token offset at which the computed states are nearest to
        the stored states (see `HookMatch`).

        Args:
            layer_index: Index of the layer in the file, from 0.
        """
        return min(self.matches_of_layers[layer_index].values())

    def is_right(self, layer_index: int, hook: str) -> bool:
        """Returns whether a layer of the file contains the states of the row's sample at a hook.

        Args:
            layer_index: Index of the layer in the file, from 0.
            hook: Name of the hook.
        """
        if len(self.row.states_of_layers[layer_index]) != len(self.row.token_ids):
            return False
        token_offset_from_state = 0
        match_at_hook = self.matches_of_layers[layer_index][hook, token_offset_from_state]
        smallest_rms_token_error = min(
            hook_match.rms_token_error
            for hook_match in self.matches_of_layers[layer_index].values()
            if hook_match.token_offset_from_state == token_offset_from_state
        )
        return (
            match_at_hook.within(self.error_limits)
            and match_at_hook.rms_token_error <= MIN_ERROR_RATIO * smallest_rms_token_error
        )


def verify_hidden_states(
    folder: StatesFolder, load_model: StatesRecomputerLoader | None, count: int
) -> int:
    """Compares random rows of another program's hidden states with the model, and prints problems.

    Args:
        folder: Folder with the hidden states.
        load_model: Function that loads the model. None if the flags name no model.
        count: Number of random rows to compare.

    Returns:
        The exit status: 0 if every chosen row is right and the layers are in the right order,
        otherwise 1.

    Raises:
        InputError: If there is no model, if the model does not fit the files, or if the flags name
            other hooks than the files can contain.
    """
    from tqdm import tqdm  # other flags of this package do not need tqdm

    if load_model is None:
        raise InputError(
            f"--verify: {folder.path} holds hidden states of {folder.writing_program_name}, which "
            "are compared with a model; give --model_path"
        )
    chosen_row_numbers = sorted(
        random.sample([*folder.path_by_row_number], min(count, len(folder.path_by_row_number)))
    )
    row_by_number, messages_about_left_out_rows = _read_rows(folder, chosen_row_numbers)
    if not row_by_number:
        say(*messages_about_left_out_rows)
        raise InputError(
            f"{folder.path}: none of {counted(len(chosen_row_numbers), 'chosen file')} can be used"
        )
    first_read_row = next(iter(row_by_number.values()))
    layer_count = len(first_read_row.states_of_layers)
    token_ids_by_row_number = _neighbours(folder, row_by_number) | {
        row_number: row.token_ids for row_number, row in row_by_number.items()
    }
    states_recomputer = load_model([*token_ids_by_row_number.values()], first_read_row.width)
    expected_hooks = _requested_hooks(folder, states_recomputer, layer_count)
    row_comparisons = _compare_rows(row_by_number, states_recomputer)
    if expected_hooks is None:
        expected_hooks = [
            _nearest_hook(row_comparisons, layer_index) for layer_index in range(layer_count - 1)
        ]
        expected_hooks.append(ExpectedHook(folder.last_hook(states_recomputer.num_layers)))
    report_lines = [
        _line_of_layer(layer_index, expected_hooks[layer_index], row_comparisons)
        for layer_index in range(layer_count)
    ]
    order_problem_message = (
        "" if states_recomputer.requested_hooks is not None else _order_problem(expected_hooks)
    )
    if order_problem_message:
        report_lines.append(order_problem_message)
    numbers_of_left_out_rows = set(chosen_row_numbers) - row_by_number.keys()
    numbers_of_wrong_rows = set(numbers_of_left_out_rows)  # rows that are left out count as wrong
    report_lines += messages_about_left_out_rows
    for row_number_with_wrong_ids, id_problem_message in _wrong_ids(folder, row_by_number):
        numbers_of_wrong_rows.add(row_number_with_wrong_ids)
        report_lines.append(id_problem_message)
    for row_comparison in tqdm(
        row_comparisons, "describing wrong rows", leave=False, unit=" rows", disable=None
    ):
        wrong_layer_indices = [
            layer_index
            for layer_index, expected_hook in enumerate(expected_hooks)
            if not row_comparison.is_right(layer_index, expected_hook.name)
        ]
        if wrong_layer_indices:
            numbers_of_wrong_rows.add(row_comparison.row_number)
            report_lines += _describe(
                row_comparison,
                wrong_layer_indices,
                expected_hooks,
                states_recomputer,
                token_ids_by_row_number,
            )
    notes_for_user = [*folder.notes, *_notes_on_hooks(folder, states_recomputer, expected_hooks)]
    has_any_problem = bool(numbers_of_wrong_rows or order_problem_message)
    say(
        *report_lines,
        *(f"note: {note_for_user}" for note_for_user in notes_for_user),
        f"{'FAILED' if has_any_problem else 'in order'}: hidden states of "
        f"{folder.writing_program_name}, {counted(len(folder.path_by_row_number), 'row')}; "
        f"{counted(len(chosen_row_numbers), 'row')} compared, {len(numbers_of_wrong_rows)} wrong",
    )
    return 1 if has_any_problem else 0


def _read_rows(
    folder: StatesFolder, row_numbers: Sequence[int]
) -> tuple[dict[int, StoredRow], list[str]]:
    """Reads rows of a folder, and leaves out rows that cannot be compared.

    Args:
        folder: Folder with the hidden states.
        row_numbers: Numbers of the rows.

    Returns:
        A tuple of:
            The rows by number. All of them have equally many layers, and states of equal width.
            A message about each row that is left out.
    """
    row_by_number: dict[int, StoredRow] = {}
    problem_messages = []
    for row_number in row_numbers:
        try:
            stored_row = folder.read(row_number)
        except RunError as error:
            problem_messages.append(f"row {row_number}: {error}")
            continue
        first_row = next(iter(row_by_number.values()), stored_row)
        layer_count, width = len(stored_row.states_of_layers), stored_row.width
        layer_count_of_first_row = len(first_row.states_of_layers)
        width_of_first_row = first_row.width
        if not len(stored_row.token_ids) or not len(stored_row.states_of_layers[0]):
            problem_messages.append(
                f"row {row_number}: {folder.relative_path(row_number)}: holds no tokens or states"
            )
        elif (layer_count, width) != (layer_count_of_first_row, width_of_first_row):
            problem_messages.append(
                f"row {row_number}: {folder.relative_path(row_number)}: holds {layer_count} layers "
                f"of {width} values; row {next(iter(row_by_number))} holds "
                f"{layer_count_of_first_row} of {width_of_first_row}"
            )
        else:
            row_by_number[row_number] = stored_row
    return row_by_number, problem_messages


def _neighbours(folder: StatesFolder, row_numbers: Iterable[int]) -> dict[int, np.ndarray]:
    """Reads the token ids of the rows directly before and after the rows to verify.

    The states of a wrong row may belong to such a neighbour.

    Args:
        folder: Folder with the hidden states.
        row_numbers: Numbers of the rows to verify.

    Returns:
        The token ids of each neighbouring row, int64 (tokens,), by its number. Neighbours that do
        not exist, that cannot be read or that are in `row_numbers` are left out.
    """
    token_ids_by_neighbour_row_number = {}
    for row_number in row_numbers:
        for neighbour_row_number in (row_number - 1, row_number + 1):
            if (
                neighbour_row_number in folder.path_by_row_number
                and neighbour_row_number not in row_numbers
            ):
                try:
                    token_ids_by_neighbour_row_number[neighbour_row_number] = folder.read(
                        neighbour_row_number
                    ).token_ids
                except RunError:
                    # The token ids of a neighbouring row only help to explain wrong states of a
                    # row to verify, so a neighbouring row that cannot be read is left out.
                    continue
    return token_ids_by_neighbour_row_number


def _compare_rows(
    row_by_number: Mapping[int, StoredRow], model: StatesRecomputer
) -> list[RowComparison]:
    """Compares the hidden states in files with recomputed states, and shows a progress bar.

    Another program has stored a file for each row of its data set.

    Args:
        row_by_number: Contents of the files to compare, by the number of the row.
        model: Model that recomputes the states.

    Returns:
        The result for each file, in the order of `row_by_number`.
    """
    from tqdm import tqdm

    row_numbers = [*row_by_number]
    comparison_by_row_number: dict[int, RowComparison] = {}
    states_of_rows = model.compute_states(
        [row_by_number[row_number].token_ids for row_number in row_numbers]
    )
    for row_index, states_by_hook in tqdm(
        states_of_rows, "verifying", len(row_numbers), leave=False, unit=" rows", disable=None
    ):
        stored_row = row_by_number[row_numbers[row_index]]
        row_comparison = RowComparison(
            row_numbers[row_index],
            stored_row,
            Limits.of(stored_row.dtype, model.dtype, model.has_experts),
        )
        for layer_index in range(len(stored_row.states_of_layers)):
            row_comparison.matches_of_layers.append(
                match_hooks(stored_row, layer_index, states_by_hook, row_comparison.error_limits)
            )
        comparison_by_row_number[row_comparison.row_number] = row_comparison
    return [comparison_by_row_number[row_number] for row_number in row_numbers]


def _requested_hooks(
    folder: StatesFolder, model: StatesRecomputer, layer_count: int
) -> list[ExpectedHook] | None:
    """Returns the hooks that --layers_to_extract or --hook_names names.

    Args:
        folder: Folder with the hidden states.
        model: Model that recomputes the states, with the hooks that the flags name.
        layer_count: Number of layers of a file.

    Returns:
        For each layer of a file, the hook whose states it should contain. The flags may leave out
        the hook of the last layer: the program that wrote the folder determines whether it is the
        last residual stream or the output of the final norm. None if neither flag is given.

    Raises:
        InputError: If a flag names a hook that is neither a residual stream nor the output of the
            final norm, or if the flags do not name one hook for each layer, except the last.
    """
    if model.requested_hooks is None:
        return None
    last_hook = folder.last_hook(model.num_layers)
    hook_names = [_canonical(hook_name) for hook_name in model.requested_hooks]
    if len(hook_names) == layer_count - 1:
        hook_names.append(last_hook)
    if len(hook_names) != layer_count or hook_names[-1] != last_hook:
        raise InputError(
            f"--layers_to_extract, --hook_names: name {', '.join(model.requested_hooks)}; the "
            f"files of {folder.path} hold {layer_count} layers, of which the last one, {last_hook},"
            " may be left out"
        )
    return [ExpectedHook(hook_name) for hook_name in hook_names]


def _canonical(hook: str) -> str:
    """Returns the name that `StatesRecomputer` uses for a hook.

    A residual stream between two blocks has two names, as the output of the first block and as the
    input of the second. `StatesRecomputer` uses the name of the output. For the embedding, it uses
    the name of the first block's input.

    Args:
        hook: Name of the hook, as a flag names it.

    Raises:
        InputError: If the hook is neither a residual stream nor the output of the final norm.
    """
    hidden_state_index = next(iter(hooks_by_hidden_state_index([hook])), None)
    if hidden_state_index is not None:
        return (
            "blocks.0.hook_resid_pre"
            if hidden_state_index == 0
            else f"blocks.{hidden_state_index - 1}.hook_resid_post"
        )
    if hook != FINAL_NORM_HOOK:
        raise InputError(
            f"--hook_names {hook}: is no residual stream; hidden states of other programs are "
            f"blocks.K.hook_resid_post, or {FINAL_NORM_HOOK}"
        )
    return hook


def _nearest_hook(row_comparisons: Sequence[RowComparison], layer_index: int) -> ExpectedHook:
    """Returns the hook that most files vote for.

    A file votes for the hook whose computed states are nearest to the stored states of its layer. A
    file whose states match no hook within the error limits only votes if this is so in all files.
    If two hooks have equally many votes, the hook with the smallest error in a file is returned.

    Args:
        row_comparisons: Results of comparing each file with the states of the model.
        layer_index: Index of the layer in the files, from 0.

    Returns:
        The hook. Its `is_hook_determined` is False if there is no file whose states match a hook.
    """
    sorted_best_matches_of_rows = sorted(
        row_comparison.best(layer_index) for row_comparison in row_comparisons
    )
    error_limits = row_comparisons[0].error_limits
    matches_within_limits = [
        hook_match for hook_match in sorted_best_matches_of_rows if hook_match.within(error_limits)
    ]
    row_count_by_hook = Counter(
        hook_match.hook_name for hook_match in matches_within_limits or sorted_best_matches_of_rows
    )
    return ExpectedHook(row_count_by_hook.most_common(1)[0][0], bool(matches_within_limits))


def _line_of_layer(
    layer_index: int, hook: ExpectedHook, row_comparisons: Sequence[RowComparison]
) -> str:
    """Returns the line that --verify prints about one layer of the files of hidden states.

    The line names the hook, the number of rows whose files contain the states at this hook in this
    layer, and the largest error of these rows. If the hook of the layer could not be determined
    (`hook.is_hook_determined` is False), the line says that no row matches a hook, and names no
    hook.

    Args:
        layer_index: Index of the layer in each file, from 0.
        hook: Hook whose states the layer should contain, if it could be determined.
        row_comparisons: Results of comparing each file with the states of the model.
    """
    layer_phrase = f"layer {layer_index + 1} of {len(row_comparisons[0].row.states_of_layers)}"
    if not hook.is_hook_determined:
        return f"{layer_phrase}: no row matches a hook"
    # For each file in which the layer contains the states that the model computes at `hook`, the
    # match of these stored states with the computed states.
    matches_of_correct_files: list[HookMatch] = []
    for row_comparison in row_comparisons:
        if row_comparison.is_right(layer_index, hook.name):
            matches_of_correct_files.append(
                row_comparison.matches_of_layers[layer_index][hook.name, 0]
            )
    correct_rows_phrase = (
        f"right in {len(matches_of_correct_files)} of {counted(len(row_comparisons), 'row')}"
    )
    if not matches_of_correct_files:
        return f"{layer_phrase}: {hook.name}, {correct_rows_phrase}"
    largest_error_phrase = _percent(
        max(hook_match.rms_token_error for hook_match in matches_of_correct_files)
    )
    at_most_prefix = "" if largest_error_phrase.startswith("below") else "at most "
    num_left_out_tokens = sum(
        hook_match.num_tokens_with_other_experts for hook_match in matches_of_correct_files
    )
    omission_phrase = ""
    if num_left_out_tokens:
        omission_phrase = (
            f" (without {counted(num_left_out_tokens, 'token')} that may have other experts)"
        )
    error_phrase = f"error {at_most_prefix}{largest_error_phrase}{omission_phrase}"
    return f"{layer_phrase}: {hook.name}, {correct_rows_phrase}, {error_phrase}"


def _order_problem(hooks: Sequence[ExpectedHook]) -> str:
    """Returns a message if the files store the states of the model's hooks in a wrong order.

    A file contains the hidden states at several hooks, one after the other. They are in the right
    order if the model computes the hooks in the same order, and no states are stored twice.

    Args:
        hooks: The hooks whose states the files contain, in the order in which each file stores
            them. Hooks that are only a guess (`is_hook_determined` is False) are ignored.

    Returns:
        The message, which lists the names of the hooks in the order of the files. An empty string
        if the order is right.
    """
    determined_hook_names = [hook.name for hook in hooks if hook.is_hook_determined]
    order_keys = [_order_key(hook_name) for hook_name in determined_hook_names]
    if order_keys == sorted(set(order_keys)):
        return ""
    return f"the layers are not in ascending order: {', '.join(determined_hook_names)}"


def _order_key(hook: str) -> float:
    """Returns a sort key for hooks, by which they are in the order in which a model computes them.

    The key is 0 for the embedding, k + 1 for the output of block k, and infinity for the output of
    the final norm.

    Args:
        hook: Name of the hook, which is a residual stream or the output of the final norm.
    """
    return next(iter(hooks_by_hidden_state_index([hook])), float("inf"))


def _wrong_ids(
    folder: StatesFolder, row_by_number: Mapping[int, StoredRow]
) -> Iterator[tuple[int, str]]:
    """Yields the rows whose token ids in the file differ from their token ids in the data set.

    Args:
        folder: Folder with the hidden states. Nothing is yielded if it contains no data set.
        row_by_number: Contents of the files, by the number of the row.

    Yields:
        A tuple of the number of the row and a message about the row.
    """
    for row_number, stored_row in row_by_number.items():
        expected_token_ids = folder.data_set_ids(row_number)
        if expected_token_ids is None or np.array_equal(expected_token_ids, stored_row.token_ids):
            continue
        difference_phrase = (
            f"{len(stored_row.token_ids)} token ids, the data set has {len(expected_token_ids)}"
        )
        if len(expected_token_ids) == len(stored_row.token_ids):
            first_different_index = int(
                np.flatnonzero(expected_token_ids != stored_row.token_ids)[0]
            )
            difference_phrase = (
                f"another token id than the data set at token {first_different_index}"
            )
        yield (
            row_number,
            f"row {row_number}: {folder.relative_path(row_number)}: has {difference_phrase}",
        )


def _notes_on_hooks(
    folder: StatesFolder, model: StatesRecomputer, hooks: Sequence[ExpectedHook]
) -> Iterator[str]:
    """Yields notes for the user, if no flag names the hooks whose states the files should contain.

    One note says that the hooks were guessed. The program that wrote the files stores the states of
    certain hooks by default. If the guessed hooks differ from these, another note names them.

    Args:
        folder: Folder with the hidden states.
        model: Model that recomputes the states.
        hooks: For each layer of the files, the hook whose states it is assumed to contain.
    """
    if model.requested_hooks is not None or len(hooks) == 1:
        return
    yield (
        "no flag names the layers that were asked for, so each layer but the last is compared with "
        "the hook that most rows match; --layers_to_extract or --hook_names name them"
    )
    default_block_numbers = folder.default_blocks(model.num_layers)
    # The default blocks are not ascending if the model has too few blocks.
    if default_block_numbers != sorted(set(default_block_numbers)):
        return
    default_hook_names = [
        f"blocks.{block_number_from_0}.hook_resid_post"
        for block_number_from_0 in default_block_numbers
    ]
    if (
        len(hooks) == len(default_block_numbers) + 1
        and [assumed_hook.name for assumed_hook in hooks[:-1]] != default_hook_names
    ):
        block_numbers_phrase = ", ".join(
            str(block_number_from_0 + folder.first_decoder_layer_number)
            for block_number_from_0 in default_block_numbers
        )
        hook_names_phrase = ", ".join(default_hook_names)
        yield (
            f"by default, {folder.writing_program_name} stores {hook_names_phrase} "
            f"(its layers {block_numbers_phrase})"
        )


def _describe(
    row_comparison: RowComparison,
    wrong_layer_indices: Sequence[int],
    hooks: Sequence[ExpectedHook],
    model: StatesRecomputer,
    token_ids_by_row_number: Mapping[int, np.ndarray],
) -> list[str]:
    """Returns a message about each layer of a file with wrong states.

    The message says to which hook, tokens or sample the wrong states belong, if this is found.

    Args:
        row_comparison: Comparison of the file with the states of its row's sample.
        wrong_layer_indices: Indices, in the file, of the layers that do not contain the states of
            the row's sample at the hooks in `hooks`.
        hooks: For each layer of the file, the hook whose states it should contain.
        model: Model that computes the states of other samples.
        token_ids_by_row_number: Token ids of the samples to which wrong states may belong, int64
            (tokens,) each, by the number of the row.
    """
    description_by_layer_index = {
        layer_index: _describe_by_same_sample(
            row_comparison, layer_index, hooks[layer_index], model
        )
        for layer_index in wrong_layer_indices
    }
    unexplained_layer_indices = [
        layer_index
        for layer_index in wrong_layer_indices
        if description_by_layer_index[layer_index] is None
    ]
    alignments_by_layer_index: dict[int, list[Alignment]] = {
        layer_index: [] for layer_index in unexplained_layer_indices
    }
    if unexplained_layer_indices:
        row_numbers = [*token_ids_by_row_number]
        for sample_index, states_by_hook in model.compute_states(
            [token_ids_by_row_number[row_number] for row_number in row_numbers]
        ):
            for layer_index in unexplained_layer_indices:
                for hook_name in _hooks_to_align(hooks[layer_index], states_by_hook):
                    alignments_by_layer_index[layer_index] += align(
                        row_comparison.row,
                        layer_index,
                        row_numbers[sample_index],
                        hook_name,
                        states_by_hook[hook_name],
                        row_comparison.error_limits,
                    )
    layer_messages = []
    for layer_index in wrong_layer_indices:
        layer_description = description_by_layer_index[layer_index]
        if layer_description is None:
            layer_description = _describe_parts(
                row_comparison,
                layer_index,
                hooks[layer_index],
                alignments_by_layer_index[layer_index],
                model,
            )
        expectation_phrase = (
            f"expected {hooks[layer_index].name}, " if hooks[layer_index].is_hook_determined else ""
        )
        row_and_layer_phrase = (
            f"row {row_comparison.row_number}, layer {layer_index + 1} of {len(hooks)}"
        )
        layer_messages.append(
            f"{row_and_layer_phrase}: {expectation_phrase}found {layer_description}"
        )
    return layer_messages


def _hooks_to_align(expected: ExpectedHook, hooks: Iterable[str]) -> list[str]:
    """Chooses the hooks among which --verify looks for the origin of wrong states.

    The states that are stored for a layer differ from the states that the model computes at the
    expected hook. They may be the states of another hook, of other tokens or of another sample.
    Therefore they are compared with the states that the model computes at the chosen hooks.

    Args:
        expected: Hook whose states the layer should contain.
        hooks: Names of all hooks, in the order of the computation.

    Returns:
        The names of the expected hook, the hook before it and the hook after it. The names of all
        hooks if `expected` is only a guess (see `ExpectedHook.is_hook_determined`).
    """
    hook_names = [*hooks]
    if not expected.is_hook_determined:
        return hook_names
    index_of_expected_hook = hook_names.index(expected.name)
    return hook_names[max(index_of_expected_hook - 1, 0) : index_of_expected_hook + 2]


def _describe_by_same_sample(
    row_comparison: RowComparison, layer_index: int, hook: ExpectedHook, model: StatesRecomputer
) -> str | None:
    """Describes the wrong states in a layer by the file's own sample, if this sample is enough.

    Another program has stored the file for one row of its data set, with one sample. This sample is
    enough, for example, if the wrong states are NaN or zeros, or if they are states of this sample,
    but at another hook or of the next tokens.

    Args:
        row_comparison: Comparison of the file with the states of its row's sample.
        layer_index: Index of the layer in the file, from 0.
        hook: Hook whose states the layer should contain.
        model: Model that recomputes the states. Its number of layers determines the names of its
            hooks.

    Returns:
        A phrase such as "zeros" or "each token with the state of the next token". None if the
        states must be compared with other samples before they can be described, for example
        because they match the states of the file's own sample at no hook.
    """
    stored_states = row_comparison.row.states(layer_index)
    token_count = len(row_comparison.row.token_ids)
    non_finite_state_mask = np.array(~np.isfinite(stored_states).all(axis=1))
    if non_finite_state_mask.any():
        return f"NaN or infinity in {_tokens_phrase(non_finite_state_mask)}"
    if not stored_states.any():
        if len(stored_states) == token_count:
            return "zeros"
        return (
            f"{counted(len(stored_states), 'state')} of zeros for {counted(token_count, 'token')}"
        )
    best_match = row_comparison.best(layer_index)
    if not best_match.within(row_comparison.error_limits) or len(stored_states) > token_count:
        return None
    if len(stored_states) < token_count:
        counts_phrase = (
            f"{counted(len(stored_states), 'state')} for {counted(token_count, 'token')}"
        )
        if best_match.token_offset_from_state not in (0, token_count - len(stored_states)):
            return None
        first_or_last = "first" if best_match.token_offset_from_state == 0 else "last"
        other_hook_phrase = _other_hook(best_match.hook_name, hook, model)
        compared_states_phrase = f"those of the {first_or_last} {len(stored_states)}"
        return f"{counts_phrase}: {compared_states_phrase}{other_hook_phrase}"
    if best_match.token_offset_from_state:
        next_or_previous = "next" if best_match.token_offset_from_state > 0 else "previous"
        other_hook_phrase = _other_hook(best_match.hook_name, hook, model)
        return (
            f"each token with the state of the {next_or_previous} token{other_hook_phrase} "
            f"({_error(best_match)})"
        )
    return (
        f"{best_match.hook_name}{_relation(best_match.hook_name, hook, model)} "
        f"({_error(best_match)})"
    )


def _other_hook(actual_hook_name: str, hook: ExpectedHook, model: StatesRecomputer) -> str:
    """Returns a phrase that names the hook of some stored states if it is not the expected hook.

    The phrase is, for example, ", of HOOK, one layer too late" if the states are the states at the
    hook HOOK, which comes one layer after the expected hook. The phrase is "" if the states are the
    states at the expected hook. If `hook` is only a guess because the expected hook could not be
    determined (`hook.is_hook_determined` is False), the phrase is always ", of HOOK", without the
    number of layers.

    Args:
        actual_hook_name: Name of the hook at which the model's states match the stored states.
        hook: Hook at which the states should have been computed.
        model: Model that recomputes the states. Its number of layers determines the names of its
            hooks.
    """
    if hook.is_hook_determined and actual_hook_name == hook.name:
        return ""
    return f", of {actual_hook_name}{_relation(actual_hook_name, hook, model)}"


def _relation(actual_hook_name: str, hook: ExpectedHook, model: StatesRecomputer) -> str:
    """Returns a phrase that says how far the hook of some stored states is from the expected hook.

    The phrase is, for example, ", one layer too late" if the hook comes one layer after the
    expected hook. It is "" if the two hooks are the same, or if `hook` is only a guess because the
    expected hook could not be determined (`hook.is_hook_determined` is False).

    Args:
        actual_hook_name: Name of the hook at which the model's states match the stored states.
        hook: Hook at which the states should have been computed.
        model: Model that recomputes the states. Its number of layers determines the names of its
            hooks.
    """
    expected_hook_name = hook.name
    if not hook.is_hook_determined or actual_hook_name == expected_hook_name:
        return ""
    last_residual_stream_hook_name = last_residual_stream_hook(model.num_layers)
    if (actual_hook_name, expected_hook_name) == (FINAL_NORM_HOOK, last_residual_stream_hook_name):
        return ", after the final norm instead of before it"
    if (actual_hook_name, expected_hook_name) == (last_residual_stream_hook_name, FINAL_NORM_HOOK):
        return ", before the final norm instead of after it"
    ordered_hook_names = [*_stream_names(model.num_layers), FINAL_NORM_HOOK]
    index_of_actual_hook = ordered_hook_names.index(actual_hook_name)
    layer_offset = index_of_actual_hook - ordered_hook_names.index(expected_hook_name)
    if expected_hook_name == FINAL_NORM_HOOK:
        # The final norm comes after the last layer in `ordered_hook_names`, but is not a layer, so
        # the offset counts one step too many. Here the norm is expected, so the offset is negative,
        # and 1 is added. In the next branch the norm is the actual hook, so the offset is positive,
        # and 1 is subtracted.
        layer_offset += 1
    elif actual_hook_name == FINAL_NORM_HOOK:
        layer_offset -= 1
    late_or_early = "late" if layer_offset > 0 else "early"
    layers_phrase = "one layer" if abs(layer_offset) == 1 else f"{abs(layer_offset)} layers"
    final_norm_clause = ""
    if actual_hook_name == FINAL_NORM_HOOK:
        final_norm_clause = ", and after the final norm"
    elif expected_hook_name == FINAL_NORM_HOOK:
        final_norm_clause = ", and without the final norm"
    return f", {layers_phrase} too {late_or_early}{final_norm_clause}"


def _stream_names(depth: int) -> Iterator[str]:
    """Yields the names of all hooks at the residual stream, in the order of the computation.

    Args:
        depth: Number of layers of the model.
    """
    yield "blocks.0.hook_resid_pre"
    for layer_number in range(depth):
        yield f"blocks.{layer_number}.hook_resid_post"


def _describe_parts(
    row_comparison: RowComparison,
    layer_index: int,
    hook: ExpectedHook,
    alignments: Sequence[Alignment],
    model: StatesRecomputer,
) -> str:
    """Tells from which samples, tokens and hooks the wrong states in one layer of a file come.

    It is called for a layer that `_describe_by_same_sample` cannot describe.

    Args:
        row_comparison: Comparison of the file with the states of its row's sample.
        layer_index: Index of the layer in the file, from 0.
        hook: Hook whose states the layer should contain.
        alignments: Results of `align` for this layer. Each one tells which stored states match the
            computed states of one sample at one hook and one offset. Empty if no state matches.
        model: Model that recomputes the states. Its number of layers determines the names of its
            hooks.

    Returns:
        One or more phrases, separated by semicolons, such as "zeros in tokens 0 to 3; the states of
        tokens 4 to 9 of row 7 in tokens 4 to 9". If `alignments` explain none of the states,
        and none is zero, a phrase names the hook at which the computed states of the file's own
        sample are nearest to the stored states.
    """
    stored_states = row_comparison.row.states(layer_index)
    token_count = len(row_comparison.row.token_ids)
    # The same stored states may match several samples, for example if two samples begin with the
    # same tokens. If several alignments explain equally many states, `best_alignments` prefers the
    # first of them. Therefore the alignments are sorted by three criteria: alignments at the
    # expected hook come first, then alignments with samples whose row numbers are near the number
    # of the described row (`row_comparison.row_number`), then alignments whose offset is 0 tokens.
    alignments_nearest_first = sorted(
        alignments,
        key=lambda alignment: (
            alignment.hook_name != hook.name,
            abs(alignment.row_number_of_sample - row_comparison.row_number),
            alignment.token_offset_from_state != 0,
        ),
    )
    problem_phrases = []
    if len(stored_states) != token_count:
        problem_phrases.append(
            f"{counted(len(stored_states), 'state')} for {counted(token_count, 'token')}"
        )
    zero_state_mask = np.array(~stored_states.any(axis=1))
    if zero_state_mask.any():
        problem_phrases.append(f"zeros in {_tokens_phrase(zero_state_mask)}")
    best_match = row_comparison.best(layer_index)
    errors_phrase = (
        f"{_error(best_match)}, a token up to {_percent(best_match.largest_token_error)}"
    )
    if (best_match.hook_name, best_match.token_offset_from_state) == (hook.name, 0) and any(
        (alignment.hook_name, alignment.row_number_of_sample, alignment.token_offset_from_state)
        == (hook.name, row_comparison.row_number, 0)
        and alignment.matching_state_mask.all()
        for alignment in alignments
    ):
        limit_phrase = (
            f"at most {_percent(row_comparison.error_limits.max_rms_token_error)} is explained by "
            "rounding"
        )
        problem_phrases.append(
            f"the right hook and tokens, but other values ({errors_phrase}; {limit_phrase})"
        )
        return "; ".join(problem_phrases)
    undescribed_state_mask = ~zero_state_mask
    for alignment in best_alignments(alignments_nearest_first):
        undescribed_state_mask &= ~alignment.matching_state_mask
        problem_phrases.append(_part_phrase(alignment, row_comparison.row_number, hook, model))
    if undescribed_state_mask.all():
        nearest_hook_phrase = (
            f"{best_match.hook_name}{_relation(best_match.hook_name, hook, model)}"
        )
        if best_match.token_offset_from_state:
            nearest_hook_phrase += (
                f" of the {'next' if best_match.token_offset_from_state > 0 else 'previous'} token"
            )
        rounding_hint = ""
        bfloat16_error_limits = Limits.of(row_comparison.row.dtype, "bfloat16", model.has_experts)
        if (
            best_match.hook_name == hook.name
            and not best_match.token_offset_from_state
            and best_match.within(bfloat16_error_limits)
        ):
            rounding_hint = "; rounding to bfloat16 may explain it: verify with --dtype bfloat16"
        problem_phrases.append(
            f"no match; nearest is {nearest_hook_phrase} ({errors_phrase}{rounding_hint})"
        )
    elif undescribed_state_mask.any():
        experts_phrase = (
            ", perhaps because of other experts"
            if row_comparison.error_limits.max_token_fraction_with_other_experts
            else ""
        )
        problem_phrases.append(
            f"no match for {_tokens_phrase(undescribed_state_mask)}{experts_phrase}"
        )
    return "; ".join(problem_phrases)


def _part_phrase(
    alignment: Alignment, row_number: int, hook: ExpectedHook, model: StatesRecomputer
) -> str:
    """Returns a phrase for a part of wrong states: to which sample, tokens and hook they belong.

    Args:
        alignment: The stored states, and the sample, hook and tokens whose computed states they
            match.
        row_number: Number of the row of the other program's data set whose file contains the
            states. `alignment.row_number_of_sample` is the row to whose sample they belong.
        hook: Hook at which the stored states should have been computed.
        model: Model that recomputes the states. Its number of layers determines the names of its
            hooks.
    """
    other_hook_phrase = _other_hook(alignment.hook_name, hook, model)
    do_all_states_match = bool(alignment.matching_state_mask.all())
    is_same_row = alignment.row_number_of_sample == row_number
    if is_same_row and not alignment.token_offset_from_state and not other_hook_phrase:
        return f"the right states in {_tokens_phrase(alignment.matching_state_mask)}"
    matching_state_indices = np.flatnonzero(alignment.matching_state_mask)
    first_token_index, last_token_index = (
        matching_state_indices[[0, -1]] + alignment.token_offset_from_state
    ).tolist()
    row_phrase = "" if is_same_row else f" of row {alignment.row_number_of_sample}"
    if do_all_states_match and not is_same_row and not alignment.token_offset_from_state:
        return f"the states{row_phrase}{other_hook_phrase}"
    tokens_phrase = (
        f"token {first_token_index}"
        if first_token_index == last_token_index
        else f"tokens {first_token_index} to {last_token_index}"
    )
    matching_tokens_phrase = (
        "" if do_all_states_match else f" in {_tokens_phrase(alignment.matching_state_mask)}"
    )
    row_phrase = row_phrase or " of the same row"
    return f"the states of {tokens_phrase}{row_phrase}{matching_tokens_phrase}{other_hook_phrase}"


def _tokens_phrase(token_mask: np.ndarray) -> str:
    """Returns a phrase that names some tokens, such as "tokens 0 to 11" or "3 of tokens 0 to 11".

    Args:
        token_mask: For each token, whether it is one of the tokens to name, bool (tokens,). True
            for at least one token.
    """
    token_indices = np.flatnonzero(token_mask)
    first_token_index, last_token_index = token_indices[[0, -1]].tolist()
    if len(token_indices) == 1:
        return f"token {first_token_index}"
    span_phrase = f"tokens {first_token_index} to {last_token_index}"
    return (
        span_phrase
        if len(token_indices) == last_token_index - first_token_index + 1
        else f"{len(token_indices)} of {span_phrase}"
    )


def _error(match: HookMatch) -> str:
    return f"error {_percent(match.rms_token_error)}"


def _percent(error: float) -> str:
    """Returns a relative error as a percentage, such as "0.31 %", "130 %" or "below 0.001 %"."""
    if error < 1e-5:
        return "below 0.001 %"
    return f"{100 * error:.2g} %" if error < 1 else f"{100 * error:,.0f} %"
