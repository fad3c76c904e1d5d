"""Tokens with their activations at several hooks: batches of any tokens, and whole samples.

A stored hook is found by any of its names, and by globs. metadata.json records all names of a hook:
the canonical name; the key, which is the name in --hook_names; and further names. Mappings by hook
list the canonical names.
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


class ByHook(dict[str, T]):
    """A dict from the canonical names of hooks to values, which also finds a value by other names.

    Args:
        values: Values by canonical name.
        aliases: Canonical name by alias. None if the hooks have no other names.

    Attributes:
        aliases: The canonical name of a hook by each of its other names.
    """

    def __init__(self, values: Mapping[str, T], aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.aliases = dict(aliases or {})

    def __missing__(self, name: str) -> T:
        canonical = self.aliases.get(name)
        if canonical is None or canonical not in self:
            raise KeyError(f"no hook {name!r}; there are {', '.join(self) or 'none'}")
        return self[canonical]

    def map(self, convert: Callable[[T], U]) -> "ByHook[U]":
        """Returns a mapping with the same hooks and aliases, and with converted values.

        Args:
            convert: Function that takes a value and returns the converted value.
        """
        return ByHook({hook: convert(value) for hook, value in self.items()}, self.aliases)

    def chosen(self, where: str, hooks: Any) -> list[str]:
        """Returns the canonical names of some hooks, each once.

        Args:
            where: URL of the run, for messages.
            hooks: Name or glob, or several of them, which may match any name of a hook. None for
                all hooks.

        Returns:
            The names in the order of the globs.

        Raises:
            ValueError: A glob matches nothing.
        """
        if hooks is None:
            return list(self)
        names = {hook: [hook] for hook in self}
        for alias, hook in self.aliases.items():
            names.get(hook, []).append(alias)
        chosen: dict[str, None] = {}  # as an ordered set
        for pattern in [hooks] if isinstance(hooks, str) else hooks:
            matches = [
                hook
                for hook, names_of_hook in names.items()
                if any(fnmatchcase(name, pattern) for name in names_of_hook)
            ]
            if not matches:
                raise ValueError(f"{where}: has no hook {pattern!r}; it has {', '.join(self)}")
            chosen |= dict.fromkeys(matches)
        return list(chosen)


def recorded_aliases(hooks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the canonical names of hooks by their other names.

    Args:
        hooks: Descriptions of the hooks in metadata.json.
    """
    return {
        alias: hook["name"]
        for hook in hooks
        for alias in (*hook.get("aliases", ()), hook.get("module"), hook["key"])
        if isinstance(alias, str) and alias != hook["name"]
    }


