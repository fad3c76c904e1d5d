"""What makes two runs the same: the identity of an extraction, and what all hosts must agree on."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import activation_extraction
from activation_extraction.cli.config import Config
from activation_extraction.model.forward import Forward
from activation_extraction.run.digests import digest_files, model_digest
from activation_extraction.run.host_text import Dataset
from activation_extraction.store.identity import Identity
from activation_extraction.text.files import TextFile
from activation_extraction.text.workers import Worker

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers", "datasets", "isal")
MODEL_FILES = ("qwen2_jax.py", "qwen2_jax_with_hooks.py")
# Fields of the configuration that may differ between the hosts of a run.
OWN_SETTINGS = {
    "host_id",
    "coordinator_address",
    "output_dir",
    "model_path",
    "dataset_path",
    "verbose",
    "compilation_cache",
}


def package_versions() -> dict[str, str]:
    """The versions of the packages that decide which bytes are stored."""
    return {package: version(package) for package in PACKAGES}


def identity_of(config: Config, forward: Forward, dataset: Dataset, worker: Worker) -> Identity:
    """Everything that decides the content of the shards; it may not change when a run continues."""
    model = forward.model
    return Identity(
        model_digest=model_digest(forward.checkpoint),
        tokenizer_digest=digest_files(forward.checkpoint.tokenizer_files()),
        data=dataset.name,
        data_revision=dataset.content,
        text_column=config.text_column,
        skip_bad_rows=config.skip_bad_rows,
        max_seq_length=config.max_seq_length,
        hooks=tuple(hook.name for hook in model.hooks),
        keyed_by=forward.keyed_by,
        dtype=str(model.dtype),
        activation_dtype=str(model.activation_dtype),
        shard_size_gb=config.shard_size_gb,
        compress_shards=config.compress_shards,
        shard_format=config.shard_format,
        positions=config.positions,
        drop_token_ids=config.drop_token_ids,
        total_machines=worker.machines,
        num_hosts=worker.hosts,
        machine=worker.machine,
        host=worker.host,
    )


def fingerprint(
    config: Config, forward: Forward, identity: Identity, files: Sequence[TextFile]
) -> dict[str, Any]:
    """Everything that must be the same on every host of a run, by name. files: of the data set."""
    asked = {name: value for name, value in config.to_json().items() if name not in OWN_SETTINGS}
    return {
        "configuration": json.dumps(asked, sort_keys=True, default=str),
        **identity.shared,
        "data files": json.dumps([(file.name, file.size) for file in files]),
        "package versions": json.dumps(package_versions()),
        "source": digest_files(_sources()),
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
        "mesh": json.dumps(forward.layout.shape),
        **{name: choice.name for name, choice in forward.kernels.items()},
    }


def _sources() -> list[Path]:
    """The source files of this program."""
    package = Path(activation_extraction.__file__).parent
    scripts = [package.parent / name for name in ("extract_activations.py", *MODEL_FILES)]
    return [*scripts, *package.rglob("*.py")]
