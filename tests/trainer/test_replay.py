"""Routing replay: the engine's record decides which experts a token goes to, and nothing else."""

import numpy as np
import pytest
import torch

from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories, with_routed_experts
from tests.trainer.models import hf_logprobs, load_hf, save_model


@pytest.fixture
def moe_dir(tmp_path, session_worker):
    """Layer 0 is dense, layer 1 has four experts, of which a token takes two."""
    save_model("qwen3_moe_dense_layer", tmp_path)
    session_worker.load_model(tmp_path)
    yield tmp_path
    session_worker.config = session_worker.config.model_copy(update={"recompute": False})


def own_choice(model_dir, trajectories):
    """The experts that Hugging Face's router takes, as an engine records them: every layer has an entry."""
    model, records = load_hf(model_dir), []
    for trajectory in trajectories:
        record = np.zeros((len(trajectory), 2, 2), np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(trajectory.token_ids).long()[None], output_router_logits=True)
        record[:, 1] = logits.router_logits[0].topk(2).indices.numpy()
        records.append(record)
    return records


def with_records(trajectories, records):
    return [t.replace(routed_experts=r) for t, r in zip(trajectories, records, strict=True)]


def other_choice(trajectories):
    return [t.routed_experts for t in with_routed_experts(trajectories, layers=2, experts=4, top_k=2)]


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_the_own_choice_changes_nothing(moe_dir, session_worker, recompute):
    worker, trajectories = session_worker, make_trajectories(groups=2)
    worker.config = worker.config.model_copy(update={"recompute": recompute})
    worker.load_model(moe_dir)
    replayed = with_records(trajectories, own_choice(moe_dir, trajectories))
    for a, b in zip(worker.logprobs(trajectories), worker.logprobs(replayed), strict=True):
        assert np.abs(a - b).max() <= 1e-6
    result, gradient = capture_update(worker, trajectories, Ratio())
    worker.load_model(moe_dir)
    again, replayed_gradient = capture_update(worker, replayed, Ratio())
    assert again.loss == pytest.approx(result.loss, rel=1e-6)
    assert_close(replayed_gradient, gradient)


def test_another_choice_is_followed_and_the_rest_is_the_routers(moe_dir, session_worker, monkeypatch):
    trajectories = make_trajectories(groups=2)
    records = other_choice(trajectories)
    records[0][3:] = -1  # from here the router chooses
    records[1] = None
    found = session_worker.logprobs(with_records(trajectories, records))

    model = load_hf(moe_dir)
    gate, route = model.model.layers[1].mlp.gate, type(model.model.layers[1].mlp.gate).forward
    for trajectory, record, logprobs in zip(trajectories, records, found, strict=True):
        chosen = torch.full((len(trajectory), 2), -1) if record is None else torch.from_numpy(record[:, 1]).long()

        def forward(hidden, chosen=chosen):
            logits, _, own = route(gate, hidden)
            experts = torch.where(chosen >= 0, chosen, own)
            return logits, logits.softmax(-1).gather(1, experts), experts

        monkeypatch.setattr(gate, "forward", forward)
        (expected,) = hf_logprobs(model, [trajectory])
        assert np.abs(logprobs - expected.detach().numpy()).max() <= 1e-5
    plain = session_worker.logprobs(trajectories)
    assert np.abs(plain[2] - found[2]).max() > 1e-3
    assert np.abs(plain[1] - found[1]).max() == 0


@pytest.mark.parametrize(
    ("shape", "expert", "message"),
    [((3, 2), 0, r"\[3, 2\] \(layers, top_k\), the model \[2, 2\]"), ((2, 2), 4, "expert 4, the model has 4")],
)
def test_records_of_another_model_are_refused(moe_dir, session_worker, shape, expert, message):
    (trajectory, *_) = make_trajectories(groups=1)
    record = np.full((len(trajectory), *shape), expert, np.int32)
    with pytest.raises(ValueError, match=message):
        session_worker.logprobs([trajectory.replace(routed_experts=record)])


def test_a_model_without_experts_refuses_a_record(worker):
    (trajectory, *_) = make_trajectories(groups=1)
    with pytest.raises(ValueError, match="the model has none"):
        worker.logprobs([trajectory.replace(routed_experts=np.zeros((len(trajectory), 2, 2), np.int32))])
