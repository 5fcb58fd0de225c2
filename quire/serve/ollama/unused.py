"""Fields of Ollama's API that do nothing here: settings of its machine and runner, and samplers that are switched off.

Owns which they are; each that a request sends is noted (`http/ignored.py`), so that nothing is dropped unseen. Does not
own values that would change the answer: they are refused where they are read (`input.py`).
"""

from __future__ import annotations

from quire.serve.http.ignored import IgnoredParams
from quire.serve.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
)

Body = OllamaChatRequest | OllamaGenerateRequest | OllamaEmbedRequest | OllamaEmbeddingsRequest

_OPTIONS = """num_ctx num_keep num_batch num_gpu main_gpu num_thread draft_num_predict numa low_vram f16_kv use_mmap
    use_mlock penalize_newline mirostat mirostat_tau mirostat_eta typical_p tfs_z logits_all vocab_only
    embedding_only"""
UNUSED_OPTIONS = tuple(_OPTIONS.split())
"""Those of which any value that is not refused does nothing. `num_ctx`: the context is the server's."""
_FIELDS = "keep_alive suffix template context images width height steps"
_CUTTING = "truncate shift"
"""What is too long is refused whatever they say; /api/embed does cut."""


def note_unused(body: Body, ignored: IgnoredParams) -> None:
    """Note what does nothing in a body. Raises a 400 Refusal in strict mode."""
    is_generating = isinstance(body, OllamaChatRequest | OllamaGenerateRequest)
    for name in (_FIELDS + f" {_CUTTING}" * is_generating).split():
        if getattr(body, name, None) is not None:
            ignored.note(name)
    if body.options is None:
        return
    names = UNUSED_OPTIONS if is_generating else OllamaOptions.__struct_fields__
    for name in names:
        if getattr(body.options, name) is not None:
            ignored.note(f"options.{name}")
    if is_generating and body.options.repeat_last_n not in (None, 0, -1):
        ignored.note("options.repeat_last_n")


def note_show(body: OllamaShowRequest, ignored: IgnoredParams) -> None:
    """The same for /api/show: empty overrides, and the tensors that `verbose` asks for."""
    for name in ("system", "template", "options", "verbose"):
        if getattr(body, name) is not None:
            ignored.note(name)
