"""Files of token ranks for tiktoken: Llama 3's tokenizer.model as Meta publishes it, and Kimi's tiktoken.model."""

import base64
from itertools import count

from ladder.checkpoints.checkpoint import read_json
from ladder.errors import InputError
from ladder.text.byte_pairs import ENDINGS, LLAMA3_PATTERN, cased_words, split_pattern
from ladder.text.tokenizer import SplittingTokenizer

# The file contains neither the pattern that splits words nor the special tokens. Llama 3's is known by its number of
# ranks, unless a file beside it names another family. Kimi's class of transformers stands in the settings beside it,
# and its special tokens, too.
LLAMA3_RANKS = 128_000
LLAMA3_LABELS = {  # {(a file beside it, a key): the values that Llama 3's may have there, None: no such key}
    ("tokenizer_config.json", "tokenizer_class"): (
        None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast",
    ),
    ("config.json", "model_type"): (None, "llama", "mllama", "mllama_text_model", "llamaLadder", "ladder_residual"),
}  # fmt: skip
LLAMA3_SPECIAL = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip
LLAMA3_ENDS = "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"
KIMI_CLASS = "TikTokenTokenizer"
KIMI_WORDS = cased_words(f"{ENDINGS}?", but=r"&&[^\p{Han}]")
KIMI_PATTERN = split_pattern(rf"[\p{{Han}}]+|{KIMI_WORDS}", "{1,3}")


def read_labels(folder):
    """Return {(file, key): value} of LLAMA3_LABELS' keys in a folder's files; None where there is no such thing."""
    labels = {}
    for file, key in LLAMA3_LABELS:
        exists = folder is not None and (folder / file).exists()
        labels[file, key] = read_json(folder / file).get(key) if exists else None
    return labels


class TiktokenTokenizer(SplittingTokenizer):
    def __init__(self, path, folder=None):
        """folder: of the files that say which family's it is, or None."""
        import tiktoken

        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if len({*ranks.values()}) < len(lines):  # the file was cut within a number; the library would panic
            raise ValueError("two tokens have the same rank")
        self.n_ranks = len(ranks)
        self.vocab_size = len(ranks) + 256
        reserved = count()
        labels = read_labels(folder)
        if labels["tokenizer_config.json", "tokenizer_class"] == KIMI_CLASS:
            pattern = KIMI_PATTERN
            self.family_ends = ()
            names = [f"<|reserved_token_{i}|>" for i in range(len(ranks), self.vocab_size)]
        elif len(ranks) == LLAMA3_RANKS:
            for (file, key), value in labels.items():
                if value not in LLAMA3_LABELS[file, key]:
                    words = f"has as many ranks as Llama 3's, but {file} says {key} {value!r}: give a tokenizer.json"
                    raise InputError(f"{path} {words}")
            pattern = LLAMA3_PATTERN
            self.family_ends = LLAMA3_ENDS
            names = [LLAMA3_SPECIAL.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256)]
        else:
            words = f"nor has it settings beside it of the class {KIMI_CLASS}: give a tokenizer.json"
            raise InputError(f"{path} has {len(ranks)} ranks, not Llama 3's {LLAMA3_RANKS}, {words}")
        super().__init__({name: len(ranks) + i for i, name in enumerate(names)})
        self.model = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self.prefix = [self.special[name] for name in names[:1] if self.family_ends]

    @property
    def end_tokens(self):
        return super().end_tokens | {name: self.special[name] for name in self.family_ends}

    def encode_text(self, text, first):
        return self.model.encode_ordinary(text)

    def decode_text(self, ids, first):
        return self.model.decode([i for i in ids if i < self.n_ranks])
