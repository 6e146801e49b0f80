"""The kernel of QuantLinear for fp8 on a GPU, PyTorch's. No GPU has run it yet. Shape letters: quant_linear.py."""

import torch

from ladder.kernels.quant_linear import add_bias, to_fp8

CAPABILITY = 8, 9  # of the GPUs that multiply e4m3: Ada, Hopper, Blackwell
MULTIPLE = 16  # of N and K


def use_scaled_mm(linears):
    """Let the QuantLinears whose shape fits use PyTorch's kernel, if the GPU has it; else they stay slow."""
    if torch.cuda.get_device_capability() < CAPABILITY:
        return
    for linear in linears:
        fits = linear.out_features > 0 == linear.out_features % MULTIPLE == linear.in_features % MULTIPLE
        if fits and linear.weight.dim() == 2:  # experts have kernels of their own
            linear.row_scales = linear.scales.float().T.contiguous()  # (1, N)
            linear.kernel = multiply_scaled


def multiply_scaled(x, linear):
    """Multiply e4m3 by e4m3: each row of x (..., K) has a scale, and each row of W."""
    q, scales = to_fp8(x.reshape(-1, linear.in_features))
    y = torch._scaled_mm(q, linear.weight.T, scales, linear.row_scales, out_dtype=x.dtype)
    return add_bias(y.view(*x.shape[:-1], -1), linear)
