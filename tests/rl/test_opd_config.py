"""Wrong teachers are refused in a line or two that name the teacher, the key or the file, before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from rl.commands.exits import EXIT_BAD_CONFIG
from rl.commands.train import main as train
from rl.compose import compose_config
from rl.config import FreshModel, check
from rl.fresh_model import create_model
from rl.preflight import check_run
from rl.teachers.config import TeacherConfig
from rl.teachers.routing import RouteError, Routing
from rl.teachers.sources import TeacherSourceError, resolve
from tasks.protocol import Prompt


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher") / "hf"
    create_model(directory, FreshModel(), seed=0)
    return directory


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of another architecture."""
    directory = tmp_path_factory.mktemp("deep") / "hf"
    create_model(directory, FreshModel(layers=3), seed=0)
    return directory


@pytest.fixture(scope="module")
def other_tokens(model_dir, tmp_path_factory):
    """A model whose tokenizer has two characters in each other's place."""
    directory = tmp_path_factory.mktemp("other") / "hf"
    shutil.copytree(model_dir, directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def damaged(model_dir, tmp_path_factory):
    """Copies of a model, a file of each of which is not what it should be."""
    folder = tmp_path_factory.mktemp("damaged")
    for file, content in (("config.json", "{"), ("tokenizer.json", "{"), ("model.safetensors", "short")):
        shutil.copytree(model_dir, folder / file.partition(".")[0])
        (folder / file.partition(".")[0] / file).write_text(content)
    return folder


def refuse(capsys, *overrides):
    code = train(["+stage=opd", "task=sorting", *overrides])
    said = " ".join(capsys.readouterr().err.split())
    assert code == EXIT_BAD_CONFIG, said
    return said


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "teachers: none is given, and algorithm=opd needs some: add +teacher="),
        (["+teacher=sorting"], "teachers.sorting.source: required, but not set"),
        (["+teacher=chess"], "teacher=chess: there is no such config; configs/teacher has: calculator"),
        (
            ["+teachers.sorting.source=/nowhere"],
            "teachers.sorting.source: /nowhere does not exist; give an HF directory",
        ),
        (["+teachers.sorting.sauce=/nowhere"], "teachers.sorting.sauce: unknown key; did you mean source?"),
        (["+teachers.sorting.weight=1"], "teachers.sorting: give source"),
        (["+teachers.sorting.url=http://127.0.0.1:1"], "teachers.sorting: tokenizer goes with url"),
        (["+teachers.ann.source=MODEL"], "teachers: none teaches task 'sorting' (5884 prompts)"),
        (
            ["+teachers.sorting.source=MODEL", "+teachers.ann={source: MODEL, prompts: [chess]}"],
            "teachers.ann.prompts: no prompt of this run has task 'chess'; there are sorting",
        ),
        (
            ["+teachers.sorting.source=DAMAGED/config"],
            "teachers.sorting.source: DAMAGED/config/config.json is not JSON",
        ),
        (
            ["+teachers.sorting.source=DAMAGED/tokenizer"],
            "teachers.sorting.source: the tokenizer of DAMAGED/tokenizer can't be read",
        ),
        (
            ["+teachers.sorting.source=DAMAGED/model"],
            "teachers.sorting.source: DAMAGED/model/model.safetensors is not a whole safetensors file",
        ),
        (
            ["+teachers.sorting.source=MODEL", "distillation.store=DAMAGED/model/config.json/store"],
            "distillation.store: DAMAGED/model/config.json/store can't be made or written to",
        ),
        (
            ["+teachers.sorting.source=OTHER"],
            "the tokenizer of OTHER is not the student's: 2 tokens differ, such as 'a'",
        ),
        (
            ["+teachers.sorting={url: 'http://127.0.0.1:1', tokenizer: OTHER}"],
            "teachers.sorting.tokenizer: the tokenizer of OTHER is not the student's: 2 tokens differ, such as 'a'",
        ),
        (
            ["+teachers.sorting={url: 'http://127.0.0.1:1', tokenizer: MODEL, codec: fp8}"],
            "teachers.sorting: base and codec are of weights that this run holds",
        ),
        (
            ["+teachers.sorting={source: MODEL, codec: fp4}"],
            "teachers.sorting.codec: Input should be 'exact' or 'fp8'",
        ),
        (
            ["+teachers.sorting.source=MODEL", "distillation.base=/nowhere"],
            "distillation.base=/nowhere: there is neither a teacher of this name with weights in this run (sorting)",
        ),
        (
            ["+teachers.sorting={source: MODEL, base: sorting}"],
            "teachers.sorting.base=sorting: a teacher can't be its own base",
        ),
        (
            ["+teachers.sorting={source: MODEL}", "distillation.base=DEEP"],
            "distillation.base: DEEP is of another architecture than MODEL",
        ),
        (
            [
                "+teachers.sorting={source: MODEL, codec: fp8}",
                "+teachers.ann={source: MODEL, prompts: [sorting], base: sorting}",
            ],
            "teachers.sorting: others are kept as differences to it, so it has to be kept whole, and has codec=fp8",
        ),
        (
            [
                "+teachers.sorting={source: MODEL, base: bob}",
                "+teachers.ann={source: MODEL, prompts: [sorting], base: sorting}",
                "+teachers.bob={source: MODEL, prompts: [sorting]}",
            ],
            "teachers.sorting: others are kept as differences to it, so it has to be kept whole, and has base=bob",
        ),
        (
            ["+teachers.sorting.source=MODEL", "distillation.pinned_bytes=1000"],
            "distillation.pinned_bytes=1000: teacher sorting takes at least",
        ),
        (
            ["+teachers.sorting.source=MODEL", "distillation.route=rule"],
            "the prompts of task sorting have no such column",
        ),
        (["+teachers.sorting.source=MODEL", "algorithm=grpo"], "teachers: algorithm=grpo asks no teacher"),
        (
            ["+teachers.sorting={url: 'http://127.0.0.1:1', tokenizer: MODEL}", "rollout.temperature=0.7"],
            "teachers.sorting.url: an SGLang server scores at temperature 1 only",
        ),
        (
            ["+teachers.sorting={url: 'http://127.0.0.1:1', tokenizer: MODEL}", "algorithm.mode=full_vocab"],
            "teachers.sorting.url: a server gives the log-probs of sampled tokens only",
        ),
    ],
)
def test_wrong_teachers_are_named(capsys, tmp_path, model_dir, other_tokens, deep, damaged, overrides, says):
    def named(text):
        words = {"MODEL": model_dir, "OTHER": other_tokens, "DEEP": deep, "DAMAGED": damaged}
        for word, directory in words.items():
            text = text.replace(word, str(directory))
        return text

    said = refuse(capsys, f"run_dir={tmp_path / 'run'}", *map(named, overrides))
    assert named(says) in said, said
    assert not (tmp_path / "run").exists()


