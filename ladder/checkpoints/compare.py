"""Compares checkpoint folders: whether all ranks read the same files, and whether two models share a vocabulary."""

import hashlib
from pathlib import Path

from ladder.errors import InputError
from ladder.text.tokenizer import SETTINGS_FILES, VOCABULARY_FILES, load_tokenizer

TOKENIZER_FILES = *VOCABULARY_FILES, "merges.txt", *SETTINGS_FILES, "generation_config.json"


def digest(folder, samples=1024):
    """Return a short hash of a checkpoint folder: of its small files, and of headers and samples of its weights.

    Ranks compare it, in order to notice that they read different files. A change within a tensor is certain to be
    noticed only if it is longer than a 1024th of its file.
    """
    result = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.name in ("config.json", *TOKENIZER_FILES):
            result.update(f"{path.name}\n".encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            size = path.stat().st_size
            result.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as f:
                result.update(f.read(min(size, 10**8, int.from_bytes(f.read(8), "little"))))
                for start in range(0, size, max(4096, size // samples)):
                    f.seek(start)
                    result.update(f.read(4096))
    return result.hexdigest()[:8]


def token_text(tokenizer, i):
    """Return the text of a token as it follows other text, since decoders drop a space at the beginning."""
    return tokenizer.continuation(tokenizer.encode_plain("a"), [i])


def check_vocabulary(config, folder, other, other_folder, called, any_padding=False):
    """Raise InputError unless two models have the same number of tokens and, as far as compared, the same tokens.

    folder, other_folder: each model's folder, or None if it has no tokenizer; if both have one, about 1000 tokens are
    compared. called: what the message calls the other model. any_padding: whether their tables may have more rows than
    their tokenizers have tokens, each as many as it likes (Qwen 2.5 has 151,936 in small models and 152,064 in others).
    """
    error = f"{called} has another vocabulary"
    ours = folder and load_tokenizer(folder, config.vocab_size)
    theirs = other_folder and load_tokenizer(other_folder, other.vocab_size)
    both = ours and theirs
    if other.vocab_size != config.vocab_size and not (any_padding and both and ours.vocab_size == theirs.vocab_size):
        raise InputError(f"{error}, of {other.vocab_size:,} tokens, and the model's {config.vocab_size:,}")
    if not both:
        return
    special = {*ours.special.values(), *theirs.special.values()}
    for i in range(0, min(config.vocab_size, other.vocab_size), 1 + config.vocab_size // 1000):
        text, other_text = (token_text(t, i) for t in (ours, theirs))
        if i not in special and text != other_text:
            raise InputError(f"{error}: token {i} is {other_text!r}, and the model's {text!r}")
