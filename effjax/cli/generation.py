"""The options of the commands that generate text, and what these commands share."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..train.config import COUNT, FRACTION, MODEL, NONNEGATIVE, SEED, check_options, option
from ..train.errors import TrainError
from ..train.host_memory import set_pinned_limit
from .errors import CommandError

if TYPE_CHECKING:
    from ..models.generate import Options
    from ..train.text.model import TextModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of `effjax generate` and `effjax chat`."""

    checkpoint: str = option(
        help="Folder of a Llama, Qwen, Gemma or other model in Hugging Face's layout, of a run of "
        "effjax finetune, or of a LoRA adapter; or the name of a model or an adapter on the Hub.",
        positional=True,
    )
    base: str | None = option(
        None,
        help="The base model of an adapter. (default: the one that the adapter names)",
        group=MODEL,
    )
    chat_template: str | None = option(
        None, help="A file with a chat template. (default: the checkpoint's)", group=MODEL
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        None,
        help="Dtype of the parameters and the computation. (default: the checkpoint's)",
        group=MODEL,
    )
    params_in: Literal["device", "host"] = option(
        "device",
        help="The memory of the layers. One in host memory is loaded for each token.",
        group=MODEL,
    )
    mesh: str | None = option(
        None,
        help="Shard the parameters over all devices, such as fsdp=4. (default: the first device)",
        group=MODEL,
    )
    system: str | None = option(None, help="System message before the first message.")
    stop: list[str] | None = option(None, help="End before this text. Can be repeated.")
    max_tokens: int = option(100, help="Largest number of tokens to generate.", check=COUNT)
    temperature: float = option(
        0.7, help="Divisor of the logits. 0 takes the most probable token.", check=NONNEGATIVE
    )
    top_k: int | None = option(
        None, help="Sample from this many most probable tokens. (default: all)", check=COUNT
    )
    top_p: float | None = option(
        None,
        help="Sample from the most probable tokens that sum to this probability. (default: all)",
        check=FRACTION,
    )
    seed: int = option(0, help="Seed of the sampling.", check=SEED)

    def __post_init__(self) -> None:
        check_options(self)

    def find_model(self) -> "TextModel":
        """Find the checkpoint or adapter, and its tokenizer."""
        import datetime

        from rich.console import Console

        from ..train.report import print_line
        from ..train.text.model import find_model

        # Before JAX starts: XLA reads the variable once.
        set_pinned_limit()
        today = datetime.date.today()
        model = find_model(self.checkpoint, self.dtype, today, self.base, self.chat_template)
        if (note := describe_base(model)) is not None:
            print_line(Console(stderr=True), note)
        return model

    def load(self, model: "TextModel") -> tuple[Any, Any, float]:
        """Load the parameters as `TextModel.load` does, with a bar on a terminal."""
        from rich.console import Console

        from ..train.report import load_bar
        from ..train.text.model import generation_mesh

        # On stderr, because stdout may be a pipe that gets the text.
        with load_bar(Console(stderr=True)) as update:
            return model.load(self.params_in, update, generation_mesh(self.mesh))

    def sampling(self, model: "TextModel", max_tokens: int, stop_tokens: set[int]) -> "Options":
        """Return the options of `effjax.models.generate`; raise TrainError."""
        from ..models.generate import check_options

        # Before the weights are loaded, which can take minutes. `lora_scale` comes with them.
        try:
            return check_options(
                model.config, max_new_tokens=max_tokens, temperature=self.temperature,
                top_k=self.top_k, top_p=self.top_p, stop_tokens=sorted(stop_tokens),
            )  # fmt: skip
        except ValueError as error:
            raise TrainError(str(error)) from error

    @contextlib.contextmanager
    def explain_memory(self, other: str) -> Iterator[None]:
        """Convert the error of a full device memory to one with remedies, `other` among them."""
        try:
            yield
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            remedies = "" if self.params_in == "host" else "--params-in host, "
            raise CommandError(
                f"out of device memory. Try {remedies}{other}, or --mesh over several devices."
            ) from error


def describe_base(model: "TextModel") -> str | None:
    """Return how a base differs from the quantized one that its adapter was trained on."""
    from ..train.files import read_json
    from ..train.text.base import ADAPTER_CONFIG, QUANTIZED

    if model.adapter is None:
        return None
    base = str(read_json(model.adapter / ADAPTER_CONFIG).get("base_model_name_or_path"))
    if model.trained_on is None and not QUANTIZED.fullmatch(base):
        return None
    form = base if model.trained_on is None else f"the base model in {model.trained_on[0]}"
    dtype = model.config.dtype
    return f"{model.adapter}: trained on {form}, and added to {model.base.path} in {dtype}"
