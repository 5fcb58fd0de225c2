"""dspy: a call, a prediction whose fields are parsed out of the answer, the same streamed, and native tools."""

from __future__ import annotations

from typing import Any

import dspy
from client import KEY, MODEL, SUM, V1, give


def model(**fields: Any) -> Any:
    where = {"api_base": V1, "api_key": KEY, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{MODEL}", temperature=0, max_tokens=200, **where, **fields)


lm = model()
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
answer = lm(SUM)[0]
predicted = dspy.Predict("question -> answer: str")(question=SUM)
listener = dspy.streaming.StreamListener(signature_field_name="answer")
stream = dspy.streamify(dspy.Predict("question -> answer: str"), stream_listeners=[listener], async_streaming=False)
chunks = list(stream(question=SUM))
give(
    {
        "chat": answer,
        "n_tokens": lm.history[0]["usage"]["completion_tokens"],
        "predicted": predicted.answer,
        "stream": "".join(one.chunk for one in chunks if isinstance(one, dspy.streaming.StreamResponse)),
        "streamed_answer": chunks[-1].answer,
        "n_pieces": len(chunks),
    }
)
