"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

# main -> set_up, then run -> generate -> token_passes (the loop) -> Runner.next_tokens (a pass) -> model, then sampler.
# Every rank runs all of this: each picks candidates from its part of the vocabulary, the ranks exchange them, and all,
# having the same seed, choose the same token.

import contextlib
import functools
import os
import time
import zlib
from typing import NamedTuple

if __name__ == "__main__":  # before torch loads OpenMP, whose spinning threads stall a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from tqdm import tqdm

from decoding.sampling import Sampler, last_tokens, pad
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from model import cache_slots
from runtime import cli, launch, place, report
from runtime.cli import count, number
from runtime.errors import InputError, load_extra
from runtime.launch import World
from runtime.report import PASS_TOKENS
from tp import TensorParallel, load_shard


def load_model(config, folder, dtype, world):
    """Return the model with this rank's weights and its collectives. folder: None for random weights."""
    load = load_shard
    if config.named_wiring.model or (config.lanes and world.shares != (1,) * config.lanes):  # not a lane on each rank
        load = load_extra("lanes", f"wiring {config.wiring}").load_lanes
    with world.together():  # raises an InputError of one rank on all of them
        if folder:
            weights = checkpoint.Weights(folder)
            if more := [name for name in weights.names() if name.startswith(f"layers.{config.n_layers}.")]:
                raise InputError(f"{folder} has a tensor {more[0]}, but its config has n_layers {config.n_layers}")
        else:
            from formats.sizes import RandomWeights

            weights = RandomWeights(config, world.device)
        dtype = checkpoint.chosen_dtype(dtype, folder, weights)
        model = load(config, weights, dtype, world.device, world.rank, world.shares)
    place.at("preparation", timed=False)  # only now: until here ranks waited for one another's load
    if config.quant:
        from kernels import int_linear

        int_linear.use_kernels(model)
    if world.group is not None:
        model.comm = TensorParallel(config, world.shares, world.group)
    return model


# ---- Generation: prefill and decode ----------------------------------------------------------------------------------

MIN_TOKENS = 512  # a pass of fewer is not cut: two chunks would take a CPU longer than one
BUCKET = 256  # a GPU's cache has multiples of so many slots


