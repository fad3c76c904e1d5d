"""Activations with a byte per value, `--activation_dtype float8`: its formula, and what is stored,
read, exported, measured and shown."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import main
from datasets import load_from_disk
from extractions import identity_of
from pods import first_documents
from runs_of_rows import decoded
from runs_to_read import check_moments
from safetensors.torch import load_file
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.encodings import VALUE_DTYPE, Float8Array
from activation_extraction.common.errors import InputError


def errors_of(found, x):
    """Returns the relative error of every token."""
    exact = x.astype(np.float64)
    return np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)


def float8_run(root, hooks, shard_format="safetensors", **options):
    identity = replace(identity_of(), activation_dtype="float8", integer_hooks=("choices",))
    return open_storage(root, hooks, identity=identity, shard_format=shard_format, **options)


def test_pickles_hold_no_float8(tmp_path):
    told = "activation_dtype float8: needs shard_format safetensors, found 'pickle'"
    with pytest.raises(InputError, match=f"^{told}$"):
        float8_run(tmp_path / "run", {0: "h"}, shard_format="pickle")
    assert not (tmp_path / "run").exists()


def test_what_a_reader_finds_without_this_program(tmp_path):
    """test_dataset.py has what this program reads."""
    values = np.random.default_rng(0).standard_normal((130, 33), np.float32)
    with float8_run(tmp_path / "run", {"h": "h", 5: "choices"}) as storage:
        for index, part in enumerate((values[:10], values[10:])):
            ids = np.arange(len(part), dtype=np.int32)
            storage.add_activation("h", part, index, "", ids)
            storage.add_activation(5, np.stack([ids] * 2, 1), index, "", ids)
    dataset = ActivationDataset(tmp_path / "run")
    assert [dtype.name for dtype in dataset.dtypes.values()] == ["float32", "int32"]
    assert next(dataset.batches(8, dtype="float16"))["choices"].dtype == np.int32
    tensors = load_file(tmp_path / "run/shard_0001.safetensors")
    stored, scale = tensors["h"], tensors["h.scale"].numpy()
    assert stored.dtype == torch.float8_e4m3fn and scale.dtype == "float32"
    np.testing.assert_array_equal(stored.float().numpy() * scale, decoded(values))
    assert "choices.scale" not in tensors
    flags = "--export_dir", tmp_path / "export", "--hook_names", "h"
    assert main("--export", "sae_lens", *flags, "--output_dir", tmp_path / "run") == 0
    exported = load_from_disk(str(tmp_path / "export/h")).with_format("numpy")[:]["h"]
    np.testing.assert_array_equal(exported, decoded(values)[None, :128], strict=True)


def test_samples_without_tokens_and_the_size_of_shards(tmp_path):
    """Stored bytes count, not those before encoding: a token of width 28 takes 32, not 112."""
    with float8_run(tmp_path, {0: "h"}, shard_size_gb=192 / 10**9) as storage:
        for index, tokens in enumerate((2, 2, 2, 2, 2, 2, 2, 0)):
            values = np.full((tokens, 28), 2, np.float32)
            storage.add_activation(0, values, index, "text", [0] * tokens)
    assert [commit.tokens for commit in storage.new_commits] == [6, 6, 2]
    dataset = ActivationDataset(tmp_path)
    assert [sample["h"].shape for sample in dataset] == [(2, 28)] * 7 + [(0, 28)]


def test_some_tokens_are_measured_of_a_shard_that_has_many(tmp_path, check):
    """At most 1024 of a kind are measured. The shard has more than a thread encodes, or sums up,
    at once."""
    width, lengths = 1024, (9000, 500, 2500, 2000)
    chance = np.random.default_rng(0)
    exact = [chance.standard_normal((tokens, width), np.float32) for tokens in lengths]
    with float8_run(tmp_path, {0: "h"}, shard_size_gb=1) as storage:
        for index, values in enumerate(exact):
            storage.add_activation(0, values, index, "text", np.arange(len(values)))
    found = [decoded(values) for values in exact]
    dataset = ActivationDataset(tmp_path)
    for expected, sample in zip(found, dataset, strict=True):
        np.testing.assert_array_equal(sample["h"], expected)
    every_error = [errors_of(*both) for both in zip(found, exact, strict=True)]
    others = np.concatenate([errors[1:] for errors in every_error])
    measured = np.array([errors[0] for errors in every_error]), others[:: -(-len(others) // 1024)]
    for of_kind, told in zip(measured, dataset.statistics["h"].error.values(), strict=True):
        assert told.tokens == len(of_kind)
        assert (told.mean, told.worst) == pytest.approx((of_kind.mean(), of_kind.max()))
    others = np.concatenate([values[1:] for values in found]).astype(np.float64)
    check_moments(dataset.statistics["h"].without_first_token, others)
    assert check(tmp_path) == []


# The formula.


def activations(width):
    """Returns tokens of all kinds: usual, tiny and huge ones, with outliers, zeros, many ties."""
    chance = np.random.default_rng(width)
    x = chance.standard_normal((9, width)).astype(np.float32)
    x[1, chance.integers(width)] *= 3000  # a dimension that is always large
    x[2] *= np.float32(1e-41)  # subnormal numbers
    x[3] *= np.float32(3e-39)  # some are, some are not
    x[4] *= np.float32(1e30)
    x[5] = -0.0
    x[6, ::2] = 0
    x[7] *= np.exp(chance.uniform(-40, 10, width)).astype(np.float32)  # of all sizes
    x[8] = np.round(x[8] * 4) / 4
    return x


def test_values_are_those_of_the_formula_and_decoding_multiplies_them_by_the_scale():
    for width in (*range(1, 71), 256):
        x = activations(width)
        encoded = Float8Array.of(x)
        values, scales = encoded.values, encoded.scales
        wanted = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 448
        np.testing.assert_allclose(scales, np.maximum(wanted, 2.0**-126), rtol=2e-7)
        # ml_dtypes rounds once, to the nearest and ties to even
        assert values.tobytes() == (x / scales).astype(ml_dtypes.float8_e4m3fn).tobytes()
        assert values.dtype == ml_dtypes.float8_e4m3fn
        assert scales.shape == (len(x), 1) and scales.dtype == np.float32
        for dtype in ("float32", "bfloat16"):
            found = encoded.decode(np.dtype(dtype))
            expected = (values.astype(np.float32) * scales).astype(dtype)
            assert found.dtype == dtype and found.tobytes() == expected.tobytes()


def test_every_tie_and_its_neighbours_are_rounded_as_by_ml_dtypes():
    """The largest value has 448, so that the scale is 1."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(VALUE_DTYPE).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(ties, np.float32(to)) for to in (0, 500)]
    x = np.concatenate([numbers, ties, *near])
    x = np.concatenate([x, -x])[None]
    encoded = Float8Array.of(x)
    assert encoded.scales[0, 0] == 1 and encoded.values.tobytes() == x.astype(VALUE_DTYPE).tobytes()


