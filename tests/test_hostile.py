"""Files of strangers: nothing in them runs, takes all memory or hangs; each ends in a line that says what is wrong."""

import base64
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from helpers import BASE, ROOT, random_model, script, shared_data
from safetensors.torch import save_file

import convert_hf_checkpoint
import generate
from benchmarks import fuzz
from benchmarks.fuzz import THEIRS, llama2c
from formats import checkpoint, tokenizer
from formats.huggingface import config_from_hf
from formats.sources import Llama2cWeights, PickledWeights
from formats.tokenizer import Tokenizer, load_tokenizer, read_tokenizer
from model import InputError
from runtime import launch, terminal


@pytest.fixture(autouse=True)
def soon():
    """Nothing here takes long, however absurd it is."""
    start = time.process_time()
    yield
    assert time.process_time() - start < 4


def refused(message, call, *args, **more):
    """Raise unless the call ends in an InputError with that in its one line, which has at most 500 characters."""
    with pytest.raises(InputError) as caught:
        call(*args, **more)
    said = str(caught.value)
    assert message in said and said.isprintable() and len(said) <= 500, said


def test_a_message_is_one_line_whatever_it_quotes():
    assert str(InputError("a\nb\x1b[31m\ud800é")) == "a\\nb\\x1b[31m\\ud800é"
    assert len(str(InputError("a" * 10**6))) <= 500


# ---------------------------------------------------------------------------------------------------------------------
# Configs

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_layers": 2**31}, "n_layers is 2147483648 but must be at most 1,000"),
        ({"max_seq_len": 10**30}, "max_seq_len is 1" + "0" * 30 + " but must be at most"),
        ({"dim": 2**60}, "dim is"), ({"head_dim": 2**40}, "head_dim is"), ({"vocab_size": 2**40}, "vocab_size is"),
        ({"made_for_tp": 2**40, "wiring": "spd"}, "made_for_tp is"),
        ({"wiring": "hybrid", "ladder_layers": 2**31 - 1}, "ladder_layers 2147483647 does not fit"),
        ({"wiring": "hybrid", "ladder_layers": list(range(10**5))}, "ladder_layers is"),
        ({"eos_ids": [2**40]}, "eos_ids is"), ({"bos_id": 10**30}, "bos_id is"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0 but must be above 1"), ({"rope_theta": 1e300}, "rope_theta is 1e+300"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"), ({"norm_eps": 1e-300}, "norm_eps is 1e-300"),
        ({"wiring": "\x1b[31m"}, "unknown wiring '\\x1b[31m'"), ({"a\nb": 1}, "unknown key 'a\\nb'"),
    ],
)  # fmt: skip
def test_our_config_refuses(changes, message, tmp_path):
    values = {k: v for k, v in dataclasses.asdict(BASE).items() if v is not None} | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(message, checkpoint.read_config, tmp_path)


@pytest.mark.parametrize(
    "text, message",
    [
        (DEEP, "nested too deeply"), ('{"a":' * 10**5, "nested too deeply"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "nested too"),
        ('{"n_layers": ' + "9" * 5000 + "}", "is not valid JSON"), ("\udcff", "not valid UTF-8"), ("[]", "holds list"),
        (" " * (2**24 + 1), "has 17 MB: at most 17 are read"),
    ],
    ids=["lists", "objects", "200 lists", "digits", "UTF-8", "list", "size"],
)  # fmt: skip
def test_json_that_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    refused(message, checkpoint.read_config, tmp_path)
    refused(message, config_from_hf, tmp_path / "config.json")


def test_the_bounds_admit_every_named_size():
    for config in checkpoint.SIZES.values():
        values = dataclasses.asdict(config)
        assert checkpoint.make_config(values, "it") == config
        assert all(10 * values[name] <= most for name, most in checkpoint.AT_MOST.items() if name != "n_layers")
    checkpoint.make_config(dataclasses.asdict(BASE) | {"n_layers": 500, "max_seq_len": 10**7}, "it")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648 but must be at most 1,000"),
        ({"hidden_size": 10**30}, "hidden_size is"), ({"model_type": []}, "model_type []"),
        ({"model_type": {}}, "model_type {}"),
        ({"rope_scaling": THEIRS["rope_scaling"] | {"rope_type": "yarn"}, "rope_theta": 1}, "rope_theta is 1 but"),
        ({"rope_scaling": THEIRS["rope_scaling"] | {"rope_type": "linear", "factor": 2**64}}, "rope_scaling is"),
        ({"ladder_layers": list(range(10**5))}, "ladder_layers"),
    ],
)  # fmt: skip
def test_their_config_refuses(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(THEIRS | changes))
    refused(message, config_from_hf, tmp_path / "config.json")


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize(
    "file",
    ["../secret", "/etc/passwd", "/proc/self/mem", "a/b", "..", ".", "", "a" * 5000, "\0", "\ud800", "a\nb", ".hidden"],
)  # fmt: skip
def test_an_index_names_plain_files_alone(file, tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "of").mkdir()
    for name in "model.safetensors.index.json", "pytorch_model.bin.index.json":
        (tmp_path / "of" / name).write_text(json.dumps({"weight_map": {"a": file}}))
    for weights in checkpoint.Weights, PickledWeights:
        refused("is no plain name of a file beside it", weights, tmp_path / "of")


