"""Batches: prompts as tensors, caches, and the Sampler, which chooses the next ids by the logits.

Shape letters: B batch, S sequence, V vocabulary, v this rank's part of it.
"""

import torch

from ladder.errors import InputError
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT
from ladder.seeds import generator
from model import VOCAB_BLOCK, SingleDevice

BUCKET = 256  # the slots of a GPU's cache are a multiple of it
SINGLE_DEVICE = SingleDevice()
N_SECTIONS = VOCAB_BLOCK  # a GPU searches so many sections of the logits at the same time; it divides padded v


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
    next. The dummy slot keeps a step from reading all slots, for which the compiler would make another graph. longrope
    chooses its factors by the number of the other slots; so rounding up never crosses its original context, which
    BUCKET divides.
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
    """Chooses token ids, the same on all ranks, given a rank's logits and the model's collectives.

    Ranks exchange only their best candidates, since no wiring would hide the time of gathering all logits. temperature:
    0 is greedy. top_k, top_p and min_p are applied after it, min_p first: only tokens at least min_p times as likely as
    the likeliest are drawn. Equal seeds draw equal tokens on any number of ranks. Raises InputError for values out of
    range.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu", min_p=0.0):
        low, high = 1e-6, 1e30  # float32 can still tell them from 0 and infinity
        if not 0 <= temperature <= high:
            raise InputError(f"temperature is {temperature} but must be from 0 (greedy) to {high}")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k} but must be a whole number, at least 1")
        if not 0 <= top_p <= 1:
            raise InputError(f"top_p is {top_p} but must be a number from 0 to 1")
        if not 0 <= min_p <= 1:
            raise InputError(f"min_p is {min_p} but must be a number from 0 to 1")
        if not -(2**63) <= seed < 2**64:
            raise InputError(f"seed is {seed} but must be a whole number of 64 bits")
        temperature = temperature if temperature >= low else 0  # what both come to as they approach 0
        self.greedy, self.filters = temperature == 0, top_k is not None or top_p < 1 or min_p > 0
        self.temperature = torch.tensor(temperature, dtype=torch.float32).item()  # as joined() rounds it
        self.top_p, self.min_p, self.device = max(top_p, low), min_p, device
        self.top_k = 2**31 if top_k is None else top_k
        self.n_candidates = 0 if top_k is None else top_k + 1  # at least so many, to see what top_k excludes
        self.generator = generator(seed % 2**64, device)
        self.generators = [self.generator]  # one for all rows, or one for each
        # samplers with an equal key share CUDA graphs; None: sampling is not captured
        self.graph_key = "greedy" if self.greedy else None if self.filters else self

    def __call__(self, logits, comm=SINGLE_DEVICE):
        """Return token ids (...) for local logits (..., v), or (B, v) unless greedy; -1 if some are not finite."""
        candidates, choose = self.begin(logits, comm)
        return choose(comm.all_gather(candidates))

    def begin(self, logits, comm):
        """Return (what this rank sends to the others, a function from what all ranks sent to the token ids)."""
        if self.filters and not self.greedy:
            from ladder.decoding import top_k_top_p

            return top_k_top_p.begin(self, logits, comm)
        local_logits, first_id, vocab_size = comm.local_logits(logits if self.greedy else logits.float())
        sections = local_logits.unflatten(-1, (N_SECTIONS, -1))
        section_max, section_argmax = sections.max(-1)
        top, section = section_max.max(-1)
        score = (top + 0 * sections.amin(-1).amin(-1)).double()  # 0 * -inf is NaN: finite only if all logits are
        if self.greedy:
            token = section * sections.shape[-1] + section_argmax.gather(-1, section[..., None])[..., 0]
        else:
            weights = (local_logits - top[..., None]).div_(self.temperature).exp_()
            lead, token = self.race(weights, first_id, vocab_size)
            score = (score[:, None] / self.temperature)[:, 0] + lead.log()  # weights are relative to the top

        def choose(received):
            scores, ids = received.unbind(-1)
            winner = ids.gather(0, scores.argmax(0, keepdim=True))[0].long()  # of equal scores, the first rank's
            return winner.where(scores.isfinite().all(0), -1)

        return torch.stack((score, token + first_id), -1), choose

    def random(self, fill, *shape):
        """Return random numbers by a method such as torch.Tensor.uniform_, each row's by its own generator."""
        result = torch.empty(shape, device=self.generator.device)
        for rows, own in zip(result.chunk(len(self.generators)), self.generators, strict=True):
            fill(rows, generator=own)
        return result

    def race(self, weights, first_id, vocab_size):
        """Draw local ids (B,) with probabilities proportional to this rank's weights (B, v); returns (leads, ids).

        This is an exponential race among blocks of ids. The lead of a block of weight w is w / e, where e ~ Exp(1), and
        the largest lead wins with probability w / sum(w), also among all ranks. A second race chooses an id within the
        block. All ranks draw the same e, so the result does not depend on their number. first_id: of this rank.
        """
        n_blocks, by_block = -(-vocab_size // VOCAB_BLOCK), weights.unflatten(-1, (-1, VOCAB_BLOCK))
        e = self.random(torch.Tensor.exponential_, len(weights), n_blocks + VOCAB_BLOCK)
        blocks = torch.arange(by_block.shape[1], device=weights.device) + first_id // VOCAB_BLOCK  # the last: padding
        lead, block = (by_block.sum(-1).double() / e[:, blocks.clamp(max=n_blocks - 1)]).max(-1)
        id_leads = by_block.gather(1, block[:, None, None].expand(-1, 1, VOCAB_BLOCK))[:, 0] / e[:, n_blocks:]
        return lead, block * VOCAB_BLOCK + id_leads.argmax(-1)
