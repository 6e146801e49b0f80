"""What a run took, for machines and for people."""

from ladder import benchmarking, outputs
from ladder.checkpoints.checkpoint import dtype_name
from ladder.memory import peak_bytes, step_bytes


def result(job, done, texts):
    """Return the results as a dict, of a job.Job and `done`, its finished Generation.

    Every rank calls it: it gathers.
    """
    runner = done.runner
    source = job.draft_source
    config = job.config
    world = job.world
    longest = max(map(len, job.prompts))
    rows = len(job.prompts)
    steps = done.steps
    draft = runner.draft
    slots = longest + done.new_tokens / 2  # filled in the mean pass
    drafted = draft.drafted / steps if draft and steps else 0  # for a row in the mean pass
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
        "batch": rows, "prompt_tokens": longest, "new_tokens": done.new_tokens, "passes": steps,
        "prefill_s": done.prefill_s, "decode_s": done.decode_s,
        "ttft_ms": 1e3 * done.prefill_s, "tpot_ms": tpot and 1e3 * tpot, "tok_s": tpot and later / done.decode_s,
        "step_bytes": int(read), "bytes_s": tpot and read * steps / done.decode_s,
        "peak_bytes": world.gather(peak_bytes(world.device)),
        "graph_bytes": runner.passes.graphs and runner.passes.graphs.n_bytes,
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
        tried = sum(r["accepted"])
        accepted = sum(n * times for n, times in enumerate(r["accepted"]))
        lines.append(f"draft {r['draft']}@{r['speculate']}: {r['passes']} passes; {tried} times a row had proposals, ")
        lines[-1] += f"{accepted / max(1, tried):.2f} of them accepted on average"
    return "\n".join(lines)


def append(path, result, world):
    """Append the result as a line of JSON, with what it was measured on; on rank 0, if there is a path."""
    if path and world.rank == 0:
        outputs.append_line(path, benchmarking.environment(world) | result)
