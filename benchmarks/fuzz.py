"""Files and command lines that are not what they should be: whatever stands in them, reading ends well or in one line.

python -m benchmarks.fuzz --json benchmarks/results/fuzz.jsonl          # 10,000 cases of each target
python -m benchmarks.fuzz --target templates --cases 500 --seed 7

A target is a good file (or command line) and what the project does with it. A case is that with some changes, drawn by
the seed and the case's number. It is clean when it works, or ends in an InputError of one line of at most 500 printable
characters, within SECONDS of the processor and MEMORY beyond what the process has. The files of the case that is
running lie in --folder: there they are after a crash, too.
"""

import base64
import contextlib
import copy
import dataclasses
import faulthandler
import io
import json
import random
import re
import resource
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

import adapt
import convert_hf_checkpoint
import eval as evaluation
import generate
import quantize
import tp
from benchmarks import lines
from formats import checkpoint
from formats.huggingface import FAMILIES, ROPE_KINDS, config_from_hf
from formats.sources import Llama2cWeights, PickledWeights
from formats.tokenizer import load_tokenizer, read_tokenizer
from measure import advise, plot, report
from model import Config, InputError, Transformer, rope_frequencies
from runtime import cli, launch, terminal, writing
from training import runs

ROOT = Path(__file__).parent.parent
DEMO, RESULTS = ROOT / "demo", ROOT / "benchmarks" / "results"
SECONDS, HANGS, MEMORY = 2, 20, 500 * 2**20  # of the processor; of the clock; bytes
TEXT = "Once upon a time\n\tthere were 12 (twelve) little dogs. Zwölf? 十二! \x00 \ufffd <|eot|>"
TINY = Config(2, 4, 2, 8, 32, 48, 60, 64, bos_id=1, eos_ids=(2,))

# ---------------------------------------------------------------------------------------------------------------------
# Changes: change(draw, data) -> data

NUMBERS = [0, -1, 1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**64, 10**30, -(2**63)]
NAMES = ["", ".", "..", "../x", "/etc/passwd", "/proc/self/mem", "/dev/zero"]
NAMES += ["a" * 5000, "\0", "\x1b[31m", "\ud800", "x\ny"]
VALUES = [None, True, False, 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), *NUMBERS, *NAMES, [], {}, [[]], [{}]]
VALUES += [{"": None}, [1, 2, 3], ["a"] * 3, [None] * 100, {"a": {"b": []}}, list(range(300)), "x" * 10**5]
UNWRITTEN = [b"[" * 10**5, b'{"a":' * 10**4, b"[" * 990 + b"]" * 990, b"[" * 300 + b"]" * 300, b"9" * 5000, b"1e999"]


def changed_bytes(draw, data):
    """Some bytes changed, taken out, put in, doubled, or cut off."""
    data = bytearray(data)
    in_place = draw.random() < 0.5  # otherwise a format with lengths in it is not read any further
    for _ in range(draw.choice([1, 1, 1, 2, 4, 16])):
        at, n = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8, draw.randrange(1, 200)])
        number = draw.choice(NUMBERS).to_bytes(16, "little", signed=True)[:8]
        text = bytes(draw.choices(range(32, 127), k=n))
        piece = draw.choice([b"", draw.randbytes(n), bytes(n), b"\xff" * n, data[at : at + n] * 2, number, text, text])
        piece = piece[: len(data) - at] if in_place else piece
        data[at : at + (len(piece) if in_place else draw.choice([0, n, len(piece)]))] = piece
    if draw.random() < 0.1:
        del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


