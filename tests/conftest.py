"""Sets up the test session, and makes the models and inputs that many tests share.

There are eight fake CPU devices with strict dtypes, no network, and tiny checkpoints that
transformers makes.

Compiling takes longer than what the tests compute. So most of the compiler's optimizations are off,
fusions are compiled in an older and faster way, and in one thread, because other tests need the
cores. The fixture `optimized` compiles programs as in a run; tests marked `slow` use it. torch has
one thread, because several threads would mostly wait for each other.

Compiled programs are kept for later sessions in a cache that all workers share (`make clean`
empties it). Its size is not limited, because JAX locks a limited cache, and reads the age of every
entry before it adds one. With thousands of programs, the workers would mostly wait for each other.

Temporary files are in memory if there is room, because the tool forces every stored file to the
disk, and tests would wait for that. The environment variable TMPDIR overrides this. torch is
imported only where it is used, because that takes seconds. transformers is imported here, before
the tool imports it without torch.
"""

import copy
import ctypes
import functools
import gc
import os
import sys
import tempfile
from pathlib import Path

MEMORY = "/dev/shm"
ENOUGH = 8e9  # bytes; files of a session take 2.3e9 at most


def _memory_is_usable() -> bool:
    """Returns whether MEMORY is writable, large enough, and allows executing programs.

    In Docker, it does not allow that.
    """
    if not os.access(MEMORY, os.W_OK):
        return False
    status = os.statvfs(MEMORY)
    return status.f_bavail * status.f_frsize > ENOUGH and not status.f_flag & os.ST_NOEXEC


if "TMPDIR" not in os.environ and _memory_is_usable():
    tempfile.tempdir = os.environ["TMPDIR"] = MEMORY  # for pytest, and for what tests start

FLAGS_OF_TESTS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Eight devices share two cores with other tests: XLA would abort a worker in which one of them lets
# the others wait for 40 seconds.
FLAGS_OF_TESTS += " --xla_cpu_collective_call_terminate_timeout_seconds=400"
# The flags in the environment of whoever started the tests. A worker of pytest-xdist inherits the
# variable with our flags in front.
FLAGS_OF_THE_CALLER = os.environ.get("XLA_FLAGS", "").removeprefix(FLAGS_OF_TESTS).strip()
SESSION_FOLDER = tempfile.mkdtemp(prefix="test-session-")
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # tests import gcsfs before the product
    "HF_HOME": f"{SESSION_FOLDER}/hf-home",
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".pytest_cache/jax"),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": f"{FLAGS_OF_TESTS} {FLAGS_OF_THE_CALLER}".strip(),
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
AS_IN_A_RUN = {  # variables of other processes that compile as in a run
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    "XLA_FLAGS": FLAGS_OF_THE_CALLER,
}
XLA_FLAGS_OF_A_RUN = {  # the same flags for this process, which reads its variables only once
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}

import json
import logging
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
import transformers  # noqa: F401
from delta_reference import inside_delta_net
from jax._src import compiler
from row_files import write_rows
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from activation_extraction.common.choices import DEFAULT_TOP_LOGITS
from activation_extraction.inspect.verify import verify
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import parse_model_config, read_model_config
from activation_extraction.model.hooks import hook_table
from activation_extraction.run import demo
from activation_extraction.store.folder import Folder
from activation_extraction.text.tokenizer import load_tokenizer
from qwen2_jax import Qwen2, weight_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A million objects live as long as the session, so frequent collections find little garbage. With
# these thresholds, the tests of batches, formats and encoded shards take 19.5 CPU seconds instead
# of 20.8.
gc.set_threshold(20_000, 20, 20)

pytest_plugins = ["small_runs", "gcs_server", "pods"]

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has one worker run all tests of a module, except those that name a group themselves.

    So the programs and fixtures of a module are made only once.
    """
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def rare_but(often: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Marks the parameters of a test as rare, except some.

    Args:
        often: The parameters that `make test` runs.
        cases: All parameters.
    """
    return [case if case in often else pytest.param(case, marks=pytest.mark.rare) for case in cases]


