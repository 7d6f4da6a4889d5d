"""GLM-4-0414 (GLM team 2025): GLM-4 with norms also after attention and MLP."""

from __future__ import annotations

from infer.models.glm import Glm


class Glm4(Glm):
    """The inputs of attention and MLP are normed, and so are their outputs."""

    norms = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
