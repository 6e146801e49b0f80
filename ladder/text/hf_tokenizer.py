"""Hugging Face's tokenizer files: tokenizer.json, and the settings files beside it or beside another tokenizer."""

import itertools
import json
import reprlib

from ladder.checkpoints.checkpoint import read_json_if_there, read_text
from ladder.errors import InputError
from ladder.text.byte_pairs import byte_pairs
from ladder.text.tokenizer import FLAGS, TEMPLATE_FILES, SplittingTokenizer, Tokenizer, library_errors

REFUSED_SETTINGS = {  # {a key of tokenizer_config.json whose effect is not computed here: what it does}
    "add_eos_token": "it ends each prompt before the answer",
    "split_special_tokens": "it makes plain text of a chat template's special tokens",
}


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, or a vocab.json with merges.txt. Added tokens beyond vocab_size, if given, are left out."""

    def __init__(self, path, vocab_size=None):
        import tokenizers  # late: it is not needed to read other kinds

        text = byte_pairs(path) if path.name == "vocab.json" else read_text(path)
        self.model = tokenizers.Tokenizer.from_str(text)
        added = self.model.get_added_tokens_decoder()
        if vocab_size and any(i >= vocab_size for i in added):
            self.left_out = tuple(token.content for i, token in added.items() if i >= vocab_size)
            self.model = tokenizers.Tokenizer.from_str(_without(text, self.left_out))
            added = self.model.get_added_tokens_decoder()
        self.model.no_truncation()
        self.model.no_padding()
        self.special = {token.content: i for i, token in added.items()}
        self.hidden = {i for i, token in added.items() if token.special}
        self.flags = {token.content: {flag: getattr(token, flag) for flag in FLAGS} for token in added.values()}
        encoded = self.model.encode("a", add_special_tokens=True)  # with the tokens that its post-processor adds
        leading = itertools.takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        self.prefix = [i for i, _ in leading]
        self.vocab_size = max([*self.model.get_vocab(with_added_tokens=True).values(), *self.prefix]) + 1

    @library_errors("the tokenizer cannot encode this text")
    def encode_plain(self, text, first=True, markup=False):
        self.model.encode_special_tokens = not markup  # if set, the names of special tokens are plain text
        return self.model.encode(text, add_special_tokens=False).ids

    @library_errors("the tokenizer cannot decode these tokens")
    def decode(self, ids):
        # skip_special_tokens=True would still print special tokens that are "normalized"
        return self.model.decode([i for i in ids if i not in self.hidden], skip_special_tokens=False)

    def token_id(self, text):
        return self.model.token_to_id(text)

    def add(self, token, i):
        """Add a token, {"content": text} with its FLAGS, or change the flags of one."""
        import tokenizers

        text = token["content"]
        old = self.flags.get(text, {})
        flags = {"special": True, "normalized": False, **old} | {flag: token[flag] for flag in FLAGS if flag in token}
        if flags != old:  # adding takes a time that grows with the number of tokens
            self.model.add_tokens([tokenizers.AddedToken(text, **flags)])
            self.flags[text] = flags
        self.special[text] = self.model.token_to_id(text)
        if self.special[text] != i:
            raise InputError(f"{text!r} is {i}, but after tokenizer.json's tokens it is {self.special[text]}")
        self.hide(i, flags["special"])


def read_settings(tokenizer, folder, vocab_size):
    """Give a tokenizer what the settings files beside it say: special tokens, the chat template, whether to add BOS."""
    settings = read_json_if_there(folder / "tokenizer_config.json")
    if settings.get("added_tokens_decoder") is None:  # older folders have two more files instead of this key
        settings |= read_json_if_there(folder / "special_tokens_map.json")
    for key, words in REFUSED_SETTINGS.items():
        if settings.get(key):
            raise InputError(f"{folder}/tokenizer_config.json: {key} is not supported, since {words}: set it to false")
    named, special = _special_tokens(settings, tokenizer)
    added = settings.get("added_tokens_decoder") or {
        i: {"content": text, "special": text in special, "normalized": text not in special}
        for text, i in read_json_if_there(folder / "added_tokens.json").items()
    }
    _add_tokens(tokenizer, added, named, special, folder, vocab_size)
    tokenizer.template = _chat_template(settings, folder)
    tokenizer.template_variables = named
    bos = tokenizer.special.get(named.get("bos_token"))
    splits = isinstance(tokenizer, SplittingTokenizer)
    if settings.get("add_bos_token") is False or splits and bos is None:
        tokenizer.prefix = []
    elif bos is not None and bool(tokenizer.prefix) == splits and (splits or settings.get("add_bos_token")):
        tokenizer.prefix = [bos]
    tokenizer.spaced = settings.get("add_prefix_space") is not False
    tokenizer.legacy = settings.get("legacy") is not False


def _special_tokens(settings, tokenizer):
    """Return ({such as "bos_token": its text}, {text of a special token: the token as the settings have it})."""
    others = [settings.get(key) or [] for key in ("extra_special_tokens", "additional_special_tokens")]
    named = {key: text for key, text in tokenizer.template_variables.items() if key not in settings}
    for each in (settings, *others):  # others: lists, or names of a model's own
        own = each.items() if isinstance(each, dict) else ()
        named |= {key: token for key, token in own if key.endswith("_token") and _text(token)}
    listed = [token for each in others if isinstance(each, list) for token in each]
    special = {_text(token): token for token in (*listed, *named.values()) if _text(token)}
    return {key: _text(token) for key, token in named.items()}, special


def _add_tokens(tokenizer, added, named, special, folder, vocab_size):
    """Add the tokens {id: token} to a tokenizer, and those special ones that are in its vocabulary already.

    named, special: as _special_tokens returns them. folder: for messages.
    """
    for key in sorted(added, key=int):
        i = int(key)
        token = added[key]
        text = token["content"]
        if not isinstance(text, str) or not text:
            raise InputError(f"{folder}: a special token is {reprlib.repr(text)}, not a text")
        if vocab_size is None or i < vocab_size:  # the embedding may have no row for it
            tokenizer.add(token | ({"special": True} if text in named.values() else {}), i)
        elif text not in tokenizer.left_out:
            tokenizer.left_out += (text,)
    for text, token in special.items():
        if text not in tokenizer.special and (i := tokenizer.token_id(text)) is not None:  # one of the vocabulary
            tokenizer.add((token if isinstance(token, dict) else {}) | {"content": text, "special": True}, i)
        elif text in named.values() and text in tokenizer.special:
            tokenizer.add({"content": text, "special": True}, tokenizer.special[text])


def _chat_template(settings, folder):
    """Return the text of the chat template, or None."""
    if (folder / TEMPLATE_FILES[0]).exists():
        return read_text(folder / TEMPLATE_FILES[0])
    # chat_template.json belongs to a processor of pictures and texts; transformers' tokenizers prefer the other places
    template = settings.get("chat_template") or read_json_if_there(folder / TEMPLATE_FILES[1]).get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        return {each["name"]: each["template"] for each in template}.get("default")
    return template


def _without(text, names):
    """Return a tokenizer.json's text without these added tokens."""
    values = json.loads(text)
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in names]
    if isinstance(vocabulary := values["model"]["vocab"], dict):  # it may contain them, too
        values["model"]["vocab"] = {token: i for token, i in vocabulary.items() if token not in names}
    return json.dumps(values)


def _text(token):
    """Return the text of a special token, which is written as a string or as {"content": string}, or None."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
