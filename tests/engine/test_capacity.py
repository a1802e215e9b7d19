"""The planner's pool sizes: against SGLang's own arithmetic, against a real server, and as properties."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout.engine.capacity import CapacityError, Workload, counted_token_bytes, predict_pools, weights_per_gpu
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.hisparse import HiSparseConfig
from rollout.engine.model_shape import model_shape, read_model_shape
from rollout.processes import ProcessRegistry

MODELS = Path("configs/model")
GB = 10**9


def hf_config(name, **changes):
    return yaml.safe_load((MODELS / f"{name}.yaml").read_text())["hf_config"] | changes


GLM5 = model_shape(hf_config("glm5"))


def engine(**changes):
    values = {"device": "cuda", "dtype": "bfloat16", "context_length": 65_536, "memory_fraction": 0.85}
    if changes.get("hisparse") is not None:
        values["prefix_cache"] = False
    return EngineConfig(**(values | changes))


def glm5_engine(**changes):
    return engine(tensor_parallel=8, data_parallel_attention=8, max_running_requests=2048, **changes)


SPARSE = HiSparseConfig(device_buffer_size=4096, host_to_device_ratio=8)
SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 1}
CASES = [
    ("glm5", {}, "bfloat16", 1, None),
    ("glm5", {}, "fp8_e4m3", 1, None),
    ("glm5", {}, "bfloat16", 1, SPARSE),
    ("glm5", {}, "fp8_e4m3", 1, SPARSE),
    ("glm5", SHARED, "bfloat16", 1, None),
    ("glm5", SHARED, "fp8_e4m3", 1, SPARSE),
    ("deepseek_v32", {}, "bfloat16", 1, HiSparseConfig(device_buffer_size=2048, host_to_device_ratio=3)),
    ("qwen3_8b", {}, "bfloat16", 1, None),
    ("qwen3_8b", {}, "fp8_e4m3", 2, None),
    ("qwen3_8b", {}, "bfloat16", 16, None),
]
ARCHITECTURES = {
    "glm5": "GlmMoeDsaForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "qwen3_8b": "Qwen3ForCausalLM",
}


def test_as_many_tokens_as_sglang_s_own_arithmetic_gives():
    budget = 12_345_678_901
    cases, ours = [], []
    for name, changes, kv_dtype, gpus, sparse in CASES:
        hf = hf_config(name, **changes, architectures=[ARCHITECTURES[name]])
        settings = engine(tensor_parallel=gpus, kv_dtype=kv_dtype, hisparse=sparse, max_running_requests=1)
        pools = predict_pools(settings, model_shape(hf), round(budget / 0.85), weight_bytes=0)
        ours.append((pools.tokens, pools.page))
        hisparse = None if sparse is None else {"top_k": 2048, **sparse.model_dump(exclude={"top_k"})}
        cases.append(
            {"hf_config": hf, "hisparse": hisparse, "kv_dtype": kv_dtype, "attention_gpus": gpus}
            | {"budget": budget, "page": pools.page}
        )
    command = [sys.executable, "-m", "tests.engine.sglang_pools"]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    for case, (tokens, page), expected in zip(CASES, ours, theirs, strict=True):
        assert abs(tokens - expected) <= page, case  # a page: the budget is rounded


def test_a_real_server_s_pool(models, tmp_path):
    """Tokens and bytes that SGLang reports; a pool large enough that its gigabytes, of two digits, say something."""
    config = EngineConfig(context_length=256, max_running_requests=4, max_total_tokens=400_000)
    shape = read_model_shape(models[0].directory)
    pools = predict_pools(config, shape, 8 * GB)

    def read(url):
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()

    async def reported(fleet):
        await fleet.start(models[0].directory)
        try:
            return json.loads(await asyncio.to_thread(read, f"{fleet.engines[0].url}/server_info"))
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        info = asyncio.run(reported(EngineFleet(config, registry, tmp_path)))
    assert info["max_total_num_tokens"] == pools.tokens
    measured = info["internal_states"][0]["memory_usage"]
    assert measured["kvcache"] * 2**30 == pytest.approx(pools.gpu_bytes, rel=0.05)


def test_the_older_sglang_counts_no_scales_and_no_larger_index():
    sparse = glm5_engine(kv_dtype="fp8_e4m3", hisparse=SPARSE)
    assert counted_token_bytes(sparse, GLM5, "0.5.16") == 78 * (576 + 132)
    assert counted_token_bytes(sparse, GLM5, "0.5.23") == 78 * (656 + 8 * 132)
    old = predict_pools(sparse, GLM5, 140 * GB, version="0.5.16")
    assert old.tokens * old.gpu_token_bytes > old.budget_bytes  # and takes more than its budget


def test_weights_of_a_gpu():
    whole = weights_per_gpu(GLM5, engine(max_running_requests=8))
    assert whole == pytest.approx(744e9, rel=0.01)
    eighth = weights_per_gpu(GLM5, glm5_engine())
    assert whole / 8 < eighth < whole / 8 * 1.2  # data-parallel attention and embeddings are held by each GPU
    assert weights_per_gpu(GLM5, engine(tensor_parallel=8)) < eighth


def test_the_published_case_without_hisparse_runs_few_dozen_requests():
    """GLM-5 in fp8 on 8 x H200, 32k in and 8k out: throughput stops growing near 32 concurrent requests."""
    pools = predict_pools(glm5_engine(kv_dtype="fp8_e4m3"), GLM5, 139 * GB)
    assert 24 <= 8 * pools.requests(Workload(32_768, 8_192)) <= 48


def test_the_measured_dsa_model_runs_35_requests():
    """Seen on an H200 with 0.5.16: 4 layers, bf16, a pool of 3.6 GiB; 20,000 tokens in and 1,024 out."""
    shape = replace(GLM5, layers=4, indexer=replace(GLM5.indexer, layers=4))
    settings = engine(max_running_requests=256, memory_fraction=None, max_total_tokens=752_000)
    pools = predict_pools(settings, shape, 140 * GB, version="0.5.16")
    assert pools.tokens * pools.gpu_token_bytes / 2**30 == pytest.approx(3.6, rel=0.02)
    assert pools.requests(Workload(20_000, 1_024)) == 35


def test_weights_that_leave_no_room():
    with pytest.raises(CapacityError, match=r"weights leave no room for KV in engine.memory_fraction=0.85 of 80.0 GB"):
        predict_pools(glm5_engine(), GLM5, 80 * GB)
    with pytest.raises(CapacityError, match=r"engine.memory_fraction and engine.max_total_tokens: set one"):
        predict_pools(glm5_engine(memory_fraction=None), GLM5, 140 * GB)


settings = st.builds(
    lambda ratio, pages, kv: glm5_engine(
        kv_dtype=kv,
        hisparse=None
        if ratio is None
        else HiSparseConfig(device_buffer_size=2048 + 64 * pages, host_to_device_ratio=ratio),
    ),
    st.none() | st.integers(1, 16),
    st.integers(0, 64),
    st.sampled_from(["bfloat16", "fp8_e4m3"]),
)
loads = st.builds(Workload, st.integers(1, 60_000), st.integers(1, 5_000))


@given(settings, loads, st.integers(130 * GB, 180 * GB))
def test_the_requests_fit(config, load, free):
    pools = predict_pools(config, GLM5, free)
    n = pools.requests(load)
    assert pools.tokens * pools.gpu_token_bytes <= max(pools.budget_bytes, 0)
    assert n * load.context <= pools.logical_tokens
    assert n <= pools.slots
    if pools.hot_tokens is not None and n:
        hot = min(pools.hot_tokens, load.context)
        free = 64 if load.output <= 91 else 0.7 * min(load.output, 128)
        # The last one's prompt is computed beside the others.
        assert (n - 1) * (hot + free) + load.prompt + min(load.output, 128) <= pools.tokens


@given(settings, loads, st.integers(130 * GB, 180 * GB), st.integers(1, 20 * GB), st.integers(1, 4_000))
def test_more_memory_never_fits_less_and_longer_requests_never_more(config, load, free, more, longer):
    pools, larger = predict_pools(config, GLM5, free), predict_pools(config, GLM5, free + more)
    assert larger.tokens >= pools.tokens
    assert larger.requests(load) >= pools.requests(load)
    assert pools.requests(Workload(load.prompt + longer, load.output)) <= pools.requests(load)
    assert pools.requests(Workload(load.prompt, load.output + longer)) <= pools.requests(load)


@given(st.integers(2, 16), st.integers(140 * GB, 180 * GB))
def test_a_larger_host_pool_trades_gpu_tokens_for_logical_ones(ratio, free):
    def pools(ratio):
        sparse = HiSparseConfig(device_buffer_size=4096, host_to_device_ratio=ratio)
        return predict_pools(glm5_engine(kv_dtype="fp8_e4m3", hisparse=sparse), GLM5, free)

    less, more = pools(ratio - 1), pools(ratio)
    assume(more.tokens > 0)
    assert more.tokens <= less.tokens
    assert more.logical_tokens + 64 * ratio >= less.logical_tokens
    assert more.host_bytes + 64 * ratio * GLM5.entry_bytes("fp8_e4m3") * 78 >= less.host_bytes