@pytest.mark.parametrize("shape", [(4099, 31), (3, 70001)])
def test_other_types_layouts_and_sizes_are_encoded_alike(shape):
    """The second is more than is encoded at once."""
    x = np.random.default_rng(0).standard_normal(shape).astype("bfloat16")
    expected = [Float8Array.of(row[None].astype(np.float32)) for row in x]
    for same in (x, x.copy(order="F"), np.repeat(x, 2, axis=1)[:, ::2]):
        encoded = Float8Array.of(same)
        assert encoded.values.tobytes() == b"".join(row.values.tobytes() for row in expected)
        assert encoded.scales.tobytes() == b"".join(row.scales.tobytes() for row in expected)
        product = encoded.values.astype(np.float32) * encoded.scales
        np.testing.assert_array_equal(encoded.decode(), product)


def test_a_token_that_is_not_finite_stays_visible():
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 40] = -np.inf
    found = Float8Array.of(x).decode()
    assert np.isfinite(found[[0, 2]]).all() and np.isnan(found[1]).all()
    values = np.array([[0x7F, 0xFF, 0x7E, 0]], np.uint8).view(VALUE_DTYPE)  # NaN, NaN, 448, 0
    for part in (values, values[:, 1:]):
        found = Float8Array(part, np.ones((1, 1), np.float32)).decode()
        np.testing.assert_array_equal(found, part.astype(np.float32))


# Runs of the command.

STORED = ["blocks.0.hook_attn_out", "blocks.1.mlp.hook_post", "blocks.3.hook_resid_post"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--no_data_parallel"],
        pytest.param(["--mesh_type", "2d", "--positions", "every:3"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_a_run_stores_what_numpy_makes_of_a_plain_run(demo_inputs, tmp_path, capsys, flags):
    text = first_documents(demo_inputs, tmp_path / "few.parquet", 24)
    usual = ["--model_path", demo_inputs / "model", "--dataset_path", text, "--hook_names", *STORED]
    usual += ["--max_seq_length", 64, "--batch_size", 4, "--shard_size_gb", 2e-4]
    usual += ["--shard_format", "safetensors", *flags]
    runs = {}
    for dtype in ("float8", "float32"):
        out = tmp_path / dtype
        assert main(*usual, "--activation_dtype", dtype, "--output_dir", out) == 0
        runs[dtype] = ActivationDataset(out)
    dataset, plain = runs["float8"], runs["float32"]
    assert dataset.tokens == plain.tokens and len(dataset) == 24
    errors, first = {hook: [] for hook in STORED}, []
    others = values = 0
    for ours, theirs in zip(dataset, plain, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.position, theirs.position)
        first.append(ours.position == 0)
        for hook in STORED:
            others += int((decoded(theirs[hook]) != ours[hook]).sum())
            values += theirs[hook].size
            errors[hook].append(errors_of(ours[hook], theirs[hook]))
    assert others <= values * 1e-4, (others, values)  # another program may round otherwise
    assert main("--verify", "--output_dir", tmp_path / "float8") == 0
    capsys.readouterr()
    assert main("--status", "--output_dir", tmp_path / "float8") == 0
    shown, sinks = capsys.readouterr().out.splitlines(), np.concatenate(first)
    for hook, in_metadata in zip(STORED, dataset.metadata["hooks"], strict=True):
        (line,) = [line for line in shown if line.startswith(hook)]
        of_tokens = np.concatenate(errors[hook])
        for kind, chosen in (("sinks", sinks), ("others", ~sinks)):
            found = in_metadata["error"][kind]
            assert found["tokens"] == chosen.sum()
            assert found["mean"] == pytest.approx(of_tokens[chosen].mean(), rel=1e-3)
            assert found["worst"] == pytest.approx(of_tokens[chosen].max(), rel=2e-2)
            assert f"{found['mean']:.2%}" in line and f"{found['worst']:.2%}" in line
