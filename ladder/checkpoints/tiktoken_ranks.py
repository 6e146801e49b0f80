"""Llama 3's tokenizer.model as Meta publishes it, a file of token ranks for tiktoken."""

import base64
from itertools import count

from ladder.checkpoints.tokenizer import SplittingTokenizer
from ladder.errors import InputError

# The file contains neither the pattern that splits words nor the special tokens: these are Llama 3's, whose file is
# known by its number of ranks.
LLAMA3_RANKS = 128_000
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip
LLAMA3_ENDS = "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"


class TiktokenTokenizer(SplittingTokenizer):
    def __init__(self, path):
        import tiktoken

        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if len({*ranks.values()}) < len(lines):  # the file was cut within a number; the library would panic
            raise ValueError("two tokens have the same rank")
        if len(ranks) != LLAMA3_RANKS:
            words = "of such files only Llama 3's is read, since none says how it splits words: give a tokenizer.json"
            raise InputError(f"{path} has {len(ranks)} ranks, not Llama 3's {LLAMA3_RANKS}: {words}")
        reserved = count()
        names = [LLAMA3_SPECIAL.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256)]
        super().__init__({name: len(ranks) + i for i, name in enumerate(names)})
        self.model = tiktoken.Encoding(path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self.n_ranks, self.vocab_size = len(ranks), len(ranks) + len(names)
        self.prefix = [self.special["<|begin_of_text|>"]]

    @property
    def ends(self):
        return {name: self.special[name] for name in LLAMA3_ENDS}

    def encode_text(self, text, first):
        return self.model.encode_ordinary(text)

    def decode_text(self, ids, first):
        return self.model.decode([i for i in ids if i < self.n_ranks])
