from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig
from rollout.engine.hisparse import RESERVE, HiSparseConfig
from rollout.engine.launch import command, environment


def options(config, **kwargs):
    line = command(config, Path("/models/m"), 7000, **kwargs)
    assert line[1:3] == ["-m", "rollout.engine.cpu_launch" if config.device == "cpu" else "sglang.launch_server"]
    flags = {}
    for part in line[3:]:
        if part.startswith("--"):
            flags[part[2:]] = True
            last = part[2:]
        else:
            assert flags[last] is True, f"{part} follows a value"
            flags[last] = part
    return flags


def test_cpu_command():
    flags = options(EngineConfig(context_length=128, max_total_tokens=4096), weight_version=7)
    assert flags["model-path"] == "/models/m"
    assert (flags["port"], flags["weight-version"], flags["context-length"]) == ("7000", "7", "128")
    assert (flags["device"], flags["dtype"], flags["attention-backend"]) == ("cpu", "float32", "torch_native")
    assert flags["max-total-tokens"] == "4096"
    assert flags["sleep-on-idle"] is True
    assert not {"disable-radix-cache", "enable-deterministic-inference", "mem-fraction-static"} & set(flags)


def test_switches():
    config = EngineConfig(
        context_length=128,
        prefix_cache=False,
        deterministic=True,
        extra_args={"page_size": 16, "enable-mixed-chunk": True},
    )
    flags = options(config)
    assert flags["disable-radix-cache"] is True
    assert flags["enable-deterministic-inference"] is True
    assert flags["page-size"] == "16"
    assert flags["enable-mixed-chunk"] is True


def test_cuda_command_gives_each_server_its_gpus():
    config = EngineConfig(
        device="cuda", context_length=8192, dtype="bfloat16", tensor_parallel=2, servers=2, memory_fraction=0.8
    )
    flags = options(config, index=1)
    assert (flags["tp-size"], flags["base-gpu-id"], flags["mem-fraction-static"]) == ("2", "2", "0.8")
    assert "attention-backend" not in flags
    assert "OMP_NUM_THREADS" not in environment(config)


@pytest.mark.parametrize(("set_for_the_run", "servers"), [(None, "-2"), ("0", "0"), ("1", "1")])
def test_servers_share_memory_between_gpus_as_the_trainer_does(monkeypatch, set_for_the_run, servers):
    """Else a broadcast to them fails. The trainer has the run's environment, and by default NCCL decides for it."""
    if set_for_the_run is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    else:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", set_for_the_run)
    found = environment(EngineConfig(context_length=128, device="cuda"))
    assert found["NCCL_CUMEM_ENABLE"] == servers


def test_servers_with_hisparse_keep_room_for_every_request_that_runs():
    settings = {"device": "cuda", "context_length": 8192, "prefix_cache": False}
    assert RESERVE.items() <= environment(EngineConfig(**settings, hisparse=HiSparseConfig())).items()
    assert not RESERVE.keys() & environment(EngineConfig(**settings)).keys()


def test_halves_of_a_pair_send_their_kv_cache_from_the_address_they_are_reached_at():
    config = EngineConfig(context_length=128, disaggregation=DisaggregationConfig(transfer_backend="mooncake_tcp"))
    assert environment(config, "10.1.2.3")["SGLANG_HOST_IP"] == "10.1.2.3"
    assert "SGLANG_HOST_IP" not in environment(EngineConfig(context_length=128), "10.1.2.3")
    prefill, decode = (options(config, index=index) for index in (0, 1))
    assert prefill["disaggregation-transfer-backend"] == decode["disaggregation-transfer-backend"] == "mooncake_tcp"
    retracted = "disaggregation-decode-retraction-backup"  # by default in memory that CUDA pins
    assert retracted not in prefill
    assert decode[retracted] == "cpu_tensor"


def test_cpu_environment():
    assert environment(EngineConfig(context_length=128, cpu_threads=2))["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contxt_length": 1}, "Extra inputs"),
        ({"tensor_parallel": 2}, "tensor_parallel must be 1 on a CPU"),
        ({"extra_args": {"port": 1}}, "extra_args sets .'port'."),
        ({"extra_args": {"max_running_requests": 1}}, "max-running-requests"),
        ({"port": 65_535, "servers": 2}, "leaves no ports"),
    ],
)
def test_refusals(values, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**{"context_length": 128, **values})
