"""Tokenizers with one interface, whatever files a folder has. load_tokenizer() chooses the class by the file."""

import contextlib
import functools
import os
import re
from itertools import groupby
from pathlib import Path

from ladder.errors import InputError, first_line

TEMPLATE_FILES = "chat_template.jinja", "chat_template.json"
SETTINGS_FILES = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *TEMPLATE_FILES
VOCABULARY_FILES = "tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json"  # the first one is read
FLAGS = "special", "lstrip", "rstrip", "single_word", "normalized"  # of an added token


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

    A subclass sets vocab_size, prefix (the ids that it puts before a text, mostly BOS), special {text: id} of the added
    tokens and hidden, the ids of those that decode leaves out. It defines decode(ids), encode_plain(text, first), where
    first is False for text that follows a special token, encode_markup(text), token_id(text) and add.
    """

    template = None  # the checkpoint's chat template, Jinja source
    template_variables = {}
    left_out = ()  # the texts of added tokens for which the embedding has no row; they are encoded as plain text

    def encode(self, text):
        """Return the ids of a prompt: the tokenizer's prefix, then the text, without special tokens."""
        return self.prefix + self.encode_plain(text)

    @property
    def end_tokens(self):
        """{text: id} of the token that ends a text: the tokenizer's eos_token."""
        name = self.template_variables.get("eos_token")
        return {name: self.special[name]} if name in self.special else {}

    def continuation(self, prompt, ids):
        """Return the text that `ids` add to the text of the prompt's ids."""
        return self.decode(prompt + ids)[len(self.decode(prompt)) :]

    def encode_markup(self, text):
        """Return the ids of a text that contains names of special tokens, as a chat template writes it; adds no BOS."""
        return self.encode_plain(text, markup=True)

    def hide(self, i, is_special):
        """Leave an added token out of printed text if it is special. The file that says it last holds."""
        (self.hidden.add if is_special else self.hidden.discard)(i)

    def add_as_transformers_does(self):
        """Make added tokens of what transformers splits a text at, and the file's own library does not.

        For files with settings of transformers beside them; without these the library alone says what a text's ids are.
        """

    def chat(self, messages, answer=True, variables=None):
        """Return the ids of a conversation [{"role", "content"}, ...], followed by the start of an answer if `answer`.

        variables: {name: value} of further variables that the chat template reads.
        """
        from ladder.text.rendering import render  # late: it imports jinja2

        return self.encode_markup(render(self, messages, answer, variables))


class SplittingTokenizer(Tokenizer):
    """A tokenizer whose library knows no added tokens: texts are split at them, by another library.

    A subclass defines encode_text(text, first) and decode_text(ids, first), which see no added tokens.
    """

    def __init__(self, tokens):
        """tokens: {text: id} of special tokens."""
        self.special = {}
        self.flags = {}
        self.names = {}
        self.hidden = set()
        for text, i in tokens.items():
            self.add({"content": text}, i)

    def add(self, token, i):
        """Add a token, {"content": text} with its FLAGS, or change the flags of one."""
        text = token["content"]
        old = self.names.get(i)
        if old not in (None, text):  # a token that was reserved for others
            del self.special[old], self.flags[old]
        i = self.special.setdefault(text, i)
        old = self.flags.get(text, {flag: flag == "special" for flag in FLAGS})
        self.names[i] = text
        self.flags[text] = {flag: token.get(flag, old[flag]) for flag in FLAGS}
        self.hide(i, self.flags[text]["special"])
        self.__dict__.pop("splitter", None)

    @functools.cached_property
    def splitter(self):
        """A tokenizers.Tokenizer to which what stands between added tokens is one unknown word."""
        import tokenizers

        splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        splitter.add_tokens([tokenizers.AddedToken(text, **flags) for text, flags in self.flags.items()])
        return splitter

    @library_errors("the tokenizer cannot encode this text")
    def encode_plain(self, text, first=True, markup=False):
        self.splitter.encode_special_tokens = not markup  # if set, the names of special tokens are plain text
        split = self.splitter.encode(text)
        ids = []
        for i, (start, stop) in zip(split.ids, split.offsets, strict=True):
            name = self.splitter.id_to_token(i)  # "": what stands between added tokens
            ids += [self.special[name]] if name else self.encode_text(text[start:stop], first and start == 0)
        return ids

    @library_errors("the tokenizer cannot decode these tokens")
    def decode(self, ids):
        text = ""
        shown = (i for i in ids if i not in self.hidden)
        for is_added, run in groupby(shown, self.names.__contains__):
            tokens = [*run]
            text += "".join(map(self.names.get, tokens)) if is_added else self.decode_text(tokens, first=not text)
        return text

    def token_id(self, text):
        return self.special.get(text)


