"""Turns text into training data: documents become tokens in a memory-mapped file, and these become packed windows."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ladder.checkpoints.checkpoint import read_text
from ladder.errors import InputError, first_line
from ladder.scoring import SEPARATOR
from ladder.seeds import generator

DOCUMENTS_AT_ONCE = 256  # so many are tokenized and in memory at once; an error or a signal waits for them
TOKEN = np.dtype([("id", "<u4"), ("document", "<u4")])  # a token on disk: its id and the index of its document


def documents(path):
    """Yield the documents of a file, each as (text or chat messages, "FILE" or "FILE line 7"). Raises InputError.

    In plain text, SEPARATOR stands between two documents. Each line of a .jsonl is an object with "text" or "messages".
    """
    is_json = str(path).endswith(".jsonl")
    text = read_text(path)
    for n, part in enumerate(text.split("\n" if is_json else SEPARATOR), start=1):
        if part.strip():
            where = f"{path} line {n}" if is_json else path
            yield read_record(part, where) if is_json else part.strip(), where


def read_record(line, where):
    """Return the text or the messages of a line of JSON. Raises InputError."""
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where} is not valid JSON: {first_line(e)}") from None
    match record:
        case {"text": str(text)}:
            return text
        case {"messages": [_, *_] as messages}:
            if all(isinstance(m, dict) and {type(m.get("role")), type(m.get("content"))} == {str} for m in messages):
                return messages
    raise InputError(f'{where} has neither a "text" nor "messages", each with a "role" and a "content"')


def encode(tokenizer, end, record):
    """Return the ids of a record of documents().

    Of a text these are BOS, its tokens and the ids `end`; of a chat, those that its template makes. Raises InputError.
    """
    document, where = record
    if isinstance(document, str):
        return tokenizer.encode(document) + end
    try:
        return tokenizer.chat(document, answer=False)
    except InputError as e:
        raise InputError(f"{where}: {e}") from None


def tokenize(paths, tokenizer, end, target):
    """Write the tokens of the files' documents, in their order, to the file target."""
    with open(target, "wb") as f, ThreadPoolExecutor() as pool:
        records = chain.from_iterable(map(documents, paths))
        batches = iter(lambda: [*islice(records, DOCUMENTS_AT_ONCE)], [])
        results = (pool.map(functools.partial(encode, tokenizer, end), batch) for batch in batches)
        bar = tqdm(chain.from_iterable(results), "tokenizing", unit=" documents", delay=1, disable=None)
        for n, ids in enumerate(bar):
            tokens = np.empty(len(ids), TOKEN)
            tokens["id"] = ids
            tokens["document"] = n
            tokens.tofile(f)


class Batch(NamedTuple):
    """Windows packed with documents, none of which attends to another.

    tokens, targets, positions (in a window, each document starts at 0): (B, S). counts: (B, S) bool, which targets are
    in the loss. mask: (B, S, S) bool, or None if each window holds one document.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None


class Windows:
    """Files of tokens as windows of seq_len tokens and their successors, drawn in an order that depends on the seed.

    paths: the files; several are read into memory. flag: what gave them, for messages. at_most: tokens to use. Raises
    InputError if they fill no window.
    """

    def __init__(self, paths, seq_len, flag, seed=0, at_most=None):
        self.seq_len = seq_len
        self.seed = seed
        files = [np.memmap(path, TOKEN, mode="r") for path in paths if path.stat().st_size]
        self.tokens = files[0] if len(files) == 1 else np.concatenate([np.empty(0, TOKEN), *files])
        self.tokens = self.tokens[: at_most and at_most + 1]
        self.n = (len(self.tokens) - 1) // seq_len
        if self.n < 1:
            raise InputError(f"{flag} holds {len(self.tokens)} tokens; a window takes {seq_len + 1}: see --seq-len")

    def indices(self, first, n):
        """Return the indices of draws `first` to first + n. Each epoch draws every window once, in its own order."""

        @functools.cache
        def order(epoch):
            return torch.randperm(self.n, generator=generator(self.seed * 1_000_003 + epoch))

        return [order(i // self.n)[i % self.n].item() for i in range(first, first + n)]

    def batches(self, indices, rows, world):
        """Yield this rank's share of these windows as Batches of up to `rows` windows, as many on each rank."""
        share = [*indices[world.rank :: world.tp_size]]
        share += [None] * (-(-len(indices) // world.tp_size) - len(share))
        for i in range(0, len(share), rows):
            batch = self.batch(share[i : i + rows])
            yield Batch(*(tensor if tensor is None else tensor.to(world.device) for tensor in batch))

    def batch(self, indices):
        """Return a Batch of these windows. A row whose index is None counts in no loss."""
        S = self.seq_len
        rows = np.stack([self.tokens[(i or 0) * S : (i or 0) * S + S + 1] for i in indices])
        ids, document = (torch.from_numpy(rows[name].astype(np.int64)) for name in ("id", "document"))
        same = document[:, 1:] == document[:, :-1]
        counts = same & torch.tensor([i is not None for i in indices])[:, None]
        document = document[:, :-1]
        place = torch.arange(S)
        mask = None
        starts = F.pad(~same[:, :-1], (1, 0), value=True)
        positions = place - torch.where(starts, place, 0).cummax(-1).values
        if starts[:, 1:].any():
            mask = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
        return Batch(ids[:, :-1], ids[:, 1:], counts, positions, mask)
