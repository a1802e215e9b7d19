"""``atelier check-engine URL``: what a server with OpenAI's completions API lacks to serve as a frozen engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rl.commands.exits import EXIT_FAILED
from rollout.engine.conformance import Check, Conformance
from rollout.engine.openai_compatible import OpenAICompatibleEngine
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_http import Timeouts

SUMMARY = "check what a server with OpenAI's API can serve as: evaluation, reference, teacher"
KEY_VARIABLE = "OPENAI_API_KEY"


def main(argv: Sequence[str]) -> int:
    """Print a line a check; 0 where all passed."""
    parser = argparse.ArgumentParser(prog="atelier check-engine", description=SUMMARY)
    parser.add_argument("url", help="of the server, up to and without /v1")
    parser.add_argument("--model", help="what to call the model; the first that the server lists by default")
    parser.add_argument("--prompt", default="5,6,7,8,9,10,11,12", help="token ids of its vocabulary, comma-separated")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    options = parser.parse_args(argv)
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"{options.url}: must be a URL, as in http://HOST:PORT")
    try:
        prompt = [int(token) for token in options.prompt.split(",")]
    except ValueError:
        parser.error(f"--prompt={options.prompt}: must be token ids, as in 5,6,7")
    try:
        checks = asyncio.run(_check(options.url, options.model, prompt, options.timeout))
    except EngineError as error:
        print(f"atelier check-engine: {error}", file=sys.stderr)
        return EXIT_FAILED
    for check in checks:
        print(f"{'has  ' if check.passed else 'LACKS'}  {check.name}: {check.seen}")
    return 0 if all(check.passed for check in checks) else EXIT_FAILED


async def _check(url: str, model: str | None, prompt: list[int], timeout_s: float) -> list[Check]:
    timeouts = Timeouts(request_s=timeout_s)
    # The key is a secret: on a command line every process of the machine could read it.
    async with OpenAICompatibleEngine(url, model or "", timeouts, os.environ.get(KEY_VARIABLE)) as engine:
        if model is None:
            names = await engine.models()
            if not names:
                raise EngineError(f"{url}/v1/models lists none; name it with --model")
            engine.model = names[0]
        return await Conformance(engine, prompt).run()
