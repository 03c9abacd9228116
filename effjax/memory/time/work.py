"""Work of HLO instructions: FLOPs of products, bytes of device memory, bytes over links."""

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..read.hlo import (
    COLLECTIVES,
    NO_MOVEMENT,
    Array,
    HloModule,
    Instruction,
    arrays,
    called,
    copied_arrays,
    elements,
    operand_names,
)

Channel = Literal["to_device", "to_host", "interconnect", "memory"]

_WRAPPERS = ("fusion", "fusion-start", "async-start", "call-start")
_READ_A_SLICE = ("dynamic-slice", "slice", "gather")
# Targets of custom calls that compute nothing and touch no memory.
_NO_WORK = re.compile(
    r"AllocateBuffer|AllocatePersistentBuffer|AssumeGather|Bitcast|Sharding|SPMD|MoveTo|"
    r"annotate_device_placement"
)
# Targets of custom calls without products, so that their FLOPs are not missing.
_NO_PRODUCTS = re.compile(
    rf"{_NO_WORK.pattern}|TopK|__cub\$|cu_threefry2x32|SliceToDynamic|PadToStatic|"
    r"ResizeBilinear|RngBitGenerator"
)


class Work(NamedTuple):
    """Work of one execution of an instruction.

    Attributes:
        flops: FLOPs of matrix products and convolutions, and those that a custom call states, by
            dtype.
        memory_bytes: bytes of device memory that it reads and writes.
        unknown: the name of a kernel with unknown FLOPs, or "".
    """

    flops: Counter[str]
    memory_bytes: int
    unknown: str


