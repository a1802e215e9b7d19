"""The benchmark's checkpoint has the top-k locality asked for, and the observer reads it off HiSparse's state."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.engine import observe
from benchmarks.engine.checkpoint import ROTARY, CheckpointMaker, ModelSizes
from benchmarks.engine.locality import kept_share, noise_for
from benchmarks.engine.reference_indexer import ReferenceIndexer

SIZES = ModelSizes(
    layers=2, hidden=256, experts=16, expert_size=64, query_rank=64, latent=32, top_k=128, vocabulary=4096
)
POSITIONS = 2048


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    maker = CheckpointMaker(SIZES, "cpu")
    maker.write(directory)
    return maker, directory


def indexer(directory, seed):
    return ReferenceIndexer(directory, SIZES.layers, ROTARY, SIZES.top_k, POSITIONS, steps=24, seed=seed)


@pytest.mark.parametrize("locality", [0.5, 0.8, 0.95, 0.99])
def test_locality_is_the_one_asked_for_on_another_history(checkpoint, tmp_path, locality):
    maker, directory = checkpoint
    noise = maker.write_locality(tmp_path, locality, indexer(directory, seed=0))
    found = statistics.fmean(indexer(directory, seed=1).locality(maker.head_weights(noise)))
    assert found == pytest.approx(locality, abs=0.5 * (1 - locality))


def test_hidden_states_have_unit_variance_and_the_router_does_not_see_what_tokens_share(checkpoint):
    _, directory = checkpoint
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float()
    assert embedding.pow(2).mean(-1).numpy() == pytest.approx(1.0, abs=0.01)
    logits = embedding @ tensors["model.layers.1.mlp.gate.weight"].float().T
    used = torch.bincount(logits.topk(2).indices.flatten(), minlength=SIZES.experts)
    assert used.min() > 0.5 * used.float().mean()  # as many tokens as there are: nearly even


def test_impossible_locality_is_refused():
    with pytest.raises(ValueError, match=r"0\.05 is not between 0\.1"):
        noise_for(0.05, lambda noise: 1.0 if noise < 1 else 0.1)


def test_kept_share_counts_positions_not_order():
    before, after = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[4, 3, 9, 8]])
    assert kept_share(before, after, 10) == 0.5


class Cache:
    """A device buffer as SGLang's swap-in kernel keeps it: slots in order of use, the oldest reused first."""

    def __init__(self, size, layers, requests):
        self.tokens = torch.arange(size, dtype=torch.int32).repeat(layers, requests, 1)
        self.order = torch.arange(size, dtype=torch.int16).repeat(layers, requests, 1)

    def use(self, selected):
        """Selected positions, by layer and request; returns the misses."""
        misses = 0
        for layer, request in np.ndindex(*selected.shape[:2]):
            tokens, order = self.tokens[layer, request], self.order[layer, request]
            wanted = set(selected[layer, request].tolist())
            hit = [slot for slot in order.tolist() if tokens[slot].item() in wanted]
            free = [slot for slot in order.tolist() if slot not in hit]
            missing = sorted(wanted - {tokens[slot].item() for slot in hit})
            loaded, stale = free[: len(missing)], free[len(missing) :]
            for slot, token in zip(loaded, missing, strict=True):
                tokens[slot] = token
            self.order[layer, request] = torch.tensor(stale + loaded + hit, dtype=torch.int16)
            misses += len(missing)
        return misses


@pytest.mark.parametrize("buffer", [16, 40])
def test_observer_counts_misses_and_locality(tmp_path, buffer):
    layers, requests, top_k, steps = 2, 3, 16, observe.STEPS
    cache, rng = Cache(buffer, layers, requests), np.random.default_rng(0)
    selected = np.stack([[rng.permutation(100)[:top_k] for _ in range(requests)] for _ in range(layers)])
    coordinator = SimpleNamespace(
        req_device_buffer_tokens=torch.cat([cache.tokens, torch.zeros(layers, requests, 1, dtype=torch.int32)], -1),
        lru_slots=cache.order,
        top_k=top_k,
    )
    runner = SimpleNamespace(
        hisparse_coordinator=coordinator,
        token_to_kv_pool=SimpleNamespace(kv_buffer=[torch.zeros(4)]),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4)),
        max_total_num_tokens=7,
    )
    batch = SimpleNamespace(
        req_pool_indices=torch.arange(requests),
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        batch_size=requests,
    )
    observer = observe.Observer(tmp_path)
    observer._pools_written = True
    observe.ask(tmp_path)
    cache.use(selected)
    misses = kept = 0
    for step in range(steps + 1):
        coordinator.req_device_buffer_tokens[..., :buffer] = cache.tokens
        observer.before_forward(runner, batch)
        if step == steps:
            break
        before = selected.copy()
        for layer, request in np.ndindex(layers, requests):  # four positions change
            rest = np.setdiff1d(np.arange(100), selected[layer, request])
            selected[layer, request, rng.permutation(top_k)[:4]] = rng.permutation(rest)[:4]
        misses += cache.use(selected)
        kept += np.mean(
            [np.isin(a, b).mean() for a, b in zip(selected.reshape(-1, top_k), before.reshape(-1, top_k), strict=True)]
        )
    found = observe.answer(tmp_path, 0.1)
    assert found["locality"] == pytest.approx(kept / steps) == 0.75
    assert found["misses_per_layer"] == pytest.approx(misses / steps / layers / requests)
    assert found["running"] == requests
    if buffer == top_k:
        assert found["hit_share"] == pytest.approx(0.75)  # nothing older than the last step is kept
    else:
        assert 0.75 < found["hit_share"] < 1


def test_no_observation_without_decode_steps(tmp_path):
    observe.ask(tmp_path)
    assert observe.answer(tmp_path, 0.0) is None
    assert not list(tmp_path.iterdir())


def test_an_observer_that_does_not_know_the_server_says_so_and_lets_it_run(tmp_path):
    observe.Observer(tmp_path).before_forward(SimpleNamespace(), SimpleNamespace())
    for _ in range(2):
        observe.ask(tmp_path)
        assert "AttributeError" in observe.answer(tmp_path, 0.0)["error"]
