"""The fastest matrix product that this machine shows: what shares of the peak are measured by.

`python benchmarks/peak.py jax` or `torch`; prints one JSON object, dtype -> product -> FLOP/s.
bfloat16 accumulates in float32, which is what both libraries' models do.
"""

import argparse
import json
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
    """A function that multiplies on JAX's device and returns when it is done."""
    import jax
    import jax.numpy as jnp

    rows, inner, columns = product
    x = jax.random.normal(jax.random.key(0), (rows, inner), dtype)
    y = jax.random.normal(jax.random.key(1), (columns, inner), dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    wide = jnp.float32 if jax.default_backend() == "cpu" else jnp.dtype(dtype)

    @jax.jit
    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        found = jnp.einsum("rk,ck->rc", x, y, precision=precision, preferred_element_type="float32")
        return found.astype(wide)

    return lambda: multiply(x, y).block_until_ready()


def torch_product(product: Product, dtype: str) -> Callable[[], object]:
    """As `jax_product`, with PyTorch, on its GPU when it has one."""
    import torch

    rows, inner, columns = product
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, inner, dtype=getattr(torch, dtype), device=device)
    y = torch.randn(columns, inner, dtype=getattr(torch, dtype), device=device)

    def multiply() -> object:
        with torch.inference_mode():
            found = torch.nn.functional.linear(x, y)
            if device == "cuda":
                torch.cuda.synchronize()
            return found

    return multiply


def rate(action: Callable[[], object], operations: float, seconds: float) -> float:
    """Operations per second over at least `seconds`, after two calls that do not count."""
    action(), action()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        action()
        calls += 1
    return calls * operations / (time.perf_counter() - began)


def measure(
    library: str, products: Sequence[Product], dtypes: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """dtype -> product -> FLOP/s."""
    make = {"jax": jax_product, "torch": torch_product}[library]
    return {
        dtype: {
            "x".join(map(str, (rows, inner, columns))): rate(
                make((rows, inner, columns), dtype), 2.0 * rows * inner * columns, seconds
            )
            for rows, inner, columns in products
        }
        for dtype in dtypes
    }


def best(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """dtype -> FLOP/s of its fastest product."""
    return {dtype: max(products.values()) for dtype, products in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("jax", "torch"))
    parser.add_argument("--gpu", action="store_true", help="products for a GPU, which are larger")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--seconds", type=float, default=0.5, help="per product (default: 0.5)")
    given = parser.parse_args()
    products = GPU_PRODUCTS if given.gpu else CPU_PRODUCTS
    print(json.dumps(measure(given.library, products, given.dtypes, given.seconds)))


if __name__ == "__main__":
    main()
