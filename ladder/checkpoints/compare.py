"""Whether two checkpoint folders hold the same: their contents, for ranks; their vocabularies, for two models."""

import hashlib
from pathlib import Path

from ladder.checkpoints.tokenizer import SETTINGS, VOCABULARIES, load_tokenizer
from ladder.errors import InputError

TOKENIZER_FILES = *VOCABULARIES, "merges.txt", *SETTINGS, "generation_config.json"


def digest(folder, samples=1024):
    """Return a short hash of a checkpoint folder: of its small files, and of the headers and samples of its weights.

    Ranks compare it to find that they read different files. A change within a tensor is certain to be seen
    only if it is longer than a 1024th of its file.
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
    """Return the text of a token after other text: a decoder drops a space at the beginning."""
    return tokenizer.continuation(tokenizer.encode_plain("a"), [i])


def check_vocabulary(config, folder, other, other_folder, called):
    """Raise InputError unless two models have the same number of tokens and, where compared, the same tokens.

    folder, other_folder: each model's folder, or None if it has no tokenizer; of two, about 1000 tokens are compared.
    called: the other model's name in the message.
    """
    error = f"{called} has another vocabulary"
    if other.vocab_size != config.vocab_size:
        raise InputError(f"{error}, of {other.vocab_size:,} tokens, and the model's {config.vocab_size:,}")
    ours, theirs = (path and load_tokenizer(path, config.vocab_size) for path in (folder, other_folder))
    if not ours or not theirs:
        return
    special = {*ours.special.values(), *theirs.special.values()}
    for i in range(0, config.vocab_size, 1 + config.vocab_size // 1000):
        own, text = (token_text(t, i).replace("<unk>", " \u2047 ") for t in (ours, theirs))  # the two ways to write it
        if i not in special and own != text:
            raise InputError(f"{error}: token {i} is {text!r}, and the model's {own!r}")
