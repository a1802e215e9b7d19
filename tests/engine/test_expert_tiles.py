"""Tuned tiles for the experts' kernel: what SGLang takes without them, and a directory that does not fit is refused."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from benchmarks.engine import moe_tiles
from rollout.engine import expert_tiles, fit
from rollout.engine.config import EngineConfig
from rollout.engine.launch import environment
from rollout.engine.model_shape import model_shape


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
    (folder / "E=257,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json").touch()
    assert list(fit.problems(engine(moe_configs=tmp_path), GLM5)) == []


@pytest.mark.parametrize(
    ("changes", "key"), [({"device": "cpu", "dtype": "float32"}, "device"), ({"deterministic": True}, "deterministic")]
)
def test_settings_with_which_it_would_not_be_read(tiles, changes, key):
    with pytest.raises(ValidationError, match=rf"moe_configs.*{key}"):
        engine(moe_configs=tiles, **changes)


def test_the_rule_of_thumb_changes_where_tokens_outnumber_experts():
    assert [expert_tiles.default_rows(engine(), BF16, tokens) for tokens in (1, 256, 257)] == [16, 16, 64]
    assert expert_tiles.default_rows(engine(), GLM5, 1) == 64  # fp8 in blocks: always
    split = engine(tensor_parallel=8, expert_parallel=8)
    assert expert_tiles.local_experts(split, BF16) == (32, 2048)
    assert expert_tiles.default_rows(split, BF16, 33) == 64


def test_outgrown_says_when_it_matters(tiles):
    assert expert_tiles.outgrown(engine(), BF16, 257)
    assert not expert_tiles.outgrown(engine(), BF16, 256)
    assert not expert_tiles.outgrown(engine(), GLM5, 257)
    assert not expert_tiles.outgrown(engine(), DENSE, 257)
    assert not expert_tiles.outgrown(engine(moe_configs=tiles), BF16, 257)
