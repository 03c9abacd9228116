"""The output of a fine-tuning run: its description and its result."""

from ..errors import counted
from ..mesh import describe_devices
from .task import FinetuneResult, FinetuneTask


def describe(task: FinetuneTask) -> list[str]:
    """Describe the data, the model and the devices, one per line."""
    config, data, model = task.config, task.data, task.base.model
    held_out = f" and {len(data.validation)} validation" if len(data.validation) else ""
    lines = [
        f"{data.name}: {len(data.train)} train{held_out} sequences of "
        f"{counted(data.num_rows, 'row')}, {len(data.train.tokens)} train tokens, "
        f"{data.train.num_losses} of them with loss"
    ]
    lines += [
        f"{counted(number, 'row')} {what}"
        for number, what in (
            (data.num_cut, f"cut to {counted(config.max_length, 'token')}"),
            (data.num_skipped, f"skipped: no token with loss in the first {config.max_length}"),
            (data.num_repeated, "left out of the train rows: in the validation rows too"),
        )
        if number
    ]
    packed = "packed into" if config.packing else "not packed:"
    lines.append(
        f"{packed} {counted(len(task.train), 'row')} of {config.max_length} tokens, "
        f"{task.train.efficiency:.0%} of which are used"
    )
    trained = "all trained"
    if config.lora is not None:
        trained = f"frozen; {task.learner.num_trained} of adapters of rank {config.lora} trained"
    lines += [
        f"{model.model_type}: {counted(model.num_hidden_layers, 'layer')} of width "
        f"{model.hidden_size}, {task.learner.num_params} parameters in {config.param_dtype}, "
        f"{trained}",
        f"{config.dtype}, batch {config.batch_size} × {config.max_length}, "
        f"{counted(config.steps or 0, 'step')}, {describe_devices(task.mesh)}",
    ]
    return lines


def result_rows(result: FinetuneResult) -> list[tuple[str, str]]:
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
