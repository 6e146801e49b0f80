"""Random weights for benchmarks, in place of those of a checkpoint: generate.py --model."""

import torch

from model import build


class RandomWeights:
    """Random weights in place of checkpoint.Weights: matrices from N(0, 0.02), biases of 0, norms of factor 1.

    Integers are drawn evenly and e4m3 from N(0, 64), with scales that give their floats the same standard deviation.
    """

    def __init__(self, config, device, seed=0):
        self.parameters = dict(build(config).named_parameters())
        self.norm = float(config.norm != "rms+1")
        self.generator = torch.Generator(device).manual_seed(seed)

    def read(self, name):
        return self.parameters[name]  # on the device "meta": only its shape and dtype count

    def fill(self, target, name, dim=0, ranges=None):
        if target.dim() == 1:
            target.fill_(0.0 if name.endswith("bias") else 1.0 if "out_norm" in name else self.norm)
        elif name.endswith(("scales", "zeros")):
            stored = self.parameters[name.rpartition(".")[0] + ".weight"].dtype
            scale = {torch.uint8: 12**0.5 / 15, torch.int8: 12**0.5 / 254}.get(stored, 1 / 64) * 0.02
            middle = 7.5 if stored == torch.uint8 else 0
            target.fill_(scale if name.endswith("scales") else -middle * scale)
        elif target.dtype == torch.float8_e4m3fn:
            numbers = torch.empty(target.shape, dtype=torch.bfloat16, device=target.device)
            target.copy_(numbers.normal_(0, 64, generator=self.generator).clamp_(-448, 448))
        elif not target.is_floating_point():
            low, high = (0, 256) if target.dtype == torch.uint8 else (-127, 128)
            target.random_(low, high, generator=self.generator)
        else:
            target.normal_(0, 0.02, generator=self.generator)
