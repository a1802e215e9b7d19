"""Which way weights go to the engines, from where these run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["disk", "tensors", "ipc", "collective", "delta"]
Wanted = Literal["auto", "disk", "tensors", "ipc", "collective", "delta"]


@dataclass(frozen=True)
class Topology:
    """Where trainer and engines run."""

    device: Literal["cpu", "cuda"]
    """Of the engines."""
    colocated: bool
    """Every GPU of an engine is a trainer rank's, too."""
    one_machine: bool
    """Engines read the trainer's files."""
    receivers: bool
    """Beside the engines run receivers of patches: they are across a slow network."""


@dataclass(frozen=True)
class Choice:
    way: Way
    why: str


def choose(wanted: Wanted, topology: Topology) -> Choice:
    """
    Raises:
        ValueError: the way that is wanted cannot be gone; the message says what can.
    """
    if wanted == "auto":
        return _automatic(topology)
    if wanted == "ipc" and topology.device == "cuda" and not topology.colocated:
        raise ValueError(
            "publish.transport=ipc needs every engine on a trainer's GPU (cluster.colocated=true); collective serves "
            "engines on GPUs of their own"
        )
    if wanted == "ipc" and not topology.one_machine:
        raise ValueError("publish.transport=ipc needs trainer and engines on one machine; collective serves several")
    if wanted == "collective" and topology.device == "cuda" and topology.colocated:
        raise ValueError(
            "publish.transport=collective: NCCL does not join two processes on one GPU (cluster.colocated=true); take "
            "ipc"
        )
    if wanted == "delta" and not (topology.receivers or topology.one_machine):
        raise ValueError(
            "publish.transport=delta needs a receiver beside every engine: start `python -m rl.weights.receiver` there "
            "and name it in publish.receivers"
        )
    return Choice(wanted, "publish.transport says so")


def _automatic(topology: Topology) -> Choice:
    if topology.receivers:
        return Choice("delta", "publish.receivers names receivers, so the engines are across a slow network")
    if topology.device == "cuda" and topology.colocated:
        return Choice("ipc", "engines and trainer share GPUs, so nothing leaves the device")
    if topology.device == "cuda":
        return Choice("collective", "engines have GPUs of their own, which NCCL reaches")
    if topology.one_machine:
        return Choice("disk", "engines on this machine's CPU read the trainer's files in shared memory")
    return Choice("tensors", "engines on other machines' CPUs are reached by HTTP alone")
