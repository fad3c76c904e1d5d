"""Kernels of TPUs as Pallas interprets them, with a TPU's kinds of memory and its copies."""

from jax.experimental.pallas import tpu as pltpu

from activation_extraction.model.expert_kernel import pallas_experts


def pallas(*given, **options):
    """Does what `pallas_experts` does."""
    with pltpu.force_tpu_interpret_mode():
        return pallas_experts(*given, **options)
