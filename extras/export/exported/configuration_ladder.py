"""The configuration of a Llama-type model whose residual wiring is a choice (Ladder Residual, arXiv 2501.06589).

ladder-fast copies this file and modeling_ladder.py into the folders that it exports; they need torch and transformers.
"""

import re

from transformers import Qwen3Config, SeedOssConfig


class LadderConfig(SeedOssConfig):
    """What SeedOssConfig holds (Llama's, with any head_dim and a key for each kind of bias), and:

    ladder_layers: the layers whose sublayers read the residual stream one sublayer stale: the last n, or a list.
    parallel_blocks: attention and MLP of a block read the same normed input; such a block has one norm.
    wiring: instead of these two, any other wiring as ladder-fast writes it, NAME[-STALE][:LAYERS][/LANES].
    qk_norm: Qwen3's norms of queries and keys. no_rope_layers: a 0 for each layer without rotary embeddings, else 1.
    """

    model_type = "ladder_residual"
    base_model_tp_plan = Qwen3Config.base_model_tp_plan  # Llama's, and the norms of queries and keys
    base_model_pp_plan = None  # what goes from layer to layer is more than one tensor

    attention_bias: bool = False  # of q, k and v; attention_out_bias is that of o, mlp_bias of all three of the MLP
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    ladder_layers: int | list[int] = 0
    parallel_blocks: bool = False
    wiring: str | None = None
    qk_norm: bool = False
    no_rope_layers: list[int] | None = None

    @property
    def parsed(self):
        """Return the wiring's name without -ladder, how stale it is, its layers (or period), its lanes."""
        n = self.num_hidden_layers
        if self.wiring is None:
            name, stale, lanes = "parallel" if self.parallel_blocks else "ladder", bool(self.ladder_layers), None
            layers = self.ladder_layers or n
        else:
            form = r"([a-z]+)(-ladder)?(?:-(\d+))?(?::([\d,-]+))?(?:/(\d+))?"
            name, ladder, stale, text, lanes = re.fullmatch(form, self.wiring).groups()
            stale = stale or bool(ladder) or name in ("ladder", "delayed")
            text = text or {"pair": f"{n - n % 2}", "desync": "2"}.get(name, f"{n}")
            numbers = [int(number) for number in re.findall(r"\d+", text)]
            layers = numbers if "," in text else numbers[0]
            if "-" in text:
                layers = range(numbers[0], numbers[1] + 1)
        if isinstance(layers, int) and name != "desync":
            layers = range(n - layers, n)
        return name, int(stale), layers, int(lanes or 0)
