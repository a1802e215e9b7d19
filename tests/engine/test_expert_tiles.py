"""Tuned tiles for the experts' kernel: what SGLang takes without them, and a directory that does not fit is refused."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from benchmarks.engine import moe_tiles
from rollout.engine import expert_tiles, fit
from rollout.engine.capacity import Workload
from rollout.engine.config import EngineConfig
from rollout.engine.launch import environment
from rollout.engine.model_shape import model_shape
from rollout.engine.throughput import Machine, decode_step


def shape(name, **changes):
    return model_shape(yaml.safe_load(Path(f"configs/model/{name}.yaml").read_text())["hf_config"] | changes)


GLM5, DENSE = shape("glm5"), shape("qwen3_8b")
BF16 = shape("glm5", quantization_config=None)


def engine(**changes):
    return EngineConfig(**({"device": "cuda", "dtype": "bfloat16", "context_length": 32_768} | changes))


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"triton": "3.6.0"}.__getitem__)
    moe_tiles.main([str(tmp_path), "--experts", "256", "--width", "256", "--device", "NVIDIA H200"])
    return tmp_path


def test_what_benchmark_and_tuner_write_fits_the_model_that_it_is_for(tiles):
    spread = engine(moe_configs=tiles, tensor_parallel=8)
    assert list(fit.problems(spread, GLM5)) == []
    assert environment(spread)["SGLANG_MOE_CONFIG_DIR"] == str(tiles)
    assert "SGLANG_MOE_CONFIG_DIR" not in environment(engine())


def test_a_directory_without_the_model_s_sizes_is_refused(tiles, tmp_path):
    (problem,) = fit.problems(engine(moe_configs=tiles), GLM5)  # on one GPU an expert is 2,048 wide
    assert "engine.moe_configs" in problem
    assert "E=256,N=2048,*.json" in problem
    assert "E=256,N=256,device_name=NVIDIA_H200.json" in problem
    (problem,) = fit.problems(engine(moe_configs=tmp_path / "none"), GLM5)
    assert "but nothing" in problem
    (problem,) = fit.problems(engine(moe_configs=tiles), DENSE)
    assert "has no experts" in problem


def test_a_shared_expert_may_be_counted(tmp_path):
    folder = tmp_path / "configs" / "triton_3_6_0"
    folder.mkdir(parents=True)
    file = folder / "E=257,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    file.write_text('{"1": {"BLOCK_SIZE_M": 32}}')
    assert list(fit.problems(engine(moe_configs=tmp_path), GLM5)) == []


def test_what_is_no_file_of_tiles_is_refused(tmp_path):
    file = tmp_path / "configs" / "triton_3_6_0" / "E=256,N=2048,device_name=NVIDIA_H200.json"
    file.parent.mkdir(parents=True)
    for text in ("", "[]", "{}", '{"1": 16}', '{"1": {"BLOCK_M": 16}}', '{"many": {"BLOCK_SIZE_M": 16}}'):
        file.write_text(text)
        (problem,) = fit.problems(engine(moe_configs=tmp_path), GLM5)
        assert f"engine.moe_configs: {file} is no file of tiles by tokens" in problem


@pytest.mark.parametrize(
    ("changes", "key"), [({"device": "cpu", "dtype": "float32"}, "device"), ({"deterministic": True}, "deterministic")]
)
def test_settings_with_which_it_would_not_be_read(tiles, changes, key):
    with pytest.raises(ValidationError, match=rf"moe_configs.*{key}"):
        engine(moe_configs=tiles, **changes)


def test_tuned_tiles_count_in_the_plan(tiles):
    """Small ones read an expert again where it has more tokens than they have rows."""
    config = engine(moe_configs=tiles, tensor_parallel=8)
    assert [expert_tiles.rows(config, GLM5, tokens) for tokens in (1, 1024, 8192)] == [16, 16, 64]
    plain = engine(tensor_parallel=8)
    load, machine = Workload(4_096, 1_024), Machine()
    small, by_itself = (decode_step(settings, GLM5, 1024, load, machine, 1.0) for settings in (config, plain))
    assert small.weights > 1.5 * by_itself.weights


def test_the_rule_of_thumb_changes_where_tokens_outnumber_experts():
    assert [expert_tiles.rows(engine(), BF16, tokens) for tokens in (1, 256, 257)] == [16, 16, 64]
    assert expert_tiles.rows(engine(), GLM5, 1) == 64  # fp8 in blocks: always
    split = engine(tensor_parallel=8, expert_parallel=8)
    assert expert_tiles.local_experts(split, BF16) == (32, 2048)
    assert expert_tiles.rows(split, BF16, 33) == 64


def test_outgrown_says_when_it_matters(tiles):
    assert expert_tiles.outgrown(engine(), BF16, 257)
    assert not expert_tiles.outgrown(engine(), BF16, 256)
    assert not expert_tiles.outgrown(engine(), GLM5, 257)
    assert not expert_tiles.outgrown(engine(), DENSE, 257)
    assert not expert_tiles.outgrown(engine(moe_configs=tiles), BF16, 257)
