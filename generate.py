"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

# Every rank runs main. A step is Runner.next_tokens (decoding/runner.py): the model, then the sampler. Each rank picks
# candidates from its part of the vocabulary, they exchange them, and all, having the same seed, choose the same token.

import functools
import os
import time
import zlib

if __name__ == "__main__":  # before torch loads OpenMP, whose spinning threads stall a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from decoding.runner import Runner, Sampler, make_cache, pad
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from runtime import cli, launch, place, report
from runtime.cli import count, number
from runtime.errors import InputError, find_extra, load_extra  # of an absent extra find_ returns None
from tp import TensorParallel, load_shard


def load_model(config, folder, dtype, world):
    """Return the model with this rank's weights and its collectives. folder: None for random weights."""
    load = load_shard
    if config.named_wiring.model or (config.fixed_lanes and world.shares != (1,) * config.fixed_lanes):
        # a Laneformer, or several lanes on a rank, such as spd/8 on 2 ranks
        load = load_extra("lanes", f"wiring {config.wiring}").load_lanes
    with world.together():  # raises an InputError of one rank on all of them
        if folder:
            weights = checkpoint.Weights(folder)
            if more := [name for name in weights.names() if name.startswith(f"layers.{config.n_layers}.")]:
                raise InputError(f"{folder} has a tensor {more[0]}, but its config has n_layers {config.n_layers}")
        else:
            from formats.sizes import RandomWeights

            weights = RandomWeights(config, world.device)
        dtype = checkpoint.chosen_dtype(dtype, folder and weights)
        model = load(config, weights, dtype, world.device, world.rank, world.shares)
    place.at("preparation", timed=False)  # untimed: to wait here for slower ranks is no hang
    if config.quant:
        from kernels import int_linear

        module = int_linear if world.device.type == "cpu" else find_extra("gpu")
        if module:
            module.use_kernels(model)
    if world.group is not None:
        model.comm = TensorParallel(config, world.shares, world.group)  # extras/lanes wraps it
    return model


# ---- Decoding --------------------------------------------------------------------------------------------------------


class Generation:
    """Continues every prompt, a row each, until its own end-of-sequence, max_new_tokens or the end of the context.

    Iterate over it, once: each pass yields a list with the new ids of each row, empty for a row that is done. The
    caller may stop early, and what it does between passes is not timed.

    runner: its cache has slots for the longest prompt and max_new_tokens.
    prompts: non-empty lists of token ids, of any lengths. sample: a Sampler or, without a draft, a function like its
    __call__. draft: one of extras/drafts, with which a pass may yield several tokens of a row. cached_tokens: see
    Runner.prefill. The iteration raises InputError if logits are not finite.
    """

    def __init__(self, runner, prompts, max_new_tokens, sample, eos_ids=(), draft=None, cached_tokens=0):
        self.runner, self.prompts, self.sample, self.draft = runner, prompts, sample, draft
        self.eos_ids, self.cached_tokens, context = eos_ids, cached_tokens, runner.model.config.max_seq_len
        self.sequences = [list(prompt) for prompt in prompts]  # with the new ids, end-of-sequence included
        self.rows = [[] for _ in prompts]  # the new ids of each row, without end-of-sequence
        self.ends = [min(len(prompt) + max_new_tokens, context) for prompt in prompts]
        self.finish_reasons = [None] * len(prompts)  # "stop" (end-of-sequence) or "length" of a row that is done
        self.passes = 0  # of decode
        self.prefill_s = self.decode_s = 0.0  # seconds: to the first token; in all later passes

    @torch.inference_mode()
    def __iter__(self):
        runner, draft = self.runner, self.draft
        # step(sequences, sample) -> ids (B,): the model on each row's last token, then the sampler: Runner.next_tokens
        step = runner.plain_step()  # on a GPU it queues the next step before it waits for this one's ids
        place.at("prefill")
        start = time.perf_counter()
        if draft:
            draft.begin(self.cached_tokens)
        logits = runner.prefill(*pad(self.prompts, runner.device), self.cached_tokens)
        new = self.take(self.sample(logits, runner.model.comm)[:, None].tolist())  # tolist waits for the device
        self.prefill_s = time.perf_counter() - start
        yield new
        while not all(self.finish_reasons):
            start = time.perf_counter()
            self.passes += 1
            place.at("decode step", self.passes)
            if draft:
                new = draft.step(runner, self.sequences, self.finish_reasons, self.sample)
            else:
                new = step(self.sequences, self.sample)[:, None].tolist()
            new = self.take(new)
            self.decode_s += time.perf_counter() - start
            yield new

    def take(self, new):
        """Add the ids that a pass gave each row to its sequence, up to its end; return them without end-of-sequence."""
        taken = [[] for _ in new]
        for row, ids in enumerate(new):
            for token in ids:
                if self.finish_reasons[row]:
                    break
                if token == -1:  # Sampler's mark of logits that are not finite
                    where = f"row {row} in step {len(self.rows[row])}"
                    raise InputError(f"the logits of {where} are NaN or infinite: see --dtype")
                self.sequences[row].append(token)
                if token in self.eos_ids:
                    self.finish_reasons[row] = "stop"
                    break
                self.rows[row].append(token)
                taken[row].append(token)
                if len(self.sequences[row]) >= self.ends[row]:
                    self.finish_reasons[row] = "length"
        place.at("output", timed=False)  # its reader may take a break
        return taken

    @property
    def new_tokens(self):
        """The most new tokens of any row, end-of-sequence included."""
        return max(len(sequence) - len(prompt) for sequence, prompt in zip(self.sequences, self.prompts, strict=True))


