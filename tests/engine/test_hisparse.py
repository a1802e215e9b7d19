"""What HiSparse, HiCache and disaggregation can't run with is refused before a launch; settings to change are named."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout.engine.config import EngineConfig
from rollout.engine.launch import command, server_specs

GLM = {"model_type": "glm_moe_dsa", "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 8,
    "intermediate_size": 64,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}


def engine(**values):
    base = {"device": "cuda", "dtype": "bfloat16", "context_length": 8192, "prefix_cache": False, "hisparse": {}}
    return EngineConfig(**(base | values))


@pytest.fixture
def model_dir(tmp_path):
    def write(**changes):
        config = SIZES | LATENT | GLM | {"max_position_embeddings": 65_536} | changes
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"prefix_cache": True},
            "hisparse and prefix_cache exclude each other .*: set prefix_cache to false, or hisparse",
        ),
        ({"device": "cpu"}, "hisparse needs a GPU, and device is cpu: set device to cuda, or hisparse to null"),
        ({"kv_dtype": "fp8_e5m2"}, "kv_dtype=fp8_e5m2 does not go with hisparse: set it to bfloat16 or fp8_e4m3"),
        (
            {"hisparse": {"device_buffer_size": 4000}},
            "device_buffer_size=4000 is not a whole number of 64.*set it to 3968",
        ),
        ({"hisparse": {"top_k": 8192}}, "device_buffer_size=4096 holds fewer tokens than hisparse.top_k=8192"),
        ({"hisparse": {"swap_in_block_size": 2048}}, "less than or equal to 1024"),
        ({"hisparse": {"host_to_device_ratio": 0}}, "greater than 0"),
        ({"hisparse": {"device_buffer": 1}}, "Extra inputs"),
        ({"hicache": {"ratio": 2.0}}, "hicache keeps what the prefix cache evicts, but prefix_cache is false"),
        ({"extra_args": {"enable_mixed_chunk": True}}, "extra_args.enable-mixed-chunk does not go with hisparse"),
        ({"extra_args": {"disaggregation-decode-extra-slots": 8}}, "decode-extra-slots does not go with hisparse"),
        ({"extra_args": {"dcp-size": 2}}, "extra_args.dcp-size does not go with hisparse"),
        ({"extra_args": {"speculative-eagle-topk": 4}}, "speculative-eagle-topk must be 1 with hisparse"),
        (
            {"extra_args": {"dsa-decode-backend": "flashmla_kv"}, "kv_dtype": "bfloat16"},
            "dsa-decode-backend=flashmla_kv reads fp8_e4m3, and kv_dtype=bfloat16: set kv_dtype so, or leave",
        ),
        ({"extra_args": {"dsa-prefill-backend": "trtllm"}}, "dsa-prefill-backend=trtllm can't read HiSparse's buffers"),
        (
            {"max_total_tokens": 131_072, "max_running_requests": 64},
            "max_running_requests=64 hot buffers of 4160 .* more than max_total_tokens=131072; .* to 31 at most",
        ),
        ({"max_total_tokens": 32 * 4160, "max_running_requests": 32}, "a free page of 64 for each, are 135168 tokens"),
    ],
)
def test_hisparse_refuses(values, message):
    with pytest.raises(ValidationError, match=message):
        engine(**values)


@pytest.mark.parametrize(
    ("changes", "hisparse", "message"),
    [
        ({"index_topk": None}, {}, "glm_moe_dsa attends to every token .* set it to null"),
        ({}, {"top_k": 1024}, "hisparse.top_k=1024, but the model's index_topk=2048 counts: leave top_k out"),
        (
            {},
            {"device_buffer_size": 1024},
            "device_buffer_size=1024 holds fewer tokens than the model's index_topk=2048",
        ),
    ],
)
def test_the_model_refuses(model_dir, changes, hisparse, message):
    with pytest.raises(ValueError, match=message):
        command(engine(hisparse=hisparse), model_dir(**changes), 7000)


def test_hisparse_s_command_line_takes_top_k_from_the_model(model_dir):
    line = command(engine(kv_dtype="fp8_e4m3"), model_dir(index_topk=1024), 7000)
    assert {"--enable-hisparse", "--disable-radix-cache"} <= set(line)
    assert line[line.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    assert json.loads(line[line.index("--hisparse-config") + 1]) == {
        "top_k": 1024,
        "device_buffer_size": 4096,
        "host_to_device_ratio": 8,
        "swap_in_block_size": 512,
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give one of hicache.ratio and hicache.size_gb"),
        ({"ratio": 2.0, "size_gb": 4}, "give one of hicache.ratio and hicache.size_gb"),
        ({"ratio": 0.5}, "greater than 1"),
        ({"ratio": 2.0, "mem_layout": "page_first_direct"}, "page_first_direct needs hicache.io_backend=direct"),
        ({"ratio": 2.0, "io_backend": "direct"}, "io_backend=direct needs hicache.mem_layout=page_first_direct"),
        ({"ratio": 2.0, "mem_layout": "layer_first", "storage_backend": "mooncake"}, "mooncake stores whole pages"),
    ],
)
def test_hicache_refuses(values, message):
    with pytest.raises(ValidationError, match=message):
        engine(prefix_cache=True, hisparse=None, hicache=values)


def apart(**values):
    return engine(**({"prefix_cache": True, "disaggregation": {}, "tensor_parallel": 2} | values))


def flags(config, index, model):
    line = command(config, model, 7000, index=index)
    return {name: line[at + 1] for at, name in enumerate(line[:-1]) if name.startswith("--")}


def test_prefill_servers_keep_prefixes_and_decode_servers_run_hisparse(model_dir):
    config = apart(
        hicache={"ratio": 2.0},
        disaggregation={
            "prefill": {"servers": 2, "tensor_parallel": 1, "extra_args": {"chunked-prefill-size": 4096}},
            "decode": {"servers": 1, "max_running_requests": 16, "memory_fraction": 0.7},
            "transfer_backend": "nixl",
            "bootstrap_port": 9000,
        },
        extra_args={"chunked-prefill-size": 8192},
    )
    specs = server_specs(config)
    assert [(spec.role, spec.first_gpu, spec.bootstrap_port) for spec in specs] == [
        ("prefill", 0, 9000),
        ("prefill", 1, 9001),
        ("decode", 2, None),
    ]
    prefill, decode = flags(config, 1, model_dir()), flags(config, 2, model_dir())
    assert (prefill["--disaggregation-mode"], decode["--disaggregation-mode"]) == ("prefill", "decode")
    assert (prefill["--disaggregation-bootstrap-port"], prefill["--tp-size"], prefill["--base-gpu-id"]) == (
        "9001",
        "1",
        "1",
    )
    assert (decode["--tp-size"], decode["--base-gpu-id"], decode["--max-running-requests"]) == ("2", "2", "16")
    assert (prefill["--chunked-prefill-size"], decode["--chunked-prefill-size"]) == ("4096", "8192")
    assert prefill["--disaggregation-transfer-backend"] == decode["--disaggregation-transfer-backend"] == "nixl"
    assert "--enable-hisparse" in decode
    assert "--enable-hisparse" not in prefill
    assert "--enable-hierarchical-cache" in prefill
    assert "--enable-hierarchical-cache" not in decode
    assert "--disable-radix-cache" in decode
    assert "--disable-radix-cache" not in prefill


def test_a_decode_server_holds_no_more_requests_than_run_and_both_store_alike(model_dir):
    """Left to itself SGLang would let requests wait that hold hot buffers, and on Blackwell have the prefill server
    store fp8 in a layout of its own."""
    prefill, decode = (flags(apart(kv_dtype="fp8_e4m3"), index, model_dir()) for index in range(2))
    assert decode["--disaggregation-decode-extra-slots"] == "0"
    assert "--disaggregation-decode-extra-slots" not in prefill
    assert (prefill["--dsa-prefill-backend"], prefill["--dsa-decode-backend"]) == ("flashmla_kv", "flashmla_kv")
    chosen = apart(kv_dtype="fp8_e4m3", extra_args={"dsa_prefill_backend": "flashinfer_sparse_mla"})
    line = command(chosen, model_dir(), 7000, index=0)
    assert line.count("--dsa-prefill-backend") == 1
    assert line[line.index("--dsa-decode-backend") + 1] == "flashmla_kv"
    left = apart()
    assert {flags(left, index, model_dir())["--kv-cache-dtype"] for index in range(2)} == {"bfloat16"}
    assert "--kv-cache-dtype" not in flags(apart(hisparse=None), 0, model_dir())


def test_the_two_roles_on_the_same_gpus():
    config = apart(memory_fraction=0.4, hisparse=None, disaggregation={"share_gpus": True})
    assert [spec.first_gpu for spec in server_specs(config)] == [0, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"servers": 2}, "servers=2 counts servers that do both: leave it 1"),
        (
            {"disaggregation": {"bootstrap_port": 65_535, "prefill": {"servers": 2}}},
            "leaves no ports for 2 prefill servers",
        ),
        ({"port": 8997}, "bootstrap_port=8998 is among the servers' own ports"),
        ({"disaggregation": {"share_gpus": True}}, "set disaggregation.prefill.memory_fraction"),
        (
            {"disaggregation": {"decode": {"data_parallel_attention": 3}}},
            "engine.disaggregation.decode: .*tensor_parallel=2",
        ),
        ({"kv_dtype": "fp8_e5m2"}, "engine.disaggregation.decode: .*kv_dtype=fp8_e5m2"),
        ({"disaggregation": {"transfer_backend": "carrier"}}, "transfer_backend"),
        (
            {"disaggregation": {"transfer_backend": "mori"}},
            "transfer_backend=mori can't write to the host pool .* one of mooncake, mooncake_tcp, nixl, or set",
        ),
        (
            {
                "kv_dtype": "fp8_e4m3",
                "disaggregation": {"prefill": {"extra_args": {"dsa_prefill_backend": "trtllm"}}},
            },
            "dsa-prefill-backend=trtllm stores fp8 in another layout .* one of flashmla_kv, flashinfer_sparse_mla",
        ),
    ],
)
def test_disaggregation_refuses(values, message):
    with pytest.raises(ValidationError, match=message):
        apart(**values)


def test_parallel_sizes():
    config = engine(hisparse=None, tensor_parallel=8, data_parallel_attention=4, expert_parallel=8, servers=2)
    found = flags(config, 1, Path("/models/m"))
    assert (found["--tp-size"], found["--dp-size"], found["--ep-size"], found["--base-gpu-id"]) == ("8", "4", "8", "8")
    assert "--enable-dp-attention" in found
    for values, message in [
        ({"tensor_parallel": 6, "data_parallel_attention": 4}, "6 GPUs do not split into data_parallel_attention=4"),
        ({"tensor_parallel": 8, "expert_parallel": 4}, "expert_parallel=4 must be 1 or tensor_parallel=8"),
        ({"tensor_parallel": 8, "nodes_per_server": 3}, "8 GPUs do not spread over nodes_per_server=3"),
        (
            {"tensor_parallel": 8, "data_parallel_attention": 8, "max_running_requests": 4},
            "max_running_requests=4 gives",
        ),
    ]:
        with pytest.raises(ValidationError, match=message):
            engine(hisparse=None, **values)


def test_a_server_on_several_machines():
    config = engine(hisparse=None, tensor_parallel=16, nodes_per_server=2)
    line = command(config, Path("/models/m"), 7000, node_rank=1, head_address="10.0.0.1:5000")
    assert line[line.index("--nnodes") : line.index("--nnodes") + 6] == (
        ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"]
    )
    with pytest.raises(ValueError, match="needs head_address"):
        command(config, Path("/models/m"), 7000)
