"""The options of a run, checked. Imports nothing heavy: the help of the command needs this."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ..errors import TrainError
from ..options import (
    COUNT,
    DATA,
    DECAY,
    HELD_OUT,
    MODEL,
    OPTIMIZATION,
    RATE,
    SEED,
    SHARE,
    CheckpointEvery,
    MeshAxes,
    OnNan,
    Option,
    RunOptions,
)


@dataclasses.dataclass(frozen=True)
class LMConfig(RunOptions):
    """What `effjax train lm` can be asked for."""

    COMMANDS: ClassVar[str] = "effjax train lm"
    # Of runs without a validation text: the test text was looked at at each report.
    BEFORE: ClassVar[Mapping[str, Any]] = {"validation": 0}

    data: Annotated[
        str, Option("pydoc (Python's own help), or text:PATH of a file or a folder.", DATA)
    ] = "pydoc"
    validation: Annotated[
        float,
        Option(
            "Held out of the text to choose the best step by: a share, or bytes.", DATA, HELD_OUT
        ),
    ] = 0.1
    context: Annotated[int, Option("Bytes that a prediction can look at.", DATA, COUNT)] = 128

    init_from: Annotated[
        str | None,
        Option("Run of this command whose best weights to begin with.", MODEL, unset="the seed"),
    ] = None
    lora: Annotated[
        int | None,
        Option(
            "Rank of matrices beside the kernels of the layers; these alone are trained.",
            MODEL,
            COUNT,
            unset="all is trained",
        ),
    ] = None
    layers: Annotated[int, Option("Blocks of attention and MLP.", MODEL, COUNT)] = 4
    width: Annotated[int, Option("Channels of each layer.", MODEL, COUNT)] = 128
    heads: Annotated[int, Option("Heads that share the width.", MODEL, COUNT)] = 4
    bias: Annotated[bool, Option("Biases, and LayerNorm instead of RMSNorm.", MODEL)] = False
    dropout: Annotated[
        float, Option("Dropout of what each half of a layer adds.", MODEL, SHARE)
    ] = 0.0
    remat: Annotated[bool, Option("Compute each layer again in the backward pass.", MODEL)] = False
    offload: Annotated[
        Literal["none", "activations", "params", "all"],
        Option("What lives in host memory: the layers' inputs, their parameters, or both.", MODEL),
    ] = "none"
    fuse_update: Annotated[
        bool, Option("Update each layer in the backward pass, wherever it lives.", MODEL)
    ] = False
    policy: Annotated[
        Literal["recompute", "dots", "everything"],
        Option("What such a layer keeps for the backward pass, besides its input.", MODEL),
    ] = "recompute"
    num_microbatches: Annotated[
        int, Option("Parts of a batch that go through a layer while it is loaded.", MODEL, COUNT)
    ] = 1

    steps: Annotated[int, Option("Batches to train on.", OPTIMIZATION, COUNT)] = 300
    batch_size: Annotated[
        int, Option("Windows of text of a step, over all devices.", OPTIMIZATION, COUNT)
    ] = 8
    learning_rate: Annotated[
        float, Option("Adam's rate after the warmup; cosine to a tenth.", OPTIMIZATION, RATE)
    ] = 3e-3
    weight_decay: Annotated[
        float,
        Option("Of kernels and adapters; norms, biases, embedding: none.", OPTIMIZATION, DECAY),
    ] = 0.1
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option("Of the computation; parameters are float32.", OPTIMIZATION),
    ] = "float32"
    report_every: Annotated[
        int, Option("Steps from one validation and checkpoint to the next.", bounds=COUNT)
    ] = 100
    checkpoint_every: CheckpointEvery = None
    on_nan: OnNan = "stop"
    mesh: MeshAxes = None
    seed: Annotated[int, Option("Of parameters, order, dropout.", bounds=SEED)] = 0

    @property
    def command(self) -> str:
        return "lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise TrainError(
                f"width (={self.width}) must be divisible by 2 · heads (={self.heads}); use "
                f"{max(self.width // (2 * self.heads), 1) * 2 * self.heads}"
            )
        if self.lora is not None and self.lora > self.width:
            raise TrainError(f"lora (={self.lora}) must be at most the width (={self.width})")
        in_slices = self.offload != "none" or self.fuse_update
        for name, plain in (("num_microbatches", 1), ("policy", "recompute")):
            if (value := getattr(self, name)) != plain and not in_slices:
                raise TrainError(
                    f"{name} (={value}) is of layers that are offloaded or updated in the backward "
                    "pass; use offload or fuse_update"
                )
        if self.remat and in_slices:
            raise TrainError(
                "remat is what offload and fuse_update do anyway; leave one of them out"
            )
        if self.fuse_update and self.on_nan == "skip":
            raise TrainError(
                "on_nan (=skip) cannot be had with fuse_update, which updates the first layers "
                "before the last gradients exist; leave that out, or use on_nan rollback"
            )
        if self.batch_size % self.num_microbatches:
            raise TrainError(
                f"num_microbatches (={self.num_microbatches}) must divide batch_size "
                f"(={self.batch_size})"
            )
