"""From texts to token ids, off the event loop when it takes long. Owns the threads for text.

Does not own templates or tokenizers (`text/`), nor how work is shared out to threads (`http/threads.py`).
Invariant: a text that cannot fit the context is refused before it is tokenized.
"""

from __future__ import annotations

from quire.core.errors import ContextLengthExceeded, InvalidParameter
from quire.engine.async_llm import AsyncLLM
from quire.serve.http.refusal import MISSING, bad_request
from quire.serve.http.threads import LargeWorkLock, WorkThreads
from quire.serve.openai.conversation import Conversation
from quire.text.length import check_length, too_many_tokens, with_context
from quire.text.tokenizer import Tokenizer

SHORT_CHARS = 2048
"""Shorter texts take well under a millisecond and are not worth a thread."""
SEGMENT_CHARS = 64 * 1024
PLAIN_CHARS_PER_TOKEN = 5
"""A text with more characters than this for each token of the context is counted in segments first: few fit."""
DECODED_TOKENS = 4096
"""Tokens that are decoded in one call, which keeps the interpreter for some milliseconds."""
DECODE_CONTEXT = 8
"""Tokens before these that are decoded with them, for decoders that look at neighbours."""


class PromptMaker:
    """Tokenizes and renders for one loaded model."""

    def __init__(self, llm: AsyncLLM, lock: LargeWorkLock) -> None:
        self._llm = llm
        self._threads = WorkThreads("quire-text", lock)

    def close(self) -> None:
        """Drop waiting work."""
        self._threads.close()

    async def encode(
        self, texts: list[str], *, add_special_tokens: bool, param: str, most: int | None = None
    ) -> list[list[int]]:
        """Token ids of texts, each at most `most` tokens long (None: what the context holds, less one for an answer).

        Raises Refusal without a tokenizer, ContextLengthExceeded when a text is too long, or QueueFull when texts pile
        up.
        """
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise bad_request("This server runs without a tokenizer: send token ids.", param)
        for text in texts:
            check_length(len(text), self._llm.max_model_len, param)

        limit = self._llm.max_model_len - 1 if most is None else most

        def work() -> list[list[int]]:
            try:
                for text in texts:
                    check_tokens(tokenizer, text, limit)
                return [tokenizer.encode(text, add_special_tokens=add_special_tokens, most=limit) for text in texts]
            except ContextLengthExceeded as error:
                said = error.message if most is not None else with_context(error.message, limit + 1)
                raise ContextLengthExceeded(said, param=param) from None

        return await self._threads.run(work, sum(map(len, texts)), SHORT_CHARS, param)

    async def encode_all(
        self, prompts: list[str | list[int]], *, add_special_tokens: bool | None, param: str
    ) -> list[list[int]]:
        """What `prompts_of` gave, as token ids. add_special_tokens: None means yes."""
        token_ids = [prompt for prompt in prompts if isinstance(prompt, list)]
        if token_ids:
            return token_ids
        special = True if add_special_tokens is None else add_special_tokens
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        return await self.encode(texts, add_special_tokens=special, param=param)

    async def decode(self, sequences: list[list[int]], param: str) -> list[str]:
        """Texts of token ids, special tokens included. Raises Refusal without a tokenizer or for an unknown id."""
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise bad_request("This server runs without a tokenizer.", param)
        width = self._llm.logits_width

        def work() -> list[str]:
            for token_ids in sequences:
                bad = next((token_id for token_id in token_ids if not 0 <= token_id < width), None)
                if bad is not None:
                    raise InvalidParameter(param, bad, f"token ids between 0 and {width - 1}")
            return [decoded(tokenizer, token_ids) for token_ids in sequences]

        return await self._threads.run(work, sum(map(len, sequences)), SHORT_CHARS, param)

    async def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token by itself. Raises Refusal without a tokenizer."""
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise bad_request("This server runs without a tokenizer.", "tokens")

        def work() -> list[str]:
            known = {one: tokenizer.decode([one], skip_special_tokens=False) for one in set(token_ids)}
            return [known[one] for one in token_ids]

        return await self._threads.run(work, len(token_ids), SHORT_CHARS, "tokens")

    async def render(self, conversation: Conversation) -> str:
        """The conversation as one text. A template's own complaint becomes a 400."""
        if self._llm.tokenizer is None:
            raise bad_request("This server runs without a tokenizer: send token ids to /v1/completions.", "messages")
        template = self._llm.chat_template
        if template is None:
            raise bad_request(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
                "messages",
                "no_chat_template",
            )
        check_length(conversation.n_chars, self._llm.max_model_len, "messages")

        def work() -> str:
            return template.render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                kwargs=conversation.kwargs,
            )

        return await self._threads.run(work, conversation.n_chars, SHORT_CHARS, "messages")

    async def encode_conversation(
        self, conversation: Conversation, *, add_special_tokens: bool = False, most: int | None = None
    ) -> list[int]:
        """Token ids of a rendered conversation; the template writes the special tokens itself. most: as in `encode`."""
        text = await self.render(conversation)
        return (await self.encode([text], add_special_tokens=add_special_tokens, param="messages", most=most))[0]


