"""The folder of a run. Until its output is complete, it has settings, tokens, log, newest state and best weights."""

import json
import os
import shutil

from convert_hf_checkpoint import check_lanes
from extras.training.data import Windows, tokenize
from ladder import outputs
from ladder.architectures.mixture import Mixture
from ladder.checkpoints import checkpoint, writing
from ladder.checkpoints.compare import check_vocabulary
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.text.tokenizer import load_tokenizer
from model import Wiring, find_wiring

MACHINE_FLAGS = "out", "device", "micro_batch", "recompute", "compile"  # they may change when a run is resumed


def read_configs(args):
    """Return (the Config to train, the teacher's or None), and complete args.seq_len, args.distill and args.lr."""
    own = writing.read_original(args.checkpoint)
    args.seq_len = args.seq_len or min(2048, own.max_seq_len)
    if args.seq_len > own.max_seq_len:
        raise InputError(f"--seq-len {args.seq_len} is longer than the context of {own.max_seq_len}")
    config = flags.with_wiring(own, args)
    if not (args.plain or args.fresh) and own.layer_wirings != config.layer_wirings:
        args.distill = args.distill or args.checkpoint
    teacher = args.distill and writing.read_original(args.distill)
    args.lr = args.lr or (3e-3 if args.fresh else 5e-5 if teacher else 5e-6)
    for each in filter(None, (config, teacher)):
        has_own_model = type(each.named_wiring).new_model is not Wiring.new_model
        if has_own_model or each.parsed.name == "upper-bound":
            raise InputError(f"a model in the wiring {each.wiring} cannot be trained")
        if not each.rewindable:
            names = " and ".join(own.name for own in each.architecture if not own.rewindable)
            raise InputError(f"{names} attention cannot be trained: a state would go on to the next text of a window")
        if args.fresh and getattr(each.find(Mixture), "router", None) == "sigmoid":
            raise InputError("--fresh trains no router of sigmoid scores: no gradient balances its expert_bias")
        check_lanes(each)
    if not (args.text or args.own_text):
        raise InputError("there is nothing to train on: give --text FILE, --own-text N or both")
    if args.own_text and not teacher:
        raise InputError("--own-text takes a teacher, which writes it: a --wiring that changes, or --distill")
    if args.train != "all" or args.align_steps:
        flag = f"--train {args.train}" if args.train != "all" else "--align-steps"
        if (
            args.fresh
            or args.plain
            or not args.distill
            or os.path.realpath(args.distill) != os.path.realpath(args.checkpoint)
        ):
            raise InputError(f"{flag} takes a --wiring that changes and the checkpoint itself as the teacher")
        wirings = *own.layer_wirings, *config.layer_wirings
        sums_per_layer = {len(each.block_sublayers) * each.layers_per_input for each in wirings}
        if len(sums_per_layer) > 1 or any(
            each.named_wiring.layers_per_input > 1
            or each.named_wiring.fixed_shards
            or each.named_wiring.left_out() != find_wiring("standard")
            for each in (own, config)  # farskip's sublayers return pairs, and differ from standard's in all layers
        ):
            raise InputError(
                f"{flag} takes a wiring with the sublayers of {own.wiring}, such as ladder, not {config.wiring}"
            )
        if args.align_steps >= args.steps:
            raise InputError(f"--align-steps {args.align_steps} must be less than --steps {args.steps}")
    if teacher:
        check_vocabulary(config, args.checkpoint, teacher, args.distill, f"--distill {args.distill}")
    return config, teacher


def remove_finished(run, out):
    """Remove the folder of a run that was killed between its last two acts: its best weights have become `out`."""
    if out.exists() and any(run.glob("state-*")) and not any(run.glob("best-*")):
        shutil.rmtree(run)


def prepare(run, args):
    """Make the folder of a run, with its tokenizer and tokens. If it has a run already, check that its settings agree.

    Raises InputError, and then leaves no new folder.
    """
    path = run / "settings.json"
    if os.path.realpath(args.valid) in map(os.path.realpath, args.text):
        raise InputError(f"--valid {args.valid} is a file of --text: validate on text that is not trained on")
    settings = {f"--{name.replace('_', '-')}": v for name, v in vars(args).items() if name not in MACHINE_FLAGS}
    has_weights = any(run.glob("best-*/config.json"))
    if has_weights or (run / "own.tokens").exists():
        before = json.loads(path.read_text())
        if unlike := [name for name, now in settings.items() if before.get(name) != now]:
            was = f"{run} holds a run with {unlike[0]} {before.get(unlike[0])}, not {settings[unlike[0]]}"
            raise InputError(f"{was}: give that to resume it, or another --out")
        for state in [] if has_weights else run.glob("state-*"):  # killed after its output was complete
            shutil.rmtree(state)
        return
    if path.exists():  # killed before its first step, or after its output was complete
        shutil.rmtree(run)
    with outputs.new_folder(run) as folder:
        config = checkpoint.read_config(args.checkpoint)
        writing.copy_tokenizer(args.checkpoint, folder)
        tokenizer = load_tokenizer(folder, config.vocab_size)
        if tokenizer is None:
            raise InputError(f"{args.checkpoint} has no tokenizer: convert it with --tokenizer FILE")
        # of --own-text, own.tokens follows
        for name, paths in ("train", args.text), ("valid", [args.valid]):
            tokenize(paths, tokenizer, [*config.eos_ids[:1]], folder / f"{name}.tokens")
        if args.own_text:
            Windows([folder / "valid.tokens"], args.seq_len, "--valid", at_most=args.valid_tokens)
        else:
            windows(folder, args)
        writing.write_json(folder / path.name, settings)


def windows(run, args):
    """Return the Windows to train on and those to validate on."""
    files = [run / "train.tokens", *[run / "own.tokens"] * bool(args.own_text)]
    train = Windows(files, args.seq_len, "--text", args.seed)
    return train, Windows([run / "valid.tokens"], args.seq_len, "--valid", at_most=args.valid_tokens)


def read_log(run, last):
    """Return the lines of the log up to step `last`, from which a run is resumed: it writes later lines again."""
    path = run / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["step"] <= last]


def finish(run, best, out, temporary):
    """Publish the weights of step `best` with log and settings as `out`, and move the run away, into `temporary`."""
    for name in "log.jsonl", "settings.json":
        shutil.copyfile(run / name, run / f"best-{best}" / name)
    outputs.publish(run / f"best-{best}", out)
    os.replace(run, temporary / "run")
