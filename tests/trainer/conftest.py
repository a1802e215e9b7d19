import pytest
import torch

from rl.fresh_model import FreshModel, create_model
from rl.trainer.config import OptimizerConfig, TrainerConfig
from rollout.processes import free_port


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny Qwen3 with grouped queries."""
    directory = tmp_path_factory.mktemp("model") / "hf"
    create_model(directory, FreshModel(layers=4, kv_heads=2, initializer_range=0.1), seed=0)
    return directory


@pytest.fixture(scope="session")
def session_worker():
    """The one rank of this process; a process has one process group."""
    from rl.trainer.worker import TrainerWorker

    worker = TrainerWorker(TrainerConfig(optimizer=OptimizerConfig(lr=1e-3)), 0, 1, "127.0.0.1", free_port())
    yield worker
    worker.close()


@pytest.fixture
def worker(session_worker, model_dir):
    """The rank with the tiny model's weights and a fresh optimizer."""
    config = session_worker.config
    session_worker.load_model(model_dir)
    yield session_worker
    session_worker.config = config


@pytest.fixture
def uncompiled():
    """Functions that a compiler would fuse run as they are: on a GPU it takes longer than most tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


class _AtOnce:
    """Failures are shown when they happen: a run on a GPU may be cut off before its summary."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(
                f"\n{report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}"
            )


def pytest_collection_modifyitems(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if torch.cuda.is_available() and terminal is not None and not config.pluginmanager.has_plugin("failures_at_once"):
        config.pluginmanager.register(_AtOnce(terminal), "failures_at_once")
