"""A random MTP module in the checkpoint of a random model, in each layout; its guesses by transformers' modules."""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

import torch
import torch.nn.functional as F
from family_cases import GLM_MOE, LATENT, OWN_NAMES, random_checkpoint
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

N_LAYERS: Final = 3
CASES: Final[dict[str, dict[str, Any]]] = {
    "deepseek": {
        "family": "Llama", "kind": modeling_llama, "prefix": f"model.layers.{N_LAYERS}.", "join": "eh_proj",
        "norms": ("enorm", "hnorm", "shared_head.norm"), "config": {},
    },
    "mimo": {
        "family": "Qwen2", "kind": modeling_qwen2, "prefix": "model.mtp_layers.0.", "join": "input_proj",
        "norms": ("token_layernorm", "hidden_layernorm", "final_layernorm"),
        "config": OWN_NAMES["mimo"],
    },
    "glm4_moe": {
        "family": "Glm4Moe", "kind": modeling_glm4_moe, "prefix": f"model.layers.{N_LAYERS}.", "join": "eh_proj",
        "norms": ("enorm", "hnorm", "shared_head.norm"), "config": {}, "fields": GLM_MOE, "number": 1,
    },
    "deepseek_v3": {
        "family": "DeepseekV3", "kind": modeling_deepseek_v3, "prefix": f"model.layers.{N_LAYERS}.", "join": "eh_proj",
        "norms": ("enorm", "hnorm", "shared_head.norm"), "config": {}, "fields": LATENT, "number": 1,
    },
}  # fmt: skip


def layer_of(case: str, config: Any) -> Any:
    """A decoder layer of the model's kind."""
    said = CASES[case]
    return getattr(said["kind"], f"{said['family']}DecoderLayer")(config, said.get("number", 0)).float().eval()


def write(folder: pathlib.Path, case: str) -> Oracle:
    """The checkpoint of a model that has a module."""
    said = CASES[case]
    model: Any = random_checkpoint(
        folder, said["family"], num_hidden_layers=N_LAYERS, max_position_embeddings=256, tie_word_embeddings=False,
        **said.get("fields", {}),
    )  # fmt: skip
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(4)
    shapes = {f"{name}.weight": (hidden,) for name in said["norms"]} | {f"{said['join']}.weight": (hidden, 2 * hidden)}
    shapes |= {name: tuple(one.shape) for name, one in layer_of(case, model.config).state_dict().items()}
    module = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and not name.endswith("bias")
        module[name] = 1 + 0.3 * value if is_norm else value * (shape[-1] if len(shape) > 1 else 4) ** -0.5
    add(
        folder,
        {said["prefix"] + name: one for name, one in one_by_one(module).items()},
        num_nextn_predict_layers=1,
        **said["config"],
    )
    return Oracle(case, model, module)


def one_by_one(module: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As checkpoints have experts, of what transformers has in memory."""
    found = {}
    for name, tensor in module.items():
        if tensor.dim() == 3:
            at, _, kind = name.rpartition(".")
            parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
            for expert, own in enumerate(tensor):
                pieces = own.chunk(len(parts))
                found |= {f"{at}.{expert}.{one}.weight": pieces[part].clone() for one, part in parts.items()}
        else:
            found[name] = tensor
    return found


def add(folder: pathlib.Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Into a checkpoint of one file."""
    path = folder / "model.safetensors"
    save_file(load_file(str(path)) | tensors, str(path), metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


class Oracle:
    """Guesses from scratch: no pages, nothing kept, float32."""

    def __init__(self, case: str, model: Any, module: dict[str, torch.Tensor]) -> None:
        self.model, self._case, self._module = model, case, module
        self._layer = layer_of(case, model.config)
        self._layer.load_state_dict({name: module[name] for name in self._layer.state_dict()})

    @torch.no_grad()
    def features(self, tokens: list[int]) -> torch.Tensor:
        """[length, hidden]: the model's last states, before its final norm with MiMo and behind it with DeepSeek."""
        seen: list[torch.Tensor] = []
        inner = self.model.model
        before = inner.norm.register_forward_pre_hook(lambda norm, args: seen.append(args[0][0]))
        states: torch.Tensor = inner(torch.tensor([tokens])).last_hidden_state[0]
        before.remove()
        return seen[0] if self._case == "mimo" else states

    @torch.no_grad()
    def guess(self, tokens: list[int], n: int) -> list[int]:
        """n tokens behind these."""
        embedded_norm, feature_norm, last_norm = CASES[self._case]["norms"]
        known, found = len(tokens), list(tokens)
        hidden = self.model.config.hidden_size
        features = torch.cat(
            (torch.zeros(1, hidden), self.features(tokens[:-1]) if known > 1 else torch.zeros(0, hidden))
        )
        for _ in range(n):
            embedded = self._norm(self.model.get_input_embeddings()(torch.tensor(found)), embedded_norm)
            sides = [embedded, self._norm(features, feature_norm)]
            x = torch.cat(sides[::-1] if self._case == "mimo" else sides, -1)
            x = (x @ self._module[f"{CASES[self._case]['join']}.weight"].T)[None]
            places = torch.arange(len(found))[None]
            angles = self.model.model.rotary_emb(x, places)
            mask = torch.full((len(found), len(found)), float("-inf")).triu(1)[None, None]
            state = self._layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
            state = state[0] if isinstance(state, tuple) else state
            last = self._norm(state.reshape(-1, hidden)[-1:], last_norm)
            found.append(int(self.model.lm_head(last).argmax()))
            features = torch.cat((features, last))
        return found[known:]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._module[f"{name}.weight"], self.model.config.rms_norm_eps)