class WorkCounter:
    """Counts the work of a module's instructions; fused computations are counted once."""

    def __init__(self, module: HloModule, num_devices: int = 1):
        self.module = module
        self.num_devices = num_devices
        self._products: dict[str, tuple[Counter[str], str]] = {}
        self._reads: dict[tuple[str, int], int] = {}

    def work(self, instruction: Instruction) -> Work:
        """Return the work of an instruction, with all that is fused into it; loops not included."""
        flops, unknown = self._flops(instruction)
        return Work(flops, self._memory_bytes(instruction), unknown)

    def transfers(self, instruction: Instruction) -> list[tuple[Channel, int]]:
        """Return the bytes that an instruction, or what it starts, sends over links."""
        opcode = instruction.opcode
        if opcode in NO_MOVEMENT or opcode.endswith(("-done", "-update")):
            return []
        inner = [i for name in _wrapped(instruction) for i in self.module.computations[name]]
        result: list[tuple[Channel, int]] = [
            ("interconnect", self._sent_bytes(i))
            for i in (instruction, *inner)
            if i.opcode.removesuffix("-start") in COLLECTIVES
        ]
        return result or [
            (direction, array.bytes)
            for direction, array in copied_arrays(self.module, instruction)
            if array.bytes > 64  # indices and counters
        ]

    def _sent_bytes(self, instruction: Instruction) -> int:
        """Return what each device sends, by a ring for collectives that have one."""
        kind = instruction.opcode.removesuffix("-start")
        operands = sum(a.bytes for a in self.module.operand_arrays(instruction))
        if kind in ("collective-permute", "collective-broadcast"):
            return operands
        size = self._group_size(instruction.attributes)
        if kind == "all-gather":  # passes on the parts of all others
            return operands * (size - 1)
        share = (size - 1) / size
        return int(operands * share * (2 if kind == "all-reduce" else 1))

    def _group_size(self, attributes: str) -> int:
        if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
            return int(match[1])
        match = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
        return len(match[1].split(",")) if match else self.num_devices

    # FLOPs

    def _flops(self, instruction: Instruction) -> tuple[Counter[str], str]:
        """Return the FLOPs of products by dtype, and the name of a kernel with unknown FLOPs."""
        text, opcode = instruction.attributes, instruction.opcode.removesuffix("-start")
        if wrapped := _wrapped(instruction):
            return self._wrapped_flops(wrapped[0])
        if opcode not in ("dot", "scaled-dot", "ragged-dot", "convolution", "custom-call"):
            return Counter(), ""
        shapes = [_Shape.parse(a) for a in self.module.operand_arrays(instruction)]
        out = _Shape.parse(arrays(instruction.shape)[0]) if "[" in instruction.shape else None
        if opcode == "custom-call":
            if (stated := _stated(instruction, "flops")) is not None:
                wide = any(shape.dtype == "f64" for shape in shapes)
                return Counter({"f64" if wide else "f32_highest": stated}), ""
            return _custom_call_flops(_target(text), text, shapes, out)
        assert out is not None
        if opcode == "convolution":
            return Counter({_rate_of(shapes[0].dtype, text): _conv_flops(shapes, out, text)}), ""
        over = _numbers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", text))
        return Counter({_rate_of(shapes[0].dtype, text): _dot_flops(shapes[0], out, over)}), ""

    def _wrapped_flops(self, computation: str) -> tuple[Counter[str], str]:
        if computation not in self._products:
            total, unknown = Counter[str](), ""
            for instruction in self.module.computations[computation]:
                flops, name = self._flops(instruction)
                total.update(flops)
                unknown = unknown or name
            self._products[computation] = total, unknown
        return self._products[computation]

    # Device memory

    def _memory_bytes(self, instruction: Instruction) -> int:
        kind = instruction.opcode
        if kind in NO_MOVEMENT or kind.endswith(("-done", "-update")):
            return 0
        if kind == "custom-call" and _NO_WORK.search(_target(instruction.attributes)):
            return 0
        if (stated := _stated(instruction, "memory_bytes")) is not None:
            return stated
        return self._written(instruction) + sum(
            self._read(instruction, position) for position in range(len(operand_names(instruction)))
        )

    def _read(self, instruction: Instruction, position: int) -> int:
        """Return the bytes of device memory that an instruction reads of one operand."""
        if wrapped := _wrapped(instruction):
            return self._read_parameter(wrapped[0], position)
        names, kind = operand_names(instruction), instruction.opcode.removesuffix("-start")
        operand = self.module.instructions.get(names[position])
        if kind in NO_MOVEMENT or operand is None:
            return 0
        size = _device_bytes(operand.shape)
        if kind in _READ_A_SLICE and position == 0 and size:
            parts = elements(instruction.shape)
            # The shape of an asynchronous start is (operands, result, context).
            result = parts[1] if instruction.opcode.endswith("-start") else instruction.shape
            return sum(a.bytes for a in arrays(result))
        if kind in ("dynamic-update-slice", "scatter") and position == 0:
            return 0  # in place
        if '"__cudnn$fmha' in instruction.attributes and position > 2:
            return _bias_bytes(operand.shape, instruction.attributes) or size
        return size

    def _read_parameter(self, computation: str, position: int) -> int:
        """Return the bytes that a fused computation reads of one parameter."""
        # A parameter of which only slices are used is read in parts.
        key = computation, position
        if key not in self._reads:
            body = self.module.computations[computation]
            parameter = next(
                (i for i in body if i.opcode == "parameter" and i.operands == str(position)), None
            )
            self._reads[key] = self._uses(parameter, body) if parameter else 0
        return self._reads[key]

    def _uses(self, value: Instruction, body: Sequence[Instruction]) -> int:
        size, total = _device_bytes(value.shape), 0
        for user in body:
            for position, name in enumerate(operand_names(user)):
                if name != value.name:
                    continue
                if user.opcode in ("bitcast", "reshape"):
                    total += self._uses(user, body)
                elif user.opcode not in ("tuple", "get-tuple-element"):
                    total += self._read(user, position)
        return min(size, total)

    def _written(self, instruction: Instruction) -> int:
        """Return the bytes of device memory that an instruction writes."""
        if wrapped := _wrapped(instruction):
            body = self.module.computations[wrapped[0]]
            return self._written_by_root(body[-1]) if body else 0
        kind = instruction.opcode.removesuffix("-start")
        if kind in ("dynamic-update-slice", "scatter"):
            names = operand_names(instruction)
            update = self.module.instructions.get(names[1 if kind != "scatter" else -1])
            target = self.module.instructions.get(names[0])
            if update is None or target is None or not _device_bytes(target.shape):
                return 0
            return sum(a.bytes for a in arrays(update.shape))
        parts = elements(instruction.shape)
        if instruction.opcode == "copy-start":  # (result, operand, context)
            parts = parts[:1]
        elif instruction.opcode.endswith("-start") and len(parts) > 1:
            parts = parts[1:2]
        elif '"__cudnn$fmha' in instruction.attributes:
            parts = parts[:-1]  # without the workspace
        elif kind == "custom-call" and re.search(r'target="__cu(blas|dnn)', instruction.attributes):
            parts = parts[:1]  # without the workspace
        return sum(_device_bytes(part) for part in parts)

    def _written_by_root(self, root: Instruction) -> int:
        if root.opcode == "tuple":
            names = operand_names(root)
            return sum(self._written_by_root(self.module.instructions[name]) for name in names)
        if root.opcode == "bitcast":
            return self._written_by_root(self.module.instructions[operand_names(root)[0]])
        if root.opcode == "parameter":
            return 0
        return self._written(root)


