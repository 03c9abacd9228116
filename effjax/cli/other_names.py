"""Options of TRL 1.16, transformers 5.24, Axolotl 0.19 and Unsloth, and what they are here."""

from collections.abc import Iterable
from typing import Any

# Ours, with a value; theirs; and what differs. The first one that the command has is named.
NAMES = (
    ("checkpoint", "model model_name model_name_or_path base_model", ""),
    ("base", "model model_name model_name_or_path base_model", ""),
    ("quantize nf4", "load_in_4bit", "with --lora"),
    ("quantize int8", "load_in_8bit", "with --lora"),
    ("lora", "lora_r lora_rank r use_peft", "the rank"),
    ("lora_targets", "lora_target_modules target_modules", "names with commas between them"),
    ("rslora", "use_rslora peft_use_rslora", "with --lora-alpha"),
    ("adapter", "lora_model_dir", ""),
    ("matmul fp8", "fp8 use_fp8", ""),
    ("dtype bfloat16", "bf16 bfloat16 fp16", "the default of training"),
    ("policy recompute", "gradient_checkpointing use_gradient_checkpointing", "the default"),
    ("activations_in host", "activation_offloading", ""),
    ("data", "dataset dataset_name datasets local_dataset", ""),
    ("data", "dataset_config dataset_train_split", "as OWNER/NAME:CONFIGURATION:SPLIT"),
    ("columns text=NAME", "dataset_text_field", ""),
    ("validation", "val_set_size test_split_size", ""),
    ("validation_data", "test_datasets dataset_test_split", "another data set"),
    ("chat_template", "chat_template_path chat_template_jinja", "a file"),
    ("max_length", "max_seq_length sequence_len", ""),
    ("packing", "sample_packing", "the default"),
    ("batch_size", "per_device_train_batch_size micro_batch_size", "rows of a whole step"),
    ("num_microbatches", "gradient_accumulation_steps", "which split --batch-size"),
    ("epochs", "num_train_epochs num_epochs", ""),
    ("steps", "max_steps", ""),
    ("report_every", "eval_steps logging_steps", "steps between validations"),
    ("checkpoint_every", "save_steps", ""),
    ("keep", "save_total_limit", "besides the best checkpoint"),
    ("patience", "early_stopping_patience", ""),
    ("learning_rate", "lr", ""),
    ("schedule", "lr_scheduler_type lr_scheduler", "in finetune, down to --lowest-rate"),
    ("warmup", "warmup_ratio warmup_steps", "a share of the steps"),
    ("optimizer", "optim", "adamw, adamw8bit or muon"),
    ("clip_norm", "max_grad_norm", ""),
    ("loss dpo", "rl", "the only one"),
    ("dpo_beta", "beta rl_beta", "with --loss dpo"),
    ("seed", "random_state random_seed data_seed", ""),
    ("mesh fsdp=N", "fsdp deepspeed dp_shard_size", "for N devices"),
    ("resume", "resume_from_checkpoint", "the directory of the run"),
    ("out", "output_dir", ""),
    ("max_tokens", "max_new_tokens generation_max_new_tokens", ""),
    ("temperature", "do_sample generation_do_sample", "0 does not sample"),
)


def suggest(typed: str, params: Iterable[Any], in_file: bool = False) -> str:
    """Return a sentence with the option of a command that was meant, or an empty text.

    Args:
        typed: The name that the command does not have, such as `--lora_r`.
        params: The parameters of the command.
        in_file: Whether it is a key of `--config FILE`.
    """
    name, ours = typed.lstrip("-").replace("-", "_"), {param.name: param for param in params}
    found = [(name, "")] if name in ours else []  # with underscores, or a positional argument
    found += [(own, note) for own, names, note in NAMES if name in names.split()]
    for own, note in found:
        key, _, value = own.partition(" ")
        if key in ours:
            if in_file:
                text = f"{key}: {value}" if value else key
            elif ours[key].param_type_name == "argument":
                text = f"the argument {key.upper()}"
            else:
                text = f"--{key.replace('_', '-')} {value}".rstrip()
            return f" Use {text} ({note})." if note else f" Use {text}."
    return ""
