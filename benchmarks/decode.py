"""Decode and prefill of ours and llama.cpp on one CPU, the same shape and random bfloat16 weights, in turns.

python -m benchmarks.decode --threads 2 --engines ours:int8 ours:int4 llama.cpp:q8_0 llama.cpp:q4_0 ...
python -m benchmarks.decode --checkpoint DIR --gguf FILE --engines ours ours:eager llama.cpp
python -m benchmarks.decode --show decode.jsonl

llama.cpp needs pip install llama-cpp-python gguf. The shape is that of Llama 3.2 1B, or of --model, with an output
head of its own. A result is an engine in a case: median, quartiles, the run's bandwidth, the share our step reached.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from functools import partial

import numpy
import torch

from extras.measure import results
from extras.measure.exposed import replays
from generate import Runner, load_model
from ladder import outputs
from ladder.architectures.latent import Latent, sizes
from ladder.architectures.mixture import Mixture
from ladder.benchmarking import environment, in_turns, pivot, quartiles, read_bandwidth, timed
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.decoding.batch import make_cache, pad
from ladder.errors import InputError
from ladder.memory import step_bytes
from ladder.ranks import launch
from ladder.ranks.world import World
from ladder.sources.sizes import named_size

QUERY_RANK = 1536  # DeepSeek V2's
FILLED = 128  # slots of the cache before a decode step
WORLD = World(0, 1, torch.device("cpu"))
# an engine's weights, behind the colon of its name: ours of as many bits
OURS = {"": "ours", "eager": "ours", "int8": "ours:int8", "q8_0": "ours:int8", "int4": "ours:int4", "q4_0": "ours:int4"}
KINDS = {"decode": "decode, batch {}", "prefill": "prefill, {} tokens"}

# ---- The engines -----------------------------------------------------------------------------------------------------
# Each returns prepare(kind, n), which returns a function that runs that case, and the bytes that our decode step reads.


def step_of(model, kind, n, compile=False):
    """Return (a function that runs a decode step of n rows, or a prefill of n tokens, again and again; its cache)."""
    batch, length = (n, FILLED) if kind == "decode" else (1, n)
    runner = Runner(model, make_cache(model, batch, length + 1), compile)
    return replays(runner, *pad([[1] * length] * batch, runner.device))[kind], runner.cache


def ours(config, kind, args):
    if kind.startswith("int"):
        config = dataclasses.replace(config, quant=kind, group_size=64 if kind == "int4" else None)
    model = load_model(config, args.checkpoint, "bfloat16", WORLD)
    compile = kind != "eager"

    def prepare(kind, n):
        run, cache = step_of(model, kind, n, compile)
        torch.compiler.set_stance("default")
        run()  # compiles
        torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)  # as generate.py does
        return run, step_bytes(model, cache, FILLED + 1) if kind == "decode" else None

    return prepare


def gguf_of_latents(c):
    """Return what `deepseek2` names ({value: number}, {tensor of an attention: shape}, {tensor of experts: shape})."""
    latent = c.find(Latent)
    mixture = c.find(Mixture)
    N = c.n_heads
    Q = latent.query_rank
    L, X, R, Y = sizes(latent)
    E = mixture.n_experts
    size = mixture.expert_size
    shared = mixture.shared_expert_size
    values = {
        "head_count_kv": 1, "rope_dimension_count": R, "q_lora_rank": Q, "kv_lora_rank": L,
        "key_length": L + R, "value_length": L, "key_length_mla": X + R, "value_length_mla": Y,
        "leading_dense_block_count": len(mixture.dense_layers), "expert_count": E,
        "expert_used_count": mixture.experts_per_token,
        "expert_feed_forward_length": size, "expert_shared_count": shared // size,
        "expert_weights_scale": mixture.expert_scale or 1.0,
    }  # fmt: skip
    attention = {
        "attn_q_a": (Q, c.dim), "attn_q_a_norm": (Q,), "attn_q_b": (N * (X + R), Q),
        "attn_kv_a_mqa": (L + R, c.dim), "attn_kv_a_norm": (L,), "attn_k_b": (N, L, X),
        "attn_v_b": (N, Y, L), "attn_output": (c.dim, N * Y),
    }  # fmt: skip
    experts = {
        "ffn_gate_inp": (E, c.dim), "ffn_gate_exps": (E, size, c.dim), "ffn_up_exps": (E, size, c.dim),
        "ffn_down_exps": (E, c.dim, size), "ffn_gate_shexp": (shared, c.dim), "ffn_up_shexp": (shared, c.dim),
        "ffn_down_shexp": (c.dim, shared),
    }  # fmt: skip
    return values, attention, experts


def write_gguf(path, c, quant):
    """Write llama.cpp's file of a Config with random weights: a dense Llama, or a mixture with latent attention."""
    import gguf

    queries = c.n_heads * c.head_dim
    kv = c.n_kv_heads * c.head_dim
    mlp = c.intermediate_size
    values = {"head_count_kv": c.n_kv_heads, "rope_dimension_count": c.head_dim}
    attention = {
        "attn_q": (queries, c.dim), "attn_k": (kv, c.dim), "attn_v": (kv, c.dim), "attn_output": (c.dim, queries),
    }  # fmt: skip
    dense = {"ffn_gate": (mlp, c.dim), "ffn_up": (mlp, c.dim), "ffn_down": (c.dim, mlp)}
    experts = {}
    if c.find(Latent):
        values, attention, experts = gguf_of_latents(c)
    writer = gguf.GGUFWriter(path, "deepseek2" if c.find(Latent) else "llama")
    for name, value in {
        "tokenizer_model": "no_vocab", "vocab_size": c.vocab_size, "context_length": 1088, "embedding_length": c.dim,
        "block_count": c.n_layers, "feed_forward_length": mlp, "head_count": c.n_heads,
        "layer_norm_rms_eps": c.norm_eps, "rope_freq_base": c.rope_theta, **values,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (c.vocab_size, c.dim), "output": (c.vocab_size, c.dim), "output_norm": (c.dim,)}
    for i in range(c.n_layers):
        mlp_of_layer = experts if experts and i not in c.find(Mixture).dense_layers else dense
        layer = {"attn_norm": (c.dim,), "ffn_norm": (c.dim,), **attention, **mlp_of_layer}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    random = numpy.random.default_rng(0)
    types = gguf.GGMLQuantizationType
    for name, shape in shapes.items():
        values = numpy.float32(0.02) * random.standard_normal(shape, numpy.float32)
        kind = types.F32 if len(shape) == 1 or "gate_inp" in name else types[quant.upper() or "BF16"]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(config, quant, args):
    try:
        import llama_cpp

        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap = False  # anonymous memory, as the others have; so the file may go
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            if not args.gguf:
                write_gguf(file.name, config, quant)
            model = llama_cpp.llama_model_load_from_file((args.gguf or file.name).encode(), parameters)
    except ImportError as error:
        raise InputError(f"llama.cpp: {error}; pip install llama-cpp-python gguf") from None

    def prepare(kind, n):
        batch, length = (n, FILLED) if kind == "decode" else (1, n)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = batch * (length + 8)
        parameters.n_seq_max = batch
        parameters.n_batch = max(batch * 32, n)
        parameters.n_ubatch = max(batch, 512)
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        parameters.kv_unified = False
        context = llama_cpp.llama_init_from_model(model, parameters)
        memory = llama_cpp.llama_get_memory(context)
        tokens = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)

        def run(first, count):
            tokens.n_tokens = 0
            for row in range(batch):
                for position in range(first, first + count):
                    i = tokens.n_tokens
                    tokens.token[i] = 1
                    tokens.pos[i] = position
                    tokens.n_seq_id[i] = 1
                    tokens.seq_id[i][0] = row
                    tokens.logits[i] = position == first + count - 1
                    tokens.n_tokens += 1
            assert llama_cpp.llama_decode(context, tokens) == 0
            llama_cpp.llama_synchronize(context)

        def again(first, count):  # at the same positions
            run(first, count)
            for row in range(batch):
                llama_cpp.llama_memory_seq_rm(memory, row, first, -1)

        if kind == "prefill":
            return partial(again, 0, n), None
        for position in range(0, FILLED, 32):
            run(position, 32)
        return partial(again, FILLED, 1), None

    return prepare


