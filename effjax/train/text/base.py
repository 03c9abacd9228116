"""The checkpoint that a run starts with."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ...convert import load_checkpoint
from ...convert.adapter import AdapterOptions, load_adapter, read_adapter_options
from ...convert.checkpoint import (
    IGNORED,
    check_checkpoint,
    complete_replacement,
    differ,
    find_tensors,
)
from ...convert.checkpoint import MODEL as WEIGHTS
from ...models import DecoderConfig
from ..errors import DataError, unreadable
from ..files import read_json
from ..run_directory import RunDirectory
from .hub import Repository, download, parse_name

GENERATION_CONFIG = "generation_config.json"
# The other files of a checkpoint, which an export copies if they exist.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    GENERATION_CONFIG,
)  # fmt: skip
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MODEL, ADAPTER = "model", "adapter"  # folders of a run, written at its end
ADAPTER_CONFIG = "adapter_config.json"
# What is downloaded of a repository. `*` also matches folders, such as those of other formats.
WEIGHT_FILES = "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"
ADAPTER_FILES = ADAPTER_CONFIG, "adapter_model.safetensors"
# Names of models that bitsandbytes or Unsloth have quantized begin with those of the models.
QUANTIZED = re.compile(r"(.+?)[-_](unsloth[-_])?(bnb[-_])?[48]bit", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Base:
    """A language model in Hugging Face's layout, from `find_base`.

    Attributes:
        folder: Its folder, an absolute path.
        model: The content of config.json, with the dtype that the parameters have in the run.
        repository: The repository of the Hub that it comes from, with its commit; None for a path.
    """

    folder: Path
    model: DecoderConfig
    repository: Repository | None = None

    @property
    def path(self) -> str:
        """The folder, or the name on the Hub."""
        return str(self.repository or self.folder)

    @functools.cached_property
    def config_sha256(self) -> str:
        """The digest of config.json, without the dtype, to recognize the model."""
        config = dataclasses.replace(self.model, dtype="float32").to_json()
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of config.json that do not change the network."""
        return json.loads(self.model.other_settings)

    @property
    def generation_settings(self) -> dict[str, Any]:
        """The content of generation_config.json; without one, the tokens of config.json."""
        if (file := self.folder / GENERATION_CONFIG).is_file():
            return read_json(file)
        names = "bos_token_id", "eos_token_id", "pad_token_id"
        return {name: self.settings[name] for name in names if name in self.settings}

    def missing_stops(self, tokens: Collection[int]) -> list[int]:
        """Return the tokens at which other programs do not end a text of this model."""
        return sorted({*tokens} - {*eos_tokens(self.generation_settings)})

    def generation_files(self, tokens: Collection[int]) -> dict[str, bytes]:
        """Return a generation_config.json, by name, with further tokens that end a text.

        There is none if the checkpoint's names all of them.
        """
        settings, missing = self.generation_settings, self.missing_stops(tokens)
        settings |= {"eos_token_id": [*eos_tokens(settings), *missing]}
        return {GENERATION_CONFIG: json.dumps(settings, indent=2).encode()} if missing else {}

    def digest_weights(self) -> str:
        """Return the digest of all bytes of the weights. It takes about a second per gigabyte.

        Raises:
            DataError: A file cannot be read.
        """
        digest = hashlib.sha256()
        # Other files beside them may be those of another program, or a pipe that blocks.
        tensors, *_ = convert_errors(self.folder, find_tensors, WEIGHTS)
        try:
            for file in sorted({tensor.path for tensor in tensors.values()}):
                with file.open("rb") as stream:
                    file_digest = hashlib.file_digest(stream, "sha256").hexdigest()
                digest.update(f"{file.name} {file_digest}\n".encode())
        except OSError as error:
            raise unreadable(self.folder, error) from error
        return digest.hexdigest()

    def check(self, layers: Any, others: Any) -> None:
        """Raise DataError unless the files have tensors of these shapes."""
        convert_errors(self.folder, check_checkpoint, layers, others, ignore=self._ignored)
        self._check_tied_head()

    def load(
        self, layers: Any, others: Any, progress: Callable[[int, int], object] | None = None
    ) -> tuple[Any, Any]:
        """Return ``(layers, others)``, as `load_checkpoint` does.

        Raises:
            DataError: The files cannot be read, or are those of another model.
        """
        self._check_tied_head()
        return convert_errors(
            self.folder, load_checkpoint, layers, others, ignore=self._ignored, progress=progress
        )

    @property
    def _ignored(self) -> tuple[str, ...]:
        # Files of models with tied embeddings may contain a copy of the head.
        return (*IGNORED, HEAD) if self.model.tie_word_embeddings else IGNORED

    def _check_tied_head(self) -> None:
        """Raise DataError if a head, which a model with tied embeddings ignores, is another one."""
        if self.model.tie_word_embeddings and self._has_other_head:
            raise DataError(
                f"{self.folder}: {HEAD} differs from {EMBEDDING}, and config.json has "
                "`tie_word_embeddings`, with which the head is not used. Set that to false to use "
                "it, or remove the tensor."
            )

    @functools.cached_property
    def _has_other_head(self) -> bool:
        return convert_errors(self.folder, differ, HEAD, EMBEDDING)

    @property
    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer, and the settings of generation."""
        files = (self.folder / name for name in TOKENIZER_FILES)
        return [file for file in files if file.is_file()]


def eos_tokens(settings: Mapping[str, Any]) -> list[int]:
    """Return the tokens of `eos_token_id`, in which JSON may have anything."""
    eos = settings.get("eos_token_id")
    values = eos if isinstance(eos, list) else [eos]
    return [token for token in values if type(token) is int and token >= 0]


def find_adapter(name: str) -> Path:
    """Return the folder of an adapter.

    Args:
        name: The folder, a run of `effjax finetune --lora`, or a name on the Hub.

    Raises:
        DataError: There is none.
    """
    folder = Path(os.path.realpath(name))
    if (repository := parse_name(name)) is not None:
        folder, _ = download(repository, ADAPTER_FILES)
    for path in (folder, folder / ADAPTER):
        if (path / ADAPTER_CONFIG).is_file():
            return path
    raise DataError(f"{name}: not a LoRA adapter, which has the file {ADAPTER_CONFIG}.")


def load_adapters(name: str, shapes: Any, scale: float) -> dict[str, Any]:
    """Return the matrices of an adapter, in the places of their shapes.

    Raises:
        DataError: They cannot be read, or have other shapes or another scale.
    """
    folder = find_adapter(name)
    arrays, stored = convert_errors(folder, load_adapter, shapes)
    if not math.isclose(stored, scale, rel_tol=1e-6):
        raise DataError(
            f"{folder}: its matrices are multiplied by {stored:g}, not by {scale:g}. Leave out "
            "`lora`, `lora_alpha` and `rslora`, which are those of the adapter."
        )
    return arrays


def read_adapter(name: str) -> AdapterOptions:
    """Return the options of an adapter; raise DataError."""
    return convert_errors(find_adapter(name), read_adapter_options)


def convert_errors(folder: Path, function: Callable, *args: Any, **options: Any) -> Any:
    """Call a function of `effjax.convert` on a folder; raise its errors as DataError."""
    try:
        return function(folder, *args, **options)
    except ValueError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise unreadable(folder, error) from error


def find_base(path: str, param_dtype: str | None, allow_file: bool = False) -> Base:
    """Read the config.json of a checkpoint.

    Args:
        path: The folder of the checkpoint, or its name on the Hub, which is downloaded.
        param_dtype: The dtype of the parameters in the run. None for that of config.json.
        allow_file: Whether the path may be that of config.json, which suffices for a plan. Of a
            repository, only this file is downloaded then.

    Raises:
        DataError: It cannot be read, or the network is unsupported.
    """
    folder = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):  # a folder that must not be changed
        complete_replacement(folder)
    repository = parse_name(path)
    if repository is not None:
        if found := QUANTIZED.fullmatch(repository.name):
            raise DataError(
                f"{repository.name}: quantized models are not supported. Use the one in full "
                f"precision, probably {found[1]}."
            )
        folder, repository = download(repository, ("config.json",))
    if not folder.exists():
        raise DataError(
            f"{path}: not found. Give the folder of a checkpoint with config.json, tokenizer.json "
            "and .safetensors files, or the name of a model on the Hub, such as Qwen/Qwen3-8B."
        )
    if RunDirectory(folder).is_run():
        hint = f"{path}/{MODEL}" if (folder / MODEL).is_dir() else "the folder of a checkpoint"
        raise DataError(f"{path}: a run, not a checkpoint. Give {hint}.")
    if not allow_file and not folder.is_dir():
        raise DataError(f"{path}: is a file. Give the folder of the checkpoint.")
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise DataError(
            f"{path}: a LoRA adapter, not a checkpoint. Give the checkpoint that it was trained "
            "on; effjax generate reads an adapter."
        )
    try:
        model = DecoderConfig.from_json(folder)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        message = str(error)  # names the file only if it is not JSON
        prefix = "" if message.startswith(str(folder)) else f"{path}: "
        raise DataError(f"{prefix}{message}") from error
    if repository is not None and not allow_file:  # gigabytes, of a network that is supported
        folder, repository = download(repository, ("config.json", *TOKENIZER_FILES, *WEIGHT_FILES))
    return Base(folder, dataclasses.replace(model, dtype=param_dtype or model.dtype), repository)