def check_tokens(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Raise ContextLengthExceeded as soon as it is clear that a long text has more than `most` tokens.

    Its segments have a few tokens more than the whole has, so a twentieth more is allowed for.
    """
    if len(text) <= max(SEGMENT_CHARS, most * PLAIN_CHARS_PER_TOKEN):
        return
    n_tokens = 0
    for start in range(0, len(text), SEGMENT_CHARS):
        segment = text[start : start + SEGMENT_CHARS]
        n_tokens += len(tokenizer.encode(segment, add_special_tokens=False, most=4 * SEGMENT_CHARS))
        if n_tokens > most + most // 20 + start // 1000 + 100:
            read = f" in the first {start + len(segment)} of its {len(text)} characters"
            raise ContextLengthExceeded(too_many_tokens(n_tokens, most, read), param="prompt")


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of token ids, special tokens included, some thousand of them at a time."""
    pieces, begin, stop = [], 0, 0
    while stop < len(token_ids):
        stop = min(begin + DECODED_TOKENS, len(token_ids))
        context = token_ids[max(0, begin - DECODE_CONTEXT) : begin]
        text = tokenizer.decode(context + token_ids[begin:stop], skip_special_tokens=False)
        while text.endswith("\ufffd") and begin + DECODED_TOKENS - DECODE_CONTEXT < stop < len(token_ids):
            stop -= 1  # perhaps the beginning of a character: it is left to the next piece
            text = tokenizer.decode(context + token_ids[begin:stop], skip_special_tokens=False)
        known = tokenizer.decode(context, skip_special_tokens=False) if context else ""
        pieces.append(text[len(known) :])
        begin = stop
    return "".join(pieces)


def prompts_of(
    prompt: str | list[str | int | list[int]] | None, param: str, most: int, limit_tokens: int
) -> list[str | list[int]]:
    """The four forms of a prompt as a list: a text, texts, token ids, or lists of token ids. `param`: its field."""
    if prompt is None:
        raise bad_request(f"{param} is missing.", param, MISSING)
    if len(prompt) > max(limit_tokens, most) and not isinstance(prompt, str):
        code = "context_length_exceeded" if isinstance(prompt[0], int) else "invalid_value"
        limit = (
            f"token ids, and {limit_tokens:,} are the most." if isinstance(prompt[0], int) else
            f"entries; one request may have {most:,}."
        )  # fmt: skip
        raise bad_request(f"{param} has {len(prompt):,} {limit}", param, code)
    if isinstance(prompt, str):
        found: list[str | list[int]] = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        found = [[item for item in prompt if isinstance(item, int)]]
    elif any(isinstance(item, int) for item in prompt) or len({type(item) for item in prompt}) > 1:
        raise bad_request(f"{param} mixes texts, token ids and lists of token ids: use one kind.", param)
    else:
        found = [item for item in prompt if not isinstance(item, int)]
    if len(found) > most:
        raise bad_request(f"{param} has {len(found)} entries; one request may have {most}.", param)
    for number, item in enumerate(found):
        if not item:
            which = param if len(found) == 1 else f"{param}[{number}]"
            raise bad_request(f"{which} is empty: give a text, or token ids.", param)
    longest = max((len(item) for item in found if isinstance(item, list)), default=0)
    if longest > limit_tokens:
        raise ContextLengthExceeded(f"{param} has {longest} tokens; the context holds {limit_tokens}", param=param)
    return found
