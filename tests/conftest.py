"""Eight fake CPU devices, strict dtypes, no network, and tiny checkpoints made by transformers."""

import os
import tempfile

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # as folder.py; tests import gcsfs before it
    "HF_HOME": tempfile.mkdtemp(prefix="hf-home-"),
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # but in test_compilation.py
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from cloud import Cloud
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from activation_extraction.cli.config import parse_args
from activation_extraction.model.weights import Checkpoint
from activation_extraction.output.folder import Folder
from activation_extraction.reading.verify import verify
from activation_extraction.run import demo
from activation_extraction.text.tokens import load_tokenizer
from qwen2_jax import QwenConfig
from qwen2_jax_with_hooks import QWEN2

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# hidden, MLP, layers, heads, KV heads, vocabulary, and what is special about each.
TINY: dict[str, dict[str, Any]] = {
    "one_kv_head": dict(num_key_value_heads=1),
    "two_kv_heads_tied": dict(num_key_value_heads=2, tie_word_embeddings=True),
    "four_kv_heads": dict(num_key_value_heads=4),
    "wide_heads": dict(num_key_value_heads=2, head_dim=24),
    "sharded": dict(num_key_value_heads=2, tie_word_embeddings=True, vocab_size=257),
    "deep_other_theta": dict(
        num_key_value_heads=1, num_hidden_layers=7, rope_parameters={"rope_theta": 1e6}
    ),
}


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model and the folder that it was saved to."""

    model: Qwen2ForCausalLM
    folder: Path

    @property
    def config(self) -> QwenConfig:
        return QwenConfig.from_file(self.folder / "config.json")

    def hooked(self, token_ids: np.ndarray) -> dict[tuple[int, str], np.ndarray]:
        """(layer, kind) -> (B, T, D) float32, as Hugging Face computes it on unpadded rows."""
        values: dict[tuple[int, str], np.ndarray] = {}

        def keep(layer: int, kind: str) -> Callable[..., None]:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                values[layer, kind] = tensor.float().numpy()

            return hook

        handles = []
        for k, layer in enumerate(self.model.model.layers):
            handles.append(layer.register_forward_hook(keep(k, "hook_resid_post")))
            handles.append(layer.self_attn.register_forward_hook(keep(k, "hook_attn_out")))
            handles.append(layer.mlp.register_forward_hook(keep(k, "hook_mlp_out")))
        with torch.no_grad():
            self.model.model(torch.tensor(token_ids, dtype=torch.long), use_cache=False)
        for handle in handles:
            handle.remove()
        return values


def make_reference(folder: Path, max_shard_size: str = "1GB", **changes: Any) -> Reference:
    """A random Qwen2 with weights large enough that every part of it matters, saved to `folder`.

    Noise scales with the width: attention must not saturate, or rounding errors are amplified.
    """
    config = Qwen2Config(
        **(
            dict(
                vocab_size=211,
                hidden_size=64,
                intermediate_size=112,
                num_hidden_layers=4,
                num_attention_heads=4,
                tie_word_embeddings=False,
            )
            | changes
        )
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.8 / config.hidden_size**0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Reference(model, folder)


@pytest.fixture(scope="session", params=list(TINY))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Each tiny model in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    shard = "100KB" if request.param == "sharded" else "1GB"
    return make_reference(folder, shard, **TINY[request.param])


@pytest.fixture(scope="session")
def demo_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the demo's `model` and `documents.parquet`, which tests must not change."""
    folder = tmp_path_factory.mktemp("demo")
    demo.prepare(parse_args(["--demo"]), folder, QWEN2)
    return folder / "demo_inputs"


@pytest.fixture(scope="session")
def tokenizer(demo_inputs: Path) -> Tokenizer:
    """The demo's."""
    return load_tokenizer(Checkpoint(str(demo_inputs / "model")), vocab_size=2048)


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows to a JSON Lines file and returns its path."""

    def write(rows: list[Mapping[str, Any]], name: str = "texts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """Machines that run the small job."""
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[[Path | str], list[str]]:
    """Verifies a folder or URL; the problems found, in agreement with the exit status."""

    def run(root: Path | str) -> list[str]:
        capsys.readouterr()
        status = verify(Folder(str(root)), None, 0)
        *problems, summary = capsys.readouterr().out.splitlines()
        assert summary.startswith("NOT IN ORDER" if problems else "in order"), summary
        assert status == (1 if problems else 0)
        return problems

    return run
