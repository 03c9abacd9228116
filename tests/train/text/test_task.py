"""Fine-tuning by the training loop: exact resume, export, adapters, and files that changed."""

import dataclasses
import datetime
import json
import os
import shutil

import jax
import numpy as np
import pytest

from effjax import convert
from effjax.convert import load_adapter, load_checkpoint, save_adapter
from effjax.models import DecoderConfig, decoder_shapes, generate
from effjax.ops.quantize import dequantize, quantize
from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import DataError, PreemptionError, TrainError
from effjax.train.loop import fit
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.decode import decode, printable_lines
from effjax.train.text.merge import merge
from effjax.train.text.model import find_model
from effjax.train.text.prompts import encode
from effjax.train.text.report import describe_stops
from effjax.train.text.rows import load_rows
from tests.tiers import vary
from tests.train.small import CachedTask, new_run
from tests.train.text.small import check_resume, finetune_task, write_base
from tests.train.text.tiny_checkpoint import write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

TODAY = datetime.date(2026, 1, 31)


def restore(task, run, step):
    with Checkpoints(run.checkpoints) as checkpoints:
        return checkpoints.restore(task.shapes(), step)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Return a task and its run, with the result."""
    task = CachedTask(finetune_task(base, keep=3))
    run = new_run(tmp_path_factory.mktemp("trained") / "run", task)
    return task, run, fit(task, run)


def test_exports_the_best_step(trained, base):
    """The export is a checkpoint to start from."""
    task, run, result = trained
    losses = [line["validation_loss"] for line in run.read_metrics() if line["kind"] == "step"]
    assert losses[0] > losses[1] > losses[2] == result.validation_loss
    assert result.best_step == 6 and result.num_trained == result.num_params
    assert result.train_loss < np.log(384)
    folder, calls = run.path / result.exported, []
    again = finetune_task(folder, data=str(base / "rows.jsonl"))
    again = dataclasses.replace(again, load_progress=lambda *now: calls.append(now))
    exported, best = again.initial_state(), restore(task, run, result.best_step)
    assert_equal(
        (exported.model.layers, exported.model.others), (best.model.layers, best.model.others)
    )
    assert calls[-1] == (4 * result.num_params,) * 2
    assert again.base.model == task.base.model
    assert again.base.digest_weights() != task.base.digest_weights()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()


def test_an_export_that_was_killed_is_completed(trained, tmp_path):
    """Generation finds the new export if the old one had just been renamed."""
    _, run, result = trained
    shutil.copytree(run.path / result.exported, tmp_path / ".model.partial")
    (tmp_path / ".model.replaced").mkdir()
    shutil.copy(run.path / "config.json", tmp_path)
    found = find_model(tmp_path, None, TODAY)
    assert found.base.folder == tmp_path / "model" and found.tokenizer.backend.get_vocab_size()


@pytest.mark.exhaustive
def test_bfloat16_resumes_exactly(base, tmp_path):
    """The random numbers of stochastic rounding and 8-bit moments are part of the state."""
    options = dict(
        param_dtype="bfloat16", optimizer="adamw8bit", params_in="host", fuse_update=True,
        num_microbatches=2, mlp_chunk_size=8, steps=3, keep=3,
    )  # fmt: skip
    run, _ = check_resume(CachedTask(finetune_task(base, **options)), tmp_path)
    shapes = decoder_shapes(DecoderConfig.from_json(run.path / "model"))
    assert {a.dtype for tree in shapes for a in tree.values()} == {np.dtype("bfloat16")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("quantize", "codes"), [(None, None), ("nf4", "uint8"), ("int8", "int8")])
def test_a_run_of_adapters(base, tmp_path, quantize, codes):
    """It resumes exactly, changes nothing else, shows samples, and exports the adapter."""
    (tmp_path / "prompts.txt").write_text("2 + 3?\n")
    options = dict(
        lora=2,
        lora_alpha=3,
        lora_dropout=0.25,
        quantize=quantize,
        params_in="host",
        activations_in="device",
    )
    prompts = dict(sample_prompts=str(tmp_path / "prompts.txt"), sample_tokens=2)
    task = CachedTask(finetune_task(base, **options, **prompts, steps=2, keep=3))
    before = jax.device_get(task.initial_state().model)
    packed = {a.dtype.name for a in before.layers.values() if a.dtype.itemsize == 1}
    assert packed == ({codes} if codes else set())

    run, result = check_resume(task, tmp_path)
    (record,) = (r for r in run.read_metrics() if r["kind"] == "step")
    assert record["samples"][0]["prompt"] == "2 + 3?"
    after = restore(task, run, result.best_step).model
    adapters = {name: np.asarray(a) for name, a in after.layers.items() if "lora" in name}
    assert len(adapters) == 14
    assert all(np.any(a != before.layers[name]) for name, a in adapters.items())
    assert_equal(after.layers, before.layers | adapters)
    assert_equal(after.others, before.others)
    assert result.num_trained == sum(a.size for a in adapters.values()) < result.num_params

    assert result.exported == "adapter"
    exported, scale = load_adapter(run.path / "adapter")
    assert scale == 1.5
    assert_equal(exported, adapters)
    config = json.loads((run.path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert config["lora_dropout"] == 0.25
    model = find_model(run.path, None, TODAY)
    layers, *_ = model.load("device")  # the base as it is, with the adapter
    expected = load_checkpoint(base, *decoder_shapes(model.config))[0] | exported
    assert_equal({name: layers[name] for name in expected}, expected)


@vary("form", [{}, {"lora": 2, "params_in": "host", "activations_in": "device"}])
def test_samples(base, tmp_path, form):
    """The record of a validation has the texts that the model generates at this step."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("2 + 3?\n\nIs it a longer prompt?\n")
    options = form | {"sample_prompts": str(prompts), "sample_tokens": 7, "learning_rate": 0.1}
    task = finetune_task(base, **options, steps=2, report_every=1, validation=0)
    run = new_run(tmp_path / "run", task)
    fit(task, run)
    first, last = (r["samples"] for r in run.read_metrics() if r["kind"] == "step")
    assert [sample["prompt"] for sample in last] == ["2 + 3?", "Is it a longer prompt?"]
    assert first != last
    model = find_model(run.path, None, TODAY)
    layers, others, scale = model.load("device")
    prompt, ends = encode(model, "2 + 3?", None, chat=True)
    tokens, lengths = generate(
        model.config, layers, others, np.array([prompt]), max_new_tokens=7,
        stop_tokens=sorted(ends), lora_scale=scale,
    )  # fmt: skip
    ids = np.asarray(tokens)[0, : lengths[0]].tolist()
    text = "".join(decode(model.tokenizer, ids, before=prompt))
    assert last[0]["text"] == printable_lines(text)
    for text, message in (
        ("\n", "contains no prompt"),
        ("a\n" * 101, "must have at most 100 prompts"),
    ):
        prompts.write_text(text)
        with pytest.raises(DataError, match=message):
            finetune_task(base, **options)


