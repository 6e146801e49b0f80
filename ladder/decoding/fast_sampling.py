"""The kernel of generate.sample: ranks exchange their best candidates, since no wiring hides a gather of all logits.

Greedy, each rank sends the largest logit of its part of the vocabulary and its id. With a temperature it sends the
winner of the race among its blocks, and with filters its largest logits: see top_k_top_p.py.

Shape letters: B batch, V vocabulary, v this rank's part of it.
"""

import torch

from ladder.decoding import top_k_top_p
from ladder.kernels import registry
from ladder.kernels.registry import Kernel
from model import VOCAB_BLOCK, SingleDevice
from tp import TensorParallel

N_SECTIONS = VOCAB_BLOCK  # a GPU searches so many sections of the logits at the same time; it divides padded v


def sample(logits, comm, sampler):
    """Return what generate.sample does, or None for a Collectives that gathers logits in a way of its own."""
    if not gathers_as_known(comm):
        return None
    candidates, choose = begin(logits, comm, sampler)
    return choose(comm.all_gather(candidates))


def begin(logits, comm, sampler):
    """Return (what this rank sends to the others, a function from what all ranks sent to the token ids).

    The settings of the sampler are numbers, or tensors (B, 1) with those of each row.
    """
    if sampler.filters and not sampler.greedy:
        return top_k_top_p.begin(sampler, logits, comm)
    local_logits, first_id, vocab_size = comm.local_logits(logits if sampler.greedy else logits.float())
    sections = local_logits.unflatten(-1, (N_SECTIONS, -1))
    section_max, section_argmax = sections.max(-1)
    top, section = section_max.max(-1)
    score = (top + 0 * sections.amin(-1).amin(-1)).double()  # 0 * -inf is NaN: finite only if all logits are
    if sampler.greedy:
        token = section * sections.shape[-1] + section_argmax.gather(-1, section[..., None])[..., 0]
    else:
        weights = (local_logits - top[..., None]).div_(sampler.temperature).exp_()
        lead, token = race(sampler, weights, first_id, vocab_size)
        score = (score[:, None] / sampler.temperature)[:, 0] + lead.log()  # weights are relative to the top

    def choose(received):
        scores, ids = received.unbind(-1)
        winner = ids.gather(0, scores.argmax(0, keepdim=True))[0].long()  # of equal scores, the first rank's
        return winner.where(scores.isfinite().all(0), -1)

    return torch.stack((score, token + first_id), -1), choose


def race(sampler, weights, first_id, vocab_size):
    """Draw local ids (B,) with probabilities proportional to this rank's weights (B, v); returns (leads, ids).

    This is an exponential race among blocks of ids. The lead of a block of weight w is w / e, where e ~ Exp(1), and
    the largest lead wins with probability w / sum(w), also among all ranks. A second race chooses an id within the
    block. All ranks draw the same e, so the result does not depend on their number. first_id: of this rank.
    """
    n_blocks = -(-vocab_size // VOCAB_BLOCK)
    by_block = weights.unflatten(-1, (-1, VOCAB_BLOCK))
    e = sampler.random(torch.Tensor.exponential_, len(weights), n_blocks + VOCAB_BLOCK)
    blocks = torch.arange(by_block.shape[1], device=weights.device) + first_id // VOCAB_BLOCK  # the last: padding
    lead, block = (by_block.sum(-1).double() / e[:, blocks.clamp(max=n_blocks - 1)]).max(-1)
    id_leads = by_block.gather(1, block[:, None, None].expand(-1, 1, VOCAB_BLOCK))[:, 0] / e[:, n_blocks:]
    return lead, block * VOCAB_BLOCK + id_leads.argmax(-1)


KERNEL = Kernel(
    "generate.sample",
    sample,
    "ranks exchange candidates, not all logits, and a GPU captures the choice with the step",
    ("ladder.decoding.batch.Sampler.random", "model.SingleDevice.gather_logits", "tp.TensorParallel.gather_logits"),
    may_refuse=False,  # ranks would have exchanged and drawn already, perhaps not all of them
)


def gathers_as_known(comm):
    """Return whether a Collectives gathers logits by functions that the kernel stands in for."""
    for name in "gather_logits", "local_logits":
        known = getattr(SingleDevice, name), getattr(TensorParallel, name)
        if name in vars(comm) or getattr(type(comm), name) not in known:
            return False
    return True


def is_in_use():
    """Return whether the kernel stands in for generate.sample."""
    return registry.is_in_use(KERNEL)


def is_edited():
    """Return whether somebody has changed generate.sample, or what it calls."""
    return registry.is_edited(KERNEL)
