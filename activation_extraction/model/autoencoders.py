"""Reads published sparse autoencoders and transcoders, in the file formats of their publishers.

`FORMATS` lists the formats. Each has a function that converts the tensors and the configuration of
a publisher to the fields of an `Autoencoder`. One formula covers the autoencoders of all formats.
The docstring of `Autoencoder` contains it, and encode.py computes it. The shape of a matrix tells
which of its axes holds the features.
Unknown files, tensors and settings raise an InputError that names them.

Letters: D is the width of the hook that is read, O the width of the hook that is reconstructed, and
F the number of features.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import yaml

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.model.repository_files import AUTOENCODER
from activation_extraction.model.torch_file import read_torch_file
from activation_extraction.model.weight_files import LocalFile

# In most formats, tensors have the names of the fields of `Autoencoder`.
TensorByName = dict[str, np.ndarray]  # name of a tensor -> its values
PublishedConfig = Mapping[str, Any]  # the content of a publisher's configuration file
ValueByFieldName = dict[str, Any]  # name of a field of `Autoencoder` -> its value
REQUIRED_TENSORS = "W_enc", "b_enc", "W_dec", "b_dec"
# The name of Llamascopium's tensor with the logarithms of the thresholds.
LOG_THRESHOLD = "log_jumprelu_threshold"
# Llamascopium stores the average norm of the activations at a hook in a tensor whose name is this
# prefix and the name of the hook.
AVERAGE_NORM_PREFIX = "dataset_average_activation_norm."
# SAELens stores these files beside the weights if the normalisation of activations is not folded
# into them.
SCALER_FILE, WHITENING_FILE = "activation_scaler.json", "activation_whitening.safetensors"
# The number of values that `_check_finite` converts to float32 at a time, to save memory.
VALUES_AT_ONCE = 2**22
# A publisher's name of a tensor -> the field of `Autoencoder`. SAELens and Qwen-Scope use the names
# of the fields.
FIELD_OF_TENSOR = {
    # Names of tensors in files of sparsify -> fields of `Autoencoder`.
    "encoder.weight": "W_enc",
    "encoder.bias": "b_enc",
    # Names of tensors in files of Llamascopium -> fields of `Autoencoder`.
    "W_E": "W_enc",
    "b_E": "b_enc",
    "W_D": "W_dec",
    "b_D": "b_dec",
    "activation_function.threshold": "threshold",
    f"activation_function.{LOG_THRESHOLD}": LOG_THRESHOLD,
}


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A published sparse autoencoder or transcoder, with its weights on the host.

    A sparse autoencoder reconstructs the values at the hook that it reads. A transcoder
    reconstructs the values at another hook, such as the output of the MLP whose input it reads.

    Letters: D is the width of the hook that is read, O the width of the hook that is reconstructed,
    and F the number of features. `input` is the vector (D,) of a token at the hook that is read,
    and x is `input` after `normalisation`, minus b_dec if `subtracts_b_dec`:

        pre      = x @ W_enc.T + b_enc                      (F,)
        score    = pre * feature_score_factors              (F,)
        active   = score > threshold, and pre > 0 if `uses_relu`
        values   = pre where active (and score is among the k largest, if k is not None); else 0
        output   = values @ W_dec + b_dec                   (O,)
        result   = output + input @ W_skip.T                (O,)

    If the hook that is reconstructed is the hook that is read, the normalisation is undone in
    `output` before `result` is computed. A transcoder does not undo it.

    Attributes:
        name: The autoencoder as the user gave it: a folder or a file, as a local path, a URL, or
            ORG/REPO/FOLDER on the hub.
        hook_name: The name of the hook that is read, in TransformerLens or in Hugging Face.
        target_hook_name: The name of the hook that is reconstructed. It equals `hook_name` for all
            but transcoders.
        hook_name_in_files: The name of the hook that is read, according to the files; None or ""
            if the files do not name it.
        W_enc: Encoder weights, (F, D).
        b_enc: Encoder bias, (F,).
        W_dec: Decoder weights, (F, O).
        b_dec: Decoder bias, (O,).
        file_paths: The local paths of the files that were read.
        repository: The repository of the files. Temporary copies of the files are deleted when this
            object is deleted.
        dtype: The dtype of matrix products, float32 or bfloat16.
        k: The largest number of active features of a token; None if it is not limited.
        uses_relu: Whether only features with a positive `pre` are active.
        threshold: The threshold of each feature, (F,); None for no threshold.
        feature_score_factors: The factor of each feature by which `pre` is multiplied to compute
            `score`, which decides with the threshold and k whether the feature is active, (F,);
            None if all factors are 1.
        W_skip: Weights of the skip connection from the input to the result, (O, D); None if there
            is none.
        subtracts_b_dec: Whether b_dec is subtracted from the input. Never for transcoders, whose
            b_dec belongs to another hook than the input.
        normalisation: The normalisation of the input: "none", "constant_norm_rescale" (to a norm of
            sqrt(D)), or "layer_norm" (as in SAELens).
    """

    name: str
    hook_name: str
    target_hook_name: str
    hook_name_in_files: str | None
    W_enc: np.ndarray
    b_enc: np.ndarray
    W_dec: np.ndarray
    b_dec: np.ndarray
    file_paths: tuple[Path, ...]
    repository: Repository
    dtype: np.dtype
    k: int | None = None
    uses_relu: bool = True
    threshold: np.ndarray | None = None
    feature_score_factors: np.ndarray | None = None
    W_skip: np.ndarray | None = None
    subtracts_b_dec: bool = False
    normalisation: str = "none"

    @property
    def features(self) -> int:
        """The number of features."""
        return len(self.b_enc)

    @property
    def arrays(self) -> TensorByName:
        """Name of a field of this autoencoder -> its array, for the fields that are arrays."""
        return {
            field_name: field_value
            for field_name, field_value in vars(self).items()
            if isinstance(field_value, np.ndarray)
        }

    def __reduce__(self) -> Any:  # a process that unpickles an autoencoder reads its files again
        return read_autoencoder, (self.hook_name, self.name)


