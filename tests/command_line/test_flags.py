"""Bad flags of every script: one line that names the flag, exit code 2, nothing written."""

import importlib
import re
import shlex

import pytest
import torch
from cases import refused
from helpers import random_model, write_model

from ladder.command_line import flags
from model import Config

# script: (the flags that all have, {more flags: the line}). A "{}" is a folder that holds an empty and a long text.
SCRIPTS = {
    "generate": (
        "--checkpoint {tiny}",
        {
            "": "no prompt: give --prompt",
            "--prompt=": "--prompt is empty ('')",
            "--prompt=@/nowhere": "--prompt @/nowhere: No such file",
            "--prompt=file:/nowhere": "--prompt file:/nowhere: No such file",
            "--prompt=file:{}/empty": "--prompt is empty ('file:",
            "--chat=Answer.": "no chat template",
            "--prompt=@{}/empty": "--prompt is empty ('@",
            "--prompt=a\udcff": "is not valid UTF-8",
            "--prompt=a --chat=\udcff": "--prompt 'a' or the text of --chat is not valid UTF-8",
            "--prompt=ids:": "a prompt has no tokens",
            "--prompt=ids:1,x": "--prompt 'ids:1,x' is not a list of numbers",
            "--prompt=ids:1,300": "token id 300 is outside the vocabulary of 300",
            "--prompt-length=64": "64 tokens leaves no room in the context of 64",
            "--prompt=a --prompt-length=3": "--prompt-length: not allowed with argument --prompt",
            "--prompt=a --prompt=b --batch=3": "--batch 3 is not a multiple of the 2 prompts",
            "--prompt=a --max-new-tokens=0": "--max-new-tokens: '0' is not a whole number from 1",
            "--prompt=a --max-new-tokens=99999999999": "'99999999999' is not a whole number from 1 to 2,147,483,647",
            "--prompt=a --temperature=-1": "--temperature: '-1' is not a number from 0",
            "--prompt=a --temperature=1e31": "temperature is 1e+31 but must be from 0 (greedy) to 1e+30",
            "--prompt=a --top-p=-1": "--top-p: '-1' is not a number from 0 to 1",
            "--prompt=a --wiring=laddr": "--wiring: unknown wiring 'laddr'; known: standard, ladder",
            "--prompt=a --wiring=ladr:2": "; did you mean ladder?",
            "--prompt=a --max_new_tokens=3": "; --max_new_tokens is no flag; did you mean --max-new-tokens?",
            "--prompt=a 3 --max_new_tokens 3": "arguments: 3 --max_new_tokens 3; --max_new_tokens is no flag; did you",
            "'--promt=One day'": "; --promt is no flag; did you mean --prompt?",
            "-prompt=a": "; -prompt is no flag; did you mean --prompt?",
            "--prompt=a --dtype=bfloat": "'bfloat' is none of float32, bfloat16, float16; did you mean bfloat16?",
            "--prompt=a --compile=al": "--compile: 'al' is none of decode, all; did you mean all?",
            "--prompt=a --comm=one-shoot": "; did you mean one-shot?",
            "--prompt=a --ladder --wiring=parallel": "--wiring: not allowed with argument --ladder",
            "--prompt=a --shares=3,1": "--shares has 2 numbers, and this run's tp is 1: give one for each rank",
            "--prompt=a --device=tpu": "no such device: tpu; this machine has cpu",
            "--prompt=a --chat": "no chat template",
            "--prompt=a --json=/nowhere/x": "--json: cannot write /nowhere/x",
            "--prompt=a --json=": "--json is empty: give a value, or leave it out",
            "--prompt=a --checkpoint={tiny}/model.safetensors": "model.safetensors is a file: give its folder",
            "--prompt=a --checkpoint=some-one/Model-1.0": "first: convert_hf_checkpoint.py some-one/Model-1.0",
            "--prompt=a --no-such-flag": "unrecognized arguments: --no-such-flag",
            "--checkpoint=/nowhere": "/nowhere: no such folder",
            "--checkpoint={}": "is not a checkpoint folder: it has no config.json",
            "--prompt=a --comm=one-shot": "--comm one-shot is how ranks sum: start two or more, with torchrun",
            "--prompt=a --comm=gloo": "--comm gloo is unknown: use one of ",
            "--prompt=a --draft=ngram@0": "@0 must be from 1 to the context of 64",
            "--prompt=a --draft=ngrams": "--draft 'ngrams' is no folder, nor is it ngram",
            "--prompt=a --draft={even}": "has another vocabulary, of 1,024 tokens, and the model's 300",
        },
    ),
    "generate of a named size": (
        "",
        {
            "": "one of the arguments --checkpoint --model is required",
            "--chekpoint demo": "is required; --chekpoint is no flag; did you mean --checkpoint?",
            "--model 9b": "--model 9b is no size: give NAME, ",
            "--model 80b:2": "; did you mean 8b?",
            "--model 8b:33": "--model 8b:33 asks for 33 layers, but 8b has 32",
            "--model {tiny}/config.json": "config.json: this is a checkpoint of this project already",
            "--model {}/none.json": "none.json",
            "--model 8b --prompt a": "--model has no tokenizer: use --prompt ids:",
            "--model 1b:int4:48 --prompt-length 3": "group size 48 is none of 32, 64, 128",
            "--model 1b --chat": "--chat without a prompt takes no --batch, and needs a checkpoint with a tokenizer",
        },
    ),
    "eval": (
        "--checkpoint {tiny} --text {}/long",
        {
            "--window 65": "--window 65 is longer than the context of 64",
            "--window 8 --stride 8": "--stride is 8 but must be smaller than the window of 8 tokens",
            "--max-tokens 2 --text {}/empty": "has no text: scoring takes two tokens or more",
            "--max-tokens 2 --json /dev/full": "cannot write /dev/full: [Errno 28] No space left on device",
        },
    ),
    "quantize": (
        "--checkpoint {even} --out {}/out",
        {
            "--mode int4 --group-size 48 --out {even}": "already exists: remove it or give another folder",
            "--mode int4 --group-size 48": "group size 48 is none of 32, 64, 128",
            "--mode fp8 --group-size 64": "a group size is for int4",
            "--mode int8 --keep w9": "cannot keep 'w9' from being quantized; known: tok_embeddings, wqkv",
            "--mode int8 --keep wqkv,wo,w1,w2,w3,output,tok_embeddings": "leaves nothing to quantize",
        },
    ),
    "convert_hf_checkpoint of one file": (
        "{tiny}/model.safetensors --out {}/out",
        {"": "model.safetensors is no GGUF file and no llama2.c file (of safetensors give the folder)"},
    ),
    "convert_hf_checkpoint of text": ("{tiny}/config.json --out {}/out", {"": "is no GGUF file and no llama2.c file"}),
    "convert_hf_checkpoint of nothing": ("", {"demo --output=x": "--out; --output is no flag; did you mean --out?"}),
    "convert_hf_checkpoint of no name": ("", {"'' --out {}/out": "SOURCE is empty: give a value"}),
    "convert_hf_checkpoint": (
        "{}",
        {
            "--out {}/long": "long already exists: remove it",
            "--out {}/out": "cannot be converted: it has no config.json",
            "--out {}/out --tokenizer /nowhere": "--tokenizer /nowhere: no such file",
            "--out {}/out --shard-gb 0": "--shard-gb: '0' is not a number above 0",
        },
    ),
}
CASES = [(name, always, more, lines[more]) for name, (always, lines) in SCRIPTS.items() for more in lines]