class _Shape(NamedTuple):
    """The dtype and dimensions of an array."""

    dtype: str
    dims: tuple[int, ...]

    @classmethod
    def parse(cls, array: Array) -> "_Shape":
        dtype, _, dims = array.text.partition("[")
        return cls(dtype, tuple(int(d) for d in re.findall(r"\d+", dims)))


def _wrapped(instruction: Instruction) -> list[str]:
    """Return the computation that a fusion or an asynchronous start executes."""
    if instruction.opcode not in _WRAPPERS:
        return []
    return called(instruction, "calls", "to_apply")[:1]


def _target(attributes: str) -> str:
    """Return the target of a custom call."""
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    return target[1] if target else ""


def _stated(instruction: Instruction, quantity: Literal["flops", "memory_bytes"]) -> int | None:
    """Return the work that a custom call states in its frontend attributes, or None."""
    # `jax.experimental.xla_metadata.set_xla_metadata(flops=…, memory_bytes=…)` around a call sets
    # them. The FLOPs are those of vector units, in float32 or, with operands of float64, in
    # float64.
    if instruction.opcode != "custom-call":
        return None
    attributes = _braces(instruction.attributes, "frontend_attributes=")
    stated = re.search(rf'\b{quantity}="(\d+)"', attributes)
    return int(stated[1]) if stated else None


def _device_bytes(shape: str) -> int:
    return sum(a.bytes for a in arrays(shape) if a.is_in_device_memory)


