"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint DIR --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint DIR --ladder --prompt "Once upon a time"
"""

import contextlib
import dataclasses
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import cpu
import exposed
import int_linear
import link
import report
import tokenizer as tokenizers
import tp
from model import SIZES, WIRINGS, InputError

# ---------------------------------------------------------------------------------------------------------------------
# The model


def add_wiring_flags(parser, otherwise="the checkpoint's own"):
    """The flags that choose a wiring; with_wiring applies them."""
    g = parser.add_argument_group("wiring", f"how sublayers feed the residual stream; without these {otherwise}")
    g.add_argument("--wiring", metavar="NAME", help=", ".join(WIRINGS))
    g.add_argument("--ladder", action="store_true", help="the same as --wiring ladder")
    g.add_argument(
        "--ladder-layers", metavar="N|I,J,...", help="hybrid: the last N layers, or layers I, J, ... (from 0)"
    )
    g.add_argument("--desync-period", type=int, metavar="N", help="desync: keep every N-th all-reduce")


def with_wiring(config, args):
    """The config with the wiring that the flags ask for."""
    wiring, layers = args.wiring or ("ladder" if args.ladder else config.wiring), config.ladder_layers
    if args.ladder and wiring != "ladder":
        raise InputError(f"--ladder and --wiring {wiring} contradict each other")
    if args.ladder_layers is not None:
        if args.wiring not in (None, "hybrid"):
            raise InputError(f"--ladder-layers makes a hybrid: it does not go with --wiring {args.wiring}")
        try:
            numbers = tuple(int(i) for i in args.ladder_layers.split(","))
        except ValueError:
            message = f"--ladder-layers {args.ladder_layers!r} is neither a number nor a list such as 3,5,7"
            raise InputError(message) from None
        wiring, layers = "hybrid", numbers if "," in args.ladder_layers else numbers[0]
    changes = {"wiring": wiring, "ladder_layers": layers if wiring == "hybrid" else None}
    if args.desync_period is not None:
        if wiring != "desync":
            raise InputError(f"--desync-period is for --wiring desync: it does not go with {wiring}")
        changes["desync_period"] = args.desync_period
    return dataclasses.replace(config, **changes)


def describe(args):
    """The Config, wired as the flags say, and the tokenizer (None without one) of what is to be loaded."""
    if bool(args.checkpoint) == bool(args.model):
        raise InputError("give either --checkpoint DIR or --model NAME --random-weights")
    if args.checkpoint:
        for name in ("random_weights", "n_layers", "quant", "group_size"):
            if getattr(args, name) not in (None, False):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} goes with --model: a checkpoint is as it is (quantize.py makes another)")
        config = with_wiring(checkpoint.read_config(args.checkpoint), args)
        return config, tokenizers.load(args.checkpoint, config.vocab_size)
    if args.model not in SIZES:
        raise InputError(f"unknown model {args.model!r}; known: {', '.join(SIZES)}")
    if not args.random_weights:
        raise InputError(f"--model {args.model} has no trained weights: add --random-weights, or give --checkpoint")
    config = SIZES[args.model]
    if args.n_layers is not None:
        if args.n_layers > config.n_layers:
            raise InputError(f"--n-layers is {args.n_layers} but {args.model} has {config.n_layers}")
        config = dataclasses.replace(config, n_layers=args.n_layers)
    size = 64 if args.quant == "int4" and args.group_size is None else args.group_size
    config = dataclasses.replace(config, quant=args.quant, group_size=size)
    return with_wiring(config, args), None


def load(args, config, world):
    """The model, with this rank's weights and the collectives that it needs."""
    with world.together():
        if args.checkpoint:
            weights = checkpoint.Weights(args.checkpoint)
            dtype = checkpoint.DTYPES[args.dtype] if args.dtype else weights.read("norm.weight").dtype
        else:
            dtype = checkpoint.DTYPES[args.dtype or "bfloat16"]
            weights = checkpoint.RandomWeights(config, world.device)
        model = tp.load_shard(config, weights, dtype, world.device, world.rank, world.tp_size)
    int_linear.use_kernels(model)
    if world.group is not None:
        model.comm = tp.TensorParallel(config, world.tp_size, world.group)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Generation


CHUNK = 1024  # tokens of all rows in one pass of the prefill
BUCKET = 256  # a GPU's decode steps read multiples of so many cache slots


