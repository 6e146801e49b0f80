"""The engines that decode.py compares, each in a process of its own, of whatever Python has it.

python engines.py NAME THREADS answers a line such as "decode 4 3" on its standard input with the seconds of three runs
of that case, as a JSON list. At the top it imports only what comes with Python: that of llama.cpp may have no torch.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY, CONTEXT = 2048, 16, 32, 8, 8192, 128256, 1088
FILLED = 128  # slots of the cache before a decode step

# Each returns a function step(kind, n), which prepares a case and returns a function that runs it once


def ours(threads, quant):
    import dataclasses

    import torch

    from extras.measure.exposed import replays
    from formats.sizes import SIZES
    from generate import Runner, load_model, make_cache, pad
    from runtime.launch import World

    group_size = 64 if quant == "int4" else None
    config = dataclasses.replace(SIZES["1b"], tie_embeddings=False, quant=quant or None, group_size=group_size)
    shape = config.dim, config.n_layers, config.n_heads, config.n_kv_heads, config.intermediate_size, config.vocab_size
    assert shape == (DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY)
    model = load_model(config, None, "bfloat16", World(0, 1, torch.device("cpu")))

    def step(kind, n):
        batch, length = (n, FILLED) if kind == "decode" else (1, n)
        runner = Runner(model, make_cache(model, batch, length + 2), compile=True)
        run = replays(runner, *pad([[1] * length] * batch, runner.device))[kind]
        torch.compiler.set_stance("default")
        run()  # compiles
        torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)  # as generate.py does
        return run

    return step


def llama_cpp(threads, quant):
    import gguf
    import llama_cpp
    import numpy

    path = Path(tempfile.gettempdir()) / f"ladder-fast-1b-{os.getpid()}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "tokenizer_model": "no_vocab", "vocab_size": VOCABULARY, "context_length": CONTEXT, "embedding_length": DIM,
        "block_count": LAYERS, "feed_forward_length": HIDDEN, "head_count": HEADS, "head_count_kv": KV_HEADS,
        "rope_dimension_count": DIM // HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 500000.0,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    random = numpy.random.default_rng(0)

    def add(name, *shape):
        if len(shape) == 1:
            return writer.add_tensor(name, numpy.ones(shape, numpy.float32))
        if quant:  # blocks of 32: a scale in float16, then the integers
            kind = gguf.GGMLQuantizationType[quant.upper()]
            blocks = random.integers(0, 256, (shape[0], shape[1] // 32, gguf.GGML_QUANT_SIZES[kind][1]), numpy.uint8)
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


ENGINES = {"ours": ours, "llama.cpp": llama_cpp}


def main():
    """Answer each line; the engine holds one case at a time."""
    name, _, quant = sys.argv[1].partition(":")
    step, case, run = ENGINES[name](int(sys.argv[2]), quant), None, None
    for line in sys.stdin:
        kind, n, times = line.split()
        if (kind, n) != case:
            run = None  # and its memory
            case, run = (kind, n), step(kind, int(n))
            run()
        seconds = []
        for _ in range(int(times)):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        print("times", json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
