"""Memory and time of `effjax train detector` by form: RT-DETR with a ResNet-50 on one device.

The steps and the cache of plans are those of `effjax memory detector`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from effjax.memory import max_batch_size, plan
from effjax.memory.compiler.cache import default_folder
from effjax.models.rt_detr_config import BackboneConfig, RTDetrConfig
from effjax.train.detection.config import DetectorConfig
from effjax.train.detection.plans import COCO, training_step
from effjax.train.images.plans import FORMS

from .measure import need_compiler
from .results import Result, Row, Size

DEVICES = {"RTX 4090": "rtx4090", "TPU v5e": "v5e"}
PLANNED = {"plain JAX": "plain"}
PLANNED |= {f'effjax save="{save}"': f"effjax {save}" for save in ("conv", "features")}
CONFIG, MODEL = DetectorConfig(dtype="bfloat16"), RTDetrConfig(id2label=COCO)  # 16 images of 640²
MULTIPLE = 8  # of the largest batch
SMALL_CONFIG = dataclasses.replace(CONFIG, image_size=64, batch_size=8)
SMALL = RTDetrConfig(
    backbone_config=BackboneConfig(depths=(1, 1), out_indices=(1, 2)),
    encode_proj_layers=(1,), encoder_hidden_dim=32, encoder_ffn_dim=32, d_model=32, num_queries=10,
    decoder_ffn_dim=32, num_feature_levels=2, decoder_layers=1, num_denoising=4,
)  # fmt: skip


def plan_form(
    form: str, device: str, config: DetectorConfig, model: RTDetrConfig, multiple: int | None = None
) -> Row:
    """Return the row of a form; with `multiple`, also the largest such batch that fits."""
    config = dataclasses.replace(config, **FORMS[PLANNED[form]])
    options: dict[str, Any] = dict(target=DEVICES[device], cache=default_folder())

    def step(batch_size: int) -> tuple[Any, ...]:
        return training_step(dataclasses.replace(config, batch_size=batch_size), model=model)

    planned = plan(*step(config.batch_size), **options)
    row: Row = {
        **dict(name=f"{form}, {device}", form=form, device=device),
        "batch_size": config.batch_size,
        "planned_device_bytes": planned.peak_device_bytes,
        "device_limit_bytes": planned.available_bytes,
        "fits": planned.fits,
        "unknown_loops": planned.step_time.unknown_loops,
    }
    if not planned.refusal:  # a program that the compiler for TPUs refuses has no time
        row["images_per_second"] = config.batch_size / planned.step_seconds
    if multiple:
        found = max_batch_size(step, start=config.batch_size, multiple_of=multiple, **options)
        row |= {"largest_batch": found.batch_size, "tried": found.to_dict()["tried"]}
    return row


def run(size: Size) -> Iterator[Result]:
    # A plan for the TPU takes six minutes of processor time, and each form about six plans.
    devices, models, multiple = [*DEVICES], (CONFIG, MODEL), MULTIPLE
    if size == "small":
        devices, models, multiple = ["RTX 4090"], (SMALL_CONFIG, SMALL), None
    for device in devices:
        need_compiler(DEVICES[device])
    rows = [plan_form(form, device, *models, multiple) for device in devices for form in PLANNED]
    notes = ["Times are modelled from published peak rates, not measured."]
    yield Result("detector", "fine-tuning of RT-DETR on one device, planned", {}, rows, notes)