@dataclass(frozen=True)
class TokenBatch:
    """Tokens with their activations at several hooks. Row t of every array belongs to one token.

    Arrays are NumPy's, PyTorch's (after `torch` and `to`) or JAX's (after `jax`). `batch[hook]`
    returns the activations at a hook.

    Attributes:
        activations: Values by hook, by any of its names, (size, width); Codes at a hook of codes.
        token_ids: Ids of the tokens, int32 (size,).
        sample_idx: Numbers of the samples that the tokens belong to, int64 (size,).
        position: Positions of the tokens in their samples, from 0, int32 (size,).
        role: Roles of the tokens, int32 (size,), indices in `activation_extraction.ROLES`. None if
            the run has no roles.
        turn: Turns of the tokens, int32 (size,), counted from 0. None if the run has no turns.
        columns: Columns of the table of samples, by name, if the batches were made with `columns`.
            They are NumPy arrays of objects (size,), also in batches of tensors.
    """

    activations: ByHook[Any]
    token_ids: Any
    sample_idx: Any
    position: Any
    role: Any = None
    turn: Any = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, hook: str) -> Any:
        return _at_hook(self, hook)

    @property
    def positions(self) -> Any:
        """The same as `position`; the records of pickled shards use this name."""
        return self.position

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the hooks, like a dict."""
        return iter(self.activations)

    def keys(self) -> KeysView[str]:
        """Returns the names of the hooks."""
        return self.activations.keys()

    def items(self) -> ItemsView[str, Any]:
        """Returns pairs of a hook's name and its activations."""
        return self.activations.items()

    def to(self, device: Any) -> "TokenBatch":
        """Returns the batch as PyTorch tensors on a device.

        Args:
            device: Device of PyTorch, such as "cuda".
        """
        tensors = self if hasattr(self.token_ids, "is_pinned") else self.map(np.array).torch()
        return tensors.map(methodcaller("to", device))

    @property
    def arrays(self) -> list[Any]:
        """All arrays except those in `columns`, in a fixed order.

        The activations of every hook come first, then `token_ids`, `sample_idx`, `position` and the
        `labels`.
        """
        shared = self.token_ids, self.sample_idx, self.position, *self.labels.values()
        return [*self.activations.values(), *shared]

    @property
    def labels(self) -> dict[str, Any]:
        """The arrays `role` and `turn` by name, if the run has them."""
        labels = {"role": self.role, "turn": self.turn}
        return {name: values for name, values in labels.items() if values is not None}

    def torch(self) -> "TokenBatch":
        """Returns the batch as PyTorch tensors, which share the memory of the arrays."""
        return self.map(as_tensor)

    def jax(self) -> "TokenBatch":
        """Returns the batch as JAX arrays on JAX's default device.

        `sample_idx` stays a NumPy array: JAX would cut it to 32 bits.
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
            self.activations.map(lambda values: map_arrays(values, convert)),
            convert(self.token_ids),
            convert(self.sample_idx),
            convert(self.position),
            **{name: convert(values) for name, values in self.labels.items()},
            columns=self.columns,
        )


class TokenPair(NamedTuple):
    """Batches of the same tokens from two runs. Row t of all arrays in both batches is one token.

    Attributes:
        first: Batch of the first run, which is the argument `a` of `paired`.
        second: Batch of the second run, which is the argument `b`.
    """

    first: TokenBatch
    second: TokenBatch

    def torch(self) -> "TokenPair":
        """Returns both batches as PyTorch tensors, which share the memory of the arrays."""
        return TokenPair(*(batch.torch() for batch in self))

    def jax(self) -> "TokenPair":
        """Returns both batches as JAX arrays (see TokenBatch.jax)."""
        return TokenPair(*(batch.jax() for batch in self))


def as_tensor(values: np.ndarray) -> Any:
    """Returns a PyTorch tensor that shares the memory of an array."""
    import torch

    if values.dtype.name == "bfloat16":  # torch.from_numpy does not support NumPy's bfloat16
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def empty_batch(like: TokenBatch, size: int, dtypes: Mapping[str, str] | None = None) -> TokenBatch:
    """Returns a batch whose content is undefined.

    Args:
        like: A batch with the same hooks, widths and dtypes.
        size: The number of tokens.
        dtypes: Dtype by hook, for hooks whose dtype differs from that in `like`. None if all dtypes
            are the same.
    """
    batch = like.map(lambda values: np.empty((size, *values.shape[1:]), values.dtype))
    for hook, dtype in (dtypes or {}).items():
        batch.activations[hook] = np.empty(batch.activations[hook].shape, dtype)
    return batch


def concatenate_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Returns the tokens of several batches as one batch. A single batch is returned as it is.

    Args:
        batches: At least one batch; all of them have the same hooks and labels.
    """
    if len(batches) == 1:
        return batches[0]
    arrays = map(np.concatenate, zip(*(batch.arrays for batch in batches), strict=True))
    return batches[0].map(lambda _: next(arrays))


class Block(NamedTuple):
    """Tokens that were read together, and which of them are wanted.

    Attributes:
        tokens: The tokens with their activations.
        rows: Indices into `tokens` of the tokens that pass the filters, int64 (rows,). They ascend,
            except in the blocks of paired or joined runs: there is a block for each run, row i of
            every block is the same token, and all blocks have the order of the first run.
    """

    tokens: TokenBatch
    rows: np.ndarray


