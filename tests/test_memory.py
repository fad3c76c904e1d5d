"""Memory at a real model's size."""

import json
import subprocess
import sys

import pytest

from benchmarks.inputs import make_documents, make_model
from benchmarks.processes import extract
from benchmarks.shapes import SHAPES

LOAD = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from activation_extraction.model.mesh import usable_devices
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.weights import load_params
from benchmarks.processes import resident
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

folder = Path(sys.argv[1])
config = FAMILIES.read_config(folder / "config.json")[1]
layout = build_layout(usable_devices(True), json.loads(sys.argv[2]), config.num_key_value_heads)
hooks = HOOKS.of_layers([23], "residual", 24)
table = weight_table(create_model_with_hooks(config, hooks, layout=layout))
before = resident("VmRSS")
params = jax.block_until_ready(
    load_params(table, Checkpoint(str(folder)), np.dtype("float32"), layout)
)
shards = [s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards]
layer = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) / config.num_hidden_layers
print(json.dumps({"beyond": resident("VmHWM") - before - sum(shards), "layer": layer}))
"""


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory):
    """A checkpoint of the Qwen2.5-0.5B shape and its number of parameters."""
    folder = tmp_path_factory.mktemp("half_billion")
    return folder, make_model(folder, SHAPES["0.5B"])


@pytest.mark.slow
def test_peak_memory_stays_under_2_2_times_the_weights(half_billion, tmp_path):
    """The whole process, libraries and buffers included, at 4 x 512 tokens."""
    model, parameters = half_billion
    make_documents(tmp_path / "documents.jsonl", 4)
    flags = ["--model_path", str(model), "--dataset_path", str(tmp_path / "documents.jsonl")]
    flags += ["--batch_size", "4", "--max_seq_length", "512"]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        found = extract(tmp_path / dtype, [*flags, "--dtype", dtype])
        assert found["samples"] == 4
        assert found["peak_bytes"] < 2.2 * parameters * size, dtype


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"model": 8}, {"pipeline": 4, "model": 2}])
def test_loading_holds_a_few_layers_beyond_the_shards(half_billion, shape):
    """Eight devices in one process: what it had besides their shards at the worst moment."""
    command = [sys.executable, "-c", LOAD, str(half_billion[0]), json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["beyond"] < 6 * found["layer"]
