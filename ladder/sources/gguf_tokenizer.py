"""Writes the tokenizer that a GGUF file describes as the files that ladder/text/tokenizer.py reads."""

import json
import struct

from ladder.errors import InputError
from ladder.text.byte_pairs import ENDINGS, LLAMA3_PATTERN, QWEN2_PATTERN, cased_words, split_pattern
from ladder.text.tokenizer import CONTROL, UNKNOWN, USER_DEFINED

SPLITS = {  # tokenizer.ggml.pre: a pattern; or digits one by one, or not, then GPT-2's pattern
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral"), LLAMA3_PATTERN),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3_PATTERN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), QWEN2_PATTERN),
    "tekken": split_pattern(cased_words(""), "", r"\r\n/"),
    "gpt-4o": split_pattern(cased_words(f"{ENDINGS}?"), "{1,3}", r"\r\n/"),
    **dict.fromkeys(("smollm", "refact", "starcoder"), "digits"), **dict.fromkeys(("gpt-2", "olmo"), ""),
}  # fmt: skip
WHOLE = "llama-bpe", "llama3", "llama-v3", "pixtral", "tekken"  # pre-tokenizers that begin a text with BOS
# Types of tokens, beside those of tokenizer.py; GGUF's numbers are SentencePiece's:
NORMAL = 1
BYTE = 6
# a text is split at tokens of these types; at USER_DEFINED in prompts, too, and those are printed
ADDED = UNKNOWN, CONTROL, USER_DEFINED
END_TOKENS = (  # names of tokens that end a text, whatever else a file says; llama.cpp has a list of its own
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>", "<|endoftext|>",
    "<|end_of_text|>", "<|return|>", "<|call|>",
)  # fmt: skip
NAMED = {  # {a name in a chat template and in settings: GGUF's, which misspells one of them}
    "bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id",
    "sep": "seperator_token_id", "cls": "cls_token_id", "mask": "mask_token_id",
}  # fmt: skip
PHI3_KEEPS = "<unk>", "<s>", "<|endoftext|>"  # tokens of Phi-3 after which spaces are kept


def end_token_ids(values):
    """Return the ids that end a text, by what the file names and by END_TOKENS."""
    names = dict.fromkeys(END_TOKENS)
    tokens = [(i, token) for i, token in enumerate(values.get("tokenizer.ggml.tokens", [])) if token in names]
    if {"<|return|>", "<|call|>"} <= {token for _, token in tokens}:  # of these an <|end|> is that of a message
        del names["<|end|>"]
    named = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return [*dict.fromkeys(i for i in (*named, *(i for i, token in tokens if token in names)) if i is not None)]


def write_tokenizer(values, folder):
    """Write the files of a tokenizer into a folder. Raises InputError for one that is not read."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    tokens = own.get("tokens")
    model = own.get("model")
    pre = own.get("pre")
    if not tokens:
        return
    types = own.get("token_type", [NORMAL] * len(tokens))
    pairs = zip(tokens, types, strict=True)
    # a token that ends a text is not printed, also where the file has it as an ordinary one
    types = [CONTROL if text in END_TOKENS and kind in (NORMAL, USER_DEFINED) else kind for text, kind in pairs]
    ids = {name: own[key] for name, key in NAMED.items() if own.get(key, -1) in range(len(tokens))}
    # some files name an ordinary token for padding
    settings = {f"{name}_token": tokens[i] for name, i in ids.items() if name in ("bos", "eos") or types[i] in ADDED}
    settings["add_bos_token"] = own.get("add_bos_token", model == "llama" or pre in WHOLE)
    if model == "llama":
        # not in the file, but so in Phi-3's settings, and in llama.cpp, which goes by the name
        name = f"{values.get('general.architecture')} {values.get('general.name')}".lower().replace("-", "")
        settings["added_tokens_decoder"] = {
            i: added(text, kind, rstrip="phi3" in name and text not in PHI3_KEEPS)
            for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind in ADDED
        }  # fmt: skip
        (folder / "tokenizer.model").write_bytes(sentencepiece(tokens, types, own, ids))
    elif model == "gpt2" and pre in SPLITS:
        (folder / "tokenizer.json").write_text(json.dumps(byte_level(tokens, types, own)))
    else:
        raise InputError(f"its tokenizer, {model!r} {pre!r}, is not read: give its own file, --tokenizer FILE")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template := values.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def added(text, kind, rstrip=False):
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {"content": text, "special": kind != USER_DEFINED, "rstrip": rstrip, **flags}


def byte_level(tokens, types, own):
    """Return the tokenizer.json of a byte-level BPE."""
    pre = own["pre"]
    split = SPLITS[own["pre"]]
    pieces = [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}]
    pieces = {"digits": [{"type": "Digits", "individual_digits": True}], "": []}.get(split, pieces)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pieces = [*pieces, {**level, "use_regex": split in ("digits", "")}]
    split_at = [
        {"id": i, **added(token, kind)}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in ADDED
    ]  # fmt: skip
    return {
        "version": "1.0", "added_tokens": split_at, "normalizer": {"type": "NFC"} if split == QWEN2_PATTERN else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pieces}, "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": own["merges"],
            "ignore_merges": pre in WHOLE,
        },
    }  # fmt: skip


def sentencepiece(tokens, types, own, ids):
    """Return the bytes of a SentencePiece model, a message of protocol buffers (sentencepiece_model.proto)."""

    def field(number, value):  # bytes, a float or a whole number
        kind = {bytes: 2, float: 5}.get(type(value), 0)
        data = struct.pack("<f", value) if kind == 5 else value if kind == 2 else varint(value)
        return varint(number << 3 | kind) + (varint(len(data)) if kind == 2 else b"") + data

    def varint(n):
        n &= 2**64 - 1
        out = bytearray()
        while n > 127:
            out.append(n & 127 | 128)
            n >>= 7
        return bytes((*out, n))

    pieces = b"".join(
        field(1, field(1, text.encode()) + field(2, float(score)) + field(3, CONTROL if kind == USER_DEFINED else kind))
        for text, score, kind in zip(tokens, own["scores"], types, strict=True)
    )
    trainer = field(3, 2) + field(35, BYTE in types)  # BPE, unknown characters as bytes
    trainer += b"".join(field(n, ids.get(name, -1)) for n, name in ((40, "unk"), (41, "bos"), (42, "eos"), (43, "pad")))
    normalizer = field(1, b"identity") + field(3, own.get("add_space_prefix", True))
    normalizer += field(4, own.get("remove_extra_whitespaces", False)) + field(5, True)
    return pieces + field(2, trainer) + field(3, normalizer)
