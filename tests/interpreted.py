"""Runs the TPU kernel of experts in Pallas's interpreter, which simulates memories and copies."""

from jax.experimental.pallas import tpu as pltpu

from activation_extraction.model.expert_kernel import pallas_experts


def pallas(*arguments, **options):
    """Calls `pallas_experts` in the interpreter."""
    with pltpu.force_tpu_interpret_mode():
        return pallas_experts(*arguments, **options)
