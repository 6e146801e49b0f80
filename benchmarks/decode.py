"""Decode and prefill of several engines on one CPU, the same shape and random bfloat16 weights, in turns.

python benchmarks/decode.py --threads 1 --engines ours,transformers --json benchmarks/decode.jsonl
python benchmarks/decode.py --threads 2 --gpt-fast DIR --llama-python VENV/bin/python --json benchmarks/decode.jsonl
python benchmarks/decode.py --threads 2 --engines ours:int8,ours:int4,llama.cpp:q8_0,llama.cpp:q4_0 ...
python benchmarks/decode.py --show benchmarks/decode.jsonl

Each engine is a process of its own, which is idle while another one is timed. gpt-fast is a checkout of its repository,
llama.cpp a Python that has llama-cpp-python and gguf. The shape is Llama 3.2 1B with an output head of its own: 2.47 GB
of weights a step. A line of the result is one engine in one case: the median and the quartiles of its times, and the
bandwidth that the machine showed in the same run; mbu is the part of it that the decode steps reached.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY, CONTEXT = 2048, 16, 32, 8, 8192, 128256, 1088
FILLED = 128  # slots of the cache before a decode step
QUANTS = {  # of an engine, behind a colon: (bytes of a weight, scales included, and ours of as many bits)
    "": (2, "ours"),
    "int8": (1, "ours:int8"),
    "q8_0": (34 / 32, "ours:int8"),  # each 32 with a scale of 16 bits
    "int4": (0.5 + 4 / 64, "ours:int4"),  # each 64 with a scale and a zero of 16 bits
    "q4_0": (18 / 32, "ours:int4"),
}
ENGINES = ["ours", "transformers", "gpt-fast", "llama.cpp", "ours:int8", "gpt-fast:int8", "llama.cpp:q8_0", "ours:int4"]
ENGINES += ["llama.cpp:q4_0"]
CASES = [("decode", 1), ("decode", 4), ("decode", 16), ("decode", 64), ("prefill", 128), ("prefill", 1024)]


# ---------------------------------------------------------------------------------------------------------------------
# The engines: each returns a function step(kind, n), which prepares a case and returns a function that runs it once


def ours(quant):
    import dataclasses

    import torch

    import checkpoint
    import generate
    import tp
    from model import SIZES

    config = dataclasses.replace(SIZES["1b"], tie_embeddings=False)
    config = dataclasses.replace(config, quant=quant or None, group_size=64 if quant == "int4" else None)
    shape = config.dim, config.n_layers, config.n_heads, config.n_kv_heads, config.intermediate_size, config.vocab_size
    assert shape == (DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY)
    model = tp.load_shard(config, checkpoint.RandomWeights(config, "cpu"), torch.bfloat16, "cpu")
    flags = argparse.Namespace(compile=True, compile_prefill=False)
    prefill, decode = generate.compiled(model, flags)

    def step(kind, n):
        batch, length = (n, FILLED) if kind == "decode" else (1, n)
        cache = generate.make_cache(model, batch, n if kind == "cache" else length + 2)
        if kind == "cache":
            run = functools.partial(generate.steps([[1]], prefill, decode, cache)["decode"], 256)
        else:
            run = generate.steps([[1] * length] * batch, prefill, decode, cache)[kind]
        torch.compiler.set_stance("default")
        run()  # compiles
        torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)  # as generate.py does
        return run

    return step


def transformers():
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
    shape |= {"num_key_value_heads": KV_HEADS, "intermediate_size": HIDDEN, "max_position_embeddings": CONTEXT}
    config = LlamaConfig(**shape)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config).eval()

    def step(kind, n):
        if kind == "prefill":
            tokens = torch.ones(1, n, dtype=torch.long)
            return torch.inference_mode()(lambda: model(tokens, past_key_values=DynamicCache(), logits_to_keep=1))
        cache = DynamicCache()
        with torch.inference_mode():
            model(torch.ones(n, FILLED, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        token = torch.ones(n, 1, dtype=torch.long)

        @torch.inference_mode()
        def run():
            model(token, past_key_values=cache)
            cache.crop(-1)

        return run

    return step


def gpt_fast(folder, quant):
    import torch

    # without the project's folders, which have modules of the same names
    sys.path[:] = [folder, *(p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "benchmarks"))]
    from model import ModelArgs, Transformer

    args = ModelArgs(CONTEXT, VOCABULARY, LAYERS, HEADS, DIM, HIDDEN, KV_HEADS, rope_base=500000.0)
    torch.set_default_dtype(torch.bfloat16)
    model = Transformer(args).eval()
    if quant:
        from quantize import WeightOnlyInt8QuantHandler

        model = WeightOnlyInt8QuantHandler(model).convert_for_runtime()
        for name, buffer in model.named_buffers():
            if name.endswith(("weight", "scales")):
                buffer.random_(-127, 128) if name.endswith("weight") else buffer.fill_(0.001)

    def step(kind, n):
        batch, length = (n, FILLED) if kind == "decode" else (1, n)
        model.max_seq_length = model.max_batch_size = -1
        model.setup_caches(batch, length + 8)
        if kind == "prefill":
            tokens, positions = torch.ones(1, n, dtype=torch.long), torch.arange(n)
            return torch.inference_mode()(lambda: model(tokens, positions))
        torch._dynamo.reset()
        decode = torch.compile(model, mode="reduce-overhead", fullgraph=True)  # as its generate.py does
        token, position = torch.ones(batch, 1, dtype=torch.long), torch.tensor([FILLED])
        return torch.inference_mode()(lambda: decode(token, position))

    return step


def llama_cpp(threads, quant):
    import gguf
    import llama_cpp
    import numpy

    path = Path(tempfile.gettempdir()) / f"ladder-fast-1b-{os.getpid()}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    random = numpy.random.default_rng(0)

    def add(name, *shape):
        if len(shape) == 1:
            return writer.add_tensor(name, numpy.ones(shape, numpy.float32))
        if quant:  # blocks of 32: a scale in float16, then the integers
            kind = gguf.GGMLQuantizationType[quant.upper()]
            blocks = random.integers(
                0, 256, (*shape[:-1], shape[-1] // 32, gguf.GGML_QUANT_SIZES[kind][1]), numpy.uint8
            )
            blocks[..., :2] = numpy.array([0.001], numpy.float16).view(numpy.uint8)
            return writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=kind)
        values = random.standard_normal(shape, numpy.float32) * 0.02
        values = (values.view(numpy.uint32) >> 16).astype(numpy.uint16)  # to bfloat16, towards zero
        writer.add_tensor(name, values.view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", VOCABULARY, DIM)
    add("output.weight", VOCABULARY, DIM)
    add("output_norm.weight", DIM)
    kv = KV_HEADS * DIM // HEADS
    for i in range(LAYERS):
        shapes = {"attn_norm": (DIM,), "ffn_norm": (DIM,), "attn_q": (DIM, DIM), "attn_k": (kv, DIM)}
        shapes |= {"attn_v": (kv, DIM), "attn_output": (DIM, DIM)}
        shapes |= {"ffn_gate": (HIDDEN, DIM), "ffn_up": (HIDDEN, DIM), "ffn_down": (DIM, HIDDEN)}
        for name, shape in shapes.items():
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_mmap = False  # anonymous memory, as the others have; path may go
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    path.unlink()
    contexts = {}

    def step(kind, n):
        batch, length = (n, FILLED) if kind == "decode" else (1, n)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = batch * (length + 8), batch
        parameters.n_batch, parameters.n_ubatch = max(batch * 32, n), max(batch, 512)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = False
        context = contexts[kind, n] = llama_cpp.llama_init_from_model(model, parameters)
        memory = llama_cpp.llama_get_memory(context)
        tokens = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)

        def run(first, count):
            tokens.n_tokens = 0
            for row in range(batch):
                for position in range(first, first + count):
                    i = tokens.n_tokens
                    tokens.token[i], tokens.pos[i], tokens.n_seq_id[i], tokens.seq_id[i][0] = 1, position, 1, row
                    tokens.logits[i] = position == first + count - 1
                    tokens.n_tokens += 1
            assert llama_cpp.llama_decode(context, tokens) == 0
            llama_cpp.llama_synchronize(context)
            return lambda: [llama_cpp.llama_memory_seq_rm(memory, row, first, -1) for row in range(batch)]

        if kind == "prefill":
            return lambda: run(0, n)()
        for position in range(0, FILLED, 32):
            run(position, 32)
        return lambda: run(FILLED, 1)()

    return step


def work(args):
    """Answer lines such as "decode 4 3" with the seconds of three runs of that case, as a JSON list."""
    name, _, quant = args.worker.partition(":")
    engines = {
        "ours": lambda: ours(quant),
        "transformers": transformers,
        "gpt-fast": lambda: gpt_fast(args.gpt_fast, quant),
        "llama.cpp": lambda: llama_cpp(args.threads, quant),
    }
    engine, run = engines[name](), {}
    for line in sys.stdin:
        kind, n, times = line.split()
        if (kind, n) not in run:
            run.clear()
            run[kind, n] = engine(kind, int(n))
            run[kind, n]()
        seconds = []
        for _ in range(int(times)):
            start = time.perf_counter()
            run[kind, n]()
            seconds.append(time.perf_counter() - start)
        print("times", json.dumps(seconds), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def parse(p):
    p.add_argument("--threads", type=int, default=1, help="of each engine")
    p.add_argument("--engines", help=f"of {', '.join(ENGINES)}; without it all that can run in bfloat16")
    p.add_argument("--gpt-fast", metavar="DIR", help="a checkout of gpt-fast")
    p.add_argument("--llama-python", metavar="FILE", help="a Python that imports llama_cpp and gguf")
    p.add_argument("--cases", help="such as decode:4,prefill:128 (batch, tokens); without it those of the page")
    p.add_argument("--rounds", type=int, default=9, help="3 or more")
    p.add_argument("--json", metavar="FILE", help="append the lines to this file")
    p.add_argument("--show", metavar="FILE", nargs="+", help="print the tables of such files, and measure nothing")
    p.add_argument("--log", metavar="FILE", default=os.devnull, help="what the engines print on the side")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    return p.parse_args()


def check(args):
    """Raise InputError for flags that make no sense; turns engines and cases into lists."""
    import checkpoint
    from model import InputError

    for name, least in (("threads", 1), ("rounds", 3)):
        if getattr(args, name) < least:
            raise InputError(f"--{name} is {getattr(args, name)} but must be at least {least}")
    if args.gpt_fast and not (Path(args.gpt_fast) / "model.py").is_file():
        raise InputError(f"--gpt-fast {args.gpt_fast} is no checkout of gpt-fast: it has no model.py")
    if args.llama_python and not shutil.which(args.llama_python):
        raise InputError(f"--llama-python {args.llama_python} is no program")
    has_transformers = importlib.util.find_spec("transformers") is not None
    available = {"ours": 1, "transformers": has_transformers, "gpt-fast": args.gpt_fast, "llama.cpp": args.llama_python}
    args.engines = args.engines.split(",") if args.engines else [name for name, there in available.items() if there]
    for name in args.engines:
        if name not in ENGINES:
            raise InputError(f"--engines: unknown {name!r}; known: {', '.join(ENGINES)}")
        if not available[name.partition(":")[0]]:
            raise InputError(f"--engines {name} needs --gpt-fast, --llama-python, or pip install transformers")
    cases = [case.partition(":") for case in args.cases.split(",")] if args.cases else []
    for kind, _, n in cases:
        if kind not in ("decode", "prefill", "cache") or not n.isdecimal() or int(n) < 1:
            raise InputError(f"--cases: {kind + ':' + n!r} is none of decode:BATCH, prefill:TOKENS and cache:SLOTS")
        if kind == "cache" and (args.engines != ["ours"] or int(n) < 258):
            raise InputError("--cases cache:SLOTS (256 filled of 258 or more) is for --engines ours")
    args.cases = [(kind, int(n)) for kind, _, n in cases] or CASES
    if args.json is not None:
        checkpoint.check_appendable(args.json, "--json")
    checkpoint.check_appendable(args.log, "--log")


def ask(worker, kind, n, times):
    worker.stdin.write(f"{kind} {n} {times}\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("times"):
            return json.loads(line[5:])
    from model import InputError

    raise InputError(f"engine {worker.args[3]} ended: give a file to --log, and see there")


def measure(args):
    import torch

    from report import git_commit, processor, read_bandwidth

    torch.set_num_threads(args.threads)
    workers = {}
    for name in args.engines:
        python = args.llama_python if name.startswith("llama.cpp") else sys.executable
        command = [python, __file__, "--worker", name, "--threads", str(args.threads)]
        command += ["--gpt-fast", args.gpt_fast] if name.startswith("gpt-fast") else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(args.log, "a") as log:
            workers[name] = subprocess.Popen(command, env=environment, stderr=log, **pipes)
    about = {"threads": args.threads, "torch": torch.__version__, "commit": git_commit(), "command": " ".join(sys.argv)}
    about |= {"processor": processor()}
    for kind, n in args.cases:
        seconds, bandwidth = {name: [] for name in workers}, []
        for name in workers:
            ask(workers[name], kind, n, 1)  # prepares the case
        for _ in range(args.rounds):
            bandwidth.append(read_bandwidth(torch.device("cpu"), repeats=3))
            for name, worker in workers.items():
                seconds[name].append(ask(worker, kind, n, 3 if kind != "prefill" and n < 64 else 1))
        for name in workers:
            low, median, high = (1e3 * s for s in statistics.quantiles(itertools.chain(*seconds[name]), n=4))
            line = {"engine": name, "kind": kind, "n": n, "ms": median, "quartiles_ms": [low, high]}
            line |= {"rounds": args.rounds, "bandwidth": statistics.median(bandwidth)}
            if kind == "decode":  # round by round, since the bandwidth of a shared machine varies
                of_rounds = [
                    step_bytes(n, name) / statistics.median(s) / b
                    for s, b in zip(seconds[name], bandwidth, strict=True)
                ]
                line["mbu"] = statistics.median(of_rounds)
            print(json.dumps(line), file=sys.stderr)
            yield {**about, **line}


def step_bytes(batch, engine):
    """Bytes that a decode step of an engine has to read: the matrices and norms, and the filled slots of the cache."""
    head = DIM // HEADS
    layer = DIM * (DIM + 2 * KV_HEADS * head) + DIM * DIM + 3 * DIM * HIDDEN
    matrices = (LAYERS * layer + DIM * VOCABULARY) * QUANTS[engine.partition(":")[2]][0]
    return matrices + 2 * ((2 * LAYERS + 1) * DIM + batch * LAYERS * 2 * KV_HEADS * head * (FILLED + 1))


def tables(lines):
    """Markdown, a table a number of threads: a line a case, a column an engine."""
    parts = []
    for threads in sorted({line["threads"] for line in lines}):
        mine = [line for line in lines if line["threads"] == threads]
        engines = list(dict.fromkeys(line["engine"] for line in mine))
        rows = [f"| threads: {threads} | GB/s | " + " | ".join(engines) + " |", "|---" * (len(engines) + 2) + "|"]
        for case in dict.fromkeys((line["kind"], line["n"]) for line in mine):
            cells = {line["engine"]: line for line in mine if (line["kind"], line["n"]) == case}
            name = {"decode": "decode, batch {}", "prefill": "prefill, {} tokens", "cache": "256 slots filled of {}"}
            name = name[case[0]].format(case[1])
            row = [name, f"{next(iter(cells.values()))['bandwidth'] / 1e9:.1f}"]
            rows.append("| " + " | ".join(row + [cell(cells.get(e), cells) for e in engines]) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def cell(line, cells):
    """Milliseconds, their quartiles, how many times ours of as many bits; for our decode, the part of the bandwidth."""
    if line is None:
        return ""
    ours = cells.get(QUANTS[line["engine"].partition(":")[2]][1])
    low, high = line["quartiles_ms"]
    text = f"{line['ms']:.1f} ({low:.1f}-{high:.1f}"
    if line is ours or ours is None:
        return text + (f"; {100 * line['mbu']:.0f} %)" if line["kind"] == "decode" and line["n"] == 1 else ")")
    return text + f"; {line['ms'] / ours['ms']:.2f}x)"


def main():
    import tp

    args = parse(tp.Parser(__doc__))
    if args.show:
        from overlap import read_lines

        return print(tables([line for file in args.show for line in read_lines(file, "engine")]))
    check(args)
    lines = []
    for line in measure(args):
        lines.append(line)
        if args.json:
            with open(args.json, "a") as f:
                f.write(json.dumps(line) + "\n")
    print(tables(lines))


if __name__ == "__main__":
    if "--worker" in sys.argv:  # maybe in a Python without torch
        work(parse(argparse.ArgumentParser()))
    else:
        import tp

        tp.run(main)