@pytest.fixture(scope="session")
def even(tmp_path_factory):
    """A checkpoint that every kind of integers suits."""
    folder = tmp_path_factory.mktemp("even")
    config = Config(1, 8, 4, 16, 128, 256, 1024, 64)
    write_model(folder, config, random_model(config).state_dict(), torch.bfloat16)
    return folder


@pytest.mark.parametrize("name, always, more, line", CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_flags_are_one_clear_line_and_leave_nothing(name, always, more, line, request, tmp_path, monkeypatch):
    (tmp_path / "empty").write_text("")
    (tmp_path / "long").write_text("Once upon a time there was a little dog.\n<|endoftext|>\nIt ran to the park. " * 30)
    folders = {n: request.getfixturevalue(n) for n in ("tiny", "even") if f"{{{n}}}" in always + more}
    argv = [word.replace("{}", str(tmp_path)).format(**folders) for word in shlex.split(f"{always} {more}")]
    main = importlib.import_module(name.split()[0]).main
    monkeypatch.setattr("sys.argv", [name, *argv])
    message = refused(re.escape(line), main)
    assert ("is no flag" in message) == ("is no flag" in line or "no-such-flag" in line)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "long"]


def test_values_that_look_like_flags_are_no_flags_and_names_are_in_the_help():
    p = flags.Parser("what it does")
    p.add_argument("--prompt")
    p.add_argument("--compile", nargs="?", const="decode", **flags.one_of(("decode", "all")))
    p.add_argument("--number", type=flags.number(float, 0))
    assert vars(p.parse_args(["--prom", "-1", "--compile"])) == {"prompt": "-1", "compile": "decode", "number": None}
    assert p.parse_args(["--prompt=--promt"]).prompt == "--promt" and p.parse_args(["--prompt", "- a b"]).prompt
    assert "[--compile [{decode,all}]]" in p.format_usage()
    for given in ["-1"], ["--prompt", "-1"], ["--prompt", "-a b"], ["--prompt=--promt"], ["--prom", "a"]:
        refused("^--number: 'x' is not a number from 0$", p.parse_args, [*given, "--number=x"])
