"""The numeric matrix: families x hooks x meshes x dtypes, float8 weights too, against transformers.

Every document is compared with what transformers computes of it alone.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_reference
from delta_reference import untouched
from float8_models import FLOAT8, dequantised
from interpreted import pallas
from jax.sharding import Mesh
from rounding import allowed_errors, assert_rounded_alike
from tiny_models import (
    BESIDE_OTHERS,
    INTERLEAVED,
    LLAMA,
    MOE_TEXT,
    OPTIMIZED,
    QUICK_REFERENCE,
    SHARED,
    TEXT,
    TINY,
)

from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.family import read_model_config
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.host_rows import HostRows
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.model_config import as_stored
from activation_extraction.model.weights import check_tensors, load_params, orient_experts
from benchmarks.agreement import few_more, tokens_with_same_experts
from benchmarks.inputs import SHAPES
from qwen2_jax import Qwen2, tensor_names, weight_table
from qwen2_jax_with_hooks import create_model_with_hooks

TOLERANCE = 1e-4  # of the reference tensor's RMS
INDICES = "mlp.hook_expert_indices"
PREDICTIONS = "loss", "entropy", "logits.top_ids", "logits.top_logprobs", "logits"
BFLOAT16 = jnp.dtype("bfloat16")

FIVE = dict(num_hidden_layers=5, intermediate_size=128, vocab_size=256)
WINDOWS = dict(use_sliding_window=True, sliding_window=11, max_window_layers=2)
QWEN3 = dict(model_type="qwen3", head_dim=32, attention_bias=True)
EXPERTS = SHARED | dict(num_key_value_heads=2, num_hidden_layers=4, decoder_sparse_step=2)
LANES = dict(
    hidden_size=128, moe_intermediate_size=128
)  # wide enough for a TPU's kernel of experts
MODELS: dict[str, dict[str, Any]] = TINY | {
    "1 kv head": FIVE | dict(num_key_value_heads=1, tie_word_embeddings=True),
    "2 kv heads": FIVE | dict(num_key_value_heads=2),
    "4 kv heads": FIVE | dict(num_key_value_heads=4),
    "llama": FIVE | LLAMA | dict(num_key_value_heads=2),
    "windows": FIVE | QWEN3 | WINDOWS | dict(num_key_value_heads=2),
    "experts": EXPERTS,
    "delta": TEXT,
    "delta and experts": MOE_TEXT,
    "interleaved": INTERLEAVED,
    "experts as released": BESIDE_OTHERS["qwen3_vl_moe"],
    "wide qwen2_moe": EXPERTS | LANES,
    "wide qwen3_moe": TINY["qwen3_moe"] | LANES | dict(num_hidden_layers=4),
    "wide qwen3_5_moe": MOE_TEXT | LANES,
    "wide qwen3_next": INTERLEAVED | LANES,
    "full size": SHAPES["0.5B"],
    **{name: config for name, (config, *_) in FLOAT8.items()},
}
WITH_PATTERNS = "2 kv heads", "windows"
MESHES = {
    "one device": {"data": 1},
    "1d": {"model": 8},
    "2d": {"data": 2, "model": 4},
    "pipeline": {"pipeline": 2, "data": 2, "model": 2},
    "fsdp": {"data": 2, "fsdp": 2, "model": 2},
    "deep pipeline": {"pipeline": 4, "model": 2},
    "pipeline and fsdp": {"pipeline": 2, "fsdp": 2, "model": 2},
    "model first": {"model": 2, "data": 4},
    "expert": {"expert": 4, "model": 2},
    "expert and data": {"data": 2, "expert": 2, "model": 2},
    "expert and pipeline": {"pipeline": 2, "expert": 2, "model": 2},
    "expert and fsdp": {"fsdp": 2, "data": 2, "expert": 2},
}
EVERY = *PREDICTIONS, "*"
# Several widths, none of layer 1, and of the last layer only a part.
ODD: tuple[str, ...] = "blocks.0.hook_mlp_out", "blocks.0.attn.hook_k", "blocks.2.attn.hook_z"
ODD += "blocks.2.hook_resid_post", "blocks.3.mlp.hook_pre", "blocks.3.ln2.hook_out"
ODD_DELTA: tuple[str, ...] = "blocks.0.linear_attn.hook_recurrence_out", "blocks.1.attn.hook_z"
ODD_DELTA += "blocks.2.linear_attn.hook_k", "blocks.3.hook_resid_post", *PREDICTIONS
# After 24 layers, rounding shows in products of two values.
SUMS = "blocks.*.hook_resid_*", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out"
# Pallas interprets kernels. Those of experts need one device; more would need a thread for each.
OF_DELTA = Kernels(delta_rule=functools.partial(pallas_delta_rule, interpret=True))
OF_EXPERTS = Kernels(experts=pallas)


class Case(NamedTuple):
    """A row of the matrix. kernels: in place of the usual ones of a CPU."""

    model: str
    mesh: str = "one device"
    hooks: tuple[str, ...] = EVERY
    kernels: Kernels | None = None
    dtype: str = "float32"


IN_BFLOAT16, WIDE = (
    functools.partial(Case, dtype="bfloat16", kernels=kernels) for kernels in (None, OF_EXPERTS)
)
OFTEN = [  # what `make test` has of the matrix
    *(Case(name) for name in TINY),
    Case("2 kv heads", "fsdp"),
    Case("2 kv heads", "pipeline", ODD),
    Case("windows", "pipeline"),
    Case("llama", "pipeline", ODD),
    Case("1 kv head", "1d"),
    Case("4 kv heads", "2d", ODD),
    Case("experts", "expert and fsdp"),
    Case("delta", "pipeline", ODD_DELTA, OF_DELTA),
    Case("delta and experts", "expert and data", ODD_DELTA),
    Case("interleaved", "expert and pipeline", ODD_DELTA),
    Case("experts as released", "expert and fsdp"),
    *(Case(name, mesh) for name, (*_, mesh) in FLOAT8.items()),
    IN_BFLOAT16(QUICK_REFERENCE),
]
# What is like others or takes long, and is part of `make test-all` alone.
LIKE_OTHERS = {"qwen2_5_omni", "qwen3_vl_moe", "float8 experts", "float8 beside vision"}
LIKE_OTHERS |= {"float8 fused experts", "float8 interleaved", "qwen3_5_moe_tied_beside_vision"}
LIKE_OTHERS |= {"qwen2_moe_unbiased_last_dense_tied"}
SELDOM = [
    *(case for case in OFTEN if case.model in LIKE_OTHERS),
    *(Case("2 kv heads", mesh) for mesh in ("1d", "2d", "deep pipeline", "pipeline and fsdp")),
    Case("2 kv heads", "model first"),
    Case("windows", "1d"),
    *(Case("llama", mesh) for mesh in ("1d", "2d", "fsdp")),
    IN_BFLOAT16("llama_tied"),
    Case("full size", hooks=SUMS),
    *(Case("experts", mesh) for mesh in ("1d", "expert", "expert and data", "expert and pipeline")),
    Case("delta", "2d", ODD_DELTA, OF_DELTA),
    Case("delta", "fsdp", ODD_DELTA),
    *(Case("interleaved", mesh, ODD_DELTA) for mesh in ("1d", "fsdp")),
    *map(IN_BFLOAT16, ("qwen3_tied", "qwen3_moe", "qwen2_moe")),
    *map(IN_BFLOAT16, ("qwen3_5_moe", "qwen3_5_more_values")),
    *map(WIDE, ("wide qwen2_moe", "wide qwen3_moe", "wide qwen3_5_moe", "wide qwen3_next")),
]
# The lengths of the documents of each row, and the tokens of a row. One CPU computes four rows of
# the long ones at a time; some documents are longer than a window or a block of queries.
LONG = [[304], [90, 150, 1, 60], *[[]] * 6], 304
SHORT = [[20, 40]] * 8, 64


def family(name: str) -> Any:
    """The mark of tests that compile this model: one worker runs those of a family."""
    return pytest.mark.xdist_group(MODELS[name].get("model_type", "qwen2"))


def rows_in(dtype: str) -> list[Any]:
    """The rows of the matrix in this dtype, as parameters of a test."""
    params = []
    for case in dict.fromkeys(case for case in OFTEN + SELDOM if case.dtype == dtype):
        marks = [family(case.model)]
        if case != Case(QUICK_REFERENCE) and case[::2] != ("2 kv heads", ODD, "float32"):
            marks.append(pytest.mark.long)
        if case in SELDOM:
            marks.append(pytest.mark.slow if case.model == "full size" else pytest.mark.rare)
        name = f"{case.model}, {case.mesh}" + ", some hooks" * (case.hooks != EVERY)
        name += ", kernels" * (case.kernels is not None)
        params.append(pytest.param(case, id=name, marks=marks))
    return params


def every_hook(config):
    every = hook_table(config).all_hooks(config.num_hidden_layers)
    return [hook for hook in every if not hook.kind.is_prediction]


def matching(config, names):
    return [*hook_table(config).matching(names, config.num_hidden_layers).values()]


def flops_of(config, layers, lengths):
    """Returns the operations of the first layers, for samples of these lengths."""
    hooks = hook_table(config).of_layers([layers - 1], "residual", config.num_hidden_layers)
    return create_model_with_hooks(config, hooks).flops(lengths)


def load(model, folder, dtype=jnp.float32, layout=None, as_bits=False):
    layout = layout or build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    checkpoint = Checkpoint(str(folder))
    table = table_of(model, checkpoint)
    return load_params(table, checkpoint, jnp.dtype(dtype), layout, as_bits)


def table_of(model, checkpoint):
    table = weight_table(model, checkpoint.tensors)
    return orient_experts(table, lambda name: checkpoint.locate(name)[1].shape)


def checked(checkpoint):
    """The whole model of a checkpoint and the table of its weights, as a run checks them."""
    config = read_model_config(checkpoint.file("config.json"))
    config = as_stored(config, checkpoint.tensors)
    model = Qwen2(config)
    table = table_of(model, checkpoint)
    check_tensors(checkpoint, table.values(), tensor_names(config, checkpoint.tensors))
    return model, table


def batch_of(lengths, size, vocabulary):
    """Token ids, segment ids and positions of rows of documents, and where each document is."""
    shape = len(lengths), size
    token_ids = np.random.default_rng(7).integers(0, vocabulary, shape, np.int32)
    segment_ids, positions, places = np.zeros(shape, np.int32), np.zeros(shape, np.int32), []
    for row, of_row in enumerate(lengths):
        for number, (end, length) in enumerate(zip(np.cumsum(of_row), of_row, strict=True), 1):
            place = row, slice(end - length, end)
            segment_ids[place], positions[place] = number, np.arange(length)
            places.append(place)
    return (token_ids, segment_ids, positions), places


def values_on(mesh, reference, hooks, batch, dtype=jnp.float32, kernels=None):
    """Hook -> its values, as a run receives them on a mesh of two hosts if it has eight devices."""
    config, devices = reference.config, usable_devices(all_of_host=True)[: math.prod(mesh.values())]
    layout = build_layout(devices, mesh, config.num_key_value_heads)
    grid = np.array(devices, object).reshape(-(-len(devices) // 4), -1)
    rows = HostRows(Mesh(grid, ("host", "device")))
    model = create_model_with_hooks(config, hooks, dtype, jnp.float32, kernels, layout)
    params = load(model, reference.folder, dtype, layout, as_bits=dtype == BFLOAT16)
    forward = jax.jit(model.apply, out_shardings=rows.outgoing(batch[0].shape[1], layout))
    inputs = [jax.device_put(array, rows.incoming()) for array in batch]
    found = forward({"params": params}, *inputs)
    for array in found.values():
        assert len({str(shard.index) for shard in array.addressable_shards}) == len(devices)
    return by_hook(model, rows.receive(found))


def by_hook(model, found):
    """What a model returned, as hook -> value."""
    arrays = {width_and_dtype: iter(np.asarray(array)) for width_and_dtype, array in found.items()}
    sizes = model.config.sizes_with(next(iter(found.values())).shape[2])
    values = {}
    for hook in model.hooks:
        width_and_dtype = hook.kind.width_and_dtype(sizes, model.activation_dtype)
        values[hook] = next(arrays[width_and_dtype])
    assert not [left for values_of_hooks in arrays.values() for left in values_of_hooks]
    return values


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def error_of(got, expected):
    """Largest difference in units of the expected tensor's RMS."""
    return np.abs(got - expected).max() / rms(expected)


