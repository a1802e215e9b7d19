"""A small random model of Qwen3's architecture with a character tokenizer: what the demo starts from."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl.config import FreshModel

SPECIAL_TOKENS = ("<pad>", "<eos>", "<user>", "<tool>", "<assistant>", "<system>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<' + message.role + '>' + message.content }}"
    "{%- if message.role == 'assistant' -%}{{ '<eos>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)


def character_tokenizer(context_length: int) -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII; the roles and the end of a turn are special tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def create_model(directory: Path, options: FreshModel, seed: int) -> None:
    """Write an HF directory (fp32 safetensors, config, tokenizer with chat template)."""
    tokenizer = character_tokenizer(options.context_length)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.context_length,
        rope_theta=options.rope_theta,
        initializer_range=options.initializer_range,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
