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
    0 is greedy. Equal seeds draw equal tokens on any number of ranks. Raises InputError for values out of range.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
        low, high = 1e-6, 1e30  # float32 can still tell them from 0 and infinity
        if not 0 <= temperature <= high:
            raise InputError(f"temperature is {temperature} but must be from 0 (greedy) to {high}")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k} but must be a whole number, at least 1")
        if not 0 <= top_p <= 1:
            raise InputError(f"top_p is {top_p} but must be a number from 0 to 1")
        if not -(2**63) <= seed < 2**64:
            raise InputError(f"seed is {seed} but must be a whole number of 64 bits")
        temperature = temperature if temperature >= low else 0  # what both come to as they approach 0
        self.temperature, self.top_k, self.top_p, self.device = temperature, top_k, max(top_p, low), device
        self.filters = top_k is not None or top_p < 1
        self.generator = generator(seed % 2**64, device)
        # samplers with an equal key share CUDA graphs; None: sampling is not captured
        self.graph_key = "greedy" if temperature == 0 else None if self.filters else self

    def __call__(self, logits, comm=SINGLE_DEVICE):
        """Return token ids (...) for local logits (..., v), or (B, v) unless greedy; -1 if some are not finite."""
        greedy = self.temperature == 0
        if self.filters and not greedy:
            from ladder.decoding import top_k_top_p

            return top_k_top_p.draw(self, logits, comm)
        numbers, first_id, vocab_size = comm.local_logits(logits if greedy else logits.float())
        sections = numbers.unflatten(-1, (N_SECTIONS, -1))
        section_max, section_argmax = sections.max(-1)
        top, section = section_max.max(-1)
        score = (top + 0 * sections.amin(-1).amin(-1)).double()  # 0 * -inf is NaN: finite only if all logits are
        if greedy:
            token = section * sections.shape[-1] + section_argmax.gather(-1, section[..., None])[..., 0]
        else:
            weights = (numbers - top[..., None]).div_(self.temperature).exp_()
            lead, token = self.race(weights, first_id, vocab_size)
            score = score / self.temperature + lead.log()  # the weights are relative to this rank's top
        scores, ids = comm.all_gather(torch.stack((score, token + first_id), -1)).unbind(-1)
        winner = ids.gather(0, scores.argmax(0, keepdim=True))[0].long()  # of equal scores, the first rank's
        return winner.where(scores.isfinite().all(0), -1)

    def race(self, weights, first_id, vocab_size):
        """Draw local ids (B,) with probabilities proportional to this rank's weights (B, v); returns (leads, ids).

        This is an exponential race among blocks of ids. The lead of a block of weight w is w / e, where e ~ Exp(1), and
        the largest lead wins with probability w / sum(w), also among all ranks. A second race chooses an id within the
        block. All ranks draw the same e, so the result does not depend on their number. first_id: of this rank.
        """
        n_blocks, by_block = -(-vocab_size // VOCAB_BLOCK), weights.unflatten(-1, (-1, VOCAB_BLOCK))
        e = torch.empty(len(weights), n_blocks + VOCAB_BLOCK, device=weights.device)
        e.exponential_(generator=self.generator)
        blocks = torch.arange(by_block.shape[1], device=weights.device) + first_id // VOCAB_BLOCK  # the last: padding
        lead, block = (by_block.sum(-1).double() / e[:, blocks.clamp(max=n_blocks - 1)]).max(-1)
        id_leads = by_block.gather(1, block[:, None, None].expand(-1, 1, VOCAB_BLOCK))[:, 0] / e[:, n_blocks:]
        return lead, block * VOCAB_BLOCK + id_leads.argmax(-1)
