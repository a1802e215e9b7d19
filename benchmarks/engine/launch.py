"""Start an SGLang server that can be observed: ``python -m benchmarks.engine.launch FOLDER SGLANG_ARGUMENTS...``

SGLang spawns its scheduler, and a spawned process imports this module again under another name: that is where the
observer is put in place. On the CPU, where servers fork, they are started without it (``rollout.engine.cpu_launch``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.engine.observe import Observer
from rollout.engine import cpu_launch

if __name__ == "__mp_main__":
    Observer(Path(sys.argv[1])).install()

if __name__ == "__main__":
    cpu_launch.main(sys.argv[2:])
