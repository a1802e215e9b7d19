"""``atelier plan`` prints a plan from configs alone, and refuses what can't be planned in a line that says why."""

import json
import re

import pytest

from rl.cli import main
from rl.commands.exits import EXIT_BAD_CONFIG
from rl.compose import compose_plan
from rl.plan import check_plan, make_plan, parse_size


def plan(*overrides):
    config = check_plan(compose_plan(overrides))
    return config, make_plan(config)


def said(capsys, *overrides):
    assert main(["plan", *overrides]) == 0
    return capsys.readouterr().out


def test_glm5_with_hisparse(capsys):
    out = said(capsys, "engine=gpu_hisparse", "model=glm5", "gpus=8", "context=40960")
    assert "743.9 B parameters, 40.8 B active" in out
    assert "61,464 B a GPU" in out
    assert "104 a server at 32,768 + 8,192 tokens; without HiSparse 32" in out
    assert "up to 2,048 tokens prefill attends densely (MHA mode)" in out
    assert "HiSparse: turn it on if a server runs at least" in out


def test_an_sglang_that_counts_too_little(capsys):
    assert "over budget" in said(capsys, "sglang=0.5.16")
    assert "over budget" not in said(capsys)


def test_a_dense_model(capsys):
    out = said(capsys, "engine=gpu", "model=qwen3_8b", "gpus=1")
    assert "147,456 B a GPU (bfloat16, 36 layers, 8 KV heads of 128)" in out
    assert "HiSparse: leave it off. qwen3 attends to every token" in out


def test_prefill_and_decode_apart(capsys):
    out = said(capsys, "engine=pd_hisparse", "model=deepseek_v32", "gpus=16", "engine.memory_fraction=0.9")
    assert "prefill server" in out
    assert "with prefix cache" in out


def test_requests_that_fit_with_hisparse_alone(capsys):
    """A decode server gets prompts computed, so that only hot buffers need to fit."""
    little = (
        "engine=pd_hisparse",
        "model=deepseek_v32",
        "gpus=16",
        "+engine.disaggregation.decode.memory_fraction=0.71",
    )
    out = said(capsys, *little, "engine.memory_fraction=0.9")
    assert "16 a server at 57,344 + 8,192 tokens; without HiSparse 0" in out
    assert "HiSparse: turn it on. Without it not one request of 65,536 tokens fits." in out


def test_short_contexts_are_not_worth_it(capsys):
    out = said(capsys, "context=2048", "output=1024")
    assert "HiSparse: leave it off. Up to 2,048 tokens attention is dense" in out


def test_without_locality_it_is_not_worth_it(capsys):
    out = said(capsys, "locality=0", "pcie_bandwidth=5GB")
    assert "HiSparse: leave it off." in out
    assert "it loses with any number of requests" in out
    assert "it wins from a locality of 0." in out


def test_advice_is_for_the_concurrencies_asked_for(capsys):
    """The least that is worth it does not depend on them."""
    low, both, high = (said(capsys, "context=40960", f"concurrency={at}") for at in ("[4,8]", "[8,64]", "[64,256]"))
    since = {re.search(r"(?:from|at least) (\d+) requests", out)[1] for out in (low, both, high)}
    assert len(since) == 1
    assert 32 < int(since.pop()) < 64  # 32 is what runs without HiSparse
    assert "leave it off for what was asked (0.76 x at 4 to 0.81 x at 8)" in low
    assert "with fewer it loses (0.81 x at 8)" in both
    assert "turn it on. It is worth it from" in high


def test_without_hisparse_it_says_how_to_compare(capsys):
    sizes = ("engine.tensor_parallel=8", "engine.data_parallel_attention=8", "engine.max_running_requests=512")
    out = said(capsys, "engine=gpu", "model=glm5", *sizes)
    assert "HiSparse: not compared" in out


def test_more_tokens_than_experts_are_noted(capsys):
    bf16 = ("model.hf_config.quantization_config=null", "gpu_memory=500GB", "engine.max_running_requests=512")
    assert "E=256,N=256,device_name=" in said(capsys, *bf16, "concurrency=[512]")
    assert "Note:" not in said(capsys, *bf16, "concurrency=[256]")
    assert "Note:" not in said(capsys, *bf16[1:], "concurrency=[512]")  # fp8's tiles do not depend on it


def test_measurements_replace_the_overheads():
    _, slow = plan("measured={8: 100, 32: 300}", "context=40960")
    assert slow.worth is not None
    rates = {point.concurrency: point.tokens_per_s for point in slow.worth.asked.without}
    assert rates[8] == pytest.approx(100, rel=0.01)
    assert rates[32] == pytest.approx(300, rel=0.01)


def test_a_model_of_one_s_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(compose_plan(["model=qwen3_8b"])["model"]["hf_config"]))
    given, named = (
        plan("engine=gpu", "gpus=1", f"model.checkpoint={tmp_path}"),
        plan("engine=gpu", "model=qwen3_8b", "gpus=1"),
    )
    assert given[1] == named[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gpus=4"], "gpus=4 are fewer than the 8"),
        (["engine.tensor_parallel=6"], "engine.tensor_parallel=6"),
        (["contxt=3"], "contxt: unknown key; did you mean context?"),
        (["rollout.staleness=3"], "rollout.staleness: unknown key"),  # of a run
        (["engine=gpu_hisparce"], "configs/engine has:"),
        (["+engine.hisparse.top_k=1024"], "the model's index_topk=2048 counts"),
        (["context=100000"], "context=100000 is more than engine.context_length=65536"),
        (["context=4096"], "output=8192 leaves no prompt in context=4096"),
        (["engine.context_length=300000"], "max_position_embeddings=202752"),
        (["gpu_memory=80GB"], "106.8 GB of weights leave no room"),
        (["gpu_memory=lots"], "gpu_memory: 'lots' is no size: write such as 141GB"),
        (["host_memory=200GB"], "host_memory=200.0 GB does not hold the 288.2 GB of the host pools"),
        (["engine.hisparse.host_to_device_ratio=16"], "a prompt lies whole on the GPU while it is computed"),
        (["model=character"], "model.checkpoint: give an HF directory"),
        (["measured={8: 100}"], "measured: give at least two"),
        (["engine.prefix_cache=true"], "hisparse and prefix_cache exclude each other"),
    ],
)
def test_refusals(capsys, overrides, message):
    assert main(["plan", *overrides]) == EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) <= 3


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141e9), ("2 TiB", 2 * 2**40), ("4.0e12", 4e12), ("55GB/s", 55e9), ("7", 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size