def pytest_unconfigure() -> None:
    shutil.rmtree(SESSION_FOLDER, ignore_errors=True)


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model and the folder that it was saved to.

    Attributes:
        model: The model.
        folder: The folder of its checkpoint.
    """

    model: "PreTrainedModel"
    folder: Path

    @functools.cached_property
    def config(self) -> Any:
        return read_model_config(self.folder / "config.json")

    def in_bfloat16(self) -> "Reference":
        """Returns the same model with rounded weights, which computes in bfloat16."""
        return Reference(copy.deepcopy(self.model).bfloat16(), self.folder)

    @property
    def talking(self) -> Any:
        """Returns the model with the head that makes logits, which some models call thinker."""
        return getattr(self.model, "thinker", self.model)

    @property
    def language(self) -> Any:
        """Returns the decoder, without the parts for images or audio that some models have."""
        return getattr(self.talking.model, "language_model", self.talking.model)

    def hooked(self, token_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the values of all hooks, as Hugging Face computes them on unpadded rows.

        Args:
            token_ids: The rows, (B, T).

        Returns:
            The name of a hook -> (B, T, width) float32. Canonical names and the names of modules
            are both keys.
        """
        import torch

        depth, values, handles = self.config.num_hidden_layers, {}, []
        hooks = hook_table(self.config).all_hooks(depth)
        for name in {name for hook in hooks for name in hook.names() if name.startswith("model.")}:
            path, side = name.rsplit(".", 1)

            def keep(_: Any, inputs: Any, output: Any, name: str = name, side: str = side) -> None:
                tensor = inputs[0] if side == "input" else output
                if name.endswith("mlp.gate.output"):
                    values.update(self._routing(name, output, token_ids.shape))
                tensor = tensor[0] if isinstance(tensor, tuple) else tensor
                values[name] = tensor.reshape(*token_ids.shape, -1).clone()

            module = self.language.get_submodule(path.removeprefix("model."))
            handles.append(module.register_forward_hook(keep))
        with torch.no_grad():
            self.talking.model(torch.tensor(token_ids, dtype=torch.long), use_cache=False)
            values |= {
                hook.name: values[hook.module_name]
                for hook in hooks
                if hook.module_name is not None
            }
            for layer in range(depth):
                values |= self._inside(f"blocks.{layer}.", values)
            last = values[f"blocks.{depth - 1}.hook_resid_post"]
            values["ln_final.hook_normalized"] = self._normalized(last)
            logits = self.talking.get_output_embeddings()(values["ln_final.hook_out"])
            values |= predictions_of(logits, token_ids)
        for handle in handles:
            handle.remove()
        return {name: tensor.float().numpy() for name, tensor in values.items()}

    def _inside(self, block: str, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the hooks inside the modules of a block, whose values no module returns.

        Args:
            block: "blocks.K."
            values: The name of a hook -> the values that modules return.
        """
        import torch
        from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

        hooks = {}
        for norm, stream in (("ln1", "hook_resid_pre"), ("ln2", "hook_resid_mid")):
            hooks[f"{block}{norm}.hook_normalized"] = self._normalized(values[block + stream])
        if f"{block}linear_attn.hook_out" in values:
            return hooks | inside_delta_net(self.language, self.config, block, values)
        normed = "_normed" * self.config.qk_norm
        q, k = (values[f"{block}attn.hook_{n}{normed}"] for n in "qk")
        q, k = (x.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2) for x in (q, k))
        if self.config.q_gate:
            heads = values[f"{block}attn.hook_q"].unflatten(2, (-1, 2, self.config.head_dim))
            hooks[f"{block}attn.hook_q_gate"] = heads[..., 1, :].flatten(2)
        tables = self.language.rotary_emb(q, torch.arange(q.shape[2])[None])
        for name, rotated in zip("qk", apply_rotary_pos_emb(q, k, *tables), strict=True):
            hooks[f"{block}attn.hook_rot_{name}"] = rotated.transpose(1, 2).flatten(2)
        return hooks

    def _routing(self, name: str, output: Any, shape: tuple[int, ...]) -> dict[str, Any]:
        """Returns the hooks of a router.

        Args:
            name: The name of the hook at the router's output.
            output: Its output: logits, weights and numbers of the chosen experts.
            shape: (B, T).
        """
        logits, weights, chosen = output
        block = f"blocks.{name.split('.')[2]}.mlp."
        all_weights = (logits * 0).scatter(1, chosen, weights)
        hooks = {"hook_expert_weights": all_weights, "hook_expert_indices": chosen}
        return {block + key: tensor.reshape(*shape, -1) for key, tensor in hooks.items()}

    def _normalized(self, x: Any) -> Any:
        import torch

        mean_square = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(mean_square + self.config.rms_norm_eps)).to(x.dtype)


def predictions_of(logits: Any, token_ids: np.ndarray) -> dict[str, Any]:
    """Returns the hooks after the last layer: logits, predictions, loss and entropy.

    Args:
        logits: Logits (B, T, V), where each row is one document.
        token_ids: Token ids, (B, T).
    """
    import torch

    logprobs = logits.float().log_softmax(-1)
    following = torch.tensor(token_ids, dtype=torch.long)[:, 1:, None]
    top = logprobs.topk(DEFAULT_TOP_LOGITS)
    loss = torch.nn.functional.pad(-logprobs[:, :-1].gather(2, following), (0, 0, 1, 0))
    loss[:, 0] = torch.nan
    return {
        "logits": logits,
        "logits.top_ids": top.indices,
        "logits.top_logprobs": top.values,
        "loss": loss,
        "entropy": -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
    }


def make_reference(
    folder: Path, max_shard_size: str = "1GB", as_released: bool = False, **changes: Any
) -> Reference:
    """Makes a random model, in which every part of the weights matters, and saves it.

    Noise is added to the weights. Its scale depends on the width, because attention must not
    saturate: that would amplify rounding errors.

    Args:
        folder: The folder of the checkpoint.
        max_shard_size: The size above which the weights are saved as several files.
        as_released: Whether config.json contains just these fields, and the input axis of fused
            experts comes first, as in released checkpoints.
        changes: Fields of config.json.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    usual: dict[str, Any] = dict(
        model_type="qwen2",
        vocab_size=211,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(**copy.deepcopy(usual | changes))
    others = hasattr(config, "vision_config") or hasattr(config, "thinker_config")
    kind = AutoModelForMultimodalLM if others else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.8 / model.config.get_text_config().hidden_size ** 0.5
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if as_released:
        (folder / "config.json").write_text(json.dumps(usual | changes))
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
        save_file(tensors, folder / "model.safetensors")
    return Reference(model, folder)


def configure(folder: Path, **changes: Any) -> None:
    """Changes fields of a model's config.json, which is made if it is missing."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | changes))


logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)  # as start_logging does


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles programs as in a run, here and in processes that the test starts."""
    for name, text in AS_IN_A_RUN.items():
        monkeypatch.setenv(name, text)
    get_compile_options = compiler.get_compile_options

    def as_in_a_run(**options: Any) -> Any:
        options["env_options_overrides"] |= XLA_FLAGS_OF_A_RUN
        return get_compile_options(**options)

    monkeypatch.setattr(compiler, "get_compile_options", as_in_a_run)
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back() -> Iterator[None]:
    """Frees the compiled programs of a module; those of all modules take 16 GB in three workers."""
    yield
    jax.clear_caches()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _optimized_at_full_size(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("optimized")


@pytest.fixture(scope="session")
def demo_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the demo's `model` and `documents.parquet`.

    Tests must not change it.
    """
    folder = tmp_path_factory.mktemp("demo")
    demo.make_demo(folder)
    return folder / "demo_inputs"


def inputs_with(model: Mapping[str, Any], demo_inputs: Path, folder: Path) -> Path:
    """Copies demo_inputs, with another model.

    Args:
        model: The content of its config.json.
        demo_inputs: The folder to copy.
        folder: The new folder, which is also returned. The weights of the model are random.
    """
    shutil.copytree(demo_inputs, folder, dirs_exist_ok=True)
    config = parse_model_config(model)
    (folder / "model/config.json").write_text(json.dumps(model))
    demo.write_weights(folder / "model/model.safetensors", weight_table(Qwen2(config)).values())
    return folder


def tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer in a model's folder."""
    files = Checkpoint(str(folder)).tokenizer_files()
    return load_tokenizer(files, str(folder), vocab_size).backend_tokenizer


@pytest.fixture(scope="session")
def tokenizer(demo_inputs: Path) -> Tokenizer:
    """Returns the demo's tokenizer."""
    return tokenizer_of(demo_inputs / "model", vocab_size=2048)


@pytest.fixture
def inputs(demo_inputs: Path) -> list[Any]:
    """Returns flags for the demo's model and documents."""
    files = "--model_path", demo_inputs / "model", "--dataset_path"
    return [*files, demo_inputs / "documents.parquet", "--max_seq_length", 64]


@pytest.fixture(scope="session")
def many_shards(demo_inputs: Path) -> list[str]:
    """Returns the flags of a run on one device that stores 120 samples in many small shards."""
    return [
        "--model_path",
        str(demo_inputs / "model"),
        "--layers_to_extract",
        "1",
        "3",
        "--dataset_path",
        str(demo_inputs / "documents.parquet"),
        "--max_seq_length",
        "64",
        "--max_samples",
        "120",
        "--shard_size_gb",
        "0.0005",
        "--no_data_parallel",
    ]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Returns a list that gets the warnings of the test: (name of the logger, message)."""
    messages: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.name, record.getMessage()))

    for name in ("huggingface_hub", "datasets", "urllib3", "extract_activations"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [Keep(logging.WARNING)])
    return messages


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes rows to a JSON Lines file and returns its path."""

    return lambda rows, name="texts.jsonl": write_rows(tmp_path / name, rows)


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[[Path | str], list[str]]:
    """Returns a function that verifies a folder or URL and returns the problems.

    It asserts that the summary and the exit status agree with these.
    """

    def run(root: Path | str) -> list[str]:
        capsys.readouterr()
        status = verify(Folder(str(root)), None, 0)
        *problems, summary = capsys.readouterr().out.splitlines()
        assert summary.startswith("FAILED" if problems else "in order"), summary
        assert status == (1 if problems else 0)
        return problems

    return run
