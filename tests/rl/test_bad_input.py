"""Bad input is an error of one or two lines that names the key or file and the remedy, before anything is started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from rl.commands.exits import EXIT_BAD_CONFIG
from rl.commands.train import main as train
from rl.config import FreshModel
from rl.fresh_model import create_model
from rl.trainer.manifest import FORMAT


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "hf"
    create_model(directory, FreshModel(), seed=0)
    return directory


def refuse(capsys, *overrides):
    """What a run with these overrides says before it starts anything."""
    before = set(psutil.Process().children(recursive=True))
    code = train(list(overrides))
    said = capsys.readouterr().err.strip()
    assert code == EXIT_BAD_CONFIG
    assert set(psutil.Process().children(recursive=True)) <= before
    assert 1 <= len(said.splitlines()) <= 2, said
    return said


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "add +stage=NAME, one of sft, agent_rl"),
        (["stage=sft"], "write +stage=sft"),
        (["+stage=sft", "+stage=agent_rl"], "a run has one stage"),
        (["+stage=[sft,agent_rl]"], "+stage=[sft,agent_rl]: a run has one stage"),
        (["+stage=agent_rl", "algorithm=sao"], "algorithm=sao with these options needs values, which no stage"),
        (["+stage=agent_rl", "trainer.world_size=4"], "= 4 CPUs are more than cluster.cpus=2"),
        (["+stage=sfft"], "there is no such stage; one of sft"),
        (["+stage=sft", "+trainer.trained=indexer_dense"], "trainer.trained=indexer_dense does not fit stage sft"),
        (["+stage=indexer_warmup", "trainer.trained=model"], "trainer.trained=model does not fit stage indexer_warmup"),
        (["+stage=agent_rl", "rollout.stalenes=1"], "rollout.stalenes: unknown key; did you mean rollout.staleness?"),
        (["+stage=agent_rl", "+rollout.stalenes=1"], "rollout.stalenes: unknown key; did you mean staleness?"),
        (["+stage=agent_rl", "algorithm=ppo2"], "algorithm=ppo2: there is no such config; configs/algorithm has:"),
        (["+stage=agent_rl", "task=chess"], "task=chess: there is no such config; configs/task has: calculator"),
        (["+stage=agent_rl", "algorithm.group_size=1"], "algorithm.group_size"),
        (["+stage=agent_rl", "+algorithm.epsilon=1"], "algorithm.epsilon"),
        (["+stage=agent_rl", "steps=0"], "steps: Input should be greater than 0"),
        (["+stage=agent_rl", "checkpoint.keep=x"], "checkpoint.keep: Input should be a valid integer"),
        (["+stage=agent_rl", "tasks.calculator.max_tokens=500"], "does not fit into engine.context_length=128"),
        (["+stage=agent_rl", "engine.context_length=512"], "model.fresh.context_length=256"),
        (["+stage=agent_rl", "tasks.calculator.options.hi=0"], "tasks.calculator.options"),
        (["+stage=agent_rl", "+tasks.calculator.options.hih=3"], "tasks.calculator.options.hih: unknown option"),
        (["+stage=agent_rl", "trainer.world_size=5"], "not divisible by the 5 data-parallel ranks"),
        (["+stage=agent_rl", "+trainer.parallel.tensor=2"], "trainer: world_size 1 is not a multiple"),
        (["+stage=sft", "trainer.world_size=3"], "sft.conversations_per_step=64 is not divisible by the 3"),
        (["+stage=agent_rl", "rollout.staleness=9"], "rollout.staleness=9 lets generation run further ahead than"),
        (
            ["+stage=agent_rl", "evaluation.prompts=100000"],
            "evaluation.prompts=100000: the eval split of task calculator",
        ),
        (["+stage=agent_rl", "resume=/nowhere"], "resume: /nowhere does not exist"),
        (["+stage=agent_rl", "replay=/nowhere"], "replay: /nowhere has no trajectories"),
        (["+stage=agent_rl", "model=hf"], "model.checkpoint: required, but not set"),
        (["+stage=agent_rl", "model=hf", "model.checkpoint=/nowhere"], "model.checkpoint: /nowhere does not exist"),
        (["+stage=agent_rl", "seed"], "seed"),
    ],
)
def test_config_errors_name_the_key_and_the_remedy(capsys, tmp_path, overrides, says):
    run_dir = [f"run_dir={tmp_path}"] if any(text.startswith("+stage=") for text in overrides) else []
    said = refuse(capsys, *overrides, *run_dir)
    assert says in said.replace("\n", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no *.safetensors file"),
        ("tokenizer_config.json", "has no tokenizer_config.json"),
        ("chat_template.jinja", "has no chat template; add chat_template.jinja"),
    ],
)
def test_an_incomplete_model_directory_is_named(capsys, tmp_path, model_dir, missing, says):
    broken = tmp_path / "hf"
    shutil.copytree(model_dir, broken)
    (broken / missing).unlink()
    said = refuse(capsys, "+stage=agent_rl", f"run_dir={tmp_path / 'run'}", f"model.checkpoint={broken}")
    assert says in said
    assert str(broken) in said.replace("\n", "")


def answering(text):
    """A web server that gives this answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments):
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "can't be reached"),
        ("<html>hello</html>", "answered something that is no Metadata"),
        ('{"task": "sorting"}', "serves task 'sorting'"),
    ],
)
def test_a_task_server_elsewhere_that_is_absent_or_another_is_named(capsys, tmp_path, answer, says):
    server = answering(answer or "")
    url = f"http://127.0.0.1:{server.server_port}"
    if answer is None:
        server.shutdown()
        server.server_close()
    said = refuse(capsys, "+stage=agent_rl", f"run_dir={tmp_path}", f"tasks.calculator.url={url}").replace("\n", " ")
    server.shutdown() if answer else None
    assert "tasks.calculator.url" in said
    assert says in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["rollout.gateway_port", "engine.port"])
