"""Rounds matrices to integers of 8 or 4 bits; ladder/kernels/quant_linear.py says what these stand for.

N rows and K columns of W, G groups in a row.
"""

import torch

from ladder.kernels.quant_linear import FP8_MAX, pack_pairs, round_to_fp8

PIECE = 2**18  # numbers that are fitted at a time; they fit a processor's cache
# Of the fit of scales and zeros:
CLIPS = 1.0, 0.9, 0.8
ITERATIONS = 8
COMPENSATED_AT_ONCE = 2**24  # numbers; so a head takes no more memory than a layer
DAMPING = 0.05  # of the mean square of inputs, as if these had noise
BLOCK = 64  # columns whose errors are carried one by one within the block, and together to what follows it


def to_int8(w):
    """Return integers (N, K) int8 and scales (N, 1) bfloat16 for w (N, K) float32; zero stays zero."""
    q, scales, _ = to_int8_in_groups(w, w.shape[1], torch.bfloat16)
    return q, scales


def to_int8_in_groups(w, group_size, dtype=torch.float16):
    """Return integers (N, K) int8, scales and zeros (N, G) of the dtype for w (N, K) float32; all zeros are 0."""
    w = w.unflatten(1, (-1, group_size))  # (N, G, K / G)
    scales = (w.abs().amax(-1, keepdim=True) / 127).to(dtype)
    q = (w / _nonzero(scales.float())).round().clamp(-127, 127)
    scales = scales.squeeze(-1)
    return q.flatten(1).to(torch.int8), scales, torch.zeros_like(scales)


def to_e4m3(w, scales=None):
    """Return e4m3 (N, K) and scales (N, 1) bfloat16, those given, or by which the largest of each row becomes 448."""
    scales = ((w.abs().amax(dim=1, keepdim=True) / FP8_MAX) if scales is None else scales).bfloat16()
    return round_to_fp8(w, scales.float()), scales


def e4m3_power_of_two(w):
    """Return the scales (N, 1) float32 of w (N, K), powers of two, with which e4m3 holds all its numbers.

    So e4m3 in blocks whose scales are powers of two, too, loses nothing: the exponents take up the difference.
    """
    _, exponents = torch.frexp(w.abs().amax(dim=1, keepdim=True) / FP8_MAX)
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def to_int4(w, group_size, dtype=torch.float16, importance=None):
    """Return integers (N, K / 2) uint8, scales and zeros (N, G) of the dtype for w (N, K) float32.

    importance (K,): how much the squared error of a column counts; None: all alike.

    The first integers are 16 even steps over the range of each group, or over 0.9 or 0.8 of it. Each iteration takes
    the scale and the zero with the least squared error for the integers, then the nearest integers for these (Lloyd's
    algorithm on an even grid). Each group keeps its best result. Scales and zeros are rounded before the integers are
    chosen, so that the integers make up for the rounding.
    """
    w = w.unflatten(1, (-1, group_size))  # (N, G, K / G)
    share = torch.ones(w.shape[1:]) if importance is None else importance.view(w.shape[1:])
    share = share / share.sum(-1, keepdim=True)  # of a column in its group
    low = w.amin(-1, keepdim=True)
    high = w.amax(-1, keepdim=True)
    mean = (share * w).sum(-1, keepdim=True)
    best = None
    for clip in CLIPS:
        scales = ((high - low) * clip / 15).to(dtype).float()
        zeros = (low + (high - low) * (1 - clip) / 2).to(dtype).float()
        for _ in range(ITERATIONS):
            new = _round_int4(w, scales, zeros, share)
            best = (
                new if best is None else [torch.where(new[-1] < best[-1], a, b) for a, b in zip(new, best, strict=True)]
            )
            mean_q = (share * new[0]).sum(-1, keepdim=True)
            centered = new[0] - mean_q
            weighted = share * centered
            scales = (weighted * w).sum(-1, keepdim=True) / _nonzero((weighted * centered).sum(-1, keepdim=True))
            scales = scales.clamp_(min=0).to(dtype).float()
            zeros = (mean - scales * mean_q).to(dtype).float()
    q, scales, zeros, _ = best
    return pack_pairs(q.flatten(1).to(torch.uint8)), scales.squeeze(-1).to(dtype), zeros.squeeze(-1).to(dtype)


