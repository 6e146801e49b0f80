"""Byte-level BPE tokenizers that come as vocab.json and merges.txt, such as GPT-2's and older ones of Qwen 2."""

import json

from ladder.checkpoints.checkpoint import read_json, read_text
from ladder.errors import InputError

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # of English words
BEFORE = r"[^\r\n\p{L}\p{N}]?"  # the letters of a word


def split_pattern(letters, digits, after_signs=r"\r\n"):
    """Return the pattern by which many models split a text into words.

    letters: the pattern of words of letters. digits: how many digits are a word. after_signs: the characters that
    belong to the signs before them.
    """
    return rf"{letters}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after_signs}]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def cased_words(endings, but=""):
    """Return the pattern of words that begin anew at an upper case after a lower one. but: letters that are none."""
    upper, lower = (rf"[\p{{L{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for case in (r"u}\p{Lt", "l"))
    return f"{BEFORE}{upper}*{lower}+{endings}|{BEFORE}{upper}+{lower}*{endings}"


PLAIN_WORDS = rf"{ENDINGS}|{BEFORE}\p{{L}}+"
LLAMA3_PATTERN = split_pattern(PLAIN_WORDS, "{1,3}")
QWEN2_PATTERN = split_pattern(PLAIN_WORDS, "")
TOKENIZER_CLASSES = {  # {tokenizer_class of transformers: (normalizer, pattern of words; None: GPT-2's)}
    "GPT2Tokenizer": (None, None), "GPTNeoXTokenizer": ("NFC", None), "Qwen2Tokenizer": ("NFC", QWEN2_PATTERN),
}  # fmt: skip


def byte_pairs(path):
    """Return vocab.json at `path` and the files beside it as the text of a tokenizer.json. Raises InputError."""
    settings = read_json(path.with_name("tokenizer_config.json"))
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if name not in TOKENIZER_CLASSES:
        known = ", ".join(TOKENIZER_CLASSES)
        words = f"only for {known} can vocab.json be read: save a tokenizer.json with transformers"
        raise InputError(f"{path.parent}: tokenizer_class is {name}, but {words}")
    normalizer, pattern = TOKENIZER_CLASSES[name]
    lines = read_text(path.with_name("merges.txt")).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space")), "trim_offsets": True}
    steps = [byte_level | {"use_regex": pattern is None}]
    if pattern:
        steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, *steps]
    return json.dumps({
        "model": {"type": "BPE", "vocab": read_json(path), "merges": merges}, "decoder": byte_level,
        "normalizer": normalizer and {"type": normalizer}, "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    })  # fmt: skip
