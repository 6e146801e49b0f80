"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

import contextlib
import math
import sys
import time
import zlib

import torch

import checkpoint
import launch
import terminal
import watch
import writing
from checkpoint import DTYPES, SIZES
from kernels import cpu, int_linear
from launch import World, count, number
from measure import finite, link, preflight, report
from model import InputError
from tokenizer import load_tokenizer
from tp import TensorParallel, load_shard

# ---------------------------------------------------------------------------------------------------------------------
# The model


def load(folder, device=None, dtype=None, wiring=None, **parameter):
    """(model, tokenizer or None) of a checkpoint folder, on one device, for complete().

    device: "cpu", "cuda", ... or None. dtype: a name of DTYPES or None. wiring: another than the checkpoint's, with its
    parameter, as wiring="hybrid", ladder_layers=16. Raises InputError.
    """
    config = launch.rewired(checkpoint.read_config(folder), wiring, **parameter)
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
        model.stored_dtype = weights.dtype("norm.weight") if folder else model.norm.weight.dtype
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
        self._decode = model
        if self.device.type == "cpu" and (compile or compile_prefill):
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
    def prefill(self, tokens, lengths, chunk=None):
        """Logits (B, V) after the last token of each row, from passes of at most `chunk` tokens of all rows, or one.

        tokens (B, S), lengths (B,): as pad makes them. The memory for activations grows with the chunk, not with the
        prompt; only the mask grows with both, as chunk x filled slots.
        """
        B, S = tokens.shape
        last, width = lengths - 1, S if chunk is None else max(1, chunk // B)
        logits = self._prefill(tokens[:, :width], cache=self.cache, select=last.clamp(max=min(width, S) - 1))[:, 0]
        for start in range(width, S, width):
            watch.at("prefill from token", start)
            part = tokens[:, start : start + width]
            stop = start + part.shape[1]
            positions = torch.arange(start, stop, device=tokens.device).expand(B, -1)
            select = (last - start).clamp(0, part.shape[1] - 1)
            later = self._prefill(part, positions, self.cache, stop, select)[:, 0]
            logits = torch.where((last >= start)[:, None], later, logits)
        return logits

    @torch.inference_mode()
    def decode(self, token, positions, longest):
        """Logits (B, V) after one more token (B,) of each row, at its position (B,); the longest row has `longest`.

        It reads that many slots of the cache on a CPU, on a GPU a multiple of BUCKET: each is a CUDA graph of its own.
        """
        filled = longest if self.device.type == "cpu" else -(-longest // BUCKET) * BUCKET
        return self._decode(token[:, None], positions[:, None], self.cache, filled)[:, 0]

    @torch.inference_mode()
    def warm_up(self, prompts, max_new_tokens, chunk=CHUNK):
        """Compile, by generating two tokens and, on a GPU, by decoding at each further bucket; returns seconds."""
        start = time.perf_counter()
        with watch.during("compilation"):
            generate(self, prompts, 2, make_sampler(0, device=self.device), chunk=chunk)
            if self.device.type == "cuda":
                tokens, lengths = pad(prompts, self.device)
                first = tokens.shape[1] + 1
                for longest in {-(-i // BUCKET): i for i in range(first, tokens.shape[1] + max_new_tokens)}.values():
                    for _ in range(3):  # to warm up, to capture, to replay
                        self.decode(tokens[:, 0].clone(), torch.full_like(lengths, longest - 1), longest)
        return time.perf_counter() - start


@torch.inference_mode()  # as everything that runs them: to the compiler, other tensors are another graph
def pad(prompts, device):
    """(tokens (B, S), lengths (B,)) of prompts of any lengths, padded on the right."""
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Generation


def make_sampler(temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
    """A function from logits (B, V) to token ids (B,), -1 where a row's logits are not all finite.

    Equal seeds draw equal tokens, so every rank samples alike.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def sample(logits):
        top, token = logits.max(-1, keepdim=True)
        good = top.isfinite() & logits.amin(-1, keepdim=True).isfinite()  # of NaN and others, both are NaN
        if temperature > 0:
            logits = ((logits - top).float() / temperature).masked_fill_(~good, 0)
            if top_k is not None and top_k < logits.shape[-1]:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
            if top_p < 1:
                ordered, order = logits.softmax(-1).sort(descending=True)
                beyond = ordered.cumsum(-1) - ordered >= top_p  # the mass before this token suffices already
                logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        return token.where(good, -1)[:, 0]

    return sample


@torch.inference_mode()
def generate(runner, prompts, max_new_tokens, sample, eos_ids=(), on_tokens=None, chunk=CHUNK):
    """Continue every prompt, a row each, until its own end-of-sequence or max_new_tokens.

    runner: whose cache has at least longest prompt + max_new_tokens slots. prompts: non-empty lists of token ids, of
    any lengths. on_tokens(list of B ids, None for rows that are done) is called after each step; True from it ends the
    generation. chunk: see Runner.prefill. Returns (new ids per row, without end-of-sequence; steps; seconds to the
    first token; seconds of the other steps, without those in on_tokens). Raises NotFinite for logits that are not.
    """
    tokens, lengths = pad(prompts, runner.device)
    rows, done = [[] for _ in prompts], [False] * len(prompts)

    watch.at("prefill")
    start, shown = time.perf_counter(), 0.0
    token = sample(runner.prefill(tokens, lengths, chunk))
    positions = lengths
    for step in range(max_new_tokens):
        watch.at("decode step", step)
        if step > 0:
            token = sample(runner.decode(token, positions, tokens.shape[1] + step))
            positions = positions + 1
        ids = token.tolist()  # waits for the device
        now = time.perf_counter()
        if step == 0:
            first = now - start
        rest = now - start - first - shown
        if -1 in ids:
            raise finite.NotFinite(runner.model, rows, step, ids)
        done = [d or i in eos_ids for d, i in zip(done, ids, strict=True)]
        fresh = [None if d else i for d, i in zip(done, ids, strict=True)]
        for row, i in zip(rows, fresh, strict=True):
            row += [i] * (i is not None)
        watch.at("output", timed=False)  # whoever reads it may take a break
        stop = on_tokens is not None and on_tokens(fresh)
        shown += time.perf_counter() - now
        if stop or all(done):
            break
    return rows, step + 1, first, rest


def check(runner, prompts, rows, steps, chunk, world):
    """What an eager rerun of so many steps, to the same rows, says about its numbers, as a phrase; on every rank."""
    probe = finite.Probe(runner.model, rows)
    generate(Runner(probe.model, runner.cache), prompts, steps, probe.sample, chunk=chunk)
    return probe.words(world)


def complete(
    model, tokenizer, prompts, max_new_tokens=200, temperature=0.8, top_k=None, top_p=1.0, seed=0, compile=False
):
    """Continue each of some texts on one device; returns the new texts. See example.py."""
    if not prompts or not all(prompts):
        raise InputError("prompts is empty or has an empty text")
    rows = [tokenizer.encode(text) for text in prompts]
    new = terminal.fit(max_new_tokens, rows, model.config.max_seq_len)
    length = max(map(len, rows)) + new
    if compile:  # in whole buckets, so that calls of about the same length share a graph
        length = -(-length // BUCKET) * BUCKET
    runner = Runner(model, make_cache(model, len(rows), length), compile)
    sample = make_sampler(temperature, top_k, top_p, seed, runner.device)
    added, *_ = generate(runner, rows, new, sample, model.config.eos_ids)
    return [tokenizer.continuation(prompt, row) for prompt, row in zip(rows, added, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def parse(argv):
    p = launch.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", metavar="DIR", help="a folder of weights (docs/formats.md), e.g. demo")
    g.add_argument("--compile", action="store_true", help="torch.compile the decode step; needs a C++ compiler")
    launch.add_rank_flags(g)
    g.add_argument("--dtype", choices=DTYPES, help="of the weights; without it the checkpoint's")
    launch.add_wiring_flags(p)
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
    g = p.add_argument_group("benchmarks")
    g.add_argument("--model", choices=SIZES, metavar="NAME", help=f"a named size: {', '.join(SIZES)}")
    g.add_argument("--random-weights", action="store_true", help="for --model; the output is meaningless")
    g.add_argument("--n-layers", type=count, metavar="N", help="of --model, take only so many layers, e.g. 4")
    g.add_argument("--quant", choices=("int8", "int4"), help="of --model, the weights as integers")
    g.add_argument("--group-size", type=int, metavar="N", help="of --quant int4, in columns: 32, 64 (default) or 128")
    g.add_argument("--check", action="store_true", help="then see, eagerly, whether all sublayers' numbers are finite")
    g.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    g.add_argument("--compile-prefill", action="store_true", help="torch.compile the prefill, too")
    g.add_argument("--prefill-chunk", type=count, default=CHUNK, metavar="N", help="tokens of all rows in one pass")
    launch.add_preflight_flag(g)
    launch.add_json_flag(g)
    link.add_flags(p)
    args = p.parse_args(argv)
    if bool(args.checkpoint) == bool(args.model):
        raise InputError("give either --checkpoint DIR or --model NAME --random-weights")
    if args.model and not args.random_weights:
        raise InputError(f"--model {args.model} has no trained weights: add --random-weights, or give --checkpoint")
    alone = "prompt prompts_file prompt_ids prompt_length batch chat json simulate_tp exposed profile check"
    wrong = [name for name in alone.split() if args.interactive and getattr(args, name)]
    if wrong:
        raise InputError(f"--interactive does not go with --{wrong[0].replace('_', '-')}")
    if args.context and not args.interactive:
        raise InputError("--context is for --interactive: otherwise the cache is sized to the request")
    return args


def describe(args, world):
    """The Config of what is to be loaded, wired as the flags say, and the tokenizer, None without one."""
    if args.checkpoint:
        for name in ("random_weights", "n_layers", "quant", "group_size"):
            if getattr(args, name) not in (None, False):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} goes with --model: a checkpoint is as it is (quantize.py makes another)")
        own = checkpoint.read_config(args.checkpoint)
        config = launch.with_wiring(own, args)
        if world.rank == 0:
            launch.warn_of_wiring(own, config, world.tp_size)
        return config, load_tokenizer(args.checkpoint, config.vocab_size)
    config = checkpoint.named_size(args.model, args.n_layers, args.quant, args.group_size)
    return launch.with_wiring(config, args), None


def run_batch(args, model, tokenizer, prompts, new, world):
    """Generate from all prompts at once; returns what there is to report of it, on every rank."""
    cache = make_cache(model, len(prompts), max(map(len, prompts)) + new)
    compiles = args.compile, args.compile_prefill
    with world.together():
        runner = Runner(model, cache, *compiles)
    compile_s, stance = 0.0, contextlib.nullcontext()
    if any(compiles):
        if world.rank == 0:
            print("compiling ...", file=sys.stderr)
        compile_s = runner.warm_up(prompts, new, args.prefill_chunk)
        if world.device.type == "cpu":
            # Checking at each step what the graphs assume takes 0.5 ms for 16 layers. The warm-up had the same prompts
            # and chunks; the one thing that varies, cache_length, is dynamic.
            stance = torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    sample = make_sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else model.config.eos_ids
    printer = None
    if world.rank == 0 and not world.simulated:
        printer = terminal.Printer(prompts, tokenizer, new, show_prompt=not args.chat)
    try:
        with stance:
            done = generate(runner, prompts, new, sample, eos_ids, printer and printer.push, args.prefill_chunk)
    except finite.NotFinite as e:
        if not args.check:
            raise
        raise InputError(f"{e}; {check(runner, prompts, e.rows, e.step + 1, args.prefill_chunk, world)}") from None
    peaks = world.gather(report.peak_bytes(world.device))
    texts = printer and printer.finish(done[0])
    if args.check and (words := check(runner, prompts, *done[:2], args.prefill_chunk, world)) and world.rank == 0:
        print(f"--check: {words}", file=sys.stderr)
    reports = None
    if args.exposed or args.profile is not None:
        from measure import exposed  # a room that a plain run does not enter

        if args.exposed:
            silent = Runner(exposed.silenced(model, world), cache, *compiles)
            reports = exposed.measure_runner(runner, silent, *pad(prompts, world.device), world)
        if args.profile is not None:
            with world.together():
                exposed.profile(args.profile, world, exposed.replays(runner, *pad(prompts, world.device)))
    found = report.generation(runner, world, prompts, *done)
    return {"exposed": reports, "compile_s": compile_s, "peak_bytes": peaks, "texts": texts, **found}


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
        slots = min(args.context or 4096, config.max_seq_len) if args.interactive else new
        dtype = chosen_dtype(args.dtype, args.checkpoint)
        if not args.skip_preflight:
            preflight.check(world, *preflight.generation(args, config, dtype, prompts, slots))
        if args.profile is not None:
            report.prepare_trace(args.profile, world.rank)
    if not world.alone:
        weights = checkpoint.digest(args.checkpoint) if args.checkpoint else None
        world.agree({"contents of --checkpoint": weights, "tokens of the prompts": zlib.crc32(str(prompts).encode())})
    if world.simulated:
        print(f"one rank of {world.tp_size} alone: its times are a prediction, its text means nothing", file=sys.stderr)
    start = time.perf_counter()
    model = load_model(config, args.checkpoint, args.dtype, world)
    load_s = time.perf_counter() - start
    if args.interactive:
        return run_chat(args, model, tokenizer, world)
    found = run_batch(args, model, tokenizer, prompts, new, world)
    if world.rank > 0:
        return
    name = args.model or checkpoint.name(args.checkpoint)
    result = report.result(name, model, chosen, world, {"load_s": load_s, **found})
    print(report.summary(result), file=sys.stderr)
    if args.json:
        writing.append_line(args.json, result)


def run_chat(args, model, tokenizer, world):
    context = min(args.context or 4096, model.config.max_seq_len)
    with world.together():
        runner = Runner(model, make_cache(model, 1, context), args.compile, args.compile_prefill)
    if context > 1 and (args.compile or args.compile_prefill):  # now: later it would look like a rank that hangs
        if world.rank == 0:
            print("compiling ...", file=sys.stderr)
        runner.warm_up([[0]], args.max_new_tokens, args.prefill_chunk)
    sample = make_sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else model.config.eos_ids

    def answer(ids, new, on_tokens):
        return generate(runner, [ids], new, sample, eos_ids, on_tokens, args.prefill_chunk)[0][0]

    terminal.chat(answer, tokenizer, world, context, args.max_new_tokens)


if __name__ == "__main__":
    launch.run(main)
