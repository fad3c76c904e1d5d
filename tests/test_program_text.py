"""What is counted of Pallas kernels and of collectives in the text of a compiled program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from activation_extraction.model.expert_kernel import ROWS, pallas_experts
from activation_extraction.model.experts import Stacks
from benchmarks.program_text import ProgramText
from benchmarks.step_plan import equations, times_moved

PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
TEXT = f"""%layer (x: bf16[4,128]) -> bf16[4,128] {{
  %x = bf16[4,128]{{1,0}} parameter(0)
  %w = bf16[512,128]{{1,0}} parameter(1)
  %fetches.1 = bf16[8,128]{{1,0}} custom-call(%x, %w), custom_call_target="tpu_custom_call"
  %one = (bf16[4,128]{{1,0}}, bf16[4,128]{{1,0}}) collective-permute-start(%x), {PAIRS}
  %other = (bf16[4,128]{{1,0}}, bf16[4,128]{{1,0}}) collective-permute-start(%x), {PAIRS}
  %once.1 = bf16[8,128]{{1,0}} custom-call(%x, %w), custom_call_target="tpu_custom_call"
  %end = bf16[4,128]{{1,0}} collective-permute-done(%one)
  %late = (bf16[4,128]{{1,0}}, bf16[4,128]{{1,0}}) collective-permute-start(%x), {PAIRS}
  %too = bf16[4,128]{{1,0}} collective-permute-done(%other)
  ROOT %last = bf16[4,128]{{1,0}} collective-permute-done(%late)
}}
"""


def test_kernels_move_what_they_say_and_hide_what_is_sent_meanwhile():
    """Collectives may be under way together and have one channel: a ring has two directions."""

    def times(name, shapes):
        assert shapes == [[4, 128], [512, 128], [8, 128]]
        return [3, 0.25, 0.5] if name == "fetches" else None

    plan = ProgramText(TEXT, {"expert": 2}, times=times)
    found = {move.name: move for move in plan.moves("%layer")}
    of_row = 2 * 128
    assert found["%fetches.1"].hbm == (3 * 4 + 0.25 * 512 + 0.5 * 8) * of_row
    assert found["%once.1"].hbm == (4 + 512 + 8) * of_row
    hidden = {name: move.hidden for name, move in found.items() if move.sent}
    assert hidden == {"%one": True, "%other": True, "%late": False}


@pytest.mark.parametrize("devices,parts", [(1, 1), (4, 2)])
def test_what_kernels_of_experts_move(devices, parts):
    """Against a count of the rows of each expert, whose numbers are random."""
    tokens, per_token, layers, experts, hidden, width = 4096, 4, 3, 8, 256, 128
    stacks = [(layers, experts, hidden, width)] * 2 + [(layers, experts, width, hidden)]
    given = [((tokens, hidden), jnp.bfloat16), ((tokens, per_token), jnp.float32)]
    given += [((tokens, per_token), jnp.int32), ((), jnp.int32)]
    given += [(shape, jnp.bfloat16) for shape in stacks]
    x, weights, chosen, *stacks = (jax.ShapeDtypeStruct(*each) for each in given)
    run = partial(pallas_experts, parts=parts)
    program = jax.make_jaxpr(run)(x, weights, chosen, Stacks(*stacks))
    calls = [each for each in equations(program) if each.primitive.name == "pallas_call"]
    moved = dict.fromkeys(("experts_gate_up", "experts_down", "experts_sum"), 0.0)
    for call in calls:
        arrays, name = [x.aval for x in (*call.invars, *call.outvars)], call.params["name"]
        times = times_moved(name, [[*each.shape] for each in arrays], 1 / devices)
        pairs = zip(arrays, times, strict=True)  # without the tables, which are small
        moved[name] += sum(x.size * often for x, often in pairs if x.dtype == jnp.bfloat16)
    assert len(calls) == 2 + parts

    chosen = np.random.default_rng(0).random((tokens, devices * experts)).argsort(axis=1)
    rows = np.bincount(chosen[:, :per_token].reshape(-1))[:experts]
    filled, weights = (-(-rows // ROWS) * ROWS).sum(), experts * hidden * width
    expected = {
        "experts_gate_up": rows.sum() * hidden + 2 * weights + filled * width,
        "experts_down": filled * width + weights + filled * hidden,
        "experts_sum": rows.sum() * hidden,
    }
    assert moved == pytest.approx(expected, rel=0.05)
