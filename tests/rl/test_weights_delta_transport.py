"""What is sent to a receiver: what the two sides do not have in common, told by whose a version is and its number."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from rl.weights.copies import Copies
from rl.weights.delta_transport import DeltaTransport, Held
from rl.weights.receiver import make_app

ENGINE = SimpleNamespace(url="http://engine")


@pytest.fixture
def held(tmp_path):
    """A version of weights as a directory, by its number; each has values of its own."""

    def make(version):
        directory = tmp_path / f"sent-{version}"
        directory.mkdir()
        weights = torch.zeros(4000, dtype=torch.bfloat16)
        weights[version] = 1.0
        save_file({"w": weights}, directory / "model.safetensors")
        return Held(version, directory)

    return make


def send(tmp_path, model, *transports):
    """To one receiver, that was started with a model; how each was sent, and the weights that the engine would load."""

    async def run():
        runner = web.AppRunner(make_app(Copies(tmp_path / "copies", model.directory, model.version)))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        try:
            found = []
            for sender, new, base in transports:
                receivers = {ENGINE.url: f"http://127.0.0.1:{port}"}
                transport = DeltaTransport(new, base, receivers, tmp_path / "work", 30, sender)
                await transport.prepare([ENGINE], new.version)
                sent = transport.sent[ENGINE.url]
                weights = load_file(f"{sent.directory}/model.safetensors")["w"]
                found.append((sent.how, weights.nonzero().flatten().tolist()))
            return found
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_changes_are_sent_where_both_have_the_base_and_nothing_twice(tmp_path, held):
    zero, one, two = held(10), held(11), held(12)
    sent = send(tmp_path, zero, ("run", one, None), ("run", two, one), ("run", two, one))
    assert sent == [("all", [11]), ("patch", [12]), ("nothing", [12])]


def test_a_run_s_first_version_is_not_taken_for_the_model_that_the_receiver_was_started_with(tmp_path, held):
    """After SFT from fresh weights version 0 is another model than the servers were started with."""
    fresh, trained = held(0), Held(0, held(1).directory)
    assert send(tmp_path, fresh, ("run", trained, None)) == [("all", [1])]


def test_a_version_of_an_earlier_run_is_not_taken_for_this_one_s(tmp_path, held):
    model, theirs, ours = held(0), Held(5, held(1).directory), Held(5, held(2).directory)
    sent = send(tmp_path, model, ("before", theirs, None), ("now", ours, None), ("before", theirs, None))
    assert sent == [("all", [1]), ("all", [2]), ("all", [1])]


def test_a_base_that_either_side_lost_is_not_asked_for(tmp_path, held):
    model, gone, new = held(0), held(3), held(4)
    assert send(tmp_path, model, ("run", new, gone)) == [("all", [4])]
    for file in gone.directory.iterdir():
        file.unlink()
    gone.directory.rmdir()
    newer = held(5)
    other = send(tmp_path, model, ("run", Held(3, new.directory), None), ("run", newer, gone))
    assert other == [("all", [4]), ("all", [5])]
