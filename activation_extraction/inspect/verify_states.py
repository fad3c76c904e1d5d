"""Compares hidden states that another program has stored with those of the model, for --verify.

hidden_states.py reads the files and compare_states.py compares arrays. This module chooses random
rows, determines which hook each layer of the files should contain, and words what is wrong.

The files do not contain the numbers of their layers. If --layers_to_extract or --hook_names name
the hooks, each layer must contain the hook that they name. Otherwise each layer is taken for the
hook whose states are nearest in most rows, so a layer that is wrong in the same way in all rows can
only be noticed in the line that names its hook. The last layer always has a known hook.

Every layer of a wrong row is described. The states of its sample at all hooks are tried first, then
the states of other samples: the rows before and after it, and the other chosen rows.
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
    NEARER,
    Alignment,
    HookMatch,
    Limits,
    align,
    best_alignments,
    match_hooks,
)
from activation_extraction.inspect.draft_files import FINAL_NORM_HOOK, streams_by_number
from activation_extraction.inspect.hidden_states import StatesFolder, StoredRow
from activation_extraction.store.chosen_samples import RecomputeStates

# A function that loads the model. Its arguments are the token ids of all samples that may be
# computed, (tokens,) each, and the width of the stored states.
LoadStates = Callable[[Sequence[np.ndarray], int], RecomputeStates]
Matches = Mapping[tuple[str, int], HookMatch]  # result of match_hooks


class ExpectedHook(NamedTuple):
    """The hook whose states a layer should contain.

    Attributes:
        name: Name of the hook.
        is_known: Whether a flag or the kind of the folder determines the hook, or the states of a
            row match it. Otherwise it is only the hook with the smallest error.
    """

    name: str
    is_known: bool = True


@dataclass
class RowCheck:
    """A row that is compared with the model.

    Attributes:
        number: Number of the row.
        row: Content of the file.
        limits: Largest errors that rounding explains.
        matches: Comparison of each layer with the states of the row's sample at all hooks.
    """

    number: int
    row: StoredRow
    limits: Limits
    matches: list[Matches] = field(default_factory=list)

    def best(self, layer: int) -> HookMatch:
        """Returns the match of the nearest hook of a layer, at any offset."""
        return min(self.matches[layer].values())

    def is_right(self, layer: int, hook: str) -> bool:
        """Returns whether a layer contains the states of the row's sample at a hook.

        Args:
            layer: Index of the layer.
            hook: Name of the hook.
        """
        if len(self.row.layers[layer]) != len(self.row.token_ids):
            return False
        expected = self.matches[layer][hook, 0]
        nearest_error = min(m.error for m in self.matches[layer].values() if m.offset == 0)
        return expected.within(self.limits) and expected.error <= NEARER * nearest_error


def verify_hidden_states(folder: StatesFolder, load_model: LoadStates | None, count: int) -> int:
    """Compares random rows of another program's hidden states with the model, and prints problems.

    Args:
        folder: Folder with the hidden states.
        load_model: Function that loads the model. None if the flags name no model.
        count: Number of random rows to compare.

    Returns:
        The exit status: 0 if every compared row is right, otherwise 1.

    Raises:
        InputError: If there is no model, or it does not fit the files, or the flags name other
            hooks than the files can contain.
    """
    from tqdm import tqdm  # imported late, because the other flags of this package do not need it

    if load_model is None:
        raise InputError(
            f"--verify: {folder.path} holds hidden states of {folder.program}, which are compared "
            "with a model; give --model_path"
        )
    numbers = sorted(random.sample([*folder.files], min(count, len(folder.files))))
    rows, problems = _read_rows(folder, numbers)
    if not rows:
        say(*problems)
        raise InputError(
            f"{folder.path}: none of {counted(len(numbers), 'chosen file')} can be used"
        )
    first_row = next(iter(rows.values()))
    layer_count = len(first_row.layers)
    samples = _neighbours(folder, rows) | {n: row.token_ids for n, row in rows.items()}
    model = load_model([*samples.values()], first_row.width)
    hooks = _requested_hooks(folder, model, layer_count)
    checks = _match_rows(rows, model)
    if hooks is None:
        hooks = [_nearest_hook(checks, layer) for layer in range(layer_count - 1)]
        hooks.append(ExpectedHook(folder.last_hook(model.depth)))
    lines = [_line_of_layer(layer, hooks[layer], checks) for layer in range(layer_count)]
    order_problem = "" if model.requested_hooks is not None else _order_problem(hooks)
    if order_problem:
        lines.append(order_problem)
    wrong_rows = {number for number in numbers if number not in rows}
    lines += problems
    for number, id_problem in _wrong_ids(folder, rows):
        wrong_rows.add(number)
        lines.append(id_problem)
    for check in tqdm(checks, "describing wrong rows", leave=False, unit=" rows", disable=None):
        wrong_layers = [i for i in range(layer_count) if not check.is_right(i, hooks[i].name)]
        if wrong_layers:
            wrong_rows.add(check.number)
            lines += _describe(check, wrong_layers, hooks, model, samples)
    notes = [*folder.notes, *_notes_on_hooks(folder, model, hooks)]
    failed = bool(wrong_rows or order_problem)
    say(
        *lines,
        *(f"note: {note}" for note in notes),
        f"{'FAILED' if failed else 'in order'}: hidden states of {folder.program}, "
        f"{counted(len(folder.files), 'row')}; {counted(len(numbers), 'row')} compared, "
        f"{len(wrong_rows)} wrong",
    )
    return 1 if failed else 0


def _read_rows(
    folder: StatesFolder, numbers: Sequence[int]
) -> tuple[dict[int, StoredRow], list[str]]:
    """Reads rows of a folder, and leaves out those that cannot be compared.

    Args:
        folder: Folder with the hidden states.
        numbers: Numbers of the rows.

    Returns:
        A tuple of:
            The rows by number. All have as many layers and values per state as the first one.
            A message about each row that is left out.
    """
    rows: dict[int, StoredRow] = {}
    problems = []
    for number in numbers:
        try:
            row = folder.read(number)
        except RunError as error:
            problems.append(f"row {number}: {error}")
            continue
        first = next(iter(rows.values()), row)
        form = (len(row.layers), row.width)
        first_form = (len(first.layers), first.width)
        if not len(row.token_ids) or not len(row.layers[0]):
            problems.append(f"row {number}: {folder.file_name(number)}: holds no tokens or states")
        elif form != first_form:
            problems.append(
                f"row {number}: {folder.file_name(number)}: holds {form[0]} layers of {form[1]} "
                f"values; row {next(iter(rows))} holds {first_form[0]} of {first_form[1]}"
            )
        else:
            rows[number] = row
    return rows, problems


def _neighbours(folder: StatesFolder, rows: Iterable[int]) -> dict[int, np.ndarray]:
    """Reads the token ids of the rows before and after other rows.

    Args:
        folder: Folder with the hidden states.
        rows: Numbers of the other rows.

    Returns:
        The token ids by the number of the row, int64 (tokens,). Rows that do not exist, cannot be
        read or are among the other rows are left out.
    """
    neighbours = {}
    for number in rows:
        for neighbour in (number - 1, number + 1):
            if neighbour in folder.files and neighbour not in rows:
                try:
                    neighbours[neighbour] = folder.read(neighbour).token_ids
                except RunError:
                    continue  # it is only one of the samples to which wrong states may belong
    return neighbours


def _match_rows(rows: Mapping[int, StoredRow], model: RecomputeStates) -> list[RowCheck]:
    """Compares all layers of rows with the states of their samples, and shows a progress bar."""
    from tqdm import tqdm

    numbers = [*rows]
    checks: dict[int, RowCheck] = {}
    states = model.states([rows[number].token_ids for number in numbers])
    for index, computed in tqdm(
        states, "verifying", len(numbers), leave=False, unit=" rows", disable=None
    ):
        row = rows[numbers[index]]
        check = RowCheck(numbers[index], row, Limits.of(row.dtype, model.dtype, model.has_experts))
        for layer in range(len(row.layers)):
            check.matches.append(match_hooks(row, layer, computed, check.limits))
        checks[check.number] = check
    return [checks[number] for number in numbers]


def _requested_hooks(
    folder: StatesFolder, model: RecomputeStates, layer_count: int
) -> list[ExpectedHook] | None:
    """Returns the hook that each layer should contain by the flags; None if no flag names hooks.

    Args:
        folder: Folder with the hidden states.
        model: Model.
        layer_count: Number of layers of a file.

    Raises:
        InputError: If the flags name other hooks than residual streams, or another number of hooks
            than the files have layers.
    """
    if model.requested_hooks is None:
        return None
    last_hook = folder.last_hook(model.depth)
    hooks = [_canonical(hook) for hook in model.requested_hooks]
    if len(hooks) == layer_count - 1:
        hooks.append(last_hook)
    if len(hooks) != layer_count or hooks[-1] != last_hook:
        raise InputError(
            f"--layers_to_extract, --hook_names: name {', '.join(model.requested_hooks)}; the "
            f"files of {folder.path} hold {layer_count} layers, of which the last one, {last_hook},"
            " may be left out"
        )
    return [ExpectedHook(hook) for hook in hooks]


def _canonical(hook: str) -> str:
    """Returns the name by which a hook is compared, which is the output of a block if possible.

    Raises:
        InputError: If the hook is neither a residual stream nor the output of the final norm.
    """
    number = next(iter(streams_by_number([hook])), None)
    if number is not None:
        return "blocks.0.hook_resid_pre" if number == 0 else f"blocks.{number - 1}.hook_resid_post"
    if hook != FINAL_NORM_HOOK:
        raise InputError(
            f"--hook_names {hook}: is no residual stream; hidden states of other programs are "
            f"blocks.K.hook_resid_post, or {FINAL_NORM_HOOK}"
        )
    return hook


def _nearest_hook(checks: Sequence[RowCheck], layer: int) -> ExpectedHook:
    """Returns the hook that is nearest to a layer in most rows.

    Only rows whose states match a hook count, unless there is no such row. Of two hooks with as
    many rows, the one with the smallest error is returned.
    """
    best_matches = sorted(check.best(layer) for check in checks)
    limits = checks[0].limits
    matching = [match for match in best_matches if match.within(limits)]
    counts = Counter(match.hook for match in matching or best_matches)
    return ExpectedHook(counts.most_common(1)[0][0], bool(matching))


def _line_of_layer(layer: int, hook: ExpectedHook, checks: Sequence[RowCheck]) -> str:
    """Returns the line that names the hook of a layer and the largest error of its right rows."""
    layer_name = f"layer {layer + 1} of {len(checks[0].row.layers)}"
    if not hook.is_known:
        return f"{layer_name}: no row matches a hook"
    matches = []
    for check in checks:
        if check.is_right(layer, hook.name):
            matches.append(check.matches[layer][hook.name, 0])
    right = f"right in {len(matches)} of {counted(len(checks), 'row')}"
    if not matches:
        return f"{layer_name}: {hook.name}, {right}"
    largest = _percent(max(match.error for match in matches))
    at_most = "" if largest.startswith("below") else "at most "
    other_experts = sum(match.other_experts for match in matches)
    exception = ""
    if other_experts:
        exception = f" (without {counted(other_experts, 'token')} that may have other experts)"
    return f"{layer_name}: {hook.name}, {right}, error {at_most}{largest}{exception}"


def _order_problem(hooks: Sequence[ExpectedHook]) -> str:
    """Returns a message if the known hooks are not in ascending order; otherwise ""."""
    names = [hook.name for hook in hooks if hook.is_known]
    order = [_place(name) for name in names]
    if order == sorted(set(order)):
        return ""
    return f"the layers are not in ascending order: {', '.join(names)}"


def _place(hook: str) -> float:
    """Returns the number of a hook in the order of the computation, 0 for the embedding."""
    return next(iter(streams_by_number([hook])), float("inf"))


def _wrong_ids(folder: StatesFolder, rows: Mapping[int, StoredRow]) -> Iterator[tuple[int, str]]:
    """Yields the rows whose token ids differ from those of the data set.

    Args:
        folder: Folder with the hidden states.
        rows: Rows by number.

    Yields:
        The number of a row, and a message about it.
    """
    for number, row in rows.items():
        ids = folder.data_set_ids(number)
        if ids is None or np.array_equal(ids, row.token_ids):
            continue
        difference = f"{len(row.token_ids)} token ids, the data set has {len(ids)}"
        if len(ids) == len(row.token_ids):
            token = int(np.flatnonzero(ids != row.token_ids)[0])
            difference = f"another token id than the data set at token {token}"
        yield number, f"row {number}: {folder.file_name(number)}: has {difference}"


def _notes_on_hooks(
    folder: StatesFolder, model: RecomputeStates, hooks: Sequence[ExpectedHook]
) -> Iterator[str]:
    """Yields remarks about hooks that no flag names."""
    if model.requested_hooks is not None or len(hooks) == 1:
        return
    yield (
        "no flag names the layers that were asked for, so each layer but the last is compared with "
        "the hook that most rows match; --layers_to_extract or --hook_names name them"
    )
    blocks = folder.default_blocks(model.depth)
    if blocks != sorted(set(blocks)):  # the model has too few blocks
        return
    default_hooks = [f"blocks.{block}.hook_resid_post" for block in blocks]
    if len(hooks) == len(blocks) + 1 and [hook.name for hook in hooks[:-1]] != default_hooks:
        numbers = ", ".join(str(block + folder.number_of_block_0) for block in blocks)
        names = ", ".join(default_hooks)
        yield f"by default, {folder.program} stores {names} (its layers {numbers})"


def _describe(
    check: RowCheck,
    wrong_layers: Sequence[int],
    hooks: Sequence[ExpectedHook],
    model: RecomputeStates,
    samples: Mapping[int, np.ndarray],
) -> list[str]:
    """Returns a message about each wrong layer of a row.

    Args:
        check: Comparison of the row with its own sample.
        wrong_layers: Indices of the layers that do not contain the right states.
        hooks: Hook that each layer should contain.
        model: Model, which computes the states of other samples.
        samples: Token ids of the samples to which wrong states may belong, by the number of the
            row, (tokens,) each.
    """
    descriptions = {layer: _own_states(check, layer, hooks[layer], model) for layer in wrong_layers}
    unexplained = [layer for layer in wrong_layers if descriptions[layer] is None]
    alignments: dict[int, list[Alignment]] = {layer: [] for layer in unexplained}
    if unexplained:
        numbers = [*samples]
        for index, computed in model.states([samples[number] for number in numbers]):
            for layer in unexplained:
                for hook in _hooks_to_align(hooks[layer], computed):
                    alignments[layer] += align(
                        check.row, layer, numbers[index], hook, computed[hook], check.limits
                    )
    messages = []
    for layer in wrong_layers:
        description = descriptions[layer]
        if description is None:
            description = _parts(check, layer, hooks[layer], alignments[layer], model)
        expected = f"expected {hooks[layer].name}, " if hooks[layer].is_known else ""
        layer_name = f"row {check.number}, layer {layer + 1} of {len(hooks)}"
        messages.append(f"{layer_name}: {expected}found {description}")
    return messages


def _hooks_to_align(expected: ExpectedHook, hooks: Iterable[str]) -> list[str]:
    """Returns the hooks whose states of other samples are compared with a layer.

    Args:
        expected: Hook that the layer should contain.
        hooks: Names of all hooks, in the order of the computation.

    Returns:
        The expected hook and the hooks before and after it; all hooks if it is not known.
    """
    names = [*hooks]
    if not expected.is_known:
        return names
    index = names.index(expected.name)
    return names[max(index - 1, 0) : index + 2]


def _own_states(
    check: RowCheck, layer: int, hook: ExpectedHook, model: RecomputeStates
) -> str | None:
    """Describes a wrong layer if it needs no states of other samples, otherwise returns None.

    Args:
        check: Comparison of the row with its own sample.
        layer: Index of the layer.
        hook: Hook that the layer should contain.
        model: Model.
    """
    states = check.row.states(layer)
    tokens = len(check.row.token_ids)
    not_finite = np.array(~np.isfinite(states).all(axis=1))
    if not_finite.any():
        return f"NaN or infinity in {_tokens(not_finite)}"
    if not states.any():
        if len(states) == tokens:
            return "zeros"
        return f"{counted(len(states), 'state')} of zeros for {counted(tokens, 'token')}"
    best = check.best(layer)
    if not best.within(check.limits) or len(states) > tokens:
        return None
    if len(states) < tokens:
        cut = f"{counted(len(states), 'state')} for {counted(tokens, 'token')}"
        if best.offset not in (0, tokens - len(states)):
            return None
        part = "first" if best.offset == 0 else "last"
        return f"{cut}: those of the {part} {len(states)}{_other_hook(best.hook, hook, model)}"
    if best.offset:
        direction = "next" if best.offset > 0 else "previous"
        other_hook = _other_hook(best.hook, hook, model)
        return f"each token with the state of the {direction} token{other_hook} ({_error(best)})"
    return f"{best.hook}{_relation(best.hook, hook, model)} ({_error(best)})"


def _other_hook(actual_hook: str, hook: ExpectedHook, model: RecomputeStates) -> str:
    """Returns ", of HOOK, ..." if the states belong to another hook than expected, otherwise ""."""
    if hook.is_known and actual_hook == hook.name:
        return ""
    return f", of {actual_hook}{_relation(actual_hook, hook, model)}"


def _relation(actual_hook: str, hook: ExpectedHook, model: RecomputeStates) -> str:
    """Returns how far a hook is from the expected one, in words that follow its name.

    It returns "" if the two are the same, or if the expected hook is not known.
    """
    expected = hook.name
    if not hook.is_known or actual_hook == expected:
        return ""
    last_stream = f"blocks.{model.depth - 1}.hook_resid_post"
    if (actual_hook, expected) == (FINAL_NORM_HOOK, last_stream):
        return ", after the final norm instead of before it"
    if (actual_hook, expected) == (last_stream, FINAL_NORM_HOOK):
        return ", before the final norm instead of after it"
    names = [*streams_by_number([*_stream_names(model.depth)]).values(), FINAL_NORM_HOOK]
    distance = names.index(actual_hook) - names.index(expected)
    if expected == FINAL_NORM_HOOK:
        distance += 1  # the final norm belongs to the last block's output, which it normalises
    elif actual_hook == FINAL_NORM_HOOK:
        distance -= 1
    direction = "late" if distance > 0 else "early"
    number = "one layer" if abs(distance) == 1 else f"{abs(distance)} layers"
    norm = ", and without the final norm" if expected == FINAL_NORM_HOOK else ""
    norm = ", and after the final norm" if actual_hook == FINAL_NORM_HOOK else norm
    return f", {number} too {direction}{norm}"


def _stream_names(depth: int) -> Iterator[str]:
    """Yields the names of all residual streams of a model, in the order of the computation."""
    yield "blocks.0.hook_resid_pre"
    for block in range(depth):
        yield f"blocks.{block}.hook_resid_post"


def _parts(
    check: RowCheck,
    layer: int,
    hook: ExpectedHook,
    alignments: Sequence[Alignment],
    model: RecomputeStates,
) -> str:
    """Describes a layer by the samples to which its states belong, and by the nearest hook.

    Args:
        check: Comparison of the row with its own sample.
        layer: Index of the layer.
        hook: Hook that the layer should contain.
        alignments: Alignments with the row's own sample, with its neighbours, and with other rows.
        model: Model.
    """
    states = check.row.states(layer)
    tokens = len(check.row.token_ids)
    # A right part is preferred to a part of another sample, and near rows to far ones, for example
    # if two samples begin alike.
    nearest_first = sorted(
        alignments,
        key=lambda a: (a.hook != hook.name, abs(a.number - check.number), a.offset != 0),
    )
    phrases = []
    if len(states) != tokens:
        phrases.append(f"{counted(len(states), 'state')} for {counted(tokens, 'token')}")
    zeros = np.array(~states.any(axis=1))
    if zeros.any():
        phrases.append(f"zeros in {_tokens(zeros)}")
    best = check.best(layer)
    errors = f"{_error(best)}, a token up to {_percent(best.largest_error)}"
    if (best.hook, best.offset) == (hook.name, 0) and any(
        (a.hook, a.number, a.offset) == (hook.name, check.number, 0) and a.states.all()
        for a in alignments
    ):
        limit = f"at most {_percent(check.limits.row)} is explained by rounding"
        phrases.append(f"the right hook and tokens, but other values ({errors}; {limit})")
        return "; ".join(phrases)
    left = ~zeros
    for alignment in best_alignments(nearest_first):
        left &= ~alignment.states
        phrases.append(_part(alignment, check.number, hook, model))
    if left.all():
        nearest = f"{best.hook}{_relation(best.hook, hook, model)}"
        if best.offset:
            nearest += f" of the {'next' if best.offset > 0 else 'previous'} token"
        hint = ""
        rounded = Limits.of(check.row.dtype, "bfloat16", model.has_experts)
        if best.hook == hook.name and not best.offset and best.within(rounded):
            hint = "; rounding to bfloat16 explains it (--dtype bfloat16)"
        phrases.append(f"no match; nearest is {nearest} ({errors}{hint})")
    elif left.any():
        experts = ", perhaps because of other experts" if check.limits.other_experts else ""
        phrases.append(f"no match for {_tokens(left)}{experts}")
    return "; ".join(phrases)


def _part(alignment: Alignment, own_number: int, hook: ExpectedHook, model: RecomputeStates) -> str:
    """Returns a phrase about the states of a layer that belong to one sample.

    Args:
        alignment: States that belong together.
        own_number: Number of the row that contains the layer.
        hook: Hook that the layer should contain.
        model: Model.
    """
    other_hook = _other_hook(alignment.hook, hook, model)
    is_whole = bool(alignment.states.all())
    is_own = alignment.number == own_number
    if is_own and not alignment.offset and not other_hook:
        return f"the right states in {_tokens(alignment.states)}"
    indices = np.flatnonzero(alignment.states)
    first, last = (indices[[0, -1]] + alignment.offset).tolist()
    place = "" if is_own else f" of row {alignment.number}"
    if is_whole and not is_own and not alignment.offset:
        return f"the states{place}{other_hook}"
    source = f"token {first}" if first == last else f"tokens {first} to {last}"
    part = "" if is_whole else f" in {_tokens(alignment.states)}"
    return f"the states of {source}{place or ' of the same row'}{part}{other_hook}"


def _tokens(mask: np.ndarray) -> str:
    """Returns the tokens of a mask in words, such as "tokens 0 to 11" or "3 of tokens 0 to 11"."""
    indices = np.flatnonzero(mask)
    first, last = indices[[0, -1]].tolist()
    if len(indices) == 1:
        return f"token {first}"
    span = f"tokens {first} to {last}"
    return span if len(indices) == last - first + 1 else f"{len(indices)} of {span}"


def _error(match: HookMatch) -> str:
    return f"error {_percent(match.error)}"


def _percent(error: float) -> str:
    """Returns a relative error as a percentage with two significant digits."""
    if error < 1e-5:
        return "below 0.001 %"
    return f"{100 * error:.2g} %" if error < 1 else f"{100 * error:,.0f} %"
