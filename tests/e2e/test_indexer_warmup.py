"""The stage that trains the indexers of a model with sparse attention, as a whole run."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from rl.fresh_model import character_tokenizer
from tests.e2e.conftest import ROOT, RUN_TIMEOUT_S


def create_sparse_model(directory):
    """A tiny GLM-5 with the demo's tokenizer; layer 1's indexer serves layers 1 to 3."""
    tokenizer = character_tokenizer(256)
    config = GlmMoeDsaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=56,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=16,
        index_topk=8,
        index_n_heads=8,
        index_head_dim=16,
        indexer_types=["full", "full", "shared", "shared"],
        max_position_embeddings=256,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GlmMoeDsaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["indexer_dense", "indexer_sparse"])
def test_indexers_learn_from_demonstrations_and_nothing_else_moves(tmp_path, phase):
    create_sparse_model(tmp_path / "hf")
    run = subprocess.run(
        [
            *(sys.executable, "train.py", "+stage=indexer_warmup", "model=hf", f"model.checkpoint={tmp_path / 'hf'}"),
            *(f"run_dir={tmp_path / 'run'}", f"trainer.trained={phase}", "tracking=files"),
            *("sft.steps=20", "sft.conversations_per_step=16", "sft.optimizer.lr=3e-3", "sft.optimizer.warmup_steps=2"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for layer in (0, 1):
        assert rows[-1][f"indexer_kl/layer_{layer}"] < 0.9 * rows[0][f"indexer_kl/layer_{layer}"]
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == (".indexer." not in name), name
