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

CUT = 1 << 18  # characters of a document that SentencePiece learns from at once: it leaves out what is too long
# A token on the disk: its id, the number of its document, and whether its prediction counts in the loss.
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
        json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where} is not valid JSON: {first_line(e)}") from None
    match record:
        case {"text": str(text)}:
            return text
        case {"messages": [_, *_] as messages} if all(map(_is_message, messages)):
            return messages
    raise InputError(f'{where} has neither a "text" nor "messages", each with a "role" and a "content"')


def _is_message(m):
    return isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)


def encode(tokenizer, document, end):
    """Return (ids, whether each counts) of a document: all of BOS text end, or only the assistant's answers of a chat.

    end: the id that ends a text, or None.
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
            if longer[: len(ids)] != ids:  # a token would reach across the border, but an answer starts a new one
                longer = ids + tokenizer.encode_markup(text[len(seen) :])
            counts += [answer] * (len(longer) - len(ids))
            ids, seen = longer, text
    return ids, counts


def tokenize(paths, tokenizer, end, target, show=True):
    """Write the tokens of all documents of the files, in their order, to the file target; return their number."""

    def encode_one(found):
        document, where = found
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
    pieces = (text[i : i + CUT] for text in texts for i in range(0, len(text), CUT))
    try:
        with writing.new_file(path) as unfinished, open(unfinished, "wb") as f:
            SentencePieceTrainer.train(
                sentence_iterator=pieces, model_writer=f, vocab_size=vocab_size, model_type="bpe", num_threads=1,
                byte_fallback=True, character_coverage=0.9999, normalization_rule_name="identity", split_digits=True,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2,
                max_sentence_length=4 * CUT,
            )  # fmt: skip
    except RuntimeError as e:  # too little text for so many pieces, or too few pieces for its characters
        raise InputError(f"--vocab-size {vocab_size} does not suit the text: {str(e).rpartition('] ')[2]}") from None


@dataclasses.dataclass
class Batch:
    """Windows packed with documents, none of which attends to another.

    tokens, targets, positions (within the part of the document that lies in the window): (B, S). counts: (B, S) bool,
    which targets are in the loss. mask: (B, S, S) bool, or None where each window holds one document.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device):
        return Batch(*(None if t is None else t.to(device) for t in vars(self).values()))


class Windows:
    """The windows of a file of tokens, each of S tokens and their successors, in an order that depends on the seed.

    called: the file's name in an InputError, for too few tokens or none that counts. at_most: tokens to use.
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
        """Return the windows of n draws from draw `first` on: epoch after epoch, each in an order of its own."""

        def order(epoch):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            return torch.randperm(self.n, generator=generator)

        draws = range(first, first + n)
        orders = {epoch: order(epoch) for epoch in {i // self.n for i in draws}}
        return [orders[i // self.n][i % self.n].item() for i in draws]

    def batch(self, indices):
        """Return the Batch of some windows; None among the indices is a row in which nothing counts."""
        S = self.seq_len
        rows = np.stack([self.tokens[(i or 0) * S : (i or 0) * S + S + 1] for i in indices])
        ids, document = (torch.from_numpy(rows[name].astype(np.int64)) for name in ("id", "document"))
        same = document[:, 1:] == document[:, :-1]
        wanted = torch.tensor([i is not None for i in indices])[:, None]
        counts = torch.from_numpy(rows["counts"][:, 1:]) & same & wanted
        document, place = document[:, :-1], torch.arange(S)
        begins = F.pad(~same[:, :-1], (1, 0), value=True)
        positions = place - torch.where(begins, place, 0).cummax(-1).values
        mask = None
        if begins[:, 1:].any():
            mask = (document[:, :, None] == document[:, None]) & (place[:, None] >= place)
        return Batch(ids[:, :-1], ids[:, 1:], counts, positions, mask)