def make_sampler(temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
    """A function from logits (B, V) to token ids (B,). Equal seeds draw equal tokens, so every rank samples alike."""
    generator = torch.Generator(device).manual_seed(seed)

    def sample(logits):
        if temperature == 0:
            return logits.argmax(-1)
        logits = (logits - logits.amax(-1, keepdim=True)).float() / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        if top_p < 1:
            ordered, order = logits.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p  # the mass before this token suffices already
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    return sample


def pad(prompts, device):
    """(tokens (B, S), lengths (B,)) of prompts of any lengths, padded on the right."""
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


def in_chunks(prefill, tokens, lengths, cache, chunk):
    """Logits (B, V) after the last token of each row, from a prefill in parts of at most `chunk` tokens of all rows.

    tokens (B, S), lengths (B,): as pad makes them. What a pass computes in between takes memory by its tokens, however
    long the prompts are; only its mask grows with them, by chunk x filled slots.
    """
    B, S = tokens.shape
    last, width = lengths - 1, max(1, chunk // B)
    logits = prefill(tokens[:, :width], cache=cache, select=last.clamp(max=min(width, S) - 1))[:, 0]
    for start in range(width, S, width):
        part = tokens[:, start : start + width]
        stop = start + part.shape[1]
        positions = torch.arange(start, stop, device=tokens.device).expand(B, -1)
        select = (last - start).clamp(0, part.shape[1] - 1)
        later = prefill(part, positions, cache, stop, select)[:, 0]
        logits = torch.where((last >= start)[:, None], later, logits)
    return logits


def filled_slots(longest, cache):
    """How many slots of the cache a decode step reads, when its longest row has `longest` tokens with the new one.

    Exactly those on a CPU. On a GPU a multiple of BUCKET: each number is a CUDA graph of its own.
    """
    return longest if cache[0][0].device.type == "cpu" else -(-longest // BUCKET) * BUCKET


@torch.inference_mode()
def generate(prompts, max_new_tokens, sample, prefill, decode, cache, eos_ids=(), on_tokens=None, chunk=CHUNK):
    """Continue every prompt, a row each, until its own end-of-sequence or max_new_tokens.

    prompts: non-empty lists of token ids, of any lengths. prefill and decode: the model, or compiled forms of it.
    cache: new_cache of at least longest prompt + max_new_tokens slots. on_tokens(list of B ids, None for rows that
    are done) is called after each step. chunk: see in_chunks. Returns (new ids per row, without end-of-sequence; steps;
    seconds to the first token; seconds of the other steps, without those in on_tokens).
    """
    tokens, lengths = pad(prompts, cache[0][0].device)
    rows, done = [[] for _ in prompts], [False] * len(prompts)

    start, shown = time.perf_counter(), 0.0
    token = sample(in_chunks(prefill, tokens, lengths, cache, chunk))
    positions = lengths[:, None]
    for step in range(max_new_tokens):
        if step > 0:
            filled = filled_slots(tokens.shape[1] + step, cache)
            token = sample(decode(token[:, None], positions, cache, filled)[:, 0])
            positions = positions + 1
        ids = token.tolist()  # waits for the device
        now = time.perf_counter()
        if step == 0:
            first = now - start
        rest = now - start - first - shown
        done = [d or i in eos_ids for d, i in zip(done, ids, strict=True)]
        fresh = [None if d else i for d, i in zip(done, ids, strict=True)]
        for row, i in zip(rows, fresh, strict=True):
            row += [i] * (i is not None)
        if on_tokens is not None:
            on_tokens(fresh)
            shown += time.perf_counter() - now
        if all(done):
            break
    return rows, step + 1, first, rest


def compiled(model, args):
    """The model as prefill and as decode, each compiled if its flag is set; decode on a CPU with few_rows.cpp."""
    prefill = torch.compile(model, fullgraph=True) if args.compile_prefill else model
    if model.norm.weight.device.type == "cpu" and (args.compile or args.compile_prefill):
        cpu.compiler()  # or say that there is none
    if not args.compile:
        return prefill, model
    cpu.use_few_rows(model)
    # One graph for any cache_length, the argument of Transformer.forward; all else is fixed. The setting is global.
    torch.compiler.config.dynamic_sources = "L['cache_length']"
    if model.norm.weight.device.type == "cuda":
        how = {"mode": "reduce-overhead"}
    else:
        # The weights of a step drive all else out of a processor's caches, so what runs between the products should be
        # little. The wrapper in C++ cannot gather logits from ranks (torch 2.13); a second thread is for large kernels.
        options = {"cpp_wrapper": model.comm.tp_size == 1, "size_asserts": False, "cpp.min_chunk_size": 16384}
        how = {"options": options}
    return prefill, torch.compile(model, fullgraph=True, dynamic=False, **how)


def make_cache(model, batch, length):
    """A cache of at least `length` slots, one of which no decode step reads.

    (That a slice is the whole, and so contiguous, would be another graph to the compiler.) For a GPU they are whole
    buckets and one, and CUDA graphs are told that its tensors never move.
    """
    if model.norm.weight.device.type == "cpu":
        return model.new_cache(batch, length)
    cache = model.new_cache(batch, -(-length // BUCKET) * BUCKET + 1)
    for tensor in (t for layer in cache for t in layer):
        torch._dynamo.mark_static_address(tensor)
    return cache


def warm_up(prompts, max_new_tokens, prefill, decode, cache, chunk=CHUNK):
    """Compile, by generating two tokens and, on a GPU, by decoding at each further number of slots; returns seconds."""
    start = time.perf_counter()
    generate(prompts, 2, make_sampler(0, device=cache[0][0].device), prefill, decode, cache, chunk=chunk)
    longest, step = max(map(len, prompts)), steps(prompts, prefill, decode, cache)["decode"]
    if cache[0][0].device.type == "cuda":
        for filled in sorted({filled_slots(longest + i, cache) for i in range(1, max_new_tokens)}):
            for _ in range(3):  # to warm up, to capture, to replay
                step(filled)
    return time.perf_counter() - start


@torch.inference_mode()
def steps(prompts, prefill, decode, cache):
    """Functions that run the prefill, in one pass, and a decode step at the end of the cache, any number of times."""
    tokens, lengths = pad(prompts, cache[0][0].device)
    token, slots = tokens[:, 0].clone(), cache[0][0].shape[2]  # as generate() has them: else the compiler starts anew

    @torch.inference_mode()
    def decode_step(longest=slots - 1):
        positions = torch.full_like(lengths, longest - 1)[:, None]
        return decode(token[:, None], positions, cache, filled_slots(longest, cache))

    return {
        "prefill": torch.inference_mode()(lambda: prefill(tokens, cache=cache, select=lengths - 1)),
        "decode": decode_step,
    }


def measure_exposed(prompts, model, prefill, decode, cache, args, world):
    """The reports of exposed.py on the prefill, in one pass, and on a decode step."""
    if world.rank == 0:
        print("measuring what communication costs ...", file=sys.stderr)
    silent_steps = steps(prompts, *compiled(tp.silenced(model, world), args), cache)
    lengths, reports = {"prefill": max(map(len, prompts)), "decode": 1}, {}
    for kind, step in steps(prompts, prefill, decode, cache).items():
        partial = model.norm.weight.new_zeros(len(prompts), lengths[kind], model.config.dim)
        case = exposed.Case(model.config, step, silent_steps[kind], partial, world.group.link)
        reports |= exposed.measure(world, {kind: case})
    return reports


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def is_utf8(text):
    """Whether text came from valid UTF-8: Python turns other bytes into lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def read_prompts(args, config, tokenizer):
    """The prompts that the flags give, as lists of token ids."""
    texts = list(args.prompt or [])
    if args.prompts_file:
        lines = checkpoint.read_text(args.prompts_file, flag="--prompts-file ").splitlines()
        texts += [line for line in lines if line.strip()]
        if not texts:
            raise InputError(f"--prompts-file {args.prompts_file} is empty: it takes one prompt a line")
    if texts and tokenizer is None:
        owner = args.checkpoint or "--model"
        raise InputError(f"{owner} has no tokenizer: use --prompt-ids or --prompt-length")
    prompts = []
    for text in texts:
        if not text.strip():
            raise InputError("--prompt is empty: give some text, or the ids themselves with --prompt-ids")
        if not is_utf8(text):
            raise InputError(f"--prompt {text!r} is not valid UTF-8")
        prompts.append(tokenizer.chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text))
    for ids in args.prompt_ids or []:
        try:
            prompts.append([int(i) for i in ids.replace(",", " ").split()])
        except ValueError:
            raise InputError(f"--prompt-ids {ids!r} is not a list of numbers such as 1,403,407") from None
    if args.prompt_length is not None:
        if args.prompt_length >= config.max_seq_len:
            raise InputError(
                f"--prompt-length {args.prompt_length} leaves no room in the context of {config.max_seq_len}"
            )
        generator = torch.Generator().manual_seed(args.seed)
        shape = (args.batch or 1, args.prompt_length)
        prompts += torch.randint(config.vocab_size, shape, generator=generator).tolist()
    if not prompts:
        raise InputError("no prompt: give --prompt, --prompts-file, --prompt-ids, --prompt-length or --interactive")
    if args.batch and args.batch % len(prompts):
        raise InputError(f"--batch {args.batch} is not a multiple of the {len(prompts)} prompts given")
    prompts *= (args.batch or len(prompts)) // len(prompts)
    for prompt in prompts:
        if not prompt:
            raise InputError("a prompt has no tokens: give some text")
        bad = [i for i in prompt if not 0 <= i < config.vocab_size]
        if bad:
            raise InputError(
                f"token id {bad[0]} is outside the vocabulary of {config.vocab_size} (0 to {config.vocab_size - 1})"
            )
    return prompts


def fit(max_new_tokens, prompts, context):
    """max_new_tokens, cut to what the context leaves after the longest prompt."""
    longest = max(map(len, prompts))
    if longest >= context:
        raise InputError(f"a prompt of {longest} tokens leaves no room in the context of {context}: shorten it")
    return min(max_new_tokens, context - longest)


class Printer:
    """Shows a generation as it goes: one row as text, more rows as a progress bar and then their texts."""

    def __init__(self, prompts, tokenizer, max_new_tokens, show_prompt=True):
        self.prompts, self.tokenizer = prompts, tokenizer
        self.stream = self.bar = None
        if tokenizer is not None and len(prompts) == 1:
            self.stream = tokenizers.TextStream(tokenizer)
            text = self.stream.push(prompts[0])
            self.write(text if show_prompt else "")
        else:
            self.bar = tqdm(total=max_new_tokens, desc="decoding", unit="step", delay=1)

    def write(self, text):
        print(text, end="", flush=True)

    def push(self, ids):
        if self.stream:
            self.write(self.stream.push([i for i in ids if i is not None]))
        else:
            self.bar.update()

    def finish(self, rows):
        """Print what is not printed yet; returns the new text of each row, or None without a tokenizer."""
        if self.stream:
            self.write(self.stream.flush() + "\n")
        if self.bar:
            self.bar.close()
        if self.tokenizer is None:
            for row in rows:
                print("---", *row)
            return None
        texts = []
        for prompt, row in zip(self.prompts, rows, strict=True):
            before = self.tokenizer.decode(prompt)
            texts.append(self.tokenizer.decode(prompt + row)[len(before) :])
            if not self.stream:
                print(f"--- {before}{texts[-1]}")
        return texts


def chat_loop(args, model, tokenizer, world):
    """Read a line, answer, repeat. With a chat template the lines are user messages, else the text just goes on."""
    context = min(args.context or 4096, model.config.max_seq_len)
    cache = make_cache(model, 1, context)
    with world.together():
        prefill, decode = compiled(model, args)
    sample = make_sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else model.config.eos_ids
    messages, ids = [], []
    prompt = "> " if world.rank == 0 and sys.stdin.isatty() else ""
    if prompt:
        how = "the text just goes on" if tokenizer.template is None else "in the checkpoint's chat template"
        print(f"{how}; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = world.tell(input(prompt) if world.rank == 0 else None)
        except EOFError:
            line = world.tell(None)
        if line is None:
            print("\n" if prompt else "", end="")
            return
        if not line.strip() or not is_utf8(line):
            continue
        if tokenizer.template is not None:
            messages.append({"role": "user", "content": line})
            ids = tokenizer.chat(messages)
        else:
            ids = ids + tokenizer.encode_plain(line) if ids else tokenizer.encode(line)
        if len(ids) >= context:
            if world.rank == 0:
                print(f"{len(ids)} tokens do not fit the context of {context}: starting anew", file=sys.stderr)
            messages, ids = [], []
            continue
        new = fit(args.max_new_tokens, [ids], context)
        printer = Printer([ids], tokenizer, new, show_prompt=False) if world.rank == 0 else None
        show = printer and printer.push
        rows, *_ = generate([ids], new, sample, prefill, decode, cache, eos_ids, show, args.prefill_chunk)
        if world.rank == 0:
            printer.finish(rows)
        ids = ids + rows[0]
        messages.append({"role": "assistant", "content": tokenizer.decode(rows[0])})


def parse(argv):
    p = tp.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", metavar="DIR", help="a folder of convert_hf_checkpoint.py, quantize.py ...")
    g.add_argument("--model", metavar="NAME", help=f"a named size, with --random-weights: {', '.join(SIZES)}")
    g.add_argument("--random-weights", action="store_true", help="for benchmarks: the text means nothing")
    g.add_argument("--n-layers", type=int, metavar="N", help="of --model, take only so many layers")
    g.add_argument("--quant", metavar="MODE", help="of --model, the weights as integers: int8, int4")
    g.add_argument("--group-size", type=int, metavar="N", help="of --quant int4: 32, 64 (default) or 128")
    g.add_argument("--dtype", choices=checkpoint.DTYPES, help="without it the checkpoint's own, bfloat16 for --model")
    g.add_argument("--device", help="cpu, cuda or cuda:N; without it cuda where each rank finds a GPU")
    g.add_argument("--compile", action="store_true", help="torch.compile the decode step; needs a C++ compiler")
    g.add_argument("--compile-prefill", action="store_true", help="torch.compile the prefill")
    g.add_argument(
        "--prefill-chunk", type=int, default=CHUNK, metavar="N", help="tokens of all rows in one pass of the prefill"
    )
    add_wiring_flags(p)
    g = p.add_argument_group("communication", "what it costs, and what it would cost elsewhere")
    g.add_argument("--link", metavar="NAME", help=f"emulate a link between the ranks: {', '.join(link.LINKS)}")
    g.add_argument("--link-latency-us", type=float, metavar="A", help="... that takes A microseconds per all-reduce")
    g.add_argument("--link-gbps", type=float, metavar="B", help="... and moves B gigabits per second")
    g.add_argument(
        "--simulate-tp", type=int, metavar="N", help="run rank 0 of N alone over the emulated link, to predict the time"
    )
    g.add_argument("--exposed", action="store_true", help="report how much of the communication was not hidden")
    g.add_argument("--profile", metavar="DIR", help="write a trace of a prefill and a decode step per rank")
    g = p.add_argument_group("prompts", "each is a row of the batch")
    g.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    g.add_argument("--prompts-file", metavar="FILE", help="one prompt a line")
    g.add_argument("--prompt-ids", action="append", metavar="I,J,...", help="token ids; may be repeated")
    g.add_argument("--prompt-length", type=int, metavar="N", help="a synthetic prompt of N random tokens")
    g.add_argument("--batch", type=int, metavar="B", help="repeat the prompts to B rows (synthetic ones all differ)")
    g.add_argument("--chat", action="store_true", help="put each prompt into the checkpoint's chat template")
    g.add_argument("--interactive", action="store_true", help="chat on the terminal; end with Ctrl-D")
    g.add_argument(
        "--context", type=int, metavar="T", help="cache slots of --interactive; without it 4096 or the model's"
    )
    g = p.add_argument_group("generation")
    g.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="each row stops at its own end")
    g.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    g.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    g.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest tokens of mass P")
    g.add_argument("--seed", type=int, default=0, help="of the sampling and of synthetic prompts")
    g.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens, for benchmarks")
    g.add_argument("--json", metavar="FILE", help="append the results as one JSON line")
    args = p.parse_args(argv)
    positive = "max_new_tokens batch prompt_length prefill_chunk top_k context desync_period n_layers simulate_tp"
    for name in positive.split():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value} but must be at least 1")
    if not args.temperature >= 0:
        raise InputError(f"--temperature is {args.temperature} but must be 0 (greedy) or more")
    if not 0 <= args.seed < 2**63:
        raise InputError(f"--seed is {args.seed} but must be from 0 to 2^63 - 1")
    if not 0 < args.top_p <= 1:
        raise InputError(f"--top-p is {args.top_p} but must be above 0 and at most 1")
    alone = "prompt prompts_file prompt_ids prompt_length batch chat json simulate_tp exposed profile"
    for name in alone.split():
        if args.interactive and getattr(args, name):
            raise InputError(f"--interactive does not go with --{name.replace('_', '-')}")
    if args.context and not args.interactive:
        raise InputError("--context is for --interactive: otherwise the cache is sized to the request")
    if args.json is not None:
        checkpoint.check_appendable(args.json, "--json")
    if args.simulate_tp == 1:
        raise InputError("--simulate-tp is 1 but must be at least 2")
    return args


def run_batch(args, model, tokenizer, prompts, max_new_tokens, world):
    """Generate from all prompts at once; returns what there is to report of it, on every rank."""
    cache = make_cache(model, len(prompts), max(map(len, prompts)) + max_new_tokens)
    with world.together():
        prefill, decode = compiled(model, args)
    compile_s = 0.0
    stance = contextlib.nullcontext()
    if args.compile or args.compile_prefill:
        if world.rank == 0:
            print("compiling ...", file=sys.stderr)
        compile_s = warm_up(prompts, max_new_tokens, prefill, decode, cache, args.prefill_chunk)
        if world.device.type == "cpu":
            # Checking at each step what the graphs assume takes 0.5 ms for 16 layers. The warm-up had the same prompts
            # and chunks; the one thing that varies, cache_length, is dynamic.
            stance = torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    sample = make_sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else model.config.eos_ids
    printer = None
    if world.rank == 0 and not world.simulated:
        printer = Printer(prompts, tokenizer, max_new_tokens, show_prompt=not args.chat)
    with stance:
        rows, n_steps, prefill_s, decode_s = generate(
            prompts, max_new_tokens, sample, prefill, decode, cache, eos_ids, printer and printer.push,
            args.prefill_chunk,
        )  # fmt: skip
    peaks = world.gather(report.peak_bytes(world.device))
    texts = printer and printer.finish(rows)
    reports = measure_exposed(prompts, model, prefill, decode, cache, args, world) if args.exposed else None
    if args.profile is not None:
        with world.together():
            exposed.profile(args.profile, world, steps(prompts, prefill, decode, cache))
    longest = max(map(len, prompts))
    read = report.step_bytes(model, cache, longest + n_steps / 2)  # of the mean step
    bandwidth = report.read_bandwidth(world.device, world, min(max(int(read), 2**28), 2**30))
    tpot = decode_s / (n_steps - 1) if n_steps > 1 else None
    later = sum(max(len(row) - 1, 0) for row in rows)  # tokens after each row's first; ended rows give no more
    return {
        "batch": len(prompts), "prompt_tokens": longest, "new_tokens": n_steps, "exposed": reports,
        "compile_s": compile_s, "prefill_s": prefill_s, "decode_s": decode_s, "ttft_ms": 1e3 * prefill_s,
        "tpot_ms": tpot and 1e3 * tpot, "tok_s": tpot and later / decode_s, "tok_s_user": tpot and 1 / tpot,
        "step_bytes": int(read), "bandwidth": bandwidth, "mbu": tpot and read / tpot / bandwidth,
        "peak_bytes": peaks, "tokens": None if world.simulated else rows, "texts": texts,
    }  # fmt: skip


def main(argv=None):
    args = parse(argv)
    chosen = link.choose(args.link, args.link_latency_us, args.link_gbps)
    if args.simulate_tp and chosen is None:
        raise InputError("--simulate-tp needs a link to predict: --link NAME, or --link-latency-us and --link-gbps")
    world = tp.join(args.device, chosen or (link.FREE if args.exposed else None), args.simulate_tp)
    args.ignore_eos |= world.simulated
    with world.together():
        config, tokenizer = describe(args)
        if args.interactive and tokenizer is None:
            raise InputError("--interactive needs a checkpoint with a tokenizer")
        if not args.interactive:
            prompts = read_prompts(args, config, tokenizer)
            max_new_tokens = fit(args.max_new_tokens, prompts, config.max_seq_len)
            if max_new_tokens < args.max_new_tokens and world.rank == 0:
                print(
                    f"the context of {config.max_seq_len} leaves room for {max_new_tokens} new tokens", file=sys.stderr
                )
        if args.profile is not None:
            exposed.prepare(args.profile, world.rank)
    if world.simulated:
        print(f"one rank of {world.tp_size} alone: its times are a prediction, its text means nothing", file=sys.stderr)
    start = time.perf_counter()
    model = load(args, config, world)
    load_s = time.perf_counter() - start
    if args.interactive:
        return chat_loop(args, model, tokenizer, world)
    result = {
        "model": args.model or Path(args.checkpoint).resolve().name, "n_layers": config.n_layers,
        "wiring": config.wiring, "ladder_layers": config.ladder_layers, "desync_period": config.desync_period,
        "dtype": tp.dtype_name(model.norm.weight.dtype), "quant": config.quant,
        "link": chosen and dataclasses.asdict(chosen), **report.environment(world), "load_s": load_s,
        **run_batch(args, model, tokenizer, prompts, max_new_tokens, world),
    }  # fmt: skip
    if world.rank > 0:
        return
    print(report.summary(result), file=sys.stderr)
    if args.json:
        checkpoint.append_line(args.json, result, "--json")


if __name__ == "__main__":
    tp.run(main)