ENGINES = dict.fromkeys(("ours", "ours:eager", "ours:int8", "ours:int4"), ours)
ENGINES |= dict.fromkeys(("llama.cpp", "llama.cpp:q8_0", "llama.cpp:q4_0"), llama_cpp)

# ---- Measuring -------------------------------------------------------------------------------------------------------


def parse(argv):
    p = flags.Parser(__doc__)
    p.add_argument("--model", default="1b", metavar="NAME[:N]", help="N layers of a Llama of this size, e.g. 8b:4")
    p.add_argument("--checkpoint", metavar="DIR", help="ours and ours:eager: of this folder instead of random weights")
    p.add_argument("--gguf", metavar="FILE", help="llama.cpp: of this file, from which that folder was converted")
    p.add_argument("--threads", type=count, default=1, metavar="N", help="of each engine")
    p.add_argument("--engines", nargs="+", metavar="NAME", help=f"of {', '.join(ENGINES)} (default: ours)")
    p.add_argument("--decode", type=count, nargs="*", default=[1, 4, 16, 64], metavar="BATCH", help="rows of a step")
    p.add_argument("--prefill", type=count, nargs="*", default=[128, 1024], metavar="TOKENS", help="of a prompt")
    p.add_argument("--rounds", type=number(int, 3), default=9, metavar="N", help="turns of each engine in each case")
    flags.add_json_flag(p, "a line for each engine and case")
    p.add_argument("--show", nargs="+", metavar="FILE", help="measure nothing: print the tables of such files")
    args = p.parse_args(argv)
    if args.show:
        return args
    args.engines = args.engines or ["ours"]
    if unknown := {*args.engines}.difference(ENGINES):
        raise InputError(f"--engines: unknown {unknown.pop()!r}; known: {', '.join(ENGINES)}")
    with_llama_cpp = llama_cpp in map(ENGINES.get, args.engines)
    if bool(args.checkpoint) != bool(args.gguf) and with_llama_cpp:
        raise InputError("--checkpoint and --gguf: llama.cpp needs both or neither, so that the models are the same")
    size = named_size(args.model)
    if size.find(Mixture) and not size.find(Latent) and with_llama_cpp:
        raise InputError(
            f"--model {args.model} is a mixture without latent attention, which is not written for llama.cpp"
        )
    return args


