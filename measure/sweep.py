"""Run the commands that bench.sh lists, keep their results, and draw them.

Each line of the input is the number of a repeat, a tab and a command. The command is run with --json FILE behind it;
its result becomes a line of --out, with the command and the repeat. What is there already is not run again. A command
that ran out of memory gets a line that says so; one that failed otherwise gets none. Neither is repeated, the output of
both goes to the end of OUT.log, and the rest goes on.

Of several nodes each runs this on a file of its own: node 0 has the results, the others note that they were there.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkpoint
import plot
import tp
from model import InputError

NO_MEMORY = re.compile(
    r"out ?of ?memory|can('t|not) allocate memory|MemoryError|bad_alloc|ALLOC_FAILED|Signal 9 ", re.IGNORECASE
)


def about(command):
    """What the result of a command of generate.py would say of itself, as far as the command tells."""
    words = shlex.split(command)

    def flag(name, default=None):
        return next((b for a, b in zip(words, words[1:] + [""], strict=True) if a == name), default)

    def launched(name):
        return int(next((w.partition("=")[2] for w in words if w.startswith(f"--{name}=")), 1))

    wiring, link = flag("--wiring"), flag("--link")
    fields = {
        "wiring": wiring, "ladder_layers": flag("--ladder-layers"), "desync_period": flag("--desync-period"),
        "batch": int(flag("--batch")), "prompt_tokens": int(flag("--prompt-length")),
        "new_tokens": int(flag("--max-new-tokens")), "device": flag("--device"), "link": link and {"name": link},
        "simulated": "--simulate-tp" in words,
        "tp": int(flag("--simulate-tp", launched("nnodes") * launched("nproc_per_node"))),
        "settings": {"NCCL_P2P_DISABLE": "1"} if "NCCL_P2P_DISABLE=1" in words else {},
    }  # fmt: skip
    if flag("--checkpoint"):
        return fields | {"model": Path(flag("--checkpoint")).resolve().name}
    layers = {"n_layers": int(flag("--n-layers"))} if "--n-layers" in words else {}
    return fields | {"model": flag("--model"), "quant": flag("--quant"), **layers}


def read(out):
    """The lines that there are of an earlier sweep, or of this one."""
    return plot.read(out) if Path(out).exists() and Path(out).stat().st_size else []


def port(i):
    """MASTER_PORT of the i-th command: its own, so that nodes which are not at the same one do not meet."""
    return str(int(os.environ.get("MASTER_PORT", 29500)) + i)


def run(command, environment):
    """(exit code, what it printed, its result or None) of a command; a signal to this process ends it too."""
    with tempfile.TemporaryDirectory() as folder:
        part, log = Path(folder) / "result", Path(folder) / "log"
        with open(log, "wb") as f:
            full = f"{command} --json {shlex.quote(str(part))}"
            process = subprocess.Popen(
                ["bash", "-c", full], env=environment, stdin=subprocess.DEVNULL, stdout=f, stderr=f
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # after a Ctrl-C it has begun to end already
                process.wait()
                raise
        result = json.loads(part.read_text()) if part.exists() else None
        return code, log.read_text(errors="replace"), result


def reason(code, log):
    """The line of a failed command's output that says why."""
    lines = [line for line in log.splitlines() if line.strip()]
    ours, others = ([line for line in lines if re.search(how, line)] for how in (r"^[a-z_]+\.py: ", "Error: "))
    return (ours + others + lines[-1:] + [f"it ended with code {code}"])[0]


def sweep(plan, out, node):
    """Run what of the plan [(repeat, command)] the file out has no line of; returns how many commands failed."""
    lines = read(out)
    done = {(line["repeat"], line["command"]) for line in lines}
    ended = {line["command"] for line in lines if "error" in line}  # not to be repeated
    todo = [i for i, key in enumerate(plan) if key not in done and key[1] not in ended]
    if len(todo) < len(plan):
        print(f"{len(plan) - len(todo)} of {len(plan)} are in {out} already", file=sys.stderr)
    failed, start = 0, time.monotonic()
    for n, i in enumerate(todo):
        repeat, command = plan[i]
        if command in ended:
            continue
        left = f", about {(time.monotonic() - start) / n * (len(todo) - n) / 60:.0f} min left" if n else ""
        print(f"[{n + 1}/{len(todo)}{left}] {command}", file=sys.stderr, flush=True)
        code, log, result = run(command, {**os.environ, "MASTER_PORT": port(i)})
        line = {"repeat": repeat, "command": command}
        if code == 130:
            raise KeyboardInterrupt
        if code == 0 and (result or node > 0):
            line |= {k: v for k, v in (result or {}).items() if k not in ("tokens", "texts")}
            times = [text for text in log.splitlines() if "per token" in text]
            print(*times[:1], sep="\n", end="\n" * bool(times), file=sys.stderr)
        else:
            ended.add(command)
            with open(f"{out}.log", "a") as f:
                f.write(f"$ {command}\n{log}\n")
            if "--wiring" not in command or not (code == 137 or NO_MEMORY.search(log)):
                failed += 1
                print(f"failed: {reason(code, log)} (more in {out}.log)", file=sys.stderr)
                continue
            line |= {"error": "out of memory", **about(command)}
            print("out of memory", file=sys.stderr)
        checkpoint.append_line(out, line, "OUT")
    return failed


def main():
    p = tp.Parser(__doc__)
    p.add_argument("--out", metavar="FILE", help="append the results to this file")
    p.add_argument("--figures", metavar="DIR", help="write tables and figures into this folder")
    p.add_argument("--dry-run", action="store_true", help="print the commands, those of each node")
    args = p.parse_args()
    plan = [(int(repeat), command) for repeat, command in (line.rstrip("\n").split("\t") for line in sys.stdin)]
    plan = list(dict.fromkeys(plan))  # a batch size, say, may have been named twice
    node, nodes = (int(os.environ.get(name, default)) for name, default in (("NODE_RANK", 0), ("NNODES", 1)))
    if args.dry_run:
        for i, (_, command) in enumerate(plan):
            command = command.replace("$MASTER_PORT", port(i))
            print(*(command.replace("$NODE_RANK", str(n)) for n in range(nodes)), sep="\n")
        return
    if Path(args.figures).exists() and not Path(args.figures).is_dir():
        raise InputError(f"FIGURES: {args.figures} is a file: name a folder")
    for name, file in ("OUT", args.out), ("OUT", f"{args.out}.log"):
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"{name}: {Path(file).parent} cannot be made: {e.strerror}") from None
        checkpoint.check_appendable(file, name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = sweep(plan, args.out, node)
    if failed:
        print(f"{failed} of the commands failed; the next sweep tries them again", file=sys.stderr)
    if node == 0 and any("wiring" in line for line in read(args.out)):
        plot.main([args.out, "--out", args.figures])
    sys.exit(bool(failed))


if __name__ == "__main__":
    tp.run(main)
