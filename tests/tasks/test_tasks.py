"""The data of each task: splits, demonstrations, options; and that the registry refuses what is wrong by name."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks import registry
from tasks.calculator.task import TOOL_ERROR, Calculator, solve, use_tool
from tasks.registry import TaskError, load_task, task_names
from tasks.sorting.task import Sorting, sort_digits
from tests.tasks.conftest import Messages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", task_names())
def test_splits_share_no_prompt_and_keep_their_order(name):
    task = load_task(name, {}).options
    train, evaluation = task.prompts("train"), task.prompts("eval")
    train_ids, eval_ids = ({prompt.prompt_id for prompt in split} for split in (train, evaluation))
    assert len(train_ids) == len(train)
    assert len(eval_ids) == len(evaluation)
    assert not train_ids & eval_ids
    assert 0.08 < len(evaluation) / (len(train) + len(evaluation)) < 0.12
    assert task.prompts("eval") == evaluation
    # Nothing that changes from process to process (hash()) decides.
    again = subprocess.run(
        [sys.executable, "-c", _FIRST_IDS.format(name=name)], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert again.stdout.split() == [prompt.prompt_id for prompt in evaluation[:20]], again.stderr


_FIRST_IDS = """
from tasks.registry import load_task
print(*[prompt.prompt_id for prompt in load_task({name!r}, {{}}).options.prompts("eval")[:20]])
"""


def test_the_calculators_prompts_are_all_expressions():
    task = Calculator()
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    assert len(prompts) == 9 * 3 * 9 * 3 * 9
    assert {len(prompt.prompt_id) for prompt in prompts} == {5}


def test_other_options_move_no_prompt_to_the_other_split():
    narrow, wide = Calculator(hi=3), Calculator(hi=4)
    assert {p.prompt_id for p in narrow.prompts("eval")} <= {p.prompt_id for p in wide.prompts("eval")}


def test_the_calculator_goes_from_left_to_right():
    assert solve("2+3*4") == ("[2+3]", 5, "[5*4]", 20)
    assert solve("1-9-9") == ("[1-9]", -8, "[-8-9]", -17)
    with pytest.raises(ValueError, match="1\\+2"):
        solve("1+2")


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("[3*4]", "12"),
        ("[-8-9]", "-17"),
        ("[3*-4]", "-12"),
        *((turn, "err") for turn in ("3*4", "[3*4", "[3*4]]", "[3/4]", "[1234567*1]", "[\u0663*4]", "")),
    ],
)
def test_the_calculators_tool(turn, answer):
    assert use_tool(turn) == answer


def calculator_is_right(conversation: Messages) -> bool:
    for message, answer in itertools.pairwise(conversation):
        if answer["role"] == "tool":
            assert answer["content"] == use_tool(message["content"]) != TOOL_ERROR
    return conversation[-1]["content"] == f"={solve(conversation[0]['content'])[3]}"


def sorting_is_right(conversation: Messages) -> bool:
    question, answer = (message["content"] for message in conversation)
    assert sorted(question.removeprefix("sort ")) == sorted(answer)
    return answer == sort_digits(question.removeprefix("sort "))


@pytest.mark.parametrize(("task", "is_right"), [(Calculator, calculator_is_right), (Sorting, sorting_is_right)])
@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_demonstrations_are_right_in_their_share_and_show_no_eval_prompt(task, is_right, share):
    options = task(good_share=share)
    drawn = [
        [message.model_dump() for message in conversation]
        for conversation in itertools.islice(options.demonstrations(seed=0), 4000)
    ]
    assert sum(map(is_right, drawn)) / len(drawn) == pytest.approx(share, abs=0.03)
    held_out = {prompt.prompt_id for prompt in options.prompts("eval")}
    assert not held_out & {conversation[0]["content"].removeprefix("sort ") for conversation in drawn}
    assert next(options.demonstrations(seed=0)) == next(options.demonstrations(seed=0))
    assert {conversation[-1]["role"] for conversation in drawn} == {"assistant"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calculater", {}, r"'calculater' does not exist; there are: calculator, .*sorting"),
        ("../tasks", {}, "does not exist"),
        ("calculator", {"high": 9}, r"tasks\.calculator\.options\.high: unknown option; there are: lo, hi, operators"),
        ("calculator", {"lo": "x"}, r"tasks\.calculator\.options\.lo: "),
        ("calculator", {"lo": 5, "hi": 4}, r"lo 5 is above hi 4"),
        ("calculator", {"operators": "/"}, r"options\.operators: "),
        ("calculator", {"operators": "++"}, "names one twice"),
        ("sorting", {"length": 99}, r"options\.length: "),
    ],
)
def test_a_wrong_name_or_option_is_refused_in_one_line(name, options, message):
    with pytest.raises(TaskError, match=message) as error:
        load_task(name, options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from tasks.protocol import Task\nasync def play(a, b, c): ...", "one subclass of Task; found: none"),
        ("from tasks.protocol import Task\nclass A(Task): ...\nclass B(Task): ...", "found: A, B"),
        ("from tasks.protocol import Task\nclass A(Task): ...\ndef play(a, b, c): ...", "async def play"),
    ],
)
def test_a_task_file_that_lacks_something_says_so(source, message, tmp_path, monkeypatch):
    (tmp_path / "tasks" / "mine").mkdir(parents=True)
    (tmp_path / "tasks" / "mine" / "task.py").write_text(source)
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "tasks" / "registry.py"))
    monkeypatch.setattr("tasks.__path__", [str(tmp_path / "tasks")])
    with pytest.raises(TaskError, match=re.escape(message) if "play" not in message else message):
        load_task("mine", {})
    for module in [module for module in sys.modules if module.startswith("tasks.mine")]:
        del sys.modules[module]


@pytest.mark.parametrize("name", task_names())
def test_each_task_has_a_config_in_its_own_package_with_its_options(name):
    text = (ROOT / "configs" / "task" / f"{name}.yaml").read_text()
    # Without the package line `task=[a,b]` silently keeps the last one alone.
    assert text.startswith(f"# @package tasks.{name}\n")
    config = yaml.safe_load(text)
    load_task(name, config["options"])
    assert set(config) == {"options", "share", "slots", "replicas", "max_tokens", "episode_timeout_s", "url"}


def test_a_task_file_imports_no_client_and_nothing_of_the_trainer():
    script = (
        "import sys; from tasks.registry import load_task, task_names\n"
        "for name in task_names(): load_task(name, {})\n"
        "print(*sorted({'openai', 'aiohttp', 'torch', 'numpy', 'rl', 'rollout'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_images_requirements_are_those_of_the_lock():
    locked = set((ROOT / "requirements.lock").read_text().split())
    wanted = (ROOT / "tasks" / "requirements.txt").read_text().split()
    assert wanted
    assert set(wanted) <= locked
