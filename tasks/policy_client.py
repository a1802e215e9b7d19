"""The policy behind an OpenAI-compatible gateway, asked with the ordinary ``openai`` client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx2
import openai

from tasks.chat import Complete, GatewayError, Reply

MODEL = "policy"
CONNECT_TIMEOUT_S = 10.0


class PolicyClient:
    """One connection pool for all episodes of a server.

    A turn costs about 1.2 ms of CPU here. The aiohttp transport saves a quarter of what the default one takes, and
    ``extra_body`` a third: the client walks every message of ``messages`` through its typed unions, turn after turn.
    """

    def __init__(self, max_connections: int) -> None:
        limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        # The gateway is inside the cluster: a proxy from the environment must not come between.
        self._http = openai.DefaultAioHttpClient(limits=limits, trust_env=False)
        # The key is never checked; without one the client refuses to start.
        self._client = openai.AsyncOpenAI(
            api_key="none", base_url="http://unset.invalid/v1", http_client=self._http, max_retries=0
        )

    def bind(self, gateway_url: str, max_tokens: int, timeout_s: float) -> Complete:
        """The turns of one episode: ``max_tokens`` and ``timeout_s`` (seconds) hold for each of them."""
        timeout = openai.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        completions = self._client.with_options(base_url=gateway_url, timeout=timeout).chat.completions

        async def complete(messages: Sequence[Mapping[str, str]]) -> Reply:
            try:
                completion = await completions.create(
                    model=MODEL, messages=[], max_tokens=max_tokens, extra_body={"messages": messages}
                )
            except openai.BadRequestError as error:
                if error.code == "context_length_exceeded":
                    return Reply("", "length")
                raise GatewayError(f"{gateway_url}: {_describe(error)}") from error
            except openai.OpenAIError as error:
                raise GatewayError(f"{gateway_url}: {_describe(error)}") from error
            return _reply(completion, gateway_url)

        return complete

    async def close(self) -> None:
        await self._client.close()


def _reply(completion: object, gateway_url: str) -> Reply:
    # The client builds its models without checking them: an answer of another shape gives None or misses attributes.
    choices = getattr(completion, "choices", None) or [None]
    message = getattr(choices[0], "message", None)
    content, finish_reason = getattr(message, "content", None), getattr(choices[0], "finish_reason", None)
    if not isinstance(content, str) or not isinstance(finish_reason, str):
        raise GatewayError(f"{gateway_url}: the answer is no chat completion with content and finish_reason")
    return Reply(content, finish_reason)


def _describe(error: openai.OpenAIError) -> str:
    cause: BaseException = error
    if isinstance(error, openai.APIConnectionError):
        # It says "Connection error." or "Request timed out.", for a refused connection too; its first cause knows.
        while cause.__cause__ is not None:
            cause = cause.__cause__
    return f"{type(cause).__name__}: {cause}"