def test_samples_have_their_own_limits(tmp_path):
    """That of the positions, which a long neighbor does not change; lines keep their spaces."""
    base = write_base(tmp_path / "base", max_position_embeddings=64, initializer_range=1.0)
    long, found = "x" * 38, []
    for lines in [" a "], [" a ", long], [long]:
        (tmp_path / "prompts.txt").write_text("\n".join(lines))
        prompts = str(tmp_path / "prompts.txt")
        task = finetune_task(base, sample_prompts=prompts, sample_tokens=30)
        assert task.samples is not None
        found.append(task.samples.make(task.learner)(task.initial_state()))
    short, both, alone = found
    assert both == [*short, *alone] and both[0]["prompt"] == " a "
    (encoded,) = task.samples.prompts
    assert 0 < encoded.max_tokens == 64 - len(encoded.tokens) < 20
    assert len(alone[0]["text"]) < len(short[0]["text"])
    (tmp_path / "prompts.txt").write_text("a\n" + "b" * 99)
    with pytest.raises(DataError, match="prompts.txt: line 2: The prompt is too long"):
        finetune_task(base, sample_prompts=prompts)


def test_the_circle_of_adapters(base, tmp_path):
    """A run starts from an adapter, with its layers and its scale, and a merge adds it."""
    new = finetune_task(base, lora=2, lora_targets="v_proj, q_proj", lora_alpha=6.0, rslora=True)
    keys = iter(jax.random.split(jax.random.key(1), 8))
    adapters = {
        name: np.asarray(jax.random.normal(next(keys), a.shape))
        for name, a in new.learner.adapter_shapes().items()
    }
    modules = "self_attn.q_proj", "self_attn.v_proj"
    assert {*adapters} == {f"{m}.lora_{i}.weight" for m in modules for i in "AB"}
    assert new.config.lora_scale == pytest.approx(6 / 2**0.5)
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    folder, files = tmp_path / "adapter", {"chat_template.jinja": template}
    save_adapter(folder, adapters, 3.0, dropout=0.1, base_model=str(base), copied_files=files)

    task = finetune_task(base, adapter=str(folder))
    assert (task.config.lora, task.config.lora_scale) == (2, 3.0)
    assert task.config.lora_dropout == 0.1
    assert finetune_task(base, adapter=str(folder), lora_dropout=0.2).config.lora_dropout == 0.2
    layers = task.initial_state().model.layers
    assert_equal({name: layers[name] for name in adapters}, adapters)
    other_scale = finetune_task(base, adapter=str(folder), lora=2, lora_targets="q_proj,v_proj")
    with pytest.raises(TrainError, match="multiplied by 3, not by 2"):
        other_scale.initial_state()
    with pytest.raises(TrainError, match="`lora_targets` .='head'. must be some of q_proj"):
        finetune_task(base, lora=2, lora_targets="head")

    merge(find_model(folder, None, TODAY), tmp_path / "merged")
    merged = finetune_task(tmp_path / "merged", data=str(base / "rows.jsonl"))
    for name, merged_weight in merged.initial_state().model.layers.items():
        module = name.removesuffix(".weight")
        expected = np.asarray(layers[name], np.float64)
        if module in modules:
            a, b = (adapters[f"{module}.lora_{i}.weight"].astype(np.float64) for i in "AB")
            expected = expected + 3 * b @ a
        np.testing.assert_allclose(merged_weight, expected, rtol=1e-6, atol=1e-6)
    assert (tmp_path / "merged" / "chat_template.jinja").read_bytes() == template.read_bytes()
    large = {name: a * 1e20 for name, a in adapters.items()}
    save_adapter(folder, large, 3.0, base_model=str(base), overwrite=True)
    with pytest.raises(TrainError, match=r"_proj.weight has numbers that are not finite. Check"):
        merge(find_model(folder, None, TODAY), tmp_path / "infinite")
    assert not (tmp_path / "infinite").exists()


