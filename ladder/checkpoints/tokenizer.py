"""One interface over SentencePiece, hf_tokenizer.py and ladder/checkpoints; load_tokenizer() picks one."""

import contextlib
import functools
import os
import re
from pathlib import Path

from ladder.chat.rendering import render
from ladder.errors import InputError, first_line

TEMPLATES = "chat_template.jinja", "chat_template.json"
SETTINGS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *TEMPLATES
VOCABULARIES = "tokenizer.json", "tokenizer.model", "vocab.json"  # of several the first is read
ENDS = (  # of texts and of turns: other engines stop at these too, whatever config.json names
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip


@contextlib.contextmanager
def library_errors(message):
    """Turn the errors of libraries in this block into an InputError. A panic of one in Rust is no Exception."""
    try:
        yield
    except InputError:
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise InputError(f"{message}: {first_line(e)}") from None


class Tokenizer:
    """encode(text) -> ids; decode(ids) -> text without special tokens; chat(messages) -> ids.

    A subclass sets vocab_size, prefix (the ids that it puts before a text, mostly BOS) and special {text: id}, and has
    decode(ids) and encode_plain(text, first). first is False for text that follows a special token.
    """

    template = None  # the checkpoint's chat template, Jinja source
    template_variables = {}
    left_out = ()  # the texts of added tokens for which the embedding has no row: they are plain text

    def encode(self, text):
        """Return the ids of a prompt: the tokenizer's prefix, and the text taken as plain text."""
        return self.prefix + self.encode_plain(text)

    @property
    def ends(self):
        """{text: id} of the tokens that end a text or a turn: the tokenizer's own eos_token, and those in ENDS."""
        names = self.template_variables.get("eos_token"), *ENDS
        return {text: i for name in names for text, i in self.special.items() if text == name}

    def continuation(self, prompt, ids):
        """Return the text that ids add to the ids of a prompt."""
        return self.decode(prompt + ids)[len(self.decode(prompt)) :]

    def encode_markup(self, text):
        """Return the ids of text that names special tokens, as a chat template writes it; adds no BOS."""
        longest_first, ids = sorted(self.special, key=len, reverse=True), []
        names = "|".join(map(re.escape, longest_first)) or "(?!)"
        for i, piece in enumerate(re.split(f"({names})", text)):
            if piece:
                ids += [self.special[piece]] if piece in self.special else self.encode_plain(piece, first=i == 0)
        return ids

    def add(self, text, i, hidden):
        """Add a token that only the settings name; decode leaves out a hidden one."""
        self.special.setdefault(text, i)

    def token_id(self, text):
        """Return the id of a token that is, or could be added as, a special one, or None."""
        return self.special.get(text)

    def chat(self, messages, answer=True, variables=None):
        """Return the ids of a conversation [{"role", "content"}, ...], and of the start of an answer if asked for.

        variables: {name: value} of more that the chat template reads.
        """
        return self.encode_markup(render(self, messages, answer, variables))


class SentencePieceTokenizer(Tokenizer):
    legacy = True  # text after a special token gets a space in front, as the beginning does

    def __init__(self, path):
        from sentencepiece import SentencePieceProcessor

        self.model = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self.model.vocab_size()
        ids = {"bos_token": self.model.bos_id(), "eos_token": self.model.eos_id()}
        self.template_variables = {name: self.model.id_to_piece(i) for name, i in ids.items() if i >= 0}
        self.special = {text: ids[name] for name, text in self.template_variables.items()}
        self.prefix = [i for i in [ids["bos_token"]] if i >= 0]

    @library_errors("the tokenizer cannot encode this text")
    def encode_plain(self, text, first=True):
        if first or self.legacy:
            return self.model.encode(text)
        mark = "\ue000"  # a character of no piece: it takes the space, and no piece reaches beyond it
        return self.model.encode(mark + text)[len(self.model.encode(mark)) :]

    def decode(self, ids):
        skip = set(self.special.values())
        return self.model.decode([i for i in ids if i not in skip and i < self.vocab_size])


def load_tokenizer(source, vocab_size=None):
    """Return the tokenizer of a checkpoint folder, None if it has none, or the one in a file, without settings.

    Raises InputError if it cannot be read, or if its vocabulary is not the model's vocab_size (up to 5 % smaller is
    taken for padding of the embedding: DeepSeek 7B has 102400 rows for 100015 tokens; added tokens beyond vocab_size
    are left out: Gemma 3 1B has 262144 rows, and <image_soft_token> as token 262144).
    """
    path = folder = Path(source)
    if folder.is_dir():
        path = next((folder / name for name in VOCABULARIES if os.path.lexists(folder / name)), None)
    if path is None:
        return None
    with library_errors(f"{path} cannot be read, or a file of settings beside it"):
        with open(path, "rb") as f:
            line = f.readline(200)
        kind = SentencePieceTokenizer
        if path.suffix == ".json":
            from ladder.checkpoints.hf_tokenizer import JsonTokenizer

            kind = functools.partial(JsonTokenizer, vocab_size=vocab_size)
        elif re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", line):
            from ladder.checkpoints.tiktoken_ranks import TiktokenTokenizer as kind
        tokenizer = kind(path)
        if vocab_size is not None and not 0.95 * vocab_size <= tokenizer.vocab_size <= vocab_size:
            raise InputError(f"{path} has {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
        if any((folder / name).exists() for name in SETTINGS):
            from ladder.checkpoints.hf_tokenizer import read_settings

            read_settings(tokenizer, folder, vocab_size)
    return tokenizer


class TextStream:
    """Turns a growing list of ids into text, piece by piece, without splitting a character or losing a space."""

    def __init__(self, tokenizer, prompt=()):
        self.tokenizer, self.ids = tokenizer, list(prompt)
        # ids[:shown] are printed. ids[start:shown] are context with more than spaces: decoders drop leading spaces.
        self.start, self.shown = 0, len(self.ids)

    def push(self, ids):
        """Return the new text that the ids complete; bytes of an unfinished character are held back."""
        self.ids += ids
        new = self.flush()
        if new.endswith("\ufffd"):
            return ""
        if new.strip():
            self.start = self.shown
        self.shown = len(self.ids)
        return new

    def flush(self):
        """Return the text that push still holds back, as it is."""
        before = self.tokenizer.decode(self.ids[self.start : self.shown])
        return self.tokenizer.decode(self.ids[self.start :])[len(before) :]
