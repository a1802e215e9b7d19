"""The course of a run. Servers start with any weights while the models are trained, and then get them; each step has a
time limit of its own, and what fails is written down and takes nothing else with it."""

from __future__ import annotations

import argparse
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from benchmarks.engine.servers import Server, start
from benchmarks.logprob_gap import models, scoring, training
from benchmarks.logprob_gap.child import Child
from benchmarks.logprob_gap.language import Language
from benchmarks.logprob_gap.models import SERVER_MODELS, WIDE, WORDS, Case, Name, Weights
from benchmarks.logprob_gap.report import append, tables
from benchmarks.logprob_gap.scoring import Sampled
from benchmarks.logprob_gap.serving import rollouts, server_spec, until_idle
from rollout.processes import ProcessRegistry

START_S = 150.0
"""For the servers, which compile kernels the first time."""
WRITE_S = 120.0
"""For a random model."""
PREPARE_S = 120.0
PUBLISH_S = 60.0
IDLE_S = 20.0
SAMPLE_S = 120.0
SCORE_S = 120.0
"""For all cases of a model."""
BEYOND_TRAINING_S = 150.0
"""For imports, compiling, loading and writing around the training's own seconds."""
FOLDERS = (*get_args(Weights), "shape", "servers")
"""Of a run's; those of the one before are removed, and nothing else that lies beside them."""


@dataclass
class Run:
    """What its parts share."""

    path: Path
    work: Path
    device: str
    weights: list[Weights]
    cases: list[Case]
    train_seconds: float
    deadline: float
    publish: bool
    """Servers start with any weights and get the real ones later; otherwise they load the first ones."""
    ok: bool = True

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def names(self) -> list[Name]:
        return sorted({case.model for case in self.cases})

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(case.server for case in self.cases))

    def left(self, limit_s: float) -> float:
        """Seconds that a step may take."""
        return max(0.0, min(limit_s, self.deadline - time.monotonic()))

    def asked(self, model: Name) -> list[Case]:
        return [case for case in self.cases if case.model == model]

    def directory(self, weights: Weights, model: Name) -> Path:
        folder = self.work / weights / model
        return folder / "final" if weights == "trained" else folder

    def failed(self, section: str, facts: dict[str, str], error: str) -> None:
        self.ok = False
        append(self.path, {"section": section, **facts, "error": error})


def make_models(run: Run, weights: Weights, name: Name, child: Child) -> bool:
    """Write one model; False where it failed."""
    facts = {"weights": weights, "model": name}
    folder = run.work / weights / name
    try:
        if weights == "random":
            child.call(run.left(WRITE_S), models.write_random, name, folder, run.cuda, WIDE[name])
            return True
        length = models.longest(run.asked(name))
        plan = training.Plan(name, run.cuda, folder, run.train_seconds, length, WORDS[run.cuda])
        learned = child.call(run.left(run.train_seconds + BEYOND_TRAINING_S), training.train, plan)
        append(run.path, {"section": "training", **facts, **learned})
        return True
    except Exception:  # noqa: BLE001  (it is written down, and the other models go on)
        run.failed("training", facts, traceback.format_exc()[-3000:])
        return False
    finally:
        if run.cuda and weights == "trained":
            child.close()  # its memory is wanted


def start_server(run: Run, registry: ProcessRegistry, server: str) -> Server | None:
    """None where it did not come up."""
    try:
        return _started(run, registry, server)
    except Exception:  # noqa: BLE001  (it is written down, and the other servers go on)
        run.failed("gap", {"server": server}, traceback.format_exc()[-3000:])
        return None


def _started(run: Run, registry: ProcessRegistry, server: str) -> Server:
    name = SERVER_MODELS[server]
    if run.publish:  # the configuration is all that it needs
        directory = run.work / "shape" / server
        models.make_config(name, run.cuda, WIDE[name]).save_pretrained(directory)
    else:
        directory = run.directory(run.weights[0], name)
    asked = [case for case in run.cases if case.server == server]
    requests = max(case.requests for case in asked)
    spec = server_spec(server, directory, models.longest(asked), requests, run.cuda, run.publish)
    up, errors = start(registry, [spec], run.work / "servers" / server, run.left(START_S))
    if errors:
        raise RuntimeError("\n".join(errors.values()))
    return up[spec.side]


