"""The model against Hugging Face transformers on torch, hook by hook."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Reference, make_reference, references
from delta_reference import untouched
from flax.traverse_util import flatten_dict
from rounding import allowed_errors, assert_rounded_alike

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.decoder import rows_at_once
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import load_params
from benchmarks.agreement import few_more, same_experts
from qwen2_jax import Qwen2, convert_hf_to_jax_weights, weight_table
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

TOLERANCE = 1e-4  # of the reference tensor's RMS
LENGTH = 150  # more than one block of queries


def load(model, folder, dtype=jnp.float32):
    layout = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    checkpoint = Checkpoint(str(folder))
    return load_params(weight_table(model, checkpoint.tensors), checkpoint, dtype, layout)


def rows(vocab_size, shape=(2, LENGTH)):
    """Token ids, segment ids and positions of rows that are one sample each."""
    token_ids = np.random.default_rng(0).integers(0, vocab_size, shape, np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return token_ids, np.ones(shape, np.int32), positions


def packed(vocab_size, ends=(20, 60)):
    """Eight rows of two samples, which end there; what is left of a row is padding."""
    token_ids, _, positions = rows(vocab_size, (8, 64))
    segment_ids = np.where(positions < ends[0], 1, np.where(positions < ends[1], 2, 0))
    positions = np.where(segment_ids == 2, positions - ends[0], positions)
    return token_ids, segment_ids.astype(np.int32), positions.astype(np.int32)


def flops_of(config, layers, lengths):
    """Of the first layers, for samples of these lengths."""
    hooks = hook_table(config).of_layers([layers - 1], "residual", config.num_hidden_layers)
    return create_model_with_hooks(config, hooks).flops(lengths)


def every_hook(config):
    every = hook_table(config).all_hooks(config.num_hidden_layers)
    return [hook for hook in every if not hook.kind.value.startswith("predicted.")]


PREDICTIONS = "loss", "entropy", "logits.top_ids", "logits.top_logprobs", "logits"


def predictions(config, names=PREDICTIONS):
    return [*hook_table(config).matching(names, config.num_hidden_layers).values()]


def run(model, params, *batch):
    """Hook -> its value, NumPy."""
    return by_hook(model, compiled(model)({"params": params}, *batch))


@functools.cache
def compiled(model):
    """Traced once for all batches of a shape."""
    return jax.jit(model.apply)


def by_hook(model, found):
    """What a model returned, as hook -> value."""
    arrays = {form: iter(np.asarray(of_form)) for form, of_form in found.items()}
    sizes = model.config.sizes | {"S": next(iter(found.values())).shape[2]}
    dtype = model.activation_dtype
    values = {hook: next(arrays[hook.kind.form(sizes, dtype)]) for hook in model.hooks}
    assert not [left for of_form in arrays.values() for left in of_form]
    return values


def error_of(got, expected):
    """Largest difference in units of the expected tensor's RMS."""
    return np.abs(got - expected).max() / rms(expected)


def rounding_of(model, params, *batch):
    """Name of a hook -> how far two evaluations of this batch may be apart; padding left out.

    If the model returns which experts it chose, a row counts up to its first token whose choice
    depends on changes that are much larger than rounding's.
    """
    padding, sizes = batch[1] == 0, model.config.sizes

    def values(params):
        found = run(model, params, *batch)
        return {hook.name: np.where(padding[..., None], 0, x) for hook, x in found.items()}

    expected = values(params)

    def with_the_same_experts(params):
        found = values(params)
        same = np.logical_and.accumulate(same_experts(found, expected), axis=1)[..., None]
        return {name: np.where(same, value, expected[name]) for name, value in found.items()}

    # The longest sums are over the width of an MLP, a token's other tokens or all heads.
    widths = [sizes[letter] for letter in "DFMOP" if letter in sizes]
    terms = max(*widths, sizes["N"] * sizes["H"], batch[0].shape[1])
    return allowed_errors(with_the_same_experts, params, terms)


