"""See the package."""

from __future__ import annotations

import sys

from benchmarks.logprob_gap.run import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
