"""Measures the fastest matrix products of this machine, which other benchmarks call its peak.

`python benchmarks/peak.py jax` (or `torch`) prints one JSON object, dtype -> product -> FLOP/s.
Products of bfloat16 accumulate in float32, as in the models of both libraries.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence

Product = tuple[int, int, int]  # (rows, inner, columns)
CPU_PRODUCTS: tuple[Product, ...] = (
    (2048, 896, 4864),
    (2048, 4864, 896),
    (16384, 896, 4864),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
)
GPU_PRODUCTS: tuple[Product, ...] = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 3584, 18944),
    (16384, 18944, 3584),
)
DTYPES = ("bfloat16", "float32")


def jax_product(product: Product, dtype: str) -> Callable[[], object]:
    """Returns a function that computes one product with JAX and waits for its end.

    Args:
        product: The rows and the inner size of the first operand, and the columns of the second.
        dtype: "bfloat16" or "float32".
    """
    import jax
    import jax.numpy as jnp

    rows, inner, columns = product
    x = jax.random.normal(jax.random.key(0), (rows, inner), dtype)
    y = jax.random.normal(jax.random.key(1), (columns, inner), dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    wide = jnp.float32 if jax.default_backend() == "cpu" else jnp.dtype(dtype)

    @jax.jit
    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        product = jnp.einsum(
            "rk,ck->rc", x, y, precision=precision, preferred_element_type="float32"
        )
        return product.astype(wide)

    return lambda: multiply(x, y).block_until_ready()


def torch_product(product: Product, dtype: str) -> Callable[[], object]:
    """Does the same as `jax_product` with PyTorch, on a GPU if there is one."""
    import torch

    rows, inner, columns = product
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, inner, dtype=getattr(torch, dtype), device=device)
    y = torch.randn(columns, inner, dtype=getattr(torch, dtype), device=device)

    def multiply() -> object:
        with torch.inference_mode():
            result = torch.nn.functional.linear(x, y)
            if device == "cuda":
                torch.cuda.synchronize()
            return result

    return multiply


def rate(action: Callable[[], object], operations: float, seconds: float) -> float:
    """Calls a function for some time, after two calls that do not count.

    Args:
        action: The function.
        operations: The operations of one call.
        seconds: The seconds for which it is called, at least.

    Returns:
        Operations per second.
    """
    action()
    action()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        action()
        calls += 1
    return calls * operations / (time.perf_counter() - began)


def measure(
    library: str, products: Sequence[Product], dtypes: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Measures products in one library.

    Args:
        library: "jax" or "torch".
        products: The products.
        dtypes: The dtypes of their operands.
        seconds: The seconds for each product.

    Returns:
        dtype -> the sizes of the product, joined by "x" -> FLOP/s.
    """
    make = {"jax": jax_product, "torch": torch_product}[library]
    rates: dict[str, dict[str, float]] = {dtype: {} for dtype in dtypes}
    for dtype in dtypes:
        for product in products:
            name = "x".join(map(str, product))
            rates[dtype][name] = rate(make(product, dtype), 2.0 * math.prod(product), seconds)
    return rates


def best(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the FLOP/s of the fastest product by dtype.

    Args:
        rates: The JSON of this script: dtype -> product -> FLOP/s.
    """
    return {dtype: max(products.values()) for dtype, products in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("jax", "torch"))
    parser.add_argument("--gpu", action="store_true", help="products for a GPU, which are larger")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--seconds", type=float, default=0.5, help="per product (default: 0.5)")
    options = parser.parse_args()
    products = GPU_PRODUCTS if options.gpu else CPU_PRODUCTS
    print(json.dumps(measure(options.library, products, options.dtypes, options.seconds)))


if __name__ == "__main__":
    main()
