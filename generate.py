"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint DIR --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint DIR --ladder --prompt "Once upon a time"
"""

import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import exposed
import link
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
        if args.random_weights or args.n_layers:
            flag = "--random-weights" if args.random_weights else "--n-layers"
            raise InputError(f"{flag} goes with --model: a checkpoint has weights and layers")
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
    return with_wiring(config, args), None


def load(args, config, world):
    """The model, with this rank's weights and the collectives that it needs."""
    with world.together():
        if args.checkpoint:
            weights = checkpoint.Weights(args.checkpoint)
            dtype = checkpoint.DTYPES[args.dtype] if args.dtype else weights.read("norm.weight").dtype
        else:
            dtype = checkpoint.DTYPES[args.dtype or "bfloat16"]
            weights = checkpoint.RandomWeights(config, dtype, world.device)
        model = tp.load_shard(config, weights, dtype, world.device, world.rank, world.tp_size)
    if world.group is not None:
        model.comm = tp.TensorParallel(config, world.tp_size, world.group)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Generation


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


@torch.inference_mode()
def generate(prompts, max_new_tokens, sample, prefill, decode, cache, eos_ids=(), on_tokens=None):
    """Continue every prompt, a row each, until its own end-of-sequence or max_new_tokens.

    prompts: non-empty lists of token ids, of any lengths. prefill and decode: the model, or compiled forms of it.
    cache: new_cache of at least longest prompt + max_new_tokens slots. on_tokens(list of B ids, None for rows that
    are done) is called after each step. Returns (new ids per row, without end-of-sequence; steps; seconds to the
    first token; seconds of the other steps, without those in on_tokens).
    """
    tokens, lengths = pad(prompts, cache[0][0].device)
    slots = cache[0][0].shape[2]
    rows, done = [[] for _ in prompts], [False] * len(prompts)

    start, shown = time.perf_counter(), 0.0
    token = sample(prefill(tokens, cache=cache, select=lengths - 1)[:, 0])
    positions = lengths[:, None]
    for step in range(max_new_tokens):
        if step > 0:
            token = sample(decode(token[:, None], positions, cache, slots)[:, 0])
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
    """The model as prefill and as decode, each compiled if its flag is set."""
    prefill = torch.compile(model, fullgraph=True) if args.compile_prefill else model
    decode = torch.compile(model, fullgraph=True, dynamic=False) if args.compile else model
    return prefill, decode


def warm_up(prompts, prefill, decode, cache):
    """Compile by generating two tokens; returns the seconds it took."""
    start = time.perf_counter()
    generate(prompts, 2, make_sampler(0, device=cache[0][0].device), prefill, decode, cache)
    return time.perf_counter() - start


@torch.inference_mode()
def steps(prompts, prefill, decode, cache):
    """Functions that run the prefill, and a decode step at the end of the cache, any number of times."""
    tokens, lengths = pad(prompts, cache[0][0].device)
    token, slots = tokens[:, 0].clone(), cache[0][0].shape[2]  # as generate() has them: else the compiler starts anew
    last = torch.full_like(lengths, slots - 1)
    return {
        "prefill": lambda: prefill(tokens, cache=cache, select=lengths - 1),
        "decode": lambda: decode(token[:, None], last[:, None], cache, slots),
    }


def measure_exposed(prompts, model, prefill, decode, cache, args, world):
    """The reports of exposed.py on the prefill and on a decode step."""
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


def step_bytes(model, cache):
    """Bytes that one decode step of this rank reads: every weight but the embedding table, and the cache."""
    weights = sum(
        p.numel() * p.element_size()
        for n, p in model.named_parameters(remove_duplicate=False)
        if n != "tok_embeddings.weight"
    )
    return weights + sum(t.numel() * t.element_size() for layer in cache for t in layer)


