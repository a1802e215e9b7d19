"""Loss, gradient, log-probs and exported weights of every family do not depend on the layout, which may also change
when a checkpoint is resumed from."""

import pytest
import torch
from safetensors.torch import load_file

from rl.trainer.config import ParallelConfig, TrainerConfig
from rl.trainer.families.base import UnsupportedModelError
from rl.trainer.model import read_hf_config, transformer_config
from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories, with_routed_experts
from tests.trainer.family_ranks import CASES, LAYERS, TOP_K, main, train_indexer
from tests.trainer.launched import run_ranks
from tests.trainer.models import save_model

USED = sorted({model for model, _ in CASES.values()})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name in USED:
        save_model(name, directory / name)
    return directory


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    return run_ranks(main, CASES, models, tmp_path_factory.mktemp("ranks"), timeout_s=240)


@pytest.mark.parametrize("model", USED)
def test_layouts_of_a_family_compute_the_same(ranks, models, session_worker, model):
    worker, trajectories = session_worker, make_trajectories(temperature=0.7)
    worker.load_model(models / model)
    original = load_file(models / model / "model.safetensors")
    logprobs = worker.logprobs(trajectories)
    replayed = worker.logprobs(with_routed_experts(trajectories, layers=LAYERS[model], experts=4, top_k=2))
    topk = worker.topk_logprobs(trajectories, TOP_K)
    result, gradient = capture_update(worker, trajectories, Ratio())
    after = worker.update(trajectories, 0, Ratio()).grad_norm
    for name in (name for name, case in CASES.items() if case[0] == model):
        found = ranks[name]
        assert found["exported"].keys() == original.keys(), name
        assert all(torch.equal(found["exported"][key], tensor) for key, tensor in original.items()), name
        for a, b in zip(found["logprobs"] + found["replayed"], logprobs + replayed, strict=True):
            assert abs(a - b).max() < 1e-5, name
        for (found_best, found_ids), (best, ids) in zip(found["topk"], topk, strict=True):
            assert abs(found_best - best).max() < 1e-5, name
            assert (found_ids == ids).all(), name
        assert found["result"].loss == pytest.approx(result.loss, rel=1e-5), name
        assert found["result"].grad_norm == pytest.approx(result.grad_norm, rel=1e-5), name
        assert_close(found["gradient"], gradient, relative=5e-5)
        assert found["after"] == pytest.approx(after, rel=1e-4), name


def test_layouts_train_the_indexers_the_same(ranks, models, session_worker):
    config = session_worker.config
    session_worker.config = config.model_copy(update={"max_tokens_per_micro_batch": 100})
    try:
        expected, weights = train_indexer(session_worker, models / "glm_moe_dsa", make_trajectories(temperature=0.7))
    finally:
        session_worker.config = config
    for name in (name for name, case in CASES.items() if case[0] == "glm_moe_dsa"):
        results, found = ranks[name]["indexer"]
        for a, b in zip(results, expected, strict=True):
            assert a.metrics.keys() == b.metrics.keys(), name
            assert a.loss == pytest.approx(b.loss, rel=1e-5), name
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4), name
        assert_close(found, weights, relative=1e-3)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tensor=2), "sequence_parallel"),
        (ParallelConfig(expert=3), "number of experts 4"),
        (ParallelConfig(expert_tensor=3), "moe_intermediate_size 32"),
        (ParallelConfig(pipeline=3), "num_hidden_layers 4"),
    ],
)
def test_layouts_that_do_not_divide_are_refused_by_name(models, parallel, message):
    config = TrainerConfig(parallel=parallel, world_size=parallel.tensor * parallel.pipeline * parallel.expert * 3)
    with pytest.raises(UnsupportedModelError, match=message):
        transformer_config(read_hf_config(models / "glm4_moe"), config)


def test_stages_that_cut_a_group_of_layers_are_refused(models):
    config = TrainerConfig(parallel=ParallelConfig(pipeline=3), world_size=3)
    with pytest.raises(
        UnsupportedModelError,
        match=r"layer 2 begins a pipeline stage, but shares the indexer of layer 1.*virtual_pipeline in \[1, 2\] works",
    ):
        transformer_config(read_hf_config(models / "glm_moe_dsa"), config)
