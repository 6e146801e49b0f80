"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

import contextlib
import functools
import math
import os.path
import sys
import time
import zlib
from typing import NamedTuple

import torch

from decoding import speculative
from decoding.sampling import Sampler
from formats import checkpoint
from formats.checkpoint import DTYPES, SIZES, dtype_name
from formats.tokenizer import load_tokenizer
from kernels import cpu, int_linear
from measure import link, preflight, report
from measure.timing import timed
from model import InputError, Transformer, rewired
from runtime import cli, launch, terminal, watch, writing
from runtime.cli import count, number
from runtime.launch import World
from tp import TensorParallel, load_shard

# ---------------------------------------------------------------------------------------------------------------------
# The model


def load(folder, device=None, dtype=None, wiring=None):
    """(model, tokenizer or None) of a checkpoint folder, on one device, for complete().

    device: "cpu", "cuda", ... or None. dtype: a name of DTYPES or None. wiring: another than the checkpoint's,
    e.g. "ladder:16". Raises InputError.
    """
    config = rewired(checkpoint.read_config(folder), wiring)
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype is {dtype!r} but must be one of {', '.join(DTYPES)}")
    model = load_model(config, folder, dtype, World(0, 1, launch.choose_device(device)))
    return model, load_tokenizer(folder, config.vocab_size)


def load_model(config, folder, dtype, world):
    """The model with this rank's weights and the collectives that it needs. folder: None for random weights."""
    with world.together():
        weights = checkpoint.Weights(folder) if folder else checkpoint.RandomWeights(config, world.device)
        dtype = chosen_dtype(dtype, folder, weights)
        model = load_shard(config, weights, dtype, world.device, world.rank, world.tp_size)
    watch.at("preparation", timed=False)  # only now: until here ranks waited for one another's load
    int_linear.use_kernels(model)
    if world.group is not None:
        model.comm = TensorParallel(config, world.tp_size, world.group)
    return model


def chosen_dtype(name, folder, weights=None):
    """The dtype of that name, or without one that of the checkpoint folder; of random weights bfloat16.

    weights: the folder's, where they are open already.
    """
    if name or not folder:
        return DTYPES.get(name, torch.bfloat16)
    return checkpoint.own_dtype(weights or checkpoint.Weights(folder), "norm.weight")


# ---------------------------------------------------------------------------------------------------------------------
# Prefill and decode


CHUNK = 1024  # tokens of all rows in one pass of the prefill
BUCKET = 256  # a GPU's decode steps read multiples of so many cache slots


