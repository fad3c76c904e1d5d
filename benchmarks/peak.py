"""Measures the speed of matrix products on this machine, in JAX or PyTorch.

Other benchmarks call the speed of the fastest matrix product the peak of the machine.
`python benchmarks/peak.py jax` (or `torch`) prints one JSON object: dtype -> sizes of the matrix
product, such as "2048x896x4864" (rows, inner size, columns) -> FLOP/s. Products of bfloat16 values
are summed in float32, as in the models of JAX and of PyTorch.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class MatmulSizes(NamedTuple):
    """The sizes of a product of two matrices, (rows, inner size) and (inner size, columns).

    Attributes:
        num_rows: Number of rows of the first matrix and of the product.
        inner_size: Number of columns of the first matrix, and of rows of the second matrix.
        num_columns: Number of columns of the second matrix and of the product.
    """

    num_rows: int
    inner_size: int
    num_columns: int


CPU_MATMUL_SIZES: tuple[MatmulSizes, ...] = (
    MatmulSizes(2048, 896, 4864),
    MatmulSizes(2048, 4864, 896),
    MatmulSizes(16384, 896, 4864),
    MatmulSizes(2048, 2048, 2048),
    MatmulSizes(4096, 4096, 4096),
)
GPU_MATMUL_SIZES: tuple[MatmulSizes, ...] = (
    MatmulSizes(4096, 4096, 4096),
    MatmulSizes(8192, 8192, 8192),
    MatmulSizes(16384, 3584, 18944),
    MatmulSizes(16384, 18944, 3584),
)
DTYPES = ("bfloat16", "float32")


def jax_product(matmul_sizes: MatmulSizes, dtype: str) -> Callable[[], object]:
    """Returns a function that computes the product of two random matrices with JAX.

    Args:
        matmul_sizes: The sizes of the matrices (see `MatmulSizes`).
        dtype: The dtype of the matrices, "bfloat16" or "float32".

    Returns:
        The function, which takes no arguments and waits until the product is computed.
    """
    import jax
    import jax.numpy as jnp

    num_rows, inner_size, num_columns = matmul_sizes
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


def torch_product(matmul_sizes: MatmulSizes, dtype: str) -> Callable[[], object]:
    """Returns a function that computes the product of two random matrices with PyTorch.

    PyTorch uses a GPU if there is one, otherwise the CPU.

    Args:
        matmul_sizes: The sizes of the matrices (see `MatmulSizes`).
        dtype: The dtype of the matrices, "bfloat16" or "float32".

    Returns:
        The function, which takes no arguments and waits until the product is computed.
    """
    import torch

    num_rows, inner_size, num_columns = matmul_sizes
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
    library: str, sizes_of_matmuls: Sequence[MatmulSizes], dtypes: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Measures the speed of matrix products in one library.

    Args:
        library: The library, "jax" or "torch".
        sizes_of_matmuls: The sizes of each matrix product to measure (see `MatmulSizes`).
        dtypes: The dtypes of the matrices.
        seconds: The number of seconds for which each matrix product is measured.

    Returns:
        dtype -> the three sizes of the matrix product, joined by "x" -> FLOP/s.
    """
    make_matmul_function = {"jax": jax_product, "torch": torch_product}[library]
    flops_per_second_by_sizes_by_dtype: dict[str, dict[str, float]] = {
        dtype: {} for dtype in dtypes
    }
    for dtype in dtypes:
        for matmul_sizes in sizes_of_matmuls:
            num_operations = 2.0 * math.prod(matmul_sizes)
            flops_per_second = operations_per_second(
                make_matmul_function(matmul_sizes, dtype), num_operations, seconds
            )
            flops_per_second_by_sizes_by_dtype[dtype]["x".join(map(str, matmul_sizes))] = (
                flops_per_second
            )
    return flops_per_second_by_sizes_by_dtype


def best(speeds: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the speed of the fastest matrix product in each dtype: dtype -> FLOP/s.

    Args:
        speeds: The JSON object that this script prints: dtype -> sizes of the matrix product, such
            as "2048x896x4864" (rows, inner size, columns) -> FLOP/s.
    """
    return {
        dtype: max(flops_per_second_by_sizes.values())
        for dtype, flops_per_second_by_sizes in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("jax", "torch"))
    parser.add_argument("--gpu", action="store_true", help="products for a GPU, which are larger")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--seconds", type=float, default=0.5, help="per product (default: 0.5)")
    parsed_flags = parser.parse_args()
    sizes_of_matmuls = GPU_MATMUL_SIZES if parsed_flags.gpu else CPU_MATMUL_SIZES
    print(
        json.dumps(
            measure(
                parsed_flags.library,
                sizes_of_matmuls,
                parsed_flags.dtypes,
                parsed_flags.seconds,
            )
        )
    )


if __name__ == "__main__":
    main()
