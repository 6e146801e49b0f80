"""Good files with changes drawn by chance: each is to work, or to end in one line that says why not.

A target is a good file and the function that reads it. A case is that file with changes drawn by the
seed and the case's number. It ends clean if the function works, refuses it in an InputError, or raises a library's
error; unclean if it takes longer than SECONDS, or ends the process, after which its files still lie in the folder.
"""

import base64
import contextlib
import io
import json
import random
import signal

import torch
from helpers import ROOT

import generate
import tp
from extras.measure import results
from formats import checkpoint
from formats.huggingface import config_from_hf
from formats.sources import Llama2cWeights, PickledWeights
from formats.tokenizer import load_tokenizer
from model import Config, Transformer
from runtime import terminal
from runtime.errors import InputError

DEMO, RESULTS = ROOT / "demo", ROOT / "benchmarks" / "results"
SECONDS = 20
TEXT = "Once upon a time\n\tthere were 12 (twelve) little dogs. Zwölf? 十二! \x00 \ufffd <|eot|>"
TINY = Config(2, 4, 2, 8, 32, 48, 60, 64, bos_id=1, eos_ids=(2,))

# ---------------------------------------------------------------------------------------------------------------------
# Changes: of JSON its values, of every other file its bytes

NUMBERS = [0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64, 10**30]
NAMES = ["", "..", "../x", "/etc/passwd", "/dev/null", "a" * 5000, "\0", "\x1b[31m", "\ud800", "x\ny"]
VALUES = [None, True, 0.5, -0.5, 1e300, float("nan"), *NUMBERS, *NAMES, [], {}, [[]], {"": None}, [1, 2], ["a"]]


def changed_bytes(draw, data):
    """Some bytes, rather early ones, changed, taken out, put in, doubled, or cut off."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, n = draw.randrange(min(len(data), draw.choice([32, 2**10, 2**30])) + 1), draw.choice([1, 2, 8, 100])
        number = draw.choice(NUMBERS).to_bytes(16, "little", signed=True)[:8]
        piece = draw.choice([b"", draw.randbytes(n), bytes(n), data[at : at + n] * 2, number])
        in_place = draw.random() < 0.5  # otherwise a format with lengths in it is not read any further
        data[at : at + (len(piece) if in_place else n)] = piece
    if draw.random() < 0.1:
        del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


def changed_json(draw, data):
    """JSON text with one value changed, taken out, doubled or renamed."""
    value = part = json.loads(data)
    while True:
        key = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if not isinstance(part[key], dict | list) or not part[key] or draw.random() < 0.3:
            break
        part = part[key]
    how = draw.randrange(6)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(part, dict):
        part[draw.choice([*NAMES, *part])] = part.pop(key)
    elif how == 2 and isinstance(part, list):
        part.insert(key, part[key])
    else:
        part[key] = draw.choice(VALUES)
    return as_json(value)


def changed(draw, file, data):
    return (changed_json if file.endswith(".json") and draw.random() < 0.85 else changed_bytes)(draw, data)


def as_json(value):
    return json.dumps(value).encode()


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def load(folder):
    tp.load_shard(TINY, checkpoint.Weights(folder), torch.float32, "cpu", 0, 1)


def use_pickle(folder):
    weights = PickledWeights(folder)
    for name in weights.names():
        weights.read(name)


def use_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.decode(tokenizer.encode(TEXT) + tokenizer.encode_markup(TEXT))
    if tokenizer.template is not None:
        tokenizer.chat([{"role": "user", "content": TEXT}])


def use_prompts(folder):
    args = generate.parse(["--checkpoint", str(DEMO), "--prompt", f"@{folder / 'prompts.txt'}"])
    terminal.read_prompts(args, checkpoint.read_config(DEMO), load_tokenizer(DEMO))


def targets(folder):
    """Return {name: (a reader of a folder of files, {name: bytes} of these files, of which the first is changed)}."""
    torch.manual_seed(0)
    state = {name: torch.rand(weight.shape) for name, weight in Transformer(TINY).state_dict().items()}
    checkpoint.write_model(folder, TINY, state, torch.float32)
    ours, config = ((folder / name).read_bytes() for name in ("model.safetensors", "config.json"))
    torch.save(state, folder / "pickle")
    theirs = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 64}
    theirs |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "eos_token_id": [2, 3]}
    theirs |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "ladder_layers": [0], "bos_token_id": 1}
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "legacy": False}
    settings["added_tokens_decoder"] = {"1": {"content": "<s>"}, "1000": {"content": "<|eot|>", "special": True}}
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{% endfor %}"
    characters = {c: i for i, c in enumerate(["<unk>", *map(chr, range(32, 127)), "th"])}
    bpe = {"version": "1.0", "model": {"type": "BPE", "vocab": characters, "merges": [["t", "h"]]}}
    bpe["model"]["unk_token"] = "<unk>"
    part = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, part)}
    D, hidden, L, N, K, V, context = 16, 24, 2, 2, 1, 20, 8
    numbers = V * D + L * (2 * D + D * D * 2 + D * D // N * 2 * K + 3 * hidden * D) + D + context * D // N
    llama2c = b"".join(i.to_bytes(4, "little") for i in (D, hidden, L, N, K, V, context)) + bytes(4 * numbers)
    ranks = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
    pieces = {"tokenizer.model": (DEMO / "tokenizer.model").read_bytes()}
    bench = b"\n".join((RESULTS / "bench-demo.jsonl").read_bytes().splitlines()[:12])

    return {
        "our config": (lambda at: checkpoint.read_config(at).rope_frequencies(), {"config.json": config}),
        "Hugging Face config": (lambda at: config_from_hf(at / "config.json"), {"config.json": as_json(theirs)}),
        "index": (load, {"model.safetensors.index.json": as_json(index), part: ours}),
        "safetensors": (load, {"model.safetensors": ours}),
        "pickle": (use_pickle, {"pytorch_model.bin": (folder / "pickle").read_bytes()}),
        "llama2.c": (lambda at: Llama2cWeights(at / "model.bin"), {"model.bin": llama2c}),
        "SentencePiece": (use_tokenizer, pieces),
        "tokenizer.json": (use_tokenizer, {"tokenizer.json": as_json(bpe)}),
        "tiktoken ranks": (use_tokenizer, {"tokenizer.model": ranks}),
        "tokenizer settings": (use_tokenizer, {"tokenizer_config.json": as_json(settings)} | pieces),
        "results": (lambda at: results.report(results.read(at / "bench.jsonl")), {"bench.jsonl": bench}),
        "prompts": (use_prompts, {"prompts.txt": (DEMO / "story.txt").read_bytes()}),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Cases

WORKS, REFUSED, RAISED = "works", "is refused in one line", "ends in a library's error"


class TooLong(BaseException):
    """No Exception, so that nothing takes it for an error of a file."""


def outcome(read, folder):
    """WORKS, REFUSED, RAISED, or the unclean end in words."""

    def too_long(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read(folder)
        return WORKS
    except InputError:
        return REFUSED
    except TooLong:
        return f"takes longer than {SECONDS} s"
    except KeyboardInterrupt:
        raise
    except BaseException:  # Rust's panics are no Exceptions
        return RAISED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(name, read, files, cases, seed, folder):
    """Return [how each of so many cases ended]; their files are written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    file, good = next(iter(files.items()))
    if (end := outcome(read, folder)) != WORKS:
        raise InputError(f"{name}: the good file {end}")
    ends = []
    for case in range(cases):
        (folder / file).write_bytes(changed(random.Random(f"{name} {seed} {case}"), file, good))
        ends.append(outcome(read, folder))
    return ends
