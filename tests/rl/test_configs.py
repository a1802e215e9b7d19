"""Every config that is shipped composes into a valid run, on a laptop and on a cluster of GPUs."""

import pytest

from rl.compose import CONFIG_DIR, compose_config
from rl.config import RunConfig

STAGES = sorted(path.stem for path in (CONFIG_DIR / "stage").glob("*.yaml"))
ENGINES = sorted(path.stem for path in (CONFIG_DIR / "engine").glob("*.yaml"))
TWO = ["+teacher=[calculator,sorting]", "teachers.calculator.source=/one", "teachers.sorting.source=/other"]
TEACHERS = {"opd": TWO, "cross_stage": TWO}


SEVERAL_MACHINES = ("cluster=gpu", "publish.directory=/shared")


def composed(stage, *overrides):
    return RunConfig.model_validate(compose_config([f"+stage={stage}", *TEACHERS.get(stage, []), *overrides]))


@pytest.mark.parametrize("stage", STAGES)
def test_stages(stage):
    local, several = composed(stage), composed(stage, *SEVERAL_MACHINES)
    assert local.cluster.address is None
    assert several.trainer.gpus_per_rank == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_engines(engine):
    model = ("model=hf", "model.checkpoint=/model")
    assert composed("agent_rl", f"engine={engine}", *model, *SEVERAL_MACHINES).engine.servers >= 1


def test_algorithms():
    for path in (CONFIG_DIR / "algorithm").glob("*.yaml"):
        if path.stem not in ("sft", "opd"):
            assert composed("agent_rl", f"algorithm={path.stem}").algorithm["name"] == path.stem


def test_keys_that_the_files_leave_out_need_no_plus():
    config = composed("agent_rl", "trainer.parallel.sequence_parallel=false", "engine.recovery.max_restarts=9")
    assert config.engine.recovery.max_restarts == 9
    assert composed("agent_rl", "distillation.route=rule").distillation.route == "rule"
    assert composed("agent_rl", "algorithm.kl_coefficient=0.1").algorithm["kl_coefficient"] == 0.1
    assert composed("opd", "teachers.sorting.weight=2").teachers["sorting"].weight == 2
