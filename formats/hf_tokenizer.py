"""Hugging Face's files of a tokenizer: tokenizer.json, and the settings beside it or beside another one."""

import reprlib

from formats.checkpoint import read_json, read_text
from formats.tokenizer import Tokenizer, library_errors
from runtime.errors import InputError


class JsonTokenizer(Tokenizer):
    def __init__(self, path):
        import tokenizers  # a SentencePiece model with settings does without

        self.model = tokenizers.Tokenizer.from_file(str(path))
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
        import tokenizers

        if text not in self.special:
            self.model.add_tokens([tokenizers.AddedToken(text, normalized=False, special=hidden)])
            self.special[text] = self.model.token_to_id(text)
            if self.special[text] != i:
                raise InputError(f"{text!r} is {i}, but after tokenizer.json's tokens it is {self.special[text]}")
        if hidden:
            self.hidden.add(i)


def read_settings(tokenizer, folder, vocab_size):
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