def peak_bytes(device):
    """Peak memory of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss would count the parent's memory at the time of the fork
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])


def git_commit():
    """The commit of this code, with "+" if it was edited since, or None outside a git checkout."""

    def git(*command):
        return subprocess.run(
            ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout

    try:
        edited = git("status", "--porcelain", "-uno", "*.py")
        return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(edited)
    except (OSError, subprocess.CalledProcessError):
        return None


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


def summary(r):
    """The result in a few lines for people."""
    head = "PREDICTED times of one rank alone: " if r["simulated"] else ""
    head += f"{r['model']}, {r['n_layers']} layers, {r['wiring']}, tp {r['tp']}"
    head += f", link {link.Link(**r['link'])}" if r["link"] else ""
    head += f", batch {r['batch']}, {r['dtype']}, {r['device']}"
    times = f"load {r['load_s']:.2f} s, compile {r['compile_s']:.2f} s, first token {r['ttft_ms']:.1f} ms"
    if r["tpot_ms"]:
        times += f", then {r['tpot_ms']:.2f} ms per token: {r['tok_s']:.1f} tok/s"
        times += f" ({r['tok_s_user']:.1f} for each of {r['batch']} users)" * (r["batch"] > 1)
    memory = f"{r['step_bytes'] / 1e6:.1f} MB read per step, peak memory {max(r['peak_bytes']) / 1e9:.2f} GB per rank"
    reports = "".join("\n" + exposed.report(*item) for item in (r["exposed"] or {}).items())
    return f"{head}\n{times}\n{memory}{reports}"


def chat_loop(args, model, tokenizer, world):
    """Read a line, answer, repeat. With a chat template the lines are user messages, else the text just goes on."""
    context = min(args.context or 4096, model.config.max_seq_len)
    cache = model.new_cache(1, context)
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
        rows, *_ = generate([ids], new, sample, prefill, decode, cache, eos_ids, printer and printer.push)
        if world.rank == 0:
            printer.finish(rows)
        ids = ids + rows[0]
        messages.append({"role": "assistant", "content": tokenizer.decode(rows[0])})


def parse(argv):
    p = tp.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", metavar="DIR", help="a folder that convert_hf_checkpoint.py wrote")
    g.add_argument("--model", metavar="NAME", help=f"a named size, with --random-weights: {', '.join(SIZES)}")
    g.add_argument("--random-weights", action="store_true", help="for benchmarks: the text means nothing")
    g.add_argument("--n-layers", type=int, metavar="N", help="of --model, take only so many layers")
    g.add_argument("--dtype", choices=checkpoint.DTYPES, help="without it the checkpoint's own, bfloat16 for --model")
    g.add_argument("--device", help="cpu, cuda or cuda:N; without it cuda where each rank finds a GPU")
    g.add_argument("--compile", action="store_true", help="torch.compile the decode step")
    g.add_argument("--compile-prefill", action="store_true", help="torch.compile the prefill")
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
    positive = "max_new_tokens batch prompt_length top_k context desync_period n_layers simulate_tp"
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

    cache = model.new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens)
    prefill, decode = compiled(model, args)
    compile_s = 0.0
    if args.compile or args.compile_prefill:
        if world.rank == 0:
            print("compiling ...", file=sys.stderr)
        compile_s = warm_up(prompts, prefill, decode, cache)
    sample = make_sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
    eos_ids = () if args.ignore_eos else config.eos_ids
    printer = None
    if world.rank == 0 and not world.simulated:
        printer = Printer(prompts, tokenizer, max_new_tokens, show_prompt=not args.chat)
    rows, n_steps, prefill_s, decode_s = generate(
        prompts, max_new_tokens, sample, prefill, decode, cache, eos_ids, printer and printer.push
    )
    peaks = world.gather(peak_bytes(world.device))
    texts = printer and printer.finish(rows)
    reports = measure_exposed(prompts, model, prefill, decode, cache, args, world) if args.exposed else None
    if args.profile is not None:
        with world.together():
            exposed.profile(args.profile, world, steps(prompts, prefill, decode, cache))
    if world.rank > 0:
        return

    tpot = decode_s / (n_steps - 1) if n_steps > 1 else None
    later = sum(max(len(row) - 1, 0) for row in rows)  # tokens after each row's first; ended rows give no more
    result = {
        "wiring": config.wiring, "model": args.model or Path(args.checkpoint).resolve().name,
        "n_layers": config.n_layers, "tp": world.tp_size, "simulated": world.simulated,
        "batch": len(prompts), "prompt_tokens": max(map(len, prompts)), "new_tokens": n_steps,
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."), "quant": None, "device": world.device.type,
        "link": chosen and dataclasses.asdict(chosen), "exposed": reports, "load_s": load_s, "compile_s": compile_s,
        "prefill_s": prefill_s, "decode_s": decode_s, "ttft_ms": 1e3 * prefill_s, "tpot_ms": tpot and 1e3 * tpot,
        "tok_s": tpot and later / decode_s, "tok_s_user": tpot and 1 / tpot, "step_bytes": step_bytes(model, cache),
        "peak_bytes": peaks, "torch": torch.__version__, "commit": git_commit(),
        "tokens": None if world.simulated else rows, "texts": texts,
    }  # fmt: skip
    print(summary(result), file=sys.stderr)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as f:
            f.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    tp.run(main)
