"""Byte-level BPE tokenizers that come as vocab.json and merges.txt, such as GPT-2's and older ones of Qwen 2."""

import json

from ladder.checkpoints.checkpoint import read_json, read_text
from ladder.errors import InputError

WORDS = (  # the pattern of words that many models share, but for what follows \\p{N}: how many digits are a word
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN, QWEN2_PATTERN = WORDS % "{1,3}", WORDS % ""
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