def test_distributions_over_other_vocabularies_are_refused_and_their_sampled_tokens_are_not(
    capsys, tmp_path, model_dir
):
    padded = tmp_path / "padded"
    shutil.copytree(model_dir, padded)
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    overrides = [f"+teachers.sorting.source={padded}", f"model.checkpoint={model_dir}", f"run_dir={tmp_path / 'run'}"]
    said = refuse(capsys, *overrides, "algorithm.mode=top_k")
    assert "has logits for 128 tokens, the student for" in said
    check_run(check(compose_config(["+stage=opd", "task=sorting", *overrides])))


def test_a_truncated_file_an_unfinished_run_and_a_stray_folder_are_no_teachers(model_dir, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(model_dir, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(TeacherSourceError, match=r"teachers\.ann\.source: .*model\.safetensors is not a whole"):
        resolve("ann", cut)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(TeacherSourceError, match=r"has no .*model yet; finish it"):
        resolve("ann", tmp_path / "run")
    with pytest.raises(TeacherSourceError, match=r"has no config\.json"):
        resolve("ann", tmp_path)


def test_a_finished_runs_folder_is_its_final_model(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "run" / "model")
    (tmp_path / "run" / "run.json").write_text("{}")
    source = resolve("ann", tmp_path / "run")
    assert source.model == tmp_path / "run" / "model"
    assert source.parameters == resolve("ann", model_dir).parameters > 90_000


def test_prompts_find_their_teachers_by_column_and_several_share_one():
    teachers = {
        "ann": TeacherConfig(source="a", prompts=("x", "y")),
        "bob": TeacherConfig(source="b", prompts=("y",), weight=3.0),
        "z": TeacherConfig(source="c"),
    }
    routing = Routing(teachers, "kind")
    prompts = {"t": [Prompt(prompt_id=kind, data={"kind": kind}) for kind in "xyz"]}
    routing.check(prompts)
    found = {p.prompt_id: routing.shares(routing.value("t", p.data)) for p in prompts["t"]}
    assert found == {"x": {"ann": 1.0}, "y": {"ann": 1.0, "bob": 3.0}, "z": {"z": 1.0}}
    with pytest.raises(RouteError, match=r"none teaches kind 'w' \(1 prompts\)"):
        routing.check({"t": [*prompts["t"], Prompt(prompt_id="w", data={"kind": "w"})]})


def test_each_teachers_prompts_are_evaluated_apart(model_dir, tmp_path):
    overrides = [
        "+stage=cross_stage",
        "task=words",
        "tasks.words.options.rules=[sort,dash]",
        f"run_dir={tmp_path / 'r'}",
    ]
    overrides += ["distillation.route=rule", "evaluation.prompts=5"]
    overrides += [f"+teachers.{name}={{source: {model_dir}, prompts: [{name}]}}" for name in ("sort", "dash")]
    plan = check_run(check(compose_config(overrides)))
    sets = plan.evaluation_sets()
    assert set(sets) == {"words/sort", "words/dash"}
    for label, (task, prompts) in sets.items():
        assert task == "words"
        assert {data["rule"] for _, data in prompts} == {label.partition("/")[2]}
        assert len(prompts) == 5


def test_pinned_memory_for_half_of_a_teacher_is_enough_in_fp8(capsys, model_dir, tmp_path):
    overrides = ["+stage=opd", "task=sorting", f"run_dir={tmp_path / 'r'}", f"+teachers.sorting.source={model_dir}"]
    overrides.append(f"distillation.pinned_bytes={2 * resolve('sorting', model_dir).parameters}")  # of fp32
    assert "takes at least" in refuse(capsys, *overrides[2:])
    check_run(check(compose_config([*overrides, "distillation.codec=fp8"])))


def test_a_teacher_that_is_the_base_of_others_is_kept_whole_whatever_the_codec_of_the_rest(model_dir, tmp_path):
    overrides = ["+stage=opd", "task=[sorting,calculator]", f"run_dir={tmp_path / 'r'}", "distillation.codec=fp8"]
    overrides += [f"+teachers.{name}.source={model_dir}" for name in ("sorting", "calculator")]
    plan = check_run(check(compose_config([*overrides, "distillation.base=sorting"])))
    kept = {source.name: (source.codec, source.base and source.base.name) for source in plan.teaching.sources}
    assert kept == {"calculator": ("fp8", "sorting"), "sorting": ("exact", None)}
    plan = check_run(check(compose_config([*overrides, f"distillation.base={model_dir}"])))
    assert {source.codec for source in plan.teaching.sources} == {"fp8"}
    assert len({source.base.name for source in plan.teaching.sources}) == 1
    assert len({source.mark for source in plan.teaching.sources}) == 1
