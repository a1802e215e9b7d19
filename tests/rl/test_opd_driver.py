"""What the loop tells the trainer of a batch's teachers, and what a teacher elsewhere is asked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rl.teachers.config import TeacherConfig
from rl.teachers.driver import Teachers, load_teachers
from rl.teachers.routing import Routing
from rl.teachers.teaching import TeacherSetup
from rollout.engine.protocol import EngineError
from rollout.prompts import PromptRef
from tasks.protocol import Prompt
from teachers.errors import ImportFailedError
from tests.trainer.common import make_trajectory


class Scorer:
    """A server that says −(1 + its token's number) of each token."""

    def __init__(self):
        self.asked = []

    async def score(self, token_ids):
        self.asked.append(token_ids)
        return -1.0 - np.array(token_ids, np.float32)


TEACHERS = {
    "here": TeacherConfig(source="a", prompts=("x", "y")),
    "far": TeacherConfig(url="http://127.0.0.1:1", tokenizer="t", prompts=("y",), weight=2.0),
}
PROMPTS = {"test": [Prompt(prompt_id=str(n), data={"kind": kind}) for n, kind in enumerate("xyx")]}


def make(engine):
    return Teachers(Routing(TEACHERS, "kind"), PROMPTS, {"far": engine})


def test_only_its_own_prompts_go_to_a_server_elsewhere_and_all_their_tokens_do():
    trajectories = [make_trajectory(6 + group, group=group) for group in range(3)]
    engine = Scorer()
    ahead = [PromptRef("test", 0, "1"), PromptRef("test", 0, "2")]
    teaching = asyncio.run(make(engine).teaching(trajectories, ahead))
    assert teaching.shares == [{"here": 1.0}, {"here": 1.0, "far": 2.0}, {"here": 1.0}]
    assert engine.asked == [trajectories[1].token_ids.tolist()]
    assert [x is None for x in teaching.scored["far"]] == [True, False, True]
    assert np.array_equal(teaching.scored["far"][1], -1.0 - trajectories[1].token_ids)
    assert teaching.ahead == {"here": 2, "far": 1}
    assert teaching.groups() == {"here": [0, 1, 2], "far": [1]}


def test_a_server_that_does_not_score_ends_the_step_with_its_error():
    class Broken(Scorer):
        async def score(self, token_ids):
            raise EngineError("http://127.0.0.1:1 is gone")

    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1"):
        asyncio.run(make(Broken()).teaching([make_trajectory(6, group=1)]))


def test_an_import_that_takes_its_time_says_how_far_it_is(tmp_path):
    said, heard = [], asyncio.Event()

    def say(line):
        said.append(line)
        heard.set()

    class Slow:
        async def load_teachers(self, setup):
            (tmp_path / "packs").mkdir()
            (tmp_path / "packs" / "x.partial").write_bytes(bytes(20_000_000))
            await heard.wait()
            return "done"

    assert asyncio.run(load_teachers(Slow(), TeacherSetup([], str(tmp_path), 1, 1), say, 0.05)) == "done"
    assert said[0].endswith("0.02 GB written on this machine")


def test_an_import_that_fails_or_is_interrupted_ends_at_once(tmp_path):
    class Full:
        async def load_teachers(self, setup):
            raise ImportFailedError("teacher ann: no space left")

    class Endless:
        cancelled = False

        async def load_teachers(self, setup):
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True

    setup = TeacherSetup([], str(tmp_path), 1, 1)
    with pytest.raises(ImportFailedError, match="teacher ann"):
        asyncio.run(load_teachers(Full(), setup, print))

    async def interrupted(trainer):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(load_teachers(trainer, setup, print), 0.1)
        await asyncio.sleep(0)
        assert trainer.cancelled

    asyncio.run(interrupted(Endless()))
