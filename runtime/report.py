"""What a run reports: bytes and bandwidth, memory, the commit, a few lines for people."""

import dataclasses
import itertools
import os
import platform
import resource
import statistics
import subprocess
from pathlib import Path

import torch

from formats.checkpoint import dtype_name
from kernels import cpu
from runtime.timing import timed

SETTINGS = "NCCL_", "TORCH_NCCL_", "GLOO_", "ENABLE_INTRA_NODE_COMM"  # of the environment
LARGE = 5e7  # bytes of a step: fewer fit a processor's caches, and say nothing of its memory


def bandwidth_share(result):
    """Return the share of the memory's bandwidth that a decode step reached, or None if it reads too little to say."""
    return result["mbu"] if result.get("step_bytes", LARGE) >= LARGE else None


def read_bandwidth(device, world=None, size=2**30, repeats=9):
    """Return the bytes per second that this process reads from the device's memory: the median of some passes.

    A pass sums a tensor of `size` bytes, which should be far larger than the caches; less where memory is short. On a
    GPU it takes up to 8 GiB, far more than its caches hold. The ranks of the world, if given,
    measure at the same time: those of one machine share its memory.
    """
    on_gpu, free = device.type == "cuda", free_bytes(device)
    size = min(2**33, free // 4) if on_gpu else min(size, free // 32)
    tensor = cpu.empty((size // 4,), torch.float32, device).fill_(1)
    timed(device, tensor.sum)
    company = 0
    if world is not None and not world.alone:
        world.gather(None)  # all have a tensor
        company = repeats  # for slower ranks
    seconds = [timed(device, tensor.sum) for _ in range(repeats + company)]
    return size / statistics.median(seconds[:repeats])


def free_bytes(device):
    """Return the free memory of the device; on a CPU, the memory that the system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if not info.is_file():  # not Linux: what the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1024 * int(info.read_text().partition("MemAvailable:")[2].split()[0])


def step_bytes(model, cache, filled):
    """Return the bytes that a decode step of this rank reads: all weights but the embedding table, and of the cache
    `filled` slots, or a window of them."""
    c = model.config
    slots = [min(filled, c.sliding_window) if i in c.window_layers else filled for i in range(c.n_layers)]
    weights = sum(
        p.numel() * p.element_size()
        for n, p in model.named_parameters(remove_duplicate=False)
        if "tok_embeddings." not in n
    )
    layers = zip(cache, itertools.cycle(slots))  # noqa: B905, of several lanes one after another
    return weights + sum(t[:, :, 0].numel() * t.element_size() * n for layer, n in layers for t in layer)


def peak_bytes(device):
    """Return the peak memory of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss would count the parent's memory at the time of the fork
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])


def processor():
    """Return this machine's number of cores, and the name that its CPU gives itself."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    amx = " with AMX" * (" amx_bf16" in text)
    return f"{len(names)} cores of {names[0]}{amx}" if names else platform.processor()


def environment(world):
    """Return what a result depends on and no flag says. settings: the environment's variables for NCCL and gloo."""
    device = world.device
    return {
        "tp": world.tp_size, "shares": world.shares, "simulated": world.simulated, "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0],
        "torch": torch.__version__, "commit": git_commit(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
    }  # fmt: skip


def git_commit():
    """Return the commit of this code, with "+" if it was edited since, or None outside a git checkout."""
    here = {"cwd": Path(__file__).parent.parent, "stderr": subprocess.DEVNULL, "text": True}
    try:
        edited = subprocess.check_output(["git", "status", "--porcelain", "-uno", "*.py", "*.cpp", "*.sh"], **here)
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], **here).strip() + "+" * bool(edited)
    except (OSError, subprocess.CalledProcessError):
        return None


def generation(runner, draft, world, prompts, done, chunk):
    """Return what a generation took: what generate.generate returned, rates, and the share of the bandwidth.

    On every rank: all of them measure the bandwidth at once. draft: what proposed tokens, or None.
    chunk: as for generate.generate.
    """
    peaks = world.gather(peak_bytes(world.device))  # before the bandwidth is measured, which takes memory
    longest, passes = max(map(len, prompts)), done.passes
    filled = longest + done.steps / 2  # slots of the mean pass
    read = step_bytes(runner.model, runner.cache, filled)
    if draft and draft.runner and passes:
        read += draft.drafted / passes * step_bytes(draft.runner.model, draft.runner.cache, filled)
    bandwidth = read_bandwidth(world.device, world, min(max(int(read), 2**28), 2**30))
    tpot = done.decode_s / (done.steps - 1) if done.steps > 1 else None
    later = sum(max(len(row) - 1, 0) for row in done.rows)  # tokens after each row's first; ended rows give no more
    accepted = draft and [draft.accepted[n] for n in range(max(draft.accepted, default=0) + 1)]
    return {
        "batch": len(prompts), "prompt_tokens": longest, "new_tokens": done.steps, "prefill_s": done.prefill_s,
        "decode_s": done.decode_s, "ttft_ms": 1e3 * done.prefill_s, "tpot_ms": tpot and 1e3 * tpot,
        "tok_s": tpot and later / done.decode_s, "tok_s_user": tpot and 1 / tpot, "step_bytes": int(read),
        "bandwidth": bandwidth, "mbu": tpot and read * passes / done.decode_s / bandwidth, "passes": passes,
        "drafted": draft and draft.drafted, "accepted": accepted,
        "tokens": None if world.simulated else done.rows, "peak_bytes": peaks,
        "prefill_parts": runner.parts_of(len(prompts), min(longest, max(1, chunk // len(prompts)))),
    }  # fmt: skip


def result(name, model, link, world, found):
    """Return the JSON line of generate.py: all that a run is and found. link: None for the machine's own."""
    c = model.config
    return {
        "model": name, "n_layers": c.n_layers, "wiring": c.wiring,
        "dtype": dtype_name(model.dtype), "quant": c.quant,
        "link": link and dataclasses.asdict(link), **environment(world), **found,
    }  # fmt: skip


def summary(r):
    """Return the result in a few lines for people."""
    head = "PREDICTED times of one rank alone: " if r["simulated"] else ""
    head += f"{r['model']}, {r['n_layers']} layers, {r['wiring']}, tp {r['tp']}"
    head += f", link {r['link']['name']}" if r["link"] else ""
    head += f", batch {r['batch']}, {r['quant'] or r['dtype']}, {r['device']}"
    head += f", shares {','.join(map(str, r['shares']))}" * (len({*r["shares"]}) > 1)
    head += f", {r['comm']} sums" * (r["comm"] != "auto")
    head += f", prefill in {r['prefill_parts']} parts" * (r["prefill_parts"] > 1)
    times = f"load {r['load_s']:.2f} s, compile {r['compile_s']:.2f} s, first token {r['ttft_ms']:.1f} ms"
    if r["tpot_ms"]:
        times += f", then {r['tpot_ms']:.2f} ms per token: {r['tok_s']:.1f} tok/s"
        times += f" ({r['tok_s_user']:.1f} for each of {r['batch']} users)" * (r["batch"] > 1)
    memory = f"{r['step_bytes'] / 1e6:.1f} MB read per {'pass' if r.get('draft') else 'step'}"
    if bandwidth_share(r):
        memory += f", {100 * r['mbu']:.0f} % of what {r['bandwidth'] / 1e9:.1f} GB/s allow"
    memory += f", peak memory {max(r['peak_bytes']) / 1e9:.2f} GB per rank"
    return f"{head}\n{times}\n{memory}"
