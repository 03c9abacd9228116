"""A language model to generate with: its checkpoint, adapter and tokenizer, and its parameters."""

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from ...convert.adapter import load_adapter, read_adapter_options
from ...convert.checkpoint import complete_replacement
from ...models import DecoderConfig, decoder_shapes
from ...ops.quantize import FORMATS, Format
from ..errors import DataError, TrainError
from ..files import read_json
from ..mesh import AXIS, FSDP, make_mesh, param_shardings, put, with_shardings
from ..run_directory import RunDirectory
from .base import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILES, MODEL, Base, convert_errors, find_base
from .chat import CHAT_TEMPLATE, Tokenizer, load_tokenizer
from .config import TRAINED_ON, FinetuneConfig
from .hub import download, parse_name


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A language model and its tokenizer, from `find_model`.

    Attributes:
        base: The checkpoint.
        adapter: The folder of a LoRA adapter, or None.
        tokenizer: The tokenizer of the checkpoint.
    """

    base: Base
    adapter: Path | None
    tokenizer: Tokenizer

    @property
    def config(self) -> DecoderConfig:
        """The configuration of the decoder."""
        return self.base.model

    @functools.cached_property
    def trained_on(self) -> tuple[Format, str] | None:
        """The format in which the adapter's run has quantized the base, and its dtype; or None."""
        if self.adapter is None:
            return None
        metadata = convert_errors(self.adapter, read_adapter_options).metadata
        form, _, dtype = str(metadata.get(TRAINED_ON, "")).partition(" ")
        return (form, dtype) if form in FORMATS else None

    def load(
        self,
        params_in: Literal["device", "host"],
        progress: Callable[[int, int], object] | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[Any, Any, float]:
        """Load the parameters.

        Args:
            params_in: The memory of the layers.
            progress: Called with the bytes read and their total.
            mesh: The devices, from `generation_mesh`. By default the first one.

        Returns:
            The parameters of the layers, those outside the layers, and the scale of the adapter.

        Raises:
            DataError: The files cannot be read, or do not belong to each other.
        """
        mesh = generation_mesh(None) if mesh is None else mesh
        layers, others = decoder_shapes(self.config)
        adapters, scale = self._load_adapter(layers)

        def place(shapes: Any, kind: str, stacked: bool) -> Any:
            shardings = param_shardings(shapes, mesh, stacked)
            return jax.tree.map(lambda sharding: sharding.with_memory_kind(kind), shardings)

        memory = "pinned_host" if params_in == "host" else "device"
        adapters = put(adapters, place(adapters, memory, True))
        layers = with_shardings(layers, place(layers, memory, True))
        others = with_shardings(others, place(others, "device", False))
        layers, others = self.base.load(layers, others, progress)
        return layers | adapters, others, scale

    def _load_adapter(self, layers: Any) -> tuple[dict[str, jax.Array], float]:
        if self.adapter is None:
            return {}, 1.0
        arrays, scale = convert_errors(self.adapter, load_adapter)
        # Without this check, a matrix of another model fails in the first product, without a name.
        for name, a in arrays.items():
            module, matrix, _ = name.rsplit(".", 2)
            weight = layers.get(f"{module}.weight")
            # A is [L, r, in], B is [L, out, r], and the weight [L, out, in]. Those of experts have
            # an axis after that of layers.
            rank_axis = -2 if matrix == "lora_A" else -1
            if weight is None or not _fits(a.shape, weight.shape, rank_axis):
                raise DataError(
                    f"{self.adapter}: does not fit its base model {self.base.folder}. {name} has "
                    f"the shape {a.shape}, and {module}.weight "
                    f"{'does not exist' if weight is None else weight.shape}."
                )
        return arrays, scale


def _fits(shape: tuple[int, ...], of_weight: tuple[int, ...], rank_axis: int) -> bool:
    """Return True if the shapes of an adapter's matrix and a weight differ in the rank only."""
    needed = list(of_weight)
    needed[rank_axis] = shape[rank_axis]
    return shape == tuple(needed)


def find_model(
    name: str | Path,
    dtype: str | None,
    today: datetime.date,
    base_name: str | None = None,
    chat_template: str | None = None,
) -> TextModel:
    """Find a checkpoint, the model or adapter of a run of `effjax finetune`, or an adapter.

    Args:
        name: The folder, or a name on the Hub.
        dtype: The dtype of the parameters. None for that of the checkpoint.
        today: The date that chat templates may write.
        base_name: The model that an adapter belongs to, in place of the one that it names.
        chat_template: A file with another chat template.

    Raises:
        DataError: None of them is in the folder, or its files are invalid.
        TrainError: `base_name` is given for a checkpoint.
    """
    path, adapter, checkpoint = Path(name), None, str(name)
    if (repository := parse_name(str(name))) is not None:
        # Of an adapter, this downloads its two files; of a checkpoint, nothing yet.
        path, _ = download(repository, ("config.json", *ADAPTER_FILES))
    # An export that was killed between its two renames has left the new folder under another name.
    for part in (MODEL, ADAPTER):
        with contextlib.suppress(OSError):  # a run that must not be changed
            complete_replacement(path / part)
    if (path / MODEL / "config.json").is_file():
        checkpoint = str(path / MODEL)
    elif found := [p for p in (path / ADAPTER, path) if (p / ADAPTER_CONFIG).is_file()]:
        adapter = found[0]
        checkpoint = base_name or _find_base_of(adapter)
    elif path.is_dir() and (run := RunDirectory(path)).is_run():
        if run.read_config().get("command") != FinetuneConfig.COMMAND:
            raise DataError(f"{path}: not a run of effjax finetune. Give one, or a checkpoint.")
        raise DataError(
            f"{path}: a run without {MODEL}/ and {ADAPTER}/, which effjax finetune writes at its "
            "end. Resume it, or give another run or a checkpoint."
        )
    if base_name is not None and adapter is None:
        raise TrainError(f"--base {base_name} needs an adapter, and {name} is none.")
    try:
        base = find_base(checkpoint, dtype)
    except DataError as error:
        if adapter is None or base_name is not None:
            raise
        file = adapter / ADAPTER_CONFIG
        raise DataError(f"{error} {file} names it; give another one with --base.") from error
    template = None if chat_template is None else Path(chat_template)
    if template is None and adapter is not None and (adapter / CHAT_TEMPLATE).is_file():
        template = adapter / CHAT_TEMPLATE
    return TextModel(base, adapter, load_tokenizer(base.folder, today, template))


def _find_base_of(adapter: Path) -> str:
    """Return the folder of the model that an adapter belongs to, or its name on the Hub."""
    file = adapter / ADAPTER_CONFIG
    config = read_json(file)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if isinstance(base, str) and Path(base).is_dir():
        return base
    if isinstance(base, str) and (repository := parse_name(base)) is not None:
        return str(repository._replace(revision=revision or repository.revision))
    raise DataError(
        f"{file}: `base_model_name_or_path` (={base!r:.200}) must be the folder of the base model, "
        "or its name on the Hub. Give the base model with --base."
    )


def generation_mesh(axes: str | None) -> Mesh:
    """Return the devices that generate: the first one, or all over which parameters are sharded.

    Args:
        axes: Such as `fsdp=4`, as for `make_mesh`. None for the first device.

    Raises:
        TrainError: The sizes do not multiply to the number of devices of this process, or one of
            `data`, over which a single prompt cannot be split.
    """
    if axes is None:
        return make_mesh(None, jax.local_devices()[:1])
    mesh = make_mesh(axes, jax.local_devices())
    if mesh.shape.get(AXIS, 1) > 1:
        raise TrainError(
            f"`mesh` (={axes}) must be {FSDP}={mesh.size}: one prompt is completed at a time, so "
            f"that there is nothing to split over `{AXIS}`."
        )
    return mesh
