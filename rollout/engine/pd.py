"""Requests to prefill and decode servers apart, as SGLang pairs them.

Both servers get the same request. It names the prefill server's bootstrap address, where the decode server asks for the
KV cache, and a room, by which the two find each other; the decode server generates. (Read in SGLang 0.5.23's
``disaggregation`` and in sglang-router 0.3.2's ``mini_lb``.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ROOMS = 2**63 - 1


@dataclass(frozen=True)
class Rendezvous:
    """Where the two servers of one request meet."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, Any]:
        """Of the request to either."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def rendezvous(prefill_url: str, bootstrap_port: int, rng: random.Random) -> Rendezvous:
    """A new one; rooms are drawn so that two gateways do not meet in one."""
    host = urlsplit(prefill_url).hostname
    if host is None:
        raise ValueError(f"{prefill_url!r} names no host")
    return Rendezvous(host, bootstrap_port, rng.randrange(ROOMS))
