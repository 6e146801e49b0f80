"""Text as training data: documents become tokens in a memory-mapped file, and those become packed windows."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from evaluation.score import SEPARATOR
from formats.checkpoint import first_line, read_text
from runtime import writing
from runtime.errors import InputError

MAX_CHARACTERS = 1 << 18  # of a text that SentencePiece gets: it leaves out longer ones
# A token on disk: its id, the index of its document, and whether predicting it counts in the loss.
TOKEN = np.dtype([("id", "<u4"), ("document", "<u4"), ("counts", "?")])


def documents(path):
    """Yield the documents of a file, each as (text or chat messages, "FILE" or "FILE line 7").

    Plain text has SEPARATOR between two documents; each line of a .jsonl is an object with "text" or "messages".
    Raises InputError for a file that cannot be read as that.
    """
    text = read_text(path)
    if not str(path).endswith(".jsonl"):
        yield from ((part.strip(), str(path)) for part in text.split(SEPARATOR) if part.strip())
        return
    for n, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _record(line, f"{path} line {n}"), f"{path} line {n}"


def _record(line, where):
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


def encode(tokenizer, document, end):
    """Return (ids, whether each counts in the loss). In a text all count; in a chat, the assistant's answers.

    A text becomes BOS, its tokens, and the id `end` unless that is None.
    """
    if isinstance(document, str):
        ids = tokenizer.encode(document) + ([] if end is None else [end])
        return ids, [True] * len(ids)
    ids, counts, seen = [], [], ""
    for i, message in enumerate(document):
        if message["role"] != "assistant":
            continue
        for messages, answer in (document[:i], False), (document[: i + 1], True):
            text = tokenizer.render(messages, not answer) if messages else ""
            if not text.startswith(seen):
                raise InputError("the chat template rewrites earlier messages when later ones come")
            longer = tokenizer.encode_markup(text)
            if longer[: len(ids)] != ids:  # a token joins a prompt's end and an answer's start: split it there
                longer = ids + tokenizer.encode_markup(text[len(seen) :])
            counts += [answer] * (len(longer) - len(ids))
            ids, seen = longer, text
    return ids, counts


def tokenize(paths, tokenizer, end, target, show=True):
    """Write the tokens of the files' documents, in their order, to the file target; return how many there are."""

    def encode_one(record):
        document, where = record
        try:
            return encode(tokenizer, document, end)
        except InputError as e:
            raise InputError(f"{where}: {e}") from None

    total = 0
    with writing.new_file(target) as unfinished, open(unfinished, "wb") as f, ThreadPoolExecutor() as pool:
        encoded = chain.from_iterable(pool.map(encode_one, documents(path)) for path in paths)  # map reads a whole file
        bar = tqdm(encoded, desc="tokenizing", unit=" documents", delay=1, disable=None if show else True)
        for n, (ids, counts) in enumerate(bar):
            tokens = np.empty(len(ids), TOKEN)
            tokens["id"], tokens["document"], tokens["counts"] = ids, n, counts
            tokens.tofile(f)
            total += len(ids)
        if total == 0:
            raise InputError(f"{', '.join(map(str, paths))}: no text")
    return total


def train_tokenizer(texts, vocab_size, path):
    """Write a SentencePiece BPE vocabulary in Llama 2's style: BOS 1, EOS 2, unknown characters as bytes."""
    from sentencepiece import SentencePieceTrainer

    if not texts:
        raise InputError("--text: no text to make a vocabulary of")
    chunks = (text[i : i + MAX_CHARACTERS] for text in texts for i in range(0, len(text), MAX_CHARACTERS))
    try:
        with writing.new_file(path) as unfinished, open(unfinished, "wb") as f:
            SentencePieceTrainer.train(
                sentence_iterator=chunks, model_writer=f, vocab_size=vocab_size, model_type="bpe", num_threads=1,
                byte_fallback=True, character_coverage=0.9999, normalization_rule_name="identity", split_digits=True,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2,
                max_sentence_length=4 * MAX_CHARACTERS,
            )  # fmt: skip
    except RuntimeError as e:  # too little text for so many pieces, or too few pieces for its characters
        raise InputError(f"--vocab-size {vocab_size} does not suit the text: {str(e).rpartition('] ')[2]}") from None


@dataclasses.dataclass
class Batch:
    """Windows packed with documents, none of which attends to another.

    tokens, targets, positions (in a window, each document starts at 0): (B, S). counts: (B, S) bool, which targets are
    in the loss. mask: (B, S, S) bool, or None if each window holds one document.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device):
        return Batch(*(None if t is None else t.to(device) for t in vars(self).values()))


class Windows:
    """A file of tokens as windows of seq_len tokens and their successors, drawn in an order that depends on the seed.

    at_most: tokens to use. Raises InputError, in which the file is `called` so, if too few tokens count.
    """

    def __init__(self, path, seq_len, called="the file", seed=0, at_most=None):
        self.tokens = np.memmap(path, TOKEN, mode="r")[: None if at_most is None else at_most + 1]
        self.seq_len, self.seed = seq_len, seed
        self.n = (len(self.tokens) - 1) // seq_len
        if self.n < 1:
            raise InputError(f"{called} holds {len(self.tokens)} tokens; a window takes {seq_len + 1}: see --seq-len")
        if not self.tokens["counts"][1 : self.n * seq_len + 1].any():
            raise InputError(f"{called} has no token that counts: in chats only the assistant's answers do")

    def indices(self, first, n):
        """Return the indices of draws `first` to first + n. Each epoch draws every window once, in its own order."""

        def order(epoch):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            return torch.randperm(self.n, generator=generator)

        draws = range(first, first + n)
        orders = {epoch: order(epoch) for epoch in {i // self.n for i in draws}}
        return [orders[i // self.n][i % self.n].item() for i in draws]

    def batch(self, indices):
        """Return a Batch of these windows. A row whose index is None counts in no loss."""
        S = self.seq_len
        rows = np.stack([self.tokens[(i or 0) * S : (i or 0) * S + S + 1] for i in indices])
        ids, document = (torch.from_numpy(rows[name].astype(np.int64)) for name in ("id", "document"))
        same = document[:, 1:] == document[:, :-1]
        is_drawn = torch.tensor([i is not None for i in indices])[:, None]
        counts = torch.from_numpy(rows["counts"][:, 1:]) & same & is_drawn
        document, place, mask = document[:, :-1], torch.arange(S), None
        starts = F.pad(~same[:, :-1], (1, 0), value=True)
        positions = place - torch.where(starts, place, 0).cummax(-1).values
        if starts[:, 1:].any():
            mask = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
        return Batch(ids[:, :-1], ids[:, 1:], counts, positions, mask)