# Types of SentencePiece's pieces:
CONTROL = 3
UNKNOWN = 2
USER_DEFINED = 4


class SentencePieceTokenizer(SplittingTokenizer):
    legacy = True  # whether text after a special token gets a space in front, as the beginning of a text does
    spaced = True  # whether the beginning of a text does, if the model says so

    def __init__(self, path):
        from sentencepiece import SentencePieceProcessor

        self.model = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self.model.vocab_size()
        kinds = piece_types(path.read_bytes())
        super().__init__({self.model.id_to_piece(i): i for i, kind in kinds.items() if kind != USER_DEFINED})
        self.user_defined = [i for i, kind in kinds.items() if kind == USER_DEFINED]
        ids = {"bos_token": self.model.bos_id(), "eos_token": self.model.eos_id(), "unk_token": self.model.unk_id()}
        self.template_variables = {name: self.model.id_to_piece(i) for name, i in ids.items() if i >= 0}
        self.prefix = [i for i in [ids["bos_token"]] if i >= 0]

    def add_as_transformers_does(self):
        for i in self.user_defined:
            text = self.model.id_to_piece(i)
            if "\u2581" not in text:  # spaces are left to the model
                self.add({"content": text, "special": False}, i)

    def encode_text(self, text, first):
        if self.spaced and (first or self.legacy):
            return self.model.encode(text)
        mark = "\ue000"  # no piece contains this character: the space is put before it, and no piece crosses it
        return self.model.encode(mark + text)[len(self.model.encode(mark)) :]

    def token_id(self, text):
        i = self.model.piece_to_id(text)
        return self.special.get(text, i if self.model.id_to_piece(i) == text else None)

    def decode_text(self, ids, first):
        before = [] if first and self.spaced else self.model.encode("a")  # a decoder drops the first space
        ids = before + [i for i in ids if i < self.vocab_size]
        return self.model.decode(ids)[len(self.model.decode(before)) :]


def piece_types(data):
    """Return {id: type} of the pieces of a SentencePiece model that are CONTROL, UNKNOWN or USER_DEFINED.

    data: a message of protocol buffers whose pieces come first, each field 1; a piece's type is its last field.
    """
    at = 0
    result = {}
    i = 0
    while at < len(data) and data[at] == 10:
        size = 0
        shift = 0
        at += 1
        while True:
            size |= (data[at] & 127) << shift
            shift += 7
            at += 1
            if data[at - 1] < 128:
                break
        piece = data[at : at + size]
        if piece[-2:-1] == b"\x18" and piece[-7:-6] == b"\x15" and piece[-1] in (CONTROL, UNKNOWN, USER_DEFINED):
            result[i] = piece[-1]
        at += size
        i += 1
    return result


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
            from ladder.text.hf_tokenizer import JsonTokenizer

            kind = functools.partial(JsonTokenizer, vocab_size=vocab_size)
        elif re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", line):
            from ladder.text.tiktoken_ranks import TiktokenTokenizer

            kind = functools.partial(TiktokenTokenizer, folder=folder if folder.is_dir() else None)
        tokenizer = kind(path)
        if vocab_size is not None and not 0.95 * vocab_size <= tokenizer.vocab_size <= vocab_size:
            raise InputError(f"{path} has {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
        if any((folder / name).exists() for name in SETTINGS_FILES):
            from ladder.text.hf_tokenizer import read_settings

            tokenizer.add_as_transformers_does()
            read_settings(tokenizer, folder, vocab_size)
    return tokenizer


class TextStream:
    """Turns ids into text as they arrive, without splitting a character or losing a space."""

    def __init__(self, tokenizer, prompt=()):
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        # The text of ids[:shown] was returned. Decoders drop leading spaces, so new ids are decoded together with
        # ids[start:shown], whose text is more than spaces.
        self.start = 0
        self.shown = len(self.ids)

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
