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
import torch
import wandb

from rl import preflight
from rl.cluster import shortage
from rl.commands.exits import EXIT_BAD_CONFIG
from rl.commands.train import main as train
from rl.compose import compose_config
from rl.config import FreshModel, check
from rl.fresh_model import create_model
from rl.model_dir import ARCHITECTURES
from rl.trainer.manifest import FORMAT
from tasks.protocol import Prompt, Task
from tasks.registry import LoadedTask


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
        (
            ["+stage=agent_rl", "engine.placement=ray", "engine.servers=2"],
            "cpus_per_rank=1 and the servers that Ray places = 3 CPUs are more than cluster.cpus=2",
        ),
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
        (["+stage=agent_rl", "teacher=[calculator]"], "teacher: unknown key; write +teacher=..."),
        (["+stage=agent_rl", "cluster.colocated=true"], "cluster.colocated=true needs engine.memory_saver=true"),
        (
            ["+stage=indexer_warmup"],
            "stage indexer_warmup trains the indexers of sparse attention (GLM-5), which a fresh",
        ),
        (["+stage=agent_rl", "seed"], "seed: not KEY=VALUE"),
        (["+stage=agent_rl", "--dry-run"], "--dry-run: there is no such option; --help"),
        (["+stage=agent_rl", "seed=1,2"], "write a list as seed=[1,2]; a run takes one value"),
        (["+stage=agent_rl", "task=[]"], "tasks: required, but not set; choose some with task=[NAME,...]"),
        (
            ["+stage=agent_rl", "tasks=[calculator]"],
            "tasks is a section, whose keys are set as tasks.KEY=VALUE; choose",
        ),
        (["+stage=agent_rl", "tasks.words.share=2"], "words is not chosen: add it to task=[...]"),
        (["+stage=agent_rl", "teachers.sorting.weight=2"], "sorting is not chosen: add it to +teacher=[...]"),
        (["+stage=agent_rl", "lr=1e-4"], "lr: unknown key; did you mean trainer.optimizer.lr or sft.optimizer.lr?"),
        (["+stage=agent_rl", "trainer.lr=1e-4"], "trainer.lr: unknown key; did you mean trainer.optimizer.lr?"),
        (["+stage=agent_rl", "checkpoint.often=1"], "checkpoint.often: unknown key; checkpoint has every, keep"),
        (["+stage=agent_rl", "engine.placment=ray"], "engine.placment: unknown key; did you mean engine.placement?"),
        (["+stage=agent_rl", "algorithm.klcoeficient=1"], "unknown key; did you mean algorithm.kl_coefficient?"),
        (
            ["+stage=agent_rl", "tasks.sorting.options.long=1"],
            "unknown key; tasks.sorting.options has good_share, length",
        ),
        (["+stage=agent_rl", "publish.receivers.a=1"], "publish.receivers.a=1: what stands before .a is a list"),
        (["+stage=agent_rl", "resume=true"], "resume: must be no, auto, or a checkpoint's folder"),
        (
            ["+stage=agent_rl", "tasks.calculator.url=host:80"],
            "tasks.calculator.url: must be http://HOST:PORT or a list",
        ),
        (["+stage=agent_rl", "tasks.calculator.url=[]"], "tasks.calculator.url: must be http://HOST:PORT or a list"),
        (["+stage=agent_rl", "algorithm=sft"], "algorithm=sft is not for stage agent_rl, which trains with dis, grpo"),
        (["+stage=sft", "algorithm=grpo"], "algorithm=grpo is not for stage sft, which trains with algorithm=sft"),
        (["+stage=opd", "algorithm=grpo"], "asks no teacher, and stage opd is for them: choose algorithm=opd"),
        (["+stage=agent_rl", "rollout.gateway_host=nowhere.invalid"], "is no address of this machine"),
        (
            ["+stage=agent_rl", "tasks.sorting.url=http://192.0.2.1:8000"],  # reserved for documentation: nobody's
            "rollout.gateway_host=127.0.0.1 can't be reached by the servers of tasks.sorting.url",
        ),
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
        ("tokenizer.json", "has none of tokenizer.json, tokenizer.model"),
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


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "{", "config.json is not JSON"),
        (
            "config.json",
            '{"architectures": ["GPT2LMHeadModel"]}',
            "is of architecture GPT2LMHeadModel; supported: Qwen3",
        ),
        (
            "model.safetensors",
            "version https://git-lfs.github.com",
            "model.safetensors is not a whole safetensors file",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}', "lacks model-2.safetensors"),
        ("tokenizer_config.json", "", "tokenizer_config.json is not JSON"),
    ],
)
def test_a_damaged_model_directory_is_named(capsys, tmp_path, model_dir, name, content, says):
    broken = tmp_path / "hf"
    shutil.copytree(model_dir, broken)
    (broken / name).write_text(content)
    if name == "tokenizer_config.json":
        (broken / "chat_template.jinja").unlink()
    said = refuse(capsys, "+stage=agent_rl", f"run_dir={tmp_path / 'run'}", f"model.checkpoint={broken}")
    assert says in said