@dataclass(frozen=True)
class AutoencoderFiles:
    """The files of one autoencoder in a repository.

    Attributes:
        autoencoder_name: The autoencoder as the user gave it to --encode: a folder or a file, as a
            local path, a URL, or ORG/REPO/FOLDER on the hub.
        repository: The repository that contains the files.
        folder_in_repository: The folder of the files in the repository, with a slash at the end; ""
            for the repository's top folder.
        layer_number_text: The number of the autoencoder's layer, as digits; "" if it is unknown. If
        the
            folder contains a file for each layer, this number chooses the file.
        paths_read: The local paths of the files that were read so far.
    """

    autoencoder_name: str
    repository: Repository
    folder_in_repository: str
    layer_number_text: str
    paths_read: list[Path] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path or URL of the autoencoder's folder, with a slash at the end."""
        return f"{self.repository.path}/{self.folder_in_repository}"

    def error(self, reason: str) -> InputError:
        return InputError(f"--encode {self.autoencoder_name}: {reason}")

    def has(self, file_name: str) -> bool:
        return self.repository.find(self.folder_in_repository + file_name) is not None

    def local_path(self, file_name: str) -> Path:
        """Returns the local path of a file, and adds the path to `paths_read`.

        Args:
            file_name: The name of the file in the folder. The file is downloaded if necessary.
        """
        local_path = self.repository.file(self.folder_in_repository + file_name)
        self.paths_read.append(local_path)
        return local_path

    def tensors(self, file_name: str) -> TensorByName:
        """Returns the tensors of a file, which is mapped into memory and not read as a whole.

        Args:
            file_name: The name of a .safetensors or .pt file in the folder.

        Returns:
            Name of a tensor -> its values. Publishers' names of tensors (the keys of
            `FIELD_OF_TENSOR`) are replaced by the names of the fields of `Autoencoder`.
        """
        local_path = self.local_path(file_name)
        if file_name.endswith(".pt"):
            torch_object = read_torch_file(local_path, f"--encode {self.autoencoder_name}")
            tensor_by_name = torch_object.get("sae", torch_object)
        else:
            opened_file = LocalFile(local_path)
            tensor_by_name = {
                tensor_name: opened_file.read(tensor_name, ())
                for tensor_name in opened_file.tensors
            }
        return {
            FIELD_OF_TENSOR.get(tensor_name, tensor_name): tensor_values
            for tensor_name, tensor_values in tensor_by_name.items()
        }

    def supported_setting(self, config: PublishedConfig, key: str, *supported_values: str) -> str:
        """Returns a setting of a configuration after checking that it is supported.

        Args:
            config: The configuration.
            key: The key of the setting.
            supported_values: The supported values. The first one is returned if the configuration
                does not contain the key.

        Raises:
            InputError: If the setting has a value that is not supported.
        """
        setting_value = config.get(key, supported_values[0])
        if setting_value not in supported_values:
            raise self.error(
                f"{key} is {setting_value!r}, expected {' or '.join(supported_values)}"
            )
        return setting_value