def test_an_empty_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused("has no weight_map", checkpoint.Weights, tmp_path)


def test_shards_may_be_links_to_files_elsewhere(tmp_path):
    """As in the cache of the Hugging Face hub."""
    state = random_model(BASE).state_dict()
    checkpoint.write_model(tmp_path, BASE, state, torch.float32)
    (tmp_path / "blob").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "blob" / "x")
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "blob" / "x")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(state, "a.safetensors")})
    )
    assert set(checkpoint.Weights(tmp_path).names()) == set(state)


@pytest.mark.parametrize(
    "dtype, size", [("U16", 2), ("I64", 8), ("F8_E4M3", 1), ("F8_E8M0", 1), ("BOOL", 1), ("C64", 8)]
)
def test_numbers_that_are_not_computed_with(dtype, size, tmp_path):
    header = json.dumps({"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * size))
    weights = checkpoint.Weights(tmp_path)
    for read in weights.shape, weights.dtype, weights.read:
        refused(f"tensor a is of dtype {dtype}: only BF16, F16, F32, F64, I8, U8 are read", read, "a")


def test_weights_that_are_no_floats(tmp_path):
    state = {name: torch.zeros_like(w, dtype=torch.int8) for name, w in random_model(BASE).state_dict().items()}
    checkpoint.write_config(tmp_path, BASE)
    save_file(state, tmp_path / "model.safetensors")
    refused("tensor norm.weight holds int8: give --dtype, one of float32, bfloat16, float16", generate.load, tmp_path)
    refused("holds int8, but the config says bfloat16", generate.load, tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**8])
def test_a_header_that_would_take_all_memory(length, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    refused("is no safetensors file: its header would have", checkpoint.Weights, tmp_path)


@pytest.mark.parametrize("at", range(7))
def test_a_llama2c_header_of_absurd_sizes(at, tmp_path):
    data = llama2c()
    for number in 2**31 - 1, 2**30:
        (tmp_path / "m.bin").write_bytes(data[: 4 * at] + number.to_bytes(4, "little") + data[4 * at + 4 :])
        refused("m.bin", Llama2cWeights, tmp_path / "m.bin")


class Called:
    """What a pickle calls when it is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def _expanded():
    return torch.zeros(1).expand(2**20, 2**20)


@pytest.mark.parametrize(
    "value, message",
    [
        (Called(os.mkdir, "ran"), "calls 'posix mkdir'"), (Called(bytearray, 2**34), "calls '__builtin__ bytearray'"),
        ({"a": _expanded()}, "its 'a' is no tensor with a number of its own for each place"),
        ([1], "it holds no state dict"),
        ({"a": 1}, "its 'a' is no tensor"), ({1: torch.zeros(1)}, "its 1 is no tensor"),
        ({"a": torch.zeros(2, device="meta")}, "it calls"), ({"a": torch.zeros(2).to_sparse()}, "it calls"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_are_no_state_dict(value, message, zipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(value, "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(message, PickledWeights, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_unpacks_to_more_than_it_is(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(b"\0" * 2**24, protocol=2))
        archive.writestr("archive/version", "3\n")
    assert path.stat().st_size < 2**17
    refused("it is not as torch.save packs a state dict", PickledWeights, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers and templates

RANKS = [base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)]


@pytest.mark.parametrize(
    "lines, message",
    [
        (RANKS[:100] + RANKS[101:], "its ranks are not 0, 1, 2, ... of one token each"),
        (RANKS + [b"YWI= 300\n"], "its ranks are not"), (RANKS + [b"YWI= 255\n"], "its ranks are not"),
        (RANKS + [RANKS[7].replace(b" 7", b" 256")], "its ranks are not"),
        (RANKS[:255] + [b"YWI= 255\n"], "no token is the single byte 255"),
        (RANKS + [b"\xff\xff 256\n"], "cannot be read"),
        (RANKS + [b"YWI= " + b"9" * 5000], "cannot be read"), (RANKS + [b"YWI=\n"], "cannot be read"),
    ],
    ids=["a gap", "a gap at the end", "a rank twice", "a token twice", "no byte 255", "no base64", "digits", "no rank"],
)  # fmt: skip
def test_tiktoken_files_that_are_refused(lines, message, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    refused(message, read_tokenizer, tmp_path / "tokenizer.model")


def test_a_tiktoken_file_may_have_its_lines_in_any_order(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"".join(RANKS[::-1]))
    assert read_tokenizer(tmp_path / "tokenizer.model").encode_plain("ab") == [97, 98]


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_s_file_is_not_read_whatever_its_size(name, tmp_path):
    with open(tmp_path / name, "wb") as f:
        f.truncate(2**40)
    refused("at most 134 are read", load_tokenizer, tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_is_not_waited_for(name, demo_tokenizer):
    (demo_tokenizer / name).unlink(missing_ok=True)
    os.mkfifo(demo_tokenizer / name)
    refused("it is no regular file", load_tokenizer, demo_tokenizer)


@pytest.fixture
def demo_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((ROOT / "demo" / "tokenizer.model").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"1": {"content": "\ud800"}}}, {"added_tokens_decoder": {"1": {"content": ""}}},
        {"added_tokens_decoder": {"-1": {"content": "a"}}}, {"added_tokens_decoder": {"1": {"content": 1}}},
        {"added_tokens_decoder": {"x": {"content": "a"}}}, {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"1": None}},
        {"chat_template": 7}, {"chat_template": [{"name": "default", "template": {}}]},
    ],
)  # fmt: skip
def test_settings_that_are_refused(settings, demo_tokenizer):
    (demo_tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("chat_template" if "chat_template" in settings else "added tokens", load_tokenizer, demo_tokenizer)


@pytest.mark.parametrize("template", [[{}], [1], ["default"], [{"name": []}], []])
def test_named_templates_without_a_default(template, demo_tokenizer):
    (demo_tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(demo_tokenizer).template is None


@pytest.fixture
def json_tokenizer(tmp_path):
    """A function that writes a tokenizer.json with a part of it changed, and returns its path."""

    def write(part, changes):
        values = json.loads(fuzz.json_tokenizer())
        values[part] |= changes
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        return tmp_path / "tokenizer.json"

    return write


@pytest.mark.parametrize(
    "part, changes",
    [
        ("post_processor", {"special_tokens": {}}), ("model", {"continuing_subword_prefix": "a" * 300}),
        ("model", {"merges": [["a"]]}), ("model", {"vocab": {}}),
    ],
)  # fmt: skip
def test_a_library_s_panic_is_one_line(part, changes, json_tokenizer, capfd):
    refused("tokenizer.json cannot be read", read_tokenizer, json_tokenizer(part, changes))
    assert capfd.readouterr() == ("", "")


def test_a_text_that_a_tokenizer_fails_at(json_tokenizer):
    found = read_tokenizer(json_tokenizer("model", {"unk_token": "none", "byte_fallback": False}))
    refused("tokenizer.json fails at this text: Unk token `none` not found", found.encode, "a\U0010fffd")


def test_runs_that_are_too_long_for_tiktoken():
    text = "a  b" + " " * 25_007 + "c" * 60_000 + " " * 24_999 + "d"
    pieces = tokenizer.split_runs(text)
    assert "".join(pieces) == text and len(pieces) == 4
    assert max(len(run) for piece in pieces for run in re.findall(r"\s+|\S+", piece)) == 25_000
    assert tokenizer.split_runs("a b" * 9000) == ["a b" * 9000] and tokenizer.split_runs("") == [""]


def test_the_real_tiktoken_file_takes_a_million_blanks():
    found = read_tokenizer(shared_data("llama3-tokenizer.model"))
    assert found.decode(found.encode_plain(" " * 10**6)) == " " * 10**6


LOOP = "{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"), (LOOP, "it takes longer than a second"),
        ("{{ 10 ** (10 ** 8) }}", "it takes longer than a second"), ("{{ 'a' * 10**10 }}", "it takes more than 537 MB"),
        ("{{ 'a'|center(10**9) }}", "it takes more than"), ("{{ '%1000000000d' % 1 }}", "it takes more than"),
        (DOUBLING, "it takes more than"), ("{{ 'a' * 2**25 }}", "it writes more than"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"), ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ " + "(" * 5000, "recursion"), ("{% include '/etc/passwd' %}", "loader"), ("{{ '\ud800' }}", "surrogates"),
        ("{{ raise_exception('\x1b[31m\n') }}", "refuses this conversation: \\x1b[31m\\n"),
        ("{% if %}", "Expected an expression"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(template, message):
    hostile = Tokenizer()
    hostile.template = template
    refused(message, hostile.render, [{"role": "user", "content": "hi"}])
    hostile.template = "{{ messages[0].content }}"  # and the next one is rendered
    assert hostile.render([{"role": "user", "content": "hi"}]) == "hi"


def test_the_process_that_renders_ends_with_this_one():
    """Also when this one is killed: its input ends then."""
    tokenizer._render("a")
    process = tokenizer._renderer()
    tokenizer._renderer.cache_clear()
    process.send_signal(2)  # of a terminal's Ctrl-C, which is not meant for it
    process.stdin.close()
    assert process.wait(10) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Texts, results, command lines


@pytest.mark.parametrize(
    "text, message",
    [
        ("a" * 10**6, "a prompt of 1,000,000 characters does not fit the context of 256"),
        ("a\n" * 70_000, "has 70,000 prompts: at most 65,536 are taken"), (b"a\xff", "is not valid UTF-8"),
        ("a" * (2**24 + 1), "has 17 MB: at most 17 are read"), ("/dev/zero", "it is no regular file"),
        ("/etc", "it is a folder"),
    ],
    ids=["long", "many", "bytes", "size", "device", "folder"],
)  # fmt: skip
def test_prompts_that_are_refused(text, message, tmp_path):
    path = tmp_path / "prompts.txt"
    if isinstance(text, str) and text.startswith("/"):
        path = text
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(message, _prompts, "--prompts-file", str(path))


def _prompts(*argv):
    args = generate.parse(["--checkpoint", str(ROOT / "demo"), *argv])
    config = checkpoint.read_config(args.checkpoint)
    return terminal.read_prompts(args, config, load_tokenizer(args.checkpoint))


def test_a_prompt_may_hold_nul(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\0b\n")
    assert len(_prompts("--prompts-file", str(tmp_path / "prompts.txt"))[0]) > 2


def test_synthetic_prompts_of_absurd_sizes():
    argv = ["--model", "1b", "--random-weights", "--prompt-length", "130000", "--batch", "260"]
    refused("--prompt-length times --batch is more than", _synthetic, argv)


def _synthetic(argv):
    args = generate.parse(argv)
    terminal.read_prompts(args, checkpoint.SIZES["1b"], None)


MODEL = ["--model", "1b", "--random-weights", "--prompt-ids", "1"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--top-k=--"], "--top-k: '--' is no value"), (["--device=--"], "--device: '--' is no value"),
        (["--batch", "9" * 30], "--batch: '" + "9" * 30 + "' is not a whole number from 1"),
        (["--batch", "9" * 5000], "--batch"), (["--batch", "70000"], "is not a whole number from 1 to 65536"),
        (["--temperature", "1e400", "--top-p", "2"], "--top-p"), (["--group-size", "9" * 5000], "--group-size"),
        (["--wiring", "hybrid", "--layers", "9" * 30], "--layers " + "9" * 30 + " does not fit"),
        (["--wiring", "hybrid", "--layers", "9" * 5000], "is neither a number nor a list"),
        (["--wiring", "hybrid", "--layers", "1," * 10**5], "does not fit"),
        (["--wiring", "hybrid", "--layers", "2147483647"], "does not fit"),
        (["--json", "a" * 5000], "cannot be written: File name too long"),
        (["--json", "/dev/null/x"], "cannot be written"),
    ],
)  # fmt: skip
def test_command_lines_of_generate(argv, message):
    def describe():
        return generate.describe(generate.parse([*MODEL, *argv]), launch.World(0, 1, torch.device("cpu")))

    refused(message, describe)


LONG = "a" * 5000


@pytest.mark.parametrize("flags", [["--checkpoint", LONG], ["--checkpoint", "/" * 5000 + "a"]])
def test_names_that_are_too_long(flags):
    refused("there is no such folder", generate.load, flags[1])
    refused("is no folder, no file", convert_hf_checkpoint.main, [flags[1], "--out", "x"])
    refused("no such file", convert_hf_checkpoint.main, ["demo", "--out", "x", "--tokenizer", flags[1]])


@pytest.mark.parametrize("flag, most", [("--n-layers", "1000"), ("--dim", "262144"), ("--vocab-size", "1.67772e+07")])
def test_adapt_refuses_absurd_shapes_before_it_builds_anything(flag, most):
    import adapt

    story = str(ROOT / "demo" / "story.txt")
    argv = ["--text", story, "--valid", story, "--out", "/nowhere/x", "--ladder", flag, str(2**31 - 1)]
    refused(f"{flag}: '2147483647' is not a whole number from 1 to {most}", adapt.parse, argv)


@pytest.mark.slow
def test_a_hostile_folder_ends_a_script_with_one_line(tmp_path):
    (tmp_path / "config.json").write_text(DEEP)
    done = script("generate.py", "--checkpoint", tmp_path, "--prompt", "a")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("config.json is not valid JSON (nested too deeply)\n")


def test_rendering_leaves_no_process_behind():
    """However the process that asked for it ends."""
    source = """
import os; from formats import tokenizer
tokenizer._render('a')
print(tokenizer._renderer().pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _lives(pid):
        time.sleep(0.02)
    assert not _lives(pid)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
