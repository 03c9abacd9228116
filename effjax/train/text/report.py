"""The output of a run on text: its description and its result."""

from ..errors import counted, quoted
from ..mesh import describe_devices
from .base import eos_tokens
from .config import FinetuneConfig
from .packing import PackedRows
from .task import TextResult, TextTask


def describe(task: TextTask) -> list[str]:
    """Describe the data, the model and the devices, one per line."""
    config, learner = task.config, task.learner
    steps = f"{counted(config.steps or 0, 'step')}, {describe_devices(task.mesh)}"
    pairs = " × 2" if config.rows_per_example == 2 else ""
    dtype = f"{config.dtype}, products in {config.matmul}" if config.matmul else config.dtype
    batch = f"{dtype}, batch {config.batch_size}{pairs} × {config.max_length}"
    model = (
        f"{counted(learner.model.num_hidden_layers, 'layer')} of width "
        f"{learner.model.hidden_size}, {learner.num_params} parameters"
    )
    trained = "all trained"
    if config.lora is not None:
        dropout = f" with dropout {config.lora_dropout:g}" if config.lora_dropout else ""
        quantized = f", linear layers in {config.quantize}" if config.quantize else ""
        adapters = f"{learner.num_trained} of adapters of rank {config.lora}{dropout}"
        trained = f"frozen{quantized}; {adapters} trained"
    return [
        *_describe_rows(config, task.data),
        f"{learner.model.model_type}: {model} in {config.param_dtype}, {trained}",
        f"{batch}, {steps}",
        *_warn(config, task.data),
    ]


def _warn(config: FinetuneConfig, rows: PackedRows) -> list[str]:
    """Return what is probably not intended, one line each."""
    data, counts, warnings = rows.source, rows.source.counts, []
    if not data.end_tokens:
        warnings.append(
            "no token with loss ends a turn or a text, so the model does not learn to stop. See "
            "--show 3, and correct the chat template, or use a larger --max-length"
        )
    if 2 * counts["cut"] > counts["rows"]:
        warnings.append(f"most rows are cut ({counts['cut']} of {counts['rows']})")
    if config.batch_size > len(rows.train):
        warnings.append(
            f"a batch of {config.batch_size} rows is more than the data have, "
            f"{counted(len(rows.train), 'row')}. A step reads rows several times"
        )
    if counts["split"]:
        warnings.append(
            f"the chat template renders {counted(counts['split'], 'conversation')} differently for "
            "each answer, as several sequences"
        )
    return [f"warning: {text}." for text in warnings]


def _describe_rows(config: FinetuneConfig, rows: PackedRows) -> list[str]:
    """Describe the sequences, what was left out, and how they are packed."""
    data = rows.source
    noun, share = ("pairs", 2) if config.has_pairs else ("sequences", 1)
    held_out = f" and {len(data.validation) // share} validation" if len(rows.validation) else ""
    lines = [
        f"{data.name}: {len(data.train) // share} train{held_out} {noun} of "
        f"{counted(data.counts['rows'], 'row')}, {len(data.train.tokens)} train tokens, "
        f"{data.train.num_losses} of them with loss"
    ]
    lines += [
        f"{counted(data.counts[name], 'row')} {what}"
        for name, what in (
            ("cut", f"cut to {counted(config.max_length, 'token')}"),
            ("skipped", f"skipped: no token with loss in the first {config.max_length}"),
            ("repeated", "left out of the train rows: in the validation rows too"),
        )
        if data.counts[name]
    ]
    lines += data.notes
    packed = "packed into" if config.packing else "not packed:"
    count = counted(len(rows.train), "row") + (" × 2" if config.has_pairs else "")
    lines.append(
        f"{packed} {count} of {config.max_length} tokens, "
        f"{rows.train.efficiency:.0%} of which are used"
    )
    return lines


def describe_stops(task: TextTask) -> list[str]:
    """Return a line if other programs do not end at the tokens that an adapter has learned."""
    missing = task.base.missing_stops(task.end_tokens)
    if task.config.lora is None or not missing:
        return []
    stops = eos_tokens(task.base.generation_settings) + missing
    return [
        f"note: {quoted(' and '.join(task.end_tokens[token] for token in missing))} ends an "
        f"answer, but not in generation_config.json of {task.base.path}, which PEFT reads: it "
        f"would generate up to its limit. Give it eos_token_id={stops}, or use effjax merge, which "
        "writes them."
    ]


def result_rows(result: TextResult) -> list[tuple[str, str]]:
    """Return the names and values of the final table."""
    rows = [("train loss", f"{result.train_loss:.4f} nats")]
    if result.validation_loss is not None:
        name = f"validation loss of the best step, {result.best_step}"
        rows.append((name, f"{result.validation_loss:.4f} nats"))
    return [
        *rows,
        ("trained parameters", str(result.num_trained)),
        ("tokens/s", f"{result.tokens_per_second:.0f}"),
        ("time", f"{result.seconds:.0f} s"),
    ]
