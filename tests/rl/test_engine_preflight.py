"""A run whose engine can't serve its model, or has arguments that SGLang refuses, ends before anything is started."""

import json

import pytest

from rl.commands.exits import EXIT_BAD_CONFIG
from rl.commands.train import main
from rl.compose import compose_config
from rl.config import ConfigError, FreshModel, check
from rl.fresh_model import create_model
from rl.serving import check_top_logprobs
from rollout.engine import arguments, disaggregation, router_settings


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "hf"
    create_model(directory, FreshModel(context_length=256), seed=0)
    return directory


def refused(capsys, *overrides):
    assert main(["+stage=agent_rl", *overrides]) == EXIT_BAD_CONFIG
    return capsys.readouterr().err


def test_the_engine_does_not_fit_the_model(capsys, model_dir, tmp_path):
    said = refused(
        capsys, "model=hf", f"model.checkpoint={model_dir}", "engine.context_length=512", f"run_dir={tmp_path}"
    )
    assert "engine.context_length=512 is more than the model has positions for (max_position_embeddings=256)" in said


def test_sglang_refuses_an_argument(capsys, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(arguments, "_judge", lambda line: asked.append(line) or "SGLang has no argument warp-factor")
    said = refused(capsys, "+engine.extra_args={warp_factor: 9}", f"run_dir={tmp_path}")
    assert "engine.extra_args: SGLang has no argument warp-factor" in said
    assert asked == [("--warp-factor", "9")]


def test_a_model_whose_sizes_are_not_known_is_left_to_sglang(capsys, model_dir, tmp_path, caplog):
    strange = tmp_path / "strange"
    strange.mkdir()
    for file in model_dir.iterdir():
        (strange / file.name).write_bytes(file.read_bytes())
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"layer_types": ["sliding_attention"]}))
    where = (f"model.checkpoint={strange}", f"run_dir={tmp_path / 'run'}")
    said = refused(capsys, "model=hf", *where, "engine.context_length=512", "resume=/none")
    assert "resume: /none does not exist" in said  # the next check
    assert "layer_types has sliding_attention" in caplog.text


def test_the_router_is_not_installed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(router_settings, "PACKAGE", "no_such_package")
    said = refused(capsys, "+engine.sglang_router.policy=cache_aware", f"run_dir={tmp_path}")
    assert "engine.sglang_router needs the package no_such_package: pip install sglang-router" in said


def test_what_sends_kv_caches_is_not_installed(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(disaggregation.PACKAGES, "nixl", ("no_such_package", "nixl"))
    disaggregation.transfer_problem.cache_clear()
    said = refused(capsys, "engine=pd_cpu", "engine.disaggregation.transfer_backend=nixl", f"run_dir={tmp_path}")
    disaggregation.transfer_problem.cache_clear()
    assert "engine.disaggregation.transfer_backend=nixl needs the Python package nixl, and importing" in said
    assert "No module named 'no_such_package'" in said


def test_more_likeliest_tokens_than_there_are(model_dir):
    vocabulary = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    check_top_logprobs(model_dir, vocabulary)
    with pytest.raises(ConfigError, match=f"rollout_top_k={vocabulary + 1}, but the vocabulary of .* has {vocabulary}"):
        check_top_logprobs(model_dir, vocabulary + 1)


@pytest.mark.parametrize(
    ("cluster", "placement", "said"),
    [
        ("gpu", "local", "engine.placement=local starts the servers on this machine's first GPUs"),
        ("colocated", "ray", "with cluster.colocated=true they share the trainer's: set engine.placement=local"),
    ],
)
def test_a_gpu_that_two_would_take(capsys, tmp_path, cluster, placement, said):
    where = (f"cluster={cluster}", f"engine.placement={placement}", f"publish.directory={tmp_path}")
    assert said in refused(capsys, "engine=gpu", "engine.context_length=256", *where, f"run_dir={tmp_path / 'run'}")


def test_servers_that_share_gpus_have_a_trainer_rank_on_each(capsys, tmp_path):
    where = ("cluster=colocated", "engine.servers=2", f"run_dir={tmp_path / 'run'}")
    said = refused(capsys, "engine=gpu", "engine.context_length=256", *where)
    assert "the servers take 2 GPUs (servers x tensor_parallel)" in said
    assert "trainer.world_size=1 ranks: raise that" in said.replace("\n", " ")


@pytest.mark.parametrize(("cluster", "placement"), [("gpu", "ray"), ("colocated", "local")])
def test_the_configs_for_gpus_place_servers_where_no_other_is(cluster, placement):
    overrides = ["+stage=agent_rl", "engine=gpu", "engine.context_length=256", f"cluster={cluster}"]
    assert check(compose_config([*overrides, "publish.directory=/shared"])).engine.placement == placement
