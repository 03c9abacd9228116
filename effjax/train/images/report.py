"""The output of a run on images: its description and its result."""

from ...memory.render import format_bytes
from ..errors import counted
from ..mesh import describe_devices
from .task import ImageResult, ImageTask


def describe(task: ImageTask) -> list[str]:
    """Describe the data, the model and the devices, one per line."""
    config, data = task.config, task.dataset
    height, width, channels = data.image_shape
    train, validation = len(data.train_images), len(data.validation_images)
    held_out = f", {validation} validation" if validation else ""
    lines = [
        f"{data.name}: {train} train{held_out} and {len(data.test_images)} test images of "
        f"{height}×{width}×{channels} in {len(data.class_names)} classes"
    ]
    if names := data.left_out:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        lines.append(f"left out, because not images of a class ({len(names)}): {shown}")
    if left_out := train % config.batch_size:
        lines.append(
            f"an epoch is {counted(task.steps_per_unit, 'step')} and leaves out "
            f"{counted(left_out, 'image')} that would not fill a batch, others each time"
        )
    lines.append(
        f"{config.network}, {config.dtype}, batch {config.batch_size}, "
        f"{counted(config.epochs, 'epoch')}, {config.parallel} over "
        f"{describe_devices(task.mesh)}"
    )
    return lines + _describe_start(task)


def _describe_start(task: ImageTask) -> list[str]:
    """Describe the weights that a run starts with, and what is frozen."""
    config, source, lines = task.config, task.source, []
    if config.init_from is None:
        return lines
    lines.append(f"weights: those of {config.init_from}")
    num_classes = len(task.dataset.class_names)
    if source is not None and source.num_classes != num_classes:
        theirs = "no head" if source.num_classes is None else f"{source.num_classes} classes"
        lines.append(f"new head of {num_classes} classes; the file has {theirs}")
    if config.normalize == "imagenet":
        lines.append("pixels are normalized by ImageNet's mean and standard deviation")
    if config.freeze_stages is not None:
        stages = f" and {counted(config.freeze_stages, 'stage')}" if config.freeze_stages else ""
        trained, total = task.num_params()
        lines.append(f"frozen: the stem{stages}; {trained:,} of {total:,} parameters are trained")
    return lines


def result_rows(task: ImageTask, result: ImageResult) -> list[tuple[str, str]]:
    """Return the names and values of the final table."""
    rows = [("test accuracy", f"{result.test_accuracy:.2%}")]
    if result.validation_accuracy is None:
        rows.append(("last epoch", str(result.best_epoch)))
    else:
        rows.append(("validation accuracy", f"{result.validation_accuracy:.2%}"))
        rows.append(("best epoch", str(result.best_epoch)))
    rows.append(("images/s", f"{result.images_per_second:.0f}"))
    batch = f"batch {task.config.batch_size}"
    used = "efficient" if task.config.efficient else "plain"
    for form, size in result.kept_bytes.items():
        ran = ", this run" if form == used else ""
        rows.append((f"kept for backward, {batch} ({form}{ran})", format_bytes(size)))
    rows.append(("time", f"{result.seconds:.0f} s"))
    return rows
