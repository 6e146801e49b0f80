"""How well a model predicts a text, how far its predictions lie from another's, and what each layer alone costs in
another wiring.

Shape letters: V vocabulary.
"""

import torch
import torch.nn.functional as F
from tqdm import tqdm

import generate
from model import InputError, rewired, wiring_name
from runtime import watch

PIECE = 2**22  # logits in float32 at a time: those of a whole window, in a large vocabulary, are a gigabyte


def windows(n, size, stride):
    """Windows over n tokens as (start, stop, first): those from `first` to `stop` count, each token but 0 just once.

    They advance by stride < size, so that all but those of the first have at least size - stride tokens before them.
    """
    stop, out = 1, []
    while stop < n:
        start = max(0, min(n - size, stop - (size - stride))) if out else 0
        first, stop = stop, min(start + size, n)
        out.append((start, stop, first))
    return out


def pieces(logits, wanted):
    """Parts (logits float32, wanted) of logits (n, V) in any dtype and the tokens (n,) that they are to predict."""
    step = max(1, PIECE // logits.shape[-1])
    for i in range(0, len(wanted), step):
        yield logits[i : i + step].float(), wanted[i : i + step]


def predictions(models, documents, size, stride, batch, show=False):
    """For each window, ([logits (n, V) of each model], tokens (n,)): each token of a document but its first just once.

    documents: lists of ids.
    """
    plan = [(ids, *window) for ids in documents for window in windows(len(ids), size, stride)]
    device = models[0].norm.weight.device
    for i in tqdm(range(0, len(plan), batch), desc="scoring", unit="batch", delay=1, disable=not show):
        watch.at("scoring of batch", i // batch)
        part = plan[i : i + batch]
        tokens, _ = generate.pad([ids[start:stop] for ids, start, stop, _ in part], device)
        logits = [model(tokens[:, :-1]) for model in models]
        for row, (_, start, stop, first) in enumerate(part):
            begin, end = first - start, stop - start
            yield [each[row, begin - 1 : end - 1] for each in logits], tokens[row, begin:end]
    watch.at("scoring", timed=False)


@torch.inference_mode()
def total_nats(model, documents, size, stride, batch, show=False):
    """The sum of -log p(token | those before it in its window) over all tokens but the first of each document."""
    total = 0.0
    for (logits,), tokens in predictions([model], documents, size, stride, batch, show):
        for part, wanted in pieces(logits, tokens):
            total += F.cross_entropy(part, wanted, reduction="none").double().sum().item()
    return total


@torch.inference_mode()
def divergence(model, reference, documents, size, stride, batch, show=False):
    """A model's predictions against a reference's, of what total_nats sums: (kl, agree, nats, reference's nats).

    kl: sum over the vocabulary of p_reference log(p_reference / p_model). agree: whether both find the same token the
    likeliest. nats: -log p(token). Each (tokens,), float64 (agree: bool), on the CPU.
    """
    found = []
    for (ours, theirs), tokens in predictions([model, reference], documents, size, stride, batch, show):
        for (part, wanted), (other, _) in zip(pieces(ours, tokens), pieces(theirs, tokens), strict=True):
            # in float64: the divergence of close models is a small difference of large sums
            q, p = part.double().log_softmax(-1), other.double().log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1)
            agree = part.argmax(-1) == other.argmax(-1)
            nats = [-x.gather(-1, wanted[:, None])[:, 0] for x in (q, p)]
            found.append([t.cpu() for t in (kl, agree, *nats)])
    return [torch.cat(column) for column in zip(*found, strict=True)]


def alone(config, wiring, layer):
    """The Config of a standard model with only this layer in a wiring; raises InputError where there is none."""
    if config.wiring != "standard":
        raise InputError(f"layers become {wiring} one by one in a standard model, but this one is {config.wiring}")
    return rewired(config, wiring_name(wiring, (layer,)))


def sensitivity(model, score, wiring="ladder", show=False):
    """What each layer of a standard model costs in a wiring: [score(model) with only layer i wired so, for each i].

    score: a function from a model to its nats per token, on any text. The weights stay as they are, and model.config is
    put back in the end. Raises InputError as alone() does.
    """
    own = model.config
    configs = [alone(own, wiring, i) for i in range(own.n_layers)]
    try:
        scores = []
        for config in tqdm(configs, desc="sensitivity", unit="layer", delay=1, disable=not show):
            model.config = config
            scores.append(score(model))
        return scores
    finally:
        model.config = own


def least_sensitive(scores, count):
    """So many layers, those of the lowest scores, in their order; scores: as sensitivity() gives them."""
    return tuple(sorted(sorted(range(len(scores)), key=scores.__getitem__)[:count]))
