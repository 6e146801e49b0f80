"""Random numbers of a seed of 64 bits and more: torch's generator for CPUs takes the lowest 32 bits alone."""

import random

import torch

WORDS = slice(24, 24 + 624 * 8)  # the state of the Mersenne twister in the bytes of a generator's


def generator(seed, device="cpu"):
    """Return a torch.Generator of a whole number from 0 on. Of 32 bits, it is the one that manual_seed makes."""
    result = torch.Generator(device).manual_seed(seed % 2**64)
    if result.device.type == "cpu" and seed >= 2**32:
        state = result.get_state()
        _, words, _ = random.Random(seed).getstate()  # Python's is the same twister, and takes all bits
        state[WORDS] = torch.tensor(words[:-1]).view(torch.uint8)
        result.set_state(state)
    return result
