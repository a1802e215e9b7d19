"""Log-probs of the rollout against the trainer's for the same tokens: ``python -m benchmarks.logprob_gap --json FILE``.

SGLang samples sequences of a random model at temperature 1 and reports each token's log-prob; our trainer computes them
again from the same weights. In bfloat16 the two differ, because kernels round and sum in different orders and, with
sparse attention, because an indexer in fp8 selects a few other positions than one in bfloat16. With

    d = log π_trainer − log π_rollout

a token is masked by IcePop where exp(d) is outside [1/β, β], by DIS where it is not inside (1 − ε_low, 1 + ε_high),
even though the weights are the same on both sides. A line for each model: ``dense`` (like SmolLM2-135M), ``dsa`` (a
small GLM-5, served with HiSparse; CUDA only). Random weights are drawn wide, so that the distribution over the
vocabulary is not flat.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, LlamaConfig, PretrainedConfig

from algorithms.dis import Config as DisConfig
from algorithms.icepop import IcePopConfig
from algorithms.ratios import inside, ratio, strictly_inside
from benchmarks.engine.pools import KvBytes, hisparse_pool
from benchmarks.engine.servers import HISPARSE_RESERVE, Argument, Server, ServerSpec, common, start
from benchmarks.trainer.sides import make_worker
from rollout.processes import ProcessRegistry
from rollout.trajectory import StopReason, Trajectory

LATENT, ROTARY, INDEX_DIM, TOP_K = 512, 64, 128, 2048
START_S = 300.0
"""For the servers, which compile kernels the first time."""


def gap_statistics(trainer: Float32[np.ndarray, " tokens"], rollout: Float32[np.ndarray, " tokens"]) -> dict[str, Any]:
    """How far the trainer's log-probs are from the rollout's, and what the objectives' default bounds mask."""
    difference = trainer - rollout
    distance = np.abs(difference)
    ratios = ratio(torch.from_numpy(trainer), torch.from_numpy(rollout))
    icepop, dis = IcePopConfig(), DisConfig()
    assert icepop.beta is not None
    popped = inside(ratios, 1 / icepop.beta, icepop.beta) == 0
    cut = strictly_inside(ratios, 1 - dis.epsilon_low, 1 + dis.epsilon_high) == 0
    return {
        "tokens": len(difference),
        "mean": float(difference.mean()),
        "mean_abs": float(distance.mean()),
        "p50_abs": float(np.quantile(distance, 0.5)),
        "p99_abs": float(np.quantile(distance, 0.99)),
        "max_abs": float(distance.max()),
        "kl_rollout_trainer": float((ratios - 1 - ratios.log()).mean()),
        "icepop_masked": float(popped.float().mean()),
        "dis_masked": float(cut.float().mean()),
        "mean_logprob": float(rollout.mean()),
    }


def dense_model(cuda: bool) -> PretrainedConfig:
    sizes = (576, 1536, 30, 9, 3, 49_152) if cuda else (64, 128, 2, 4, 2, 512)
    hidden, mlp, layers, heads, kv_heads, vocabulary = sizes
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64 if cuda else 16,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def dsa_model() -> PretrainedConfig:
    """GLM-5's attention and routing with four layers and few, narrow experts."""
    return GlmMoeDsaConfig(
        vocab_size=32_768,
        hidden_size=2048,
        intermediate_size=4096,
        moe_intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        q_lora_rank=1536,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_topk=TOP_K,
        index_n_heads=32,
        index_head_dim=INDEX_DIM,
        indexer_types=["full"] * 4,
        indexer_rope_interleave=True,
        # As GLM-5's own config says it, for SGLang.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        ep_size=1,
        pretraining_tp=1,
        max_position_embeddings=65_536,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def write_model(config: PretrainedConfig, directory: Path, cuda: bool) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    model.save_pretrained(directory)


def server_spec(name: str, directory: Path, context: int, requests: int, cuda: bool) -> ServerSpec:
    arguments: dict[str, Argument] = common(directory, context, requests) | {"sampling-backend": "pytorch"}
    if not cuda:
        arguments |= {
            "device": "cpu",
            "dtype": "float32",
            "attention-backend": "torch_native",
            "sleep-on-idle": True,
            "disable-overlap-schedule": True,
            "max-total-tokens": 16_384,
        }
        cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "2"}
        return ServerSpec("plain", arguments, cpu)
    arguments |= {
        "dtype": "bfloat16",
        "disable-prefill-cuda-graph": True,
        "mem-fraction-static": 0.5,
        "cuda-graph-bs-decode": "32",
    }
    if name == "dense":
        return ServerSpec("plain", arguments | {"attention-backend": "triton", "max-total-tokens": 2**18}, {})
    pool = hisparse_pool(requests, context, TOP_K, context, 4, KvBytes.of(LATENT, ROTARY, INDEX_DIM))
    arguments |= {
        "kv-cache-dtype": "bfloat16",
        "dsa-prefill-backend": "flashmla_sparse",
        "dsa-decode-backend": "flashmla_sparse",
        "chunked-prefill-size": 8192,
        "disable-radix-cache": True,
        "enable-hisparse": True,
        "hisparse-config": json.dumps(
            {"top_k": TOP_K, "device_buffer_size": pool.buffer, "host_to_device_ratio": pool.ratio}
        ),
        "max-total-tokens": pool.device_tokens,
    }
    return ServerSpec("hisparse", arguments, HISPARSE_RESERVE)


