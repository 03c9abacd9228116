import pytest

from effjax.train.errors import TrainError
from effjax.train.text.config import FinetuneConfig

FILES = dict(checkpoint="base", data="rows.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "`learning_rate` (=0.0) must be above 0"),
        ({"warmup": 1.0}, "`warmup` (=1.0) must lie in [0, 1)"),
        ({"clip_norm": -1.0}, "`clip_norm` (=-1.0) must be at least 0"),
        ({"max_length": 1}, "`max_length` (=1) must be between 2 and"),
        ({"lora_alpha": 8.0}, "`lora_alpha` (=8.0) needs `lora`"),
        ({"lora_targets": "q_proj"}, "`lora_targets` (=q_proj) needs `lora`"),
        ({"sample_tokens": 9}, "`sample_tokens` (=9) needs `sample_prompts`"),
        ({"lora_dropout": 0.1}, "`lora_dropout` (=0.1) needs `lora`"),
        ({"quantize": "nf4"}, "`quantize` (=nf4) needs `lora`"),
        ({"lora": 4, "quantize": "int4"}, "`quantize` (="),
        ({"lora": 4, "quantize": "nf4", "matmul": "fp8"}, "`matmul` (=fp8) needs weights in"),
        ({"matmul": "int8"}, "`matmul` (="),
        ({"dpo_beta": 0.5}, "`dpo_beta` (=0.5) needs `loss` (=dpo)"),
        ({"lora": 4, "rslora": True}, "`rslora` needs `lora_alpha`"),
        ({"lora": 4, "lora_alpha": 0.0}, "`lora_alpha` (=0.0) must be above 0"),
        ({"fuse_update": True, "on_nan": "skip"}, "cannot be combined with `fuse_update`"),
        ({"patience": 2, "validation": 0.0}, "`patience` (=2) needs validation rows"),
        ({"data_weights": "1,2"}, "`data_weights` (=1,2) must have a number for each `data`"),
        ({"data_weights": "a"}, "`data_weights` (='a') must be numbers above 0"),
        ({"num_microbatches": 2}, "`num_microbatches` (=2) needs a single device"),
        ({"num_microbatches": 3}, "`num_microbatches` (=3) must divide `batch_size` (=8)"),
        ({"validation": 1.5}, "`validation` (=1.5) must be a share"),
    ],
)
def test_rejects(options, message):
    with pytest.raises(TrainError) as error:
        FinetuneConfig(**FILES, **options).resolve().check_devices(2)
    assert message in str(error.value)


def test_default_rates_and_scales():
    config = FinetuneConfig(**FILES)
    assert config.learning_rate is None and config.resolve().learning_rate == 1e-5
    dpo = FinetuneConfig(**FILES, loss="dpo").resolve()
    assert (dpo.learning_rate, dpo.dpo_beta) == (1e-6, 0.1)
    lora = FinetuneConfig(**FILES, lora=16).resolve()
    assert (lora.learning_rate, lora.lora_scale) == (2e-4, 2.0)
    lora = FinetuneConfig(**FILES, lora=16, lora_alpha=4, learning_rate=1e-3).resolve()
    assert (lora.learning_rate, lora.lora_scale) == (1e-3, 0.25)
