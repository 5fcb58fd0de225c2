"""Writes merged_arrays.safetensors, and merged_experts.safetensors: small models, adapters of them as PEFT saves them,
and what its `merge_and_unload` makes of both.

    pip install peft==0.21.2    # beside torch and transformers
    python tests/cpu/compute/adapters/write_merged_arrays.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
LLAMA: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("Llama", LLAMA, {"use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}),
    "dora-rs": ("Llama", LLAMA, {
        "use_dora": True, "use_rslora": True, "target_modules": ["o_proj", "gate_proj", "lm_head"],
        "rank_pattern": {"gate_proj": 2}, "alpha_pattern": {"layers.1.self_attn.o_proj": 3},
    }),
    "lora": ("Llama", LLAMA, {"target_modules": "all-linear"}),
    "dora-transposed": ("GPT2", GPT2, {"use_dora": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
}  # fmt: skip
"""Name → (family, configuration of the model, and of the adapter)."""
MOE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ONE: dict[str, Any] = {**MOE, "num_hidden_layers": 1}
EXPERTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "both": ("Mixtral", {**MOE, "intermediate_size": 24, "num_local_experts": 4}, {
        "target_modules": ["q_proj"], "target_parameters": BOTH, "use_rslora": True,
    }),
    "transposed": ("GptOss", {**ONE, "intermediate_size": 16, "num_local_experts": 3, "sliding_window": 8}, {
        "target_modules": [], "target_parameters": BOTH, "rank_pattern": {"experts.down_proj": 2},
    }),
    "down": ("Qwen3Moe", {**ONE, "moe_intermediate_size": 24, "num_experts": 4, "intermediate_size": 24}, {
        "target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"], "alpha_pattern": {"down_proj": 9},
    }),
}  # fmt: skip


def write(target: str, cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    tensors, said = dict[str, torch.Tensor](), dict[str, str]()
    for case, (family, fields, config) in cases.items():
        torch.manual_seed(len(tensors))
        base = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**fields)
        )
        tensors |= {f"{case}|base|{name}": one.clone() for name, one in base.state_dict().items()}
        tied = base.config.tie_word_embeddings
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **config))
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "lora_" in name:
                    one.copy_(torch.rand_like(one) + 0.5 if "magnitude" in name else torch.randn_like(one) * 0.3)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            adapter = load_file(f"{folder}/adapter_model.safetensors")
            text = json.loads(pathlib.Path(folder, "adapter_config.json").read_text())
        tensors |= {f"{case}|adapter|{name}": one for name, one in adapter.items()}
        merged = model.merge_and_unload()
        tensors |= {f"{case}|merged|{name}": one.clone() for name, one in merged.state_dict().items()}
        said[case] = json.dumps({"adapter": text, "model": base.config.to_dict(), "tied": tied})
    save_file({name: one.contiguous() for name, one in tensors.items()}, HERE / f"{target}.safetensors", said)


if __name__ == "__main__":
    write("merged_arrays", CASES)
    write("merged_experts", EXPERTS)
