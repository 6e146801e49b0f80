"""One interface over SentencePiece, tiktoken rank files and tokenizer.json; load_tokenizer() picks by what is there."""

import base64
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from formats.checkpoint import first_line, read_json, read_text
from model import InputError

# Llama 3's pre-tokenizer pattern and special tokens: its rank file holds neither.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip


class Tokenizer:
    """encode(text) -> ids and decode(ids) -> text without special tokens; chat(messages) -> ids.

    A subclass sets vocab_size, longest (bytes of a token), bos_id (or None) and special {text: id}, and encodes plain
    text.
    """

    vocab_size: int
    longest: int
    bos_id: int | None
    special: dict
    template = None  # the checkpoint's chat template, Jinja source
    template_variables = {}

    def encode_plain(self, text):
        raise NotImplementedError

    def decode(self, ids):
        raise NotImplementedError

    def encode(self, text):
        """The ids of a prompt: BOS, where the tokenizer has one, and the text taken as plain text."""
        return ([] if self.bos_id is None else [self.bos_id]) + self.encode_plain(text)

    def continuation(self, prompt, ids):
        """The text that ids add to the ids of a prompt."""
        return self.decode(prompt + ids)[len(self.decode(prompt)) :]

    def encode_markup(self, text):
        """The ids of text in which special tokens stand by name, as a chat template writes them; adds no BOS."""
        if not self.special:
            return self.encode_plain(text)
        names = "|".join(re.escape(s) for s in sorted(self.special, key=len, reverse=True))
        ids = []
        for i, part in enumerate(re.split(f"({names})", text)):
            if part:
                encode = self.encode_plain if i == 0 else self.encode_rest
                ids += [self.special[part]] if part in self.special else encode(part)
        return ids

    def encode_rest(self, text):
        """The ids of text that stands behind a special token."""
        return self.encode_plain(text)

    def add(self, text, i, hidden):
        """Take a special token that the tokenizer's own file does not have; decode leaves a hidden one out."""
        self.special.setdefault(text, i)

    def chat(self, messages):
        """The ids of a conversation [{"role", "content"}, ...] up to where the assistant answers."""
        return self.encode_markup(self.render(messages))

    def render(self, messages, answer=True):
        """A conversation as the chat template writes it, and, if asked for, what begins an answer."""
        if self.template is None:
            raise InputError("no chat template in the checkpoint's tokenizer_config.json, nor a chat_template.jinja")
        variables = {**self.template_variables, "messages": messages, "add_generation_prompt": answer}
        return _render(self.template, tools=None, documents=None, **variables)


