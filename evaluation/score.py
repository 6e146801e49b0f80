"""How well a model predicts a text, how far it is from another model, and what each layer alone costs in a wiring."""

import functools
import math

import torch
from tqdm import tqdm

import generate
from formats.wiring_text import wiring_name
from model import WIRINGS, parse_wiring, rewired
from runtime import watch
from runtime.errors import InputError

PIECE = 2**22  # logits in float32 at a time: a window's, in a large vocabulary, take a gigabyte


def windows(n, size, stride):
    """Return windows over n tokens as (start, stop, first): it scores `first` to `stop`, each token but 0 once.

    They advance by stride < size: after the first window, a token has at least size - stride tokens before it.
    """
    stop, out = 1, []
    while stop < n:
        start = max(0, min(n - size, stop - (size - stride))) if out else 0
        first, stop = stop, min(start + size, n)
        out.append((start, stop, first))
    return out


def pieces(logits, wanted):
    """Yield parts (logits float32, wanted) of logits (n, V vocabulary) and the tokens (n,) to predict.

    Of this rank's part of the vocabulary as well.
    """
    step = max(1, PIECE // logits.shape[-1])
    for i in range(0, len(wanted), step):
        yield logits[i : i + step].float(), wanted[i : i + step]


def predictions(models, documents, size, stride, batch, show=False):
    """Yield ([logits (n, v) of each model], tokens (n,)) of each window of the documents, which are lists of ids.

    v: this rank's part of the vocabulary.
    """
    plan = [(ids, *window) for ids in documents for window in windows(len(ids), size, stride)]
    device = models[0].device
    for i in tqdm(range(0, len(plan), batch), desc="scoring", unit="batch", delay=1, disable=None if show else True):
        watch.at("scoring of batch", i // batch)
        part = plan[i : i + batch]
        tokens, _ = generate.pad([ids[start:stop] for ids, start, stop, _ in part], device)
        logits = [model(tokens[:, :-1]) for model in models]
        for row, (_, start, stop, first) in enumerate(part):
            begin, end = first - start, stop - start
            yield [each[row, begin - 1 : end - 1] for each in logits], tokens[row, begin:end]
    watch.at("scoring", timed=False)


def nats_of(logits, wanted, first, comm):
    """Return -log p (n,) of tokens (n,), given this rank's padded logits (n, v), of the tokens from `first` on.

    The ranks exchange two numbers a token.
    """
    own = wanted - first
    here = (own >= 0) & (own < logits.shape[-1])
    target = logits.gather(-1, own.where(here, 0)[:, None])[:, 0].where(here, -torch.inf)
    sums, targets = comm.all_gather(torch.stack((logits.logsumexp(-1), target), -1)).unbind(-1)
    return sums.logsumexp(0) - targets.amax(0)


@torch.inference_mode()
def total_nats(model, documents, size, stride, batch, show=False):
    """Return the sum of -log p(token | those before it in its window) over all tokens but each document's first."""
    total = 0.0
    for (logits,), tokens in predictions([model], documents, size, stride, batch, show):
        logits, first, _ = model.comm.local_logits(logits)  # padded: all ranks have the same pieces
        for part, wanted in pieces(logits, tokens):
            total += nats_of(part, wanted, first, model.comm).double().sum().item()
    return total


@torch.inference_mode()
def divergence(model, reference, documents, size, stride, batch, show=False):
    """Return (kl, agree, nats, reference's nats) of the tokens that total_nats sums, each (tokens,), on the CPU.

    kl: sum over the vocabulary of p_reference log(p_reference / p_model). agree: whether both find the same token the
    likeliest (bool). nats: -log p(token). In float64: the divergence of close models is a small difference of large
    sums.
    """
    found = []
    for parts, tokens in predictions([model, reference], documents, size, stride, batch, show):
        ours, theirs = (model.comm.gather_logits(part) for part in parts)
        for (part, wanted), (other, _) in zip(pieces(ours, tokens), pieces(theirs, tokens), strict=True):
            q, p = part.double().log_softmax(-1), other.double().log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1)
            agree = part.argmax(-1) == other.argmax(-1)
            nats = [-x.gather(-1, wanted[:, None])[:, 0] for x in (q, p)]
            found.append([t.cpu() for t in (kl, agree, *nats)])
    return [torch.cat(column) for column in zip(*found, strict=True)]


def alone(config, wiring, layer):
    """Return the Config of a standard model with only this layer (of a pair: and the next) in a wiring.

    Raises InputError.
    """
    named = parse_wiring(wiring)
    if config.wiring != "standard" or named.parameter is not None:
        raise InputError(f"--sensitivity takes a standard model and a wiring NAME, not {config.wiring} and {wiring}")
    layers = tuple(range(layer, layer + WIRINGS[named.name].blocks))
    return rewired(config, wiring_name(*named._replace(parameter=layers)))


def sensitivity(model, score, wiring="ladder", show=False):
    """Return [score(model) with only layer i in a wiring, for each i] of a standard model; of a pair: i and i + 1.

    score: a function from a model to its nats per token, on any text. Raises InputError as alone() does.
    """
    own, scores = model.config, []
    configs = [alone(own, wiring, i) for i in range(own.n_layers + 1 - alone(own, wiring, 0).named_wiring.blocks)]
    for config in tqdm(configs, desc="sensitivity", unit="layer", delay=1, disable=None if show else True):
        model.config = config
        scores.append(score(model))
    model.config = own
    return scores


def least_sensitive(scores, count, blocks=1):
    """Return the `count` layers of the lowest scores, in order; scores: from sensitivity(), of so many layers each."""

    @functools.cache
    def best(i, left):
        """Return (the least sum, its layers) of so many neighbours that do not overlap, from layer i on."""
        if left == 0 or i >= len(scores):
            return (math.inf if left else 0.0), ()
        rest, layers = best(i + blocks, left - 1)
        return min(best(i + 1, left), (scores[i] + rest, (*range(i, i + blocks), *layers)))

    return best(0, count // blocks)[1]
