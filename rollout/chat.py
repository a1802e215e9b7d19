"""From chat messages to token ids, so that what the model sampled is never tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Message = Mapping[str, str]

_PLACEHOLDER = "\u2063reply\u2063"  # text that no template contains and that survives a template's strip()


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: str | None
    eos_token_id: int | None

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: object) -> str: ...

    def encode(self, text: str, **kwargs: object) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str: ...


class ChatRenderer:
    """Renders conversations of one tokenizer's chat template.

    A follow-up request repeats the conversation as text. Only the text *after* the last reply is tokenised
    (``observation``); the tokens before it are those that were recorded.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template (chat_template in tokenizer_config.json)")
        self.tokenizer = tokenizer
        self._closing: str | None = None

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next reply begins."""
        return self._encode(self._render(messages, generation_prompt=True))

    def observation(self, history: Sequence[Message], new: Sequence[Message], stopped: bool) -> list[int] | None:
        """Token ids between the end of the last reply and the start of the next one.

        Args:
            history: messages so far, ending with the assistant's reply whose tokens are recorded.
            new: the messages after it.
            stopped: whether the recorded reply ends with its stop token (else the template's closing is added).

        Returns:
            None where the template does not render the last reply's text, or not its stop token, so that the caller has
            to begin a new segment. How the template renders earlier replies (some leave out their reasoning) does not
            matter: the record keeps what was sampled.
        """
        marked = [*history[:-1], {**history[-1], "content": _PLACEHOLDER}, *new]
        _, found, rest = self._render(marked, generation_prompt=True).rpartition(_PLACEHOLDER)
        if not found:
            return None
        if stopped:
            eos = self.tokenizer.decode([self._eos()])
            if not rest.startswith(eos):
                return None
            rest = rest[len(eos) :]
        return self._encode(rest)

    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token (tokenizer_config.json), so no reply could end")
        return self.tokenizer.eos_token_id

    def text(self, token_ids: Sequence[int]) -> str:
        """A reply as the client sees it: without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A whole conversation for SFT.

        Returns:
            token ids, and for each whether an assistant wrote it (its closing stop token included).
        """
        token_ids: list[int] = []
        mask: list[bool] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            history = messages[:index]
            if not token_ids:
                context: list[int] | None = self.prompt(history)
            else:
                start = max(i for i in range(index) if messages[i]["role"] == "assistant") + 1
                context = self.observation(messages[:start], messages[start:index], stopped=True)
            if context is None:
                raise ValueError("the chat template rewrites earlier messages: such a conversation can't be trained on")
            reply = [*self._encode(message["content"]), self._eos()]
            token_ids += context + reply
            mask += [False] * len(context) + [True] * len(reply)
        if not token_ids:
            raise ValueError("a conversation without an assistant's message can't be trained on")
        return token_ids, mask
