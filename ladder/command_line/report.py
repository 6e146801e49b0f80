"""What a run needs, warned of before its weights are loaded, and what it took, for machines and for people."""

import math
import os
import resource
import sys
from pathlib import Path

import torch

from ladder.checkpoints.checkpoint import dtype_name
from ladder.layers import mixture
from model import build
from tp import set_parameter, shard_slices

GRAPH_BYTES = 4e8  # of a GPU's captured decode steps, 20 MB each by estimate


def free_bytes(device):
    """Return the free memory of the device; on a CPU, the memory that the system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _kilobytes("/proc/meminfo", "MemAvailable:")
    return available or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: what the machine has


def _kilobytes(path, name):
    """Return the bytes that a file of /proc says in kB, or None if this is not Linux."""
    info = Path(path)
    return 1024 * int(info.read_text().partition(name)[2].split()[0]) if info.is_file() else None


def shard_on_meta(config, dtype, rank, shares):
    """Return (a rank's Transformer on "meta", without memory and with a whole tied head; {name: ShardSlice})."""
    model = build(config)
    slices = shard_slices(model, dtype, rank, shares)
    for name, piece in slices.items():
        set_parameter(model, name, torch.empty(piece.shape, dtype=piece.dtype, device="meta"))
    return model, slices


def cache_bytes(model, rows, slots):
    """Return the bytes of a rank's cache."""
    return sum(tensor.nbytes for layer in model.new_cache(rows, slots) for tensor in layer)


def warn_of_memory(world, config, dtype, rows, slots):
    """Print a line on stderr if this rank's weights, cache and CUDA graphs exceed the free memory.

    Of equal shares rank 0 has the largest, and says it for all, unless some KV heads have more ranks than others. A
    GPU's free memory is without what the ranks that have met already took: the context, and NCCL's buffers.
    Activations, and a draft's model, come on top. Raises InputError.
    """
    if world.rank > 0 and len({*world.shares}) == 1 and world.tp_size % config.n_kv_heads in (0, world.tp_size):
        return
    model, slices = shard_on_meta(config, dtype, world.rank, world.shares)
    needed = sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in slices.values())
    needed += cache_bytes(model, rows, slots)
    free = free_bytes(world.device)
    if world.device.type == "cuda":
        needed += GRAPH_BYTES
    else:  # the ranks of a machine share its memory
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        here = world.shares[world.rank // local * local :][:local]
        free *= world.shares[world.rank] / sum(here)
    if needed > free:
        text = f"about {needed / 1e9:,.2f} GB needed, {free / 1e9:,.2f} free"
        print(f"weights and cache of rank {world.rank} may not fit: {text}", file=sys.stderr)


def weight_bytes(model, tokens):
    """Return {name: bytes} that a pass of so many tokens reads of each weight: of experts, those that they choose.

    How many these are is the mean. Of the embedding table a pass reads next to nothing.
    """
    config, weights = model.config, model.named_parameters(remove_duplicate=False)
    chosen = mixture.chosen_share(config, tokens) if config.n_experts else 1
    shares = ((name, weight.nbytes, chosen if ".experts." in name else 1) for name, weight in weights)
    return {name: n_bytes * share for name, n_bytes, share in shares if "tok_embeddings." not in name}


def step_bytes(model, cache, filled, drafted=0):
    """Return the bytes that a decode step of this rank reads, of a token and so many drafted ones in each row.

    Of the cache count `filled` slots, or a window of them, or the state of linear attention.
    """
    c, total = model.config, sum(weight_bytes(model, len(cache[0][0]) * (1 + drafted)).values())
    for i, layer in enumerate(cache):  # of several lanes one after another
        slots = min(filled, c.sliding_window) if i % c.n_layers in c.window_layers else filled
        is_state = i % c.n_layers in c.linear_layers
        total += sum(tensor.nbytes if is_state else tensor[:, :, 0].nbytes * slots for tensor in layer)
    return total


def peak_bytes(device):
    """Return the peak memory of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # on Linux ru_maxrss would count the parent's memory at the time of the fork
    return _kilobytes("/proc/self/status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def result(job, done, texts):
    """Return the results as a dict, of a cli.Job and `done`, its finished Generation.

    Every rank calls it: it gathers.
    """
    runner, source, config, world = done.runner, job.draft_source, job.config, job.world
    longest, rows, passes, draft = max(map(len, job.prompts)), len(job.prompts), done.steps, runner.draft
    slots = longest + done.new_tokens / 2  # filled in the mean pass
    drafted = draft.drafted / passes if draft and passes else 0  # for a row in the mean pass
    read = step_bytes(runner.model, runner.cache, slots, drafted)
    if drafted and draft.runner:
        read += drafted * step_bytes(draft.runner.model, draft.runner.cache, slots)
    tpot = done.decode_s / (done.new_tokens - 1) if done.new_tokens > 1 else None
    # tokens after each row's first; a row that has ended gives no more
    later = sum(map(len, done.sequences)) - sum(map(len, done.prompts)) - rows
    accepted = draft and [draft.accepted[n] for n in range(max(draft.accepted, default=0) + 1)]
    return {
        "model": job.name, "n_layers": config.n_layers, "wiring": config.wiring, "quant": config.quant,
        "dtype": dtype_name(runner.model.dtype), "device": world.device.type,
        "comm": job.args.comm, "tp": world.tp_size, "shares": world.shares,
        "batch": rows, "prompt_tokens": longest, "new_tokens": done.new_tokens, "passes": passes,
        "prefill_s": done.prefill_s, "decode_s": done.decode_s,
        "ttft_ms": 1e3 * done.prefill_s, "tpot_ms": tpot and 1e3 * tpot, "tok_s": tpot and later / done.decode_s,
        "step_bytes": int(read), "bytes_s": tpot and read * passes / done.decode_s,
        "peak_bytes": world.gather(peak_bytes(world.device)),
        "graph_bytes": runner.graphs and runner.graphs.n_bytes,
        "sequence_splits": runner.choose_splits(rows, min(longest, max(1, runner.chunk_tokens // rows))),
        "draft": source and source.name, "speculate": source and source.count,
        "drafted": draft and draft.drafted, "accepted": accepted,
        "tokens": done.rows, "texts": texts, "finish": done.finish_reasons,
    }  # fmt: skip


def summary(r):
    """Return a few lines for people. r: the dict of result(), with load_s and compile_s."""
    head = f"{r['model']}, {r['n_layers']} layers, {r['wiring'].removesuffix(',')}, tp {r['tp']}, batch {r['batch']}"
    head += f", {r['quant'] or r['dtype']}, {r['device']}"
    head += f", shares {','.join(map(str, r['shares']))}" * (len({*r["shares"]}) > 1)
    head += f", {r['comm']} sums" * (r["comm"] != "auto")
    head += f", prefill in {r['sequence_splits']} parts" * (r["sequence_splits"] > 1)
    times = f"load {r['load_s']:.2f} s, compile {r['compile_s']:.2f} s, first token {r['ttft_ms']:.1f} ms"
    if r["tpot_ms"]:
        times += f", then {r['tpot_ms']:.2f} ms per token: {r['tok_s']:.1f} tok/s"
        times += f" ({1e3 / r['tpot_ms']:.1f} for each of {r['batch']} users)" * (r["batch"] > 1)
    memory = f"{r['step_bytes'] / 1e6:.1f} MB read per {'pass' if r['draft'] else 'step'}"
    memory += f", {r['bytes_s'] / 1e9:.1f} GB/s" if r["bytes_s"] else ""
    lines = [head, times, f"{memory}, peak memory {max(r['peak_bytes']) / 1e9:.2f} GB per rank"]
    if r["texts"] and (cut := len(r["finish"]) - r["finish"].count("stop")):
        lines.append(f"{cut} of {r['batch']} texts cut at --max-new-tokens or the end of the context")
    if r["draft"]:
        tried, accepted = sum(r["accepted"]), sum(n * times for n, times in enumerate(r["accepted"]))
        lines.append(f"draft {r['draft']}@{r['speculate']}: {r['passes']} passes; {tried} times a row had proposals, ")
        lines[-1] += f"{accepted / max(1, tried):.2f} of them accepted on average"
    return "\n".join(lines)


def append(path, result, world):
    """Append the result as a line of JSON, with what it was measured on; on rank 0, if there is a path."""
    if path and world.rank == 0:
        from ladder import benchmarking
        from ladder.checkpoints import writing

        writing.append_line(path, benchmarking.environment(world) | result)
