"""The calls that publishing weights to a running SGLang server needs."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engine.protocol import EngineError
from rollout.engine.sglang_http import SGLangConnection, Timeouts

UPDATE_IS_OPEN = "session is already open"


class SGLangWeights(SGLangConnection):
    """Implements ``rl.weights.transports.WeightTarget``."""

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(url, timeouts)
        self.paused = False
        """Whether we have paused it."""

    async def pause(self) -> None:
        """Stop generating; requests in flight lose their KV cache, are kept, and go on after ``resume``."""
        await self._control("/pause_generation", {"mode": "retract"})
        self.paused = True

    async def resume(self) -> None:
        """Go on generating. A retracted request is prefilled again, by the weights that are there then."""
        await self._control("/continue_generation", {"torch_empty_cache": False})
        self.paused = False

    async def flush(self) -> None:
        """Forget all cached prefixes, and free the device's cached memory (0.5 s: an update flushes by itself, without
        that). SGLang refuses it while requests run; retracted ones do not count."""
        await self._control("/flush_cache", {})

    async def weight_version(self) -> int:
        """The version of the weights that the server says it has."""
        info = await self._call("GET", "/model_info", None, self._timeouts.control_s)
        with self._answer_errors("/model_info"):
            return int(info["weight_version"])

    async def begin_weight_update(self) -> None:
        """Open an update. One that a failed publication left open is closed first."""
        try:
            await self._control("/begin_weight_update", {})
        except EngineError as error:
            if UPDATE_IS_OPEN not in str(error):
                raise
            await self.end_weight_update()
            await self._control("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close the update: what SGLang derives from the weights is made anew."""
        await self._control("/end_weight_update", {})

    async def update_weights_from_tensors(self, payloads: Sequence[str], version: int | None) -> None:
        """Load one bucket, between ``begin_weight_update`` and ``end_weight_update``.

        Args:
            payloads: base64 of SGLang's serialised named tensors, one for each tensor-parallel rank.
            version: the weights' version, with the last bucket, after which all cached prefixes are forgotten; None
                before.
        """
        body = {"serialized_named_tensors": list(payloads), "flush_cache": version is not None}
        await self._control("/update_weights_from_tensor", body | _version_field(version))

    async def update_weights_from_disk(self, directory: str, version: int) -> None:
        """Load an HF directory that the server can read, and forget all cached prefixes. No begin or end around it."""
        await self._control("/update_weights_from_disk", {"model_path": directory} | _version_field(version))


def _version_field(version: int | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": str(version)}
