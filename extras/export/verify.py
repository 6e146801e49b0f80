"""Compare a converted checkpoint with what transformers computes from its source. The exit code is 2 if they differ.

python -m extras.export.verify meta-llama/Llama-3.2-1B checkpoints/1b
"""

import torch

from convert_hf_checkpoint import open_source
from ladder.architectures.heads import Heads
from ladder.checkpoints import checkpoint, writing
from ladder.checkpoints.checkpoint import dtype_name
from ladder.command_line import flags
from ladder.errors import InputError, first_line
from ladder.kernels.cpu.loading import use_on_cpu
from ladder.ranks import launch
from ladder.sources.families import NESTED
from ladder.text.tokenizer import load_tokenizer
from tp import load_shard

TEXT = "Once upon a time there was a little dog who counted up to 10, and then ran to the park. "
N_TOKENS = 600  # or the whole context; more than a Laneformer's window of 512
# The largest difference between logits, relative to the largest logit, that counts as rounding. In random models of up
# to 48 layers rounding made 7e-7, 1e-2 and 7e-2; most mistakes make more.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}


def expected(folder, ids, dtype, trust_remote_code, **how):
    """Return transformers' logits (S, V) from a Hugging Face folder. Raises InputError where it gives none.

    how: more arguments of from_pretrained.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        nested = checkpoint.read_json(folder / "config.json").get("model_type") in NESTED
        auto = AutoModelForImageTextToText if nested else AutoModelForCausalLM
        net = auto.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code, **how)
        return net.eval()(ids).logits[0].float()
    except ImportError as e:
        raise InputError(f"{first_line(e)}: pip install transformers, as requirements-peers.txt says") from None
    except Exception as e:  # errors of transformers and of the folder's code
        hint = "" if trust_remote_code else " (with --trust-remote-code it runs the folder's own code)"
        raise InputError(f"transformers cannot run {folder}: {first_line(e)}{hint}") from None


@torch.inference_mode()
def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("source", metavar="HF_FOLDER", help="the Hugging Face folder or hub id that was converted")
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="what convert_hf_checkpoint.py made of it")
    p.add_argument("--revision", help="of a hub model, e.g. main")
    words = "run the code that HF_FOLDER brings along, a stranger's program"
    p.add_argument("--trust-remote-code", action="store_true", help=words)
    args = p.parse_args(argv)
    config = writing.read_original(args.checkpoint)
    source = open_source(args.source, args.revision)
    source_config = source.config
    folder = source.tokenizer_folder
    if folder is None:
        raise InputError(f"{args.source} is no folder that transformers reads")
    if source_config.layer_wirings != config.layer_wirings:
        raise InputError(f"transformers runs {args.source} as {source_config.wiring}, not as {config.wiring}")
    weights = checkpoint.Weights(args.checkpoint)
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    dtype = checkpoint.chosen_dtype(None, weights)
    ids = tokenizer.encode(TEXT * N_TOKENS) if tokenizer else [i * i % config.vocab_size for i in range(N_TOKENS)]
    ids = torch.tensor([ids[: min(N_TOKENS, config.max_seq_len)]])
    how = (
        {"attn_implementation": "eager"} if (config.find(Heads) or Heads()).score_cap else {}
    )  # PyTorch's attention would ignore the cap
    theirs = expected(folder, ids, dtype, args.trust_remote_code, **how)
    model = load_shard(config, weights, dtype, "cpu")
    use_on_cpu(model)  # as generate.py does
    ours = model(ids)[0].float()
    apart = (ours - theirs).abs().max().item()
    largest = theirs.abs().max().item()
    here, there = (logits[-1].argmax().item() for logits in (ours, theirs))
    result = f"logits of {len(theirs)} tokens in {dtype_name(dtype)} by up to {apart:.2g}; the largest is {largest:.3g}"
    next_token = f"next token: {here}, in transformers {there}"
    if not apart <= TOLERANCE[dtype] * largest:  # also where that is NaN
        raise InputError(f"the converted model differs from transformers' in {result}; {next_token}")
    print(f"verified: it differs from transformers in {result}\n{next_token}")


if __name__ == "__main__":
    launch.run(main)
