import datetime
import json
import shutil

import jax
import numpy as np
import pytest

from effjax import convert
from effjax.models import DecoderConfig, decoder_shapes, generate
from effjax.train.errors import TrainError
from effjax.train.text.chat import load_tokenizer
from effjax.train.text.decode import decode, printable_lines, split_stops
from effjax.train.text.generate import count_new_tokens
from effjax.train.text.model import find_model, generation_mesh
from effjax.train.text.prompts import encode
from effjax.train.text.tiny import CHATML, write_checkpoint
from tests.tiers import vary
from tests.train.small import limited_files

TODAY = datetime.date(2026, 1, 31)
GREEDY = "--max-tokens", "12", "--temperature", "0"
PROMPT = "for the class"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a checkpoint; its weights are large, so that the tokens of a text differ."""
    folder = tmp_path_factory.mktemp("checkpoints") / "base"
    write_checkpoint(
        folder, "qwen3", num_hidden_layers=1, max_position_embeddings=64, initializer_range=1.0
    )
    return folder


@pytest.fixture
def base(run, original, tmp_path):
    """Return a copy of the checkpoint, in the folder of the command."""
    return shutil.copytree(original, tmp_path / "base")


def greedy_tokens(folder, text):
    """Return twelve tokens after a text, computed without the command."""
    config = DecoderConfig.from_json(folder)
    params = convert.load_checkpoint(folder, *decoder_shapes(config))
    prompt = load_tokenizer(folder, TODAY).backend.encode(text).ids
    tokens = np.asarray(generate(config, *params, np.array([prompt]), max_new_tokens=12).tokens[0])
    assert len(set(tokens)) > 5
    return tokens.tolist()


def text_of(folder, tokens):
    return printable_lines("".join(decode(load_tokenizer(folder, TODAY), tokens)))


def change(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def read_rows(file):
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def test_greedy_completions_of_prompts(run, base):
    completion = text_of(base, greedy_tokens(base, PROMPT))
    ran = run("generate", base, "--no-chat", "--prompt", PROMPT, *GREEDY)
    assert ran == (0, f"{completion}\n", "") and completion
    prompts = ["--prompt", "if", "--prompt", PROMPT]
    _, out, _ = run("generate", base, "--no-chat", *prompts, *GREEDY, "--params-in", "host")
    assert out.startswith("> if\n") and out.endswith(f"\n> {PROMPT}\n{completion}\n")


def test_chat(run, base):
    """The prompt is a message if the checkpoint has a template; EOS ends the completion."""
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfor the class<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = greedy_tokens(base, text)
    last = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[last]]}))
    code, out, _ = run("generate", base, "--prompt", PROMPT, "--system", "Be brief.", *GREEDY)
    assert code == 0 and out == f"{text_of(base, tokens[: last + 1])}\n"
    template = base / "other.jinja"
    template.write_text("{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}\n" + CHATML)
    options = "--chat-template", template, *GREEDY
    assert run("generate", base, "--prompt", PROMPT, *options) == (0, out, "")


def test_seed_and_sampling(run, base):
    options = "--no-chat", "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "5"
    options += "--top-p", "0.9", "--top-k", "99"
    first, same, other = (run("generate", base, *options, "--seed", seed) for seed in (0, 0, 1))
    assert first == same != other and first[0] == 0


def test_runs_and_adapters(run, refused, base, tmp_path):
    """RUN/model, RUN/adapter and the folder of an adapter."""
    shutil.copytree(base, tmp_path / "full" / "model")
    shape = decoder_shapes(DecoderConfig.from_json(base))[0]["mlp.up_proj.weight"].shape
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(1, 2, shape[2])), rng.normal(size=(1, shape[1], 2))
    adapter = {"mlp.up_proj.lora_A.weight": a, "mlp.up_proj.lora_B.weight": b}
    adapter = {name: a.astype(np.float32) for name, a in adapter.items()}
    folder = tmp_path / "lora" / "adapter"
    convert.save_adapter(folder, adapter, 3.0, base_model=str(base))

    assert run("merge", "lora", "--out", "merged") == (0, "written: merged\n", "")
    assert "merged: exists and is not empty" in refused("merge", "lora", "--out", "merged")
    options = "--no-chat", "--prompt", PROMPT, *GREEDY
    places = base, "full", "merged", "lora", folder
    outputs = [run("generate", place, *options)[1] for place in places]
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3] == outputs[4]

    change(folder / "adapter_config.json", base_model_name_or_path="gone")
    assert "(='gone') must be the folder" in refused("generate", "lora", *options)
    assert run("generate", "lora", "--base", base, *options)[1] == outputs[3]
    assert "needs an adapter" in refused("generate", base, "--base", base, *options)
    change(folder / "adapter_config.json", base_model_name_or_path="unsloth/x-bnb-4bit")
    change(folder / "adapter_config.json", revision="unsloth")  # that of the adapter
    for argv in ("generate", "lora", *options), ("chat", "lora"), ("merge", "lora", "--out", "m"):
        err = refused(*argv)
        assert "unsloth/x-bnb-4bit: quantized models are not supported" in err
        assert "precision, probably unsloth/x. lora/adapter/adapter_config.json names it" in err
        assert err.endswith("give another one with --base.\n")
    code, out, err = run("generate", "lora", "--base", base, *options)
    note = f"trained on unsloth/x-bnb-4bit, and added to {base} in float32\n"
    assert (code, out) == (0, outputs[3]) and err == f"lora/adapter: {note}"
    code, out, _ = run("merge", "lora", "--base", base, "--out", "m")
    assert (code, out) == (0, f"lora/adapter: {note}written: m\n")
    shutil.copytree(base, "bnb")
    change(tmp_path / "bnb" / "config.json", quantization_config={"load_in_4bit": True})
    change(folder / "adapter_config.json", base_model_name_or_path="bnb")
    err = refused("generate", "lora", *options)
    assert "bnb: `quantization_config` (={'load_in_4bit': True}) of config.json is not" in err
    assert "Use the model in full precision. lora/adapter/adapter_config.json names it" in err
    for argv in ("finetune", "bnb", "--data", "rows"), ("memory", "finetune", "bnb"):
        assert refused(*argv).endswith("Use the model in full precision.\n")

    write_checkpoint("other", hidden_size=16)
    change(folder / "adapter_config.json", base_model_name_or_path="other")
    assert "does not fit its base model" in refused("generate", "lora", *options)


def test_adapters_of_quantized_bases(run, refused, base, tmp_path):
    shapes, _ = decoder_shapes(DecoderConfig.from_json(base))
    count, outputs, inputs = shapes["mlp.up_proj.weight"].shape
    sizes = {"A": (count, 2, inputs), "B": (count, outputs, 2)}
    adapter = {f"mlp.up_proj.lora_{i}.weight": np.ones(s, np.float32) for i, s in sizes.items()}
    for name, form in ("nf4", "nf4 bfloat16"), ("none", ""), ("other", "fp4 float32"):
        convert.save_adapter(name, adapter, 3.0, base_model=str(base), metadata={"base_in": form})
    note = f"nf4: trained on the base model in nf4, and added to {base} in float32"
    code, out, err = run("merge", "nf4", "--out", "m")
    assert (code, err) == (0, "") and note in out and "written: m" in out and "--dequantized" in out
    code, _, err = run("generate", "nf4", "--no-chat", "--prompt", PROMPT, *GREEDY)
    assert (code, err) == (0, f"{note}\n")
    assert run("merge", "nf4", "--out", "d", "--dequantized") == (0, "written: d\n", "")
    for name in "none", "other":
        err = refused("merge", name, "--out", "n", "--dequantized")
        assert f"--dequantized: {name} is not of a run of effjax finetune --quantize" in err
        assert run("merge", name, "--out", f"m_{name}") == (0, f"written: m_{name}\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gone"], "gone: not found. Give the folder of a checkpoint"),
        (["run"], "run: a run without model/ and adapter/"),
        (["lm"], "lm: not a run of effjax finetune"),
        (["base/config.json"], "base/config.json: is a file. Give the folder"),
        (["bare"], "tokenizer.json: does not exist"),
        (["base", "--prompt", "if " * 99], "The prompt is too long: it has"),
        (["base", "--top-p", "2"], "--top-p (=2.0) must lie in [0, 1]"),
        (["base", "--top-p", "0"], "--top-p (=0.0) must be in (0, 1]"),
        (["base", "--temperature", "-1"], "--temperature (=-1.0)"),
        (["base", "--no-chat", "--chat-template", "x"], "--chat-template x cannot be combined"),
        (["base", "--no-chat", "--system", "x"], "--system needs a chat template"),
        (["base", "--no-chat", "--prompt", ""], "An empty prompt needs"),
        (["plain", "--chat"], "--chat needs a chat template, which"),
        (["small"], "belong to different models. Token"),
        (["base", "--prompt", "a\udcff"], "The prompt must be UTF-8"),
        (["base", "--system", "a\udcff"], "--system must be UTF-8"),
        (["eos"], "`eos_token_id` (=2147483648) must be below `vocab_size`"),
        (["x" * 300], "xx…: the name is too long. Use a shorter one."),
    ],
)
def test_wrong_models_and_options(refused, base, tmp_path, argv, message):
    for name in ("bare", "plain", "small", "eos", "run", "lm"):
        shutil.copytree(base, tmp_path / name)
    change(tmp_path / "run" / "config.json", effjax="0.1.0", command="finetune")
    change(tmp_path / "lm" / "config.json", effjax="0.1.0", command="lm")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    change(tmp_path / "plain" / "tokenizer_config.json", chat_template=None)
    change(tmp_path / "small" / "config.json", vocab_size=3)
    change(tmp_path / "eos" / "config.json", eos_token_id=[1, 2**31])
    assert message in refused("generate", *argv, "--prompt", PROMPT)


def test_pieces_of_text(base):
    """Characters of several tokens are complete, and control characters are escaped."""
    tokenizer = load_tokenizer(base, TODAY)
    text = "naïve\xa0🎉\n\t\x1b[1m end\u202e"
    ids = tokenizer.backend.encode(f"{text}</s>").ids
    pieces = list(decode(tokenizer, iter(ids)))
    assert "".join(pieces) == text
    assert printable_lines(text) == "naïve\xa0🎉\n\t\\x1b[1m end\\u202e"
    assert "🎉" in pieces and len(pieces) > 5
    unfinished = tokenizer.backend.encode("é").ids[:1]
    assert list(decode(tokenizer, unfinished)) == ["\N{REPLACEMENT CHARACTER}"]


def test_a_stop_ends_the_text_before_it(base):
    """Also one that begins and ends within tokens; no more tokens are taken than are needed."""
    tokenizer = load_tokenizer(base, TODAY)
    text = "for the classes and the class"
    ids = tokenizer.backend.encode(text).ids
    taken = []

    def until(*stops):
        taken[:] = []
        return "".join(decode(tokenizer, (taken.append(i) or i for i in ids), stops))

    for first in range(len(text)):
        for last in range(first + 1, min(first + 7, len(text)) + 1):
            assert until(text[first:last]) == text[: text.index(text[first:last])]
    assert until("the ", "es an") == "for "
    assert until(" t") == "for" and len(taken) < len(ids)
    assert until("classic", "class?") == until() == text
    number = tokenizer.backend.token_to_id("<|im_end|>")
    assert split_stops(tokenizer, ["a", "<|im_end|>"]) == (["a"], {number})
    for stop in "", "a<|im_end|>":
        with pytest.raises(TrainError, match="must be a text"):
            split_stops(tokenizer, [stop])


def test_prompts_of_a_file(run, base, tmp_path):
    """Rows with `prompt` or `messages`, and lines; a stop that is not one of the tokens' ends."""
    completion = text_of(base, greedy_tokens(base, PROMPT))
    # Letters, which are printed as they are generated.
    parts = (completion[i : i + 3] for i in range(1, len(completion)))
    stop = next(part for part in parts if part.isascii() and part.strip().isalpha())
    rows = [
        {"prompt": PROMPT, "id": 7, "score": float("nan")},
        {"messages": [{"role": "user", "content": PROMPT}]},
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "é"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--prompts", "rows.jsonl", "--out", "out.jsonl", *GREEDY
    assert run("generate", base, *options) == (0, "written: out.jsonl\n", "unused fields: id\n")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [row.pop("generated") for row in written]
    rows[0]["score"] = None  # NaN is no JSON
    assert written == rows and texts[0] == texts[1] and all(texts)
    (tmp_path / "lines.txt").write_text(f"{PROMPT}\n\n{PROMPT}\n")
    options = "--no-chat", "--prompts", "lines.txt", "--stop", "never", "--stop", stop, *GREEDY
    _, out, _ = run("generate", base, *options)
    assert out == f"> {PROMPT}\n{completion[: completion.index(stop)]}\n" * 2


def test_lines_of_a_file(run, base, tmp_path):
    r"""A line ends at \n or \r\n, keeps its spaces, and is a prompt if it has a character."""
    lines = "\ufeff", " a ", "", " ", "b\x0bc\x0c\x1c\x1d\x1e\x85\u2028\u2029\rd", "\te\r"
    (tmp_path / "lines.txt").write_bytes("\r\n".join(lines[:3]).encode())
    with (tmp_path / "lines.txt").open("ab") as file:
        file.write("\n".join(("", *lines[3:])).encode())
    options = "--prompts", "lines.txt", "--out", "out.jsonl", "--max-tokens", "1", "--no-chat"
    assert run("generate", base, *options)[0] == 0
    assert [row["prompt"] for row in read_rows(tmp_path / "out.jsonl")] == [*lines[1:2], *lines[3:]]


def test_each_prompt_has_its_own_limit(run, base, tmp_path):
    """That of the positions, 64, which a long neighbor does not change."""
    for name, prompts in ("one", ["x"]), ("two", ["x", "x" * 60]):
        (tmp_path / f"{name}.txt").write_text("\n".join(prompts))
        options = "--prompts", f"{name}.txt", "--out", f"{name}.jsonl", "--max-tokens", "40"
        assert run("generate", base, *options, "--no-chat", "--temperature", "0")[0] == 0
    (alone,), (same, last) = (read_rows(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    assert alone == same and len(last["generated"]) < len(alone["generated"])
    prompt = load_tokenizer(base, TODAY).backend.encode("x" * 60).ids
    assert len(prompt) == 60
    config = DecoderConfig.from_json(base)
    params = convert.load_checkpoint(base, *decoder_shapes(config))
    for text, count in (alone, 40), (last, 4):
        ids = load_tokenizer(base, TODAY).backend.encode(text["prompt"]).ids
        done = generate(config, *params, np.array([ids]), max_new_tokens=count, stop_tokens=[1])
        tokens = np.asarray(done.tokens[0])[: done.lengths[0]]
        pieces = decode(load_tokenizer(base, TODAY), tokens.tolist(), (), ids)
        assert text["generated"] == "".join(pieces)


def test_prompts_that_are_left_out(run, base, tmp_path):
    """They are named, the others have the same texts as without them, and the exit code is 1."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    system = {"role": "system", "content": "x"}
    good = json.dumps({"prompt": PROMPT})
    wrong = [
        ('{"text": "a"}', "must have one of `prompt` and `messages`"),
        (json.dumps({"messages": turns}), "`messages` must end before a turn of the"),
        (json.dumps({"messages": [system, turns[0]]}), "has a message of its own"),
        ('{"prompt": 1}', "`prompt` must be a string or a list, not a number"),
        ('{"prompt": "a", "generated": "b"}', "has `generated`, the field that --out adds"),
        ('{"prompt": "\\ud800"}', "contains half of a surrogate pair"),
        ('{"prompt": ', "is not JSON"),
        ("7", "must be a JSON object, not a number"),
        ('{"prompt": "\xff"}', "is not UTF-8"),
        (json.dumps({"prompt": "x" * 99}), "The prompt is too long: it has"),
        ('{"prompt": [{"role": "user", "content": "a", "x": 1}, {"role": 3}]}', "message 2 must"),
    ]
    lines = [good, *(line for line, _ in wrong), good]
    (tmp_path / "mixed.jsonl").write_bytes("\n".join(lines).encode("latin1"))
    options = "--system", "x", "--temperature", "3", "--max-tokens", "5"
    code, out, err = run(
        "generate", base, "--prompts", "mixed.jsonl", "--out", "out.jsonl", *options
    )
    assert (code, out) == (1, "written: out.jsonl\n")
    errors = err.splitlines()
    assert errors.pop() == f"effjax: {len(wrong)} of {len(lines)} prompts left out."
    errors = [error for error in errors if not error.startswith("unused fields")]
    for number, (error, (_, message)) in enumerate(zip(errors, wrong, strict=True), 2):
        assert error.startswith(f"effjax: mixed.jsonl: line {number}: ") and message in error
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["prompt"] for row in rows] == [PROMPT] * 2

    same = [good] * len(lines)
    (tmp_path / "good.jsonl").write_text("\n".join(same))
    run("generate", base, "--prompts", "good.jsonl", "--out", "good.out.jsonl", *options)
    assert read_rows(tmp_path / "good.out.jsonl")[:: len(lines) - 1] == rows
    assert rows[0] != rows[1]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns[:1]}))
    code, _, err = run("generate", base, "--prompts", "chat.jsonl", "--no-chat")
    assert code == 1 and "chat.jsonl: line 1: A list of messages needs a chat template" in err
    assert run("generate", base, "--prompts", "mixed.jsonl", *options)[1].startswith(
        f"> {PROMPT}\n"
    )


def test_a_file_without_a_prompt_that_can_be_completed(run, base, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n" + b"x" * 999)
    assert run("generate", base, "--prompts", "a.txt", "--out", "new.jsonl") == (
        1, "", "effjax: a.txt: line 1: is not UTF-8 (invalid start byte)\n"
        "effjax: a.txt: line 2: The prompt is too long: it has 1011 tokens, and the model 64 "
        "positions. Shorten it.\neffjax: 2 of 2 prompts left out.\n",
    )  # fmt: skip
    assert not [*tmp_path.glob("new*")]


def test_wrong_files_of_prompts(refused, base, tmp_path):
    for name, content, message in (
        ("a.jsonl", "\n", "a.jsonl: contains no prompt"),
        ("b.jsonl", '[{"prompt": "a"}', "b.jsonl: the array: is not JSON"),
        ("e.txt", "\n", "e.txt: contains no prompt"),
        ("f.csv", "a", "f.csv: must be a file of prompts, .txt or .jsonl"),
    ):
        (tmp_path / name).write_text(content)
        assert message in refused("generate", base, "--prompts", name, "--out", "new.jsonl")
    assert "gone.txt: cannot be read" in refused("generate", base, "--prompts", "gone.txt")
    assert "checkpoint" in refused("generate", "--prompt", "a")
    (tmp_path / "new.jsonl.part").touch()
    for argv, message in (
        (["--prompts", "e.txt", "--prompt", "a"], "Give prompts with --prompt, or"),
        (["--prompt", "a", "--out", "e.txt"], "e.txt exists. Give another file."),
        (["--prompt", "a", "--out", "new.jsonl"], "new.jsonl.part exists. Give another file."),
    ):
        assert message in refused("generate", base, *argv)


def test_a_full_disk_leaves_whole_rows(run, base, tmp_path):
    rows = [{"prompt": prompt, "note": "n" * 1500} for prompt in "abc"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--prompts", "a.jsonl", "--out", "out.jsonl", "--max-tokens", "2"
    with limited_files(4000):
        code, out, err = run("generate", base, *options)
    message = "--out out.jsonl: cannot be written (File too large). out.jsonl.part has the rows"
    assert code == 2 and out == "" and message in err
    assert not (tmp_path / "out.jsonl").exists()
    lines = (tmp_path / "out.jsonl.part").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["a", "b"]


def test_an_interrupted_file_has_another_name(run, base, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a\nb\nc\n")
    dumps, calls = json.dumps, []

    def interrupt(row, **options):
        if "generated" in row:
            calls.append(row)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return dumps(row, **options)

    monkeypatch.setattr("effjax.cli.generate.json.dumps", interrupt)
    options = "--prompts", "a.txt", "--out", "out.jsonl", "--max-tokens", "2"
    message = "effjax: interrupted. out.jsonl.part has what was generated.\n"
    assert run("generate", base, *options)[::2] == (130, message)
    assert not (tmp_path / "out.jsonl").exists()
    assert [row["prompt"] for row in read_rows(tmp_path / "out.jsonl.part")] == ["a", "b"]


@vary("params_in", ["device", "host"])
def test_sharded_parameters(run, base, params_in):
    options = "--params-in", params_in, "--no-chat", "--prompt", PROMPT, *GREEDY
    axes = f"fsdp={jax.device_count()}"
    model = find_model(base, None, TODAY)
    layers, others, _ = model.load(params_in, mesh=generation_mesh(axes))
    arrays = *layers.values(), *others.values()
    local = sum(a.addressable_shards[0].data.nbytes for a in arrays)
    # Small ones are replicated.
    assert local < sum(a.nbytes for a in arrays) / (jax.device_count() / 2)
    names = "generate", base, *options
    assert run(*names, "--mesh", axes) == run(*names)


def test_settings_of_the_files(base):
    """The dtype, the tokens that end a completion, and the positions, which limit their number."""
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    change(base / "config.json", eos_token_id=5)
    model = find_model(base, None, TODAY)
    ids = [model.tokenizer.backend.token_to_id(name) for name in ("</s>", "<|im_end|>")]
    assert encode(model, PROMPT, None, chat=False)[1] == {5, 7, 9, ids[0]}
    assert encode(model, PROMPT, None, chat=True)[1] == {5, 7, 9, *ids}
    assert count_new_tokens(model, [1] * 60, 100) == 4
    assert count_new_tokens(model, [1] * 60, 3) == 3
    change(base / "config.json", max_position_embeddings=None)
    assert count_new_tokens(find_model(base, None, TODAY), [1] * 60, 100) == 100
    assert model.config.dtype == "float32"
    layers, others, scale = find_model(base, "bfloat16", TODAY).load("device")
    assert {str(a.dtype) for a in jax.tree.leaves((layers, others))} == {"bfloat16"} and scale == 1
