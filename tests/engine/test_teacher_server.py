"""A teacher that is a server elsewhere: a real server's scores are those of its model, only its own prompts go there,
and one that has another tokenizer, or does not answer, is refused by name before the run starts."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from contextlib import AsyncExitStack

import numpy as np
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from rl.compose import compose_config
from rl.config import ConfigError, check
from rl.preflight import check_run
from rl.teachers.driver import start_teachers
from rl.teachers.servers import SAMPLE, check_server_tokenizer, sampled
from rl.teachers.sources import TeacherSourceError
from rollout.processes import free_port
from tests.trainer.common import make_trajectory


class NoTrainer:
    """Of a run whose teachers are all elsewhere."""

    async def load_teachers(self, setup):
        assert setup.sources == ()
        return ""


@pytest.fixture
def swapped(models, tmp_path):
    """The model's directory with a tokenizer that has two characters in each other's place."""
    directory = tmp_path / "swapped"
    shutil.copytree(models[0].directory, directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def plan_of(url, student, folder):
    overrides = ["+stage=opd", "task=[sorting,calculator]", f"model.checkpoint={student}", f"run_dir={folder}"]
    for task in ("sorting", "calculator"):
        overrides.append(f"+teachers.{task}={{url: '{url}', tokenizer: {student}}}")
    return check_run(check(compose_config(overrides)))


async def connected(plan, work):
    async with AsyncExitStack() as stack:
        return await work(await start_teachers(plan, NoTrainer(), stack, print))


def test_a_real_servers_scores_are_its_models(server, tmp_path):
    plan = plan_of(server.url, server.models[0].directory, tmp_path / "run")
    prompts = {name: task.prompts("train") for name, task in plan.tasks.items()}
    tasks = ("sorting", "calculator", "sorting")
    trajectories = [
        make_trajectory(12 + n, group=n, task=task, prompt_id=prompts[task][n].prompt_id)
        for n, task in enumerate(tasks)
    ]
    teaching = asyncio.run(connected(plan, lambda teachers: teachers.teaching(trajectories)))
    assert teaching.shares == [{task: 1.0} for task in tasks]
    for name in ("sorting", "calculator"):
        for trajectory, task, found in zip(trajectories, tasks, teaching.scored[name], strict=True):
            if task != name:
                assert found is None
                continue
            expected = server.models[0].logprobs(trajectory.token_ids.tolist())
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_real_server_with_another_tokenizer_is_refused_by_name(server, swapped, tmp_path):
    plan = plan_of(server.url, swapped, tmp_path / "run")
    says = rf"teachers\.calculator\.url: {server.url}: the tokenizer of .* 2 tokens differ, such as 'a'"
    with pytest.raises(ConfigError, match=says):
        asyncio.run(connected(plan, lambda teachers: None))


def test_a_server_that_does_not_answer_is_refused_by_name(models, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    plan = plan_of(url, models[0].directory, tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"teachers\.calculator\.url: {url} does not answer"):
        asyncio.run(connected(plan, lambda teachers: None))


async def decoding(directory, work):
    """With a server that decodes by a directory's tokenizer, as SGLang does, or that can't."""
    tokenizer = None if directory is None else AutoTokenizer.from_pretrained(directory)

    async def detokenize(request):
        body = await request.json()
        if tokenizer is None:
            return web.json_response({"error": "no tokenizer"}, status=500)
        return web.json_response({"text": [tokenizer.decode(ids) for ids in body["tokens"]]})

    async def model_info(request):
        return web.json_response({"tokenizer_path": "/on/another/machine"})

    app = web.Application()
    app.add_routes([web.post("/detokenize", detokenize), web.get("/model_info", model_info)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await work(f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()


def test_a_server_with_its_tokenizer_is_asked_what_tokens_mean(models, swapped, caplog):
    ours = models[0].directory

    def checked(theirs):
        asyncio.run(decoding(theirs, lambda url: check_server_tokenizer("far", url, ours, 30.0)))

    checked(ours)
    assert caplog.text == ""
    with pytest.raises(
        TeacherSourceError, match=r"teachers\.far\.url: http.* decodes 2 of \d+ tokens otherwise .* 'b'"
    ):
        checked(swapped)
    checked(None)
    assert "is taken on trust" in caplog.text


def test_of_a_large_vocabulary_the_last_tokens_and_some_of_all_others_are_decoded():
    ids = list(range(150_000))
    chosen = sampled(ids)
    assert len(chosen) == len(set(chosen)) == SAMPLE
    assert chosen[-SAMPLE // 4 :] == ids[-SAMPLE // 4 :]
    assert chosen[0] == 0
    assert max(b - a for a, b in itertools.pairwise(chosen)) < 60
    assert sampled(ids[:100]) == ids[:100]