def assert_same_but_for_rounding(found, expected, allowed):
    """found, expected: hook -> value. allowed: what `rounding_of` gives."""
    values = {hook.name: value for hook, value in expected.items()}
    for name, got in {hook.name: value for hook, value in found.items()}.items():
        assert np.abs(got - values[name]).max() <= allowed[name], name


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.usefixtures("optimized_for_some")
def test_bfloat16_is_as_close_to_float32_as_hugging_face_is(reference: Reference):
    config = reference.config
    batch = rows(config.vocab_size)
    exact = reference.hooked(batch[0])
    rounded = reference.in_bfloat16().hooked(batch[0])
    predicted = predictions(config, ["loss", "entropy", "logits.top_logprobs"])
    hooks = [*every_hook(config), *predicted]
    model = create_model_with_hooks(config, hooks, jnp.bfloat16)
    found = run(model, load(model, reference.folder, jnp.bfloat16), *batch)
    ours, theirs = (
        same_experts(values, exact) for values in ({h.name: v for h, v in found.items()}, rounded)
    )
    assert few_more((~ours).sum(), (~theirs).sum())  # of 300 tokens, in any of their layers
    both = untouched(ours & theirs, config.sizes.get("W", 1))
    assert both.sum() > 150
    with_a_loss = both & np.roll(both, 1, axis=1)  # it is of the prediction at the token before
    with_a_loss[:, 0] = False
    for hook, value in found.items():
        assert value.dtype == np.float32 or hook not in predicted
        if not hook.name.endswith(INDICES):
            counts = with_a_loss if hook.name == "loss" else both
            got, other, wanted = (x[counts] for x in (value, rounded[hook.name], exact[hook.name]))
            assert_rounded_alike(got, other, wanted, hook.name)


INDICES = "mlp.hook_expert_indices"


@pytest.mark.usefixtures("optimized_for_some")
@pytest.mark.long
@references("two_kv_heads_tied", "qwen3_biased_yarn")
def test_weights_as_bits_are_the_same_weights(reference: Reference):
    """On the CPU a run hands bfloat16 over as bits, those of the final norm too."""
    config = reference.config
    model = create_model_with_hooks(config, every_hook(config), jnp.bfloat16)
    numbers = load(model, reference.folder, jnp.bfloat16)
    bits = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16), numbers)
    batch = rows(config.vocab_size, (1, 20))
    expected = run(model, numbers, *batch)
    for hook, value in run(model, bits, *batch).items():
        np.testing.assert_array_equal(value, expected[hook], err_msg=hook.name)


def test_logits_choose_the_same_next_tokens(reference: Reference):
    import torch

    config = reference.config
    model = Qwen2(config)
    params = load(model, reference.folder)
    batch = rows(config.vocab_size)
    logits = np.asarray(compiled(model)({"params": params}, *batch))
    with torch.no_grad():
        expected = reference.model(torch.tensor(batch[0], dtype=torch.long)).logits.numpy()
    assert error_of(logits, expected) < TOLERANCE
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def test_conversion_in_memory_equals_loading(reference: Reference):
    model = create_model_with_hooks(reference.config, every_hook(reference.config))
    tensors = {name: tensor.numpy() for name, tensor in reference.model.state_dict().items()}
    converted = flatten_dict(convert_hf_to_jax_weights(tensors, model))
    loaded = flatten_dict(load(model, reference.folder))
    assert converted.keys() == loaded.keys()
    for path, value in converted.items():
        np.testing.assert_array_equal(value, loaded[path])


WINDOW = dict(use_sliding_window=True, sliding_window=300, max_window_layers=1)