def make_cache(model, batch, length):
    """A cache of at least `length` slots, one of which no decode step reads.

    (A slice of the whole cache is contiguous, and the compiler would make a second graph for it.) For a GPU they are
    whole buckets and one, and CUDA graphs are told that its tensors never move.
    """
    if model.norm.weight.device.type == "cpu":
        return model.new_cache(batch, length)
    cache = model.new_cache(batch, -(-length // BUCKET) * BUCKET + 1)
    for tensor in (t for layer in cache for t in layer):
        torch._dynamo.mark_static_address(tensor)
    return cache


class Runner:
    """A model with its cache, and its prefill and decode, each compiled if asked for.

    Raises InputError when the compiler that this takes is missing.
    """

    def __init__(self, model, cache, compile=False, compile_prefill=False):
        self.model, self.cache, self.device = model, cache, model.norm.weight.device
        self._prefill = torch.compile(model, fullgraph=True) if compile_prefill else model
        self._decode, self.compiled = model, compile or compile_prefill
        if self.device.type == "cpu" and self.compiled:
            cpu.prepare_compile()
        if compile:
            cpu.use_few_rows(model)
            # One graph for any cache_length, the argument of Transformer.forward; all else is fixed. So each shape of a
            # cache has its own, and a process that serves many must not run out of them. Both are global.
            torch.compiler.config.dynamic_sources = "L['cache_length']"
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
            self._decode = torch.compile(model, fullgraph=True, dynamic=False, **self._how())

    def _how(self):
        if self.device.type == "cuda":
            return {"mode": "reduce-overhead"}
        # The weights of each step evict everything else from the caches, so little should run between the products; a
        # second thread is for large kernels.
        return {"options": {"cpp_wrapper": True, "size_asserts": False, "cpp.min_chunk_size": 16384}}

    @torch.inference_mode()
    def prefill(self, tokens, lengths, chunk=None, known=0):
        """Logits (B, V) after the last token of each row, from passes of at most `chunk` tokens of all rows, or one.

        tokens (B, S), lengths (B,): as pad makes them. known: so many of each row, but not all, are in the cache. The
        memory for activations grows with the chunk, not with the prompt; only the mask grows with both, as chunk x
        filled slots.
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
            select = (last - start).clamp(0, part.shape[1] - 1)
            later = self._prefill(part, positions, self.cache, filled, select)[:, 0]
            logits = later if logits is None else torch.where((last >= start)[:, None], later, logits)
        return logits

    @torch.inference_mode()
    def decode(self, tokens, positions, longest):
        """Logits (B, S, V) after each of a few more tokens (B, S) of each row, the first of which is at its position
        (B,); the longest row then has `longest`.

        It reads that many slots of the cache on a CPU, on a GPU a multiple of BUCKET: each is a CUDA graph of its own.
        """
        filled = longest if self.device.type == "cpu" else -(-longest // BUCKET) * BUCKET
        positions = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return self._decode(tokens, positions, self.cache, filled)

    def read(self, texts, ids=None):
        """Logits (B, 1 + K, V) after the texts, and after each of the ids (B, K) behind them.

        texts: the tokens of each row, of which all but the last are in the cache.
        """
        tokens = torch.tensor([text[-1:] for text in texts], device=self.device)
        positions = torch.tensor([len(text) - 1 for text in texts], device=self.device)
        if ids is not None:
            tokens = torch.cat((tokens, ids), 1)
        return self.decode(tokens, positions, max(map(len, texts)) + tokens.shape[1] - 1)

    @torch.inference_mode()
    def step(self, texts, sample, proposed=None):
        """([new ids of each row], [how many of them are proposals that stand] or None) behind the texts.

        texts: as read takes them. proposed: a draft's, as Sampler.accept takes them, or None for a plain step.
        """
        if proposed is None:
            return sample(self.read(texts)[:, 0])[:, None].tolist(), None
        ids, q = proposed
        ids, stand = (found.tolist() for found in sample.accept(self.read(texts, ids), ids, q))
        return [row[: n + 1] for row, n in zip(ids, stand, strict=True)], stand


@torch.inference_mode()  # as everything that runs them: to the compiler, other tensors are another graph
def pad(prompts, device):
    """(tokens (B, S), lengths (B,)) of prompts of any lengths, padded on the right."""
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Generation


class Generation(NamedTuple):
    """What generate() did.

    rows: new ids per row, without end-of-sequence. steps: tokens of the longest row, with it. prefill_s: seconds to the
    first token; decode_s: of the passes after it, without those in on_tokens. passes: the number of these.
    """

    rows: list
    steps: int
    prefill_s: float
    decode_s: float
    passes: int


@torch.inference_mode()
def generate(runner, prompts, max_new_tokens, sample, eos_ids=(), on_tokens=None, chunk=CHUNK, draft=None, known=0):
    """Continue every prompt, a row each, until its own end-of-sequence or max_new_tokens; returns a Generation.

    runner: whose cache has at least longest prompt + max_new_tokens slots, for a draft one more and its proposals.
    prompts: non-empty lists of token ids, of any lengths. sample: a Sampler; without a draft any function as that.
    on_tokens([new ids of each row, none of one that is done]) is called after each pass; True from it ends the
    generation. chunk, known: see Runner.prefill. draft: of speculative.py. Raises InputError for logits not finite.
    """
    texts, done, passes, shown = [list(prompt) for prompt in prompts], [False] * len(prompts), 0, 0.0

    def rows():
        return [[i for i in text[len(p) :] if i not in eos_ids] for text, p in zip(texts, prompts, strict=True)]

    watch.at("prefill")
    start = time.perf_counter()
    tokens, lengths = pad(prompts, runner.device)
    if draft:
        draft.begin(tokens, lengths, chunk, known)
    new = sample(runner.prefill(tokens, lengths, chunk, known))[:, None].tolist()  # waits for the device
    first = time.perf_counter() - start
    while True:
        now = time.perf_counter()
        fresh = [[] for _ in texts]
        for row, ids in enumerate(new):
            for i in ids:
                if not done[row]:
                    if i == -1:
                        n = len(texts[row]) - len(prompts[row])
                        where = f"step {n} ({'decode' if n else 'prefill'}), row {row} of {len(texts)}"
                        dtype = dtype_name(runner.model.norm.weight.dtype)
                        raise InputError(f"the logits are NaN or infinite in {where}, computed in {dtype}")
                    texts[row].append(i)
                    fresh[row] += [i] * (i not in eos_ids)
                    done[row] = i in eos_ids or len(texts[row]) >= len(prompts[row]) + max_new_tokens
        watch.at("output", timed=False)  # whoever reads it may take a break
        stop = on_tokens is not None and on_tokens(fresh)
        if stop or all(done):
            steps = max(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True))
            return Generation(rows(), steps, first, now - start - first - shown, passes)
        shown += time.perf_counter() - now
        passes += 1
        watch.at("decode step", passes)
        new = draft.step(runner, texts, done, sample) if draft else runner.step(texts, sample)[0]


@torch.inference_mode()
def warm_up(runner, prompts, max_new_tokens, chunk=CHUNK, draft=None):
    """Compile: a prefill, and passes of each number of tokens, on a GPU in each bucket of cache slots.

    Returns {number of proposals: seconds of a pass} where there is a draft, and the seconds of all of it.
    """
    start, sample, seconds = time.perf_counter(), Sampler(0, device=runner.device), {}
    longest = max(map(len, prompts))
    lengths = range(longest + 1, longest + max_new_tokens + (draft is not None))
    tokens = pad(prompts, runner.device)

    def once(texts, count):
        proposed = None
        if count:
            found = draft.propose(count, texts, [False] * len(texts), sample)
            proposed = found[:2] if found else (tokens[0].new_zeros(len(texts), count), None)
        runner.step(texts, sample, proposed)

    with watch.during("compilation"):
        if runner.compiled:
            runner.prefill(*tokens, chunk)
        if draft:
            draft.begin(*tokens, chunk)
        for count in (0, *draft.control.counts) if draft else (0,):
            # on a GPU the first and the last of those that read a bucket, also behind the proposals
            edges = [n for n in lengths if {n % BUCKET, (n + count) % BUCKET} & {0, 1}] + [*lengths[-1:]]
            for length in [*lengths[:1], *(edges if runner.device.type == "cuda" else ())]:
                texts = [[0] * length for _ in prompts]
                for _ in range(3 if runner.device.type == "cuda" else 1):  # a GPU warms up, captures, and replays
                    once(texts, count)
                if draft:
                    seconds[count] = min(timed(runner.device, functools.partial(once, texts, count)) for _ in range(3))
    return seconds, time.perf_counter() - start


def without_guards(runner):
    """A context behind a warm-up of the same prompts and chunks: all else that varies, cache_length, is dynamic.

    On a CPU, where checking at each step what the graphs assume takes 0.5 ms for 16 layers.
    """
    if runner.compiled and runner.device.type == "cpu":
        return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    return contextlib.nullcontext()


def make_runners(model, draft_model, control, rows, length, *compiles):
    """(Runner, Draft or None), with caches for `length` tokens in each row.

    draft_model: None, "ngram", or the model that drafts, which may have the weights of this one (speculative.rewire).
    control: of the number of its proposals. compiles: see Runner.
    """
    if draft_model is None:
        return Runner(model, make_cache(model, rows, length), *compiles), None
    length += 1 + max(control.counts)  # a row that is done stays at its last token, which is read again
    runner = Runner(model, make_cache(model, rows, length), *compiles)
    if draft_model == "ngram":
        return runner, speculative.Ngrams(control)
    if draft_model.layers is model.layers:
        return runner, speculative.Rewired(control, Runner(draft_model, runner.cache, *compiles))
    return runner, speculative.SmallModel(
        control, Runner(draft_model, make_cache(draft_model, rows, length), *compiles)
    )


def complete(
    model, tokenizer, prompts, max_new_tokens=200, temperature=0.8, top_k=None, top_p=1.0, seed=0, compile=False,
    draft=None, speculate=speculative.USUAL,
):  # fmt: skip
    """Continue each of some texts on one device; returns the new texts. See example.py.

    draft: None, "ngram", or a smaller model of the same vocabulary, which proposes `speculate` tokens at a time.
    """
    if draft not in (None, "ngram"):
        if not isinstance(draft, Transformer):
            raise InputError(f'draft is {draft!r} but must be None, "ngram" or a model')
        speculative.check_vocabulary(draft.config, model.config, "draft")
    if type(speculate) is not int or not 1 <= speculate < model.config.max_seq_len:
        raise InputError(f"speculate is {speculate!r} but must be a whole number from 1 to the context")
    if isinstance(prompts, str) or not prompts or not all(prompts):
        raise InputError("prompts is one text, empty, or has an empty text: give a list of texts")
    rows = [tokenizer.encode(text) for text in prompts]
    new = terminal.fit(max_new_tokens, rows, model.config.max_seq_len)
    length = max(map(len, rows)) + new
    if compile:  # in whole buckets, so that calls of about the same length share a graph
        length = -(-length // BUCKET) * BUCKET
    runner, drafter = make_runners(model, draft, speculative.Fixed(speculate), len(rows), length, compile)
    sample = Sampler(temperature, top_k, top_p, seed, runner.device)
    added = generate(runner, rows, new, sample, model.config.eos_ids, draft=drafter).rows
    return [tokenizer.continuation(prompt, row) for prompt, row in zip(rows, added, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def parse(argv):
    p = cli.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", metavar="DIR", help="a folder of weights (docs/formats.md), e.g. demo")
    g.add_argument("--compile", action="store_true", help="torch.compile the decode step; needs a C++ compiler")
    cli.add_rank_flags(g)
    g.add_argument("--dtype", choices=DTYPES, help="of the weights; without it the checkpoint's")
    cli.add_wiring_flags(p)
    terminal.add_prompt_flags(p)
    g = p.add_argument_group("generation")
    g.add_argument(
        "--max-new-tokens", type=count, default=200, metavar="N", help="each row stops at its own end, e.g. 500"
    )
    from_0 = number(float, 0, math.inf)
    g.add_argument("--temperature", type=from_0, default=0.8, metavar="T", help="0 is greedy, 1 the model's own")
    g.add_argument("--top-k", type=count, metavar="K", help="sample among the K likeliest tokens, e.g. 50")
    mass = number(float, 0, 1, above=True)
    g.add_argument("--top-p", type=mass, default=1.0, metavar="P", help="... among the likeliest of mass P, e.g. 0.95")
    seed = number(int, 0, 2**63 - 1)
    g.add_argument("--seed", type=seed, default=0, metavar="S", help="of sampling and of synthetic prompts, e.g. 1")
    speculative.add_flags(p)
    g = p.add_argument_group("benchmarks")
    g.add_argument("--model", choices=SIZES, metavar="NAME", help=f"a named size: {', '.join(SIZES)}")
    g.add_argument("--random-weights", action="store_true", help="for --model; the output is meaningless")
    g.add_argument("--n-layers", type=count, metavar="N", help="of --model, take only so many layers, e.g. 4")
    g.add_argument("--quant", choices=("int8", "int4"), help="of --model, the weights as integers")
    g.add_argument("--group-size", type=int, metavar="N", help="of --quant int4, in columns: 32, 64 (default) or 128")
    g.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    g.add_argument("--compile-prefill", action="store_true", help="torch.compile the prefill, too")
    g.add_argument("--prefill-chunk", type=count, default=CHUNK, metavar="N", help="tokens of all rows in one pass")
    cli.add_json_flag(g)
    link.add_flags(p)
    args = p.parse_args(argv)
    if bool(args.checkpoint) == bool(args.model):
        raise InputError("give either --checkpoint DIR or --model NAME --random-weights")
    if args.model and not args.random_weights:
        raise InputError(f"--model {args.model} has no trained weights: add --random-weights, or give --checkpoint")
    alone = "prompt prompt_ids prompt_length batch chat json simulate_tp exposed profile"
    wrong = [name for name in alone.split() if args.interactive and getattr(args, name)]
    if wrong:
        raise InputError(f"--interactive does not go with --{wrong[0].replace('_', '-')}")
    speculative.check_flags(args)
    return args


def describe(args, world):
    """The Config of what is to be loaded, wired as the flags say, and the tokenizer, None without one."""
    if args.checkpoint:
        for name in ("random_weights", "n_layers", "quant", "group_size"):
            if getattr(args, name) not in (None, False):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} goes with --model: a checkpoint is as it is (quantize.py makes another)")
        own = checkpoint.read_config(args.checkpoint)
        config = cli.with_wiring(own, args)
        if world.rank == 0:
            cli.warn_of_wiring(own, config, world.tp_size)
        return config, load_tokenizer(args.checkpoint, config.vocab_size)
    config = checkpoint.named_size(args.model, args.n_layers, args.quant, args.group_size)
    return cli.with_wiring(config, args), None


def load_draft_model(source, model, args, world):
    """What drafts for a model, as make_runners takes it; source: of speculative.read, or None."""
    if source is None or source.config is None:
        return source and "ngram"
    if source.folder is None:
        return speculative.rewire(model, source.config)
    with world.together():
        return load_model(source.config, source.folder, args.dtype, World(0, 1, world.device))


def prepare(args, model, draft_model, prompts, length, new, world):
    """(Runner, Draft or None, seconds that it took), warm for these prompts and so many new tokens."""
    control, compiles = speculative.control_of(args.speculate), (args.compile, args.compile_prefill)
    with world.together():
        runner, draft = make_runners(model, draft_model, control, len(prompts), length, *compiles)
    measured = draft is not None and args.speculate == "auto"
    if not (new and (any(compiles) or measured)):
        control.seconds = dict.fromkeys(control.counts, 1.0)
        return runner, draft, 0.0
    if world.rank == 0:
        print("compiling ..." if any(compiles) else "measuring passes ...", file=sys.stderr)
    seconds, all_of_it = warm_up(runner, prompts, new, args.prefill_chunk, draft)
    found = world.gather(seconds)
    control.seconds = {count: max(each[count] for each in found) for count in seconds}  # those of the slowest rank
    if not any(compiles) and world.rank == 0:
        print(f"... took {all_of_it:.2f} s", file=sys.stderr)
    return runner, draft, all_of_it if any(compiles) else 0.0


def run_batch(args, model, draft_model, tokenizer, prompts, new, world):
    """Generate from all prompts at once; returns what there is to report of it, on every rank."""
    runner, draft, compile_s = prepare(args, model, draft_model, prompts, max(map(len, prompts)) + new, new, world)
    sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else model.config.eos_ids
    printer = None
    if world.rank == 0 and not world.simulated:
        printer = terminal.Printer(prompts, tokenizer, new, show_prompt=not args.chat)
    with without_guards(runner):
        done = generate(runner, prompts, new, sample, eos_ids, printer and printer.push, args.prefill_chunk, draft)
    if draft and len({*world.gather(zlib.crc32(str(done.rows).encode()))}) > 1:
        raise InputError("--draft: the ranks came to different texts, so their drafts did not compute the same bits")
    peaks = world.gather(report.peak_bytes(world.device))
    texts = printer and printer.finish(done.rows)
    reports = None
    if args.exposed or args.profile is not None:
        from measure import exposed  # a room that a plain run does not enter

        reports = exposed.report_exposed(args, runner, *pad(prompts, world.device), world)
    found = report.generation(runner, draft, world, prompts, done)
    return {"exposed": reports, "compile_s": compile_s, "peak_bytes": peaks, "texts": texts, **found}


def what_was_read(args, prompts, source, device):
    """What must be alike on all ranks, by name, besides the flags."""
    weights = checkpoint.digest(args.checkpoint) if args.checkpoint else None
    read = {"contents of --checkpoint": weights, "tokens of the prompts": zlib.crc32(str(prompts).encode())}
    read["--draft"] = source and source.name
    if source and source.folder:  # each rank runs all of it, and must come to the same bits
        read["contents of --draft"] = checkpoint.digest(source.folder)
        read["hardware"] = f"{report.hardware(device)}, {torch.get_num_threads()} threads"
    return read


def main(argv=None):
    args = parse(argv)
    chosen = link.from_flags(args)
    emulated = chosen or (link.FREE if args.exposed else None)
    world = link.emulate(launch.join(args.device, vars(args)), emulated, args.simulate_tp)
    args.ignore_eos |= world.simulated
    with world.together():
        config, tokenizer = describe(args, world)
        if args.interactive and tokenizer is None:
            raise InputError("--interactive needs a checkpoint with a tokenizer")
        prompts = [] if args.interactive else terminal.read_prompts(args, config, tokenizer)
        new = terminal.fit(args.max_new_tokens, prompts, config.max_seq_len) if prompts else args.max_new_tokens
        if new < args.max_new_tokens and world.rank == 0:
            print(f"the context of {config.max_seq_len} leaves room for {new} new tokens", file=sys.stderr)
        context = min(args.interactive or 0, config.max_seq_len)  # of a chat
        source = speculative.read(args, config, tokenizer, world.tp_size)
        need = context if args.interactive else max(map(len, prompts)) + new
        models = [(config, chosen_dtype(args.dtype, args.checkpoint), world.tp_size)]
        if source and source.folder:
            models.append((source.config, chosen_dtype(args.dtype, source.folder), 1))
        preflight.warn(world, max(1, len(prompts)), need, *models)
        if source and source.folder and need > source.config.max_seq_len and world.rank == 0:
            short = f"--draft {source.name} has a context of {source.config.max_seq_len}"
            print(f"{short}: behind it, up to {need}, its proposals may not stand", file=sys.stderr)
    if not world.alone:
        world.agree(what_was_read(args, prompts, source, world.device))
    if world.simulated:
        print(f"one rank of {world.tp_size} alone: its times are a prediction, its text means nothing", file=sys.stderr)
    start = time.perf_counter()
    model = load_model(config, args.checkpoint, args.dtype, world)
    draft_model = load_draft_model(source, model, args, world)
    load_s = time.perf_counter() - start
    if args.interactive:
        return run_chat(args, model, draft_model, tokenizer, context, world)
    found = run_batch(args, model, draft_model, tokenizer, prompts, new, world)
    if world.rank > 0:
        return
    name = args.model or checkpoint.name(args.checkpoint)
    about = {"load_s": load_s, "draft": source and source.name, "speculate": args.speculate if source else None}
    result = report.result(name, model, chosen, world, about | found)
    print(report.summary(result), file=sys.stderr)
    if args.json:
        writing.append_line(args.json, result)


def run_chat(args, model, draft_model, tokenizer, context, world):
    # compiled now, if at all: later it would look like a rank that hangs
    runner, draft, _ = prepare(args, model, draft_model, [[0]], context, min(args.max_new_tokens, context - 1), world)
    sample = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else model.config.eos_ids
    held = []  # the tokens that are in the cache

    def answer(ids, new, on_tokens):
        nonlocal held
        known = len(os.path.commonprefix([held, ids[:-1]]))
        row = generate(runner, [ids], new, sample, eos_ids, on_tokens, args.prefill_chunk, draft, known).rows[0]
        held = (ids + row)[:-1]
        return row

    terminal.chat(answer, tokenizer, world, context, args.max_new_tokens)


if __name__ == "__main__":
    launch.run(main)
