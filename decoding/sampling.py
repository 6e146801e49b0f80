"""From logits to tokens: what is drawn, and which proposals of a draft stand.

Shape letters: B batch, K proposals of a row, V vocabulary.
"""

import torch
import torch.nn.functional as F


class Sampler:
    """A function from logits (..., V) to token ids (...), -1 where the logits are not all finite.

    temperature: 0 is greedy. Equal seeds draw equal tokens, so every rank samples alike.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
        self.temperature, self.top_k, self.top_p, self.device = temperature, top_k, top_p, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits):
        if self.temperature == 0:
            top, token = logits.max(-1)
            return token.where(finite(logits, top), -1)
        p, good = self.probabilities(logits)
        return self.draw(p).where(good, -1)

    def probabilities(self, logits):
        """(What is drawn from above temperature 0, (..., V) in float32; whether the logits are all finite, (...))."""
        top = logits.amax(-1)
        good = finite(logits, top)
        logits = ((logits - top[..., None]).float() / self.temperature).masked_fill_(~good[..., None], 0)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the mass before this token suffices already
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        return logits.softmax(-1), good

    def draw(self, p):
        """Token ids (B,), each with its probability in p (B, V), whose rows need not add up to 1."""
        return torch.multinomial(p, 1, generator=self.generator)[:, 0]

    def propose(self, logits):
        """(Token ids (B,), what they were drawn from (B, V), or None if greedy) by a draft's logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(-1), None
        p, _ = self.probabilities(logits)
        return self.draw(p), p

    def accept(self, logits, proposed, q):
        """What a pass yields: ids (B, K + 1), -1 where the logits are not finite, and how many (B,) of each row's
        proposals stand. So many of its ids count, and one more.

        logits (B, K + 1, V): the model's, after the last token and after each proposal. proposed (B, K): drawn from q
        (B, K, V), or certain where that is None.

        Greedy: a proposal stands if it is the model's own, and those before it stand. Else a proposal d stands with
        probability min(1, p(d) / q(d)). The first that does not is replaced by a draw from max(0, p - q), and behind
        the last comes a draw from p: so each id is distributed as p (arXiv 2211.17192).
        """
        if self.temperature == 0:
            ids = self(logits)
            return ids, (ids[:, :-1] == proposed).long().cumprod(-1).sum(-1)
        p, good = self.probabilities(logits)
        (B, K), d, rows = proposed.shape, proposed[..., None], torch.arange(len(p), device=p.device)
        offered = 1.0 if q is None else q.gather(-1, d)[..., 0]
        drawn = torch.rand(B, K, device=p.device, generator=self.generator)
        stand = (drawn * offered < p[:, :K].gather(-1, d)[..., 0]).long().cumprod(-1).sum(-1)  # (B,)
        rest, first, all_stand = p[rows, stand], stand.clamp(max=K - 1), (stand == K)[:, None]
        if q is None:
            left = rest.scatter(-1, proposed[rows, first][:, None], 0.0)
        else:
            left = (rest - q[rows, first]).clamp_(min=0)
        none_left = left.sum(-1, keepdim=True) == 0  # p was q, but for rounding
        ids = F.pad(proposed, (0, 1))
        ids[rows, stand] = self.draw(torch.where(all_stand | none_left, rest, left))
        return ids.where(good, -1), stand


def finite(logits, top):
    """Whether logits (..., V), whose largest are top (...), are all finite, (...): of NaN and others, both are NaN."""
    return top.isfinite() & logits.amin(-1).isfinite()
