"""Merges a LoRA adapter (arXiv:2106.09685) of PEFT into its base model while the model is loaded.

From the headers of the adapter and of its base model, `LoraAdapter` determines which tensors the
adapter changes. It rejects settings that need another formula. `LoraAdapter.merge` computes a part
of a changed tensor, W + s B A in float32, which the caller rounds once. PEFT 0.21 is the reference.

Letters: W (out, in) is a matrix of the base model, A (r, in) and B (out, r) are the factors of its
change, r is the rank, s the scale, and E the number of experts of a layer.
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
from activation_extraction.model.tensor_names import name_in_language_model
from activation_extraction.model.weight_files import FLOAT_TYPES, Index

DISABLED: tuple[Any, ...] = (None, False, [], {})  # the values with which a setting is turned off
# Setting in adapter_config.json -> its supported values. With other values, the weights follow from
# another formula, or the base model changes as well.
SUPPORTED_SETTINGS = {
    "peft_type": ("LORA",),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": DISABLED,
    "layer_replication": DISABLED,
    "arrow_config": DISABLED,
    "use_qalora": DISABLED,
    "use_bdlora": DISABLED,
    "kasa_config": DISABLED,
    "velora_config": DISABLED,
    "monteclora_config": DISABLED,
    "trainable_token_indices": DISABLED,
}
BOOLEAN_SETTINGS = ("use_rslora", "use_dora", "ensure_weight_tying")
# Words that PEFT adds to the path of a module in keys: "modules_to_save" if the whole tensor is
# replaced, "default" (the adapter's name) in raw state dicts, and "base_layer" before the tensors
# of a layer that has an adapter.
ADDED_WORDS = re.compile(r"\.(modules_to_save|default)(?=\.|$)|\.base_layer(?=\.(weight|bias)$)")
# The key of a tensor in the adapter is the path of a module, ".lora_" and one of the following
# suffixes, such as "model.layers.0.self_attn.q_proj.lora_A.weight".
LINEAR_SUFFIXES = ["A.weight", "B.weight"]
EMBEDDING_SUFFIXES = ["embedding_A", "embedding_B"]
BIAS, MAGNITUDE = "B.bias", "magnitude_vector"
# For fused experts, the versions of PEFT from SWAPPED_SINCE (inclusive) to SWAPPED_UNTIL
# (exclusive) stored the transpose of B as A, and the transpose of A as B.
SWAPPED_SINCE, SWAPPED_UNTIL = (0, 18, 1), (0, 19, 1)
# The number of the adapter's tensors that stay in memory, because several parts of a tensor of the
# base model need them.
CACHED_FACTORS = 8


class Change(NamedTuple):
    """A change of a matrix W (out, in), to which scale * B @ A is added.

    r is the rank of the change, and E the number of experts of a layer.

    Attributes:
        lora_a_key: Key of A (r, in) in the adapter.
        lora_b_key: Key of B (out, r) in the adapter.
        scale: Factor of the product B @ A.
        has_swapped_factors: Whether the adapter stores the transpose of B under `lora_a_key`, and
            the transpose of A under `lora_b_key`.
        expert_number: Number of the expert that is changed, from 0, if A (E * r, in) and B
            (out, r * E) contain all experts of a layer; otherwise 0.
        expert_count: Number of experts in A and B; 1 for matrices without experts.
        first_row_of_b: Index of the row of B that belongs to row 0 of the tensor of the base model.
            It is not 0 if B contains the rows of several tensors.
        is_transposed: Whether the tensor of the base model has the shape (in, out).
    """

    lora_a_key: str
    lora_b_key: str
    scale: float
    has_swapped_factors: bool = False
    expert_number: int = 0
    expert_count: int = 1
    first_row_of_b: int = 0
    is_transposed: bool = False


class LoraAdapter:
    """A LoRA adapter, which changes tensors of its base model while they are read.

    Attributes:
        repository: The repository of the adapter.
    """

    def __init__(self, folder: str, base: Checkpoint, tied: bool) -> None:
        """Determines from the files' headers which tensors of the base model the adapter changes.

        Args:
            folder: The adapter: a local folder, a URL or a name on the hub.
            base: The base model. If its head is tied to its embedding and the adapter changes only
                one of the two, a separate head is added to `base.tensors`.
            tied: Whether config.json ties the head of the base model to its embedding.

        Raises:
            InputError: If the adapter cannot be merged into this base model.
        """
        self.repository = Repository(folder, kind=ADAPTER)
        self._base_checkpoint = base
        self._settings = read_json(self.repository.file(ADAPTER.config_file_name))
        config_label = f"{self.repository.flag_with_value}: {ADAPTER.config_file_name}"
        for setting_name, supported_values in SUPPORTED_SETTINGS.items():
            setting_value = self._settings.get(setting_name)
            if setting_value not in supported_values:
                raise InputError(
                    f"{config_label}: {setting_name} {setting_value!r} is not supported; merge it "
                    "with PEFT"
                )
        for setting_name in BOOLEAN_SETTINGS:
            setting_value = self._settings.get(setting_name)
            if type(setting_value) not in (bool, type(None)):
                raise InputError(
                    f"{config_label}: {setting_name} is {setting_value!r}, expected true or false"
                )
        self._weights_file = self.repository.open_weights(ADAPTER.weights_file_name)
        self._shape_by_key = {
            tensor_key: header_entry.shape
            for tensor_key, header_entry in self._weights_file.tensors.items()
        }
        for tensor_key, header_entry in self._weights_file.tensors.items():
            dtype_name = DTYPE_NAMES[header_entry.dtype]
            if dtype_name not in FLOAT_TYPES:
                raise self._error(
                    tensor_key, f"is {dtype_name}; only {', '.join(FLOAT_TYPES)} are merged"
                )
        self._read_factor = lru_cache(CACHED_FACTORS)(self._read_whole)
        # Name of a tensor of the base model -> key of the adapter's tensor that replaces it.
        self._tensor_key_by_replaced_tensor_name: dict[str, str] = {}
        # Name of a bias of the base model -> (key of the adapter's tensor that is added to it, the
        # factor of this tensor in the sum).
        self._bias_key_and_scale_by_tensor_name: dict[str, tuple[str, float]] = {}
        # Name of a matrix of the base model -> key of the norms to which its merged rows are scaled
        # (DoRA).
        self._magnitude_key_by_tensor_name: dict[str, str] = {}
        # Name of a matrix of the base model -> the changes that are added to it.
        self._changes_by_tensor_name: dict[str, list[Change]] = defaultdict(list)
        tensor_key_by_suffix_by_module = self._keys_by_module()
        changed_module_names = {
            name_in_language_model(module_path.removesuffix(".weight"))
            for module_path in tensor_key_by_suffix_by_module
        }
        keeps_head_tied = bool(self._settings.get("ensure_weight_tying"))
        adapter_changes_embedding = (
            "model.embed_tokens" in changed_module_names and not keeps_head_tied
        )
        adapter_changes_lm_head = "lm_head" in changed_module_names
        if tied and (adapter_changes_embedding or adapter_changes_lm_head):
            base.tensors.setdefault(HEAD, base.tensors.get("model.embed_tokens.weight", HEAD))
        tensor_key_by_suffix_by_language_module = {
            module_path: tensor_key_by_suffix
            for module_path, tensor_key_by_suffix in tensor_key_by_suffix_by_module.items()
            if name_in_language_model(module_path) is not None
        }
        if not tensor_key_by_suffix_by_language_module:
            raise InputError(f"{self._weights_file.location}: has no tensor for the language model")
        unknown_keys = []
        for module_path, tensor_key_by_suffix in tensor_key_by_suffix_by_language_module.items():
            unknown_keys += self._record_changes(module_path, tensor_key_by_suffix)
        if unknown_keys:
            if adapter_changes_lm_head and HEAD not in base.tensors:
                lm_head_key = next(
                    tensor_key for tensor_key in unknown_keys if "lm_head" in tensor_key
                )
                error_reason = (
                    f"changes {HEAD}, which {base.flag_with_value} has not; give a base that has it"
                )
                raise self._error(lm_head_key, error_reason)
            key_count_phrase = counted(len(unknown_keys), "key")
            error_reason = f"fits no tensor of the base model ({key_count_phrase} in all)"
            raise self._error(unknown_keys[0], error_reason)
        changed_tensor_names = {
            *self._tensor_key_by_replaced_tensor_name,
            *self._bias_key_and_scale_by_tensor_name,
            *self._changes_by_tensor_name,
        }
        log.info(
            "%s: merged in float32 into %d tensors (modules beside the language model: %d)",
            self.repository.flag_with_value,
            len(changed_tensor_names),
            len(tensor_key_by_suffix_by_module) - len(tensor_key_by_suffix_by_language_module),
        )

    def check_read(self, read_tensor_names: Collection[str]) -> None:
        """Checks that the model reads all tensors that the adapter changes.

        A checkpoint may contain the same experts twice, as fused tensors and as separate tensors.
        Then the model reads only one of the two kinds of tensors.

        Args:
            read_tensor_names: The names of the tensors that the model reads.

        Raises:
            InputError: If the adapter changes a tensor that the model does not read.
        """
        changed_tensor_names = {
            *self._tensor_key_by_replaced_tensor_name,
            *self._bias_key_and_scale_by_tensor_name,
            *self._changes_by_tensor_name,
        }
        unread_tensor_names = sorted(changed_tensor_names - set(read_tensor_names))
        if unread_tensor_names:
            more_tensors_note = (
                f" (and {len(unread_tensor_names) - 1} more)"
                if len(unread_tensor_names) > 1
                else ""
            )
            raise InputError(
                f"{self.repository.flag_with_value}: changes {unread_tensor_names[0]}, which is in "
                f"the base but is not read{more_tensors_note}"
            )

    def merge(
        self, tensor_name: str, index: Index, read_base_tensor: Callable[[Index], np.ndarray]
    ) -> np.ndarray:
        """Returns a part of a tensor of the base model with the adapter's changes.

        Args:
            tensor_name: The name of the tensor in the base model.
            index: The part of the tensor, as a slice with a start and a stop for each axis.
            read_base_tensor: A function that maps such an index to the values of this part of the
                tensor in the base model.

        Returns:
            The values of the part. If the adapter adds a change to the tensor, they are float32. If
            it replaces the whole tensor, they have the dtype in the adapter's file. Otherwise they
            are the result of `read_base_tensor`.
        """
        read_base_tensor_or_replacement = read_base_tensor
        if tensor_name in self._tensor_key_by_replaced_tensor_name:
            read_base_tensor_or_replacement = partial(
                self._weights_file.read, self._tensor_key_by_replaced_tensor_name[tensor_name]
            )
        if tensor_name in self._bias_key_and_scale_by_tensor_name:
            bias_key, bias_scale = self._bias_key_and_scale_by_tensor_name[tensor_name]
            return (
                read_base_tensor_or_replacement(index).astype(np.float32)
                + np.float32(bias_scale) * self._read_factor(bias_key)[index]
            )
        if tensor_name not in self._changes_by_tensor_name:
            return read_base_tensor_or_replacement(index)
        magnitude_key = self._magnitude_key_by_tensor_name.get(tensor_name)
        slices_of_axes = index
        if magnitude_key is not None:  # whole rows are read, because their norms are needed
            slices_of_axes = index[0], slice(0, self._shape(tensor_name)[1])
        merged_weights = read_base_tensor_or_replacement(slices_of_axes).astype(np.float32)
        for tensor_change in self._changes_by_tensor_name[tensor_name]:
            self._add(tensor_change, merged_weights, slices_of_axes)
        if magnitude_key is None:
            return merged_weights
        row_slice, column_slice = index
        row_norms = np.linalg.norm(merged_weights, axis=1)
        row_scales = self._read_factor(magnitude_key)[row_slice] / row_norms
        return (merged_weights * row_scales[:, None])[:, column_slice]

    def _add(self, change: Change, tensor_part: np.ndarray, index: Index) -> None:
        """Adds a change to a part of a tensor of the base model.

        Args:
            change: The change (see `Change`). If it belongs to an expert that the part does not
                contain, nothing is added.
            tensor_part: The values of the part, float32, which are changed in place.
            index: The slice of the part on each axis of the tensor.
        """
        if len(index) == 3:
            if not index[0].start <= change.expert_number < index[0].stop:
                return
            tensor_part = tensor_part[change.expert_number - index[0].start]
        row_slice, column_slice = index[-2:]
        if change.is_transposed:
            row_slice, column_slice = column_slice, row_slice
            tensor_part = tensor_part.T
        a = self._read_factor(change.lora_a_key)
        b = self._read_factor(change.lora_b_key)
        a = a.reshape(change.expert_count, -1, a.shape[1])[change.expert_number]
        b = b.reshape(len(b), -1, change.expert_count)[:, :, change.expert_number]
        if change.has_swapped_factors:
            a, b = b.T, a.T
        b = b[change.first_row_of_b + row_slice.start : change.first_row_of_b + row_slice.stop]
        tensor_part += np.float32(change.scale) * (b @ a[:, column_slice])

    def _read_whole(self, key: str) -> np.ndarray:
        """Reads a whole tensor of the adapter.

        Args:
            key: The key of the tensor.

        Returns:
            The values, float32.
        """
        whole_tensor_index = tuple(slice(0, axis_size) for axis_size in self._shape_by_key[key])
        return self._weights_file.read(key, whole_tensor_index).astype(np.float32)

    def _keys_by_module(self) -> dict[str, dict[str, str]]:
        """Groups the keys of the adapter's tensors by module.

        A key is the name of a tensor in the adapter. It usually consists of the path of a module,
        ".lora_" and a suffix, such as "A.weight". A module with fused experts contains two fused
        tensors. If the adapter changes both, the keys for one of them contain the path of the
        module, and the keys for the other contain this path followed by ".base_layer". These two
        sets of keys are separate groups.

        A key without ".lora_" belongs to a tensor that replaces a whole tensor of the base model.
        Such a key is a group of its own, with the name of the replaced tensor in place of the path,
        and with the suffix "".

        Returns:
            A dict with the keys of each group, as a dict: suffix -> key. A group is named by the
            path in its keys, or by the name of the replaced tensor.

        Raises:
            InputError: If a tensor is empty or a scalar, or two keys stand for the same tensor of a
                module.
        """
        tensor_key_by_suffix_by_module: dict[str, dict[str, str]] = defaultdict(dict)
        for tensor_key, tensor_shape in self._shape_by_key.items():
            if 0 in (tensor_shape or (0,)):
                raise self._error(
                    tensor_key, f"has shape {tensor_shape} (was it saved from a part of ZeRO-3?)"
                )
            shortened_key = ADDED_WORDS.sub("", tensor_key.removeprefix("base_model.model."))
            module_path, _, key_suffix = shortened_key.partition(".lora_")
            key_suffix = key_suffix.replace(f"{MAGNITUDE}.weight", MAGNITUDE)
            if key_suffix in tensor_key_by_suffix_by_module[module_path]:
                raise self._error(
                    tensor_key,
                    f"and {tensor_key_by_suffix_by_module[module_path][key_suffix]} are the same",
                )
            tensor_key_by_suffix_by_module[module_path][key_suffix] = tensor_key
        return tensor_key_by_suffix_by_module

    def _record_changes(
        self, module_path: str, tensor_key_by_suffix: Mapping[str, str]
    ) -> list[str]:
        """Records the changes that a module of the adapter makes to tensors of the base model.

        The changes are stored in attributes of this object, from which `merge` reads them. A tensor
        of the adapter is stored under a key, which contains the path of its module, ".lora_" and
        a suffix such as "A.weight". A tensor that replaces a whole tensor of the base model has a
        key without ".lora_".

        Args:
            module_path: The path of the module. For a key without ".lora_", the name of the tensor
                that is replaced.
            tensor_key_by_suffix: The keys of the module's tensors, as a dict: suffix -> key. The
                suffix of a key without ".lora_" is "".

        Returns:
            The keys of the module's tensors that change no tensor of the base model. Empty if there
            are no such keys.

        Raises:
            InputError: If a tensor has a wrong shape, if the module is not supported, or if another
                module changes the same tensor of the base model.
        """
        module_path = module_path.replace(".base_layer", "")
        module_name = str(name_in_language_model(module_path))
        shape_in_base_model = self._shape(module_name)
        if tensor_key_by_suffix.keys() == {""} and shape_in_base_model:
            self._check_shape(tensor_key_by_suffix[""], shape_in_base_model)
            self._check_new(
                tensor_key_by_suffix[""], module_name, self._tensor_key_by_replaced_tensor_name
            )
            self._tensor_key_by_replaced_tensor_name[module_name] = tensor_key_by_suffix[""]
            return []
        key_suffixes = sorted(tensor_key_by_suffix.keys() - {BIAS, MAGNITUDE})
        if key_suffixes not in (LINEAR_SUFFIXES, EMBEDDING_SUFFIXES):
            return [*tensor_key_by_suffix.values()]
        is_embedding_module = key_suffixes == EMBEDDING_SUFFIXES
        weight_name = f"{module_name}.weight"
        bias_name = f"{module_name}.bias"
        if BIAS in tensor_key_by_suffix and not self._shape(bias_name):
            return [tensor_key_by_suffix[BIAS]]
        lora_a_key = tensor_key_by_suffix[key_suffixes[0]]
        lora_b_key = tensor_key_by_suffix[key_suffixes[1]]
        has_magnitude_of_linear_module = (
            MAGNITUDE in tensor_key_by_suffix and not is_embedding_module
        )
        if bool(self._settings.get("use_dora")) != has_magnitude_of_linear_module:
            raise self._error(
                lora_a_key, f"is not supported: DoRA has use_dora and a linear {MAGNITUDE}"
            )
        weight_shape = self._shape(weight_name)
        rank = self._shape_by_key[lora_a_key][0]
        tensor_names_and_changes: list[tuple[str, Change]] = []
        if len(weight_shape) == 2:
            output_size, input_size = weight_shape[::-1] if is_embedding_module else weight_shape
            self._check_shape(lora_a_key, (rank, input_size))
            self._check_shape(lora_b_key, (output_size, rank))
            matrix_change = Change(
                lora_a_key,
                lora_b_key,
                self._scale(module_path, lora_a_key, rank),
                has_swapped_factors=is_embedding_module,
            )
            tensor_names_and_changes = [(weight_name, matrix_change)]
            if BIAS in tensor_key_by_suffix:
                self._check_shape(tensor_key_by_suffix[BIAS], self._shape(bias_name))
                self._bias_key_and_scale_by_tensor_name[bias_name] = (
                    tensor_key_by_suffix[BIAS],
                    matrix_change.scale,
                )
            if MAGNITUDE in tensor_key_by_suffix:
                self._check_shape(tensor_key_by_suffix[MAGNITUDE], weight_shape[:1])
                self._magnitude_key_by_tensor_name[weight_name] = tensor_key_by_suffix[MAGNITUDE]
        elif sorted(tensor_key_by_suffix) == LINEAR_SUFFIXES:
            tensor_names_and_changes = self._expert_changes(
                module_path, module_name, lora_a_key, lora_b_key
            )
        for tensor_name in dict(tensor_names_and_changes):
            self._check_new(lora_a_key, tensor_name, self._changes_by_tensor_name)
        for tensor_name, matrix_change in tensor_names_and_changes:
            self._changes_by_tensor_name[tensor_name].append(matrix_change)
        return [] if tensor_names_and_changes else [*tensor_key_by_suffix.values()]

    def _expert_changes(
        self, module_path: str, name: str, lora_a_key: str, lora_b_key: str
    ) -> list[tuple[str, Change]]:
        """Returns the changes that a module of the adapter makes to all experts of a layer.

        A and B are the factors of the change, with the shapes (E * r, in) and (out, r * E) for E
        experts and the rank r. Their shapes show whether the module changes gate_up_proj or
        down_proj. Some versions of PEFT swap the factors: they store the transpose of B as A, and
        the transpose of A as B. The shapes show this too, unless `in` equals `out`; then the
        version of PEFT in the adapter's configuration decides. The base model may have separate
        tensors for each expert, or fused tensors, which may be transposed.

        Args:
            module_path: The path of the module in the adapter.
            name: The name of the module in the base model.
            lora_a_key: The key of the factor A in the adapter.
            lora_b_key: The key of the factor B in the adapter.

        Returns:
            Pairs of the name of a tensor in the base model and the change of this tensor. The list
            is empty if the base model has no tensors of experts.

        Raises:
            InputError: If A or B has a wrong shape or rank, or it is unclear whether the factors
                are swapped.
        """
        expert_tensor_name_template = f"{name}.{{expert}}.{{projection}}_proj.weight"
        is_transposed = False
        fused_down_shape = self._shape(f"{name}.down_proj")
        down_shape_of_first_expert = self._shape(
            expert_tensor_name_template.format(expert=0, projection="down")
        )
        if fused_down_shape:
            expert_count, down_row_count, down_column_count = fused_down_shape
            gate_up_shape_if_transposed = down_column_count, 2 * down_row_count
            is_transposed = self._shape(f"{name}.gate_up_proj")[1:] == gate_up_shape_if_transposed
            hidden_size, expert_width = down_row_count, down_column_count
            if is_transposed:
                hidden_size, expert_width = down_column_count, down_row_count
        elif down_shape_of_first_expert:
            hidden_size, expert_width = down_shape_of_first_expert
            down_name_pattern = re.compile(re.escape(name) + r"\.\d+\.down_proj\.weight")
            expert_count = sum(
                down_name_pattern.fullmatch(tensor_name) is not None
                for tensor_name in self._base_checkpoint.tensors
            )
        else:
            return []
        # A has the rows of all experts. Their number is the rank of one expert times the number of
        # experts.
        total_rank_of_experts = self._shape_by_key[lora_a_key][0]
        input_size = self._shape_by_key[lora_a_key][-1]
        output_size = self._shape_by_key[lora_b_key][0]
        matrix_name = "gate_up"
        matrix_shape = (2 * expert_width, hidden_size)
        if {output_size, input_size} == {hidden_size, expert_width}:
            matrix_name = "down"
            matrix_shape = (hidden_size, expert_width)
        has_swapped_factors = (output_size, input_size) == matrix_shape[::-1]
        # If a matrix has as many inputs as outputs, A and B have the same shapes whether or not the
        # adapter stores the transpose of B as A and the transpose of A as B. Then the version of
        # PEFT that wrote the adapter decides: versions from SWAPPED_SINCE to SWAPPED_UNTIL
        # (exclusive) stored the transposes, and later versions do not. Nothing is assumed about
        # earlier versions, so an adapter of an earlier or unknown version is rejected.
        if output_size == input_size:
            peft_version = str(self._settings.get("peft_version"))
            peft_version_numbers = tuple(map(int, re.findall(r"\d+", peft_version)[:3]))
            has_swapped_factors = peft_version_numbers < SWAPPED_UNTIL
            if peft_version_numbers < SWAPPED_SINCE:
                error_reason = "does not tell whether its inputs and outputs are exchanged"
                raise self._error(
                    lora_a_key, f"is square, and peft_version {peft_version} {error_reason}"
                )
        expected_output_size, expected_input_size = (
            matrix_shape[::-1] if has_swapped_factors else matrix_shape
        )
        self._check_shape(lora_a_key, (total_rank_of_experts, expected_input_size))
        self._check_shape(lora_b_key, (expected_output_size, total_rank_of_experts))
        scale_of_change = self._scale(
            f"{module_path}.{matrix_name}_proj", lora_a_key, total_rank_of_experts / expert_count
        )
        change_of_all_experts = Change(
            lora_a_key,
            lora_b_key,
            scale_of_change,
            has_swapped_factors,
            expert_count=expert_count,
            is_transposed=is_transposed,
        )
        tensor_names_and_changes = []
        for expert_number in range(expert_count):
            tensor_names = [f"{name}.{matrix_name}_proj"]
            # If the base model stores each expert in tensors of its own (not fused), an expert has
            # one tensor for its gate projection and one for its up projection.
            if not fused_down_shape:
                tensor_names = [
                    expert_tensor_name_template.format(expert=expert_number, projection=projection)
                    for projection in matrix_name.split("_")
                ]
            for projection_number, tensor_name in enumerate(tensor_names):
                expert_change = change_of_all_experts._replace(
                    expert_number=expert_number, first_row_of_b=projection_number * expert_width
                )
                tensor_names_and_changes.append((tensor_name, expert_change))
        return tensor_names_and_changes

    def _scale(self, module_path: str, key: str, rank: float) -> float:
        """Returns the scale by which the product B A of a module is multiplied.

        The scaled product is added to a matrix of the base model. The scale is alpha / rank, or
        alpha / sqrt(rank) if the setting use_rslora is on. The configuration of the adapter
        contains alpha.

        Args:
            module_path: The path of the module in the adapter.
            key: The key of A in the adapter, for messages.
            rank: The rank of the product B A, which the shape of A shows. For fused experts, A
                contains the rows of all experts, and this is the rank of each expert's product. It
                is a fraction if the rows cannot be divided evenly among the experts.

        Raises:
            InputError: If the configuration states another rank, if its rank or alpha is no number
                or too large, or if rank_pattern or alpha_pattern is no dict or contains an invalid
                regular expression.
        """
        configured_rank = self._module_setting("r", "rank_pattern", module_path)
        configured_alpha = self._module_setting("lora_alpha", "alpha_pattern", module_path)
        if configured_rank != rank:
            raise self._error(
                key, f"has rank {rank:g}, {ADAPTER.config_file_name} says {configured_rank:g}"
            )
        return configured_alpha / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)

    def _module_setting(self, name: str, patterns_name: str, module_path: str) -> float:
        """Returns the value of a numeric setting for a module.

        Args:
            name: The name of the setting in the configuration, such as "r". Its value applies if no
                pattern matches the module.
            patterns_name: The name of another setting, such as "rank_pattern". It is a dict:
                regular expression -> number. The number of the first expression that matches the
                path of the module applies.
            module_path: The path of the module.

        Raises:
            InputError: If the value is no number or too large, or if the second setting is no dict
                or contains an invalid regular expression.
        """
        config_label = f"{self.repository.flag_with_value}: {ADAPTER.config_file_name}"
        setting_value: Any = self._settings.get(name)
        try:
            for path_pattern, setting_for_pattern in (
                self._settings.get(patterns_name) or {}
            ).items():
                if re.match(rf"(.*\.)?({path_pattern})$", module_path):
                    setting_value = setting_for_pattern
                    break
        except (AttributeError, re.error) as error:
            raise InputError(f"{config_label}: {patterns_name}: {error}") from error
        if type(setting_value) not in (int, float) or not abs(setting_value) < 1e9:
            raise InputError(
                f"{config_label}: {name} of {module_path} is {setting_value!r}, expected a number"
            )
        return setting_value

    def _shape(self, tensor_name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor of the base model; () if there is no such tensor.

        Args:
            tensor_name: The name of the tensor in the base model.
        """
        return (
            self._base_checkpoint.locate(tensor_name)[1].shape
            if tensor_name in self._base_checkpoint.tensors
            else ()
        )

    def _check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        """Checks the shape of a tensor of the adapter.

        Args:
            key: The key of the tensor.
            expected: The shape that the tensor must have.

        Raises:
            InputError: If the tensor has another shape.
        """
        tensor_shape = self._shape_by_key[key]
        if tensor_shape != expected:
            error_reason = f"has shape {tensor_shape}, expected {expected}"
            if re.search(r"\b(embed_tokens|lm_head)\b", key):
                error_reason += (
                    "; if the vocabulary was resized for training, give the base of that size"
                )
            raise self._error(key, error_reason)

    def _check_new(self, key: str, tensor_name: str, changed_tensor_names: Collection[str]) -> None:
        """Checks that a tensor of the base model is not changed by two keys of the adapter.

        Args:
            key: A key of the adapter, which changes the tensor.
            tensor_name: The name of the tensor in the base model.
            changed_tensor_names: The names of the tensors that other keys of the adapter change.

        Raises:
            InputError: If another key changes the tensor.
        """
        if tensor_name in changed_tensor_names:
            raise self._error(key, f"changes {tensor_name}, which another key has changed")

    def _error(self, key: str, reason: str) -> InputError:
        return InputError(f"{self._weights_file.location}: {key} {reason}")