@pytest.mark.parametrize(
    "dtype,window", [(jnp.float32, {}), (jnp.bfloat16, {}), (jnp.float32, WINDOW)]
)
@pytest.mark.long
def test_rows_go_through_a_layer_in_groups_on_one_cpu(tmp_path, dtype, window):
    """The values are those of all rows together, and rows of padding cost nothing."""
    reference = make_reference(tmp_path, num_hidden_layers=2, num_key_value_heads=2, **window)
    config = reference.config
    alone = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    assert rows_at_once(alone, 6, 1024) == 2 and rows_at_once(alone, 5, 1024) == 1
    assert rows_at_once(alone, 6, 64) == 6 and rows_at_once(alone, 6, 4096) == 1
    two = build_layout(jax.devices()[:2], {"model": 2}, kv_heads=2)
    assert rows_at_once(two, 6, 1024) == 6
    token_ids, segment_ids, positions = rows(config.vocab_size, (4, 1024))
    segment_ids = segment_ids * np.array([1, 1, 0, 0], np.int32)[:, None]
    hooks = every_hook(config)
    batch = token_ids, segment_ids, positions

    def values(dtype, layout=None):
        model = create_model_with_hooks(config, hooks, dtype, layout=layout)
        params = load(model, reference.folder, dtype)
        return model, params, run(model, params, *batch)

    *_, grouped = values(dtype, alone)
    *_, whole = values(dtype)
    model, params, exact = values(jnp.float32)
    in_layers = [value for hook, value in grouped.items() if not hook.kind.at_end]
    assert not any(value[2:].any() for value in in_layers)  # nothing is computed
    grouped, whole, exact = (
        {hook: value[:2] for hook, value in found.items()} for found in (grouped, whole, exact)
    )
    if dtype == jnp.float32:
        assert_same_but_for_rounding(grouped, exact, rounding_of(model, params, *batch))
    else:
        for hook in hooks:
            assert_rounded_alike(grouped[hook], whole[hook], exact[hook], hook.name)


V4_CONFIG = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_config_of_transformers_4_and_5_agree():
    v5 = V4_CONFIG | {
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "layer_types": ["full_attention"] * 24,
        "sliding_window": None,
    }
    del v5["rope_theta"]
    config = FAMILIES.config(V4_CONFIG)
    assert config == FAMILIES.config(v5)
    assert config.rope.theta == 1e6 and config.head_dim == 64 and config.tie_word_embeddings


@pytest.mark.parametrize(
    "change,named",
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported are: qwen2"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "mixtral"}, r"are: qwen2 \(.*, qwen3 \(.*, qwen3_5_moe \(Qwen3.5 35B"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, "'qwen2_vl' .a model with vision inputs"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "factor must be a positive number",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "su", "rope_theta": 1e6}},
            "rope_type 'su' is not supported; default, linear and yarn are",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a positive"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer 0 slides, but there is no window"),
        ({"layer_types": ["linear_attention"] * 24}, "layer 0 is 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "only one flat set"),
        ({"rope_scaling": "yarn"}, "'rope_parameters' with value 'yarn'"),
        ({"rope_theta": "abc"}, "rope_theta must be a positive number, found 'abc'"),
        ({"rope_theta": None}, "rope_theta must be a positive number, found None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq.: quantised"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, found 0"),
        ({"num_attention_heads": "14"}, "'num_attention_heads' expected int, got str"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 63}, "even rotary dimension.* `head_dim`=63"),
    ],
)
def test_other_architectures_are_refused_by_name(change, named):
    with pytest.raises(InputError, match=named) as refused:
        FAMILIES.config(V4_CONFIG | change)
    assert "\n" not in str(refused.value)


def test_a_sliding_window_that_no_layer_uses_is_accepted():
    FAMILIES.config(V4_CONFIG | {"use_sliding_window": True, "max_window_layers": 24})


@pytest.mark.slow
def test_true_half_billion_shape_equals_hugging_face(tmp_path):
    """Of every layer, the residual stream and what is added to it. Hooks of every kind are compared
    at small sizes: after 24 layers, rounding shows in products of two values."""
    reference = make_reference(tmp_path, **V4_CONFIG)
    config = reference.config
    assert config == FAMILIES.config(V4_CONFIG)
    wanted = ["blocks.*.hook_resid_*", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out"]
    hooks = list(HOOKS.matching(wanted, config.num_hidden_layers).values())
    model = create_model_with_hooks(config, hooks)
    batch = rows(config.vocab_size, (1, 160))
    expected = reference.hooked(batch[0])
    got = run(model, load(model, tmp_path), *batch)
    assert len(got) == 5 * 24
    for hook, value in got.items():
        assert error_of(value, expected[hook.name]) < TOLERANCE, hook.name
