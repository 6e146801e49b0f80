"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

import contextlib
import functools
import os
import sys
import time
import zlib
from typing import NamedTuple

if __name__ == "__main__":  # before torch loads OpenMP, whose spinning threads stall a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from decoding import sampling
from decoding.sampling import Sampler
from decoding.step import Plain
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from kernels import int_linear
from runtime import cli, extras, launch, preflight, report, terminal, watch
from runtime.cli import count
from runtime.errors import InputError
from runtime.launch import World
from tp import TensorParallel, load_shard

# ---- The model -------------------------------------------------------------------------------------------------------


def load_model(config, folder, dtype, world):
    """Return the model with this rank's weights and its collectives. folder: None for random weights."""
    with world.together():
        weights = checkpoint.open_weights(folder, config, world.device)
        dtype = checkpoint.chosen_dtype(dtype, folder, weights)
        load = load_shard
        if config.named_wiring.model or (config.lanes and (1,) * config.lanes != world.shares):
            load = extras.load("lanes", f"wiring {config.wiring}").load_lanes
        model = load(config, weights, dtype, world.device, world.rank, world.shares)
    watch.at("preparation", timed=False)  # only now: until here ranks waited for one another's load
    int_linear.use_kernels(model)
    if world.group is not None:
        model.comm = TensorParallel(config, world.shares, world.group)
    return model


# ---- Prefill and decode ----------------------------------------------------------------------------------------------

CHUNK = 1024  # tokens of all rows in one pass of the prefill
CUT = 512  # tokens of a pass from which on two parts took no more of a CPU's time than one; with 256 it was 4 % more
BUCKET = 256  # a GPU's decode steps read multiples of so many cache slots


