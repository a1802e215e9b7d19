"""Every configuration builds; what makes no sense is refused by its name; an algorithm crosses processes."""

from __future__ import annotations

import pickle
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from algorithms import registry
from algorithms.types import AlgorithmConfig, GroupVerdict, Need
from tests.algorithms.batches import make_case, run

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_builds_and_pickles(path):
    options = yaml.safe_load(path.read_text())
    assert options["name"] == path.stem
    algorithm = pickle.loads(pickle.dumps(registry.build(options["name"], options)))
    assert algorithm.config == registry.load_config(path.stem, options)


def test_every_algorithm_has_a_config_file():
    assert [path.stem for path in CONFIGS] == registry.names()


@pytest.mark.parametrize("name", ["reinforce", "gae", "types", "no.such", "", "../grpo"])
def test_an_unknown_name_is_refused_with_those_that_exist(name):
    with pytest.raises(ValueError, match=r"no algorithm .*cispo, dis, grpo, gspo, opd, sao, sft"):
        registry.build(name, {})


def test_a_new_module_is_found(monkeypatch):
    module = types.ModuleType("algorithms.mine")
    module.Config = AlgorithmConfig
    module.build = lambda config: ("mine", config)
    monkeypatch.setitem(sys.modules, "algorithms.mine", module)
    assert registry.build("mine", {}) == ("mine", AlgorithmConfig())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"beta": 0.9}, "beta"),
        ("grpo", {"pop_low": 1.5}, "pop_low"),
        ("grpo", {"pop_low": 0.4, "beta": None}, "pop_low"),
        ("grpo", {"epsilon_low": -0.1}, "epsilon_low"),
        ("grpo", {"epsilon_high": -0.1}, "epsilon_high"),
        ("grpo", {"group_size": 1}, "group_size"),
        ("grpo", {"overlong_buffer": 0, "overlong_length": 10}, "overlong_buffer"),
        ("grpo", {"overlong_buffer": 5}, "overlong_length"),
        ("grpo", {"overlong_buffer": 50, "overlong_length": 10}, "overlong_buffer=50"),
        ("grpo", {"kl_coefficient": -1}, "kl_coefficient"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator"),
        ("grpo", {"std_epsilon": 0}, "std_epsilon"),
        ("grpo", {"aggregation": "mean"}, "aggregation"),
        ("grpo", {"epsilon": 0.2}, "epsilon: Extra inputs"),
        ("grpo", {"epsilon_high": float("nan")}, "epsilon_high"),
        ("dis", {"epsilon_low": 0}, "epsilon_low"),
        ("dis", {"epsilon_low": 1.1}, "epsilon_low"),
        ("dis", {"max_staleness": -1}, "max_staleness"),
        ("dis", {"stale": "keep"}, "stale"),
        ("cispo", {"group_size": 1}, "group_size"),
        ("gspo", {"epsilon_low": -1e-4}, "epsilon_low"),
        ("sao", {"lambda_policy": 1.1}, "lambda_policy"),
        ("sao", {"lambda_critic": -0.1}, "lambda_critic"),
        ("sao", {"lambda_alpha": 0.5}, "lambda_alpha"),
        ("sao", {"gamma": 0}, "gamma"),
        ("sao", {"value_clip": 0}, "value_clip"),
        ("sao", {"group_size": 8}, "group_size"),
        ("opd", {"outcome_coefficient": 0.1}, "group_size=1"),
        ("opd", {"filter_zero_variance": True}, "group_size=1"),
        ("opd", {"bound_low": 1.2}, "bound_low"),
        ("opd", {"mode": "logits"}, "mode"),
        ("sft", {"group_size": 8}, "group_size"),
    ],
)
def test_senseless_options_are_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        registry.load_config(name, options)
    assert f"algorithm {name!r}" in str(caught.value)


def test_needs():
    assert registry.build("dis", {}).needs == set()
    assert registry.build("grpo", {}).needs == {Need.OLD_LOGPROBS}
    assert registry.build("grpo", {"kl_coefficient": 0.1}).needs == {Need.OLD_LOGPROBS, Need.REF_LOGPROBS}
    assert registry.build("grpo", {}).needs == {Need.OLD_LOGPROBS}, "one instance does not change another"
    assert registry.build("sao", {}).needs == {Need.VALUES}
    assert registry.build("opd", {"correction": "clipped"}).needs == {Need.TEACHER_LOGPROBS, Need.OLD_LOGPROBS}
    assert registry.build("opd", {"mode": "full_vocab"}).needs == {Need.LOGITS, Need.TEACHER_VIEWS}


def test_groups_of_each_algorithm():
    rewards, valid = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([True, True])
    assert registry.build("grpo", {}).decide_group(rewards, valid).verdict == GroupVerdict.ZERO_VARIANCE
    assert registry.build("dis", {}).decide_group(rewards, valid).verdict == GroupVerdict.KEEP
    for name in ("sao", "opd", "sft"):
        algorithm = registry.build(name, {})
        assert algorithm.group_size == 1
        assert algorithm.decide_group(rewards[:1], valid[:1]).verdict == GroupVerdict.KEEP
        assert algorithm.decide_group(rewards[:1], ~valid[:1]).verdict == GroupVerdict.ENVIRONMENT


def test_the_documented_example_is_an_algorithm(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = types.ModuleType("algorithms.tis")
    monkeypatch.setitem(sys.modules, "algorithms.tis", module)
    exec(source, vars(module))
    case = make_case([[[9], [7], [9]], [[5], [8], [9]]], 1, spoil=False)
    loss, gradient, output, _ = run(registry.build("tis", {"cap": 1.1}), case)
    assert loss.isfinite()
    assert gradient.any()
    assert 0 < output.metrics["tis/capped"].value() < 1
