"""The configuration of fine-tuning runs. Imports no JAX."""

import dataclasses
import math
from typing import ClassVar, Literal, Self

from ..config import (
    COUNT,
    DATA,
    FRACTION,
    MAX_SIZE,
    MODEL,
    NONNEGATIVE,
    OPTIMIZATION,
    POSITIVE,
    SHARE,
    SHARE_OR_COUNT,
    SIZE,
    Check,
    RunConfig,
    option,
)
from ..errors import TrainError

FULL_RATE, LORA_RATE = 1e-5, 2e-4
DPO_FULL_RATE, DPO_LORA_RATE = 1e-6, 1e-5
DPO_BETA = 0.1
PLANNED_PAIRS = 8  # of a packed row, for a plan without data
MAX_WEIGHT = 1000  # of a data set
# A token is predicted from the one before it.
LENGTH = Check(f"be between 2 and {MAX_SIZE}", lambda value: 2 <= value <= MAX_SIZE)
SAMPLE_TOKENS = 64
# Options that have no effect without another one.
NEEDED = {
    "lora_alpha": "lora", "lora_targets": "lora", "rslora": "lora", "lora_dropout": "lora",
    "sample_tokens": "sample_prompts", "sample_temperature": "sample_prompts",
}  # fmt: skip
Memory = Literal["device", "host"]
Policy = Literal["recompute", "dots", "everything"]
ParamDtype = Literal["bfloat16", "bfloat16-24", "float32"]
Quantize = Literal["nf4", "int8"]
Matmul = Literal["fp8"]
TRAINED_ON = "base_in"  # in the file of an adapter, of a quantized base: such as "nf4 bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """Options of `effjax finetune`.

    `prepare` fills in `steps` and `date`, and makes the path of the checkpoint absolute. The name
    of one on the Hub then has its commit.
    """

    COMMAND: ClassVar[str] = "finetune"
    UNIT: ClassVar[Literal["epoch", "step"]] = "step"

    checkpoint: str | None = option(
        None,
        help="A Llama, Qwen, Gemma or other model in Hugging Face's layout: a folder with "
        "config.json, tokenizer.json and .safetensors files, or a name on the Hub, such as "
        "Qwen/Qwen3-8B or "
        "Qwen/Qwen3-8B@REVISION. A plan needs config.json only.",
        positional=True,
    )
    data: list[str] | None = option(
        None,
        help="Rows with `messages`, `prompt` and `completion`, or `text`, or those of --loss dpo: "
        "a file of JSON, .csv or "
        ".parquet, or a data set of the Hub, OWNER/NAME[@REVISION][[:CONFIGURATION]:SPLIT]. Can be "
        "repeated.",
        group=DATA,
    )
    data_weights: str | None = option(
        None,
        help="How often the rows of each --data are seen in an epoch, such as 1,2. Of 0.5, half of "
        "the rows. (default: 1 each)",
        group=DATA,
    )
    columns: str | None = option(
        None,
        help="Names of columns, such as prompt=question,completion=answer. (default: as above, or "
        "those of Alpaca and ShareGPT)",
        group=DATA,
    )
    chat_template: str | None = option(
        None, help="A file with a chat template. (default: the checkpoint's)", group=DATA
    )
    validation: float = option(
        0.1,
        help="Rows held out to select the best parameters: a share, or a number. 0 for none.",
        group=DATA,
        check=SHARE_OR_COUNT,
    )
    validation_data: list[str] | None = option(
        None,
        help="Another data set, whose rows are the validation rows. Can be repeated.",
        group=DATA,
    )
    max_length: int = option(
        2048,
        help="Tokens of a sequence, at least 2. Longer conversations are cut.",
        group=DATA,
        check=LENGTH,
    )
    packing: bool = option(
        True,
        help="Put several sequences into a row. Tokens attend to their own sequence only.",
        group=DATA,
    )
    order: Literal["random", "file"] = option(
        "random",
        help="Order of the rows of each epoch: random, or that of the data. Packing then joins "
        "neighbors.",
        group=DATA,
    )
    date: str | None = option(
        None,
        help="Date that chat templates write, as in 2026-01-31. (default: today)",
        group=DATA,
    )
    lora: int | None = option(
        None,
        help="Train only adapters of this rank. (default: train all parameters)",
        group=MODEL,
        check=SIZE,
    )
    lora_alpha: float | None = option(
        None,
        help="The product of adapters is multiplied by alpha / rank. (default: 2 · rank)",
        group=MODEL,
        check=POSITIVE,
    )
    lora_targets: str | None = option(
        None,
        help="Linear layers with adapters, such as q_proj,v_proj. (default: all)",
        group=MODEL,
    )
    rslora: bool = option(
        False, help="Multiply the product of adapters by alpha / sqrt(rank).", group=MODEL
    )
    lora_dropout: float | None = option(
        None,
        help="Share of the inputs of adapters that is dropped in each step. (default: 0, or that "
        "of --adapter)",
        group=MODEL,
        check=SHARE,
    )
    adapter: str | None = option(
        None,
        help="Start from this adapter, a folder, a run or a name on the Hub, with its rank, scale, "
        "layers and dropout.",
        group=MODEL,
    )
    quantize: Quantize | None = option(
        None,
        help="With --lora, keep the weights of the linear layers in 4 bits (nf4, as QLoRA) or 8 "
        "bits (int8), with a scale for 64 values each. (default: in --param-dtype)",
        group=MODEL,
    )
    params_in: Memory = option(
        "device", help="The memory of the parameters and the optimizer state.", group=MODEL
    )
    activations_in: Memory | None = option(
        None, help="The memory of the residuals of the layers. (default: --params-in)", group=MODEL
    )
    fuse_update: bool = option(
        False,
        help="Update each layer during the backward pass. Gradients are then clipped by the norm "
        "of the previous step.",
        group=MODEL,
    )
    policy: Policy = option(
        "recompute",
        help="Residuals of a layer: its input only, also the matrix products, or everything. The "
        "rest is recomputed in the backward pass.",
        group=MODEL,
    )
    num_microbatches: int = option(
        1,
        help="Parts that the batch is split into. A layer is loaded once for all of them.",
        group=MODEL,
        check=SIZE,
    )
    mlp_chunk_size: int | None = option(
        None,
        help="Positions that an MLP processes at a time. (default: all)",
        group=MODEL,
        check=COUNT,
    )
    param_dtype: ParamDtype = option(
        "bfloat16",
        help="Dtype of the parameters. Updated bfloat16 parameters are rounded stochastically; "
        "bfloat16-24 keeps 8 more bits of each for the updates.",
        group=MODEL,
    )
    loss: Literal["cross_entropy", "dpo"] = option(
        "cross_entropy",
        help="The cross entropy of tokens; or dpo, the preferences of rows with `chosen` and "
        "`rejected`.",
        group=OPTIMIZATION,
    )
    dpo_beta: float | None = option(
        None,
        help="Factor of the rewards of --loss dpo: the larger, the closer the model stays to the "
        f"one at the start. (default: {DPO_BETA:g})",
        group=OPTIMIZATION,
        check=POSITIVE,
    )
    epochs: int = option(3, help="Passes over the rows.", group=OPTIMIZATION, check=COUNT)
    steps: int | None = option(
        None,
        help="Steps to train. (default: those of --epochs)",
        group=OPTIMIZATION,
        check=COUNT,
    )
    report_every: int | None = option(
        None,
        help="Steps between validations, each with a checkpoint. (default: an epoch)",
        group=OPTIMIZATION,
        check=COUNT,
    )
    batch_size: int = option(
        8,
        help="Rows of --max-length tokens per step, over all devices; with --loss dpo, pairs of "
        "them.",
        group=OPTIMIZATION,
        check=COUNT,
    )
    optimizer: Literal["adamw", "adamw8bit", "muon"] = option(
        "adamw",
        help="AdamW with moments in 32 or in 8 bits; or Muon for the matrices of each layer, and "
        "AdamW for the rest.",
        group=OPTIMIZATION,
    )
    learning_rate: float | None = option(
        None,
        help=f"Largest learning rate. (default: {FULL_RATE:g}, or {LORA_RATE:g} with --lora; with "
        f"--loss dpo {DPO_FULL_RATE:g}, or {DPO_LORA_RATE:g})",
        group=OPTIMIZATION,
        check=POSITIVE,
    )
    warmup: float = option(
        0.03,
        help="Share of the steps in which the learning rate grows. It then follows --schedule.",
        group=OPTIMIZATION,
        check=SHARE,
    )
    schedule: Literal["cosine", "linear", "constant"] = option(
        "cosine", help="Form of the learning rate after the warmup.", group=OPTIMIZATION
    )
    first_rate: float = option(
        0.1,
        help="Learning rate at the start of the warmup, as a share of the largest.",
        group=OPTIMIZATION,
        check=FRACTION,
    )
    lowest_rate: float = option(
        0.1,
        help="Learning rate at the end of a cosine or linear schedule, as a share of the largest.",
        group=OPTIMIZATION,
        check=FRACTION,
    )
    beta1: float = option(
        0.9, help="Decay rate of AdamW's first moment.", group=OPTIMIZATION, check=SHARE
    )
    beta2: float = option(
        0.95, help="Decay rate of AdamW's second moment.", group=OPTIMIZATION, check=SHARE
    )
    epsilon: float = option(
        1e-8,
        help="Added to the root of AdamW's second moment.",
        group=OPTIMIZATION,
        check=POSITIVE,
    )
    weight_decay: float = option(
        0.0,
        help="Weight decay of linear layers. Norms and embeddings have none.",
        group=OPTIMIZATION,
        check=NONNEGATIVE,
    )
    clip_norm: float = option(
        1.0,
        help="Largest norm of the gradients. 0 disables clipping.",
        group=OPTIMIZATION,
        check=NONNEGATIVE,
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "bfloat16", help="Dtype of the computation.", group=OPTIMIZATION
    )
    matmul: Matmul | None = option(
        None,
        help="Products of the layers' weights: fp8 rounds both factors to 8-bit floating-point "
        "numbers, with one scale for each array. (default: in --dtype)",
        group=OPTIMIZATION,
    )
    sample_prompts: str | None = option(
        None,
        help="A file with a prompt in each line, spaces included. At each validation, the texts "
        "that the model generates for them are printed, and written into metrics.jsonl.",
    )
    sample_tokens: int | None = option(
        None,
        help=f"Largest number of tokens of a text of --sample-prompts. (default: {SAMPLE_TOKENS})",
        check=COUNT,
    )
    sample_temperature: float | None = option(
        None,
        help="Divisor of the logits for --sample-prompts. (default: 0, which takes the most "
        "probable token)",
        check=NONNEGATIVE,
    )

    def __post_init__(self) -> None:
        for name in ("data", "validation_data"):
            if isinstance(value := getattr(self, name), str):  # in Python
                object.__setattr__(self, name, [value])
        super().__post_init__()

    @property
    def stored_dtype(self) -> str:
        """The dtype of the parameters, without the bits that the optimizer keeps."""
        return self.param_dtype.removesuffix("-24")

    @property
    def weights_of_data(self) -> list[float] | None:
        """The numbers of `data_weights`."""
        if self.data_weights is None:
            return None
        try:
            weights = [float(number) for number in self.data_weights.split(",")]
        except ValueError:
            weights = []
        if not weights or not all(0 < weight <= MAX_WEIGHT for weight in weights):
            raise TrainError(
                f"`data_weights` (={self.data_weights!r:.120}) must be numbers above 0 and at most "
                f"{MAX_WEIGHT}, such as 1,2"
            )
        return weights

    @property
    def has_pairs(self) -> bool:
        """True if an example is a pair of a chosen and a rejected answer."""
        return self.loss == "dpo"

    @property
    def rows_per_example(self) -> int:
        """Rows of tokens of an example of a batch."""
        return 2 if self.has_pairs else 1

    # Plans read no data. How many pairs a packed row has depends on them; it changes two small
    # arrays only.
    def batch_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype of each array of a batch, by name."""
        rows = self.batch_size, *([2] if self.has_pairs else []), self.max_length
        names = "tokens", "labels", "positions", *(["segment_ids"] if self.packing else [])
        shapes = {**dict.fromkeys(names, (rows, "int32")), "weights": (rows, "float32")}
        if self.has_pairs:
            pairs = self.batch_size, PLANNED_PAIRS if self.packing else 1
            shapes |= {"pairs": (pairs, "float32"), "references": ((*pairs, 2), "float32")}
        return shapes

    @property
    def lora_scale(self) -> float:
        """The factor of the product of adapters; 1 without adapters."""
        if self.lora is None:
            return 1.0
        if self.lora_alpha is None:
            return 2.0
        return self.lora_alpha / (math.sqrt(self.lora) if self.rslora else self.lora)

    def resolve(self) -> Self:
        """Return the configuration with the defaults that depend on other options.

        Raises:
            TrainError: Options that cannot be combined.
        """
        if self.adapter is not None and self.lora is None:
            return self._with_adapter().resolve()
        self._check()
        beta = DPO_BETA if self.has_pairs else None
        rate = self._default_rate if self.learning_rate is None else self.learning_rate
        return dataclasses.replace(self, learning_rate=rate, dpo_beta=self.dpo_beta or beta)

    def _check(self) -> None:
        for name, needed in NEEDED.items():
            value = getattr(self, name)
            if value is not None and value is not False and getattr(self, needed) is None:
                raise TrainError(f"`{name}` (={value}) needs `{needed}`")
        if self.quantize is not None and self.lora is None:
            raise TrainError(
                f"`quantize` (={self.quantize}) needs `lora`: quantized weights cannot be trained. "
                "Train adapters, such as those of `lora` (=16)"
            )
        if self.matmul is not None and self.quantize is not None:
            raise TrainError(
                f"`matmul` (={self.matmul}) needs weights in `param_dtype`, without `quantize` "
                f"(={self.quantize}), whose products are in `dtype`"
            )
        # The default alpha, 2 · rank, would make the scale of rsLoRA grow with the rank.
        if self.rslora and self.lora_alpha is None:
            raise TrainError("`rslora` needs `lora_alpha`")
        if self.lora is not None and self.optimizer == "muon":
            raise TrainError(
                "`optimizer` (=muon) trains the matrices of layers, not the adapters of `lora`"
            )
        if self.dpo_beta is not None and not self.has_pairs:
            raise TrainError(f"`dpo_beta` (={self.dpo_beta:g}) needs `loss` (=dpo)")
        count, weights = len(self.data or ()), self.weights_of_data
        if weights is not None and len(weights) != count:
            raise TrainError(
                f"`data_weights` (={self.data_weights}) must have a number for each `data`, and "
                f"there are {count}"
            )
        if self.fuse_update and self.on_nan == "skip":
            raise TrainError(
                "`on_nan` (=skip) cannot be combined with `fuse_update`, which updates the last "
                "layers before the gradients of the first ones exist"
            )
        if self.patience is not None and not (self.validation or self.validation_data):
            raise TrainError(f"`patience` (={self.patience}) needs validation rows")
        if self.batch_size % self.num_microbatches:
            raise TrainError(
                f"`num_microbatches` (={self.num_microbatches}) must divide `batch_size` "
                f"(={self.batch_size})"
            )

    def check_devices(self, num_devices: int) -> None:
        """Raise TrainError if the devices do not support the options."""
        if self.num_microbatches > 1 < num_devices:
            raise TrainError(
                f"`num_microbatches` (={self.num_microbatches}) needs a single device, not "
                f"{num_devices}"
            )

    @property
    def _default_rate(self) -> float:
        if self.has_pairs:
            return DPO_FULL_RATE if self.lora is None else DPO_LORA_RATE
        return FULL_RATE if self.lora is None else LORA_RATE

    def _with_adapter(self) -> Self:
        """Return the configuration with the options of its adapter."""
        from .base import read_adapter

        for name in ("lora_alpha", "lora_targets", "rslora"):
            if value := getattr(self, name):
                raise TrainError(f"`{name}` (={value}) is that of `adapter`. Leave it out.")
        assert self.adapter is not None
        options = read_adapter(self.adapter)
        dropout = options.dropout if self.lora_dropout is None else self.lora_dropout
        # The files have a scale, which this alpha gives without rsLoRA.
        return dataclasses.replace(
            self,
            lora=options.rank,
            lora_alpha=options.scale * options.rank,
            lora_targets=",".join(options.modules),
            lora_dropout=dropout,
        )