def make_cache(model, batch, length):
    """Return a cache of at least `length` slots, one of which no decode step reads.

    (A slice of the whole cache is contiguous: to the compiler another graph.) For a GPU they are whole buckets and one.
    """
    if model.device.type != "cpu":
        length = -(-length // BUCKET) * BUCKET + 1
    return model.new_cache(batch, length)


class Runner:
    """A model with its cache, and its prefill and decode, each compiled if asked for.

    parts: of each pass of the prefill: one computes while another's partials are summed. None: see parts_of. Raises
    InputError if compiling needs a C++ compiler and there is none.
    """

    def __init__(self, model, cache, compile=False, compile_prefill=False, parts=None):
        self.model, self.cache, self.device, self.parts = model, cache, model.device, parts
        self.compiles = compile, compile_prefill
        if self.device.type == "cpu" and any(self.compiles):
            from runtime import compiling  # like the other rooms below: a plain run does not enter them

            compiling.prepare()
        self._decode, self._prefill = model, torch.compile(model, fullgraph=True) if compile_prefill else model
        if compile:
            from runtime import compiling

            compiling.use_fast_modules(model)
            # One graph for any cache_length, an argument of Transformer.forward; all else is fixed. So each shape of a
            # cache has its own, and who serves many must not run out of them. Both are global.
            torch.compiler.config.dynamic_sources = "L['cache_length']"
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
            if self.device.type == "cuda":
                from kernels.cuda_graphs import Graphs

                self._decode = Graphs(model)
            else:
                # A step's weights evict all else from the caches, so little should run between the products; a second
                # thread is for large kernels.
                options = {"cpp_wrapper": True, "size_asserts": False, "cpp.min_chunk_size": 16384}
                self._decode = torch.compile(model, fullgraph=True, dynamic=False, options=options)

    def parts_of(self, B, S):
        """Return the parts of a prefill's pass of S tokens of B rows.

        The compiler would wait for both at once; on a GPU each launches all kernels, and nobody has measured it.
        """
        worth_it = B * S >= CUT and self.device.type == "cpu" and not self.compiles[1]
        return min(S, self.parts or 1 + (worth_it and self.model.comm.tp_size > 1))

    @torch.inference_mode()
    def prefill(self, tokens, lengths, chunk=None, known=0):
        """Return logits (B, v) after the last token of each row, from passes of at most `chunk` tokens of all rows.

        tokens (B, S), lengths (B,): as pad makes them. chunk: None for one pass. known: so many of each row, but not
        all, are in the cache. The memory for activations grows with the chunk, not with the prompt; only the mask grows
        with both, as chunk x filled slots.
        """
        B, S = tokens.shape
        last, width, logits = lengths - 1, S if chunk is None else max(1, chunk // B), None
        for start in range(known, S, width):
            if start:
                watch.at("prefill from token", start)
            part = tokens[:, start : start + width]
            stop, positions, filled = start + part.shape[1], None, None
            if start:
                positions, filled = torch.arange(start, stop, device=tokens.device).expand(B, -1), stop
            select, parts = (last - start).clamp(0, part.shape[1] - 1), self.parts_of(*part.shape)
            later = self._prefill(part, positions, self.cache, filled, select, parts)[:, 0]
            logits = later if logits is None else torch.where((last >= start)[:, None], later, logits)
        return logits

    @torch.inference_mode()
    def decode(self, tokens, positions, longest):
        """Return logits (B, S, v) after each of a few more tokens (B, S) of each row, the first at its position (B,).

        longest: the longest row's tokens after this pass. So many slots of the cache are read on a CPU, on a GPU a
        multiple of BUCKET: each is a CUDA graph of its own.
        """
        filled = longest if self.device.type == "cpu" else -(-longest // BUCKET) * BUCKET
        positions = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return self._decode(tokens, positions, self.cache, filled)


@torch.inference_mode()  # as everything that runs them: to the compiler, other tensors are another graph
def pad(prompts, device):
    """Return (tokens (B, S), lengths (B,)) of prompts of any lengths, padded on the right."""
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


# ---- Generation ------------------------------------------------------------------------------------------------------


class Generation(NamedTuple):
    """What generate() did."""

    rows: list  # new ids of each row, without end-of-sequence
    steps: int  # tokens of the longest row, end-of-sequence included
    prefill_s: float  # seconds to the first token
    decode_s: float  # of the passes after it, without those in on_tokens
    passes: int


@torch.inference_mode()
def generate(runner, prompts, max_new_tokens, sample, eos_ids=(), on_tokens=None, chunk=CHUNK, draft=None, known=0):
    """Continue every prompt, a row each, until its own end-of-sequence, max_new_tokens or the end of the context.

    Returns a Generation. runner: its cache has slots for the longest prompt and max_new_tokens, for a draft one more
    and its proposals. prompts: non-empty lists of token ids, of any lengths. sample: a Sampler; without a draft any
    function such as its __call__. on_tokens([new ids of each row, none of one that is done]) is called after
    each pass; True from it ends the generation. chunk, known: see Runner.prefill. Raises InputError.
    """
    draft, context = draft or Plain(), runner.model.config.max_seq_len
    texts, done, passes, shown = [list(prompt) for prompt in prompts], [False] * len(prompts), 0, 0.0
    ends = [min(len(prompt) + max_new_tokens, context) for prompt in prompts]
    watch.at("prefill")
    start = time.perf_counter()
    tokens, lengths = pad(prompts, runner.device)
    draft.begin(tokens, lengths, chunk, known)
    logits = runner.prefill(tokens, lengths, chunk, known)
    new = sample(logits, runner.model.comm)[:, None].tolist()  # waits for the device
    first = time.perf_counter() - start
    while True:
        now = time.perf_counter()
        fresh = [[] for _ in texts]
        for row, ids in enumerate(new):
            for i in ids:
                if done[row]:
                    break
                if i == -1:
                    step = len(texts[row]) - len(prompts[row])
                    raise InputError(f"the logits of row {row} in step {step} are NaN or infinite: see --dtype")
                texts[row].append(i)
                fresh[row] += [i] * (i not in eos_ids)
                done[row] = i in eos_ids or len(texts[row]) >= ends[row]
        watch.at("output", timed=False)  # its reader may take a break
        stop = on_tokens is not None and on_tokens(fresh)
        if stop or all(done):
            added = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
            rows = [[i for i in row if i not in eos_ids] for row in added]
            return Generation(rows, max(map(len, added)), first, now - start - first - shown, passes)
        shown += time.perf_counter() - now
        passes += 1
        watch.at("decode step", passes)
        new = draft.step(runner, texts, done, sample)


@torch.inference_mode()
def warm_up(runner, prompts, max_new_tokens, chunk=CHUNK, draft=None):
    """Compile a prefill and the passes that follow it, on a GPU in each bucket of cache slots; returns the seconds."""
    draft, start, first = draft or Plain(), time.perf_counter(), max(map(len, prompts)) + 1
    last, gpu, tokens = first + max_new_tokens - 1, runner.device.type == "cuda", pad(prompts, runner.device)
    with watch.during("compilation"):
        runner.prefill(*tokens, chunk)
        draft.begin(*tokens, chunk)
        for proposals in draft.counts:
            for length in range(first, last + 1) if gpu else [first]:
                if length in (first, last) or length % BUCKET == 1:
                    draft.warm_up(runner, [[0] * length for _ in prompts], proposals)
    return time.perf_counter() - start


def without_guards(runner):
    """Return a context for after a warm-up of the same shapes: else guards take 0.5 ms a step of 16 layers."""
    if any(runner.compiles) and runner.device.type == "cpu":
        return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    return contextlib.nullcontext()


# ---- The command line ------------------------------------------------------------------------------------------------


def parse(argv):
    p = cli.Parser(__doc__)
    g = p.add_argument_group("model")
    which = g.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", metavar="DIR", help="a folder of weights (docs/formats.md), e.g. demo")
    words = "random weights of a named size, such as 1b, 8b or 70b, or N layers of it, e.g. 8b:4"
    which.add_argument("--model", metavar="NAME[:N]", help=words)
    g.add_argument("--quant", metavar="int8|int4[:N]", help="of --model: integers, int4 in groups of N columns (64)")
    g.add_argument("--dtype", choices=checkpoint.DTYPES, help="of the weights (default: the checkpoint's, or bfloat16)")
    words = 'torch.compile the decode step, with "all" the prefill too; needs a C++ compiler'
    g.add_argument("--compile", nargs="?", const="decode", choices=("decode", "all"), help=words)
    cli.add_rank_flags(g, sharded=True)
    cli.add_wiring_flags(p)
    terminal.add_prompt_flags(p)
    g = p.add_argument_group("generation")
    g.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="each row stops at its own end")
    sampling.add_flags(g)
    g.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    words = "speculative decoding: K (3) proposals at a time of a smaller checkpoint, of the text's own n-grams, or of "
    words += "these weights in another wiring, e.g. wiring:spd@2"
    g.add_argument("--draft", metavar="DIR|ngram|wiring:NAME[@K|@auto]", help=words)
    cli.add_communication_flags(p)
    cli.add_json_flag(g)
    args = p.parse_args(argv)
    if args.quant and args.checkpoint:
        raise InputError("--quant goes with --model: a checkpoint is as it is (quantize.py makes another)")
    wrong = [flag for flag in ("exposed", "profile", "simulate_tp") if getattr(args, flag)]
    if wrong and (args.draft or args.interactive):
        raise InputError(f"--{wrong[0].replace('_', '-')} measures plain decode steps: without --draft or a chat")
    return args


def describe(args, world):
    """Return the Config of what is to be loaded, wired as the flags say, and the tokenizer, None without one."""
    if args.model:
        from formats.sizes import named_size

        return cli.with_wiring(named_size(args.model, args.quant), args), None
    own = checkpoint.read_config(args.checkpoint)
    config = cli.with_wiring(own, args)
    if world.rank == 0:
        cli.warn_of_wiring(own, config, world.shares)
    return config, load_tokenizer(args.checkpoint, config.vocab_size)


def main(argv=None):
    args = parse(argv)
    world, over, source = launch.join(args.device, vars(args)), None, None
    if args.link or args.simulate_tp or args.exposed:
        from extras.measure import link

        world, over = link.emulated(world, args)
    with world.together():
        sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
        config, tokenizer = describe(args, world)
        prompts = terminal.read_prompts(args, config, tokenizer)
        context = min(args.interactive or config.max_seq_len, config.max_seq_len)
        if not args.interactive and (args.prefill_parts or 1) > max(map(len, prompts), default=1):
            raise InputError(f"--prefill-parts is {args.prefill_parts}: more than the longest prompt has tokens")
        new = terminal.fit(args.max_new_tokens, prompts, context)
        slots = context if args.interactive else max(map(len, prompts)) + new
        if args.draft:
            from decoding import speculative

            source = speculative.read_draft(args.draft, config, args.checkpoint, world.tp_size)
            slots += 1 + source.max_count  # a row that is done stays at its last token, which is read again
        dtype = checkpoint.chosen_dtype(args.dtype, args.checkpoint)
        drafts = [(source.config, dtype, 0, 1)] if source and source.folder else []
        preflight.warn(world, len(prompts), slots, (config, dtype, world.rank, world.shares), *drafts)
    if not world.alone:  # else there is nobody to agree with, and no reason to read the files
        contents = {"tokens of the prompts": zlib.crc32(str(prompts).encode())} | (source.contents() if source else {})
        if args.checkpoint:
            contents["contents of --checkpoint"] = checkpoint.digest(args.checkpoint)
        world.agree(contents)
    start = time.perf_counter()
    model = load_model(config, args.checkpoint, args.dtype, world)

    def new_runner(model, cache=None):
        compiles = args.compile is not None, args.compile == "all"
        return Runner(model, cache or make_cache(model, len(prompts), slots), *compiles, args.prefill_parts)

    with world.together():
        runner, draft = new_runner(model), None
        if source:
            whole = functools.partial(load_model, dtype=args.dtype, world=World(0, 1, world.device))
            draft = speculative.build(source, runner, new_runner, whole)
    load_s, compile_s = time.perf_counter() - start, 0.0
    if args.compile:
        if world.rank == 0:
            print("compiling ...", file=sys.stderr)
        compile_s = warm_up(runner, prompts, new, draft=draft)
    if source and source.count == "auto":
        draft.begin(*pad(prompts, world.device), CHUNK)
        draft.control.time_passes(draft, runner, prompts, world, sample)
    eos_ids = () if args.ignore_eos or world.simulated else config.eos_ids
    if args.interactive:

        def answer(ids, new, on_tokens, known):
            return generate(runner, [ids], new, sample, eos_ids, on_tokens, draft=draft, known=known).rows[0]

        from runtime.chat import chat

        return chat(answer, tokenizer, world, context, args.max_new_tokens)
    talks = world.rank == 0 and not world.simulated
    printer = terminal.Printer(prompts, tokenizer, new, show_prompt=not args.chat) if talks else None
    with without_guards(runner):
        done = generate(runner, prompts, args.max_new_tokens, sample, eos_ids, printer and printer.push, draft=draft)
    found = report.generation(runner, draft, world, prompts, done, CHUNK)
    found |= {"load_s": load_s, "compile_s": compile_s, "exposed": None}
    found["texts"] = printer and printer.finish(done.rows)
    if args.exposed or args.profile:
        from extras.measure import exposed

        found["exposed"] = exposed.report_exposed(args, runner, *pad(prompts, world.device), world)
    if world.rank == 0:
        found |= {"comm": args.comm, "draft": source and source.name, "speculate": source and source.count}
        name = args.model.partition(":")[0] if args.model else checkpoint.name(args.checkpoint)
        result = report.result(name, model, over, world, found)
        print(report.summary(result), file=sys.stderr)
        if source:
            print(speculative.line_of(result), file=sys.stderr)
        for kind, measured in (found["exposed"] or {}).items():
            print(exposed.lines(kind, measured), file=sys.stderr)
        if args.json:
            from runtime import writing

            writing.append_line(args.json, result)


if __name__ == "__main__":
    launch.run(main)
