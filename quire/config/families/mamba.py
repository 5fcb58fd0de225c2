"""Mamba-2: layers of the mixer alone."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.fields import Fields
from quire.config.layers import LayerSpec
from quire.config.mamba_fields import mamba
from quire.config.model_fields import ModelFields
from quire.config.no_ffn import NoFfnSpec

CONTEXT: Final = 1 << 17
"""Tokens; a Mamba states none. A longer one only costs a larger table of tokens."""
LAYER: Final = "backbone.layers.{}."
NAMES: Final = {
    "backbone.embeddings": "model.embed_tokens",
    "backbone.norm_f": "model.norm",
    LAYER + "norm": "input_layernorm",
    LAYER + "mixer": "mixer",
    **{LAYER + "mixer." + name: "mixer." + name for name in ("in_proj", "conv1d", "norm", "out_proj")},
}


def mamba2(config: ModelFields) -> ModelArch:
    norm = config.rms("layer_norm_epsilon", 1e-5)
    config.only("hidden_act", "silu")
    mixer = mamba(
        config, heads="num_heads", head_dim="head_dim", groups="n_groups", state="state_size", kernel="conv_kernel",
        expand="expand", bias="use_bias", conv_bias="use_conv_bias", defaults=(128, 8, 128), size=64, eps=norm.eps,
    )  # fmt: skip
    layer = LayerSpec(mixer=mixer, ffn=NoFfnSpec(), norm=norm)
    wide = config.flag("residual_in_fp32", True)
    return config.model([layer] * config.n_layers, norm, max_position=CONTEXT, float32_stream=wide)


def of_authors(config: Fields) -> str:
    """See `Family.other_layout`: that of mamba_ssm, the authors' own library."""
    if "ssm_cfg" not in config and not {"d_model", "n_layer"} <= config.values.keys():
        return ""
    kind = config.values.get("ssm_cfg")
    layout = "in the layout of the mamba_ssm library (ssm_cfg, d_model, n_layer), which is not read"
    if not isinstance(kind, dict) or kind.get("layer") != "Mamba2":
        return f"this is a Mamba {layout}: Quire runs Mamba-2, and only as transformers saves it"
    return (
        f"this is a Mamba-2 {layout}: take the checkpoint that was converted for transformers (its name often ends in"
        " -hf), or convert it with transformers' models/mamba2/convert_mamba2_ssm_checkpoint_to_pytorch.py"
    )


FAMILIES: Final = (
    Family(
        name="mamba2", architecture="Mamba2ForCausalLM", model_type="mamba2", describe=mamba2, names=NAMES,
        other_layout=of_authors,
    ),
)  # fmt: skip
