"""Training goes on after the model has been away as if it had not been."""

import pytest
import torch

from tests.trainer.common import Ratio, make_trajectories

TRAJECTORIES = make_trajectories(groups=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_go_on_bit_by_bit(worker, model_dir, dtype):
    worker.config = worker.config.model_copy(update={"dtype": dtype})
    losses = []
    for away in (False, True):
        worker.load_model(model_dir)
        worker.update(TRAJECTORIES, 0, Ratio())
        if away:
            for _ in range(2):
                assert worker.offload() > 0
                assert worker.offload() == 0
                worker.onload()
                worker.onload()
        losses.append([worker.update(TRAJECTORIES, 0, Ratio()) for _ in range(3)])
    for a, b in zip(*losses, strict=True):
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)


def test_the_memory_is_gone_meanwhile(worker):
    loaded = worker.loaded
    weights = {name: tensor.clone() for name, tensor in worker.export_weights()}
    parameters = list(loaded.model.parameters())
    shards = loaded.optimizer.shards
    held = [*parameters, *(shard.state["exp_avg"] for shard in shards), *(p.main_grad for p in parameters)]
    expected = sum(buffer.grad_data.nbytes + buffer.param_data.nbytes for buffer in loaded.module.buffers)
    expected += sum(2 * 4 * (shard.end - shard.begin) for shard in shards)
    gained = worker.offload()
    assert gained == pytest.approx(expected, rel=0.01)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    with pytest.raises(RuntimeError, match="call onload first"):
        worker.update(TRAJECTORIES, 0, Ratio())
    worker.onload()
    assert all(tensor.untyped_storage().nbytes() > 0 for tensor in held)
    assert all(torch.equal(weights[name], tensor) for name, tensor in worker.export_weights())
