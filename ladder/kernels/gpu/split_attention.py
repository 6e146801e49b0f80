"""Attention of a decode step that splits the keys of a head between multiprocessors. Shape letters: model.py."""

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ladder.kernels.cpu.decode_modules import FEW_POSITIONS
from model import attend

KEY_BLOCK = 128  # keys in a block, which a row may skip; a multiple of the tiles of PyTorch's kernels


def split_attend(q, k, v, mask, positions, window, score_cap, sinks=None):
    """Compute what model.attend does, without a score_cap; compiled for a decode step, split a head's keys.

    PyTorch's own kernels that take a mask give one head to one multiprocessor: for a row of the 8b, 8 of an H200's 132
    would work. flex_attention splits the keys only if it is given blocks of keys: else the whole cache is one block,
    which the first split gets (torch 2.11, 2.13).
    """
    S, T = q.shape[3], mask.shape[-1]
    if S > FEW_POSITIONS or not torch.compiler.is_compiling():
        return attend(q, k, v, mask, positions, window, score_cap, sinks)

    def visible(row, head, query, key):
        position = positions[row, query % S]
        return key <= position if window is None else (key <= position) & (key > position - window)

    # the blocks of keys that each row attends to; a row that is done may be beyond the slots that this pass reads
    n_blocks, n_queries = -(-T // KEY_BLOCK), q.shape[2] * S
    start, end = positions[:, :1].clamp(max=T - 1), positions[:, -1:].clamp(max=T - 1)  # (B, 1)
    first = torch.zeros_like(start) if window is None else (start + 1 - window).clamp(min=0) // KEY_BLOCK
    last = end // KEY_BLOCK
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
