"""The connection pool of every client that speaks to servers of others."""

from __future__ import annotations

import aiohttp

KEEP_ALIVE_S = 2.0
"""An idle connection is used again for so long. uvicorn, and SGLang with it, closes those that were idle for 5 s, and a
request that meets the closing is reset; aiohttp alone would use them for 15 s."""


def pool() -> aiohttp.TCPConnector:
    """As many connections as there are requests: servers queue better than a pool does."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
