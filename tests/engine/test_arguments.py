"""SGLang's own parser judges ``extra_args`` before anything is launched."""

import pytest

from rollout.engine import arguments
from rollout.engine.arguments import ArgumentsError, check_extra_args, explain
from rollout.engine.config import EngineConfig


def engine(**extra):
    return EngineConfig(context_length=128, extra_args=extra)


def test_an_unknown_argument_and_the_nearest():
    with pytest.raises(
        ArgumentsError, match=r"engine.extra_args: SGLang has no argument page-sise; did you mean page-size\?"
    ):
        check_extra_args(engine(page_sise=16, stream_interval=2))


def test_known_arguments_pass():
    check_extra_args(engine(page_size=16, schedule_policy="fcfs", disable_custom_all_reduce=True))


def test_nothing_is_asked_where_there_is_nothing_to_ask(monkeypatch):
    monkeypatch.setattr(arguments, "_judge", lambda line: pytest.fail("asked"))
    check_extra_args(engine())


@pytest.mark.parametrize(
    ("error", "unknown", "expected"),
    [
        ("", [], None),
        ("argument --page-size: invalid int value: 'x'", [], "argument --page-size: invalid int value: 'x'"),
        ("", ["--warp-factor", "9"], "SGLang has no argument warp-factor"),
        ("", ["9"], "SGLang does not know what to do with '9': does the argument before it take a value?"),
    ],
)
def test_explanations(error, unknown, expected):
    assert explain(error, unknown, ["--page-size", "--tp-size"]) == expected