def test_exports_name_the_ends_of_answers(base, tmp_path):
    """generation_config.json has what ends an answer in the template and in the data."""
    settings = {"eos_token_id": 1, "top_k": 7}
    (base := shutil.copytree(base, tmp_path / "base")) / "generation_config.json"
    (base / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(base, TODAY)
    end, turn = map(tokenizer.backend.token_to_id, ("<|im_end|>", "<|im_start|>"))
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    options = {"data": str(rows), "validation": 0, "steps": 1}

    def stops(folder):
        return json.loads((folder / "generation_config.json").read_text())

    for form, folder in (({}, "model"), ({"lora": 2}, "adapter")):
        task = finetune_task(base, **options, **form)
        assert task.end_tokens == {1: "</s>", end: "<|im_end|>"}
        run = new_run(tmp_path / folder, task)
        fit(task, run)
        assert stops(run.path / folder) == {"eos_token_id": [1, end], "top_k": 7}
        model = find_model(run.path, None, TODAY)
        assert encode(model, "a", None, chat=False)[1] == {1, end}
        note = describe_stops(task)
        assert bool(note) == (folder == "adapter") and all("[1, " in line for line in note)
    merge(model, tmp_path / "merged")
    assert stops(tmp_path / "merged") == {"eos_token_id": [1, end], "top_k": 7}
    # What ends answers in the data only, with a line feed behind it.
    template = tmp_path / "own.jinja"
    end_of_b = "{{ '<|im_start|>\\n' if m.content == 'b' }}"
    template.write_text("{% for m in messages %}{{ m.content }}" + end_of_b + "{% endfor %}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": chat}))
    task = finetune_task(base, **options, chat_template=str(template))
    assert task.end_tokens == {turn: "<|im_start|>"}
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, turn]}))
    assert not task.base.generation_files(task.end_tokens)