def copy_rows(block: Block, places: np.ndarray, target: TokenBatch) -> None:
    """Copies the rows of a block into a batch, and converts them to the dtypes of the batch.

    Args:
        block: Block with at least one row.
        places: Rows of `target` to copy to, int64 (rows,).
        target: Batch that is written to.
    """
    source_rows = _as_slice(block.rows)
    target_rows = _as_slice(places)
    for values, output in zip(block.tokens.arrays, target.arrays, strict=True):
        same_dtype = values.dtype == output.dtype
        bits = _bits_of(values)
        output_bits = _bits_of(output) if same_dtype else output
        if same_dtype and isinstance(target_rows, slice) and not isinstance(source_rows, slice):
            # With the default mode="raise", NumPy would buffer `out` and copy all rows twice.
            np.take(bits, source_rows, axis=0, out=output_bits[target_rows], mode="clip")
        else:
            taken = bits[source_rows]
            output_bits[target_rows] = taken if same_dtype else taken.view(values.dtype)


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Returns rows as a slice if they are consecutive, because NumPy copies a slice faster."""
    return slice(rows[0], rows[-1] + 1) if (np.diff(rows) == 1).all() else rows


def _bits_of(values: np.ndarray) -> np.ndarray:
    """Returns two-byte values as integers with the same bits, other values as they are.

    NumPy copies its own dtypes faster than bfloat16.
    """
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


@dataclass(frozen=True, kw_only=True)
class SampleActivations(SampleFacts):
    """One sample: its facts, its tokens, and their activations.

    Attributes:
        sample_idx: Number of the sample, unique over all machines and hosts of the run.
        row: Row of the data set that the sample comes from. The docstring of
            activation_extraction.text.sample_facts.SampleFacts lists its keys. None if a program
            has stored no row.
        doc_id: Id that the row has in the data set; None if it has none.
        text_preview: The first 200 characters of the text.
        cut: Number of tokens of the document that were left out at its end.
        columns: Other columns of the row that the run kept, by name.
        activations: Values by hook, by any of its names, (tokens, width); Codes at a hook of codes.
        token_ids: Ids of the stored tokens, int32 (tokens,).
        position: Positions of the tokens, int32 (tokens,), counted from 0 at the start of the
            sample. In a result of `ActivationDataset.document`, they are counted from the start of
            the document.
        role: Roles of the tokens, int32 (tokens,), indices in `activation_extraction.ROLES`. None
            if the run has no roles.
        turn: Turns of the tokens, int32 (tokens,), counted from 0. None if the run has no turns.
    """

    activations: ByHook[np.ndarray]
    token_ids: np.ndarray
    position: np.ndarray
    role: np.ndarray | None = None
    turn: np.ndarray | None = None

    def __getitem__(self, hook: str) -> np.ndarray:
        values: np.ndarray = _at_hook(self, hook)
        return values

    @property
    def positions(self) -> np.ndarray:
        """The same as `position`; the records of pickled shards use this name."""
        return self.position


def _at_hook(tokens: TokenBatch | SampleActivations, name: str) -> Any:
    """Returns the values of tokens at a hook.

    Args:
        tokens: A batch or a sample.
        name: Any name of the hook.

    Raises:
        KeyError: There is no such hook. If an attribute or a column of `tokens` has this name, the
            message says so, otherwise it lists the hooks.
    """
    try:
        return tokens.activations[name]
    except KeyError:
        if name in vars(tokens) or name == "positions":
            place = f"its attribute .{name}"
        elif name in tokens.columns:
            place = f".columns[{name!r}]"
        else:
            raise
    raise KeyError(f"{name!r} is no hook; read {place}")


class Samples(Sequence[SampleActivations]):
    """A sequence of samples, which are read when they are indexed.

    A subclass defines `__len__`, and `_sample`, which takes the number of a sample, counted from 0,
    and reads the sample.
    """

    def number(self, index: int) -> int:
        """Returns the number of a sample, from 0.

        Args:
            index: Index of the sample; a negative one counts from the end.

        Raises:
            IndexError: There is no such sample.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index}: the dataset has {counted(len(self), 'sample')}")
        return index % len(self)

    @overload
    def __getitem__(self, index: int) -> SampleActivations: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleActivations]: ...
    def __getitem__(self, index: int | slice) -> SampleActivations | list[SampleActivations]:
        if isinstance(index, slice):
            return [self._sample(number) for number in range(*index.indices(len(self)))]
        return self._sample(self.number(index))

    def _sample(self, number: int) -> SampleActivations:
        raise NotImplementedError


def piece_of(row: Mapping[str, Any] | None) -> tuple[int, int, dict[str, Any]] | None:
    """Returns the place of a sample in the long document of which it is a piece.

    Args:
        row: The row of a sample (see SampleFacts).

    Returns:
        The number of the piece, from 0; the position in the document of its first token; and the
        row of the document. None if the sample is no piece.
    """
    document = dict(row or {})
    piece = document.pop("piece", None)
    start = document.pop("start", None)
    return None if piece is None or start is None else (piece, start, document)
