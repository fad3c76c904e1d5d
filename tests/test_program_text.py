"""These tests read a small program, written for them, as the benchmarks read compiled ones."""

import pytest

from benchmarks.program_text import Move, ProgramText, groups

# Two turns of a loop gather a weight while a product runs, then send a sum without anything beside.
# A turn runs one of two branches; the first moves 4,096 bytes, the second 8,192.
PROGRAM = """HloModule small

%gathers (p0: bf16[4,128]) -> (bf16[4,128], bf16[8,128], u32[]) {
  %p0 = bf16[4,128]{1,0:T(4,128)} parameter(0)
  %gather.1 = bf16[8,128]{1,0:T(8,128)} all-gather(%p0), channel_id=1, replica_groups={{0,1},{2,3}}
  ROOT %began = (bf16[4,128]{1,0:T(4,128)}, bf16[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%multiplies (p1: bf16[4,128], p2: bf16[8,128], p3: bf16[16,128], p4: bf16[16,128]) -> (f32[16,16], bf16[4,128], bf16[8,128]) {
  %p1 = bf16[4,128]{1,0:T(4,128)} parameter(0)
  %p2 = bf16[8,128]{1,0:T(8,128)} parameter(1)
  %p3 = bf16[16,128]{1,0:T(8,128)} parameter(2)
  %p4 = bf16[16,128]{1,0:T(8,128)S(1)} parameter(3)
  %product.1 = f32[16,16]{1,0:T(8,16)} convolution(%p3, %p4), dim_labels=bf_oi->bf
  %gather.2 = bf16[8,128]{1,0:T(8,128)} all-gather(%p1), channel_id=1, replica_groups={{0,1},{2,3}}
  ROOT %both = (f32[16,16]{1,0:T(8,16)}, bf16[4,128]{1,0:T(4,128)}, bf16[8,128]{1,0:T(8,128)}) tuple(%product.1, %p1, %gather.2)
}

%ends (p5: bf16[4,128], p6: bf16[8,128]) -> bf16[8,128] {
  %p5 = bf16[4,128]{1,0:T(4,128)} parameter(0)
  %p6 = bf16[8,128]{1,0:T(8,128)} parameter(1)
  %gather.3 = bf16[8,128]{1,0:T(8,128)} all-gather(%p5), channel_id=1, replica_groups={{0,1},{2,3}}
  ROOT %ended = bf16[8,128]{1,0:T(8,128)} custom-call(%p5, %p6, %gather.3), custom_call_target="AsyncCollectiveDone"
}

%narrow (p7: bf16[8,128]) -> bf16[8,128] {
  %p7 = bf16[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %copy.1 = bf16[8,128]{1,0:T(8,128)} copy(%p7)
}

%wide (p8: bf16[8,128]) -> f32[8,128] {
  %p8 = bf16[8,128]{1,0:T(8,128)} parameter(0)
  %copy.2 = bf16[8,128]{1,0:T(8,128)} copy(%p8)
  ROOT %copy.3 = bf16[8,128]{1,0:T(8,128)} copy(%copy.2)
}

%turn (state: (s32[], bf16[4,128], bf16[16,128])) -> (s32[], bf16[4,128], bf16[16,128]) {
  %state = (s32[]{:T(128)}, bf16[4,128]{1,0:T(4,128)}, bf16[16,128]{1,0:T(8,128)}) parameter(0)
  %shard = bf16[4,128]{1,0:T(4,128)} get-tuple-element(%state), index=1
  %rows = bf16[16,128]{1,0:T(8,128)} get-tuple-element(%state), index=2
  %start = (bf16[4,128]{1,0:T(4,128)}, bf16[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) fusion(%shard), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%gathers
  %start.0 = bf16[4,128]{1,0:T(4,128)} get-tuple-element(%start), index=0
  %start.1 = bf16[8,128]{1,0:T(8,128)} get-tuple-element(%start), index=1
  %middle = (f32[16,16]{1,0:T(8,16)}, bf16[4,128]{1,0:T(4,128)}, bf16[8,128]{1,0:T(8,128)}) fusion(%start.0, %start.1, %rows, %rows), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%multiplies
  %middle.1 = bf16[4,128]{1,0:T(4,128)} get-tuple-element(%middle), index=1
  %middle.2 = bf16[8,128]{1,0:T(8,128)} get-tuple-element(%middle), index=2
  %done = bf16[8,128]{1,0:T(8,128)} fusion(%middle.1, %middle.2), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%ends
  %sum = f32[8,128]{1,0:T(8,128)} all-reduce(%done), channel_id=2, replica_groups={{0,2},{1,3}}, to_apply=%adds
  %which = s32[]{:T(128)} get-tuple-element(%state), index=0
  %branch = bf16[8,128]{1,0:T(8,128)} conditional(%which, %done, %done), branch_computations={%narrow, %wide}
  ROOT %next = (s32[]{:T(128)}, bf16[4,128]{1,0:T(4,128)}, bf16[16,128]{1,0:T(8,128)}) tuple(%which, %shard, %rows)
}

%goes_on (state.1: (s32[], bf16[4,128], bf16[16,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[4,128]{1,0:T(4,128)}, bf16[16,128]{1,0:T(8,128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %turns = s32[]{:T(128)} constant(2)
  ROOT %less = pred[]{:T(512)} compare(%count, %turns), direction=LT
}

ENTRY %main (table: bf16[999,128], buffer: bf16[9,8,128]) -> bf16[9,8,128] {
  %table = bf16[999,128]{1,0:T(8,128)} parameter(0)
  %buffer = bf16[9,8,128]{2,1,0:T(8,128)} parameter(1)
  %row = bf16[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%table), dynamic_slice_sizes={8,128}
  %filled = bf16[9,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%buffer, %row)
  %loop = (s32[]{:T(128)}, bf16[4,128]{1,0:T(4,128)}, bf16[16,128]{1,0:T(8,128)}) while(%filled), condition=%goes_on, body=%turn, metadata={op_name="jit(f)/layers/A._loop/while"}
  ROOT %result = bf16[9,8,128]{2,1,0:T(8,128)} bitcast(%filled)
}
"""  # noqa: E501
MESH = {"data": 2, "fsdp": 2}


def test_an_asynchronous_collective_counts_once_and_a_synchronous_one_is_not_hidden():
    moves = ProgramText(PROGRAM, MESH).moves("%turn")
    gather, product, total, *copies = moves
    # A shard is read, all is written; a chip sends the half that others lack.
    flops = 2 * 16 * 16 * 128
    assert gather == Move("collective", "%start", "", 1024 + 2048, 1024, True, ("fsdp",), flops)
    # One operand is read although it is named twice; the gather's arrays belong to the gather.
    assert product == Move("product", "%middle", "", 4096 + 1024, flops=flops)
    assert total == Move("collective", "%sum", "", 2048 + 4096, 4096, False, ("data",))
    assert [copy.hbm for copy in copies] == [4096, 4096]


def test_a_step_counts_every_turn_and_slices_alone():
    plan = ProgramText(PROGRAM, MESH)
    first, second, *loop = plan.moves(plan.entry)
    assert first.hbm == 2 * 2048 and second.hbm == 2 * 2048
    assert loop == [move.times(2) for move in plan.moves(plan.body)]


def test_types_of_layers_count_by_their_shares():
    moves = ProgramText(PROGRAM, MESH, shares=[0.75, 0.25]).moves("%turn")
    assert [move.hbm for move in moves[3:]] == [3072, 1024, 1024]


@pytest.mark.parametrize(
    "line,expected",
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a_0'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_are_read_in_every_notation(line, expected):
    assert groups(line).tolist() == expected
