"""Does parallel distillation teach? Twelve experts, one student, a few seeds; and a skill that a later stage lost.

    python -m benchmarks.opd --out runs/opd_proof [--seeds 0 1 2] [--steps 450] [--mode full_vocab]

Everything is a stage of the product (``train.py``), on the CPU, with the demo's 100k-parameter model and the task
words:

    base            SFT on all twelve rules, a third of the demonstrations right: where teachers and students begin
    teacher_RULE    SFT from it on one rule's right demonstrations
    MODE_SEED       stage opd from base: all rules' prompts, routed by the column ``rule``
    first, second   SFT from base on two rules; then, from its model, on two others, which it forgets the first two for
    cross_MODE_SEED stage cross_stage from second's model; first and second teach their own rules

A stage whose run is finished is not run again, so that an interrupted proof goes on where it stopped. Writes
``parallel_MODE.json`` and ``cross_stage_MODE.json``, and prints both tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.words.task import RULES

ROOT = Path(__file__).parents[1]
STAGE_TIMEOUT_S = 3600
FIRST, SECOND = ("reverse", "sort"), ("upper", "dash")
BAR = 0.95
"""Of its teacher's reward, that a student must reach on the teacher's prompts."""
EVALUATED = 96
SFT_TEACHER = ("sft.steps=250", "sft.conversations_per_step=32", "sft.optimizer.lr=1e-3")


@dataclass(frozen=True)
class Settings:
    """Of the students."""

    steps: int
    mode: str


@dataclass(frozen=True)
class Proof:
    out: Path

    def model(self, name: str) -> Path:
        return self.out / name / "model"

    def run(self, name: str, stage: str, *overrides: str) -> dict[str, Any]:
        """The summary of a stage, which is run unless it has ended before."""
        folder = self.out / name
        summary = folder / "summary.json"
        if not summary.exists():
            started = time.perf_counter()
            common = ("task=[words]", "tracking=files", f"run_dir={folder}", "resume=auto")
            command = [sys.executable, "train.py", f"+stage={stage}", *common, *overrides]
            with (self.out / f"{name}.log").open("w") as log:
                subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=STAGE_TIMEOUT_S, check=True
                )
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(summary.read_text())
        return found

    def sft(self, name: str, start: str, rules: Sequence[str]) -> dict[str, Any]:
        listed = ",".join(rules)
        return self.run(
            name,
            "sft",
            f"model.checkpoint={self.model(start)}",
            f"tasks.words.options.rules=[{listed}]",
            "tasks.words.options.good_share=1.0",
            f"evaluation.prompts={EVALUATED}",
            *SFT_TEACHER,
        )

    def distil(
        self, name: str, stage: str, start: str, teachers: dict[str, Sequence[str]], seed: int, settings: Settings
    ) -> dict[str, Any]:
        rules = ",".join(rule for of_teacher in teachers.values() for rule in of_teacher)
        return self.run(
            name,
            stage,
            f"seed={seed}",
            f"steps={settings.steps}",
            f"algorithm.mode={settings.mode}",
            f"model.checkpoint={self.model(start)}",
            f"tasks.words.options.rules=[{rules}]",
            "distillation.route=rule",
            f"distillation.store={self.out / 'store'}",
            f"evaluation.prompts={EVALUATED}",
            "rollout.save_trajectories=false",
            "checkpoint.every=25",
            *(f"+teachers.{teacher}.source={self.out / teacher}" for teacher in teachers),
            *(f"+teachers.{teacher}.prompts=[{','.join(own)}]" for teacher, own in teachers.items()),
        )


def parallel(proof: Proof, seeds: Sequence[int], settings: Settings) -> list[dict[str, Any]]:
    """A row for each rule: its teacher's reward, and the student's before and after, by seed."""
    proof.run("base", "sft", "sft.steps=1500", f"evaluation.prompts={EVALUATED}")
    taught = {rule: proof.sft(f"teacher_{rule}", "base", [rule])["reward_after"]["words"] for rule in RULES}
    teachers: dict[str, Sequence[str]] = {f"teacher_{rule}": (rule,) for rule in RULES}
    students = [proof.distil(f"{settings.mode}_{seed}", "opd", "base", teachers, seed, settings) for seed in seeds]
    return [
        {
            "rule": rule,
            "teacher": taught[rule],
            "before": [s["reward_before"][f"words/{rule}"] for s in students],
            "after": [s["reward_after"][f"words/{rule}"] for s in students],
        }
        for rule in RULES
    ]


def cross_stage(proof: Proof, seeds: Sequence[int], settings: Settings) -> list[dict[str, Any]]:
    """A row for each rule: the reward of the stage that taught it, of the later stage, and of the student, by seed."""
    first = proof.sft("first", "base", FIRST)["reward_after"]["words"]
    second = proof.sft("second", "first", SECOND)["reward_after"]["words"]
    teachers: dict[str, Sequence[str]] = {"first": FIRST, "second": SECOND}
    students = [
        proof.distil(f"cross_{settings.mode}_{seed}", "cross_stage", "second", teachers, seed, settings)
        for seed in seeds
    ]
    return [
        {
            "rule": rule,
            "teacher": first if rule in FIRST else second,
            "before": [s["reward_before"][f"words/{rule}"] for s in students],
            "after": [s["reward_after"][f"words/{rule}"] for s in students],
        }
        for rule in (*FIRST, *SECOND)
    ]


def table(title: str, rows: Sequence[dict[str, Any]]) -> tuple[str, float]:
    """Sampled rewards as Markdown, and the smallest share of a teacher's reward that a student reached."""
    lines = [
        f"### {title}",
        "",
        "| rule | teacher | student before | after, by seed | least share |",
        "|---|---|---|---|---|",
    ]
    least = 1.0
    for row in rows:
        shares = [after["sampled"] / row["teacher"]["sampled"] for after in row["after"]]
        least = min(least, *shares)
        after = " / ".join(f"{reward['sampled']:.3f}" for reward in row["after"])
        before = " / ".join(f"{reward['sampled']:.3f}" for reward in row["before"])
        lines.append(f"| {row['rule']} | {row['teacher']['sampled']:.3f} | {before} | {after} | {min(shares):.3f} |")
    return "\n".join([*lines, "", f"least share of a teacher's reward: {least:.3f} (bar {BAR})", ""]), least


PARTS = {
    "parallel": ("Twelve teachers, one student", parallel),
    "cross_stage": ("A skill that a later stage lost", cross_stage),
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every student reached the bar on every teacher's prompts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opd", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/opd_proof"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=450, help="updates of a student")
    parser.add_argument("--mode", default="full_vocab", choices=["sampled", "top_k", "full_vocab"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args(argv)
    proof = Proof(arguments.out.resolve())
    proof.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(arguments.steps, arguments.mode)
    reached = []
    for name in arguments.parts:
        title, measure = PARTS[name]
        rows = measure(proof, arguments.seeds, settings)
        text, least = table(title, rows)
        print(text, flush=True)
        reached.append(least)
        found = {"seeds": arguments.seeds, **vars(settings), "rows": rows, "least_share": least}
        (proof.out / f"{name}_{settings.mode}.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if min(reached) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
