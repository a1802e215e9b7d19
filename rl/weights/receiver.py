"""A process beside an engine across a slow network: takes patches, keeps copies that the engine loads from memory.

    python -m rl.weights.receiver --model DIRECTORY --copies /dev/shm/atelier-copies --port 8300

    GET  /versions   {"versions": {"3": {"directory": "...", "sender": "..."}}}
    POST /patch      frames of ``rl.weights.delta``; 200 with the directory; 409 where all values are needed

It trusts who can reach its port, as SGLang's own weight calls do.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path

from aiohttp import StreamReader, web

from rl.weights.copies import Copies, Patching
from rl.weights.delta import DeltaError, Head, PartHead, PatchHead, parse_head
from rl.weights.tensor_files import LENGTH

COPIES = web.AppKey("copies", Copies)
LOCK = web.AppKey("lock", asyncio.Lock)


async def versions(request: web.Request) -> web.Response:
    here = request.app[COPIES].versions.items()
    found = {str(version): {"directory": str(copy.directory), "sender": copy.sender} for version, copy in here}
    return web.json_response({"versions": found})


async def take_patch(request: web.Request) -> web.Response:
    """One at a time: a copy is made in one place."""
    copies = request.app[COPIES]
    async with request.app[LOCK]:
        patching: Patching | None = None
        try:
            head = await _head(request.content, PatchHead)
            patching = await asyncio.to_thread(copies.patching, head)
            for _ in range(patching.parts):
                part = await _head(request.content, PartHead)
                body = await request.content.readexactly(part.nbytes)
                await asyncio.to_thread(patching.part, part, body)
            directory = await asyncio.to_thread(copies.add, patching)
        except DeltaError as error:
            return web.json_response({"error": str(error)}, status=409)
        except asyncio.IncompleteReadError as error:
            return web.json_response({"error": f"the patch was cut off: {error}"}, status=400)
        finally:
            if patching is not None:
                await asyncio.to_thread(patching.close)
    return web.json_response({"version": head.version, "directory": str(directory)})


async def _head(stream: StreamReader, kind: type[Head]) -> Head:
    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    return parse_head(await stream.readexactly(length), kind)


def make_app(copies: Copies) -> web.Application:
    app = web.Application()
    app[COPIES] = copies
    app[LOCK] = asyncio.Lock()
    app.add_routes([web.get("/versions", versions), web.post("/patch", take_patch)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="HF directory that the engine was started with")
    parser.add_argument("--version", type=int, default=0, help="version of its weights")
    parser.add_argument("--copies", type=Path, required=True, help="where copies are made, e.g. below /dev/shm")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    try:
        app = make_app(Copies(options.copies, options.model, options.version))
        web.run_app(app, host=options.host, port=options.port, print=None)
    finally:
        shutil.rmtree(options.copies, ignore_errors=True)


if __name__ == "__main__":
    main()
