import subprocess
import sys

import pytest
from pydantic import ValidationError

from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.learning_rate import learning_rate


def test_warm_up_then_decay():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay="linear", min_lr_ratio=0.5)
    rates = [learning_rate(config, step, 6) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5])
    cosine = OptimizerConfig(lr=0.2, decay="cosine")
    assert [learning_rate(cosine, step, 4) for step in (0, 2, 4)] == pytest.approx([0.2, 0.1, 0.0])
    assert learning_rate(OptimizerConfig(lr=0.3), 10**6, None) == 0.3


def test_decay_without_an_end_is_refused():
    with pytest.raises(ValueError, match="'linear' needs the total"):
        learning_rate(OptimizerConfig(decay="linear"), 0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 3, "parallel": {"tensor": 2}}, "world_size 3 is not a multiple"),
        ({"parallel": {"sequence_parallel": True}}, "sequence_parallel needs tensor > 1"),
        ({"parallel": {"expert": 2}}, r"expert · expert_tensor · pipeline = 2"),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "betas must lie"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(options)


def test_data_parallel_is_what_is_left():
    assert TrainerConfig(world_size=8, parallel=ParallelConfig(tensor=2, pipeline=2)).data_parallel == 2


def test_the_driver_does_not_import_megatron():
    code = "import sys, rl.trainer.group, rl.batch; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_interleaved_pipeline_needs_a_pipeline():
    assert ParallelConfig(pipeline=2, virtual_pipeline=3).stages == 6
    with pytest.raises(ValidationError, match="virtual_pipeline needs pipeline > 1"):
        ParallelConfig(virtual_pipeline=2)