def test_a_link_that_leads_nowhere_is_named(capsys, tmp_path, model_dir):
    """As in a cache of downloads whose blobs were removed; a link that leads somewhere is as good as the file."""
    linked = tmp_path / "hf"
    linked.mkdir()
    for file in model_dir.iterdir():
        (linked / file.name).symlink_to(file)
    arguments = [f"run_dir={tmp_path / 'run'}", f"model.checkpoint={linked}"]
    assert train(["+stage=agent_rl", "--check", *arguments]) == 0
    capsys.readouterr()
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(tmp_path / "gone")
    said = refuse(capsys, "+stage=agent_rl", *arguments)
    assert f"model.checkpoint: {linked / 'model.safetensors'} can't be read: No such file" in said


def test_every_architecture_that_the_trainer_has_is_let_through():
    from rl.trainer.families.registry import FAMILIES  # with Megatron, which takes seconds

    assert sorted(ARCHITECTURES) == sorted(FAMILIES)


class Odd(Task):
    """A task whose author forgot something."""

    ids: tuple[str, ...]

    def prompts(self, split):
        return [Prompt(prompt_id=name, data={}) for name in self.ids]


@pytest.mark.parametrize(
    ("ids", "more", "says"),
    [
        ((), [], 'prompts("train") of tasks/calculator/task.py is empty'),
        (("a", "b", "a"), [], "has prompt_id 'a' 2 times; each must be there once"),
        (("a",), [], "a fresh model (no model.checkpoint) is trained on demonstrations, and tasks/calculator/task.py"),
        (("a",), ["MODEL", "resume=/none"], "resume: /none does not exist"),  # the next check
    ],
)
def test_a_task_that_lacks_something_is_named(capsys, tmp_path, monkeypatch, model_dir, ids, more, says):
    odd = LoadedTask("calculator", Odd(ids=ids), lambda task, data, chat: None)
    monkeypatch.setattr(preflight, "load_task", lambda name, options: odd)
    more = [word.replace("MODEL", f"model.checkpoint={model_dir}") for word in more]
    said = refuse(capsys, "+stage=agent_rl", "evaluation.prompts=0", f"run_dir={tmp_path}", *more)
    assert says in said.replace("\n", " ")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.device=cuda", "engine.device=cuda: the servers take 1 GPUs (servers x tensor_parallel), this machine"),
        ("trainer.gpus_per_rank=1", "trainer.world_size=1 · gpus_per_rank=1 = 1 GPUs, this machine has 0"),
    ],
)
def test_a_machine_without_gpus_is_said_before_anything_waits_for_one(capsys, tmp_path, monkeypatch, override, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert says in refuse(capsys, "+stage=agent_rl", override, f"run_dir={tmp_path}").replace("\n", " ")


def test_gpus_of_a_ray_of_our_own_are_counted_for_ranks_and_servers_together(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    keys = ["engine.device=cuda", "engine.placement=ray", "trainer.gpus_per_rank=1", f"run_dir={tmp_path}"]
    said = refuse(capsys, "+stage=agent_rl", *keys).replace("\n", " ")
    assert "gpus_per_rank=1 and the servers that Ray places = 2 GPUs, this machine has 1" in said
    assert train(["+stage=sft", "evaluation.prompts=0", "--check", *keys]) == 0  # starts no server


def test_a_driver_without_gpus_may_have_a_cluster_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with socket.socket() as taken:  # on this machine, where no server is started
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        keys = ["cluster=gpu", "engine=gpu", f"engine.port={port}", "publish.directory=/shared"]
        keys += ["engine.context_length=256", "rollout.groups_per_step=24", f"run_dir={tmp_path / 'run'}"]
        assert train(["+stage=agent_rl", "--check", *keys]) == 0


def test_what_a_cluster_lacks_is_said():
    where = ["cluster=gpu", "publish.directory=/shared", "engine.device=cuda", "+engine.placement=ray"]
    config = check(compose_config(["+stage=agent_rl", *where]))
    assert shortage(config, {"CPU": 64, "GPU": 16}) is None
    assert shortage(config, {"CPU": 64, "GPU": 8}) == "the Ray cluster has 8 GPUs of the 9 that this run takes"
    assert shortage(config, {}) == (
        "the Ray cluster has 0 CPUs of the 33 that this run takes and 0 GPUs of the 9 that this run takes"
    )


def test_a_cluster_that_is_not_there_costs_no_earlier_run(capsys, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        (tmp_path / "run.json").write_text("{}")
        said = refuse(capsys, "+stage=sft", f"run_dir={tmp_path}", "overwrite=true", f"cluster.address={address}")
    assert f"cluster.address={address}: no Ray cluster can be reached there" in said
    assert "ray start --head" in said
    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize("known", [False, wandb.errors.AuthenticationError("the key was refused")])
def test_wandb_without_a_key_or_a_network_costs_no_earlier_run(capsys, tmp_path, monkeypatch, known):
    def login(**options):
        if isinstance(known, Exception):
            raise known
        return known

    monkeypatch.setattr(wandb, "login", login)
    (tmp_path / "run.json").write_text("{}")
    said = refuse(capsys, "+stage=sft", f"run_dir={tmp_path}", "overwrite=true", "tracking=online").replace("\n", " ")
    assert f"tracking.wandb=online: {known or 'no API key is known'}; `wandb login` keeps a key" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "run.json"]


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
        (
            '{"task": "calculator", "version": 2, "streams": true}',
            "with protocol version 2, expected 'calculator' with",
        ),
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


@pytest.mark.parametrize("mode", ["overwrite=true", "resume=auto"])
@pytest.mark.parametrize("key", ["model.checkpoint", "+teachers.calculator.source"])
def test_what_a_run_reads_is_not_of_the_run_that_it_replaces(capsys, tmp_path, model_dir, key, mode):
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "run.json").write_text("{}")
    stage = "+stage=opd" if "teachers" in key else "+stage=agent_rl"
    arguments = [stage, "task=calculator", f"run_dir={tmp_path}", f"{key}={tmp_path / 'model'}"]
    said = refuse(capsys, *arguments, mode).replace("\n", " ")
    assert f"{key.lstrip('+')}: {tmp_path / 'model'} is of the run that run_dir={tmp_path} holds" in said
    (tmp_path / "run.json").unlink()
    assert train([*arguments, mode, "--check"]) == 0  # where nothing is replaced


def test_another_model_than_the_run_began_with_is_not_ignored_on_a_resume(capsys, tmp_path, model_dir):
    config = check(compose_config(["+stage=agent_rl", f"model.checkpoint={model_dir}", f"run_dir={tmp_path / 'run'}"]))
    lineage = preflight.check_run(config).lineage()
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    state = {"format": FORMAT, "step": 1, "files": {}, "extra": {"step": 1, "initial_model": str(tmp_path), **lineage}}
    (checkpoint / "manifest.json").write_text(json.dumps(state))
    arguments = ["+stage=agent_rl", f"run_dir={tmp_path / 'run'}", "resume=auto"]
    said = refuse(capsys, *arguments, f"model.checkpoint={model_dir}")
    assert f"model.checkpoint={model_dir}: the run that is resumed began with {tmp_path}; give that" in said


def test_a_check_says_what_the_run_would_be_and_starts_nothing(capsys, tmp_path):
    assert train(["+stage=agent_rl", "--check", f"run_dir={tmp_path / 'run'}", "steps=7"]) == 0
    said = capsys.readouterr().out
    assert f"agent_rl in {tmp_path / 'run'}, new" in said
    assert "7 steps of 24 prompts x 8 rollouts" in said
    assert "tasks.calculator  5,943 prompts to train" in said
    assert not (tmp_path / "run").exists()
    assert train(["+stage=agent_rl", "--check", "steps=0"]) == EXIT_BAD_CONFIG


def test_a_config_error_takes_less_than_five_seconds(tmp_path):
    """Of processor time, since a loaded machine's wall time says nothing."""
    command = [sys.executable, "train.py", "+stage=agent_rl", "rollout.stalenes=1", f"run_dir={tmp_path}"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_BAD_CONFIG
    assert usage.ru_utime + usage.ru_stime < 5


def test_a_config_is_read_without_pytorch():
    """It takes three times as long to import as all else that a config error needs."""
    code = "import sys, rl.commands.train, rl.commands.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


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
