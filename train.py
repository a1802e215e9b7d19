"""Train: ``python train.py +stage=agent_rl [key=value ...]``. See configs/ for the keys."""

import sys

from rl.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
