"""Text generation from a checkpoint, a run or an adapter: prompts to tokens, tokens to text."""

import contextlib
import dataclasses
import datetime
import functools
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ...convert import load_adapter, save_checkpoint
from ...convert.checkpoint import complete_replacement
from ...models import DecoderConfig, decoder_shapes
from ...models.generate import Options, advance, empty_state, extend, start
from ...ops.offload import offload_jit
from ..errors import DataError, TrainError, counted, printable, quoted, unreadable
from ..mesh import (
    AXIS,
    FSDP,
    make_mesh,
    param_sharding,
    put,
    replicated,
    with_shardings,
)
from ..run_directory import RunDirectory
from .base import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILES, MODEL, Base, find_base
from .chat import CHAT_TEMPLATE, Tokenizer, load_tokenizer
from .config import FinetuneConfig
from .forms import Conversation
from .hub import download, parse_name

CONTENT = "effjax-turn"  # content of a turn; no template contains this text
# Characters that are shown although they are not printable; two of them join letters and emoji.
KEPT = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
CHUNK = 128  # tokens of a conversation that are run at a time
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from some of the bytes of a character


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

    def load(
        self,
        offload: bool,
        progress: Callable[[int, int], object] | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[Any, Any, float]:
        """Load the parameters.

        Args:
            offload: Whether the layers stay in host memory.
            progress: Called with the bytes read and their total.
            mesh: The devices, from `generation_mesh`. By default the first one.

        Returns:
            The parameters of the layers, those outside the layers, and the scale of the adapter.

        Raises:
            DataError: The files cannot be read, or do not belong to each other.
        """
        mesh = generation_mesh(None) if mesh is None else mesh
        layers, others = decoder_shapes(self.config)

        def place(shapes: Any, kind: str, stacked: bool) -> Any:
            return {
                name: param_sharding(a.shape, mesh, stacked).with_memory_kind(kind)
                for name, a in shapes.items()
            }

        memory = "pinned_host" if offload else "device"
        adapters, scale = self._load_adapter(layers)
        adapters = put(adapters, place(adapters, memory, True))
        layers = with_shardings(layers, place(layers, memory, True))
        others = with_shardings(others, place(others, "device", False))
        layers, others = self.base.load(layers, others, progress)
        return layers | adapters, others, scale

    def encode(
        self, prompt: str | Conversation, system: str | None, chat: bool
    ) -> tuple[list[int], set[int]]:
        """Return the tokens of a prompt, and those that end its completion.

        Args:
            prompt: The text to continue, the message of the user, or a conversation.
            system: The message of the system, if there is one.
            chat: Whether to render the messages with the chat template.

        Raises:
            DataError: The template does not accept the messages.
            TrainError: A conversation needs a template, or has a message of the system already.
        """
        if isinstance(prompt, str):
            conversation = Conversation([{"role": "user", "content": prompt}])
        elif chat:
            conversation = prompt
        else:
            raise TrainError("A list of messages needs a chat template, and --chat.")
        messages = [*conversation.messages]
        contents = [("prompt", message.get("content")) for message in messages]
        for name, text in (*contents, ("system", system)):
            if text is not None and text.encode(errors="ignore").decode() != text:
                raise TrainError(f"`{name}` must be UTF-8.")
        tokenizer = self.tokenizer
        if not chat:
            assert isinstance(prompt, str)
            return [*tokenizer.beginning, *self._encode_text(prompt)], self._stop_tokens()
        if system is not None:
            if messages[0]["role"] == "system":
                raise TrainError("--system is given, and a conversation has a message of its own.")
            messages.insert(0, {"role": "system", "content": system})
        options: Any = {"tools": conversation.tools, "variables": conversation.variables}
        text = tokenizer.render(messages, add_generation_prompt=True, **options)
        # Templates may end a turn by another token than EOS.
        answer = {"role": "assistant", "content": CONTENT}
        turn = tokenizer.render([*messages, answer], **options)
        after = self._encode_text(turn.rpartition(CONTENT)[2])[:1]
        ends = tokenizer.special_tokens.intersection(after)
        return self._encode_text(text), self._stop_tokens() | ends

    def _encode_text(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    def _stop_tokens(self) -> set[int]:
        """Return the EOS tokens of the tokenizer, config.json and generation_config.json."""
        settings = [json.loads(self.config.other_settings)]
        file = self.base.folder / "generation_config.json"
        try:
            settings.append(json.loads(file.read_bytes()) if file.is_file() else {})
        except OSError as error:
            raise unreadable(file, error) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: is not JSON ({quoted(error)})") from error
        tokens = set(self.tokenizer.end)
        for content in settings:
            eos = content.get("eos_token_id") if isinstance(content, dict) else None
            values = eos if isinstance(eos, list) else [eos]
            ends = {token for token in values if type(token) is int and token >= 0}
            if max(ends, default=0) >= 2**31:
                raise DataError(
                    f"{self.base.folder}: `eos_token_id` (={max(ends)}) must be below `vocab_size` "
                    f"(={self.config.vocab_size})."
                )
            tokens |= ends
        return tokens

    def _load_adapter(self, layers: Any) -> tuple[dict[str, jax.Array], float]:
        if self.adapter is None:
            return {}, 1.0
        try:
            arrays, scale = load_adapter(self.adapter)
        except ValueError as error:
            raise DataError(str(error)) from error
        except OSError as error:
            raise unreadable(self.adapter, error) from error
        for name, a in arrays.items():
            module, matrix, _ = name.rsplit(".", 2)
            weight = layers.get(f"{module}.weight")
            fits = weight is not None and a.shape[0] == weight.shape[0]
            # A is [L, r, in], B is [L, out, r], and the weight [L, out, in].
            axis = 2 if matrix == "lora_A" else 1
            if weight is None or not fits or a.shape[axis] != weight.shape[axis]:
                raise DataError(
                    f"{self.adapter}: does not fit its base model {self.base.folder}. {name} has "
                    f"the shape {a.shape}, and {module}.weight "
                    f"{weight.shape if weight is not None else 'does not exist'}."
                )
        return arrays, scale


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
    for name in (MODEL, ADAPTER):
        with contextlib.suppress(OSError):  # a run that must not be changed
            complete_replacement(path / name)
    if (path / MODEL / "config.json").is_file():
        checkpoint = str(path / MODEL)
    elif found := [p for p in (path / ADAPTER, path) if (p / ADAPTER_CONFIG).is_file()]:
        adapter = found[0]
        checkpoint = base_name or find_base_of(adapter)
    elif path.is_dir() and (run := RunDirectory(path)).is_run():
        if run.read_config().get("command") != FinetuneConfig.COMMAND:
            raise DataError(f"{path}: not a run of effjax finetune. Give one, or a checkpoint.")
        raise DataError(
            f"{path}: a run without {MODEL}/ and {ADAPTER}/, which effjax finetune writes at its "
            "end. Resume it, or give another run or a checkpoint."
        )
    if base_name is not None and adapter is None:
        raise TrainError(f"--base {base_name} needs an adapter, and {name} is none.")
    base = find_base(checkpoint, dtype)
    template = None if chat_template is None else Path(chat_template)
    if template is None and adapter is not None and (adapter / CHAT_TEMPLATE).is_file():
        template = adapter / CHAT_TEMPLATE
    return TextModel(base, adapter, load_tokenizer(base.folder, today, template))


def find_base_of(adapter: Path) -> str:
    """Return the folder of the model that an adapter belongs to, or its name on the Hub."""
    file = adapter / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is not JSON ({quoted(error)})") from error
    config = config if isinstance(config, dict) else {}
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if isinstance(base, str) and Path(base).is_dir():
        return base
    if isinstance(base, str) and (repository := parse_name(base)) is not None:
        return str(repository._replace(revision=revision or repository.revision))
    raise DataError(
        f"{file}: `base_model_name_or_path` (={base!r:.200}) must be the folder of the base model, "
        "or its name on the Hub. Give the base model with --base."
    )


def merge(model: TextModel, folder: Path) -> None:
    """Write the checkpoint of a model with its adapter added to the weights, as W + scale · B A.

    Each product is added in float32 and rounded to the dtype of the parameters once.

    Args:
        model: A model with an adapter, from `find_model`.
        folder: Where to write; must not exist or be empty.

    Raises:
        DataError: The files cannot be read, or do not belong to each other.
        OSError: The folder cannot be written.
    """
    layers, others, scale = model.load(offload=False)
    for name in [name for name in layers if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        a, b = layers.pop(name), layers.pop(f"{module}.lora_B.weight")
        layers[f"{module}.weight"] = _add_product(layers[f"{module}.weight"], a, b, scale)
    files = {file.name: file for file in model.base.tokenizer_files}
    if model.adapter is not None and (template := model.adapter / CHAT_TEMPLATE).is_file():
        files[CHAT_TEMPLATE] = template
    save_checkpoint(folder, layers, others, model.config.to_json(), copied_files=files)


@functools.partial(jax.jit, donate_argnums=0)
def _add_product(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    # One layer at a time: a product in float32 is as large as the layer.
    def add(_: None, arrays: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        weight, a, b = arrays
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        product = jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        return None, (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)

    return jax.lax.scan(add, None, (weight, a, b))[1]


def count_positions(model: TextModel) -> int | None:
    """Return the number of positions of a model; None if its config.json does not say it."""
    positions = json.loads(model.config.other_settings).get("max_position_embeddings")
    return positions if type(positions) is int else None


def count_new_tokens(model: TextModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Return `max_tokens`, limited by the positions of the model that the prompts leave.

    Raises:
        TrainError: A prompt is empty, or too long.
        DataError: A prompt has a token that the model does not have.
    """
    config = model.config
    for prompt in prompts:
        if not prompt:
            raise TrainError("An empty prompt needs a tokenizer with a BOS token. Give a text.")
        if max(prompt) >= config.vocab_size:
            raise DataError(
                f"{model.base.folder}: its tokenizer and its config.json belong to different "
                f"models. Token {max(prompt)} of the prompt is not below `vocab_size` "
                f"(={config.vocab_size})."
            )
    size = max(map(len, prompts))
    positions = count_positions(model)
    if positions is None:
        return max_tokens
    if size >= positions:
        raise TrainError(
            f"The prompt is too long: it has {counted(size, 'token')}, and the model "
            f"{counted(positions, 'position')}. Shorten it."
        )
    return min(max_tokens, positions - size)


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


class TokenGenerator:
    """Generates the tokens of one prompt at a time.

    Args:
        config: The decoder.
        options: From `check_options`.
        layers: The parameters of the layers.
        others: The other parameters.

    Attributes:
        state: The state after the last token; None before the first prompt.
    """

    def __init__(self, config: DecoderConfig, options: Options, layers: Any, others: Any):
        self.config, self.options, self.params = config, options, (layers, others)
        self.state: Any = None

    def generate_each(self, prompts: Sequence[Sequence[int]], seed: int) -> Iterator[Iterator[int]]:
        """Yield an iterator over the generated tokens of each prompt, one prompt after the other.

        All prompts are padded to one length, so that the programs are compiled once.
        """
        first = _compile(start, self.config, self.options, donate=False)
        size, key = max(map(len, prompts)), jax.random.key(seed)

        def run(i: int, prompt: Sequence[int]) -> Iterator[int]:
            self.state = None  # free its memory
            tokens, length = _pad(prompt, size), jnp.array([len(prompt)], jnp.int32)
            self.state = first(*self.params, tokens, length, jax.random.fold_in(key, i))
            yield from self.follow(self.options.max_new_tokens)

        for i, prompt in enumerate(prompts):
            yield run(i, prompt)

    def follow(self, limit: int) -> Iterator[int]:
        """Yield the tokens from that of the state on, up to a stop token or a number of tokens."""
        following = _compile(advance, self.config, self.options)
        for count in range(limit):
            if count:
                self.state = following(self.state, *self.params)
            yield int(self.state.tokens[0, count])
            if self.state.is_done[0]:
                return


class ChatGenerator(TokenGenerator):
    """Generates the answers of a conversation.

    The keys and values of the tokens that a prompt shares with the tokens before are used again.

    Args:
        config: The decoder.
        options: From `check_options`.
        layers: The parameters of the layers.
        others: The other parameters.
        context: The largest number of tokens of a conversation, with its answers.
        mesh: The devices.

    Attributes:
        cached: The tokens whose keys and values are in the caches.
    """

    def __init__(
        self, config: DecoderConfig, options: Options, layers: Any, others: Any, context: int,
        mesh: Mesh,
    ):  # fmt: skip
        super().__init__(config, options, layers, others)
        self.context = context
        empty = functools.partial(empty_state, config, options, layers, 1, context)
        self.state = jax.jit(empty, out_shardings=replicated(mesh))()
        self.cached: list[int] = []

    def answer(self, prompt: Sequence[int], key: jax.Array) -> Iterator[int]:
        """Yield the tokens of an answer to a prompt that is shorter than the context."""
        prefill = _compile(extend, self.config, self.options)
        shared = 0  # the last token runs again, for its logits
        while shared < min(len(self.cached), len(prompt) - 1) and (
            self.cached[shared] == prompt[shared]
        ):
            shared += 1
        del self.cached[shared:]
        for first in range(shared, len(prompt), CHUNK):
            part = prompt[first : first + CHUNK]
            length = jnp.array([first + len(part)], jnp.int32)
            self.state = prefill(
                self.state, *self.params, _pad(part, CHUNK), jnp.int32(first), length, key
            )
            self.cached += part
        last: list[int] = []  # a token is cached when the next one is generated
        for token in self.follow(min(self.options.max_new_tokens, self.context - len(prompt))):
            self.cached += last
            last = [token]
            yield token


@functools.lru_cache(maxsize=8)
def _compile(
    function: Callable, config: DecoderConfig, options: Options, donate: bool = True
) -> Callable:
    return offload_jit(functools.partial(function, config, options), donate=donate)


def _pad(tokens: Sequence[int], size: int) -> jax.Array:
    row = np.zeros((1, size), np.int32)
    row[0, : len(tokens)] = tokens
    return jnp.asarray(row)


def split_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[list[str], set[int]]:
    """Return the texts among those that end a completion, and the special tokens.

    Special tokens have no text, so that they are compared as tokens.

    Raises:
        TrainError: A text is empty, or has more than a special token.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    texts, tokens = [], set()
    for stop in stops:
        if not stop or stop.encode(errors="ignore").decode() != stop:
            raise TrainError(f"`stop` (={stop!r:.120}) must be a text in UTF-8, and not empty.")
        if stop in special:
            tokens.add(special[stop])
        elif inside := [name for name in special if name in stop]:
            raise TrainError(
                f"`stop` (={stop!r:.120}) must be a text, or a special token alone, such as "
                f"{inside[0]}, which has no text."
            )
        else:
            texts.append(stop)
    return texts, tokens


def decode(tokenizer: Tokenizer, tokens: Iterable[int], stops: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of tokens in pieces, as soon as each is complete.

    Special tokens have no text.

    Args:
        tokenizer: The tokenizer.
        tokens: The tokens, of which no more are taken than the text needs.
        stops: Texts before which the text ends.
    """
    text = ""  # what may be the beginning of a stop
    for piece in _decode_pieces(tokenizer, tokens):
        text += piece
        if found := [text.index(stop) for stop in stops if stop in text]:
            text = text[: min(found)]
            break
        ready = next(
            i
            for i in range(len(text) + 1)
            if i == len(text) or any(stop.startswith(text[i:]) for stop in stops)
        )
        if ready:
            yield text[:ready]
        text = text[ready:]
    if text:
        yield text


def _decode_pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    ids: list[int] = []
    done = 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.backend.decode(ids, skip_special_tokens=True)
        if len(text) > done and not text.endswith(INCOMPLETE):
            yield text[done:]
            done = len(text)
    rest = tokenizer.backend.decode(ids, skip_special_tokens=True)[done:]
    if rest:
        yield rest


def printable_lines(text: str) -> str:
    """Return a text with its control characters, which could change what a terminal shows, escaped.

    Lines and tabs stay.
    """

    def is_kept(char: str) -> bool:
        return char in KEPT or unicodedata.category(char) == "Zs"  # any kind of space

    return "".join(char if is_kept(char) else printable(char) for char in text)
