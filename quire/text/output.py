"""The text of one sequence as it grows: detokenizer and stop strings together, for `engine/output_processor`.

Invariants: the pieces join to the whole text, however the tokens were grouped; after a stop string nothing follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.sampling import SamplingParams
from quire.text.detokenizer import Detokenizer
from quire.text.stop import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """stops: those of `params`, shared by the sequences of a request; None makes them."""
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(stops or params.stop, params.include_stop_str_in_output) if params.stop else None
        self._n_unchecked = params.min_tokens if params.stop else 0
        """Tokens whose text may contain stop strings, because `min_tokens` is not reached."""
        self._ended = False

    def feed(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        """(new text, the stop string if it ended the sequence).

        finished: these are the last tokens; what was held back comes out. After the end all calls return ("", None).
        """
        if self._ended:
            return "", None
        unchecked = ""
        if self._n_unchecked:
            unchecked = self._detokenizer.feed(token_ids[: self._n_unchecked])
            n_taken = min(self._n_unchecked, len(token_ids))
            token_ids = token_ids[n_taken:]
            self._n_unchecked -= n_taken
        text = self._detokenizer.feed(token_ids)
        if finished:
            text += self._detokenizer.flush()
        self._ended = finished
        if self._matcher is None:
            return text, None
        text, stop = self._matcher.feed(text)
        if stop is not None:
            self._ended = True
        elif finished:
            text += self._matcher.flush()
        return unchecked + text, stop
