"""What a model's config says of it: published figures of GLM-5 and DeepSeek V3.2, and configs that are not known."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from rollout.engine.model_shape import ModelShapeError, model_shape, read_model_shape
from rollout.engine.throughput import decode_intensity

MODELS = Path("configs/model")


def hf_config(name, **changes):
    return yaml.safe_load((MODELS / f"{name}.yaml").read_text())["hf_config"] | changes


def test_glm5():
    glm5 = model_shape(hf_config("glm5"))
    assert glm5.parameters == pytest.approx(744e9, rel=0.001)
    assert glm5.active_parameters == pytest.approx(40e9, rel=0.03)
    assert glm5.layers * glm5.entry_bytes("bfloat16") == 78 * (512 + 64) * 2 == 89_856
    assert glm5.layers * glm5.entry_bytes("fp8_e4m3") == 78 * (512 + 16 + 128) == 51_168
    assert glm5.indexer_bytes() == 78 * (128 + 4) == 10_296
    assert glm5.entry_bytes("bfloat16", attention_gpus=8) == glm5.entry_bytes("bfloat16")  # the latent is not split
    assert decode_intensity(glm5, 10**8) == pytest.approx(120.8, rel=0.001)


def test_glm5_s_sizes_are_those_of_its_hf_class():
    described = AutoConfig.for_model("glm_moe_dsa").to_dict()
    ours = hf_config("glm5")
    assert {key: described[key] for key in ours if key in described} == {
        k: v for k, v in ours.items() if k in described
    }


def test_deepseek_v32():
    v32 = model_shape(hf_config("deepseek_v32"))
    assert v32.parameters == pytest.approx(671e9, rel=0.005)
    assert v32.active_parameters == pytest.approx(37e9, rel=0.03)
    assert decode_intensity(v32, 10**8) == pytest.approx(2 * 128, rel=0.06)  # about 2H in bf16


def test_qwen3_8b():
    qwen = model_shape(hf_config("qwen3_8b"))
    assert qwen.parameters == pytest.approx(8.19e9, rel=0.001)
    assert qwen.entry_bytes("bfloat16") == 2 * 8 * 128 * 2
    assert qwen.entry_bytes("bfloat16", attention_gpus=4) == 2 * 2 * 128 * 2
    assert qwen.entry_bytes("bfloat16", attention_gpus=16) == 2 * 1 * 128 * 2  # KV heads are then held twice
    assert qwen.indexer_bytes() == 0


@pytest.mark.parametrize(
    "sharing",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSS" * 20},
        {"indexer_types": ["full", "shared", "shared", "shared"] * 20},
    ],
)
def test_one_indexer_for_four_layers_saves_three_quarters_of_its_cache(sharing):
    alone = model_shape(hf_config("glm5", num_hidden_layers=80))
    shared = model_shape(hf_config("glm5", num_hidden_layers=80, **sharing))
    assert shared.indexer_bytes() == alone.indexer_bytes() // 4
    assert shared.indexer_bytes(shared_layers_stored=True) == alone.indexer_bytes()
    assert shared.entry_bytes("bfloat16") == alone.entry_bytes("bfloat16")


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_either_name_that_transformers_writes_for_sparse_layers_is_known(name):
    named = model_shape(hf_config("glm5", num_hidden_layers=4, layer_types=[name] * 4))
    assert named == model_shape(hf_config("glm5", num_hidden_layers=4))


def test_parameters_are_those_of_the_weights(models):
    shape = read_model_shape(models[0].directory)
    counted = sum(p.numel() for p in models[0].hf.parameters() if p.dim() > 1)
    assert shape.parameters == counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: needed, a whole number above 0, but it is None"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention: only full attention and DSA"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method=awq is not known here"),
        ({"qk_rope_head_dim": "64"}, "qk_rope_head_dim: needed, .* but it is '64'"),
    ],
)
def test_configs_that_are_not_known(changes, message):
    with pytest.raises(ModelShapeError, match=message):
        model_shape(hf_config("glm5", **changes))


def test_the_file_is_named(tmp_path):
    with pytest.raises(ModelShapeError, match=r"config.json: .*No such file"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ModelShapeError, match=r"config.json: num_attention_heads: needed"):
        read_model_shape(tmp_path)