def test_a_prompt_that_spells_bos_has_one(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    write_tokenizer(folder, processor="<s> $A")
    model = find_model(folder, None, TODAY)
    ids, _ = encode(model, "1 + 2?", None, chat=False)
    assert encode(model, "<s>1 + 2?", None, chat=False)[0] == ids and ids.count(0) == 1
    # As in training.
    (rows := tmp_path / "rows.jsonl").write_text('{"text": "<s>1 + 2?"}')
    data = load_rows(rows, model.tokenizer, 64, 0).train
    assert data.tokens.tolist() == [*ids, *model.tokenizer.end]


@vary("form", ["nf4", "int8"])
def test_merges_into_the_quantized_base(base, tmp_path, form):
    """The merged model has the loss of the run, whatever the dtype of the base."""
    options = dict(lora=2, quantize=form, lora_targets="q_proj", steps=2, learning_rate=0.1)
    task = finetune_task(base, **options, param_dtype="bfloat16")
    run = new_run(tmp_path / "run", task)
    loss = fit(task, run).validation_loss
    shutil.copytree(run.path / "adapter", tmp_path / "copy")  # knows its base without the run
    model = find_model(tmp_path / "copy", "float32", TODAY)
    assert model.trained_on == (form, "bfloat16")
    merge(model, tmp_path / "as_is")
    merge(model, tmp_path / "merged", dequantized=True)

    rows = str(base / "rows.jsonl")
    merged, as_is = (finetune_task(tmp_path / name, data=rows) for name in ("merged", "as_is"))
    state = merged.initial_state()
    losses = [t.make_eval()(t.initial_state(), "validation")["loss"] for t in (merged, as_is)]
    assert losses[0] == pytest.approx(loss, rel=1e-6) != pytest.approx(losses[1], rel=1e-6)
    adapters, scale = load_adapter(tmp_path / "copy")
    trained = decoder_shapes(dataclasses.replace(model.config, dtype="bfloat16"))
    layers, others = load_checkpoint(base, *trained)
    for name, a in layers.items():
        if name.endswith("_proj.weight"):
            a = dequantize(quantize(a, form), a.shape[-1], np.float32)
        if name == "self_attn.q_proj.weight":
            a_b = (adapters[f"self_attn.q_proj.lora_{i}.weight"] for i in "BA")
            a += scale * np.matmul(*map(np.asarray, a_b))
        expected = np.asarray(a, np.float32)
        np.testing.assert_allclose(state.model.layers[name], expected, rtol=1e-6, atol=1e-7)
    assert_equal(state.model.others, jax.tree.map(lambda a: a.astype(np.float32), others))


def test_length_of_a_run(base):
    task = finetune_task(base, steps=None, report_every=None, epochs=3)
    rows = len(task.data.train)
    assert task.config.steps == round(3 * rows / 4)
    assert task.eval_steps == [round(rows / 4), round(2 * rows / 4), round(3 * rows / 4)]
    assert finetune_task(base, steps=1, report_every=None).eval_steps == [1]
    cases = {(4, 2): [2, 4], (5, 2): [2, 4, 5], (3, 9): [3]}
    for (steps, every), expected in cases.items():
        assert finetune_task(base, steps=steps, report_every=every).eval_steps == expected


def test_resumes_with_the_same_rows_and_model_only(trained, base, tmp_path):
    _, run, _ = trained
    rows = tmp_path / "rows.jsonl"
    rows.write_text((base / "rows.jsonl").read_text().replace("3:", "4:"))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(finetune_task(base, data=str(rows), resume=True), run, resume=True)
    moved = shutil.copytree(base, tmp_path / "moved")
    assert fit(finetune_task(moved, keep=3, resume=True), run, resume=True).best_step == 6
    assert run.read_config()["options"]["checkpoint"] == str(moved)
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    weights = (moved / "model.safetensors").read_bytes()
    changed = bytearray(weights)
    changed[len(changed) // 2] ^= 1
    other = json.dumps(json.loads((moved / "config.json").read_text()) | {"rms_norm_eps": 1e-3})
    for name, content in ("model.safetensors", changed), ("config.json", other.encode()):
        (moved / "model.safetensors").write_bytes(weights)
        (moved / name).write_bytes(content)
        with pytest.raises(TrainError, match="was started with the weights of another checkpoint"):
            fit(finetune_task(moved, resume=True), run, resume=True)
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before


def test_a_run_without_a_checkpoint_may_start_again(base, tmp_path):
    """It was killed before the digest of its weights was written."""
    task = finetune_task(base)
    run = new_run(tmp_path / "run", task)
    assert "weights_sha256" not in run.read_config()["base"]
    with pytest.raises(PreemptionError):
        fit(task, run, resume=True, stop=lambda step: step == 1)
    assert run.read_config()["base"]["weights_sha256"] == task.base.digest_weights()


def test_files_of_different_models(base, tmp_path):
    small = write_base(tmp_path / "small", vocab_size=300)
    shutil.copy(base / "tokenizer.json", small)
    with pytest.raises(DataError, match=r"is not below `vocab_size` \(=300\)"):
        finetune_task(small)
    folder = shutil.copytree(base, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 65}))
    with pytest.raises(DataError, match="of another shape: .*down_proj"):
        finetune_task(folder)
    # Only the file that the model consists of is read.
    task, expected = finetune_task(base), finetune_task(base).base.digest_weights()
    os.mkfifo(base / "other.safetensors")
    try:
        assert task.base.digest_weights() == expected
    finally:
        (base / "other.safetensors").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(DataError, match="model.safetensors: .*not a regular file"):
        finetune_task(folder, resume=True).base.digest_weights()


def test_a_copy_of_the_tied_head_is_ignored(tmp_path):
    folder = write_base(tmp_path / "base", "qwen3", tie_word_embeddings=True)
    file, head = folder / "model.safetensors", "lm_head.weight"
    weights = convert.load_weights(file)
    assert head not in weights
    weights[head] = weights["model.embed_tokens.weight"]
    convert.save_weights(file, weights)
    assert finetune_task(folder).learner.num_params > 0
    # Another head would be dropped without a word.
    convert.save_weights(file, weights | {head: weights[head] + 1})
    with pytest.raises(DataError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        finetune_task(folder)