def measure(args):
    """Yield the line of each engine in each case."""
    torch.set_num_threads(args.threads)
    name, config = flags.read_config(args)
    if not args.checkpoint:
        name = args.model
        config = dataclasses.replace(config, tie_embeddings=False)
        if config.find(Latent) and llama_cpp in map(ENGINES.get, args.engines):
            # llama.cpp takes a model without latents of queries only if it has 26 or 27 layers
            with_rank = [
                dataclasses.replace(each, query_rank=QUERY_RANK) if each is config.find(Latent) else each
                for each in config.architecture
            ]
            name = f"{name} with query_rank {QUERY_RANK}"
            config = dataclasses.replace(config, architecture=tuple(with_rank))
    engines = {name: ENGINES[name](config, name.partition(":")[2], args) for name in args.engines}
    made = {**environment(WORLD), "model": name, "rounds": args.rounds}
    for kind, n in [("decode", batch) for batch in args.decode] + [("prefill", tokens) for tokens in args.prefill]:
        steps = {name: prepare(kind, n) for name, prepare in engines.items()}
        turns = {name: partial(timed, WORLD.device, run) for name, (run, _) in steps.items()}
        in_turns(turns, 1)
        times = in_turns({"": lambda: read_bandwidth(WORLD.device, repeats=3), **turns}, args.rounds)
        bandwidth = times.pop("")
        made["bandwidth"] = statistics.median(bandwidth)
        for name, seconds in times.items():
            low, median, high = (1e3 * s for s in quartiles(seconds))
            line = {**made, "engine": name, "kind": kind, "n": n, "ms": median, "quartiles_ms": [low, high]}
            if args.gguf:
                line["gguf_bytes"] = os.path.getsize(args.gguf)
            if n_bytes := steps[name][1]:  # round by round: a shared machine's bandwidth varies
                line["step_bytes"] = n_bytes
                line["mbu"] = statistics.median(n_bytes / s / b for s, b in zip(seconds, bandwidth, strict=True))
            yield line


# ---- Tables ----------------------------------------------------------------------------------------------------------


def tables(lines):
    """Return Markdown, a table for each number of threads: a row a case, a column an engine."""
    rates = {(line["threads"], line["kind"], line["n"]): f"{line['bandwidth'] / 1e9:.1f}" for line in lines}

    def row(line):
        return KINDS.get(line["kind"], "{}").format(line["n"]), rates[line["threads"], line["kind"], line["n"]]

    return "\n\n".join(
        pivot([f"threads: {n}", "GB/s"], [x for x in lines if x["threads"] == n], row, lambda x: x["engine"], cell)
        for n in sorted({line["threads"] for line in lines})
    )


def cell(line, row):
    """Return milliseconds, quartiles, and how many times ours of as many bits; of our batch 1, the share of bandwidth.

    row: {engine: line} of the same case.
    """
    ours = row.get(OURS[line["engine"].partition(":")[2]])
    low, high = line["quartiles_ms"]
    text = f"{line['ms']:.1f} ({low:.1f}-{high:.1f}"
    if line is ours or ours is None:
        return text + (f"; {100 * line['mbu']:.0f}%)" if line["n"] == 1 and "mbu" in line else ")")
    return text + f"; {line['ms'] / ours['ms']:.2f}x)"


def main(argv=None):
    args = parse(argv)
    if args.show:
        lines = results.read(args.show, "engine", "bandwidth")
        return print(tables([line for line in lines if not args.engines or line["engine"] in args.engines]))
    lines = []
    for line in measure(args):
        print(json.dumps(line), file=sys.stderr)
        lines.append(line)
        if args.json:
            outputs.append_line(args.json, line)
    print(tables(lines))


if __name__ == "__main__":
    launch.run(main)
