"""What belongs to a server (its GPUs, its receiver) is found by the server, whoever serves at the moment."""

import asyncio
from types import SimpleNamespace

import pytest

from rl.compose import compose_config
from rl.config import ConfigError, check
from rl.weights import updates
from rl.weights.updates import OfServers
from rollout.engine.config import EngineConfig
from rollout.engine.launch import server_specs
from rollout.processes import ProcessRegistry


class Fleet:
    """Servers that run, by URL; ``engines`` are those that take requests."""

    def __init__(self, config, serving):
        self.specs = {f"http://{spec.name}": spec for spec in server_specs(config)}
        self.engines = [SimpleNamespace(url=url) for url in serving]


def config_of(receivers=(), **engine):
    publish = SimpleNamespace(receivers=list(receivers))
    return SimpleNamespace(engine=EngineConfig(context_length=128, **engine), publish=publish)


def test_gpus_are_each_server_s_own_while_one_is_suspect(monkeypatch):
    monkeypatch.setattr(updates, "_gpu_ids", lambda: list("abcdef"))
    config = config_of(servers=3, tensor_parallel=2, device="cuda")
    devices = asyncio.run(updates._devices(config, Fleet(config.engine, serving=["http://engine-2"])))
    assert dict(devices) == {
        "http://engine-0": ["a", "b"],
        "http://engine-1": ["c", "d"],
        "http://engine-2": ["e", "f"],
    }


def test_receivers_are_each_server_s_own_while_one_is_suspect(tmp_path):
    config = config_of(["http://r0", "http://r1"], servers=2)
    fleet = Fleet(config.engine, serving=["http://engine-1"])
    receivers = asyncio.run(updates._receivers(config, fleet, tmp_path, tmp_path, None, tmp_path))
    assert receivers["http://engine-1"] == "http://r1"
    assert receivers["http://engine-0"] == "http://r0"


def test_copies_of_receivers_that_are_started_here_lie_where_a_killed_run_leaves_nothing_for_long(tmp_path):
    """In the publisher's folder, which the next run removes: they are as large as the weights, in memory."""
    config, model, kept = config_of(servers=2), tmp_path / "model", tmp_path / "kept"
    model.mkdir()
    kept.mkdir()
    fleet = Fleet(config.engine, serving=[])
    lines = []

    class Seen(ProcessRegistry):
        def start(self, name, command, *arguments, **options):
            lines.append(command)
            return super().start(name, command, *arguments, **options)

    with Seen() as registry:
        asyncio.run(updates._receivers(config, fleet, model, kept, registry, tmp_path))
    assert [line[line.index("--copies") + 1] for line in lines] == [f"{kept}/receiver-0", f"{kept}/receiver-1"]


def test_a_server_that_is_started_again_elsewhere_keeps_what_is_its_own():
    fleet = Fleet(EngineConfig(context_length=128, servers=2), serving=[])
    receivers = OfServers(fleet, ["first", "second"])
    fleet.specs["http://elsewhere"] = fleet.specs.pop("http://engine-1")
    assert receivers["http://elsewhere"] == "second"
    assert "http://engine-1" not in receivers
    with pytest.raises(KeyError):
        receivers["http://engine-1"]
    assert len(receivers) == 2


def test_every_server_of_a_pair_has_its_receiver():
    """Also those that only prefill, whose weights are published, too."""
    pair = ["+stage=agent_rl", "cluster=gpu", "engine=pd_hisparse", "engine.context_length=256"]
    pair.append("publish.directory=/shared")
    servers = len(server_specs(check(compose_config(pair)).engine))
    urls = [f"http://r{number}" for number in range(servers)]
    assert servers > 1
    assert check(compose_config([*pair, f"publish.receivers=[{','.join(urls)}]"]))
    with pytest.raises(ConfigError, match=f"names {servers - 1} receivers for the {servers} servers"):
        check(compose_config([*pair, f"publish.receivers=[{','.join(urls[1:])}]"]))
