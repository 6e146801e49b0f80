"""Attention of a decode step that splits the keys of a head between multiprocessors. Shape letters: model.py."""

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ladder.kernels.cpu.stand_ins import FEW_POSITIONS
from ladder.kernels.registry import Kernel

KEY_BLOCK = 128  # keys in a block, which a row may skip; a multiple of the tiles of PyTorch's kernels


def split_attend(q, k, v, mask, sinks=None):
    """Return the attention (B, K, G * S, H), with a mask: split the keys of a head, when compiled.

    PyTorch's own kernels that take a mask give one head to one multiprocessor: for a row of the 8b, 8 of an H200's 132
    would work. flex_attention splits the keys only if it is given blocks of keys: else the whole cache is one block,
    which the first split gets (torch 2.11, 2.13).
    """
    S = q.shape[3]
    T = mask.shape[-1]

    def visible(row, head, query, key):
        return mask[row, query % S, key]

    # from the first to the last block of keys that any token of a row attends to
    n_blocks = -(-T // KEY_BLOCK)
    n_queries = q.shape[2] * S
    seen = mask.any(1).byte()  # (B, T)
    first = seen.argmax(-1, keepdim=True) // KEY_BLOCK  # (B, 1)
    last = (T - 1 - seen.flip(-1).argmax(-1, keepdim=True)) // KEY_BLOCK
    kv_num_blocks = (last - first + 1)[:, None].int()  # (B, 1, 1): all queries of a head are one block
    kv_indices = (first + torch.arange(n_blocks, device=q.device)).clamp(max=n_blocks - 1)[:, None, None].int()
    sizes = {"BLOCK_SIZE": (-(-n_queries // KEY_BLOCK) * KEY_BLOCK, KEY_BLOCK), "seq_lengths": (n_queries, T)}
    blocks = BlockMask.from_kv_blocks(kv_num_blocks, kv_indices, mask_mod=visible, compute_q_blocks=False, **sizes)
    inputs = q.flatten(2, 3), k[:, :, :T], v[:, :, :T]
    if sinks is None:
        return flex_attention(*inputs, block_mask=blocks)
    y, aux = flex_attention(*inputs, block_mask=blocks, return_aux=AuxRequest(lse=True))
    # a key more, of value 0, leaves the other keys this share of a head's weights
    share = (aux.lse.unflatten(-1, (-1, S)) - sinks.float().view(q.shape[1], -1, 1)).sigmoid()  # (B, K, G, S)
    return y * share.flatten(2)[..., None].type_as(y)


def attend(q, k, v, mask=None, sinks=None):
    """Split the keys of a head in a decode step that is compiled for a GPU.

    sinks (K * G): the scores of one more key of each head, of value 0.
    """
    few = q.is_cuda and torch.compiler.is_compiling() and q.shape[3] <= FEW_POSITIONS
    if not few or mask is None or q.shape[-1] % 16:
        return None
    if mask.dtype is not torch.bool or mask.shape[:2] != (q.shape[0], q.shape[3]):
        return None
    return split_attend(q, k, v, mask, sinks).reshape(q.shape)


ABOUT = "the keys of a head are shared out among multiprocessors"
KERNELS = [
    Kernel("model.attend", attend, ABOUT),
    Kernel("ladder.architectures.heads.attend_with_sinks", attend, ABOUT),
]
