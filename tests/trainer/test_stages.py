"""Into how many pipeline stages a model can be cut is known without building it."""

import pytest

from rl.commands.exits import EXIT_BAD_CONFIG
from rl.commands.train import main
from rl.fresh_model import character_tokenizer
from rl.trainer.stages import selecting_layer, stage_problem
from tests.trainer.models import MODELS, save_model

IRREGULAR = MODELS["glm_moe_dsa"][1].indexer_types
"""full, full, shared, full, shared, shared"""


def test_the_groups_of_an_indexer_may_be_of_any_size():
    assert [selecting_layer(IRREGULAR, layer) for layer in range(6)] == [0, 1, 1, 3, 3, 3]
    with pytest.raises(ValueError, match="layer 1 shares an indexer, but none comes before it"):
        selecting_layer(["shared", "shared"], 1)


@pytest.mark.parametrize(
    ("layers", "indexers", "stages", "says"),
    [
        (6, None, 3, None),
        (6, IRREGULAR, 1, None),
        (6, IRREGULAR, 2, None),
        (6, IRREGULAR, 3, "layer 2 begins a pipeline stage, but shares the indexer of layer 1; .* in [1, 2] works"),
        (6, None, 4, "num_hidden_layers 6 is not a multiple of the 4 stages; .* in [1, 2, 3, 6] works"),
    ],
)
def test_what_is_wrong_and_what_works(layers, indexers, stages, says):
    problem = stage_problem(layers, indexers, stages)
    if says is None:
        assert problem is None
    else:
        assert problem is not None
        begin, end = says.split(".*")
        assert problem.startswith(begin)
        assert problem.endswith(end)


@pytest.fixture
def directory(tmp_path):
    save_model("glm_moe_dsa", tmp_path / "model")
    character_tokenizer(64).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_run_whose_stages_cut_a_group_ends_before_it_starts(capsys, directory, tmp_path):
    layout = ("trainer.world_size=3", "+trainer.parallel.pipeline=3", "cluster.cpus=4")
    where = ("model=hf", f"model.checkpoint={directory}", f"run_dir={tmp_path / 'run'}")
    assert main(["+stage=agent_rl", *where, *layout]) == EXIT_BAD_CONFIG
    said = capsys.readouterr().err.replace("\n", " ")
    assert "trainer.parallel.pipeline=3 · virtual_pipeline=1: layer 2 begins a pipeline stage" in said
    assert "pipeline · virtual_pipeline in [1, 2] works" in said
    assert not (tmp_path / "run").exists()


def test_a_new_models_layers_are_counted_too(capsys, tmp_path):
    layout = ("trainer.world_size=4", "+trainer.parallel.pipeline=4", "cluster.cpus=4", "model.fresh.layers=2")
    assert main(["+stage=agent_rl", f"run_dir={tmp_path}", *layout]) == EXIT_BAD_CONFIG
    assert "num_hidden_layers 2 is not a multiple of the 4 stages" in capsys.readouterr().err.replace("\n", " ")
