"""How many of a model's greedy answers are another's, word for word? For a retrained model and its original.

python -m extras.training.answers --checkpoint DIR --compare ORIGINAL

The prompts are made of nouns and templates. A chat template, if the checkpoint has one, makes a user's turn of each.
"""

import os

import torch

import generate
from ladder import benchmarking, outputs
from ladder.checkpoints import checkpoint
from ladder.checkpoints.compare import check_vocabulary
from ladder.command_line import flags
from ladder.command_line.flags import count
from ladder.decoding.batch import Sampler, make_cache
from ladder.errors import InputError
from ladder.ranks import launch
from ladder.text.tokenizer import load_tokenizer

ROWS = 50  # answers that are written at once
NOUNS = (
    "a bridge", "a candle", "a clock", "a dictionary", "a garden", "a hammer", "a lighthouse", "a mirror", "a river",
    "a school", "a ship", "a spoon", "a telescope", "a train", "a violin", "a window", "bread", "honey", "rain", "salt",
)  # fmt: skip
TEMPLATES = (
    "What is {}?", "Write a short story about {}.", "What is {} used for?", "Who would need {}, and why?",
    "Explain {} to a child.", "Write a poem of four lines about {}.", "What would the world be without {}?",
    "Name three things that have to do with {}.", "What does one have to know about {}?",
    "Write a letter to a friend that mentions {}.",
)  # fmt: skip


def prompts(tokenizer, n):
    """Return n prompts as ids, spread over the nouns; they repeat after 200."""
    texts = [template.format(noun) for noun in NOUNS for template in TEMPLATES]
    texts = [texts[i * len(texts) // n] for i in range(n)]
    if tokenizer.template:
        return [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text) for text in texts]


def answers(model, prompts, n):
    """Return the ids of each prompt's greedy answer, at most n, end-of-sequence included."""
    result = []
    for i in range(0, len(prompts), ROWS):
        rows = prompts[i : i + ROWS]
        runner = generate.Runner(model, make_cache(model, len(rows), max(map(len, rows)) + n))
        sample = Sampler(0.0, device=model.device)
        sequences = generate.generate(runner, rows, n, sample, model.config.eos_ids).sequences
        result += [ids[len(row) :] for ids, row in zip(sequences, rows, strict=True)]
    return result


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="the model, in its own wiring")
    p.add_argument("--compare", required=True, metavar="DIR", help="the model whose answers are right")
    p.add_argument("--prompts", type=count, default=200, metavar="N", help="how many prompts (default: 200)")
    p.add_argument("--tokens", type=count, default=20, metavar="N", help="of an answer, at most (default: 20)")
    p.add_argument(
        "--dtype", **flags.one_of(checkpoint.DTYPES), default="float32", help="default: float32, of few ties"
    )
    flags.add_rank_flags(p)
    flags.add_json_flag(p, "the line")
    args = p.parse_args(argv)
    world = launch.join(args.device, vars(args))
    folders = (args.checkpoint, args.compare)
    with world.together():
        configs = [checkpoint.read_config(folder) for folder in folders]
        tokenizer = load_tokenizer(args.checkpoint, configs[0].vocab_size)
        if tokenizer is None:
            raise InputError(f"{args.checkpoint} has no tokenizer")
        check_vocabulary(configs[0], args.checkpoint, configs[1], args.compare, f"--compare {args.compare}")
    models = (generate.load_model(*pair, args.dtype, world) for pair in zip(configs, folders, strict=True))
    rows = prompts(tokenizer, args.prompts)
    pairs = [*zip(*(answers(model, rows, args.tokens) for model in models), strict=True)]
    alike = sum(a == b for a, b in pairs)
    mean = sum(len(os.path.commonprefix(pair)) for pair in pairs) / len(rows)
    line = {
        "what": "answers", "wiring": configs[0].wiring, "prompts": len(rows), "tokens": args.tokens, "alike": alike,
        "mean_same_tokens": mean, "dtype": args.dtype, "torch": torch.__version__, "commit": benchmarking.git_commit(),
    }  # fmt: skip
    if world.rank == 0 and args.json:
        outputs.append_line(args.json, line)
    words = f"{alike} of {len(rows)} answers ({alike / len(rows):.1%}) are the same for {args.tokens} tokens"
    world.say(f"{words}, and on average the first {mean:.1f} tokens are")


if __name__ == "__main__":
    launch.run(main)
