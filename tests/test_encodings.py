"""float8, the encoding of activations in one byte per value: its formula and its errors."""

import ml_dtypes
import numpy as np
import pytest

from activation_extraction.common.encodings import VALUES, decode, encode, relative_errors

TINY = 2.0**-126


def activations(width):
    """Tokens of all kinds: usual ones, with outliers, tiny and huge ones, zeros, many ties."""
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
        values, scales = encode(x)
        wanted = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 448
        np.testing.assert_allclose(scales, np.maximum(wanted, TINY), rtol=2e-7)
        # ml_dtypes rounds once, to the nearest and ties to even
        assert values.tobytes() == (x / scales).astype(ml_dtypes.float8_e4m3fn).tobytes()
        assert values.dtype == ml_dtypes.float8_e4m3fn
        assert scales.shape == (len(x), 1) and scales.dtype == np.float32
        for dtype in ("float32", "bfloat16"):
            found = decode(values, scales, np.dtype(dtype))
            expected = (values.astype(np.float32) * scales).astype(dtype)
            assert found.dtype == dtype and found.tobytes() == expected.tobytes()


def test_every_tie_and_its_neighbours_are_rounded_as_by_ml_dtypes():
    """The largest value has 448, so that the scale is 1."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(VALUES).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(ties, np.float32(to)) for to in (0, 500)]
    x = np.concatenate([numbers, ties, *near])
    x = np.concatenate([x, -x])[None]
    values, scales = encode(x)
    assert scales[0, 0] == 1 and values.tobytes() == x.astype(VALUES).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(4099, 31), (3, 70001)])
def test_other_types_layouts_and_sizes_are_encoded_alike(shape, dtype):
    """That holds for more than is encoded at once, too."""
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    expected = [encode(row[None].astype(np.float32)) for row in x]
    for same in (x, x.copy(order="F"), np.repeat(x, 2, axis=1)[:, ::2]):
        values, scales = encode(same)
        assert values.tobytes() == b"".join(own.tobytes() for own, _ in expected)
        assert scales.tobytes() == b"".join(own.tobytes() for _, own in expected)
        decoded = values.astype(np.float32) * scales
        np.testing.assert_array_equal(decode(values, scales), decoded)


def test_the_error_is_relative_to_the_norm_of_the_token():
    x = np.array([[3, 4], [0, 0], [3e38, 0]], np.float32)
    decoded = np.array([[3, 5], [0, 0], [0, 0]], np.float32)
    np.testing.assert_allclose(relative_errors(x, decoded), [0.2, 0, 1])
    x = activations(256)[[0, 1, 4, 6, 8]]
    errors = relative_errors(x, decode(*encode(x)))
    assert (0 < errors).all() and (errors < 2.0**-4).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_token_that_is_not_finite_stays_visible(bad):
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 40] = bad
    found = decode(*encode(x))
    assert np.isfinite(found[[0, 2]]).all() and np.isnan(found[1]).all()
    values = np.array([[0x7F, 0xFF, 0x7E, 0]], np.uint8).view(VALUES)  # NaN, NaN, 448, 0
    for part in (values, values[:, 1:]):
        found = decode(part, np.ones((1, 1), np.float32))
        np.testing.assert_array_equal(found, part.astype(np.float32))
