"""Tokenizers with one interface, whatever files a folder has. load_tokenizer() chooses the class by the file."""

import contextlib
import functools
import os
import re
from pathlib import Path

from ladder.errors import InputError, first_line

TEMPLATE_FILES = "chat_template.jinja", "chat_template.json"
SETTINGS_FILES = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *TEMPLATE_FILES
VOCABULARY_FILES = "tokenizer.json", "tokenizer.model", "vocab.json"  # the first one in a folder is read
END_TOKENS = (  # they end a text or a turn; other engines stop at them too, whatever config.json says
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip


@contextlib.contextmanager
def library_errors(message):
    """Turn errors of libraries in this block into an InputError. A panic in Rust is no subclass of Exception."""
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

    A subclass sets vocab_size, prefix (the ids that it puts before a text, mostly BOS) and special {text: id}. It
    defines decode(ids) and encode_plain(text, first), where first is False for text that follows a special token.
    """

    template = None  # the checkpoint's chat template, Jinja source
    template_variables = {}
    left_out = ()  # the texts of added tokens for which the embedding has no row; they are encoded as plain text

    def encode(self, text):
        """Return the ids of a prompt: the tokenizer's prefix, then the text, without special tokens."""
        return self.prefix + self.encode_plain(text)

    @property
    def ends(self):
        """{text: id} of the tokens that end a text or a turn: the tokenizer's eos_token and those in END_TOKENS."""
        names = self.template_variables.get("eos_token"), *END_TOKENS
        return {text: i for name in names for text, i in self.special.items() if text == name}

    def continuation(self, prompt, ids):
        """Return the text that `ids` add to the text of the prompt's ids."""
        return self.decode(prompt + ids)[len(self.decode(prompt)) :]

    def encode_markup(self, text):
        """Return the ids of a text that contains names of special tokens, as a chat template writes it; adds no BOS."""
        longest_first, ids = sorted(self.special, key=len, reverse=True), []
        names = "|".join(map(re.escape, longest_first)) or "(?!)"
        for i, piece in enumerate(re.split(f"({names})", text)):
            if piece:
                ids += [self.special[piece]] if piece in self.special else self.encode_plain(piece, first=i == 0)
        return ids

    def add(self, text, i, hidden):
        """Add a token that only the settings files name. decode leaves it out if it is hidden."""
        self.special.setdefault(text, i)

    def token_id(self, text):
        """Return the id of a token that is special or could be added as a special one, else None."""
        return self.special.get(text)

    def chat(self, messages, answer=True, variables=None):
        """Return the ids of a conversation [{"role", "content"}, ...], followed by the start of an answer if `answer`.

        variables: {name: value} of further variables that the chat template reads.
        """
        from ladder.chat.rendering import render  # late: it imports jinja2

        return self.encode_markup(render(self, messages, answer, variables))


class SentencePieceTokenizer(Tokenizer):
    legacy = True  # whether text after a special token gets a space in front, as the beginning of a text does

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
        mark = "\ue000"  # no piece contains this character: the space is put before it, and no piece crosses it
        return self.model.encode(mark + text)[len(self.model.encode(mark)) :]

    def decode(self, ids):
        skip = set(self.special.values())
        return self.model.decode([i for i in ids if i not in skip and i < self.vocab_size])


def load_tokenizer(source, vocab_size=None):
    """Return the tokenizer of a checkpoint folder, or None if it has none. source may also be a file, without settings.

    Raises InputError if it cannot be read, or if it does not fit the model's vocab_size. It may have up to 5 % fewer
    tokens, since embeddings are padded (DeepSeek 7B has 102400 rows for 100015 tokens). Added tokens beyond vocab_size
    are left out (Gemma 3 1B has 262144 rows, and <image_soft_token> is token 262144).
    """
    path = folder = Path(source)
    if folder.is_dir():
        path = next((folder / name for name in VOCABULARY_FILES if os.path.lexists(folder / name)), None)
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
        if any((folder / name).exists() for name in SETTINGS_FILES):
            from ladder.checkpoints.hf_tokenizer import read_settings

            read_settings(tokenizer, folder, vocab_size)
    return tokenizer


class TextStream:
    """Turns ids into text as they arrive, without splitting a character or losing a space."""

    def __init__(self, tokenizer, prompt=()):
        self.tokenizer, self.ids = tokenizer, list(prompt)
        # The text of ids[:shown] was returned. Decoders drop leading spaces, so new ids are decoded together with
        # ids[start:shown], whose text is more than spaces.
        self.start, self.shown = 0, len(self.ids)

    def push(self, ids):
        """Return the text that is complete with these ids. The bytes of an unfinished character are held back."""
        self.ids += ids
        new = self.flush()
        if new.endswith("\ufffd"):
            return ""
        if new.strip():
            self.start = self.shown
        self.shown = len(self.ids)
        return new

    def flush(self):
        """Return the text that push still holds back, even if its last character is unfinished."""
        before = self.tokenizer.decode(self.ids[self.start : self.shown])
        return self.tokenizer.decode(self.ids[self.start :])[len(before) :]
