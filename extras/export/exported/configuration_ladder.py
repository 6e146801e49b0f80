"""The configuration of a Llama-type model whose residual wiring is a choice (Ladder Residual, arXiv 2501.06589).

ladder-fast copies this file and modeling_ladder.py into the folders that it exports; they need torch and transformers.
"""

from transformers import Qwen3Config, SeedOssConfig


class LadderConfig(SeedOssConfig):
    """What SeedOssConfig holds (Llama's, with any head_dim and a key for each kind of bias), and:

    wiring: as ladder-fast writes it, NAME[-STALE][:LAYERS]; the next three say the same.
    wired_layers: the layers that are so. The others are standard.
    block: "parallel" (attention and MLP read the same normed input), "pair" (so do two neighbouring layers) or
    "standard". stale: how many sublayers stale the residual stream is that these layers read.
    qk_norm: Qwen3's norms of queries and keys. no_rope_layers: a 0 for each layer without rotary embeddings, else 1.
    """

    model_type = "ladder_residual"
    base_model_tp_plan = Qwen3Config.base_model_tp_plan  # Llama's, and the norms of queries and keys
    base_model_pp_plan = None  # what goes from layer to layer is more than one tensor

    attention_bias: bool = False  # of q, k and v; attention_out_bias is that of o, mlp_bias of all three of the MLP
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    wiring: str = "standard"
    wired_layers: list[int] | None = None
    block: str = "standard"
    stale: int = 0
    qk_norm: bool = False
    no_rope_layers: list[int] | None = None
