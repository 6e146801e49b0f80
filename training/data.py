"""Text as training data: documents become tokens in a memory-mapped file, and those become packed windows.

Shape letters: B batch, S sequence.
"""

import dataclasses
import json
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from formats.checkpoint import first_line
from model import InputError
from runtime import writing

SEPARATOR = "<|endoftext|>"
# A token as it lies on the disk: the document that it is of, and whether its prediction counts in the loss.
TOKEN = np.dtype([("id", "<u4"), ("document", "<u4"), ("counts", "?")])

# ---------------------------------------------------------------------------------------------------------------------
# Documents


def documents(path):
    """The documents of a file, one at a time, with where they stand: (text or chat messages, "FILE" or "FILE line 7").

    Plain text holds SEPARATOR between two; of a .jsonl each line is an object with "text" or "messages".
    Raises InputError for a file that cannot be read as that.
    """
    path = str(path)
    try:
        with open(path, encoding="utf-8") as f:
            if path.endswith(".jsonl"):
                for number, line in enumerate(f, start=1):
                    if line.strip():
                        yield _record(line, f"{path} line {number}"), f"{path} line {number}"
                return
            text = ""
            for line in chain(f, [SEPARATOR]):
                text += line
                if SEPARATOR in line:
                    *complete, text = text.split(SEPARATOR)
                    yield from ((d.strip(), path) for d in complete if d.strip())
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not valid UTF-8") from None


def _record(line, where):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where} is not valid JSON ({getattr(e, 'msg', first_line(e))})") from None
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has half of a surrogate pair, which is no character") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InputError(f'{where} has neither a "text" nor "messages", each with a "role" and a "content"')
    return messages


def _is_message(m):
    return isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)


def encode(tokenizer, document, end, where):
    """(ids, whether each counts) of a document: all of BOS text end, or of a chat the assistant's answers alone.

    end: the id that ends a text, or None. where: what an InputError calls the document.
    """
    if isinstance(document, str):
        ids = tokenizer.encode(document) + ([] if end is None else [end])
        return ids, [True] * len(ids)
    ids, counts, seen = [], [], ""
    for i, message in enumerate(document):
        if message["role"] != "assistant":
            continue
        for messages, answer in (document[:i], False), (document[: i + 1], True):
            try:
                text = tokenizer.render(messages, not answer) if messages else ""
            except InputError as e:
                raise InputError(f"{where}: {e}") from None
            if not text.startswith(seen):
                raise InputError(f"{where}: the chat template rewrites earlier messages when later ones come")
            longer = tokenizer.encode_markup(text)
            if longer[: len(ids)] != ids:  # a token would reach across the border: answers are written behind it
                longer = ids + tokenizer.encode_markup(text[len(seen) :])
            counts += [answer] * (len(longer) - len(ids))
            ids, seen = longer, text
    return ids, counts


def tokenize(paths, tokenizer, end, target, show=True):
    """Write the tokens of all documents of the files, in their order, to the file target; returns how many.

    The file appears when it is complete. Raises InputError where the files hold no document.
    """
    total, number = 0, 0
    with writing.new_file(target) as unfinished, open(unfinished, "wb") as f:
        found = chain.from_iterable(map(documents, paths))
        for document, where in tqdm(found, desc="tokenizing", unit=" documents", delay=1, disable=not show):
            ids, counts = encode(tokenizer, document, end, where)
            tokens = np.empty(len(ids), TOKEN)
            tokens["id"], tokens["document"], tokens["counts"] = ids, number, counts
            tokens.tofile(f)
            total, number = total + len(ids), number + 1
        if total == 0:
            raise InputError(f"{', '.join(map(str, paths))}: no text")
    return total


def train_tokenizer(texts, vocab_size, path):
    """A SentencePiece BPE vocabulary in Llama 2's style: BOS 1, EOS 2, unknown characters as bytes."""
    from sentencepiece import SentencePieceTrainer

    if not texts:
        raise InputError("--text: no text to make a vocabulary of")
    try:
        with writing.new_file(path) as unfinished, open(unfinished, "wb") as f:
            SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=f, vocab_size=vocab_size, model_type="bpe",
                byte_fallback=True, character_coverage=0.9999, normalization_rule_name="identity", split_digits=True,
                remove_extra_whitespaces=False, max_sentence_length=1 << 20, num_threads=1, minloglevel=2,
            )  # fmt: skip
    except RuntimeError as e:  # too little text for so many pieces, or too few pieces for its characters
        raise InputError(f"--vocab-size {vocab_size} does not suit the text: {str(e).rpartition('] ')[2]}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Windows


@dataclasses.dataclass
class Batch:
    """Windows that are packed with documents, none of which attends to another.

    tokens, targets, positions (in their document, as far as it lies in the window): (B, S). counts: (B, S) bool, which
    targets are in the loss. mask: (B, S, S) bool, or None where each window holds one document.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device):
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{name: tensor if tensor is None else tensor.to(device) for name, tensor in moved.items()})


class Windows:
    """The windows of a file of tokens, each of S of them and their successors, in an order that depends on the seed.

    called: what an InputError calls the file, which has not one window, or none in which a token counts.
    """

    def __init__(self, path, seq_len, called="the file", seed=0, at_most=None):
        try:
            self.tokens = np.memmap(path, TOKEN, mode="r")[: None if at_most is None else at_most + 1]
        except OSError as e:
            raise InputError(f"{path}: {e.strerror}: do all nodes share this folder?") from None
        self.seq_len, self.seed = seq_len, seed
        self.n = (len(self.tokens) - 1) // seq_len
        if self.n < 1:
            raise InputError(f"{called} holds {len(self.tokens)} tokens, fewer than --seq-len {seq_len} and one")
        if not self.tokens["counts"].any():
            raise InputError(f"{called} has no token that counts: of chats only what the assistant says does")
        self.orders = {}

    def order(self, epoch):
        """The windows in the order in which an epoch takes them."""
        if epoch not in self.orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.orders = {epoch: torch.randperm(self.n, generator=generator).tolist()}
        return self.orders[epoch]

    def indices(self, first, count):
        """The windows that `count` draws from draw number `first` on give: epoch after epoch, each in its order."""
        return [self.order(i // self.n)[i % self.n] for i in range(first, first + count)]

    def batch(self, indices):
        """The Batch of some windows; None among the indices is a row in which nothing counts."""
        S = self.seq_len
        rows = np.stack([self.tokens[(i or 0) * S : (i or 0) * S + S + 1] for i in indices])
        ids, document = (torch.from_numpy(rows[name].astype(np.int64)) for name in ("id", "document"))
        same = document[:, 1:] == document[:, :-1]
        counts = (
            torch.from_numpy(rows["counts"][:, 1:]) & same & torch.tensor([i is not None for i in indices])[:, None]
        )
        document, place = document[:, :-1], torch.arange(S)
        begins = F.pad(~same[:, :-1], (1, 0), value=True)
        positions = place - torch.where(begins, place, 0).cummax(-1).values
        mask = None
        if begins[:, 1:].any():
            mask = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
        return Batch(ids[:, :-1], ids[:, 1:], counts, positions, mask)