def _round_int4(w, scales, zeros, share):
    """Return the integers nearest to w, as floats, their scales and zeros, and the squared error of each group."""
    q = ((w - zeros) / _nonzero(scales)).round_().clamp_(0, 15)
    return q, scales, zeros, (torch.addcmul(zeros, q, scales) - w).square_().mul_(share).sum(-1, keepdim=True)


def _nonzero(x):
    """Return x with 1 in place of 0, so that it can be a divisor."""
    return torch.where(x == 0, 1.0, x)


# ---- Errors that make up for one another: GPTQ, arXiv 2210.17323 -----------------------------------------------------


def second_moments(x):
    """Return what to_compensated_int4 needs to know of a linear's inputs x (..., K) float32.

    That is: the mean square of each column, damped; the columns from the largest of these to the smallest; and, in this
    order, the upper Cholesky factor of the inverse of the damped second moments (K, K).
    """
    x = x.flatten(0, -2)
    x = x / (x.abs().amax() or 1.0)  # their size does not matter, but their squares must not overflow
    importance = x.square().mean(0)
    order = importance.argsort(descending=True)
    mean = importance.mean().item() or 1.0
    x = x[:, order]
    moments = x.T @ x / len(x)
    for damping in (DAMPING, 1.0, 10.0):  # more only where float32 is not enough
        damped = importance + damping * mean
        moments.diagonal().copy_(damped[order])
        root, error = torch.linalg.cholesky_ex(moments)
        if not error:
            root, error = torch.linalg.cholesky_ex(torch.cholesky_inverse(root), upper=True)
        if not error:
            break
    if error:  # as if no two columns were alike
        root = torch.eye(len(order))
    return damped, order, root


def to_compensated_int4(w, moments, group_size, dtype=torch.float16):
    """Return what to_int4 does, with a smaller error of x W^T for inputs x with these second_moments.

    Scales and zeros are fitted first. Then columns are rounded one after another, the most important first: the error
    of each is made up for by the columns that are not rounded yet, as far as their inputs are alike.
    """
    rows = max(1, COMPENSATED_AT_ONCE // w.shape[1])
    pieces = [_compensate(piece.float(), *moments, group_size, dtype) for piece in w.split(rows)]
    return tuple(map(torch.cat, zip(*pieces, strict=True)))


def _compensate(w, importance, order, root, group_size, dtype):
    fitted = [to_int4(piece, group_size, dtype, importance)[1:] for piece in w.split(max(1, PIECE // w.shape[1]))]
    scales, zeros = map(torch.cat, zip(*fitted, strict=True))
    steps = scales.T.float().contiguous()
    bases = zeros.T.float().contiguous()
    groups = (order // group_size).tolist()
    w = w.T[order]  # (K, N), so that a column lies in one piece
    q = torch.empty(w.shape, dtype=torch.uint8)
    for start in range(0, len(w), BLOCK):
        stop = min(start + BLOCK, len(w))
        errors = torch.empty_like(w[start:stop])
        for k in range(start, stop):
            step = steps[groups[k]]
            base = bases[groups[k]]
            rounded = ((w[k] - base) / _nonzero(step)).round_().clamp_(0, 15)
            q[k], error = rounded, (w[k] - torch.addcmul(base, rounded, step)) / root[k, k]
            w[k + 1 : stop].addr_(root[k, k + 1 : stop], error, alpha=-1)
            errors[k - start] = error
        w[stop:].addmm_(root[start:stop, stop:].T, errors, alpha=-1)
    return pack_pairs(q[order.argsort()].T.contiguous()), scales, zeros