def make_cache(model, batch, length):
    """Return a cache of at least `length` slots."""
    if model.device.type != "cpu":
        # Whole buckets, and a slot that no step reads: a slice of all slots would be compiled as another graph.
        length = -(-length // BUCKET) * BUCKET + 1
    return model.new_cache(batch, length)


class Runner:
    """A model with its cache, and its prefill and decode, each compiled if asked for.

    A plain decode step is next_tokens: the model, then the sampler. On a GPU decoding/run_ahead.py starts the next step
    before the ids of the last one are read; compiled, a step there is the replay of a CUDA graph.
    decode_model, prefill_model: the model, or what torch.compile made of it; called as Transformer.forward.

    chunks: of each pass of the prefill; one computes while another's partials are summed. None: see choose_chunks.
    Raises InputError if compiling needs a C++ compiler and there is none.
    """

    def __init__(self, model, cache, compile=False, compile_prefill=False, chunks=None):
        self.model, self.cache, self.device, self.chunks = model, cache, model.device, chunks
        self.quiet = True  # else a long prefill shows its progress
        self.compiles = compile, compile_prefill
        self.decode_model = self.prefill_model = model
        if compile or compile_prefill:
            from runtime import compiling  # not in a plain run: it imports the compiler

            self.decode_model, self.prefill_model = compiling.compiled(model, compile, compile_prefill)
        self.graphs = self.decode_model if compile and self.device.type == "cuda" else None

    def with_model(self, model, cache=None):
        """Return a Runner of another model, compiled alike, with this cache or one of its own of the same size."""
        cache = cache or model.new_cache(len(self.cache[0][0]), cache_slots(self.cache))
        return Runner(model, cache, *self.compiles, self.chunks)

    def cache_length(self, longest):
        """Return how many slots of the cache a pass reads, after which the longest row has so many tokens.

        On a GPU each is a CUDA graph of its own, so there are 2 for each doubling; the last one is the whole cache.
        """
        if self.device.type == "cpu":
            return longest
        unit = max(BUCKET, 2 ** ((longest - 1).bit_length() - 2))
        return min(-(-longest // unit) * unit, cache_slots(self.cache) - 1)

    def unguarded(self):
        """Return a context for shapes that warm_up has compiled: it skips guards, 0.5 ms a step of 16 layers."""
        if any(self.compiles) and self.device.type == "cpu":
            return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        return contextlib.nullcontext()

    def choose_chunks(self, B, S):
        """Return the number of chunks for a prefill pass of S tokens of B rows."""
        on_cpus = self.device.type == "cpu" and self.model.comm.tp_size > 1  # on GPUs nobody has measured a gain
        worth_it = on_cpus and B * S >= MIN_TOKENS and not self.compiles[1]  # compiled, it waits for all sums at once
        return min(S, self.chunks or (2 if worth_it else 1))

    @torch.inference_mode()
    def prefill(self, tokens, lengths, pass_tokens=None, cached_tokens=0):
        """Return logits (B, v) after the last token of each row, from passes of at most pass_tokens tokens of all rows.

        tokens (B, S), lengths (B,): as pad makes them. pass_tokens: None for one pass; activations take the memory of
        a pass, not of the whole prompt. cached_tokens: so many of each row, but not all, are in the cache.
        """
        B, S = tokens.shape
        if self.model.config.linear_layers:  # whose state cannot go back to where the prompts part
            cached_tokens = 0
        width = max(1, pass_tokens // B) if pass_tokens else S
        last = lengths - 1
        logits = None
        starts = range(cached_tokens, S, width)
        if B * S > 8 * PASS_TOKENS and not self.quiet:  # disable=None: shown at a terminal
            starts = tqdm(starts, "prefill", leave=False, unit="pass", disable=None)
        for start in starts:
            piece, positions, filled = tokens[:, start : start + width], None, None
            if start:
                place.at("prefill from token", start)
                filled = start + piece.shape[1]
                positions = torch.arange(start, filled, device=tokens.device).expand(B, -1)
            select = (last - start).clamp(-1, piece.shape[1] - 1)  # -1: this row ended in an earlier pass
            chunks = self.choose_chunks(*piece.shape)
            new = self.prefill_model(piece, positions, self.cache, filled, select, chunks)[:, 0]
            logits = new if logits is None else torch.where((last >= start)[:, None], new, logits)
        return logits

    @torch.inference_mode()
    def decode(self, tokens, positions, longest):
        """Return logits (B, S, v) after each of a few more tokens (B, S) of each row, the first at its position (B,).

        longest: tokens of the longest row after this pass, as for cache_length.
        """
        positions = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return self.decode_model(tokens, positions, self.cache, self.cache_length(longest))

    def next_tokens(self, texts, sample):
        """Run a pass for texts of which all but the last token is cached; return their next ids (B,), on the device."""
        return sample(self.decode(*last_tokens(texts, self.device))[:, 0], self.model.comm)

    def plain_step(self):
        """Return next_tokens for one generation, on a GPU RunAhead's."""
        if self.device.type == "cpu":
            return self.next_tokens
        from decoding.run_ahead import RunAhead

        return RunAhead(self)


class Generation(NamedTuple):
    """What generate() did."""

    rows: list  # new ids of each row, without end-of-sequence
    steps: int  # tokens of the longest row, end-of-sequence included
    prefill_s: float  # seconds to the first token
    decode_s: float  # of the passes after it, without the time that whoever reads the tokens takes
    passes: int
    finish: list  # of each row "stop" for end-of-sequence, "length" for max_new_tokens or the context, None for neither


def generate(runner, prompts, max_new_tokens, sample, eos_ids=(), on_tokens=None, draft=None, cached_tokens=0):
    """Run token_passes to the end and return the Generation.

    on_tokens([new ids of each row, none of one that is done]) is called after each pass; True from it ends the
    generation.
    """
    stop = None
    loop = token_passes(runner, prompts, max_new_tokens, sample, eos_ids, draft, cached_tokens)
    while True:
        try:
            new = loop.send(stop)
        except StopIteration as end:
            return end.value
        stop = on_tokens is not None and on_tokens(new)


@torch.inference_mode()
def token_passes(runner, prompts, max_new_tokens, sample, eos_ids=(), draft=None, cached_tokens=0):
    """Continue every prompt, a row each, until its own end-of-sequence, max_new_tokens or the end of the context.

    A generator: it yields [new ids of each row, none of one that is done] after each pass, ends early if True is sent
    to it, and returns a Generation. runner: its cache has slots for the longest prompt and max_new_tokens, for a draft
    one more and its proposals. prompts: non-empty lists of token ids, of any lengths. sample: a Sampler; without a
    draft any function such as its __call__. draft: one of extras/drafts, with which a pass may yield several tokens of
    a row. cached_tokens: see Runner.prefill. Raises InputError.
    """
    texts, finish = [list(prompt) for prompt in prompts], [None] * len(prompts)
    passes, decode_s = 0, 0.0
    ends = [min(len(prompt) + max_new_tokens, runner.model.config.max_seq_len) for prompt in prompts]
    step = runner.plain_step()
    place.at("prefill")
    start = time.perf_counter()
    tokens, lengths = pad(prompts, runner.device)
    if draft:
        draft.begin(cached_tokens)
    logits = runner.prefill(tokens, lengths, PASS_TOKENS, cached_tokens)
    new = sample(logits, runner.model.comm)[:, None].tolist()  # waits for the device
    resumed = time.perf_counter()
    prefill_s = resumed - start
    while True:
        fresh = [[] for _ in texts]
        for row, ids in enumerate(new):
            for i in ids:
                if finish[row]:
                    break
                if i == -1:
                    where = f"row {row} in step {len(texts[row]) - len(prompts[row])}"
                    raise InputError(f"the logits of {where} are NaN or infinite: see --dtype")
                texts[row].append(i)
                if i in eos_ids:
                    finish[row] = "stop"
                    break
                fresh[row].append(i)
                if len(texts[row]) >= ends[row]:
                    finish[row] = "length"
        place.at("output", timed=False)  # its reader may take a break
        decode_s += time.perf_counter() - resumed
        stop = yield fresh
        resumed = time.perf_counter()
        if stop or all(finish):
            added = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
            rows = [[i for i in row if i not in eos_ids] for row in added]
            return Generation(rows, max(map(len, added)), prefill_s, decode_s, passes, finish)
        passes += 1
        place.at("decode step", passes)
        # one id for each row; with a draft also the proposals that the model accepts
        new = draft.step(runner, texts, finish, sample) if draft else step(texts, sample)[:, None].tolist()


# ---- The command line ------------------------------------------------------------------------------------------------


def add_flags(p):
    """Add the flags of this script to a cli.Parser."""
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
    words = "speculative decoding: K (3) proposals at a time of a smaller checkpoint, of the text's own n-grams, or of "
    words += "these weights in another wiring, e.g. wiring:spd@2"
    g.add_argument("--draft", metavar="DIR|ngram|wiring:NAME[@K]", help=words)
    cli.add_json_flag(g)


class Run(NamedTuple):
    """A generation that is ready to start, as set_up makes it."""

    args: object
    name: str  # of the model
    tokenizer: object  # or None
    prompts: list
    max_new_tokens: int  # as the context allows
    runner: Runner
    draft: object  # or None
    source: object  # the extras.drafts Source that --draft names, or None
    sample: Sampler
    eos_ids: tuple
    load_s: float
    compile_s: float


def set_up(args, world):
    """Return the Run that the flags describe: the model loaded, and compiled if asked for. Raises InputError."""
    with world.together():  # read and check all that the flags name, before any rank takes time to load
        if args.compile:
            from runtime import compiling

            compiling.prepare(world.device)  # before anything is loaded
        sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
        name, own = cli.read_config(args)
        config = cli.with_wiring(own, args)
        tokenizer = args.checkpoint and load_tokenizer(args.checkpoint, config.vocab_size)
        if args.checkpoint and world.rank == 0:
            cli.warn_of_wiring(own, config, world.shares)
        prompts, chats = cli.read_prompts(args, config, tokenizer), cli.is_chat(args)
        context = min(cli.CHAT_CONTEXT, config.max_seq_len) if chats else config.max_seq_len
        new = cli.fit(args.max_new_tokens, prompts, context)
        slots = context if chats else max(map(len, prompts)) + new
        source = draft = None
        if args.draft:
            drafts = load_extra("drafts", f"--draft {args.draft}")
            source = drafts.read_draft(args.draft, config, args.checkpoint, world.tp_size)
            slots += 1 + source.count  # a row that is done stays at its last token, which is read again
        dtype = checkpoint.chosen_dtype(args.dtype, args.checkpoint)
        report.warn_of_memory(world, config, dtype, len(prompts), slots)
    contents = {"tokens of the prompts": zlib.crc32(str(prompts).encode()), "--draft": source and source[:2]}
    world.agree(contents, checkpoint=args.checkpoint, draft=source and source.folder)
    start = time.perf_counter()
    model = load_model(config, args.checkpoint, args.dtype, world)
    cache = make_cache(model, len(prompts), slots)
    with world.together():
        runner = Runner(model, cache, compile=args.compile is not None, compile_prefill=args.compile == "all")
        runner.quiet = world.rank > 0
        if source:
            whole = functools.partial(load_model, dtype=args.dtype, world=World(0, 1, world.device))
            draft = drafts.build(source, runner, whole)
    load_s = time.perf_counter() - start
    compile_s = 0.0
    if args.compile:
        world.say("compiling ...")
        compile_s = compiling.warm_up(runner, prompts, new, sample, draft)
    eos_ids = config.eos_ids if args.checkpoint else ()  # to random weights it means nothing
    return Run(args, name, tokenizer, prompts, new, runner, draft, source, sample, eos_ids, load_s, compile_s)


def run(setup, world):
    """Generate, and print the text on rank 0; returns (the Generation, the texts or None)."""
    s, printer = setup, None
    if world.rank == 0:
        printer = cli.Printer(s.prompts, s.tokenizer, s.max_new_tokens, show_prompt=s.args.chat is None)
    with s.runner.unguarded():
        done = generate(s.runner, s.prompts, s.max_new_tokens, s.sample, s.eos_ids, printer and printer.push, s.draft)
    return done, printer and printer.finish(done.rows)


def main(argv=None):
    parser = cli.Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args(argv)
    world = launch.join(args.device, vars(args))
    setup = set_up(args, world)
    if cli.is_chat(args):
        return load_extra("chat", "--chat without a prompt").run(setup, world, generate)
    done, texts = run(setup, world)
    result = report.result(setup, world, done, texts)
    world.say(report.summary(result))
    if args.json and world.rank == 0:
        from runtime import benchmarking, writing

        writing.append_line(args.json, benchmarking.environment(world) | result)


if __name__ == "__main__":
    launch.run(main)