def generate(*args, **kwargs):
    """Run a Generation to its end and return it."""
    generation = Generation(*args, **kwargs)
    for _ in generation:
        pass
    return generation


# ---- The command line ------------------------------------------------------------------------------------------------


def add_flags(p):
    g = p.add_argument_group("model")
    cli.add_model_flags(g, required=True)
    words = 'torch.compile the decode step, with "all" the prefill too; needs a C++ compiler'
    g.add_argument("--compile", nargs="?", const="decode", choices=("decode", "all"), help=words)
    cli.add_rank_flags(g, sharded=True)
    cli.add_wiring_flags(p)
    cli.add_prompt_flags(p)
    g = p.add_argument_group("generation")
    g.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="each row stops at its own end")
    g.add_argument("--temperature", type=number(float, 0), default=0.8, metavar="T", help="0: greedy, 1: the model's")
    g.add_argument("--top-k", type=count, metavar="K", help="sample among the K likeliest tokens, e.g. 50")
    words = "... among the likeliest of mass P, e.g. 0.95"
    g.add_argument("--top-p", type=number(float, 0, 1, above=True), default=1.0, metavar="P", help=words)
    g.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="S", help="of sampling and prompts")
    words = "speculative decoding: a smaller checkpoint, the text's own n-grams, or these weights in another wiring "
    words += "propose K (3) tokens at a time; e.g. wiring:spd@2 is the wiring spd with K = 2"
    g.add_argument("--draft", metavar="(DIR|ngram|wiring:NAME)[@K]", help=words)
    cli.add_json_flag(g)


class Job:
    """What the flags ask for, checked on all ranks before one loads. load() adds runner, draft, load_s, compile_s."""

    def __init__(self, args, world):
        self.args, self.world = args, world
        with world.together():
            if args.compile:
                from runtime import compiling

                compiling.prepare(world.device)
            self.sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
            self.name, stored = cli.read_config(args)
            self.config = config = cli.with_wiring(stored, args)
            self.tokenizer = args.checkpoint and load_tokenizer(args.checkpoint, config.vocab_size)
            if args.checkpoint and world.rank == 0:
                cli.warn_of_wiring(stored, config, world.shares)
            chats, self.prompts = cli.is_chat(args), cli.read_prompts(args, config, self.tokenizer)
            context = min(cli.CHAT_CONTEXT, config.max_seq_len) if chats else config.max_seq_len
            self.max_new_tokens = cli.fit(args.max_new_tokens, self.prompts, context)  # as the context allows
            self.slots = context if chats else max(map(len, self.prompts)) + self.max_new_tokens  # of the cache
            self.draft_source = args.draft and load_extra("drafts", f"--draft {args.draft}").read_draft(
                args.draft, config, args.checkpoint, world.tp_size
            )
            report.warn_of_memory(world, config, cli.read_dtype(args), len(self.prompts), self.slots)
        source, contents = self.draft_source, {"tokens of the prompts": zlib.crc32(str(self.prompts).encode())}
        contents["--draft"] = source and (source.name, source.count)
        world.agree(contents, checkpoint=args.checkpoint, draft=source and source.folder)  # raises where ranks differ

    def load(self):
        """Load the model, and compile it if asked for. Raises InputError."""
        args, world, start = self.args, self.world, time.perf_counter()
        model = load_model(self.config, args.checkpoint, args.dtype, world)
        cache = make_cache(model, len(self.prompts), self.slots)
        with world.together():
            self.runner = Runner(model, cache, compile=args.compile is not None, compile_prefill=args.compile == "all")
            self.runner.shows_progress = world.rank == 0
            self.draft = None
            if self.draft_source:
                alone = launch.World(0, 1, world.device)  # a draft's own weights are not sharded
                load_whole = functools.partial(load_model, dtype=args.dtype, world=alone)
                self.draft = load_extra("drafts", "--draft").build(self.draft_source, self.runner, load_whole)
        self.load_s, self.compile_s = time.perf_counter() - start, 0.0
        if args.compile:
            from runtime import compiling

            world.say("compiling ...")
            self.compile_s = compiling.warm_up(self.runner, self.prompts, self.max_new_tokens, self.sample, self.draft)


def main(argv=None):
    parser = cli.Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args(argv)
    world = launch.join(args.device, vars(args))  # this rank and the others: rank, shares, device, group
    job = Job(args, world)
    job.load()
    if cli.is_chat(args):
        return load_extra("chat", "--chat without a prompt").chat_on_terminal(job, Generation)
    printer = cli.Printer(world.rank, job.prompts, job.tokenizer, job.max_new_tokens, show_prompt=args.chat is None)
    generation = Generation(job.runner, job.prompts, job.max_new_tokens, job.sample, job.config.eos_ids, job.draft)
    with job.runner.unguarded():  # on a CPU, skips torch.compile's guards, which take time in each step
        for ids in generation:
            printer.push(ids)
    result = report.result(job, generation, printer.finish(generation.rows))
    world.say(report.summary(result))
    if args.json and world.rank == 0:
        from runtime import benchmarking, writing

        writing.append_line(args.json, benchmarking.environment(world) | result)


if __name__ == "__main__":
    launch.run(main)
