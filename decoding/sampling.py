"""From logits to tokens: sampling, and the step of plain decoding.

Shape letters: B batch, V vocabulary, v this rank's part of it.
"""

import torch

from model import VOCAB_BLOCK, SingleDevice
from runtime.errors import InputError

SINGLE = SingleDevice()


def add_flags(group):
    """Add the flags of a Sampler, which checks them."""
    group.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy, 1 the model's own")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens, e.g. 50")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="... among the likeliest of mass P, e.g. 0.95"
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and synthetic prompts")


class Sampler:
    """A function from this rank's logits and the model's collectives to token ids, alike on all ranks.

    temperature: 0 is greedy. Equal seeds draw equal tokens. Raises InputError.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
        least, most = 1e-6, 1e30  # float32 still tells the one from 0 and the other from infinity
        if not (temperature == 0 or least <= temperature <= most):
            raise InputError(f"temperature is {temperature} but must be 0 (greedy) or from {least} to {most}")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k} but must be a whole number, at least 1")
        if not least <= top_p <= 1:
            raise InputError(f"top_p is {top_p} but must be a number from {least} to 1")
        if not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed} but must be a whole number from 0 to 2^63 - 1")
        self.temperature, self.top_k, self.top_p, self.device = temperature, top_k, top_p, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits, comm=SINGLE):
        """Return token ids (...), -1 where the logits are not all finite, from this rank's logits (..., v).

        Only what may be chosen is exchanged: no wiring hides a gathering of all logits.
        """
        greedy = self.temperature == 0
        numbers, first, vocab_size = comm.local_logits(logits if greedy else logits.float())
        top, token = numbers.max(-1)
        good, level = all_finite(numbers, top), top.double()
        if not greedy:
            weights, level = (numbers - top[..., None]).div_(self.temperature).exp_(), level / self.temperature
            if self.top_k is not None or self.top_p < 1:
                mass = (level + weights.sum(-1).log()).where(good, torch.nan)
                from decoding import likely  # a room that a plain run does not enter

                return likely.draw(self, logits, numbers, first, mass, comm)
            lead, token = self.race(weights, first, vocab_size)
            level += lead.log()
        levels, ids = comm.all_gather(torch.stack((level.where(good, torch.nan), token + first), -1)).unbind(-1)
        found = ids.gather(0, levels.argmax(0, keepdim=True))[0].long()  # of equal levels the first rank's
        return found.where(levels.isfinite().all(0), -1)

    def race(self, weights, first, vocab_size):
        """Draw ids (B,), each with its share of this rank's weights (B, v); return their leads, and them less `first`.

        A block of weight w leads by w / e, e drawn from Exp(1): that of the largest lead, among all ranks' too, is
        drawn with probability w / sum(w), and then an id in it likewise. The e are alike on all ranks: so the number
        of ranks does not matter.
        """
        blocks, of_blocks = -(-vocab_size // VOCAB_BLOCK), weights.unflatten(-1, (-1, VOCAB_BLOCK))
        e = torch.empty(len(weights), blocks + VOCAB_BLOCK, device=weights.device).exponential_(
            generator=self.generator
        )
        own = torch.arange(of_blocks.shape[1], device=weights.device) + first // VOCAB_BLOCK  # the last: of padding
        lead, block = (of_blocks.sum(-1).double() / e[:, own.clamp(max=blocks - 1)]).max(-1)
        inside = of_blocks.gather(1, block[:, None, None].expand(-1, 1, VOCAB_BLOCK))[:, 0] / e[:, blocks:]
        return lead, block * VOCAB_BLOCK + inside.argmax(-1)


def all_finite(logits, top):
    """Return whether logits (..., V), whose largest are top (...), are all finite (...): of NaN, both are NaN."""
    return top.isfinite() & logits.amin(-1).isfinite()


def last_tokens(texts, device):
    """Return the arguments of Runner.decode for texts of which all but the last token is in the cache."""
    tokens = torch.tensor([text[-1:] for text in texts], device=device)
    positions = torch.tensor([len(text) - 1 for text in texts], device=device)
    return tokens, positions, max(map(len, texts))


class Plain:
    """Plain decoding: a draft that proposes nothing. decoding/speculative.py has drafts that do.

    counts: the numbers of proposals that a pass may verify. ahead: on a GPU, the (ids, positions) of a pass in flight.
    """

    counts = (0,)
    ahead = None

    def begin(self, tokens, lengths, chunk, known=0):
        """Prepare for a generation; the arguments are those of Runner.prefill."""
        self.ahead = None

    @torch.inference_mode()
    def step(self, runner, texts, done, sample):
        """Run one pass of the model; returns [the new ids of each row].

        texts: the tokens of each row so far. done: which rows have ended. sample: a Sampler.
        A GPU is given the next pass before the ids of this one are read, so it does not wait for the host; the very
        last of these passes nobody reads.
        """
        if self.ahead is None:
            tokens, positions, longest = last_tokens(texts, runner.device)
            ids = sample(runner.decode(tokens, positions, longest)[:, 0], runner.model.comm)
            if runner.device.type == "cpu":
                return ids[:, None].tolist()
        else:
            ids, positions = self.ahead
        read, here = ids.to("cpu", non_blocking=True), torch.cuda.current_stream(runner.device).record_event()
        context = runner.model.config.max_seq_len  # at its end rows stay that are done
        positions, longest = (positions + 1).clamp(max=context - 1), min(max(map(len, texts)) + 1, context)
        token = ids.clamp(min=0)[:, None]  # -1, not finite, ends the generation as soon as it is read
        self.ahead = sample(runner.decode(token, positions, longest)[:, 0], runner.model.comm), positions
        here.synchronize()
        return read[:, None].tolist()

    def warm_up(self, runner, texts, count):
        """Run a pass that verifies so many proposals, as step() would."""
        logits = runner.decode(*last_tokens(texts, runner.device))[:, 0]
        Sampler(0)(logits, runner.model.comm).tolist()  # waits for the device
