"""What runs of generate.py take of the memory, against what measure/preflight.py says before: one run, one line.

python -m benchmarks.preflight --json FILE -- --model 1b --n-layers 2 --random-weights --prompt-length 1024
torchrun --standalone --nproc_per_node=2 -m benchmarks.preflight --json FILE -- ...

Behind -- stand the flags of generate.py. peak_bytes and base_bytes: the most that a rank's process had, at the end and
before it loaded anything. On a CPU each has the shared memory of all ranks; memory() gives a rank its own part.
"""

import generate
from benchmarks.lines import command
from measure import preflight, report
from runtime import cli, launch, terminal, writing


def main(argv=None):
    p = cli.Parser(__doc__)
    cli.add_json_flag(p, "the line")
    p.add_argument("flags", nargs="+", metavar="FLAG", help="of generate.py")
    own = p.parse_args(argv)
    args = generate.parse(own.flags)
    world = launch.join(args.device, vars(args))
    config, tokenizer = generate.describe(args, world)
    prompts, dtype = terminal.read_prompts(args, config, tokenizer), generate.chosen_dtype(args.dtype, args.checkpoint)
    request, _ = preflight.generation(args, config, dtype, prompts, args.max_new_tokens)
    need = preflight.memory(request, world.rank, world.tp_size, world.device.type)
    base = report.peak_bytes(world.device)
    model = generate.load_model(config, args.checkpoint, args.dtype, world)
    found = generate.run_batch(args, model, None, tokenizer, prompts, args.max_new_tokens, world)
    needs, bases = world.gather(need), world.gather(base)
    if world.rank > 0:
        return
    said = [sum(n.values()) + (world.tp_size - 1) * n.get("shared memory", 0) for n in needs]
    taken = [peak - base for peak, base in zip(found["peak_bytes"], bases, strict=True)]
    line = {
        "command": command("preflight", argv, world), "need": needs, "base_bytes": bases, "taken_bytes": taken,
        "said_over_taken": [s / t for s, t in zip(said, taken, strict=True)], **report.environment(world),
    }  # fmt: skip
    print(f"{said[0] / 1e6:.0f} MB said, {taken[0] / 1e6:.0f} MB taken: {line['said_over_taken'][0]:.3f}")
    if own.json:
        writing.append_line(own.json, line)


if __name__ == "__main__":
    launch.run(main)
