"""From logits to tokens: sampling, the step of plain decoding, and which proposals of a draft are accepted.

Shape letters: B batch, P proposals of a row, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F

from model import InputError


def add_flags(group):
    """Add the flags of a Sampler, which checks them."""
    group.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy, 1 the model's own")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens, e.g. 50")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="... among the likeliest of mass P, e.g. 0.95"
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and synthetic prompts")


class Sampler:
    """A function from logits (..., V) to token ids (...), -1 where the logits are not all finite.

    temperature: 0 is greedy. Equal seeds draw equal tokens, so every rank samples alike. Raises InputError.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
        least = 1e-6  # float32 still tells it from 0
        if not (temperature == 0 or least <= temperature < math.inf):
            raise InputError(f"temperature is {temperature} but must be 0 (greedy) or at least {least}")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k} but must be a whole number, at least 1")
        if not least <= top_p <= 1:
            raise InputError(f"top_p is {top_p} but must be a number from {least} to 1")
        if not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed} but must be a whole number from 0 to 2^63 - 1")
        self.temperature, self.top_k, self.top_p, self.device = temperature, top_k, top_p, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits):
        if self.temperature == 0:
            top, token = logits.max(-1)
            return token.where(all_finite(logits, top), -1)
        p, good = self.probabilities(logits)
        return self.draw(p).where(good, -1)

    def probabilities(self, logits):
        """Return the distribution above temperature 0, (..., V) float32, and whether the logits are finite, (...)."""
        top = logits.amax(-1)
        good = all_finite(logits, top)
        logits = ((logits - top[..., None]).float() / self.temperature).masked_fill_(~good[..., None], 0)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the mass before this token suffices already
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        return logits.softmax(-1), good

    def draw(self, p):
        """Draw token ids (B,), each with its probability in p (B, V), whose rows need not add up to 1."""
        return torch.multinomial(p, 1, generator=self.generator)[:, 0]

    def propose(self, logits):
        """Draw token ids (B,) by a draft's logits (B, V); return them and their distribution (B, V), None if greedy."""
        if self.temperature == 0:
            return logits.argmax(-1), None
        p, _ = self.probabilities(logits)
        return self.draw(p), p

    def accept(self, logits, proposed, q):
        """Return what a pass yields: ids (B, P + 1), -1 where the logits are not finite, and how many (B,) of each
        row's proposals are accepted. So many of its ids count, and one more.

        logits (B, P + 1, V): the model's, after the last token and after each proposal. proposed (B, P): drawn from q
        (B, P, V), or certain where that is None.

        Greedy: a proposal is accepted if it is the model's own, and those before it are. Else a proposal d is accepted
        with probability min(1, p(d) / q(d)). The first one that is not is replaced by a draw from max(0, p - q), and
        after the last comes a draw from p: so each id is distributed as p (arXiv 2211.17192).
        """
        if self.temperature == 0:
            ids = self(logits)
            return ids, (ids[:, :-1] == proposed).long().cumprod(-1).sum(-1)
        p, good = self.probabilities(logits)
        (B, P), d, rows = proposed.shape, proposed[..., None], torch.arange(len(p), device=p.device)
        offered = 1.0 if q is None else q.gather(-1, d)[..., 0]
        drawn = torch.rand(B, P, device=p.device, generator=self.generator)
        accepted = (drawn * offered < p[:, :P].gather(-1, d)[..., 0]).long().cumprod(-1).sum(-1)  # (B,)
        rest, first, whole = p[rows, accepted], accepted.clamp(max=P - 1), (accepted == P)[:, None]
        if q is None:
            left = rest.scatter(-1, proposed[rows, first][:, None], 0.0)
        else:
            left = (rest - q[rows, first]).clamp_(min=0)
        none_left = left.sum(-1, keepdim=True) == 0  # p was q, but for rounding
        ids = F.pad(proposed, (0, 1))
        ids[rows, accepted] = self.draw(torch.where(whole | none_left, rest, left))
        return ids.where(good, -1), accepted


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
            ids = sample(runner.decode(tokens, positions, longest)[:, 0])
            if runner.device.type == "cpu":
                return ids[:, None].tolist()
        else:
            ids, positions = self.ahead
        read, here = ids.to("cpu", non_blocking=True), torch.cuda.current_stream(runner.device).record_event()
        context = runner.model.config.max_seq_len  # at its end rows stay that are done
        positions, longest = (positions + 1).clamp(max=context - 1), min(max(map(len, texts)) + 1, context)
        token = ids.clamp(min=0)[:, None]  # -1, not finite, ends the generation as soon as it is read
        self.ahead = sample(runner.decode(token, positions, longest)[:, 0]), positions
        here.synchronize()
        return read[:, None].tolist()

    def warm_up(self, runner, texts, count):
        """Run a pass that verifies so many proposals, as step() would."""
        runner.decode(*last_tokens(texts, runner.device))[:, 0].argmax(-1).tolist()  # waits for the device
