"""The encodings of activations in one byte per value: formulas, layouts, and JAX beside NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from activation_extraction.common.encodings import (
    ENCODINGS,
    ERROR_BYTES,
    FLOAT8,
    INT8,
    TINY,
    decode,
    encode,
    unpack,
)

both = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=list(ENCODINGS))


def activations(width, tokens=12):
    """Tokens of all kinds: usual ones, with outliers, tiny and huge ones, zeros."""
    chance = np.random.default_rng(width)
    x = chance.standard_normal((tokens, width)).astype(np.float32)
    x[1, chance.integers(width)] *= 3000  # a dimension that is always large
    x[2] *= np.float32(1e-41)  # subnormal numbers
    x[3] *= np.float32(3e-39)  # some are, some are not
    x[4] *= np.float32(1e30)
    x[5] = 0
    x[6, ::2] = 0
    x[7] *= np.exp(chance.uniform(-40, 10, width)).astype(np.float32)  # of all sizes
    x[8] = np.round(x[8] * 4) / 4  # many ties
    x[9] *= np.float32(1e-6)  # the scales of int8 are subnormal
    x[10] = -0.0
    x[11] *= np.float32(2000)
    return x


@both
def test_jax_gives_the_bits_of_numpy(encoding):
    on_device = jax.jit(lambda x: encode(x, encoding, jnp))
    for width in range(1, 71):
        x = activations(width)
        expected, found = encode(x, encoding), np.asarray(on_device(x))
        assert expected.dtype == found.dtype == np.uint8
        assert expected.shape == found.shape == (len(x), encoding.row_bytes(width))
        same = expected[:, :-ERROR_BYTES] == found[:, :-ERROR_BYTES]
        assert same.all(), (width, np.argwhere(~same))
        errors = [unpack(packed, encoding)[2] for packed in (expected, found)]
        np.testing.assert_allclose(*errors, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@both
def test_other_types_and_shapes_are_encoded_alike(encoding, dtype):
    x = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(dtype)
    found = np.asarray(jax.jit(lambda x: encode(x, encoding, jnp))(x))
    expected = encode(x.reshape(6, 50).astype(np.float32), encoding).reshape(2, 3, -1)
    np.testing.assert_array_equal(found[..., :-ERROR_BYTES], expected[..., :-ERROR_BYTES])


@pytest.mark.parametrize("width", [*range(1, 71), 256])
def test_values_of_float8_are_those_of_the_formula(width):
    x = activations(width)
    x[np.abs(x) < TINY] = 0
    values, scales, _ = unpack(encode(x, FLOAT8), FLOAT8)
    wanted = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 448
    np.testing.assert_allclose(scales, np.maximum(wanted, TINY), rtol=2e-7)
    # ml_dtypes rounds once, to the nearest and ties to even
    expected = (x / scales).astype(ml_dtypes.float8_e4m3fn)
    assert values.tobytes() == expected.tobytes()
    assert values.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (len(x), 1)


@pytest.mark.parametrize("width", [*range(1, 71), 256])
def test_values_of_int8_are_those_of_the_formula(width):
    x = activations(width)
    x[4] = 1e6  # 1e30 is too large
    x[np.abs(x) < TINY] = 0
    values, scales, _ = unpack(encode(x, INT8), INT8)
    assert values.dtype == np.int8 and scales.dtype == np.float16
    assert scales.shape == (len(x), -(-width // 32))
    for number in range(scales.shape[1]):
        block, own = x[:, number * 32 :][:, :32], scales[:, number].astype(np.float64)
        wanted = np.abs(block).max(axis=1).astype(np.float64) / 127
        assert (own >= wanted * (1 - 1e-6)).all()  # never less than needed
        smaller = np.nextafter(scales[:, number], np.float16(0)).astype(np.float64)
        assert ((smaller < wanted) | (smaller == 0)).all()  # and no more
        expected = np.rint(block / own[:, None].astype(np.float32))
        np.testing.assert_array_equal(values[:, number * 32 :][:, :32], expected)
    assert np.abs(values.astype(int)).max() <= 127


@both
def test_rows_say_how_wide_the_activation_was(encoding):
    rows = {encoding.row_bytes(width): width for width in range(1, 3000)}
    assert [encoding.width_of(row) for row in rows] == list(rows.values())
    for row in {*range(1, 200)} - set(rows):
        with pytest.raises(ValueError, match=f"{row} bytes per token are no packed"):
            encoding.width_of(row)
    sizes = {"float8": (896 + 4, 896), "int8": (896 + 28 * 2, 32)}
    assert (encoding.stored_bytes(896), encoding.per_scale(896)) == sizes[encoding.name]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 31, 33, 64, 70001])
@both
def test_decoding_multiplies_by_the_scale(encoding, width, dtype):
    tokens = 3 if width > 1000 else 4099  # more than are decoded at once
    chance = np.random.default_rng(width)
    x = chance.standard_normal((tokens, width), np.float32)
    values, scales, errors = unpack(encode(x, encoding), encoding)
    scale = np.repeat(scales.astype(np.float32), encoding.per_scale(width), axis=1)[:, :width]
    expected = values.astype(np.float32) * scale
    found = decode(values, scales, np.dtype(dtype))
    assert found.dtype == dtype
    assert found.tobytes() == expected.astype(dtype).tobytes()
    assert decode(values[1:2], scales[1:2]).tobytes() == expected[1].tobytes()
    apart = np.linalg.norm((expected - x).astype(np.float64), axis=1)
    np.testing.assert_allclose(errors, apart / np.linalg.norm(x, axis=1), rtol=1e-4, atol=1e-7)
    assert errors.max() < {"float8": 2**-4, "int8": 32**0.5 / 254}[encoding.name] * 1.001


@both
def test_zeros_stay_zeros(encoding):
    x = np.zeros((3, 40), np.float32)
    values, scales, errors = unpack(encode(x, encoding), encoding)
    assert not decode(values, scales).any() and (scales > 0).all() and not errors.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@both
def test_what_is_not_finite_stays_visible(encoding, bad):
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 40] = bad
    for packed in (
        encode(x, encoding),
        np.asarray(jax.jit(encode, static_argnums=(1, 2))(x, encoding, jnp)),
    ):
        found = decode(*unpack(packed, encoding)[:2])
        assert np.isfinite(found[[0, 2]]).all()
        assert np.isnan(found[1, 32:64]).all()
        assert np.isnan(found[1]).all() or encoding is INT8


def test_int8_cannot_hold_values_above_8_million():
    x = np.full((2, 40), 8.3e6, np.float32)
    x[1] = 8.4e6
    found = decode(*unpack(encode(x, INT8), INT8)[:2])
    np.testing.assert_allclose(found[0], x[0], rtol=1e-3)
    assert np.isnan(found[1]).all()


def test_float8_that_is_nan_decodes_to_nan():
    values = np.array([[0x7F, 0xFF, 0x7E, 0]], np.uint8).view(FLOAT8.values)
    for part in (values, values[:, 1:]):
        found = decode(part, np.ones((1, 1), np.float32))[0]
        np.testing.assert_array_equal(found, part.astype(np.float32)[0])
