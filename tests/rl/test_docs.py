"""What README and docs/ say still works: links, files, commands, keys and values, and the tutorials' code."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from algorithms import registry as algorithms
from rl.cli import COMMANDS
from rl.commands.teachers import _parser as teachers_parser
from rl.commands.train import OPTIONS
from rl.compose import CONFIG_DIR, compose_config, compose_plan
from rl.config import RunConfig, check
from rl.plan import PlanConfig, check_plan
from tasks.registry import load_task, task_names

ROOT = CONFIG_DIR.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
GIVEN = {"cluster=gpu": ["publish.directory=/shared"], "+stage=opd": [], "model=hf": ["model.checkpoint=/models/hf"]}
"""What a reader adds in place of `...`."""
TEACHERS = ["teachers.calculator.source=/one", "teachers.sorting.source=/other"]
MADE = (
    "tasks/reversal/",
    "tests/tasks/test_reversal",
    "configs/task/reversal",
    "algorithms/tis",
    "configs/algorithm/tis",
)
"""What the tutorials let the reader make."""


def outside_fences(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside_fences(page))]


def fences(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def commands(page: Path) -> Iterator[list[str]]:
    """Command lines in blocks and in running text, as words."""
    lines = [line for text in fences(page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans(page)]:
        if re.match(r"(python|atelier|make) ", line):
            yield shlex.split(line, comments=True)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", outside_fences(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def figures() -> dict[str, str]:
    """Documented figures of a run, each with what it matches. In a cell, what follows the first goes on in its folder;
    capitals stand for any name, as does a star."""
    found: dict[str, str] = {}
    for page, title in (("runs", "## Figures"), ("algorithms", "## What is logged"), ("opd", "## Figures")):
        text = (ROOT / "docs" / f"{page}.md").read_text().partition(f"\n{title}\n")[2].partition("\n## ")[0]
        cells = re.findall(r"^\| (`.*?) \|", text, re.M) or [text]
        for cell in cells:
            folder = ""
            for name in re.findall(r"`([^`]+)`", cell):
                folder = f"{name.rpartition('/')[0]}/" if "/" in name else folder
                full = name if "/" in name else folder + name
                found[full] = re.sub(r"[A-Z]+", "[^/]+", re.escape(full)).replace(r"\*", "[^/]+")
    return found


def undocumented(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Figures in rows of ``metrics.jsonl`` that no page has."""
    known = [re.compile(pattern) for pattern in figures().values()]
    names = {name for row in rows for name in row} - {"phase", "step", "time"}
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in known))