def test_a_port_that_is_taken_is_named(capsys, tmp_path, key):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refuse(capsys, "+stage=agent_rl", f"run_dir={tmp_path}", f"{key}={port}")
    assert key in said
    assert f"port {port}" in said


def test_a_folder_that_holds_a_run_is_not_overwritten_unasked(capsys, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "precious").write_text("x")
    assert train(["+stage=agent_rl", f"run_dir={tmp_path}"]) == EXIT_BAD_CONFIG
    assert "resume=auto, or replace it with overwrite=true" in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "precious").exists()


def test_a_config_error_takes_less_than_five_seconds(tmp_path):
    """Of processor time, since a loaded machine's wall time says nothing."""
    command = [sys.executable, "train.py", "+stage=agent_rl", "rollout.stalenes=1", f"run_dir={tmp_path}"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_BAD_CONFIG
    assert usage.ru_utime + usage.ru_stime < 5


def test_the_composed_config_is_printed_without_running(capsys):
    assert train(["+stage=agent_rl", "--cfg"]) == 0
    assert "groups_per_step" in capsys.readouterr().out


def test_a_checkpoint_that_is_incomplete_or_of_another_run_is_named(capsys, tmp_path):
    checkpoint = tmp_path / "step_000001"
    checkpoint.mkdir()
    arguments = ["+stage=agent_rl", f"run_dir={tmp_path / 'run'}", f"resume={checkpoint}"]
    assert f"resume: {checkpoint} has no manifest.json" in refuse(capsys, *arguments)

    def manifest(**state):
        extra = {"format": FORMAT, "step": 1, "extra": {"step": 1, **state}, "files": {}}
        (checkpoint / "manifest.json").write_text(json.dumps(extra))

    manifest()
    assert "was not saved by a run of an RL stage" in refuse(capsys, *arguments)
    lineage = {"stage": "agent_rl", "seed": 0, "rollout.groups_per_step": 24, "tasks": ["calculator", "sorting"]}
    model = {"initial_model": str(tmp_path)}
    manifest(**model, **lineage | {"seed": 7})
    assert "seed=0: the run that is resumed has 7" in refuse(capsys, *arguments)
    manifest(**model, **lineage | {"tasks": ["calculator"]})
    assert "tasks=['calculator', 'sorting']: the run that is resumed has ['calculator']" in refuse(capsys, *arguments)
    manifest(**model, **lineage, prompts="another digest")
    assert "train prompts are not those of the run that is resumed" in refuse(capsys, *arguments)


def test_a_checkpoint_of_another_run_does_not_touch_the_run_in_run_dir(capsys, tmp_path):
    checkpoint = tmp_path / "a" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{}")
    said = refuse(capsys, "+stage=agent_rl", f"run_dir={tmp_path / 'b'}", f"resume={checkpoint}").replace("\n", "")
    assert "belongs to another run" in said
    assert list((tmp_path / "b").iterdir()) == [tmp_path / "b" / "run.json"]
