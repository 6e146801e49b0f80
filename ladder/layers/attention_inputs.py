"""What attention does to queries and keys before it multiplies them: rotary embeddings, and the masks.

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
    if theta := config.ask("window_theta"):
        frequencies = torch.stack((frequencies[0], 1.0 / theta**exponents))
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


class AttentionMetadata(NamedTuple):
    """What all attention layers of a forward pass share. They attend to T' keys.

    rope: (cos, sin), both (B, 1, 1, S, R/2).
    mask: (B, S, T') bool, which keys a token attends to: the first T' slots of the cache or, without a cache, the
    tokens of this pass. None: every row starts at position 0, and each token attends to all up to itself.
    rows (B, 1), positions (B, S): where this pass writes the cache.
    last (B, 1): the last position that changes the state of linear attention; None: all positions do.
    """

    rope: tuple
    mask: torch.Tensor | None
    rows: torch.Tensor
    positions: torch.Tensor
    comm: object  # the model's collectives, for an attention that sums over the ranks
    last: torch.Tensor | None = None
    own: dict = {}  # {name of an architecture: what its layers share besides}


def attention_metadata(model, positions, keys=None, max_length=None, last=None, mask=None):
    """Return the AttentionMetadata of a model.Transformer for tokens at these positions (B, S).

    keys (T'): the positions of the keys in the cache. None: the keys are those of this pass, and mask (B, S, S) says
    which of them each token attends to; by default to all up to itself. max_length: how long a row may get in this run,
    by default S. last: as in AttentionMetadata.
    """
    config = model.config
    scaling = config.rope_scaling or {}

    def make_rope(row, factor=1.0):
        angles = (positions[..., None] * model.rope_frequencies[row])[:, None, None]
        # as_strided makes the compiler store cos and sin; else each layer would compute them again for each head
        return tuple(y.as_strided(y.shape, y.stride()) for y in (angles.cos() * factor, angles.sin() * factor))

    # in a run that may go beyond the original context, longrope uses its long factors for all keys
    is_long = "long_factor" in scaling and (max_length or positions.shape[1]) > scaling[ORIGINAL_CONTEXT]
    rope = make_rope(int(is_long), scaling.get("attention_factor", 1.0))
    key_at = positions[:, None] if keys is None else keys
    needs_mask = any(each.needs_mask for each in config.architecture)
    if keys is not None or (needs_mask and mask is None):
        mask = key_at <= positions[..., None]
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    metadata = AttentionMetadata(rope, mask, rows, positions, model.comm, last)
    own = {each.name: each.metadata(config, metadata, key_at, make_rope) for each in config.architecture}
    return metadata._replace(own=own) if own else metadata
