"""What attention does to queries and keys before it multiplies them: norms, rotary embeddings, scales, and the masks.

Shape letters: model.py.
"""

from typing import NamedTuple

import torch

from ladder.layers import rope_scaling
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT


def rope_frequencies(config):
    """Return the radians per position (2, R/2) float32 of the R/2 pairs of a head's dimensions that turn.

    The second row is for layers with a window, if these have another rope_theta, or for long texts, with longrope.
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
    """Rotate each pair (i, i + R/2) of the first R dimensions of x (B, K, G or 1, S, H) by its angle.

    cos, sin: (B, 1, 1, S, R/2), of the angles.
    """
    R = 2 * cos.shape[-1]
    # contiguous in this order, so that a CPU runs one long loop for each head instead of S short ones
    a, b, rest = x.float(memory_format=torch.contiguous_format).tensor_split((R // 2, R), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)


def unpaired(weight, head_dim, rotary_dim=None):
    """Reorder the rows of q or k from rotary embeddings of neighbours (2i, 2i + 1) to those of pairs (i, i + R/2)."""
    first, rest = weight.unflatten(0, (-1, head_dim)).tensor_split((rotary_dim or head_dim,), dim=1)
    return torch.cat((first.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), rest), dim=1).flatten(0, 1)


def norm_heads(q, k, q_norm, k_norm, comm=None):
    """Return the normed queries (B, K, G, S, H) and keys (B, K, 1, S, H).

    Each head is normed alone. With `comm`, all heads of all ranks are normed together: the collectives sum the squares
    over the ranks, in one all-reduce. q_norm, k_norm: RMSNorms; those of all heads have a rank's part of the weights.
    """
    if comm is None:
        return q_norm(q), k_norm(k)
    (queries,), (keys,) = q_norm.normalized_shape, k_norm.normalized_shape  # widths over all ranks
    share = q.shape[2] * keys / queries  # ranks with a copy of a KV head each add a share of its squares
    squares = torch.stack([q.float().square().sum((1, 2, 4)), k.float().square().sum((1, 2, 4)) * share])
    sums = comm.wait(comm.start(squares))[:, :, None, None, :, None]  # (2, B, 1, 1, S, 1)

    def normed(x, norm, mean):
        weight = norm.weight.view(x.shape[1], x.shape[2], 1, x.shape[4])
        return (x.float() * (mean + norm.eps).rsqrt()).type_as(x) * weight

    return normed(q, q_norm, sums[0] / queries), normed(k, k_norm, sums[1] / keys)


class AttentionMetadata(NamedTuple):
    """What all attention layers of a forward pass share. They attend to T' keys.

    rope, window_rope: (cos, sin), both (B, 1, 1, S, R/2). window_rope is for layers with a sliding window.
    mask, window_mask: (B, S, T') bool, which keys a token attends to: the first T' slots of the cache or, without a
    cache, the tokens of this pass. None: every row starts at position 0, and each token attends to all up to itself.
    rows (B, 1), positions (B, S): where this pass writes the cache.
    last (B, 1): the last position that changes the state of linear attention; None: all positions do.
    """

    rope: tuple
    window_rope: tuple
    mask: torch.Tensor | None
    window_mask: torch.Tensor | None
    rows: torch.Tensor
    positions: torch.Tensor
    comm: object  # the model's collectives, with which whole_qk_norm sums over the ranks
    query_scale: torch.Tensor | float | None = None  # multiplies queries (B, K, G, S, H)
    last: torch.Tensor | None = None


def attention_metadata(model, positions, keys=None, max_length=None, last=None, mask=None):
    """Return the AttentionMetadata of a model.Transformer for tokens at these positions (B, S).

    keys (T'): the positions of the keys in the cache. None: the keys are those of this pass, and mask (B, S, S) says
    which of them each token attends to; by default to all up to itself. max_length: how long a row may get in this run,
    by default S. last: as in AttentionMetadata.
    """
    c, scaling = model.config, model.config.rope_scaling or {}

    def rope(row, factor=1.0):
        angles = (positions[..., None] * model.rope_frequencies[row])[:, None, None]
        # as_strided makes the compiler store cos and sin; else each layer would compute them again for each head
        return tuple(y.as_strided(y.shape, y.stride()) for y in (angles.cos() * factor, angles.sin() * factor))

    # in a run that may go beyond the original context, longrope uses its long factors for all keys
    is_long = "long_factor" in scaling and (max_length or positions.shape[1]) > scaling[ORIGINAL_CONTEXT]
    ordinary = rope(int(is_long), scaling.get("attention_factor", 1.0))
    ropes = ordinary, (rope(1) if c.window_rope_theta else ordinary)
    queries, key_at = positions[..., None], positions[:, None] if keys is None else keys
    if keys is not None or ((c.score_cap or c.attention_sinks) and mask is None):  # without a mask there are neither
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
