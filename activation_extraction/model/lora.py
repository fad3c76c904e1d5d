"""Merges a LoRA adapter (arXiv:2106.09685) of PEFT into its base model while it is loaded.

`LoraAdapter` determines from the headers of the adapter and of its base model which tensors the
adapter changes. It rejects settings with which the weights would follow from another formula.
`LoraAdapter.merge` computes a part of a changed tensor, W + s B A in float32, which the caller
rounds once. PEFT 0.21 is the reference.

Letters: r the rank, E the experts of a layer, A (r, in) and B (out, r) the factors of a change, s
its scale.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.common.safetensors import DTYPE_NAMES
from activation_extraction.common.visible import counted
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.model_config import HEAD
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.model.repository_files import ADAPTER
from activation_extraction.model.tensor_names import text_name
from activation_extraction.model.weight_files import FLOAT_TYPES, Index

# Setting of an adapter -> the values that are supported. With other values, the weights follow from
# another formula, or the base model changes as well.
OFF: tuple[Any, ...] = (None, False, [], {})
ALLOWED = {
    "peft_type": ("LORA",),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("alora_invocation_tokens", "layer_replication", "arrow_config"), OFF),
    **dict.fromkeys(("use_qalora", "use_bdlora", "kasa_config", "velora_config"), OFF),
    **dict.fromkeys(("monteclora_config", "trainable_token_indices"), OFF),
}
BOOLEANS = ("use_rslora", "use_dora", "ensure_weight_tying")
# Parts that PEFT adds to the names of modules: for whole tensors, for the adapter's name in raw
# state dicts, and for base layers.
ADDED = re.compile(r"\.(modules_to_save|default)(?=\.|$)|\.base_layer(?=\.(weight|bias)$)")
# The ends of keys, after "lora_".
LINEAR, EMBEDDED = ["A.weight", "B.weight"], ["embedding_A", "embedding_B"]
BIAS, MAGNITUDE = "B.bias", "magnitude_vector"
# PEFT exchanged the inputs and outputs of fused experts from EXCHANGED on, but no longer in MENDED.
EXCHANGED, MENDED = (0, 18, 1), (0, 19, 1)
KEPT_FACTORS = 8  # the number of whole A and B that stay in memory for the next part of a tensor


class Change(NamedTuple):
    """A change of a matrix (out, in), to which scale * B @ A is added.

    Attributes:
        a: Key of A (r, in) in the adapter.
        b: Key of B (out, r) in the adapter.
        scale: Factor of the product.
        exchanged: Whether `a` is the key of B transposed, and `b` the key of A transposed.
        expert: Number of the expert, if A (E * r, in) and B (out, r * E) contain all experts of a
            layer; otherwise 0.
        experts: Number of experts in A and B; 1 for other matrices.
        first: Row of B that belongs to the first row of the tensor.
        transposed: Whether the tensor has the shape (in, out).
    """

    a: str
    b: str
    scale: float
    exchanged: bool = False
    expert: int = 0
    experts: int = 1
    first: int = 0
    transposed: bool = False


class LoraAdapter:
    """An adapter, and the tensors of its base model that it changes.

    Attributes:
        files: The files of the adapter.
    """

    def __init__(self, folder: str, base: Checkpoint, tied: bool) -> None:
        """Reads the headers of the adapter and of its base model.

        Args:
            folder: The adapter: a local folder, a URL or a name on the hub.
            base: The base model. If its head is tied to its embedding and the adapter changes only
                one of the two, a separate head is added to `base.tensors`.
            tied: Whether config.json ties the head of the base model to its embedding.

        Raises:
            InputError: The adapter cannot be merged into this base.
        """
        self.files = Repository(folder, kind=ADAPTER)
        self._base = base
        self._config = read_json(self.files.file(ADAPTER.config))
        for name, allowed in ALLOWED.items():
            setting = self._config.get(name)
            if setting not in allowed:
                raise InputError(
                    f"{self.files.where}: {ADAPTER.config}: {name} {setting!r} is not supported; "
                    "merge it with PEFT"
                )
        for name in BOOLEANS:
            setting = self._config.get(name)
            if type(setting) not in (bool, type(None)):
                raise InputError(
                    f"{self.files.where}: {ADAPTER.config}: {name} is {setting!r}, expected true "
                    "or false"
                )
        self._file = self.files.open_weights(ADAPTER.weights)
        self._shapes = {key: tensor.shape for key, tensor in self._file.tensors.items()}
        for key, tensor in self._file.tensors.items():
            if (kind := DTYPE_NAMES[tensor.dtype]) not in FLOAT_TYPES:
                raise self._error(key, f"is {kind}; only {', '.join(FLOAT_TYPES)} are merged")
        self._factor = lru_cache(KEPT_FACTORS)(self._whole)
        # The following dicts map the name of a tensor in the base model to:
        # The key of the adapter's tensor that replaces the whole tensor.
        self._replaced: dict[str, str] = {}
        # The key of the adapter's tensor that is added to the tensor, and its scale.
        self._biases: dict[str, tuple[str, float]] = {}
        # The key of the norms that the rows of the merged matrix get (DoRA).
        self._magnitudes: dict[str, str] = {}
        # The changes of the matrix.
        self._changes: dict[str, list[Change]] = defaultdict(list)
        modules = self._modules()
        names = {text_name(path.removesuffix(".weight")) for path in modules}
        embedded = "model.embed_tokens" in names and not self._config.get("ensure_weight_tying")
        if tied and (embedded or "lm_head" in names):
            base.tensors.setdefault(HEAD, base.tensors.get("model.embed_tokens.weight", HEAD))
        ours = {path: parts for path, parts in modules.items() if text_name(path) is not None}
        if not ours:
            raise InputError(f"{self._file.where}: has no tensor for the language model")
        if unfit := [key for path, parts in ours.items() for key in self._unfit(path, parts)]:
            count = counted(len(unfit), "key")
            if "lm_head" in names and HEAD not in base.tensors:
                why = f"changes {HEAD}, which {base.where} has not; give a base that has it"
                raise self._error(next(key for key in unfit if "lm_head" in key), why)
            raise self._error(unfit[0], f"fits no tensor of the base model ({count} in all)")
        changed, beside = {*self._replaced, *self._biases, *self._changes}, len(modules) - len(ours)
        text = "%s: merged in float32 into %d tensors (modules beside the language model: %d)"
        log.info(text, self.files.where, len(changed), beside)

    def check_read(self, read: Collection[str]) -> None:
        """Checks that the model reads all tensors that the adapter changes.

        A checkpoint may contain the fused experts and each expert separately, of which only one is
        read.

        Args:
            read: The names of the tensors that the model reads.

        Raises:
            InputError: The adapter changes another tensor.
        """
        parts = self._replaced | self._biases | self._changes
        if unread := sorted(set(parts) - set(read)):
            raise InputError(
                f"{self.files.where}: changes {unread[0]}, which is in the base but is not read"
                + (f" (and {len(unread) - 1} more)" if len(unread) > 1 else "")
            )

    def merge(self, tensor: str, index: Index, stored: Callable[[Index], np.ndarray]) -> np.ndarray:
        """Returns a part of a tensor, merged in float32 if the adapter changes it, else as stored.

        Args:
            tensor: The name of the tensor in the base model.
            index: A (start, stop) slice for each axis.
            stored: A function that returns a part of the tensor in the base model.
        """
        if (key := self._replaced.get(tensor)) is not None:
            stored = partial(self._file.read, key)
        if tensor in self._biases:
            key, scale = self._biases[tensor]
            return stored(index).astype(np.float32) + np.float32(scale) * self._factor(key)[index]
        if tensor not in self._changes:
            return stored(index)
        magnitude = self._magnitudes.get(tensor)
        columns = index[-1]
        if magnitude is not None:  # norms need whole rows
            index = index[0], slice(0, self._shape(tensor)[1])
        merged = stored(index).astype(np.float32)
        for change in self._changes[tensor]:
            self._add(change, merged, index)
        if magnitude is not None:
            scales = self._factor(magnitude)[index[0]] / np.linalg.norm(merged, axis=1)
            merged = (merged * scales[:, None])[:, columns]
        return merged

    def _add(self, change: Change, target: np.ndarray, index: Index) -> None:
        """Adds a change to a part of a tensor.

        Args:
            change: The change. If its expert is not in the part, nothing is added.
            target: The part of the tensor, which is changed.
            index: The slice of each axis of the tensor that is in the part.
        """
        if len(index) == 3:
            if not index[0].start <= change.expert < index[0].stop:
                return
            target = target[change.expert - index[0].start]
        rows, columns = index[-2:]
        if change.transposed:
            rows, columns = columns, rows
            target = target.T
        a, b = self._factor(change.a), self._factor(change.b)
        a = a.reshape(change.experts, -1, a.shape[1])[change.expert]
        b = b.reshape(len(b), -1, change.experts)[:, :, change.expert]
        if change.exchanged:
            a, b = b.T, a.T
        b = b[change.first + rows.start : change.first + rows.stop]
        target += np.float32(change.scale) * (b @ a[:, columns])

    def _whole(self, key: str) -> np.ndarray:
        """Reads a whole tensor of the adapter as float32."""
        index = tuple(slice(0, size) for size in self._shapes[key])
        return self._file.read(key, index).astype(np.float32)

    def _modules(self) -> dict[str, dict[str, str]]:
        """Groups the keys of the file by modules.

        Returns:
            The path of a module -> end of a key -> key. The end follows "lora_", or is "" for a
            whole tensor. If two modules change the two tensors of fused experts, their paths differ
            in "base_layer".
        """
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for key, shape in self._shapes.items():
            if 0 in (shape or (0,)):
                raise self._error(key, f"has shape {shape} (was it saved from a part of ZeRO-3?)")
            name = ADDED.sub("", key.removeprefix("base_model.model."))
            path, _, part = name.partition(".lora_")
            part = part.replace(f"{MAGNITUDE}.weight", MAGNITUDE)
            if part in modules[path]:
                raise self._error(key, f"and {modules[path][part]} are the same")
            modules[path][part] = key
        return modules

    def _unfit(self, path: str, parts: Mapping[str, str]) -> list[str]:
        """Records which tensors of the base a module changes.

        Args:
            path: The path of the module.
            parts: End of a key -> key, as `_modules` returns them.

        Returns:
            The keys that fit no tensor of the base; empty if all fit.

        Raises:
            InputError: A tensor has a wrong shape, or the module is not supported.
        """
        path = path.replace(".base_layer", "")
        name = str(text_name(path))
        weight, bias = f"{name}.weight", f"{name}.bias"
        if parts.keys() == {""} and (shape := self._shape(name)):
            self._check_shape(parts[""], shape)
            self._check_new(parts[""], name, self._replaced)
            self._replaced[name] = parts[""]
            return []
        pair = sorted(parts.keys() - {BIAS, MAGNITUDE})
        if pair not in (LINEAR, EMBEDDED):
            return [*parts.values()]
        if BIAS in parts and not self._shape(bias):
            return [parts[BIAS]]
        a, b = (parts[part] for part in pair)
        if bool(self._config.get("use_dora")) != (MAGNITUDE in parts and pair == LINEAR):
            raise self._error(a, f"is not supported: DoRA has use_dora and a linear {MAGNITUDE}")
        shape, rank = self._shape(weight), self._shapes[a][0]
        if len(shape) != 2:
            changes = self._of_experts(path, name, a, b) if sorted(parts) == LINEAR else []
        else:
            out, into = shape[::-1] if pair == EMBEDDED else shape
            self._check_shape(a, (rank, into))
            self._check_shape(b, (out, rank))
            change = Change(a, b, self._scale(path, a, rank), exchanged=pair == EMBEDDED)
            changes = [(weight, change)]
            if BIAS in parts:
                self._check_shape(parts[BIAS], self._shape(bias))
                self._biases[bias] = parts[BIAS], change.scale
            if MAGNITUDE in parts:
                self._check_shape(parts[MAGNITUDE], shape[:1])
                self._magnitudes[weight] = parts[MAGNITUDE]
        for tensor in dict(changes):
            self._check_new(a, tensor, self._changes)
        for tensor, change in changes:
            self._changes[tensor].append(change)
        return [] if changes else [*parts.values()]

    def _of_experts(self, path: str, name: str, a: str, b: str) -> list[tuple[str, Change]]:
        """Returns the changes by a module for all experts of a layer.

        The shapes of A and B show whether the module changes gate_up_proj or down_proj, and whether
        inputs and outputs are exchanged. The base may have separate experts, or fused tensors,
        which may be transposed.

        Args:
            path: The path of the module.
            name: The name of the module in the base.
            a: The key of A.
            b: The key of B.

        Returns:
            Pairs of the name of a tensor of the base and a change of it; empty if the base has no
            such tensors.
        """
        single, transposed = f"{name}.{{}}.{{}}_proj.weight", False
        if fused := self._shape(f"{name}.down_proj"):
            count, hidden, width = fused
            if transposed := self._shape(f"{name}.gate_up_proj")[1:] == (width, 2 * hidden):
                hidden, width = width, hidden
        elif first := self._shape(single.format(0, "down")):
            hidden, width = first
            pattern = re.compile(re.escape(name) + r"\.\d+\.down_proj\.weight")
            count = sum(pattern.fullmatch(tensor) is not None for tensor in self._base.tensors)
        else:
            return []
        rows = self._shapes[a][0]
        into = self._shapes[a][-1]
        out = self._shapes[b][0]
        which, shape = "gate_up", (2 * width, hidden)
        if {out, into} == {hidden, width}:
            which, shape = "down", (hidden, width)
        exchanged = (out, into) == shape[::-1]
        if out == into:  # the shapes do not show it, but the version of PEFT does
            peft_version = str(self._config.get("peft_version"))
            version = tuple(map(int, re.findall(r"\d+", peft_version)[:3]))
            exchanged = version < MENDED
            if version < EXCHANGED:
                why = "does not tell whether its inputs and outputs are exchanged"
                raise self._error(a, f"is square, and peft_version {peft_version} {why}")
        out, into = shape[::-1] if exchanged else shape
        self._check_shape(a, (rows, into))
        self._check_shape(b, (out, rows))
        scale = self._scale(f"{path}.{which}_proj", a, rows / count)
        change = Change(a, b, scale, exchanged, experts=count, transposed=transposed)
        tensors = [f"{name}.{which}_proj"]
        if not fused:
            tensors = [single.format("{}", part) for part in which.split("_")]
        changes = []
        for expert in range(count):
            for number, tensor in enumerate(tensors):
                change_of_expert = change._replace(expert=expert, first=number * width)
                changes.append((tensor.format(expert), change_of_expert))
        return changes

    def _scale(self, path: str, key: str, rank: float) -> float:
        """Returns the scale of a module's change, which follows from its rank and its alpha.

        Rank and alpha come from the first pattern of rank_pattern and alpha_pattern that matches
        the path of the module, and otherwise from r and lora_alpha.

        Args:
            path: The path of the module.
            key: The key of A, for messages.
            rank: The rank of A.

        Raises:
            InputError: The configuration has another rank, or a number or pattern is unusable.
        """
        where, numbers = f"{self.files.where}: {ADAPTER.config}", []
        for field, patterns_field in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            number: Any = self._config.get(field)
            try:
                for pattern, number_of_pattern in (self._config.get(patterns_field) or {}).items():
                    if re.match(rf"(.*\.)?({pattern})$", path):
                        number = number_of_pattern
                        break
            except (AttributeError, re.error) as error:
                raise InputError(f"{where}: {patterns_field}: {error}") from error
            if type(number) not in (int, float) or not abs(number) < 1e9:
                raise InputError(f"{where}: {field} of {path} is {number!r}, expected a number")
            numbers.append(number)
        stated_rank, alpha = numbers
        if stated_rank != rank:
            raise self._error(key, f"has rank {rank:g}, {ADAPTER.config} says {stated_rank:g}")
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        """Returns the shape of a tensor of the base; () if the base has no such tensor."""
        return self._base.place(tensor)[1].shape if tensor in self._base.tensors else ()

    def _check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        """Raises InputError if a tensor of the adapter has another shape."""
        if (shape := self._shapes[key]) != expected:
            why = f"has shape {shape}, expected {expected}"
            if re.search(r"\b(embed_tokens|lm_head)\b", key):
                why += "; if the vocabulary was resized for training, give the base of that size"
            raise self._error(key, why)

    def _check_new(self, key: str, tensor: str, changed: Collection[str]) -> None:
        """Raises InputError if another key has changed a tensor of the base."""
        if tensor in changed:
            raise self._error(key, f"changes {tensor}, which another key has changed")

    def _error(self, key: str, why: str) -> InputError:
        return InputError(f"{self._file.where}: {key} {why}")
