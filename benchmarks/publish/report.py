"""Rows of a benchmark by name, on disk after each."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


class Report:
    def __init__(self, path: Path | None, deadline: float) -> None:
        """
        Args:
            deadline: of ``time.monotonic``; no row is begun after it.
        """
        self.path, self.deadline = path, deadline
        self.rows: dict[str, Any] = {}

    def put(self, name: str, row: Any) -> None:
        self.rows[name] = row
        print(f"{name}: {json.dumps(row)}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")

    async def run(self, name: str, measure: Callable[[], Awaitable[Any]]) -> None:
        if time.monotonic() > self.deadline:
            self.put(name, {"skipped": "out of time"})
            return
        begin = time.monotonic()
        try:
            row = await measure()
        except Exception:  # noqa: BLE001  (it is written down, and the other rows come)
            row = {"error": traceback.format_exc()[-1500:]}
        self.put(name, row | {"took_seconds": round(time.monotonic() - begin, 2)})