@dataclass(frozen=True)
class Model:
    """One that is written, and what is asked of it."""

    name: str
    directory: Path
    vocabulary: int
    spec: ServerSpec
    prompt: int
    output: int


def prepare(name: str, options: argparse.Namespace, cuda: bool) -> Model:
    directory = options.work / name
    config = dense_model(cuda) if name == "dense" else dsa_model()
    write_model(config, directory, cuda)
    prompt = options.prompt or ((512 if name == "dense" else 3 * TOP_K // 2) if cuda else 32)
    output = options.output or (512 if cuda else 64)
    spec = server_spec(name, directory, prompt + output + 64, options.requests, cuda)
    return Model(name, directory, config.vocab_size, spec, prompt, output)


def sample(models: Sequence[Model], folder: Path, requests: int) -> dict[str, list[Trajectory] | str]:
    """Rollouts of each model, or what was wrong; by servers that start side by side and are gone afterwards."""
    found: dict[str, list[Trajectory] | str] = {}
    with ProcessRegistry() as registry:
        servers, failed = start(registry, [model.spec for model in models], folder, START_S)
        for model in models:
            if model.spec.side in failed:
                found[model.name] = f"the server did not start: {failed[model.spec.side]}"
                continue
            try:
                found[model.name] = rollouts(servers[model.spec.side], model, requests)
            except Exception:  # noqa: BLE001  (it is written down, and the next model is asked)
                found[model.name] = traceback.format_exc()[-3000:]
    return found


def rollouts(server: Server, model: Model, requests: int) -> list[Trajectory]:
    numbers = random.Random(0)
    prompts = [numbers.choices(range(2, model.vocabulary), k=model.prompt) for _ in range(requests)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": model.output, "temperature": 1.0},
        "return_logprob": True,
    }
    answers = server.post("/generate", body, 300.0)
    return [
        _trajectory(index, given, answer["meta_info"])
        for index, (given, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _trajectory(index: int, prompt: list[int], meta: dict[str, Any]) -> Trajectory:
    sampled = [(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]]
    length, given = len(prompt) + len(sampled), len(prompt)
    mask = np.arange(length) >= given
    return Trajectory(
        token_ids=np.array([*prompt, *(token for _, token in sampled)], np.int32),
        action_mask=mask,
        rollout_logprobs=np.array([0.0] * given + [logprob for logprob, _ in sampled], np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_index=np.zeros(length, np.int32),
        temperature=1.0,
        reward=0.0,
        task="benchmark",
        epoch=0,
        prompt_id=str(index),
        group_id=index,
        sample_id=0,
        stop_reason=StopReason.LENGTH,
    )


def compare(model: Model, sampled: list[Trajectory], device: str) -> dict[str, Any]:
    """The trainer's log-probs of what a server sampled, against the server's."""
    worker = make_worker(device, 2)
    try:
        worker.load_model(model.directory)
        computed = worker.logprobs(sampled)
    finally:
        worker.close()
    masks = [trajectory.action_mask for trajectory in sampled]
    trainer = np.concatenate([found[mask] for found, mask in zip(computed, masks, strict=True)])
    rollout = np.concatenate([t.rollout_logprobs[mask] for t, mask in zip(sampled, masks, strict=True)])
    return {"side": model.spec.side, **gap_statistics(trainer, rollout)}


def _emit(path: Path, model: Model, sampled: list[Trajectory] | str, device: str) -> bool:
    line: dict[str, Any] = {"section": "logprob_gap", "model": model.name}
    try:
        line |= {"error": sampled} if isinstance(sampled, str) else compare(model, sampled, device)
    except Exception:  # noqa: BLE001  (it is written down, and the next model runs)
        line["error"] = traceback.format_exc()[-3000:]
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
    return "error" not in line


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprob_gap", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/logprob-gap"), help="checkpoints, logs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="dense,dsa", help="dense,dsa; dsa needs CUDA")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, help="tokens (cuda: dense 512, dsa 3,072, past its top k)")
    parser.add_argument("--output", type=int, help="tokens (cuda: 512)")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    options.work.mkdir(parents=True, exist_ok=True)
    models = [prepare(name, options, cuda) for name in options.models.split(",") if cuda or name == "dense"]
    if cuda:
        torch.cuda.empty_cache()
    sampled = sample(models, options.work, options.requests)
    done = [_emit(options.json, model, sampled[model.name], options.device) for model in models]
    return int(not all(done))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
