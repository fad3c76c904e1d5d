"""The two forms of the rotary embedding's pairs give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from activation_extraction.model.layers import others_of_pairs, others_of_pairs_on_tpu


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("half", [1, 8, 32])
def test_a_product_finds_the_other_of_each_pair_exactly(half, dtype):
    x = jax.random.normal(jax.random.key(half), (2, 5, 3, 64), dtype)
    found, product = others_of_pairs(half, x), others_of_pairs_on_tpu(half, x)
    assert found.dtype == product.dtype == jnp.float32
    np.testing.assert_array_equal(found, product)
    x = np.asarray(x.astype(jnp.float32))
    np.testing.assert_array_equal(found[..., :half], x[..., half : 2 * half])
    np.testing.assert_array_equal(found[..., half : 2 * half], x[..., :half])
    assert not np.asarray(found[..., 2 * half :]).any()
