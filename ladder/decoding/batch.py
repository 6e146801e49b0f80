"""Batches: prompts as tensors, caches, and the settings of sampling. Shape letters: B batch, S sequence."""

import torch

from ladder.errors import InputError
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT
from ladder.seeds import generator
from model import SingleDevice

BUCKET = 256  # the slots of a GPU's cache are a multiple of it
SINGLE_DEVICE = SingleDevice()


@torch.inference_mode()  # the compiler would make another graph for tensors made outside of inference mode
def pad(prompts, device):
    """Return (tokens (B, S), lengths (B,)) of prompts, which may differ in length; tokens are padded on the right."""
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


def last_tokens(sequences, device):
    """Return the arguments of Runner.decode for sequences of ids; all but the last token of each are cached."""
    tokens = torch.tensor([ids[-1:] for ids in sequences], device=device)
    positions = torch.tensor([len(ids) - 1 for ids in sequences], device=device)
    return tokens, positions, max(map(len, sequences))


def make_cache(model, batch, length, in_buckets=False):
    """Return a cache for rows of up to `length` tokens, and a dummy slot behind them that no step reads.

    in_buckets: round up the number of slots, as on a GPU always, so that what was compiled for one prompt serves the
    next. longrope chooses its factors by the number of slots, but for the dummy slot; so rounding up never crosses its
    original context, which BUCKET divides.
    """
    if model.device.type != "cpu":
        length = -(-length // BUCKET) * BUCKET
    elif in_buckets:
        length = round_up(length, model.config)
    return model.new_cache(batch, length + 1)


def round_up(length, config):
    """Return the least of 256, 512, 1024, 1536, 2048, 3072, 4096, ... from `length` on, at most a Config's context.

    It does not cross the context before rope_scaling extended that, either.
    """
    power = max(BUCKET, 2 ** (length - 1).bit_length())
    unit = power if power <= 1024 else power // 4
    contexts = (config.rope_scaling or {}).get(ORIGINAL_CONTEXT, 0), config.max_seq_len
    return min([-(-length // unit) * unit, *(context for context in contexts if context >= length)])


class Sampler:
    """How ids are drawn, for generate.sample: the settings, and the random numbers, which are the same on all ranks.

    temperature: 0 is greedy. top_k, top_p and min_p are applied after it, min_p first: only tokens at least min_p times
    as likely as the likeliest are drawn. Raises InputError for values out of range.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu", min_p=0.0):
        low = 1e-6  # float32 can still tell low and high from 0 and infinity
        high = 1e30
        if not isinstance(temperature, int | float) or not 0 <= temperature <= high:
            raise InputError(f"temperature is {temperature!r} but must be from 0 (greedy) to {high}")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k} but must be a whole number, at least 1")
        if not 0 <= top_p <= 1:
            raise InputError(f"top_p is {top_p} but must be a number from 0 to 1")
        if not 0 <= min_p <= 1:
            raise InputError(f"min_p is {min_p} but must be a number from 0 to 1")
        if not -(2**63) <= seed < 2**64:
            raise InputError(f"seed is {seed} but must be a whole number of 64 bits")
        temperature = temperature if temperature >= low else 0  # what both come to as they approach 0
        self.greedy = temperature == 0
        self.filters = top_k is not None or top_p < 1 or min_p > 0
        self.temperature = torch.tensor(temperature, dtype=torch.float32).item()  # as sample_rows rounds it
        self.top_k = 2**31 if top_k is None else top_k
        self.top_p = max(top_p, low)
        self.min_p = min_p
        self.device = device
        self.generator = generator(seed % 2**64, device)
        self.n_candidates = 0 if top_k is None else top_k + 1  # at least so many, to see what top_k excludes
        # samplers with an equal key share CUDA graphs; None: sampling is not captured
        self.graph_key = "greedy" if self.greedy else None if self.filters else self

    def random(self, fill, *shape):
        """Return random numbers by a method such as torch.Tensor.uniform_."""
        return fill(torch.empty(shape, device=self.generator.device), generator=self.generator)
