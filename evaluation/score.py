"""How well a model predicts a text, and how far it is from another model.

Shape letters: n tokens, B batch, S sequence, V vocabulary, v this rank's part of the vocabulary, padded.
"""

import torch
from tqdm import tqdm

from decoding.sampling import pad
from runtime import place

SEPARATOR = "<|endoftext|>"  # between two documents of a text
MAX_LOGITS = 2**22  # logits converted to float32 at once: those of a whole window may take a gigabyte


def windows(n, size, stride):
    """Return windows over n tokens as (start, stop, first): each scores tokens `first` to `stop`, all but token 0 once.

    They advance by stride < size: after the first window, tokens are predicted from at least size - stride tokens.
    """
    stop, result = 1, []
    while stop < n:
        start = max(0, min(n - size, stop - (size - stride))) if result else 0
        first, stop = stop, min(start + size, n)
        result.append((start, stop, first))
    return result


def float_chunks(logits, tokens):
    """Yield (float32 logits, tokens) of a few rows, on all ranks as many, of logits (n, V or v) and tokens (n,)."""
    step = max(1, MAX_LOGITS // logits.shape[-1])
    for i in range(0, len(tokens), step):
        yield logits[i : i + step].float(), tokens[i : i + step]


def predictions(models, documents, size, stride, batch, show=False):
    """Yield ([logits (n, v) of each model], tokens (n,)) for each window of the documents, which are lists of ids."""
    plan = [(ids, *window) for ids in documents for window in windows(len(ids), size, stride)]
    device = models[0].device
    for i in tqdm(range(0, len(plan), batch), desc="scoring", unit="batch", delay=1, disable=None if show else True):
        place.at("scoring of batch", i // batch)
        rows = plan[i : i + batch]
        tokens, _ = pad([ids[start:stop] for ids, start, stop, _ in rows], device)
        logits = [model(tokens[:, :-1]) for model in models]
        for row, (_, start, stop, first) in enumerate(rows):
            begin, end = first - start, stop - start
            yield [each[row, begin - 1 : end - 1] for each in logits], tokens[row, begin:end]
    place.at("scoring", timed=False)


def token_nats(logits, tokens, first, comm):
    """Return -log p (n,) of tokens (n,) from this rank's logits (n, v), whose first column is token `first`."""
    column = tokens - first
    is_local = (column >= 0) & (column < logits.shape[-1])
    target = logits.gather(-1, column.where(is_local, 0)[:, None])[:, 0].where(is_local, -torch.inf)
    sums, targets = comm.all_gather(torch.stack((logits.logsumexp(-1), target), -1)).unbind(-1)
    return sums.logsumexp(0) - targets.amax(0)


@torch.inference_mode()
def total_nats(model, documents, size, stride, batch, show=False):
    """Return the sum of -log p(token | those before it in its window) over all tokens but each document's first."""
    total = 0.0
    for (logits,), tokens in predictions([model], documents, size, stride, batch, show):
        logits, first, _ = model.comm.local_logits(logits)  # padded: on all ranks the same shape
        for chunk, targets in float_chunks(logits, tokens):
            total += token_nats(chunk, targets, first, model.comm).double().sum().item()
    return total


@torch.inference_mode()
def divergence(model, reference, documents, size, stride, batch, show=False):
    """Return (kl, agree, nats, reference's nats), each (n,) on the CPU, of the tokens that total_nats sums.

    kl: sum over the vocabulary of p_reference log(p_reference / p_model), in float64, since for close models it is a
    small difference of large sums. agree: bool, whether both find the same token the likeliest. nats: -log p(token).
    """
    columns = []
    for both, tokens in predictions([model, reference], documents, size, stride, batch, show):
        chunks = [float_chunks(model.comm.gather_logits(logits), tokens) for logits in both]
        for (logits, targets), (reference_logits, _) in zip(*chunks, strict=True):
            q, p = logits.double().log_softmax(-1), reference_logits.double().log_softmax(-1)
            kl, agree = (p.exp() * (p - q)).sum(-1), logits.argmax(-1) == reference_logits.argmax(-1)
            nats = [-x.gather(-1, targets[:, None])[:, 0] for x in (q, p)]
            columns.append([x.cpu() for x in (kl, agree, *nats)])
    return [torch.cat(column) for column in zip(*columns, strict=True)]