@contextlib.contextmanager
def library_errors(what):
    """An error of a library becomes an InputError; what C++ and Rust write on stderr, beside raising it, is lost."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        kept = os.dup(2)
    except OSError:  # closed
        kept = os.dup(nowhere)
    try:
        os.dup2(nowhere, 2)
        yield
    except BaseException as e:  # each library has its own errors, down to bare Exception
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":  # Rust's are none
            raise
        raise InputError(f"{what}: {first_line(e)}") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@functools.cache
def _renderer():
    """The process that renders chat templates; it ends with its input, and so with this process, however that ends."""
    program = [sys.executable, str(Path(__file__).with_name("chat_template.py"))]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _render(template, **variables):
    """The text of a template, or an InputError with what it, or the system, says against it."""
    process = _renderer()
    try:
        process.stdin.write(json.dumps({"template": template, "variables": variables}) + "\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline() or "{}")
    except BrokenPipeError:
        said = {}
    if not said:
        _renderer.cache_clear()
        late = process.wait() == -signal.SIGPROF
        said["error"] = "it takes longer than a second" if late else f"it ended its process ({process.returncode})"
    if "error" in said:
        raise InputError(f"the checkpoint's chat template refuses this conversation: {said['error']}")
    return said["text"]


class SentencePieceTokenizer(Tokenizer):
    legacy = True  # text behind a special token gets a space in front, as the beginning does

    def __init__(self, path):
        from sentencepiece import SentencePieceProcessor

        self.model = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self.model.vocab_size()
        ids = [self.model.bos_id(), self.model.eos_id()]
        self.special = {self.model.id_to_piece(i): i for i in ids if i >= 0}
        self.longest = max(len(self.model.id_to_piece(i).encode()) for i in range(self.vocab_size))
        self.bos_id = ids[0] if ids[0] >= 0 else None

    def encode_plain(self, text):
        return self.model.encode(text)

    def encode_rest(self, text):
        if self.legacy:
            return self.encode_plain(text)
        mark = "\ue000"  # a character of no piece: it takes the space, and no piece reaches beyond it
        return self.model.encode(mark + text)[len(self.model.encode(mark)) :]

    def decode(self, ids):
        skip = set(self.special.values())
        return self.model.decode([i for i in ids if i not in skip and i < self.vocab_size])


def split_runs(text, longest=25_000):
    """The text in pieces, cut where more than so many characters in a row are all white space, or none of them is.

    As Llama 3's own code does: in longer runs the library's regular expressions fail.
    """
    runs = re.finditer(rf"\s{{{longest},}}|\S{{{longest},}}", text)
    cuts = [0, *(i for run in runs for i in range(run.start() + longest, run.end(), longest)), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts)]


class TiktokenTokenizer(Tokenizer):
    def __init__(self, path):
        import tiktoken

        with open(path, "rb") as f:
            lines = [line.split() for line in f if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(lines))):  # the library takes every rank up to the last for there
            raise InputError("its ranks are not 0, 1, 2, ... of one token each")
        if lost := [i for i in range(256) if bytes([i]) not in ranks]:
            raise InputError(f"no token is the single byte {lost[0]}")
        names, reserved = [], 0
        for i in range(256):
            names.append(LLAMA3_SPECIAL.get(i, f"<|reserved_special_token_{reserved}|>"))
            reserved += i not in LLAMA3_SPECIAL
        self.special = {name: len(ranks) + i for i, name in enumerate(names)}
        self.model = tiktoken.Encoding(path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self.n_ranks, self.longest = len(ranks), max(map(len, ranks))
        self.vocab_size = len(ranks) + len(names)
        self.bos_id = self.special["<|begin_of_text|>"]

    def encode_plain(self, text):
        return [i for piece in split_runs(text) for i in self.model.encode_ordinary(piece)]

    def decode(self, ids):
        return self.model.decode([i for i in ids if i < self.n_ranks])


class JsonTokenizer(Tokenizer):
    def __init__(self, path):
        from tokenizers import Tokenizer as Model

        self.model = Model.from_file(str(path))
        self.model.no_truncation()
        self.model.no_padding()
        added = self.model.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items()}
        self.hidden = {i for i, token in added.items() if token.special}
        vocabulary = self.model.get_vocab(with_added_tokens=True)
        self.vocab_size, self.longest = max(vocabulary.values()) + 1, max(len(token.encode()) for token in vocabulary)
        around = self.model.encode("a", add_special_tokens=True)  # what its post-processor puts around a text
        self.bos_id = around.ids[0] if around.special_tokens_mask[:1] == [1] else None

    def encode_plain(self, text, markup=False):
        self.model.encode_special_tokens = not markup  # if set, it takes their names as plain text
        with library_errors("the checkpoint's tokenizer.json fails at this text"):
            return self.model.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text):
        return self.encode_plain(text, markup=True)

    def decode(self, ids):
        # by the library's own skip_special_tokens, those that are "normalized" would be printed
        return self.model.decode([i for i in ids if i not in self.hidden], skip_special_tokens=False)

    def add(self, text, i, hidden):
        from tokenizers import AddedToken

        if text not in self.special:
            self.model.add_tokens([AddedToken(text, normalized=False, special=hidden)])
            self.special[text] = self.model.token_to_id(text)
            if self.special[text] != i:
                raise InputError(f"{text!r} is {i}, but behind tokenizer.json's tokens it is {self.special[text]}")
        if hidden:
            self.hidden.add(i)


def load_tokenizer(folder, vocab_size=None):
    """The tokenizer of a checkpoint folder with its settings, or None when it has none; errors as of read_tokenizer."""
    folder = Path(folder)
    path = next((folder / n for n in ("tokenizer.json", "tokenizer.model") if os.path.lexists(folder / n)), None)
    if path is None:
        return None
    tokenizer = read_tokenizer(path, vocab_size)
    _read_settings(tokenizer, folder, vocab_size)
    return tokenizer


def read_tokenizer(path, vocab_size=None):
    """The tokenizer in a file.

    Raises InputError when it cannot be read, or when its vocabulary is not the model's vocab_size (up to 5 % smaller
    is taken for padding of the embedding: DeepSeek 7B has 102400 rows for 100015 tokens).
    """
    path = Path(path)
    if path.suffix == ".json":
        kind = JsonTokenizer
    else:
        with open(path, "rb") as f:
            line = f.readline(200)
        kind = TiktokenTokenizer if re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", line) else SentencePieceTokenizer
    with library_errors(f"{path} cannot be read"):
        tokenizer = kind(path)
    if vocab_size is not None and not 0.95 * vocab_size <= tokenizer.vocab_size <= vocab_size:
        raise InputError(f"{path} has {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
    return tokenizer


def _read_settings(tokenizer, folder, vocab_size):
    """Take the chat template, the special tokens it names and the BOS policy from the files beside the tokenizer's."""
    source = folder / "tokenizer_config.json"
    settings = _read_if_there(source)
    added = settings.get("added_tokens_decoder")
    if added is None:  # older folders have two more files instead
        source = folder / "added_tokens.json"
        settings |= _read_if_there(folder / "special_tokens_map.json")
        special = {text for key, value in settings.items() if "_token" in key for text in _texts(value)}
        added = {i: {"content": text, "special": text in special} for text, i in _read_if_there(source).items()}
    try:
        tokens = sorted((int(i), token["content"], token.get("special", True)) for i, token in added.items())
        if not all(i >= 0 and text.encode() for i, text, _ in tokens):  # or an error of half a surrogate pair
            raise ValueError
    except (KeyError, ValueError, TypeError, AttributeError):
        raise InputError(f"{source}: the added tokens are not {{id: {{content}}}}, or {{content: id}}") from None
    for i, text, hidden in tokens:
        if vocab_size is None or i < vocab_size:  # the embedding may have no row for it
            tokenizer.add(text, i, hidden)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if os.path.lexists(folder / "chat_template.jinja"):
        template = read_text(folder / "chat_template.jinja")
    if not isinstance(template, str | None):
        raise InputError(f"{folder / 'tokenizer_config.json'}: its chat_template is no text")
    tokenizer.template = template
    texts = {k: "".join(_texts(settings.get(k))) for k in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokenizer.template_variables = texts
    if settings.get("add_bos_token") is False:
        tokenizer.bos_id = None
    elif settings.get("add_bos_token") and tokenizer.bos_id is None:
        tokenizer.bos_id = tokenizer.special.get(texts["bos_token"])
    tokenizer.legacy = settings.get("legacy") is not False


def _read_if_there(path):
    return read_json(path) if os.path.lexists(path) else {}


def _texts(value):
    """The texts of a special token, or of a list of them, each written as a string or as {"content": string}."""
    values = value if isinstance(value, list) else [value]
    values = [v.get("content") if isinstance(v, dict) else v for v in values]
    return [v for v in values if isinstance(v, str)]


class TextStream:
    """Turns a growing list of ids into text, piece by piece, without splitting a character or losing a space."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids = []
        self.start = 0  # ids before it are printed and no longer decoded
        self.whole = []  # numbers of ids that end with a whole character
        self.printed = ""  # what of decode(ids[start:]) is printed

    def push(self, ids):
        """The new text that the ids complete; bytes of an unfinished character are held back."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids[self.start :])
        if text.endswith("\ufffd"):
            return ""
        new, self.printed = text[len(self.printed) :], text
        self.whole.append(len(self.ids))
        if len(self.ids) - self.start > 64:  # keep a few ids as context: a decoder may drop a leading space
            self.start = max((n for n in self.whole if n <= len(self.ids) - 8), default=self.start)
            self.whole = [n for n in self.whole if n > self.start]
            self.printed = self.tokenizer.decode(self.ids[self.start :])
        return new

    def flush(self):
        """What push still held back, as it is."""
        return self.tokenizer.decode(self.ids[self.start :])[len(self.printed) :]
