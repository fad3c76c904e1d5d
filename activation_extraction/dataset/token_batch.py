"""Declares batches of tokens, and whole samples, with their activations at several hooks.

A stored hook can be selected by any of its names, and by globs. metadata.json records all names of
a hook: the canonical name, which is TransformerLens's name; the key; and further names. The keys of
a mapping from hooks to values (`ByHook`) are the canonical names, but each name can be looked up.
"""

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from activation_extraction.common.codes import map_arrays
from activation_extraction.common.visible import counted
from activation_extraction.text.sample_facts import SampleFacts

T = TypeVar("T")
U = TypeVar("U")
# A NumPy array, a PyTorch tensor or a JAX array.
ArrayOrTensor = Any


class ByHook(dict[str, T]):
    """A dict from the canonical names of hooks to values, which also accepts other names as keys.

    Args:
        values: Value of each hook, by the canonical name of the hook.
        canonical_name_by_alias: Canonical name of a hook, by each other name of the hook. None if
            the hooks have no other names.

    Attributes:
        canonical_name_by_alias: Canonical name of a hook, by each other name of the hook. Empty if
            the hooks have no other names.
    """

    def __init__(
        self, values: Mapping[str, T], canonical_name_by_alias: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(values)
        self.canonical_name_by_alias: dict[str, str] = dict(canonical_name_by_alias or {})

    def __missing__(self, name: str) -> T:
        canonical_name = self.canonical_name_by_alias.get(name)
        if canonical_name is None or canonical_name not in self:
            raise KeyError(f"no hook {name!r}; there are {', '.join(self) or 'none'}")
        return self[canonical_name]

    def map(self, convert: Callable[[T], U]) -> "ByHook[U]":
        """Returns a mapping with the hooks and aliases of this mapping, and with converted values.

        Args:
            convert: Function that takes a value and returns the converted value.
        """
        converted_values = {hook_name: convert(value) for hook_name, value in self.items()}
        return ByHook(converted_values, self.canonical_name_by_alias)

    def chosen(self, run_name: str, hooks: Any) -> list[str]:
        """Returns the canonical names of the hooks that a user has selected.

        Args:
            run_name: URL of the run, for messages.
            hooks: A name or a glob, or a sequence of names and globs. A glob may match any name of
                a hook. None for all hooks.

        Returns:
            The names in the order of `hooks`, without duplicates.

        Raises:
            ValueError: If a name or a glob matches no hook.
        """
        if hooks is None:
            return list(self)
        all_names_by_canonical_name = {canonical_name: [canonical_name] for canonical_name in self}
        for alias, canonical_name in self.canonical_name_by_alias.items():
            all_names_by_canonical_name.get(canonical_name, []).append(alias)
        chosen_hook_names: dict[str, None] = {}  # a dict serves as an ordered set
        for pattern in [hooks] if isinstance(hooks, str) else hooks:
            matching_hook_names = [
                canonical_name
                for canonical_name, names_of_hook in all_names_by_canonical_name.items()
                if any(fnmatchcase(name_of_hook, pattern) for name_of_hook in names_of_hook)
            ]
            if not matching_hook_names:
                raise ValueError(f"{run_name}: has no hook {pattern!r}; it has {', '.join(self)}")
            chosen_hook_names |= dict.fromkeys(matching_hook_names)
        return list(chosen_hook_names)


def recorded_aliases(hooks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns a dict from the other names of hooks to their canonical names.

    Args:
        hooks: The list "hooks" of metadata.json, with a dict for each hook. The keys "aliases",
            "module" and "key" of the dict contain the other names of the hook.
    """
    return {
        alias: hook_entry["name"]
        for hook_entry in hooks
        for alias in (*hook_entry.get("aliases", ()), hook_entry.get("module"), hook_entry["key"])
        if isinstance(alias, str) and alias != hook_entry["name"]
    }


@dataclass(frozen=True)
class TokenBatch:
    """Tokens with their activations at several hooks. Row t of every array belongs to one token.

    `batch[hook]` returns the activations at a hook, and `len(batch)` is the number of tokens. The
    arrays are NumPy arrays; `torch` and `to` return a batch of PyTorch tensors, and `jax` returns a
    batch of JAX arrays.

    In the following shapes, `size` is the number of tokens in the batch.

    Attributes:
        activations: Values at each hook, (size, width). The keys are the canonical names of the
            hooks; their other names are accepted as well. At a hook with codes, the values are a
            `Codes` object.
        token_ids: Ids of the tokens, int32 (size,).
        sample_idx: Numbers of the samples that the tokens belong to, int64 (size,).
        position: Positions of the tokens in their samples, from 0, int32 (size,).
        role: Roles of the tokens, int32 (size,), indices in `activation_extraction.ROLES`. None if
            the run has no roles.
        turn: Number of the turn of the conversation that each token belongs to, from 0, int32
            (size,). None if the run has no turns.
        columns: Columns of the table of samples, by name: for each token, the value of its sample.
            They are NumPy arrays of objects (size,), also in batches of tensors. Empty if `batches`
            was called without `columns`.
    """

    activations: ByHook[Any]
    token_ids: ArrayOrTensor
    sample_idx: ArrayOrTensor
    position: ArrayOrTensor
    role: ArrayOrTensor | None = None
    turn: ArrayOrTensor | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.token_ids)

    def __getitem__(self, hook: str) -> Any:
        """Returns the values of the batch's tokens at a hook.

        Args:
            hook: The canonical name of the hook, or one of its other names.

        Returns:
            An array (size, width), where `size` is the number of tokens of the batch, or a `Codes`
            object if the hook has codes.

        Raises:
            KeyError: If no hook has this name.
        """
        return _at_hook(self, hook)

    @property
    def positions(self) -> Any:
        """The same array as `position`, under the name that it has in records of pickled shards."""
        return self.position

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the hooks, like a dict."""
        return iter(self.activations)

    def keys(self) -> KeysView[str]:
        """Returns the names of the hooks."""
        return self.activations.keys()

    def items(self) -> ItemsView[str, Any]:
        """Returns pairs of the name of a hook and the activations at the hook."""
        return self.activations.items()

    def to(self, device: Any) -> "TokenBatch":
        """Returns a batch of PyTorch tensors on a device, with the values of this batch.

        The arrays in `columns` stay NumPy arrays.

        Args:
            device: Device of PyTorch, such as "cuda".
        """
        tensor_batch = self if hasattr(self.token_ids, "is_pinned") else self.map(np.array).torch()
        return tensor_batch.map(methodcaller("to", device))

    @property
    def arrays(self) -> list[Any]:
        """All arrays except the arrays in `columns`, in a fixed order.

        The activations of every hook come first, then `token_ids`, `sample_idx`, `position` and the
        `labels`.
        """
        id_position_and_label_arrays = (
            self.token_ids,
            self.sample_idx,
            self.position,
            *self.labels.values(),
        )
        return [*self.activations.values(), *id_position_and_label_arrays]

    @property
    def labels(self) -> dict[str, Any]:
        """The arrays `role` and `turn` of the batch's tokens, by the names "role" and "turn".

        An array that the run does not store is left out.
        """
        label_array_by_name = {"role": self.role, "turn": self.turn}
        return {
            label_name: label_values
            for label_name, label_values in label_array_by_name.items()
            if label_values is not None
        }

    def torch(self) -> "TokenBatch":
        """Returns a batch of PyTorch tensors that share the memory of this batch's NumPy arrays.

        The arrays in `columns` stay NumPy arrays.
        """
        return self.map(as_tensor)

    def jax(self) -> "TokenBatch":
        """Returns a batch of JAX arrays on JAX's default device, with the values of this batch.

        `sample_idx` stays a NumPy array, because JAX would cut its values to 32 bits. The arrays in
        `columns` stay NumPy arrays, too.
        """
        import jax

        return replace(self.map(jax.device_put), sample_idx=self.sample_idx)

    def map(self, convert: Callable[[np.ndarray], Any]) -> "TokenBatch":
        """Returns a batch with converted arrays. Only the arrays in `columns` stay as they are.

        Args:
            convert: Function that takes an array and returns the converted array. At a hook of
                codes, it is applied to each of the arrays of which Codes consist.
        """
        return TokenBatch(
            self.activations.map(lambda activations: map_arrays(activations, convert)),
            convert(self.token_ids),
            convert(self.sample_idx),
            convert(self.position),
            **{
                label_name: convert(label_values)
                for label_name, label_values in self.labels.items()
            },
            columns=self.columns,
        )


class TokenPair(NamedTuple):
    """Batches of the same tokens from two runs. Row t of every array in both is the same token.

    Attributes:
        first: Batch of the first run, which is the argument `a` of `paired`.
        second: Batch of the second run, which is the argument `b`.
    """

    first: TokenBatch
    second: TokenBatch

    def torch(self) -> "TokenPair":
        """Returns a pair of batches of PyTorch tensors that share memory with the NumPy arrays."""
        return TokenPair(*(batch.torch() for batch in self))

    def jax(self) -> "TokenPair":
        """Returns a pair of batches of JAX arrays (see TokenBatch.jax)."""
        return TokenPair(*(batch.jax() for batch in self))


def as_tensor(values: np.ndarray) -> Any:
    """Returns a PyTorch tensor that shares the memory of an array."""
    import torch

    if values.dtype.name == "bfloat16":  # torch.from_numpy does not support NumPy's bfloat16
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def empty_batch(like: TokenBatch, size: int, dtypes: Mapping[str, str] | None = None) -> TokenBatch:
    """Returns a new batch of uninitialised arrays, into which tokens can be copied.

    Args:
        like: Batch with the hooks, widths and dtypes of the new batch.
        size: Number of tokens of the new batch.
        dtypes: Dtype by the name of a hook, for hooks whose dtype shall differ from the dtype in
            `like`. None if no dtype differs.
    """
    uninitialised_batch = like.map(lambda values: np.empty((size, *values.shape[1:]), values.dtype))
    for hook_name, dtype in (dtypes or {}).items():
        activations_shape = uninitialised_batch.activations[hook_name].shape
        uninitialised_batch.activations[hook_name] = np.empty(activations_shape, dtype)
    return uninitialised_batch


def concatenate_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Returns the tokens of several batches as one batch. A single batch is returned as it is.

    Args:
        batches: At least one batch. All batches must have the same hooks, and all or none of them
            must have `role` and `turn`.
    """
    if len(batches) == 1:
        return batches[0]
    concatenated_arrays = map(
        np.concatenate, zip(*(batch.arrays for batch in batches), strict=True)
    )
    return batches[0].map(lambda _: next(concatenated_arrays))


class Block(NamedTuple):
    """Tokens that were read together, and the indices of the wanted tokens among them.

    Attributes:
        token_batch: The tokens with their activations.
        wanted_token_indices: Indices into `token_batch` of the tokens that pass the filters, int64
            (wanted tokens,). If runs are paired or joined, there is a block for each run, and item
            i of `wanted_token_indices` refers to the same token in every block. The indices are in
            ascending order for a single run and for the first of several runs, but not always for
            the other runs, whose tokens are listed in the order of the first run.
    """

    token_batch: TokenBatch
    wanted_token_indices: np.ndarray


def copy_wanted_tokens(block: Block, target_indices: np.ndarray, target: TokenBatch) -> None:
    """Copies the wanted tokens of a block into a batch, and converts them to the batch's dtypes.

    Args:
        block: Block with at least one wanted token.
        target_indices: For each wanted token (`wanted_token_indices` of the block), the index in
            `target` to which the token is copied, int64 (wanted tokens,).
        target: Batch that is written to.
    """
    wanted_token_slice_or_indices = _as_slice(block.wanted_token_indices)
    target_slice_or_indices = _as_slice(target_indices)
    for source_values, target_values in zip(block.token_batch.arrays, target.arrays, strict=True):
        has_same_dtype = source_values.dtype == target_values.dtype
        source_bit_patterns = _bits_of(source_values)
        target_bit_patterns_or_values = _bits_of(target_values) if has_same_dtype else target_values
        if (
            has_same_dtype
            and isinstance(target_slice_or_indices, slice)
            and not isinstance(wanted_token_slice_or_indices, slice)
        ):
            # With the default mode="raise", NumPy would buffer `out` and copy all values twice.
            np.take(
                source_bit_patterns,
                wanted_token_slice_or_indices,
                axis=0,
                out=target_bit_patterns_or_values[target_slice_or_indices],
                mode="clip",
            )
        else:
            bit_patterns_of_wanted_tokens = source_bit_patterns[wanted_token_slice_or_indices]
            target_bit_patterns_or_values[target_slice_or_indices] = (
                bit_patterns_of_wanted_tokens
                if has_same_dtype
                else bit_patterns_of_wanted_tokens.view(source_values.dtype)
            )


def _as_slice(token_indices: np.ndarray) -> slice | np.ndarray:
    """Returns indices of tokens as a slice if they are consecutive, otherwise unchanged.

    NumPy copies values that a slice selects faster than values that an array of indices selects.
    """
    are_consecutive = (np.diff(token_indices) == 1).all()
    return slice(token_indices[0], token_indices[-1] + 1) if are_consecutive else token_indices


def _bits_of(values: np.ndarray) -> np.ndarray:
    """Returns two-byte values as integers with the same bits, and other values as they are.

    NumPy copies its own dtypes faster than bfloat16, which another package adds to NumPy.
    """
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


@dataclass(frozen=True, kw_only=True)
class SampleActivations(SampleFacts):
    """One sample of a run, with its tokens and their activations.

    `sample[hook]` returns the activations at a hook.

    Attributes:
        sample_idx: Number of the sample, unique over all machines and hosts of the run.
        row: Position of the sample's row in the data set, such as {"file": ..., "line": ...}. The
            docstring of activation_extraction.text.sample_facts.SampleFacts lists the keys. None if
            the program that stored the sample gave no row.
        doc_id: Id of the row in the data set; None if the row has no id.
        text_preview: The first 200 characters of the text.
        cut: Number of tokens of the document that were left out at its end.
        columns: Other columns of the row that the run kept, by name.
        activations: Values at each hook, (tokens, width). The keys are the canonical names of the
            hooks; their other names are accepted as well. At a hook with codes, the values are a
            `Codes` object.
        token_ids: Ids of the stored tokens, int32 (tokens,).
        position: Positions of the tokens, int32 (tokens,), counted from 0 at the start of the
            sample. In a result of `ActivationDataset.document`, they are counted from the start of
            the document.
        role: Roles of the tokens, int32 (tokens,), indices in `activation_extraction.ROLES`. None
            if the run has no roles.
        turn: Number of the turn of the conversation that each token belongs to, from 0, int32
            (tokens,). None if the run has no turns.
    """

    activations: ByHook[Any]
    token_ids: np.ndarray
    position: np.ndarray
    role: np.ndarray | None = None
    turn: np.ndarray | None = None

    def __getitem__(self, hook: str) -> Any:
        """Returns the values of the sample's tokens at a hook.

        Args:
            hook: The canonical name of the hook, or one of its other names.

        Returns:
            An array (tokens, width), or a `Codes` object if the hook has codes.

        Raises:
            KeyError: If no hook has this name.
        """
        return _at_hook(self, hook)

    @property
    def positions(self) -> np.ndarray:
        """The same array as `position`, under the name that it has in records of pickled shards."""
        return self.position


def _at_hook(batch_or_sample: TokenBatch | SampleActivations, name: str) -> Any:
    """Returns the values of a batch's or a sample's tokens at a hook.

    Args:
        batch_or_sample: The batch or the sample.
        name: The canonical name of the hook, or one of its other names.

    Returns:
        The activations, (tokens, width), or a `Codes` object at a hook with codes.

    Raises:
        KeyError: If no hook has this name. If `batch_or_sample` has an attribute or a column of
            this name, the message names it. Otherwise the message lists the hooks.
    """
    try:
        return batch_or_sample.activations[name]
    except KeyError:
        if name in vars(batch_or_sample) or name == "positions":
            reading_hint = f"read its attribute .{name}"
        elif name in batch_or_sample.columns:
            reading_hint = f"read .columns[{name!r}]"
        else:
            raise
    raise KeyError(f"{name!r} is no hook; {reading_hint}")


class Samples(Sequence[SampleActivations]):
    """A sequence of samples, which are read when they are indexed.

    A subclass defines `__len__`, and the method `_sample`, which takes the index of a sample, at
    least 0, and reads the sample.
    """

    def number(self, index: int) -> int:
        """Converts a negative index of a sample to the index counted from the start of the dataset.

        Args:
            index: Index of the sample in the dataset. A negative index counts from the end; any
                other index is returned as it is.

        Raises:
            IndexError: If there is no such sample.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index}: the dataset has {counted(len(self), 'sample')}")
        return index % len(self)

    @overload
    def __getitem__(self, index: int) -> SampleActivations: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleActivations]: ...
    def __getitem__(self, index: int | slice) -> SampleActivations | list[SampleActivations]:
        """Reads the sample at an index, or a list of the samples in a slice."""
        if isinstance(index, slice):
            sample_indices = range(*index.indices(len(self)))
            return [self._sample(sample_index) for sample_index in sample_indices]
        return self._sample(self.number(index))

    def _sample(self, index: int) -> SampleActivations:
        raise NotImplementedError


def piece_of(row: Mapping[str, Any] | None) -> tuple[int, int, dict[str, Any]] | None:
    """Returns the number and the start of the piece of a long document that a sample contains.

    Args:
        row: The position of the sample's row in the data set (`SampleFacts.row`). If the sample is
            a piece of a document, the keys "piece" and "start" contain the first two elements of
            the result. None if the sample has no row.

    Returns:
        None if the sample is not a piece of a document, otherwise a tuple of:

        - the number of the piece in the document, from 0
        - the index in the document of the first token of the piece
        - the position of the document's row in the data set: `row` without the two keys
    """
    row_position = dict(row or {})
    piece_number = row_position.pop("piece", None)
    piece_start = row_position.pop("start", None)
    return (
        None
        if piece_number is None or piece_start is None
        else (piece_number, piece_start, row_position)
    )
