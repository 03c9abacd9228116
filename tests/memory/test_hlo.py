"""The parser of optimized HLO."""

from pathlib import Path

import pytest

from effjax.memory import find_rates
from effjax.memory.read.hlo import Collective, Transfer, arrays, collectives, parse, transfers
from effjax.memory.time.step_time import step_time

MODULES = sorted((Path(__file__).parent / "modules").iterdir())

LOOP = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

FileNames
1 "/home/me/train.py"
2 "/usr/lib/python3/site-packages/flax/linear.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=4 end_column=59}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=4 end_column=59}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused_all_reduce (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0} all-reduce(%p), to_apply=%sum, metadata={op_name="psum" stack_frame_id=2}
}

%body (arg: (s32[], f32[4], f32[8,4])) -> (s32[], f32[4], f32[8,4]) {
  %arg = (s32[], f32[4]{0}, f32[8,4]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[4]{0} get-tuple-element(%arg), index=1
  %w = f32[8,4]{1,0:S(5)} get-tuple-element(%arg), index=2
  %slice-start = ((f32[8,4]{1,0:S(5)}, s32[]), f32[1,4]{1,0}, u32[]) dynamic-slice-start(%w, %i), metadata={op_name="w" stack_frame_id=1}
  %slice-done = f32[1,4]{1,0} dynamic-slice-done(%slice-start)
  %fusion = f32[4]{0} fusion(%x), kind=kCustom, calls=%fused_all_reduce
  %update = f32[8,4]{1,0:S(5)} dynamic-update-slice(%arg#2, %slice-done, %i), metadata={source_file="/home/me/save.py" source_line=3}
  ROOT %next = (s32[], f32[4]{0}, f32[8,4]{1,0:S(5)}) tuple(%i, %fusion, %update)
}

%condition (arg.1: (s32[], f32[4], f32[8,4])) -> pred[] {
  %arg.1 = (s32[], f32[4]{0}, f32[8,4]{1,0:S(5)}) parameter(0)
  ROOT %less = pred[] constant(false)
}

ENTRY %main (w.1: f32[8,4]) -> f32[4] {
  %zero = s32[] constant(0)
  %x.1 = f32[4]{0} constant({1, 2, 3, 4})
  %w.1 = f32[8,4]{1,0} parameter(0), metadata={op_name="w"}
  %host = (f32[8,4]{1,0:S(5)}, f32[8,4]{1,0}, u32[]) copy-start(%w.1)
  %host-done = f32[8,4]{1,0:S(5)} copy-done(%host)
  %init = (s32[], f32[4]{0}, f32[8,4]{1,0:S(5)}) tuple(%zero, %x.1, %host-done)
  %loop = (s32[], f32[4]{0}, f32[8,4]{1,0:S(5)}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %result = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_loop_over_offloaded_weights_in_the_text_of_each_version(path):
    """Elements of the loop's state are instructions, or from jax 0.12 operands `%tuple#1`."""
    program = parse(path.read_text())
    weights, x, trips = 2 * 256**2, 2 * 64 * 256, 15
    assert transfers(program) == (Transfer("to_device", "bf16[1,256,256]", weights, trips, ""),)
    time = step_time(program, find_rates("h100"))
    assert time.unknown_loops == 0 and time.total_flops == trips * 2 * 64 * 256**2
    assert time.to_device_bytes == trips * weights
    # The slice is written, and copied; the product reads the copy and writes another x.
    moved = trips * (weights + 2 * weights + weights + 2 * x)
    assert time.memory_bytes == pytest.approx(moved, rel=0.001)  # and counters


def test_elements_of_nested_tuples():
    text = """\
ENTRY %main (p: ((f32[4], f32[2]), f32[3])) -> f32[2] {
  %p = ((f32[4]{0}, f32[2]{0}), f32[3]{0}) parameter(0)
  ROOT %r = f32[2]{0} all-reduce(%p#0#1)
}
"""
    assert collectives(text) == (Collective("all-reduce", 8, 1, ""),)


def test_sources_and_counts_in_a_loop():
    library = "/usr/lib/python3/site-packages/flax/linear.py:7"
    expected = Collective("all-reduce", 16, 6, library, caller="/home/me/train.py:20")
    assert collectives(LOOP) == (expected,)  # in a fusion
    assert transfers(LOOP) == (
        Transfer("to_host", "f32[8,4]", 128, 1, ""),
        Transfer("to_device", "f32[1,4]", 16, 6, "/home/me/train.py:20"),
        Transfer("to_host", "f32[1,4]", 16, 6, "/home/me/save.py:3"),
    )


def test_instruction_of_an_asynchronous_value():
    program = parse(LOOP.replace("%fused_all_reduce", "%wrapped_sum_computation.3"))
    assert program.instruction_of("wrapped_sum.3") == program.instructions["inner"]
    assert program.instruction_of("nothing") is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = f32[128]{0} all-reduce(%p), channel_id=1", ("all-reduce", 512)),
        ("%r = (f32[2,3]{1,0}, /*index=1*/f32[]) all-reduce-start(%p, %q)", ("all-reduce", 28)),
        ("%r = ((f32[128]{0}), f32[128]{0}) all-reduce-start(%p)", ("all-reduce", 512)),
        ("%r = ((f32[6], f32[]), (f32[6], f32[])) all-reduce-start(%p, %q)", ("all-reduce", 28)),
        ("%r = f32[4]{0} all-reduce-done(%s)", None),
        ("%g = ((f32[16]), f32[128]) all-gather-start(%p)", ("all-gather", 512)),
        ("%g = (f32[16], f32[128]) all-gather-start(%p)", ("all-gather", 512)),
        ("%c = bf16[8,4]{1,0} collective-permute(%p)", ("collective-permute", 64)),
        ("%s = f32[8]{0} reduce-scatter(%large)", ("reduce-scatter", 256)),
        ("%f = f32[4]{0} add(%all-reduce), x={%all-reduce-computation}", None),
    ],
)
def test_collectives_of_one_instruction(line, expected):
    large = "  %large = f32[64]{0} parameter(0)"
    text = f"HloModule m\n\nENTRY %main () -> f32[] {{\n{large}\n  {line}\n}}"
    result = [(c.kind, c.bytes) for c in collectives(text)]
    assert result == ([expected] if expected else [])


def test_each_branch_counts():
    text = """\
%one (p: f32[4]) -> f32[4] {
  ROOT %r = f32[4] all-reduce(%p)
}

%two (q: f32[4]) -> f32[4] {
  ROOT %s = f32[4] all-reduce(%q)
}

ENTRY %main (i: s32[]) -> f32[4] {
  %i = s32[] parameter(0)
  ROOT %c = f32[4] conditional(%i, %x, %y), branch_computations={%one, %two}
}
"""
    assert collectives(text) == (Collective("all-reduce", 16, 2, ""),)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("(bf16[3,5]{1,0}, pred[7], s4[3], f8e4m3fn[6], c64[])", [30, 7, 2, 6, 8]),
        ("f32[0,4]{1,0}", [0]),
        ("f32[<=8,4]{1,0}", [128]),
        ("token[]", [0]),
    ],
)
def test_bytes_of_shapes(shape, sizes):
    assert [array.bytes for array in arrays(shape)] == sizes


