"""Engine settings that do not fit the model or the GPUs are named, one line each."""

import re
from pathlib import Path

import pytest
import yaml

from rollout.engine.config import EngineConfig
from rollout.engine.fit import gpus_needed, problems
from rollout.engine.model_shape import model_shape


def shape(name, **changes):
    return model_shape(yaml.safe_load(Path(f"configs/model/{name}.yaml").read_text())["hf_config"] | changes)


def engine(**values):
    return EngineConfig(**({"device": "cuda", "dtype": "bfloat16", "context_length": 8192} | values))


@pytest.mark.parametrize(
    ("model", "values", "gpus", "message"),
    [
        ("glm5", {"tensor_parallel": 8}, 4, "gpus=4 are fewer than the 8 that the servers take"),
        ("glm5", {"tensor_parallel": 8, "servers": 2}, 15, "fewer than the 16 .* 2 x 8"),
        ("glm5", {"context_length": 300_000}, 8, "engine.context_length=300000 is more than .*=202752.*: lower it"),
        ("glm5", {"tensor_parallel": 3}, 8, "engine.tensor_parallel=3 does not divide the model's 64 attention heads"),
        ("glm5", {"tensor_parallel": 12, "data_parallel_attention": 3}, 16, "does not divide the experts'.*=2048"),
        ("glm5", {"tensor_parallel": 12, "data_parallel_attention": 3, "expert_parallel": 12}, 16, "the 256 experts"),
        ("glm5", {"tensor_parallel": 20, "data_parallel_attention": 4}, 32, "/ data_parallel_attention=4 = 5 does not"),
        ("qwen3_8b", {"tensor_parallel": 5}, 8, "does not divide the model's 32 attention heads"),
        ("qwen3_8b", {"tensor_parallel": 2, "expert_parallel": 2}, 8, "qwen3 has no experts: set 1"),
        ("qwen3_8b", {"hisparse": {}, "prefix_cache": False}, 8, "engine.hisparse: qwen3 attends to every token"),
        ("glm5", {"hisparse": {"device_buffer_size": 1024}, "prefix_cache": False}, 8, "the model's index_topk=2048"),
        (
            "glm5",
            {"disaggregation": {"decode": {"tensor_parallel": 3}}},
            8,
            "engine.disaggregation.decode.tensor_parallel=3",
        ),
        (
            "glm5",
            {"disaggregation": {"prefill": {"servers": 2}}},
            2,
            "gpus=2 .* the 3 .*2 x 1 for prefill, 1 x 1 for decode",
        ),
    ],
)
def test_what_does_not_fit(model, values, gpus, message):
    assert re.search(message, next(problems(engine(**values), shape(model), gpus)))


def test_kv_heads():
    narrow = shape("qwen3_8b", num_attention_heads=24, num_key_value_heads=6)
    assert "neither divides the model's 6 KV heads nor is a multiple" in next(
        problems(engine(tensor_parallel=4), narrow)
    )
    assert not list(problems(engine(tensor_parallel=12, expert_parallel=1), narrow))  # each KV head on two GPUs


def test_what_fits():
    sparse = {"hisparse": {}, "prefix_cache": False, "data_parallel_attention": 8}
    assert not list(problems(engine(tensor_parallel=8, **sparse), shape("glm5"), 8))
    assert not list(problems(engine(tensor_parallel=4, servers=2), shape("qwen3_8b"), 8))


def test_gpus_needed():
    assert gpus_needed(engine(tensor_parallel=2, servers=3)) == 6
    shared = {"share_gpus": True, "decode": {"tensor_parallel": 2}}
    assert gpus_needed(engine(memory_fraction=0.4, disaggregation=shared)) == 2


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, 0),
        ({"mlp_only_layers": [0, 2]}, 2),
        ({"decoder_sparse_step": 2}, 18),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 19),
    ],
)
def test_dense_layers_among_those_with_experts_are_refused_where_sglang_ignores_them(changes, dense):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    mixed = shape("qwen3_8b", model_type="qwen3_moe", **experts, **changes)
    assert mixed.experts.dense_layers == dense
    found = [problem for problem in problems(engine(), mixed) if "qwen3_moe" in problem]
    assert len(found) == (dense > 0)