def rounding_of(model, params, *batch):
    """Name of a hook -> how far two evaluations of this batch may be apart; padding left out.

    If the model returns which experts it chose, a row counts up to its first token whose choice
    depends on changes that are much larger than rounding's.
    """
    padding, sizes, apply = batch[1] == 0, model.config.sizes, jax.jit(model.apply)

    def values(params):
        found = by_hook(model, apply({"params": params}, *batch))
        return {hook.name: np.where(padding[..., None], 0, x) for hook, x in found.items()}

    expected = values(params)

    def with_the_same_experts(params):
        found = values(params)
        same = tokens_with_same_experts(found, expected)
        same = np.logical_and.accumulate(same, axis=1)[..., None]
        return {name: np.where(same, value, expected[name]) for name, value in found.items()}

    # The longest sums are over the width of an MLP, a token's other tokens or all heads.
    widths = [sizes[letter] for letter in "DFMOP" if letter in sizes]
    terms = max(*widths, sizes["N"] * sizes["H"], batch[0].shape[1])
    return allowed_errors(with_the_same_experts, params, terms)


def patterns(reference, token_ids, size):
    """Name of a hook -> what eager attention of transformers returns for one document."""
    import torch

    reference.model.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor(token_ids, dtype=torch.long)
        out = reference.model.model(ids, use_cache=False, output_attentions=True)
    reference.model.set_attn_implementation("sdpa")
    found = {}
    for layer, attention in enumerate(out.attentions):
        wide = np.pad(attention[0].numpy().swapaxes(0, 1), [(0, 0), (0, 0), (0, size)])
        wide = wide[..., :size].reshape(1, len(wide), -1)  # other positions have 0
        found[f"blocks.{layer}.attn.hook_pattern"] = wide
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that returns a model, its rows, and what transformers computes of each document;
    made once."""

    @functools.cache
    def get(name):
        shard = "100KB" if name == "sharded" else "1GB"
        reference = make_reference(tmp_path_factory.mktemp("model"), shard, **MODELS[name])
        if name in FLOAT8:
            reference = dequantised(reference, *FLOAT8[name][1:4])
        lengths, size = LONG if name in TINY else SHORT
        batch, places = batch_of(lengths, size, reference.config.vocab_size)
        alone = [reference.hooked(batch[0][row, where][None]) for row, where in places]
        if name in WITH_PATTERNS:
            for (row, where), values in zip(places, alone, strict=True):
                values |= patterns(reference, batch[0][row, where][None], size)
        return reference, batch, places, alone

    return get


@pytest.mark.parametrize("case", rows_in("float32"))
def test_every_hook_equals_transformers(models, request, case):
    if case.model in OPTIMIZED:
        request.getfixturevalue("optimized")
    reference, batch, places, alone = models(case.model)
    patterns = ["blocks.*.attn.hook_pattern"] * (case.model in WITH_PATTERNS)
    hooks = matching(reference.config, [*case.hooks, *patterns])
    found = values_on(MESHES[case.mesh], reference, hooks, batch, kernels=case.kernels)
    assert len(found) == len(hooks) > 3
    for (row, where), expected in zip(places, alone, strict=True):
        for hook, value in found.items():
            got, wanted = value[row, where], expected[hook.name][0]
            if hook.name == "logits.top_ids":  # two may be as likely but for rounding
                logits = expected["logits"][0]
                got, wanted = (np.take_along_axis(logits, x.astype(int), 1) for x in (got, wanted))
            if hook.name in PREDICTIONS:  # of a first token, the loss is not a number
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5, err_msg=hook.name)
            else:
                assert error_of(got, wanted) < TOLERANCE, (hook.name, row, where)
    if case.model in TINY:  # nothing is computed of rows that are padding
        assert not any(
            value[4:].any() for hook, value in found.items() if not hook.kind.is_after_layers
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=family(name)) for name in ("2 kv heads", "llama", "interleaved")],
)
def test_a_packed_document_has_the_values_that_it_has_alone(models, name):
    """The second document of each row is computed again, as the only one of its row."""
    reference, packed, places, _ = models(name)
    second = [place for place in places if place[1].start > 0]
    length = second[0][1].stop - second[0][1].start
    (token_ids, *_), size = packed, packed[0].shape[1]
    alone, _ = batch_of([[length]] * len(second), size, reference.config.vocab_size)
    for row, where in second:
        alone[0][row, :length] = token_ids[row, where]
    hooks = every_hook(reference.config)
    values = values_on(MESHES["one device"], reference, hooks, packed)
    values_alone = values_on(MESHES["one device"], reference, hooks, alone)
    for hook in hooks:
        for row, where in second:
            expected = values_alone[hook][row, :length]
            assert error_of(values[hook][row, where], expected) < 1e-5, (hook.name, row)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("case", rows_in("bfloat16"))
def test_bfloat16_is_as_close_to_float32_as_hugging_face_is(models, case):
    """The weights are bits, as a run on a CPU has them. Where kernels of experts are tried,
    tokens are few, and the hooks that they change are compared."""
    reference, config = models(case.model)[0], models(case.model)[0].config
    rows, length = (8, 30) if case.kernels else (16, 150)  # kernels take long
    batch, _ = batch_of([[length]] * rows, length, config.vocab_size)
    exact, rounded = reference.hooked(batch[0]), reference.in_bfloat16().hooked(batch[0])
    hooks = [*every_hook(config), *matching(config, ["loss", "entropy", "logits.top_logprobs"])]
    if case.kernels:
        hooks = [hook for hook in hooks if ".mlp." in hook.name or "resid" in hook.name]
    found = values_on(MESHES[case.mesh], reference, hooks, batch, BFLOAT16, case.kernels)
    ours, theirs = (
        tokens_with_same_experts(values, exact)
        for values in ({h.name: v for h, v in found.items()}, rounded)
    )
    assert few_more((~ours).sum(), (~theirs).sum())  # of all tokens, in any of their layers
    both = untouched(ours & theirs, config.sizes.get("W", 1))
    assert both.mean() > 0.5
    with_a_loss = both & np.roll(both, 1, axis=1)  # it is of the prediction at the token before
    with_a_loss[:, 0] = False
    for hook, value in found.items():
        if not hook.name.endswith(INDICES):
            counts = with_a_loss if hook.name == "loss" else both
            got, other, wanted = (x[counts] for x in (value, rounded[hook.name], exact[hook.name]))
            assert_rounded_alike(got, other, wanted, hook.name)


@family(QUICK_REFERENCE)
def test_logits_of_the_whole_model(models):
    reference, batch, places, alone = models(QUICK_REFERENCE)
    model = Qwen2(reference.config)
    logits = jax.jit(model.apply)({"params": load(model, reference.folder)}, *batch)
    for (row, where), expected in zip(places, alone, strict=True):
        assert error_of(logits[row, where], expected["logits"][0]) < TOLERANCE