TPU_LOOP = """\
HloModule jit_layers, is_scheduled=true

%fused_compare (p0: s32[], p1: s32[]) -> pred[] {
  %p1 = s32[] parameter(1)
  %p0 = s32[] parameter(0)
  ROOT %fused_less = pred[] compare(%p1, %p0), direction=LT
}

%condition (state: (s32[], f32[16,8,128], s32[])) -> pred[] {
  %bound = s32[]{:T(128)} BOUND
  %state = (s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} COMPARE
}

%body (state.1: (s32[], f32[16,8,128], s32[])) -> (s32[], f32[16,8,128], s32[]) {
  %state.1 = (s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) parameter(0)
  %w = f32[16,8,128]{2,1,0:T(8,128)S(5)} get-tuple-element(%state.1), index=1
  %i = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %load = f32[1,8,128]{2,1,0:T(8,128)S(1)} dynamic-slice(%w, %i), dynamic_slice_sizes={1,8,128}
  %one = s32[]{:T(128)} constant(1)
  %two = s32[]{:T(128)} constant(2)
  %minus = s32[]{:T(128)} constant(-1)
  %unknown = s32[]{:T(128)} custom-call()
  %next = s32[]{:T(128)} NEXT
  ROOT %out = (s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) tuple(%next, %w, %one)
}

ENTRY %main (w.1: f32[16,8,128]) -> s32[] {
  %new = f32[16,8,128]{2,1,0:T(8,128)S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %size = s32[]{:T(128)} constant(16)
  %init = (s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) tuple(%start, %new, %size)
  %loop = (s32[]{:T(128)}, f32[16,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}) while(%init), condition=%condition, body=%body
  ROOT %result = s32[]{:T(128)} get-tuple-element(%loop), index=0
}
"""


COMPARE = "compare(%counter, %bound), direction=LT"
FUSED = "fusion(%bound, %counter), kind=kLoop, calls=%fused_compare"  # by XLA for GPUs
ELEMENT = "get-tuple-element(%state), index=2"  # of the loop's state, which starts as 16


@pytest.mark.parametrize(
    ("bound", "next_value", "compare", "trips"),
    [
        ("constant(12)", "add(%i, %one)", COMPARE, 12),
        (ELEMENT, "add(%i, %one)", COMPARE, 16),
        (ELEMENT, "add(%i, %one)", FUSED, 16),
        ("constant(11)", "fusion(%i)", COMPARE, 11),  # XLA fuses a scan's sum only
        ("constant(11)", "add(%i, %two)", COMPARE, 6),
        ("custom-call()", "add(%i, %one)", COMPARE, None),
        ("constant(11)", "add(%i, %unknown)", COMPARE, None),
        ("constant(11)", "add(%i, %minus)", COMPARE, None),
    ],
)
def test_trip_counts_that_the_compiler_does_not_state(bound, next_value, compare, trips):
    text = TPU_LOOP.replace("BOUND", bound).replace("NEXT", next_value)
    program = parse(text.replace("COMPARE", compare))
    assert program.trip_count(program.instructions["loop"]) == trips
    (load,) = transfers(program)  # and not of the allocation on the host
    assert (load.direction, load.shape, load.count) == ("to_device", "f32[1,8,128]", trips or 1)
