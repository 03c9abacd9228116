"""Tiny tokenizers with the chat templates of model families."""

from pathlib import Path
from typing import Any

from effjax.train.text import tiny
from effjax.train.text.tiny import CHATML

# Templates in the formats of model families, written for the tests.
TEMPLATES = {
    "chatml": CHATML,
    "generation": """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama3": """\
{{- bos_token }}
{%- if messages[0].role != 'system' %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') }}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + tools | tojson + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # Reasoning before the last question is removed, and an answer to it begins with reasoning.
    "qwen3": """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') | trim('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content | default('', true) }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "mistral": """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate between user and assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
}
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]",
)  # fmt: skip


def write_tokenizer(
    folder: Path, vocab_size: int = 384, template: str | None = CHATML,
    processor: str | None = None, **config: Any,
) -> Path:  # fmt: skip
    """Write the tokenizer of `effjax.train.text.tiny`, with the tokens of all templates.

    Args:
        folder: Where to write; created if necessary.
        vocab_size: The largest number of tokens, of which 256 are bytes.
        template: The chat template, or None.
        processor: What tokenizer.json adds to a text, such as "<s> $A".
        config: Other settings of tokenizer_config.json.
    """
    tiny.write_tokenizer(folder, tiny.train_tokenizer(vocab_size, SPECIAL), template, **config)
    if processor is not None:
        from tokenizers import Tokenizer, processors

        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = [(name, SPECIAL.index(name)) for name in ("<s>", "</s>")]
        template_processor = processors.TemplateProcessing(single=processor, special_tokens=special)
        tokenizer.post_processor = processors.Sequence(
            [tokenizer.post_processor, template_processor]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder
