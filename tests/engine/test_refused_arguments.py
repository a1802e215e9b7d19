"""SGLang's own parser judges ``extra_args``."""

import asyncio

import pytest

from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.processes import ProcessError, ProcessRegistry


def test_an_argument_that_sglang_does_not_know(models, tmp_path):
    config = EngineConfig(context_length=128, extra_args={"warp-factor": 9})
    with ProcessRegistry() as registry:
        fleet = EngineFleet(config, registry, tmp_path)
        with pytest.raises(ProcessError, match=r"(?s)engine-0 .*exit code 2.*unrecognized arguments: --warp-factor 9"):
            asyncio.run(fleet.start(models[0].directory))
