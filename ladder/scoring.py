"""How well a model predicts a text, and how far it is from another model.

Shape letters: n tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ladder.decoding.batch import pad
from ladder.progress import progress

SEPARATOR = "<|endoftext|>"  # between two documents of a text
MAX_LOGITS = 2**22  # logits converted to float64 at once: those of a whole window may take gigabytes


def windows(n, size, stride):
    """Return windows over n tokens as (start, stop, first): each scores tokens `first` to `stop`, all but token 0 once.

    They advance by stride < size: after the first window, tokens are predicted from at least size - stride tokens.
    """
    stop = 1
    result = []
    while stop < n:
        start = max(0, min(n - size, stop - (size - stride))) if result else 0
        first = stop
        stop = min(start + size, n)
        result.append((start, stop, first))
    return result


@torch.inference_mode()
def predictions(models, documents, size, stride, batch, show=False):
    """Yield ([log p (n, V) float64 of each model], tokens (n,)) of a few tokens at a time, on all ranks the same.

    They come from windows of the documents, which are lists of ids: all tokens but each document's first.
    """
    plan = [(ids, *window) for ids in documents for window in windows(len(ids), size, stride)]
    device = models[0].device
    step = max(1, MAX_LOGITS // models[0].config.vocab_size)
    for i in tqdm(range(0, len(plan), batch), desc="scoring", unit="batch", delay=1, disable=None if show else True):
        progress.at("scoring of batch", i // batch)
        rows = plan[i : i + batch]
        tokens, _ = pad([ids[start:stop] for ids, start, stop, _ in rows], device)
        logits = [model(tokens[:, :-1]) for model in models]
        for row, (_, start, stop, first) in enumerate(rows):
            for begin in range(first - start, stop - start, step):
                end = min(begin + step, stop - start)
                pairs = zip(models, logits, strict=True)
                whole = [model.comm.gather_logits(each[row, begin - 1 : end - 1]) for model, each in pairs]
                yield [each.double().log_softmax(-1) for each in whole], tokens[row, begin:end]
    progress.at("scoring", timed=False)


def total_nats(model, documents, size, stride, batch, show=False):
    """Return the sum of -log p of all tokens; the arguments are those of predictions."""
    scored = predictions([model], documents, size, stride, batch, show)
    return sum(F.nll_loss(logp, tokens, reduction="sum").item() for (logp,), tokens in scored)


def divergence(model, reference, documents, size, stride, batch, show=False):
    """Return (kl, agree, nats, reference's nats), each (n,) on the CPU, of the tokens that total_nats sums.

    kl: sum over the vocabulary of p_reference log(p_reference / p_model), in float64, since for close models it is a
    small difference of large sums. agree: bool, whether both find the same token the likeliest. nats: -log p(token).
    """
    columns = []
    for (q, p), tokens in predictions([model, reference], documents, size, stride, batch, show):
        kl = (p.exp() * (p - q)).sum(-1)
        agree = q.argmax(-1) == p.argmax(-1)
        nats = [F.nll_loss(x, tokens, reduction="none") for x in (q, p)]
        columns.append([x.cpu() for x in (kl, agree, *nats)])
    return [torch.cat(column) for column in zip(*columns, strict=True)]