def sample(run: Run, weights: Weights, server: Server, name: str) -> list[Sampled]:
    """What one server samples in its cases, after it got the weights."""
    cases, language = [case for case in run.cases if case.server == name], Language(WORDS[run.cuda])
    model, found = SERVER_MODELS[name], []
    facts = {"section": "gap", "weights": weights, "server": name}
    try:
        if run.publish or weights != run.weights[0]:
            until_idle(server, run.left(IDLE_S))
            server.load_weights(run.directory(weights, model), running=False, timeout_s=run.left(PUBLISH_S))
    except Exception:  # noqa: BLE001  (it is written down, and the other servers go on)
        run.failed("gap", {"weights": weights, "server": name}, traceback.format_exc()[-3000:])
        return []
    for index, case in enumerate(cases):
        begin = time.monotonic()
        try:
            prompts = language.sample(case.requests, case.prompt, seed=10**6 + index)
            experts = models.routed(model, run.cuda) if name == "dsa" else None
            trajectories = rollouts(server, prompts, case, experts, run.left(SAMPLE_S))
        except Exception:  # noqa: BLE001
            run.failed("gap", {"weights": weights, "server": name, "case": case.name}, traceback.format_exc()[-3000:])
            continue
        seconds = {"sample_s": time.monotonic() - begin}
        found.append(Sampled({**facts, **asdict(case), "case": case.name, **seconds}, trajectories))
    return found


def compare(run: Run, weights: Weights, found: list[Sampled], scorer: Child) -> None:
    for model in run.names:
        of_model = [case for case in found if case.facts["model"] == model]
        if not of_model:
            continue
        try:
            directory = run.directory(weights, model)
            scorer.call(run.left(SCORE_S), scoring.score, directory, of_model, run.device, run.path)
        except Exception:  # noqa: BLE001
            run.failed("gap", {"weights": weights, "model": model}, traceback.format_exc()[-3000:])


def go(run: Run, stack: ExitStack, say: Callable[[str], None]) -> None:
    def threads(number: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(number)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        return pool

    def process(name: str) -> Child:
        child = Child(name)
        stack.callback(child.close)
        return child

    background, scorer, made = threads(8), process("scorer"), {}
    for name in run.names:
        child, one_by_one = process(f"{name} maker"), threads(1)
        # Random ones first: they take seconds, and the training ends its process.
        for weights in sorted(run.weights):
            made[weights, name] = one_by_one.submit(make_models, run, weights, name, child)
    background.submit(scorer.call, run.left(PREPARE_S), scoring.prepare, run.device)
    if not run.publish:
        wait(made[run.weights[0], name] for name in run.names)
    registry = stack.enter_context(ProcessRegistry())
    starting = {name: background.submit(start_server, run, registry, name) for name in run.servers}
    servers = {name: server for name, future in starting.items() if (server := future.result()) is not None}
    say(f"servers are up: {sorted(servers)}")
    comparisons = []
    for weights in run.weights:
        able = {name: server for name, server in servers.items() if made[weights, SERVER_MODELS[name]].result()}
        say(f"{weights}: models are there")
        with ThreadPoolExecutor(max(1, len(able))) as pool:
            parts = pool.map(lambda item, w=weights: sample(run, w, item[1], item[0]), able.items())
            found = [case for part in parts for case in part]
        say(f"{weights}: sampled {len(found)} cases")
        comparisons.append(background.submit(compare, run, weights, found, scorer))
    for comparison in comparisons:
        comparison.result()


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if options.table:
        print(tables(options.table))
        return 0
    begin = time.monotonic()
    cuda = options.device == "cuda"
    for folder in FOLDERS:
        shutil.rmtree(options.work / folder, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    run = Run(
        path=options.json,
        work=options.work,
        device=options.device,
        weights=options.weights,
        cases=[
            case for case in models.cases(cuda, options.requests, options.fp32_head) if case.model in options.models
        ],
        train_seconds=options.train_seconds,
        deadline=begin + options.seconds,
        publish=options.start == "publish",
    )
    append(run.path, {"section": "options", **{key: str(value) for key, value in vars(options).items()}})
    with ExitStack() as stack:
        go(run, stack, lambda text: print(f"{time.monotonic() - begin:5.0f} s  {text}", flush=True))
    print(tables(run.path))
    return int(not run.ok)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprob_gap", description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--json", type=Path, help="a line for each result is appended")
    target.add_argument("--table", type=Path, help="print the tables of such a file; nothing runs")
    parser.add_argument("--work", type=Path, default=Path("/tmp/logprob-gap"), help="checkpoints, logs of the last run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=_words, default="dense,dsa", help="dense,dsa; dsa needs CUDA")
    parser.add_argument("--weights", type=_words, default="random,trained", help="in the order of their turns")
    parser.add_argument("--start", choices=("publish", "load"), default="publish", help="how servers get the first")
    parser.add_argument("--fp32-head", action="store_true", help="one more server, which keeps its logits in float32")
    parser.add_argument("--requests", type=int, default=32, help="of a case; half past the top k")
    parser.add_argument("--train-seconds", type=float, default=40.0, help="of each model's steps")
    parser.add_argument("--seconds", type=float, default=260.0, help="for all of it")
    options = parser.parse_args(arguments)
    for name, known in (("models", get_args(Name)), ("weights", get_args(Weights))):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {sorted(unknown)} not among {known}")
    return options


def _words(text: str) -> list[str]:
    return text.split(",")