def _numbers(match: re.Match[str] | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", match[1])] if match else []


def _rate_of(dtype: str, text: str) -> str:
    """Return the entry of `Rates.flops` for a product of a dtype."""
    if dtype.startswith("f8"):
        return "f8"
    if dtype in ("s8", "u8", "s4", "u4", "pred"):
        return "s8"
    if dtype in ("s32", "u32"):
        return "f32_highest"
    if dtype == "f32" and re.search(r"algorithm=dot_bf16_bf16_f32\b", text):
        return "bf16"  # the operands are rounded in the kernel
    if dtype in ("f32", "c64"):
        is_highest = re.search(
            r'(?i)operand_precision"?[=:]\s*[{\[]"?highest|dot_f32_f32_f32', text
        )
        return "f32_highest" if is_highest else "f32"
    return "f64" if dtype in ("f64", "c128") else dtype


def _dot_flops(left: _Shape, out: _Shape, over: Sequence[int]) -> int:
    products = math.prod(out.dims) * math.prod(left.dims[d] for d in over)
    return (8 if left.dtype.startswith("c") else 2) * products


def _custom_call_flops(
    target: str, text: str, shapes: Sequence[_Shape], out: _Shape | None
) -> tuple[Counter[str], str]:
    """Return the FLOPs of a library's kernel, or the name of a kernel that is opaque."""
    if _NO_PRODUCTS.search(target) or out is None:
        return Counter(), ""
    # Not a triangular solve, which is cuBLAS's too.
    contracting = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', text)
    if target.startswith("__cublas") and contracting:
        over = _numbers(contracting)
        return Counter({_rate_of(shapes[0].dtype, text): _dot_flops(shapes[0], out, over)}), ""
    if target.startswith("__cudnn$conv"):
        # The window describes the forward convolution, input · kernel → output, in all of them.
        if "BackwardInput" in target:
            forward = [out, shapes[1]], shapes[0]
        elif "BackwardFilter" in target:
            forward = [shapes[0], out], shapes[1]
        else:
            forward = shapes, out
        return Counter({_rate_of(shapes[0].dtype, text): _conv_flops(*forward, text)}), ""
    if target.startswith("__cudnn$fmha"):
        # The text is cuDNN's: in a form that is not known, its FLOPs are unknown.
        with contextlib.suppress(ValueError, IndexError):
            flops = _attention_flops(shapes, text, is_backward="Backward" in target)
            return Counter({_rate_of(shapes[0].dtype, text): flops}), ""
    # Pallas kernels for TPUs can state their cost.
    stated = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', text)
    if stated and int(stated[1]):
        return Counter({"bf16": int(stated[1])}), ""
    operation = re.search(r'op_name="([^"]*)"', text)
    name = operation[1].rpartition("/")[2] if operation else ""
    return Counter(), f"{target} ({name})" if name else target


def _attention_flops(shapes: Sequence[_Shape], text: str, is_backward: bool) -> int:
    """Return the FLOPs of cuDNN's attention: two products forward, five backward."""
    batch, heads, *_ = scores = _attention_scores(text)
    # Operands start with query, key, value, [batch, length, heads, head size] or with the lengths
    # and heads exchanged.
    of_query, of_value = shapes[0].dims[-1], shapes[2].dims[-1]
    size = 3 * of_query + 2 * of_value if is_backward else of_query + of_value
    return 2 * batch * heads * _attention_pairs(scores, text) * size


def _bias_bytes(shape: str, text: str) -> int:
    """Return the bytes that cuDNN's attention reads of a bias, such as a mask; 0 if it is none."""
    # Each head reads it, also if it is the same for all of them.
    with contextlib.suppress(ValueError):  # the text is of an unknown form
        batch, heads, *pair = scores = _attention_scores(text)
        (array,) = arrays(shape)
        dims = _Shape.parse(array).dims
        if list(dims[2:]) == pair and dims[0] in (1, batch) and dims[1] in (1, heads):
            itemsize = array.bytes // math.prod(dims)
            return batch * heads * _attention_pairs(scores, text) * itemsize
    return 0


def _attention_scores(text: str) -> tuple[int, ...]:
    """Return the shape of the scores: batch, heads, queries and keys."""
    scores = re.search(r'"intermediate_tensor_shape":\s*\{[^}]*"dimensions":\s*\[([^\]]*)\]', text)
    batch, heads, queries, keys = _numbers(scores)
    return batch, heads, queries, keys


def _attention_pairs(scores: Sequence[int], text: str) -> int:
    """Return the number of pairs of a query and a key that each head computes."""
    # Of causal attention, half of the pairs count; of a sliding window, those inside.
    *_, queries, keys = scores
    if "CAUSAL" not in text or keys != queries:
        return queries * keys
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', text)
    width = min(int(window[1]) if window else 0, queries) or queries
    return width * (width + 1) // 2 + (queries - width) * width


def _conv_flops(shapes: Sequence[_Shape], out: _Shape, text: str) -> int:
    """Return the FLOPs of a convolution, without products with padding and dilation holes."""
    image, kernel = shapes[0], shapes[1]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", text)
    assert labels is not None
    spatial = sorted(label for label in labels[1] if label.isdigit())
    window = dict(re.findall(r"(\w+)=([\w\-]+)", _braces(text, "window=")))
    # One value per spatial dimension, such as size=3x3 pad=1_1x1_1.
    values = {name: value.split("x") for name, value in window.items()}
    products = 1
    for i, label in enumerate(spatial):
        low = values["pad"][i].split("_")[0] if "pad" in values else "0"
        products *= _window_products(
            image.dims[labels[1].index(label)],
            kernel.dims[labels[2].index(label)],
            out.dims[labels[3].index(label)],
            int(values["stride"][i]) if "stride" in values else 1,
            int(low),
            int(values["lhs_dilate"][i]) if "lhs_dilate" in values else 1,
            int(values["rhs_dilate"][i]) if "rhs_dilate" in values else 1,
        )
    groups = re.search(r"batch_group_count=(\d+)", text)
    batch = image.dims[labels[1].index("b")] // (int(groups[1]) if groups else 1)
    # The kernel's input features are those of one group.
    features = kernel.dims[labels[2].index("i")] * out.dims[labels[3].index("f")]
    return (8 if image.dtype.startswith("c") else 2) * batch * features * products


@functools.lru_cache(maxsize=4096)
def _window_products(
    size: int, kernel: int, out: int, stride: int, low: int, dilation: int, kernel_dilation: int
) -> int:
    """Return the number of pairs of an output and a kernel position that meet an input."""
    at = np.arange(out, dtype=np.int64) * stride - low
    count = 0
    for offset in range(kernel):
        place = at + offset * kernel_dilation
        count += np.sum((place >= 0) & (place % dilation == 0) & (place // dilation < size))
    return int(count)


def _braces(text: str, start: str) -> str:
    """Return what the braces after `start` contain."""
    _, _, rest = text.partition(start + "{")
    return rest.partition("}")[0]
