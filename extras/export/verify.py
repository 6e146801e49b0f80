"""Does a converted checkpoint compute what transformers computes of its source? (convert_hf_checkpoint.py --verify)"""

import torch

from formats import checkpoint
from formats.checkpoint import dtype_name, first_line
from runtime.errors import InputError
from tp import load_shard

TEXT = "Once upon a time there was a little dog who counted up to 10, and then ran to the park. "
LENGTH = 600  # tokens, or the whole context: more than a Laneformer's window of 512
# How far apart the logits of two implementations may be, as a part of the largest: two to four times what rounding made
# in random models of up to 48 layers (7e-7, 1e-2, 7e-2), and less than most mistakes make.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}


def text_ids(tokenizer, config):
    """Return the ids (1, S) of a text, or, without a tokenizer, some of the vocabulary's."""
    ids = tokenizer.encode(TEXT * LENGTH) if tokenizer else [i * i % config.vocab_size for i in range(LENGTH)]
    return torch.tensor([ids[: min(LENGTH, config.max_seq_len)]])


@torch.inference_mode()
def expected(folder, ids, dtype, trust_remote_code):
    """Return transformers' logits (S, V) from a Hugging Face folder. Raises InputError where it gives none."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise InputError("--verify compares with transformers, which is not here: pip install transformers") from None
    try:
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        return net.eval()(ids).logits[0].float()
    except Exception as e:  # its own errors, and those of the folder's code
        hint = "" if trust_remote_code else " (with --trust-remote-code it runs the folder's own code)"
        raise InputError(f"--verify: transformers cannot run {folder}: {first_line(e)}{hint}") from None


@torch.inference_mode()
def check(theirs, folder, config, ids, dtype, tokenizer):
    """Print how far the logits of a checkpoint are from theirs. Raises InputError where that is more than rounding."""
    ours = load_shard(config, checkpoint.Weights(folder), dtype, "cpu")(ids)[0].float()
    apart, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    here, there = (str(logits[-1].argmax().item()) for logits in (ours, theirs))
    if tokenizer:
        here, there = (f"{i} {tokenizer.continuation(ids[0].tolist(), [int(i)])!r}" for i in (here, there))
    found = f"logits of {len(theirs)} tokens in {dtype_name(dtype)} by up to {apart:.2g}; the largest is {largest:.3g}"
    if not apart <= TOLERANCE[dtype] * largest:  # also where that is NaN
        found += f"; next token {here}, transformers' {there}"
        raise InputError(f"--verify: the converted model differs from transformers' in {found}")
    print(f"verified: it differs from transformers in {found}")
    print(f"next token: {here}" + (" in both" if here == there else f", transformers' {there}: differs, by rounding"))
