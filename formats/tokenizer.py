"""One interface over SentencePiece and tokenizer.json (extras/sources: rank files); load_tokenizer() picks one."""

import contextlib
import os
import re
import reprlib
from pathlib import Path

from formats.checkpoint import first_line, read_json, read_text
from runtime.errors import InputError, load_extra


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

    A subclass sets vocab_size, bos_id (or None) and special {text: id}, and has decode(ids) and encode_plain(text,
    first). first is False for text that follows a special token.
    """

    template = None  # the checkpoint's chat template, Jinja source
    template_variables = {}

    def encode(self, text):
        """Return the ids of a prompt: BOS, if the tokenizer has one, and the text taken as plain text."""
        return ([] if self.bos_id is None else [self.bos_id]) + self.encode_plain(text)

    def continuation(self, prompt, ids):
        """Return the text that ids add to the ids of a prompt."""
        return self.decode(prompt + ids)[len(self.decode(prompt)) :]

    def token_text(self, i):
        """Return the text of a token after other text: a decoder drops a space at the beginning."""
        return self.continuation(self.encode_plain("a"), [i])

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

    def chat(self, messages):
        """Return the ids of a conversation [{"role", "content"}, ...] up to where the assistant answers."""
        return self.encode_markup(self.render(messages))

    def render(self, messages, answer=True):
        """Return a conversation as the chat template writes it, followed by the start of an answer if asked for."""
        if self.template is None:
            where = "in the checkpoint's tokenizer_config.json, nor a chat_template.jinja"
            raise InputError(f"no chat template {where}: give it plain texts, not chats")
        variables = {**self.template_variables, "messages": messages, "add_generation_prompt": answer}
        text, error = load_extra("chat", "a chat template").template.renderer.render(self.template, variables)
        if error is not None:
            raise InputError(f"the checkpoint's chat template refuses this conversation: {first_line(error)}")
        return text


class SentencePieceTokenizer(Tokenizer):
    legacy = True  # text after a special token gets a space in front, as the beginning does

    def __init__(self, path):
        from sentencepiece import SentencePieceProcessor

        self.model = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self.model.vocab_size()
        ids = [self.model.bos_id(), self.model.eos_id()]
        self.special = {self.model.id_to_piece(i): i for i in ids if i >= 0}
        self.bos_id = ids[0] if ids[0] >= 0 else None

    @library_errors("the tokenizer cannot encode this text")
    def encode_plain(self, text, first=True):
        if first or self.legacy:
            return self.model.encode(text)
        mark = "\ue000"  # a character of no piece: it takes the space, and no piece reaches beyond it
        return self.model.encode(mark + text)[len(self.model.encode(mark)) :]

    def decode(self, ids):
        skip = set(self.special.values())
        return self.model.decode([i for i in ids if i not in skip and i < self.vocab_size])


class JsonTokenizer(Tokenizer):
    def __init__(self, path):
        from tokenizers import Tokenizer as Model

        self.model = Model.from_file(str(path))
        self.model.no_truncation()
        self.model.no_padding()
        added = self.model.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items()}
        self.hidden = {i for i, token in added.items() if token.special}
        self.vocab_size = max(self.model.get_vocab(with_added_tokens=True).values()) + 1
        around = self.model.encode("a", add_special_tokens=True)  # with the tokens that its post-processor adds
        self.bos_id = around.ids[0] if around.special_tokens_mask[:1] == [1] else None

    @library_errors("the tokenizer cannot encode this text")
    def encode_plain(self, text, first=True, markup=False):
        self.model.encode_special_tokens = not markup  # if set, the names of special tokens are plain text
        return self.model.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text):
        return self.encode_plain(text, markup=True)

    @library_errors("the tokenizer cannot decode these tokens")
    def decode(self, ids):
        # the library's own skip_special_tokens would print those that are "normalized"
        return self.model.decode([i for i in ids if i not in self.hidden], skip_special_tokens=False)

    def add(self, text, i, hidden):
        from tokenizers import AddedToken

        if text not in self.special:
            self.model.add_tokens([AddedToken(text, normalized=False, special=hidden)])
            self.special[text] = self.model.token_to_id(text)
            if self.special[text] != i:
                raise InputError(f"{text!r} is {i}, but after tokenizer.json's tokens it is {self.special[text]}")
        if hidden:
            self.hidden.add(i)


def load_tokenizer(source, vocab_size=None):
    """Return the tokenizer of a checkpoint folder, None if it has none, or the one in a file, without settings.

    Raises InputError if it cannot be read, or if its vocabulary is not the model's vocab_size (up to 5 % smaller is
    taken for padding of the embedding: DeepSeek 7B has 102400 rows for 100015 tokens).
    """
    path = folder = Path(source)
    if folder.is_dir():
        path = next((folder / n for n in ("tokenizer.json", "tokenizer.model") if os.path.lexists(folder / n)), None)
    if path is None:
        return None
    with library_errors(f"{path} cannot be read, or a file of settings beside it"):
        with open(path, "rb") as f:
            line = f.readline(200)
        kind = JsonTokenizer if path.suffix == ".json" else SentencePieceTokenizer
        if re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", line):
            kind = load_extra("sources", "a tiktoken rank file").TiktokenTokenizer
        tokenizer = kind(path)
        if vocab_size is not None and not 0.95 * vocab_size <= tokenizer.vocab_size <= vocab_size:
            raise InputError(f"{path} has {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
        _read_settings(tokenizer, folder, vocab_size)
    return tokenizer


def _read_settings(tokenizer, folder, vocab_size):
    """Take the chat template, the tokens it names and the BOS policy from the files beside the tokenizer's."""

    def read(name):
        return read_json(folder / name) if (folder / name).exists() else {}

    settings = read("tokenizer_config.json")
    added = settings.get("added_tokens_decoder")
    if added is None:  # older folders have two more files instead
        settings |= read("special_tokens_map.json")
        named = [value for key, value in settings.items() if "_token" in key]
        special = {_text(token) for each in named for token in (each if isinstance(each, list) else [each])}
        added = {i: {"content": text, "special": text in special} for text, i in read("added_tokens.json").items()}
    for key in sorted(added, key=int):
        i, text, hidden = int(key), added[key]["content"], added[key].get("special", True)
        if not isinstance(text, str) or not text:
            raise InputError(f"{folder}: a special token is {reprlib.repr(text)}, not a text")
        if vocab_size is None or i < vocab_size:  # the embedding may have no row for it
            tokenizer.add(text, i, hidden)
    tokenizer.template = settings.get("chat_template")
    if isinstance(tokenizer.template, list):  # several named ones
        tokenizer.template = {each["name"]: each["template"] for each in tokenizer.template}.get("default")
    if (folder / "chat_template.jinja").exists():
        tokenizer.template = read_text(folder / "chat_template.jinja")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokenizer.template_variables = {name: _text(settings.get(name)) or "" for name in names}
    if settings.get("add_bos_token") is False:
        tokenizer.bos_id = None
    elif settings.get("add_bos_token") and tokenizer.bos_id is None:
        tokenizer.bos_id = tokenizer.special.get(_text(settings.get("bos_token")))
    tokenizer.legacy = settings.get("legacy") is not False


def _text(token):
    """Return the text of a special token, which is written as a string or as {"content": string}."""
    return token.get("content") if isinstance(token, dict) else token


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
