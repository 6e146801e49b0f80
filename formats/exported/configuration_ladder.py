"""The configuration of a Llama-type model whose residual wiring is a choice (Ladder Residual, arXiv 2501.06589).

ladder-fast copies this file and modeling_ladder.py into the folders that it exports; they need torch and transformers.
"""

from transformers import Qwen3Config


class LadderConfig(Qwen3Config):
    """What Qwen3Config holds (unlike Llama's it takes any head_dim), and:

    ladder_layers: the layers whose sublayers read the residual stream one sublayer stale: the last n, or a list.
    parallel_blocks: attention and MLP of a block read the same normed input; such a block has one norm.
    attention_bias is about q, k and v, attention_out_bias about o, mlp_bias about all three of the MLP.
    qk_norm: Qwen3's norms of queries and keys. no_rope_layers: a 0 for each layer without rotary embeddings, else 1.
    """

    model_type = "ladder_residual"
    base_model_pp_plan = None  # what goes from layer to layer is more than one tensor

    ladder_layers: int | list[int] = 0
    parallel_blocks: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: list[int] | None = None

    @property
    def stale_layers(self):
        layers, n = self.ladder_layers, self.num_hidden_layers
        return range(n - layers, n) if isinstance(layers, int) else layers
