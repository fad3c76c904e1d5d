"""Measures the speed of matrix products on this machine, in JAX or PyTorch.

Other benchmarks call the speed of the fastest product the peak of the machine.
`python benchmarks/peak.py jax` (or `torch`) prints one JSON object: dtype -> sizes of the product
-> FLOP/s. Products of bfloat16 values are summed in float32, as in the models of JAX and of
PyTorch.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence

# The sizes (rows, inner, columns) of a product of two matrices, (rows, inner) and (inner, columns).
ProductSizes = tuple[int, int, int]
CPU_PRODUCT_SIZES: tuple[ProductSizes, ...] = (
    (2048, 896, 4864),
    (2048, 4864, 896),
    (16384, 896, 4864),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
)
GPU_PRODUCT_SIZES: tuple[ProductSizes, ...] = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 3584, 18944),
    (16384, 18944, 3584),
)
DTYPES = ("bfloat16", "float32")


def jax_product(product_sizes: ProductSizes, dtype: str) -> Callable[[], object]:
    """Returns a function that computes a product of random matrices with JAX.

    Args:
        product_sizes: The sizes of the matrices (see `ProductSizes`).
        dtype: The dtype of the matrices, "bfloat16" or "float32".

    Returns:
        The function, which takes no arguments and waits until the product is computed.
    """
    import jax
    import jax.numpy as jnp

    num_rows, inner_size, num_columns = product_sizes
    x = jax.random.normal(jax.random.key(0), (num_rows, inner_size), dtype)
    y = jax.random.normal(jax.random.key(1), (num_columns, inner_size), dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    result_dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.dtype(dtype)

    @jax.jit
    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        float32_product = jnp.einsum(
            "rk,ck->rc", x, y, precision=precision, preferred_element_type="float32"
        )
        return float32_product.astype(result_dtype)

    return lambda: multiply(x, y).block_until_ready()


def torch_product(product_sizes: ProductSizes, dtype: str) -> Callable[[], object]:
    """Returns a function that computes a product of random matrices with PyTorch.

    PyTorch uses a GPU if there is one, otherwise the CPU.

    Args:
        product_sizes: The sizes of the matrices (see `ProductSizes`).
        dtype: The dtype of the matrices, "bfloat16" or "float32".

    Returns:
        The function, which takes no arguments and waits until the product is computed.
    """
    import torch

    num_rows, inner_size, num_columns = product_sizes
    device_name = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(num_rows, inner_size, dtype=getattr(torch, dtype), device=device_name)
    y = torch.randn(num_columns, inner_size, dtype=getattr(torch, dtype), device=device_name)

    def multiply() -> object:
        with torch.inference_mode():
            product_matrix = torch.nn.functional.linear(x, y)
            if device_name == "cuda":
                torch.cuda.synchronize()
            return product_matrix

    return multiply


def operations_per_second(
    function: Callable[[], object], operations: float, seconds: float
) -> float:
    """Measures the speed of a function, after two calls that are not measured.

    Args:
        function: The function, which takes no arguments.
        operations: The number of floating-point operations of one call.
        seconds: The time in seconds after which the function is not called again.

    Returns:
        The number of floating-point operations per second.
    """
    function()
    function()
    num_calls = 0
    start_time = time.perf_counter()
    while time.perf_counter() - start_time < seconds:
        function()
        num_calls += 1
    return num_calls * operations / (time.perf_counter() - start_time)


def measure(
    library: str, sizes_of_products: Sequence[ProductSizes], dtypes: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Measures the speed of matrix products in one library.

    Args:
        library: The library, "jax" or "torch".
        sizes_of_products: The sizes of each product to measure (see `ProductSizes`).
        dtypes: The dtypes of the matrices.
        seconds: The number of seconds for which each product is measured.

    Returns:
        dtype -> sizes of the product, joined by "x" -> FLOP/s.
    """
    make_product_function = {"jax": jax_product, "torch": torch_product}[library]
    speed_by_dtype_and_product: dict[str, dict[str, float]] = {dtype: {} for dtype in dtypes}
    for dtype in dtypes:
        for product_sizes in sizes_of_products:
            num_operations = 2.0 * math.prod(product_sizes)
            flops_per_second = operations_per_second(
                make_product_function(product_sizes, dtype), num_operations, seconds
            )
            speed_by_dtype_and_product[dtype]["x".join(map(str, product_sizes))] = flops_per_second
    return speed_by_dtype_and_product


def best(speeds: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the speed of the fastest product in each dtype: dtype -> FLOP/s.

    Args:
        speeds: The JSON object that this script prints: dtype -> sizes of the product -> FLOP/s.
    """
    return {
        dtype: max(speed_by_product_name.values())
        for dtype, speed_by_product_name in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("jax", "torch"))
    parser.add_argument("--gpu", action="store_true", help="products for a GPU, which are larger")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--seconds", type=float, default=0.5, help="per product (default: 0.5)")
    parsed_flags = parser.parse_args()
    measured_product_sizes = GPU_PRODUCT_SIZES if parsed_flags.gpu else CPU_PRODUCT_SIZES
    print(
        json.dumps(
            measure(
                parsed_flags.library,
                measured_product_sizes,
                parsed_flags.dtypes,
                parsed_flags.seconds,
            )
        )
    )


if __name__ == "__main__":
    main()
