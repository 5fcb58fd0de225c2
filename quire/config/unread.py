"""Keys of a config.json that nothing reads, and that may therefore mean something that is not done. Torch-free.

Owns which keys are known to change nothing that is computed. Does not own what is read (`families`).
"""

from __future__ import annotations

import pathlib
import re
from typing import Final

from quire.config.fields import Watched, read_object
from quire.config.model import parse_arch

HARMLESS: Final = re.compile(
    r"_|architectures$|model_type$|auto_map$|torch_dtype$|.*_token_id$"  # what files and tokens are called
    r"|.*dropout|.*_pdrop$|layerdrop$|initializer|init_|.*_jitter_noise$|router_aux_loss|z_loss"  # of training
    r"|rescale_prenorm_residual$|time_step_(min|max|floor|rank)$"  # of what parameters began as
    r"|output_|return_dict|problem_type$|.*label|summary_|num_logits_to_keep$|classifier|is_decoder$"  # of other tasks
    r"|use_cache$|cache_implementation$|transformers_version$|.*chunk_size|pretraining_tp$|seq_length$"  # how, not what
    r"|tokenizer_class$|name_or_path$|task_specific_params$|attn_implementation$|reorder_and_upcast_attn$"
)


def unread_keys(folder: pathlib.Path) -> list[str]:
    """Names, without the harmless ones. Raises ConfigError as `read_arch`."""
    config = Watched(read_object(folder / "config.json"))
    parse_arch(config)
    return sorted(name for name in config.keys() - config.asked if not HARMLESS.match(name))
