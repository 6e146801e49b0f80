"""What attention does to queries and keys, beside their products: norms, rotary embeddings, scales and masks.

Shape letters: model.py.
"""

from typing import NamedTuple

import torch

from ladder.layers import rope_scaling
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT


def rope_frequencies(config):
    """Return the radians per position of each pair of dimensions, (2, R/2) float32, R of a head's dimensions turning.

    The second row is that of layers with a window, if they have another base, or that of long texts in longrope.
    """
    R = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, R, 2, dtype=torch.float32, device="cpu") / R
    frequencies = (1.0 / config.rope_theta**exponents).expand(2, -1)
    if config.rope_scaling:
        frequencies = rope_scaling.scaled(frequencies, config)
    if config.window_rope_theta:
        frequencies = torch.stack((frequencies[0], 1.0 / config.window_rope_theta**exponents))
    return frequencies.contiguous()


def rotate(x, cos, sin):
    """Turn each pair (i, i + R/2) of the first R of the H dimensions of x (B, K, G or 1, S, H) by its angle.

    cos, sin: (B, 1, 1, S, R/2).
    """
    R = 2 * cos.shape[-1]
    # contiguous in this order: one long loop for each head, not S short ones
    a, b, rest = x.float(memory_format=torch.contiguous_format).tensor_split((R // 2, R), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)


def unpaired(weight, head_dim, rotary_dim=None):
    """Return the rows of q or k for rotary embeddings that turn (i, i + R/2) instead of neighbours (2i, 2i + 1)."""
    first, rest = weight.unflatten(0, (-1, head_dim)).tensor_split((rotary_dim or head_dim,), dim=1)
    return torch.cat((first.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), rest), dim=1).flatten(0, 1)


def norm_heads(q, k, q_norm, k_norm, comm=None):
    """Return queries (B, K, G, S, H) and keys (B, K, 1, S, H), normed head by head, or with `comm` all heads together.

    q_norm, k_norm: RMSNorms; those of all heads have a rank's part of the weights. comm: the collectives that sum the
    squares over the ranks, in one all-reduce.
    """
    if comm is None:
        return q_norm(q), k_norm(k)
    (queries,), (keys,) = q_norm.normalized_shape, k_norm.normalized_shape  # of all ranks
    share = q.shape[2] * keys / queries  # of ranks that share a KV head, each adds its share of the keys' squares
    squares = torch.stack([q.float().square().sum((1, 2, 4)), k.float().square().sum((1, 2, 4)) * share])
    sums = comm.wait(comm.start(squares))[:, :, None, None, :, None]  # (2, B, 1, 1, S, 1)

    def normed(x, norm, mean):
        weight = norm.weight.view(x.shape[1], x.shape[2], 1, x.shape[4])
        return (x.float() * (mean + norm.eps).rsqrt()).type_as(x) * weight

    return normed(q, q_norm, sums[0] / queries), normed(k, k_norm, sums[1] / keys)


class AttentionMetadata(NamedTuple):
    """What all attention layers of a forward pass share; they attend to T' keys.

    rope, window_rope: (cos, sin), both (B, 1, 1, S, R/2); the second for layers with a sliding window.
    mask, window_mask: (B, S, T') bool. The keys are the first T' slots of the cache or, without a cache, this pass.
    None: every row starts at position 0, and each token attends to all tokens of this pass up to itself.
    rows (B, 1), positions (B, S): where this pass writes the cache.
    last (B, 1): the last position that linear attention takes in; None: it takes in all.
    """

    rope: tuple
    window_rope: tuple
    mask: torch.Tensor | None
    window_mask: torch.Tensor | None
    rows: torch.Tensor
    positions: torch.Tensor
    comm: object  # the model's collectives: whole_qk_norm sums over the ranks
    query_scale: torch.Tensor | float | None = None  # of queries (B, K, G, S, H)
    last: torch.Tensor | None = None


def attention_metadata(model, positions, keys=None, max_length=None, last=None, mask=None):
    """Return the AttentionMetadata of a model.Transformer for tokens at these positions (B, S).

    keys (T'): the positions of the keys in the cache; None: the keys are those of this pass, and mask (B, S, S) says
    who attends to them; by default each token attends to all up to itself. max_length: how long a row may get in this
    run, by default S.
    """
    c, scaling = model.config, model.config.rope_scaling or {}

    def rope(row, factor=1.0):
        angles = (positions[..., None] * model.rope_frequencies[row])[:, None, None]
        # as_strided makes the compiler store cos and sin: else each layer would compute them again for each head
        return tuple(y.as_strided(y.shape, y.stride()) for y in (angles.cos() * factor, angles.sin() * factor))

    # beyond its original context, longrope uses its long factors for all keys
    is_long = "long_factor" in scaling and (max_length or positions.shape[1]) > scaling[ORIGINAL_CONTEXT]
    ordinary = rope(int(is_long), scaling.get("attention_factor", 1.0))
    ropes = ordinary, (rope(1) if c.window_rope_theta else ordinary)
    queries, key_at = positions[..., None], positions[:, None] if keys is None else keys
    if keys is not None or (c.score_cap and mask is None):  # is_causal cannot cap scores
        mask = key_at <= queries
    window_mask = mask
    if c.window_layers and (mask is not None or positions.shape[1] > c.sliding_window):
        window_mask = (key_at <= queries if mask is None else mask) & (key_at > queries - c.sliding_window)
    scale = c.query_scale
    if c.llama4_beta:
        contexts = positions // scaling[ORIGINAL_CONTEXT]
        scale = (1 + c.llama4_beta * (contexts + 1).log())[:, None, None, :, None] * (scale or 1.0)
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    return AttentionMetadata(*ropes, mask, window_mask, rows, positions, model.comm, scale, last)