def read_autoencoder(hook_name: str, name: str) -> Autoencoder:
    """Reads a published autoencoder, in the first of `FORMATS` whose files exist.

    Args:
        hook_name: The name of the hook to encode; "" for the hook that the files name. If the
            folder contains a file for each layer, the layer in this name chooses the file.
        name: A folder or a file: a local path, a URL, or ORG/REPO/FOLDER on the hub.

    Raises:
        InputError: If a file is missing, damaged or in an unknown format, a weight is NaN or
            infinite, or neither `hook_name` nor the files name a hook.
    """
    autoencoder_path = name.rstrip("/")
    if autoencoder_path.endswith((".pt", ".safetensors")):
        autoencoder_folder, weights_file_name = os.path.split(autoencoder_path)
    else:
        autoencoder_folder, weights_file_name = autoencoder_path, ""
    local_folder = os.path.abspath(os.path.expanduser(autoencoder_folder))
    hub_match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)/(.+)", autoencoder_folder)
    if os.path.exists(local_folder):
        repository = Repository(local_folder, kind=AUTOENCODER)
        folder_in_repository = ""
    elif hub_match:
        repository = Repository(hub_match[1], kind=AUTOENCODER)
        folder_in_repository = f"{hub_match[2]}/"
    else:
        repository = Repository(autoencoder_folder, kind=AUTOENCODER)
        folder_in_repository = ""
    layer_number_text = re.sub(r"\D", "", weights_file_name) or layer_in_name(hook_name)
    autoencoder_files = AutoencoderFiles(name, repository, folder_in_repository, layer_number_text)
    try:
        value_by_field_name = _read_fields(autoencoder_files, weights_file_name)
        _check_shapes(autoencoder_files, value_by_field_name)
        _check_finite(autoencoder_files, value_by_field_name)
    except (LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        error_text = f"{type(error).__name__}: {one_line(error):.200}"
        raise autoencoder_files.error(f"cannot be read: {error_text}") from error
    hook_name_in_files = value_by_field_name["hook_name"]
    if not hook_name and not hook_name_in_files:
        raise autoencoder_files.error(f"does not name its hook; give --encode HOOK={name}")
    if hook_name:
        value_by_field_name["hook_name"] = hook_name
        if value_by_field_name["target_hook_name"] == hook_name_in_files:
            value_by_field_name["target_hook_name"] = hook_name
    are_weights_bfloat16 = str(
        value_by_field_name.get("dtype", value_by_field_name["W_enc"].dtype)
    ).endswith("bfloat16")
    value_by_field_name["dtype"] = np.dtype(
        ml_dtypes.bfloat16 if are_weights_bfloat16 else np.float32
    )
    return Autoencoder(
        **value_by_field_name,
        name=name,
        hook_name_in_files=hook_name_in_files,
        file_paths=tuple(autoencoder_files.paths_read),
        repository=autoencoder_files.repository,
    )


def layer_in_name(hook_name: str) -> str:
    """Returns the layer in the name of a hook, as digits; "" if the name contains no layer.

    Args:
        hook_name: The name, such as "blocks.3.hook_resid_post".
    """
    layer_match = re.search(r"\.(\d+)\.", f".{hook_name}.")
    return layer_match[1] if layer_match else ""


def _read_fields(files: AutoencoderFiles, weights_file_name: str) -> ValueByFieldName:
    """Reads the fields of an Autoencoder, in the first of `FORMATS` whose files exist.

    Args:
        files: The files of the autoencoder.
        weights_file_name: The name of the file that the user gave; "" if the user gave a folder.

    Returns:
        Name of a field of `Autoencoder` -> value.

    Raises:
        InputError: If there is no format whose files all exist. The message lists the files of all
            formats.
    """
    descriptions_of_expected_files: list[str] = []
    for file_format in FORMATS:
        weights_file_pattern = file_format.weights_file_pattern
        config_file_name = file_format.config_file_name
        expected_file_name = weights_file_pattern.format(files.layer_number_text)
        file_name_in_message = weights_file_pattern.format(files.layer_number_text or "N")
        descriptions_of_expected_files.append(
            f"{file_name_in_message} with {config_file_name}"
            if config_file_name
            else file_name_in_message
        )
        if weights_file_name not in ("", expected_file_name):
            continue
        has_layer_in_file_name = expected_file_name != weights_file_pattern
        if (has_layer_in_file_name and not files.layer_number_text) or not files.has(
            expected_file_name
        ):
            continue
        if config_file_name is None:
            return file_format.convert_to_fields(files, {}, files.tensors(expected_file_name))
        if files.has(config_file_name):
            config = read_json(files.local_path(config_file_name))
            return file_format.convert_to_fields(files, config, files.tensors(expected_file_name))
    if files.has("ae.pt"):
        raise files.error("is an autoencoder of dictionary_learning, whose format is not supported")
    layer_remark = (
        ""
        if files.layer_number_text
        else f"; N is the layer of HOOK in --encode HOOK={files.autoencoder_name}"
    )
    raise files.error(
        f"has no {weights_file_name or 'files'} of a supported format; looked for "
        f"{', '.join(dict.fromkeys(descriptions_of_expected_files))}{layer_remark}"
    )


def qwen_scope(
    files: AutoencoderFiles, _: PublishedConfig, tensor_by_name: TensorByName
) -> ValueByFieldName:
    """Converts an autoencoder of Qwen-Scope to the formula of `Autoencoder`.

    By the README of Qwen-Scope, the features with the k largest values of `pre` (see `Autoencoder`)
    are active, even if these values are negative. k is read from the name of the repository,
    because the files do not contain it.

    Args:
        files: The files of the autoencoder.
        _: The configuration, which is empty in this format.
        tensor_by_name: Name of a tensor of the weights file -> its values.

    Returns:
        Name of a field of `Autoencoder` -> value.
    """
    l0_match = re.search(r"-L0_(\d+)/", files.path)
    if l0_match is None:
        raise files.error(
            "the folder must be named as Qwen-Scope's repository, which ends in -L0_K: nothing "
            "else says how many features a token has"
        )
    hook_name = f"blocks.{files.layer_number_text}.hook_resid_post"
    return {
        **tensor_by_name,
        "hook_name": hook_name,
        "target_hook_name": hook_name,
        "k": int(l0_match[1]),
        "uses_relu": False,
    }


def sae_lens(
    files: AutoencoderFiles, config: PublishedConfig, tensor_by_name: TensorByName
) -> ValueByFieldName:
    """Converts an autoencoder or transcoder of SAELens 6 to the formula of `Autoencoder`.

    SAELens has its formulas in sae_lens/saes. Two of its settings are folded into the weights, in
    this order:

    - rescale_acts_by_decoder_norm scales each feature by the norm of its decoder row.
    - normalize_activations scales or maps the activations before they are encoded.

    The stored decoder reconstructs normalised activations, and SAELens computes the norms from this
    decoder. Folding normalize_activations changes the decoder, so the norms are folded first.

    Args:
        files: The files of the autoencoder.
        config: The content of cfg.json.
        tensor_by_name: Name of a tensor of the weights file -> its values.

    Returns:
        Name of a field of `Autoencoder` -> value.
    """
    sae_metadata = config.get("metadata") or {}
    if not re.match(r"[6-9]|[1-9]\d", str(sae_metadata.get("sae_lens_version"))):
        raise files.error(
            "cfg.json has no metadata.sae_lens_version of 6 or later; load it with SAELens 6 and "
            "save it again"
        )
    autoencoder_architectures = "standard", "topk", "jumprelu"
    transcoder_architectures = (
        "transcoder",
        "skip_transcoder",
        "jumprelu_transcoder",
        "jumprelu_skip_transcoder",
    )
    architecture = files.supported_setting(
        config, "architecture", *autoencoder_architectures, *transcoder_architectures
    )
    is_transcoder = architecture in transcoder_architectures
    foldable_normalisations = "expected_average_only_in", "covariance_whitening"
    supported_normalisations = (
        "none",
        "constant_norm_rescale",
        "layer_norm",
        *foldable_normalisations,
    )
    normalisation = files.supported_setting(
        config, "normalize_activations", *supported_normalisations
    )
    subtracts_b_dec = not is_transcoder and config.get("apply_b_dec_to_input", True)
    if config.get("rescale_acts_by_decoder_norm"):
        decoder_norms_of_features = np.linalg.norm(
            tensor_by_name["W_dec"].astype(np.float32), axis=1
        )
        tensor_by_name["W_enc"] = tensor_by_name["W_enc"] * decoder_norms_of_features
        tensor_by_name["b_enc"] = tensor_by_name["b_enc"] * decoder_norms_of_features
        tensor_by_name["W_dec"] = tensor_by_name["W_dec"] / decoder_norms_of_features[:, None]
    if normalisation in foldable_normalisations:
        if is_transcoder:
            raise files.error(
                f"is a transcoder with normalize_activations {normalisation!r}: nothing says how "
                "its output is scaled; fold the normalisation into its weights with SAELens and "
                "save it again"
            )
        tensor_by_name |= _fold_normalisation(files, normalisation, tensor_by_name, subtracts_b_dec)
        normalisation = "none"
    hook_name = sae_metadata.get("hook_name")
    return {
        **tensor_by_name,
        "threshold": tensor_by_name["threshold"] if "jumprelu" in architecture else None,
        "W_skip": tensor_by_name["W_skip"] if "skip" in architecture else None,
        "hook_name": hook_name,
        "target_hook_name": (sae_metadata["hook_name_out"] or "") if is_transcoder else hook_name,
        "k": config["k"] if architecture == "topk" else None,
        "subtracts_b_dec": subtracts_b_dec,
        "normalisation": normalisation,
        "dtype": config.get("dtype"),
    }


def _fold_normalisation(
    files: AutoencoderFiles, normalisation: str, tensor_by_name: TensorByName, subtracts_b_dec: bool
) -> TensorByName:
    """Folds the normalisation of activations into the weights of a SAELens checkpoint.

    At the end of training, SAELens itself folds the normalisation into the weights, and saves
    "none" as normalize_activations. Checkpoints that are saved during training store the
    normalisation in the files SCALER_FILE and WHITENING_FILE instead.

    Letters: D width of the hook, F features.

    Args:
        files: The files of the checkpoint.
        normalisation: The kind of normalisation: "expected_average_only_in", a factor for all
            activations, or "covariance_whitening", an affine map of activations.
        tensor_by_name: Name of a tensor -> the weights for normalised activations: W_enc (D, F),
            b_enc (F,), W_dec (F, D) and b_dec (D,).
        subtracts_b_dec: Whether b_dec is subtracted from the input.

    Returns:
        Name of a tensor -> the weights for the model's own activations, float32: W_enc, b_enc,
        W_dec and b_dec, with the same shapes as in `tensor_by_name`.

    Raises:
        InputError: If a file of the normalisation is missing, or its factor is not a positive
            number.
    """
    if not files.has(SCALER_FILE):
        raise files.error(
            f"cfg.json says normalize_activations {normalisation!r}, and {SCALER_FILE} is not "
            "beside it: the weights are for scaled activations, and the scale is unknown; give a "
            "checkpoint with this file, or the autoencoder that SAELens saves at the end of "
            "training"
        )
    scaler_settings = read_json(files.local_path(SCALER_FILE))
    W_enc = tensor_by_name["W_enc"].astype(np.float64)
    b_enc = tensor_by_name["b_enc"].astype(np.float64)
    W_dec = tensor_by_name["W_dec"].astype(np.float64)
    b_dec = tensor_by_name["b_dec"].astype(np.float64)
    if normalisation == "expected_average_only_in":
        scaling_factor = scaler_settings.get("scaling_factor")
        if not isinstance(scaling_factor, int | float) or not 0 < scaling_factor < np.inf:
            raise files.error(
                f"{SCALER_FILE}: scaling_factor is {scaling_factor!r}, expected a positive number"
            )
        W_enc = W_enc * scaling_factor
        W_dec = W_dec / scaling_factor
        b_dec = b_dec / scaling_factor
    else:
        if not (scaler_settings.get("has_whitening", True) and files.has(WHITENING_FILE)):
            raise files.error(
                f"cfg.json says {normalisation!r}, and {WHITENING_FILE} is not beside it"
            )
        whitening_tensor_by_name = files.tensors(WHITENING_FILE)
        activation_mean = whitening_tensor_by_name["mean"].astype(np.float64)
        whitening_matrix = whitening_tensor_by_name["matrix"].astype(np.float64)
        inverse_whitening_matrix = whitening_tensor_by_name["inverse_matrix"].astype(np.float64)
        W_enc = whitening_matrix @ W_enc
        # The encoder must subtract the mean from the activations. An encoder that subtracts b_dec
        # needs no other bias for this, because the mean is added to b_dec below.
        if not subtracts_b_dec:
            b_enc = b_enc - activation_mean @ W_enc
        W_dec = W_dec @ inverse_whitening_matrix
        b_dec = b_dec @ inverse_whitening_matrix + activation_mean
    folded_tensor_by_name = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": b_dec}
    with np.errstate(over="ignore"):  # `_check_finite` later rejects values that became infinite
        return {
            tensor_name: folded_tensor.astype(np.float32)
            for tensor_name, folded_tensor in folded_tensor_by_name.items()
        }


def sparsify(
    files: AutoencoderFiles, config: PublishedConfig, tensor_by_name: TensorByName
) -> ValueByFieldName:
    """Converts an autoencoder or transcoder of sparsify to the formula of `Autoencoder`.

    EleutherAI's sparsify has its formula in sparse_coder.py. The features with the k largest values
    of `pre` (see `Autoencoder`) are active if these values are positive. The folder has the name of
    a Hugging Face module, such as layers.10.mlp. The output of this module is reconstructed. A
    transcoder reads the input of the module, and an autoencoder its output.

    Args:
        files: The files of the autoencoder.
        config: The content of cfg.json.
        tensor_by_name: Name of a tensor of the weights file -> its values.

    Returns:
        Name of a field of `Autoencoder` -> value.
    """
    files.supported_setting(config, "activation", "topk")
    is_transcoder = config.get("transcode")
    module_folder_match = re.search(r"/(layers\.\d+[\w.]*)/*$", files.path)
    if is_transcoder and not module_folder_match:
        raise files.error(
            "is a transcoder in a folder without the name of a module, such as layers.10.mlp: "
            "nothing else says which hook it reconstructs"
        )
    input_hook_name = f"model.{module_folder_match[1]}.input" if module_folder_match else ""
    output_hook_name = f"model.{module_folder_match[1]}.output" if module_folder_match else ""
    return {
        **tensor_by_name,
        "hook_name": input_hook_name if is_transcoder else output_hook_name,
        "target_hook_name": output_hook_name,
        "k": config["k"],
        "subtracts_b_dec": not is_transcoder,
    }


def llamascopium(
    files: AutoencoderFiles, config: PublishedConfig, tensor_by_name: TensorByName
) -> ValueByFieldName:
    """Converts an autoencoder or transcoder of Llamascopium to the formula of `Autoencoder`.

    Llamascopium was formerly called lm_saes. The file models/sae.py of its package contains the
    formula.

    Args:
        files: The files of the autoencoder.
        config: The content of config.json.
        tensor_by_name: Name of a tensor of the weights file -> its values.

    Returns:
        Name of a field of `Autoencoder` -> value.
    """
    files.supported_setting(config, "sae_type", "sae")
    activation_function_name = files.supported_setting(config, "act_fn", "relu", "jumprelu", "topk")
    input_hook_name = config["hook_point_in"]
    output_hook_name = config["hook_point_out"]
    supported_normalisations = ["dataset-wise", "inference"]
    if input_hook_name == output_hook_name:
        supported_normalisations.append("token-wise")
    normalisation_setting = files.supported_setting(
        config, "norm_activation", *supported_normalisations
    )
    average_norm_by_hook_name = {}
    for tensor_name in list(tensor_by_name):
        if tensor_name.startswith(AVERAGE_NORM_PREFIX):
            average_norm_by_hook_name[tensor_name.removeprefix(AVERAGE_NORM_PREFIX)] = (
                tensor_by_name.pop(tensor_name)
            )
    weights_dtype = tensor_by_name["W_enc"].dtype
    output_width = tensor_by_name["W_dec"].shape[1]
    if activation_function_name == "jumprelu":
        tensor_by_name["threshold"] = np.exp(tensor_by_name.pop(LOG_THRESHOLD).astype(np.float32))
    if config.get("sparsity_include_decoder_norm", True):
        tensor_by_name["feature_score_factors"] = np.linalg.norm(
            tensor_by_name["W_dec"].astype(np.float32), axis=1
        )
    if not config.get("use_decoder_bias", True):
        tensor_by_name["b_dec"] = np.zeros(output_width, np.float32)
    # With this setting, training scales the activations at the input hook and at the output hook to
    # an average norm of sqrt(output_width). The code below folds the two factors into the weights,
    # so that the weights apply to activations that are not scaled.
    if normalisation_setting == "dataset-wise":
        input_norm_factor = np.float32(
            output_width**0.5 / average_norm_by_hook_name[input_hook_name].item()
        )
        output_norm_factor = np.float32(
            output_width**0.5 / average_norm_by_hook_name[output_hook_name].item()
        )
        tensor_by_name["W_enc"] = tensor_by_name["W_enc"] * input_norm_factor
        tensor_by_name["W_dec"] = tensor_by_name["W_dec"] / output_norm_factor
        tensor_by_name["b_dec"] = tensor_by_name["b_dec"] / output_norm_factor
    return {
        **tensor_by_name,
        "hook_name": input_hook_name,
        "target_hook_name": output_hook_name,
        "k": config["top_k"] if activation_function_name == "topk" else None,
        "normalisation": "constant_norm_rescale"
        if normalisation_setting == "token-wise"
        else "none",
        "dtype": weights_dtype,
    }


def circuit_tracer(
    files: AutoencoderFiles, _: PublishedConfig, tensor_by_name: TensorByName
) -> ValueByFieldName:
    """Converts a transcoder of circuit-tracer for a single layer to the formula of `Autoencoder`.

    The transcoder is computed in float32, with JumpReLU if it has thresholds, otherwise with ReLU.
    The file config.yaml, which names the hooks, is optional.

    Args:
        files: The files of the transcoder.
        _: The configuration, which is empty because this function reads config.yaml itself.
        tensor_by_name: Name of a tensor of the weights file -> its values.

    Returns:
        Name of a field of `Autoencoder` -> value.
    """
    has_yaml_config = files.has("config.yaml")
    yaml_text = files.local_path("config.yaml").read_text() if has_yaml_config else ""
    yaml_config = dict(yaml.safe_load(yaml_text) or {})
    hook_name_prefix = f"blocks.{files.layer_number_text}."
    files.supported_setting(yaml_config, "model_kind", "transcoder_set")
    return {
        **tensor_by_name,
        "uses_relu": "threshold" not in tensor_by_name,
        "hook_name": hook_name_prefix + yaml_config.get("feature_input_hook", "mlp.hook_in"),
        "target_hook_name": hook_name_prefix
        + yaml_config.get("feature_output_hook", "hook_mlp_out"),
        "dtype": "float32",
    }


class Format(NamedTuple):
    """A publisher's file format of autoencoders.

    Attributes:
        convert_to_fields: The function that converts an autoencoder of this format. Its arguments
            are the files, the content of the configuration file ({} if there is no such file), and
            the tensors of the weights file. It returns the fields of an `Autoencoder`: name of a
            field -> value.
        config_file_name: The name of the configuration file; None if the format has none.
        weights_file_pattern: The name of the file with the tensors. "{}" in the name stands for the
            number of the layer; a name without "{}" is the same for all layers.
    """

    convert_to_fields: Callable[[AutoencoderFiles, PublishedConfig, TensorByName], ValueByFieldName]
    config_file_name: str | None
    weights_file_pattern: str


FORMATS = (
    Format(qwen_scope, None, "layer{}.sae.pt"),
    Format(circuit_tracer, None, "layer_{}.safetensors"),
    Format(sae_lens, "cfg.json", "sae_weights.safetensors"),
    Format(sparsify, "cfg.json", "sae.safetensors"),
    Format(llamascopium, "config.json", "sae_weights.safetensors"),
    Format(llamascopium, "config.json", "sae_weights.pt"),
    Format(llamascopium, "config.json", "checkpoints/final.safetensors"),
)


def _check_shapes(files: AutoencoderFiles, value_by_field_name: ValueByFieldName) -> None:
    """Checks the shapes of the tensors, and puts the features on the first axis of W_enc and W_dec.

    Args:
        files: The files of the autoencoder.
        value_by_field_name: Name of a field of `Autoencoder` -> value. A W_enc or W_dec with the
            features on the last axis is replaced by its transpose.

    Raises:
        InputError: If a tensor is unknown, if W_enc or W_dec is square (the shape of a square
            matrix does not tell which axis holds the features), if the shapes of the tensors are
            inconsistent, or if k is not between 1 and the number of features.
    """
    for field_name in sorted(value_by_field_name.keys() - Autoencoder.__dataclass_fields__.keys()):
        raise files.error(
            f"has a tensor {field_name}, which autoencoders of its format do not have"
        )
    feature_count = value_by_field_name["b_enc"].size
    for field_name in ("W_enc", "W_dec"):
        if value_by_field_name[field_name].shape == (feature_count, feature_count):
            raise files.error("has square matrices, whose orientation cannot be known")
        if value_by_field_name[field_name].shape[1] == feature_count:
            value_by_field_name[field_name] = value_by_field_name[field_name].T
    input_width = value_by_field_name["W_enc"].shape[1]
    target_width = value_by_field_name["W_dec"].shape[1]
    expected_shape_by_field_name = {
        "W_enc": (feature_count, input_width),
        "W_dec": (feature_count, target_width),
        "b_enc": (feature_count,),
        "threshold": (feature_count,),
        "feature_score_factors": (feature_count,),
        "b_dec": (target_width,),
        "W_skip": (target_width, input_width),
    }
    for field_name, expected_shape in expected_shape_by_field_name.items():
        field_array = (
            value_by_field_name[field_name]
            if field_name in REQUIRED_TENSORS
            else value_by_field_name.get(field_name)
        )
        if field_array is not None and field_array.shape != expected_shape:
            raise files.error(
                f"{field_name} has shape {field_array.shape}, expected {expected_shape}"
            )
    k = value_by_field_name.get("k")
    if k is not None and not 0 < k <= feature_count:
        raise files.error(f"k is {k!r}, expected 1 to {feature_count}")


def _check_finite(files: AutoencoderFiles, value_by_field_name: ValueByFieldName) -> None:
    """Checks that all weights are finite.

    A feature with a weight that is not finite would never be active, and no other check would
    detect this. The function checks a block of rows at a time to save memory.

    Args:
        files: The files of the autoencoder.
        value_by_field_name: Name of a field of `Autoencoder` -> value.

    Raises:
        InputError: If a weight is NaN, or is infinite in float32.
    """
    for field_name, field_array in sorted(value_by_field_name.items()):
        if not isinstance(field_array, np.ndarray):
            continue
        num_rows_at_once = max(VALUES_AT_ONCE // max(field_array[:1].size, 1), 1)
        for first_row_index in range(0, len(field_array), num_rows_at_once):
            with np.errstate(over="ignore"):
                row_block = field_array[
                    first_row_index : first_row_index + num_rows_at_once
                ].astype(np.float32)
            non_finite_weight_indices = np.argwhere(~np.isfinite(row_block))
            if len(non_finite_weight_indices):
                non_finite_weight_index = non_finite_weight_indices[0]
                non_finite_weight = row_block[tuple(non_finite_weight_index)]
                non_finite_weight_index[0] += first_row_index
                index_text = ", ".join(map(str, non_finite_weight_index))
                raise files.error(
                    f"{field_name}[{index_text}] is {non_finite_weight}: weights must be finite "
                    "numbers; the files are damaged, or the training has diverged"
                )
