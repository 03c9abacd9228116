"""The parser of XLA's buffer assignment."""

from effjax.memory.read.buffers import Buffer, Bytes, allocated_bytes, live_at_peak

# a and b are live at the same time; c reuses the place of a; loop.2 is a in a loop.
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}:
 value: <1 x.1 @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 4000, color 5, page 0, parameter 1, shape |f32[1000]| at ShapeIndex {}:
 value: <2 w.1 @5> (size=4000,offset=0): f32[1000]{0:S(5)}
allocation 2: size 200, page 0, output shape is |f32[50]|, maybe-live-out:
 value: <3 loop{1} (phi) @0> (size=200,offset=0): f32[50]{0}
 value: <4 result @0> (size=200,offset=0): f32[50]{0}
 value: <5 before @0> (size=200,offset=0): bf16[100]{0}
allocation 3: size 4, page 0, thread-local:
 value: <5 lhs @0> (size=4,offset=0): f32[]
allocation 4: size 40, page 0, constant:
 value: <6 table @0> (size=40,offset=0): f32[10]{0}
allocation 5: size 1024, page 0, preallocated-temp:
 value: <7 a @0> (size=512,offset=0): f32[128]{0}
 value: <8 b{0} @0> (size=256,offset=512): bf16[128]{0}
 value: <9 c @0> (size=128,offset=0): f32[32]{0}
 value: <10 loop.2{3} (phi) @0> (size=512,offset=0): f32[128]{0}
 value: <11 tuple{} @0> (size=24,offset=1000): (f32[], f32[32]{0})

Total bytes used: 5000
"""

RANGES = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:x.1
  BufferLiveRange:
    x.1{}:0-9
    a{}:1-2
    loop.2{3}:3-6
    b{0}:4-5
    c{}:7-8
    tuple{}:4-5
  Live ranges at 4 (peak):
    a{}: 512 bytes (cumulative: 512 bytes)
"""


def test_live_at_peak():
    assert live_at_peak(ASSIGNMENT, RANGES) == [
        Buffer("f32[128]", 512, "temporary", "a"),  # not the loop variable
        Buffer("f32[100]", 400, "argument", "x.1"),
        Buffer("bf16[128]", 256, "temporary", "b"),
        Buffer("f32[50]", 200, "output", "result"),
        Buffer("f32[10]", 40, "constant", "table"),
    ]


TPU_ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 4194304, page 0, parameter 0, shape |f32[1024,12]| at ShapeIndex {}, \
maybe-live-out:
 value: <1 w.1 @0> (size=524288,offset=0): f32[1024,12]{1,0:T(8,128)}
allocation 1: size 1048576, color 1, page 0, preallocated-temp:
 value: <2 on_chip @1> (size=1048576,offset=0): f32[256,1024]{1,0:T(8,128)S(1)}
allocation 2: size 4096, page 0, preallocated-temp:
 value: <3 a @0> (size=4096,offset=0): f32[8,1,128]{2,1,0:T(1,128)}
allocation 3: size 2048, color 5, page 0, maybe-live-out:
 value: <4 host @5> (size=2048,offset=0): f32[512]{0:T(512)S(5)}
"""


def test_tpu():
    ranges = "    w.1{}:0-9\n    on_chip{}:1-9\n    a{}:4-5\n    host{}:0-9\n"
    assert live_at_peak(TPU_ASSIGNMENT, ranges, "tpu") == [
        Buffer("f32[1024,12]", 524288, "argument", "w.1", padding=524288 - 4 * 1024 * 12),
        Buffer("f32[8,1,128]", 4096, "temporary", "a"),
    ]
    size = 4194304
    expected = Bytes(size, size, temporaries=4096, aliased=size, generated_code=0)
    assert allocated_bytes(TPU_ASSIGNMENT, "tpu") == expected
    assert allocated_bytes(TPU_ASSIGNMENT, "tpu", on_host=True).outputs == 2048


def test_overlapping_values_count_one_time():
    # c and a part of c take no more than c.
    ranges = RANGES.replace("c{}:7-8", "c{}:3-6").replace("b{0}:4-5", "b{0}:8-9")
    names = [buffer.operation for buffer in live_at_peak(ASSIGNMENT, ranges)]
    assert "a" in names and "c" not in names and "b" not in names