def test_figures_that_are_documented_are_ones_that_the_code_makes():
    sources = [path.read_text() for folder in ("rl", "rollout", "algorithms") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(sources)
    assert len(figures()) > 80
    for name in figures():
        for word in re.split(r"[/*]", name):
            # A quantile or a mean is put at the end of a name that is there.
            stem = re.sub(r"_?(p\d+|mean|max)?$", "", word)
            assert not stem or stem.isupper() or re.search(rf"\b{re.escape(stem)}", code), name


def every(of: Any) -> list[Any]:
    return [
        pytest.param(page, item, id=f"{page.stem}-{number}") for page in PAGES for number, item in enumerate(of(page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_fences(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page):
    """With their path, or by name alone."""
    known = {
        path.name
        for folder in ("rl", "rollout", "algorithms", "teachers", "tasks", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
    for span in spans(page):
        if span.removeprefix("rl/") in {"step", *figures()}:
            continue
        if re.fullmatch(r"(rl|rollout|algorithms|teachers|tasks|tests|benchmarks|configs|docs)/[\w/.]+", span):
            written = span.startswith(MADE) or re.search(r"\b[A-Z]+\b", span) is not None
            assert written or (ROOT / span).exists() or (ROOT / f"{span}.py").exists(), span
        elif re.fullmatch(r"\w+\.py", span):
            assert span in known, span


@pytest.mark.parametrize(("page", "words"), every(commands))
def test_commands_are_understood(page, words):
    match words:
        case ["make", *targets]:
            made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert [word for word in targets if "=" not in word and word not in made] == []
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None
        case ["python", "train.py", *overrides] | ["atelier", "train", *overrides]:
            run(overrides)
        case ["atelier", "plan", *overrides]:
            assert check_plan(compose_plan(overrides))
        case ["atelier", "teachers", *rest]:
            if len(rest) > 2 and all(word.islower() for word in rest) and "|" not in rest[0]:
                teachers_parser().parse_args(rest)
            assert re.fullmatch(r"(add|list|verify|gc|\|)+", rest[0])
        case ["atelier", name, *_]:
            assert name in COMMANDS


def run(overrides: list[str]) -> RunConfig | None:
    """The checked config of a documented command line, with what the reader fills in."""
    overrides = [word for word in overrides if word not in OPTIONS]
    if any("NAME" in word or "reversal" in word or word == "algorithm=tis" for word in overrides):
        return None  # the reader's own: see the tutorials' test
    given = [word for word in overrides if word not in ("...", "model.checkpoint=...")]
    if given != overrides:
        given += [word for key, more in GIVEN.items() if key in given for word in more]
        given += TEACHERS if "+stage=opd" in given else []
    return check(compose_config(given))


def sections(annotation: Any) -> Iterator[Any]:
    """The models in an annotation, also in unions and as a mapping's values."""
    if get_origin(annotation) in (Union, UnionType, dict):
        for part in get_args(annotation):
            yield from sections(part)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def fields(path: list[str]) -> list[Any]:
    """What a dotted key may mean: fields of the run's or the planner's config; [] if there is none. A NAME is any key
    of a mapping."""
    found: list[Any] = []
    for model in (RunConfig, PlanConfig):
        here: list[Any] = [model]
        field = None
        for part in path:
            named = [m.model_fields[part] for m in here if isinstance(m, type) and part in m.model_fields]
            if not named and field is not None and get_origin(field.annotation) is dict:
                here, field = list(sections(field.annotation)), None
                continue
            if not named:
                break
            field = named[0]
            here = [field.annotation] if get_origin(field.annotation) is dict else list(sections(field.annotation))
            if get_origin(field.annotation) is dict:
                here = []
        else:
            found.append(field)
    return found


def documented_keys(page: Path) -> Iterator[tuple[str, str | None]]:
    """`section.key` and `section.key=value` in running text, where section is one of the config's."""
    for span in spans(page):
        for word in span.split():
            found = re.fullmatch(r"'?\+*([a-z_]+(?:\.[A-Za-z_]+)+)(?:=([^']*))?'?", word)
            if found and found[1].partition(".")[0] in RunConfig.model_fields.keys() - {"teachers"}:
                yield found[1], found[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_exist_and_choices_are_among_those_there_are(page):
    options = {
        name
        for algorithm in algorithms.names()
        for name in algorithms.load_config(algorithm, {}).model_fields_set
        | set(type(algorithms.load_config(algorithm, {})).model_fields)
    }
    for key, value in documented_keys(page):
        section, *rest = key.removesuffix(".KEY").split(".")
        if section == "algorithm":
            assert rest[0] in options | {"OPTION"}, key
        elif section == "tasks" and len(rest) == 3:
            known = {option for name in task_names() for option in type(load_task(name, {}).options).model_fields}
            assert rest[2] in known or rest[0] == "reversal", key
        else:
            found = fields([section, *rest])
            assert found, key
            if value is not None and rest and section != "tasks" and key.islower():
                assert compose_config(["+stage=agent_rl", f"{key}={value}"]), key
            for literal in (f for f in found if f is not None and get_origin(f.annotation) is Literal):
                assert value is None or value.isupper() or yaml.safe_load(value) in get_args(literal.annotation), (
                    key,
                    value,
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configs_that_are_chosen_exist(page):
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    for span in spans(page):
        for group, chosen in re.findall(r"(?:^|\s)'?\+?([a-z]+)=\[?([a-z_0-9,]+)\]?", span):
            if group in groups and span.partition("=")[0].lstrip("+'") == group:
                for name in chosen.split(","):
                    assert (CONFIG_DIR / group / f"{name}.yaml").is_file() or name in ("tis", "reversal"), span


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """A copy of the sources in which a reader has followed the tutorials to the letter."""
    root = tmp_path_factory.mktemp("newcomer")
    for folder in ("algorithms", "configs", "rl", "rollout", "tasks", "teachers", "tests/tasks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "pyproject.toml", "tests/__init__.py"):
        shutil.copy(ROOT / name, root / name)
    task, test = fences(ROOT / "docs" / "add_a_task.md", "python")
    (config,) = fences(ROOT / "docs" / "add_a_task.md", "yaml")
    (algorithm,) = fences(ROOT / "docs" / "algorithms.md", "python")
    (root / "tasks" / "reversal").mkdir()
    (root / "tasks" / "reversal" / "__init__.py").touch()
    (root / "tasks" / "reversal" / "task.py").write_text(task)
    (root / "tests" / "tasks" / "test_reversal.py").write_text(test)
    (root / "configs" / "task" / "reversal.yaml").write_text(config)
    (root / "algorithms" / "tis.py").write_text(algorithm)
    (root / "configs" / "algorithm" / "tis.yaml").write_text("name: tis\n")
    return root


def python(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, timeout=240)


def test_the_task_of_the_tutorial_passes_the_tasks_tests(newcomer):
    done = python(newcomer, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tasks", "-k", "reversal")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout or "[100%]" in done.stdout


def test_the_runs_of_the_tutorials_would_start(newcomer):
    documented = [words[2:] for page in PAGES for words in commands(page) if words[:2] == ["python", "train.py"]]
    (train,) = (
        words
        for words in documented
        if any("reversal]" in word for word in words) and not any("url" in word for word in words)
    )
    done = python(newcomer, "train.py", *train, "algorithm=tis", "--check", f"run_dir={newcomer / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "tasks.reversal" in done.stdout
    assert re.search(r"algorithm +tis", done.stdout)
