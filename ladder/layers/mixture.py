"""The MLP of a mixture of experts: a router, the experts, perhaps a shared one that every token takes.

Shape letters: B batch, S sequence, D dim, E experts, k experts of a token.
"""

import torch.nn as nn

from ladder.errors import InputError
from ladder.layers.experts import Experts
from ladder.layers.farskip import APART
from model import FeedForward


class MoE(nn.Module):
    """A mixture of experts: each token takes k of E MLPs, which a router chooses, and a shared one if there is one.

    Each rank holds a part of the neurons of every expert. The router, on every rank, gets the same x and so chooses the
    same experts, since a collective returns the same bits on all ranks.
    """

    def __init__(self, config):
        super().__init__()
        dim, E = config.dim, config.n_experts
        self.k, self.renormalize = config.experts_per_token, config.renormalize_experts
        self.router = nn.Linear(dim, E, bias=False)
        self.experts = Experts(dim, config.expert_size, E)
        self.shared_expert = FeedForward(dim, config.shared_expert_size) if config.shared_expert_size else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x, apart=False):
        """Return the partial (B, S, D) of x (B, S, D); if apart, (the chosen experts', the shared one's or None)."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.k)  # (B * S, k)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        y = self.experts(tokens, chosen)  # (B * S, k, D)
        y = (y * weights[..., None].type_as(y)).unflatten(0, x.shape[:-1]).sum(-2)
        if self.shared_expert is None:
            return (y, None) if apart else y
        shared = self.shared_expert(x)
        if self.shared_gate is not None:
            shared = self.shared_gate(x).sigmoid() * shared
        return (y, shared) if apart else y + shared


def check(config):
    """Raise InputError for settings that make no mixture."""
    c, wiring = config, config.named_wiring
    if not c.expert_size:
        raise InputError("a model with n_experts needs an expert_size")
    if c.shared_expert_gate and not c.shared_expert_size:
        raise InputError("shared_expert_gate needs a shared_expert_size")
    if c.activation != "silu" or c.mlp_bias:
        what = "mlp_bias" if c.mlp_bias else f"activation {c.activation}"
        raise InputError(f"{what} is not for a mixture of experts")
    if not 1 <= (c.experts_per_token or 0) <= c.n_experts:
        raise InputError(f"experts_per_token is {c.experts_per_token} but must be from 1 to {c.n_experts}")
    if wiring.depends_on_lanes and c.wiring != "upper-bound" or wiring.model:
        why = "ranks with streams of their own would choose different experts"
        raise InputError(f"wiring {c.wiring} is not for mixtures of experts: {why}")
    if c.post_norms and wiring.block_sublayers == APART:
        raise InputError(
            f"wiring {c.wiring} is not for models with post_norms: it reads outputs before they are normed"
        )


def mlps(config):
    """Return {prefix of their matrices' names: neurons} of the MLPs that ranks share out."""
    sizes = {"": config.intermediate_size if config.dense_layers else 0, "experts.": config.expert_size}
    if config.named_wiring.block_sublayers != APART:  # where each rank has the shared expert whole
        sizes["shared_expert."] = config.shared_expert_size
    return {prefix: neurons for prefix, neurons in sizes.items() if neurons}


def chosen_share(config, tokens):
    """Return the share of a layer's experts that so many tokens read, if each chooses evenly and by itself."""
    return 1 - (1 - config.experts_per_token / config.n_experts) ** tokens