def changed_value(draw, value):
    """A value of JSON with one part changed, taken out, doubled or called otherwise."""
    value = copy.deepcopy(value)
    part = value
    while isinstance(part, dict | list) and part:
        key = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if not isinstance(part[key], dict | list) or not part[key] or draw.random() < 0.3:
            break
        part = part[key]
    else:
        return draw.choice(VALUES)
    how = draw.randrange(8)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(part, dict):
        part[draw.choice([*NAMES, *part])] = part.pop(key)
    elif how == 2 and isinstance(part, list):
        part.insert(key, copy.deepcopy(part[key]))
    elif how == 3 and isinstance(part[key], int | float):
        part[key] = part[key] * draw.choice([-1, 2, 3, 1000, 10**9]) + draw.choice([0, 1, -1])
    else:
        part[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def changed_json(draw, data):
    """JSON text with some of its values changed, or its bytes."""
    if draw.random() < 0.15:
        return changed_bytes(draw, data)
    value = json.loads(data)
    for _ in range(draw.choice([1, 1, 2, 3])):
        value = changed_value(draw, value)
    data = as_json(value)
    if draw.random() < 0.1:  # what json.dumps does not write
        at = draw.choice([m.start() for m in re.finditer(rb"\d|null|\"", data)] or [0])
        data = data[:at] + draw.choice(UNWRITTEN) + data[at + 1 :]
    return data


def changed_lines(change):
    """The changes of one line among others."""

    def changed(draw, data):
        good = data.splitlines(keepends=True)
        found = good[:]
        for _ in range(draw.choice([1, 1, 2])):
            i, how = draw.randrange(len(good) - 1), draw.randrange(6)
            whole = [[], [good[i]] * 2, [b"\n", good[i]]]
            found[i : i + 1] = whole[how] if how < 3 else [b" ".join(change(draw, good[i]).splitlines()) + b"\n"]
        return b"".join(found)

    return changed


def changed_safetensors(draw, data):
    """A safetensors file with its header changed (and a length that fits it, or does not), or its bytes."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    how = draw.randrange(4)
    if how == 0:
        return changed_bytes(draw, data)
    if how == 1:
        value = json.loads(header)
        types = "U16 I16 I32 I64 U32 U64 BOOL F8_E4M3 F8_E5M2 F8_E8M0 F4 F6_E2M3 C64 F64 F16 BF16 I8 U8"
        value[draw.choice([name for name in value if name != "__metadata__"])]["dtype"] = draw.choice(types.split())
        header = as_json(value)
    else:
        header = changed_json(draw, header)
    length = draw.choice([len(header)] * 9 + NUMBERS) % 2**64
    return length.to_bytes(8, "little") + header + body


def changed_pickle(draw, data):
    """A file of torch.save with its pickle changed, and packed again, or its bytes."""
    if draw.random() < 0.3:
        return changed_bytes(draw, data)
    packed, before = io.BytesIO(), zipfile.ZipFile(io.BytesIO(data))
    how = draw.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(packed, "w", how) as after:
        for name in before.namelist():
            part = before.read(name)
            if name.endswith("data.pkl"):
                part = changed_bytes(draw, part)
                if draw.random() < 0.3:
                    calls = [
                        b"torch\nzeros",
                        b"builtins\nbytearray",
                        b"os\nsystem",
                        b"torch._utils\n_rebuild_tensor_v2",
                    ]
                    part = re.sub(rb"(?<=c)\w[\w.]*\n\w+", draw.choice(calls), part, count=draw.choice([0, 1]))
            after.writestr(name, part)
    return packed.getvalue()


def changed_header(draw, data):
    """As bytes, above all those of a llama2.c header of 28."""
    if draw.random() < 0.2:
        return changed_bytes(draw, data)
    at = 4 * draw.randrange(7)
    number = draw.choice([*NUMBERS, draw.randrange(-40, 40)]) % 2**32
    return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]


BLOCKS = """
{% for m in messages %}X{% endfor %}
{% for i in range(N) %}X{% endfor %}
{% for i in messages recursive %}X{{ loop([1]) }}{% endfor %}
{% if messages %}X{% endif %}
{% set ns = namespace(a='ab') %}X{{ ns.a }}
{% generation %}X{% endgeneration %}
{% macro f(a) %}X{% endmacro %}{{ f(f) }}
{% filter upper %}X{% endfilter %}
{% set a %}X{% endset %}{{ a * N }}
{% call f() %}X{% endcall %}
{% block a %}X{% endblock %}
{% raw %}X{% endraw %}
{% for a in X %}
{% include 'X' %}
{% import 'X' as y %}
{% extends 'X' %}
{% break %}
X{# X #}
{{ Y }}
{{ Y }}
{{ Y }}
""".strip().splitlines()
EXPRESSIONS = """
m.content
messages[0]['role']
messages|tojson(indent=N)
messages|sum
messages|batch(N)|list
messages|map(attribute='__class__')|list
messages.append(1)
m|attr('__init__')
''.__class__.__mro__
joiner.__init__.__globals__
raise_exception('\x1b[31m')
strftime_now('%Y' * N)
lipsum(n=N)
'a' * N
N ** N
-N // 0
N|round(N)
[N] * N
range(N)|list
'a'|center(N)
'a'.join(range(N))
('a' * N)|wordwrap(1)
'%Nd' % 1
dict(a=N)|pprint
ns.a ~ ns.a
cycler(1, 2)
self
bos_token
Y|Y
""".strip().splitlines()


def changed_template(draw, data):
    """A template made of parts that are well or ill meant, or a good one with its bytes changed."""
    if draw.random() < 0.3:
        return changed_bytes(draw, data)
    text = "X"
    for _ in range(draw.randrange(1, 12)):
        text = text.replace("X", draw.choice(BLOCKS) + draw.choice(["", "X"]), 1)
        text = text.replace("Y", draw.choice(EXPRESSIONS), 1)
    numbers = [0, 1, 3, 20] + [99999, 10**9, 10**10] * (draw.random() < 0.02)  # few, that may take the whole second
    return re.sub(r"\bN\b|(?<=%)N", lambda _: str(draw.choice(numbers)), text).encode()


COMMANDS = """
generate --checkpoint DEMO --prompt Once --max-new-tokens 5 --temperature 0 --top-k 3 --top-p 0.9 --seed 1 --layers 2
generate --model 1b --random-weights --n-layers 2 --quant int4 --group-size 64 --prompt-length 8 --batch 2
generate --checkpoint DEMO --prompt-ids 1,2,3 --wiring desync --desync-period 2 --link pcie --simulate-tp 4
generate --checkpoint DEMO --prompt-ids 1,2 --link-latency-us 10 --link-gbps 5 --wiring hybrid --layers 1,2
adapt --ladder --text STORY --valid STORY --out /no/x --n-layers 2 --dim 32 --n-heads 4 --n-kv-heads 2 --vocab-size 300
adapt --checkpoint DEMO --ladder-layers 3 --text STORY --valid STORY --out /no/x --lr 1e-3 --batch 2 --seq-len 16
convert DEMO --to-hf /no/x --shard-gb 2 --dtype float32 --wiring ladder
convert DEMO/model.safetensors --out /no/x --made-for-tp 2 --tokenizer DEMO/tokenizer.model
quantize --checkpoint DEMO --mode int4 --group-size 64 --keep lm_head --iterations 2 --out /no/x
eval --checkpoint DEMO --text STORY --window 16 --stride 4 --max-tokens 50 --batch 2 --wiring hybrid --layers 2
advise --model 8b --tp 2 --gpu h100 --link pcie --batch 4 --context 100 --layers 2 --share 0.5
plot BENCH
""".strip().splitlines()
WORDS = ["9" * 30, "9" * 5000, "-" + "9" * 30, "1," * 1000, "1," + "9" * 30, "auto:" + "9" * 30, "a" * 300, "a" * 5000]
WORDS += ["/" * 5000, "/dev/zero", "/proc/self/mem", "/dev/null", "/etc", ".", "", " 1 ", "\x1b[31m", "\udcff", "\n"]
PLAIN = (
    "-- -1 0 1e400 1e-400 1e30 nan inf 2147483647 2147483648 1,2,3 , 1,,2 é ٣ 1_000 0x10 True none auto:3 {} %s 1 2 3 1"
)
WORDS += PLAIN.split()


def changed_command(draw, data):
    """One of COMMANDS, as JSON, with words changed, taken out, or put in."""
    words = draw.choice(COMMANDS).split()  # before paths stand in them, which may have spaces
    for name, path in {"DEMO": DEMO, "STORY": DEMO / "story.txt", "BENCH": RESULTS / "bench-demo.jsonl"}.items():
        words = [word.replace(name, str(path)) for word in words]
    for _ in range(draw.choice([1, 1, 2, 3])):
        i, word, how = draw.randrange(1, len(words)), draw.choice(WORDS), draw.randrange(6)
        flag = words[i].startswith("--")
        if how == 0 and len(words) > 2:
            del words[i]
        elif how == 1:
            words.insert(i, word)
        elif how == 2 and flag:
            words[i : i + 2] = [f"{words[i]}={word}"]
        elif how == 3:
            words.append(draw.choice(words[1:]))
        else:
            words[min(i + flag, len(words) - 1)] = word
    return as_json(words)


THEIRS = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_size": 32, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 3],
    "attention_bias": False, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0], "use_sliding_window": True,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip


def changed_their_config(draw, data):
    """As JSON, of one of the families and kinds of rotary embeddings."""
    value = json.loads(data)
    value["model_type"] = draw.choice(list(FAMILIES))
    value["rope_scaling"]["rope_type"] = draw.choice(list(ROPE_KINDS))
    if draw.random() < 0.3:
        value["ladder_layers"] = draw.choice([0, 1, 2, [0], [0, 1]])
    return changed_json(draw, as_json(value))


# ---------------------------------------------------------------------------------------------------------------------
# Targets


@dataclasses.dataclass
class Target:
    """What to change and what to run.

    files: {name: bytes} of a folder, of which the first is changed. run(folder): the use that the project makes of it;
    a text that it returns is one that the project prints.
    """

    name: str
    files: dict
    change: Callable
    run: Callable


def use_config(folder):
    config = checkpoint.read_config(folder)
    checkpoint.shapes(config)
    rope_frequencies(config)
    _ = config.stale_layers, config.function


def use_their_config(folder):
    config = config_from_hf(folder / "config.json")
    checkpoint.shapes(config)
    rope_frequencies(config)


def use_weights(folder):
    tp.load_shard(TINY, checkpoint.Weights(folder), torch.float32, torch.device("cpu"), 0, 1)


def use_pickle(folder):
    weights, shapes = PickledWeights(folder), checkpoint.shapes(TINY)
    for name in weights.names():
        if weights.read(name).shape == shapes.get(name):
            weights.read(name).to(torch.float32)


def use_llama2c(folder):
    weights = Llama2cWeights(folder / "model.bin")
    for name in weights.names():
        weights.read(name)


def use_tokenizer(name):
    def use(folder):
        tokenizer = read_tokenizer(folder / name)
        tokenizer.decode(tokenizer.encode(TEXT) + tokenizer.encode_markup(TEXT))

    return use


def use_settings(folder):
    tokenizer = load_tokenizer(folder, 1024)
    tokenizer.decode(tokenizer.encode_markup(TEXT))
    if tokenizer.template is not None:
        tokenizer.chat([{"role": "user", "content": TEXT}])


def use_prompts(folder):
    args = generate.parse(["--checkpoint", str(DEMO), "--prompts-file", str(folder / "prompts.txt")])
    config = checkpoint.read_config(DEMO)
    terminal.fit(20, terminal.read_prompts(args, config, load_tokenizer(DEMO)), config.max_seq_len)


def use_command(folder):
    """What a script does of its command line before it loads weights or writes anything."""
    script, *argv = json.loads((folder / "command").read_bytes())
    if script == "generate":
        args = generate.parse(argv)
        config, tokenizer = generate.describe(args, launch.World(0, 1, torch.device("cpu")))
        if not args.interactive:
            terminal.fit(args.max_new_tokens, terminal.read_prompts(args, config, tokenizer), config.max_seq_len)
    elif script == "adapt":
        config, *_ = runs.describe(adapt.parse(argv))
        checkpoint.shapes(config)
    elif script == "convert":
        args = convert_hf_checkpoint.parse(argv)
        if args.to_hf:
            cli.with_wiring(checkpoint.read_config(args.source), args)
        else:
            convert_hf_checkpoint.open_source(args.source)
    elif script == "quantize":
        checkpoint.read_config(quantize.parse(argv).checkpoint)
    elif script == "eval":
        args = evaluation.parse(argv)
        cli.with_wiring(checkpoint.read_config(args.checkpoint), args)
    elif script == "advise":
        advise.parse(argv)
    else:
        plot.main(argv)


def targets(folder):
    """{name: Target}; their good files are made in a folder."""
    torch.manual_seed(0)
    state = {name: torch.rand(weight.shape) for name, weight in Transformer(TINY).state_dict().items()}
    checkpoint.write_model(folder, TINY, state, torch.float32)
    ours = (folder / "model.safetensors").read_bytes()
    yarn = {"factor": 2.0, "beta_fast": 2.0, "beta_slow": 1.0, "attention_factor": 1.0}
    yarn["original_max_position_embeddings"] = 32
    full = dataclasses.replace(TINY, rope_scaling=yarn, wiring="hybrid", ladder_layers=(1,), nope_layers=(0,))
    part = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, part)}
    torch.save(state, folder / "pytorch_model.bin")
    pickled = (folder / "pytorch_model.bin").read_bytes()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    old = (folder / "pytorch_model.bin").read_bytes()
    pieces = [bytes([i]) for i in range(256)] + [b"th", b"the", b" a", b"ab"]
    ranks = b"".join(base64.b64encode(piece) + f" {i}\n".encode() for i, piece in enumerate(pieces))
    template = "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    settings = {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "legacy": False,
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "1000": {"content": "<|eot|>"}},
        "chat_template": template,
    }  # fmt: skip
    model, tensors, pickles = "tokenizer.model", "model.safetensors", "pytorch_model.bin"
    beside = {model: (DEMO / model).read_bytes()}
    found = [
        Target("our config", {"config.json": as_json(dataclasses.asdict(full))}, changed_json, use_config),
        Target("Hugging Face config", {"config.json": as_json(THEIRS)}, changed_their_config, use_their_config),
        Target("index", {f"{tensors}.index.json": as_json(index), part: ours}, changed_json, use_weights),
        Target("safetensors", {tensors: ours}, changed_safetensors, use_weights),
        Target("pickle", {pickles: pickled}, changed_pickle, use_pickle),
        Target("old pickle", {pickles: old}, changed_bytes, use_pickle),
        Target("llama2.c", {"model.bin": llama2c()}, changed_header, use_llama2c),
        Target("SentencePiece", beside, changed_bytes, use_tokenizer(model)),
        Target("tokenizer.json", {"tokenizer.json": json_tokenizer()}, changed_json, use_tokenizer("tokenizer.json")),
        Target("tiktoken ranks", {model: ranks}, changed_lines(changed_bytes), use_tokenizer(model)),
        Target("tokenizer settings", {"tokenizer_config.json": as_json(settings)} | beside, changed_json, use_settings),
        Target("templates", {"chat_template.jinja": template.encode()} | beside, changed_template, use_settings),
        Target("prompts", {"prompts.txt": (DEMO / "story.txt").read_bytes()}, changed_bytes, use_prompts),
        Target("command lines", {"command": as_json(["plot"])}, changed_command, use_command),
    ]
    return {target.name: target for target in found}


def as_json(value):
    return json.dumps(value).encode()


def llama2c():
    """A small file of llama2.c."""
    D, hidden, L, N, K, V, context = 16, 24, 2, 2, 1, 20, 8
    H = D // N
    numbers = V * D + L * (2 * D + D * (2 * N * H + 2 * K * H) + 3 * hidden * D) + D + context * H
    return b"".join(i.to_bytes(4, "little") for i in (D, hidden, L, N, K, V, context)) + bytes(4 * numbers)


def json_tokenizer():
    """A small tokenizer.json with most of the parts that there are."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("ß", "ss")])
    split = pre_tokenizers.Split(Regex(r"\w+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"], show_progress=False)
    tokenizer.train_from_iterator([(DEMO / "story.txt").read_text()], trainer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken("<|eot|>", normalized=False)])
    return tokenizer.to_str().encode()


# ---------------------------------------------------------------------------------------------------------------------
# Cases

WORKS, REFUSED = "works", "refused in one line"


class TooLong(BaseException):
    """No Exception, so that nothing takes it for an error of a file."""


def outcome(run, folder):
    """WORKS, REFUSED, or what is not clean in a run, in words."""

    def too_long(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    start = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            said, end = run(folder) or "", WORKS
    except InputError as e:
        said, end = str(e), REFUSED
        if not said.isprintable() or len(said) > 500:
            return f"a message of {len(said)} characters, {'' if said.isprintable() else 'not '}printable"
    except TooLong:
        return f"it takes longer than {HANGS} s"
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return f"{type(e).__name__}: {e}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if not all(line.isprintable() for line in said.splitlines()):
        return "it prints control characters"
    took = time.process_time() - start
    return f"it takes {took:.1f} s of the processor" if took > SECONDS else end


@contextlib.contextmanager
def limited():
    """MEMORY more, and none beyond it, for this process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def fuzz(target, cases, seed, folder):
    """[how each of so many cases ended], of cases whose files are written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in target.files.items():
        (folder / name).write_bytes(data)
    changed, good = next(iter(target.files.items()))
    if target.change is not changed_command and (end := outcome(target.run, folder)) != WORKS:
        raise InputError(f"{target.name}: the good file is not: {end}")
    ends = []
    with limited():
        for case in range(cases):
            (folder / changed).write_bytes(target.change(random.Random(f"{target.name} {seed} {case}"), good))
            ends.append(outcome(target.run, folder))
    return ends


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("--target", metavar="NAME", help="one of them, e.g. templates; without it all")
    p.add_argument("--cases", type=cli.count, default=10_000, metavar="N", help="of each target")
    p.add_argument("--seed", type=cli.number(int, 0), default=0, metavar="S", help="other cases, e.g. 1")
    p.add_argument("--folder", metavar="DIR", help="for the files of the cases, e.g. /tmp/fuzz")
    cli.add_json_flag(p, "a line for each target")
    args = p.parse_args(argv)
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        (folder / "good").mkdir(parents=True, exist_ok=True)
        known = targets(folder / "good")
        if args.target not in (None, *known):
            raise InputError(f"unknown --target {args.target!r}; known: {', '.join(known)}")
        for name in [args.target] if args.target else known:
            start = time.perf_counter()
            ends = fuzz(known[name], args.cases, args.seed, folder / name)
            seconds = time.perf_counter() - start
            unclean = [(case, end) for case, end in enumerate(ends) if end not in (WORKS, REFUSED)]
            works, refused = ends.count(WORKS), ends.count(REFUSED)
            counts = f"{works} work, {refused} are refused, {len(unclean)} are not clean"
            print(f"{name}: {counts}, {seconds:.0f} s", flush=True)
            for case, problem in unclean[:20]:
                print(f"    {case}: {problem!r}")
            if args.json:
                about = {"target": name, "cases": args.cases, "seed": args.seed, "seconds": seconds}
                found = {"works": works, "refused": refused, "unclean": len(unclean), "examples": unclean[:20]}
                alone = report.environment(launch.World(0, 1, torch.device("cpu")))
                writing.append_line(args.json, {"command": lines.command("fuzz", argv), **about, **found, **alone})


if __name__ == "__main__":
    launch.run(main)
