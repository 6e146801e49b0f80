"""Generation from the command line and below it: greedy texts, sampling, stopping, results, bad input."""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import BASE, HANGS, ROOT, random_model, script, shared_data, unequal_rows

import checkpoint
import generate
import tp
from adapt import train_tokenizer
from model import InputError

WORLD = tp.World(0, 1, torch.device("cpu"))
KEYS = (
    "model, n_layers, wiring, ladder_layers, desync_period, dtype, quant, link, tp, simulated, device, hardware, "
    "threads, torch, commit, settings, load_s, batch, prompt_tokens, new_tokens, exposed, compile_s, prefill_s, "
    "decode_s, ttft_ms, tpot_ms, tok_s, tok_s_user, step_bytes, bandwidth, mbu, peak_bytes, tokens, texts"
)
PROMPTS = ["Once upon a time", "The dog ran", "a"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random checkpoint with a tokenizer, whose uneven 15/5 heads split unevenly over every tp."""
    folder = tmp_path_factory.mktemp("tiny")
    train_tokenizer(
        ["Once upon a time there was a little dog. The dog ran to the park. "] * 30, 300, folder / "tokenizer.model"
    )
    config = dataclasses.replace(BASE, n_heads=15, n_kv_heads=5, intermediate_size=101, vocab_size=300, eos_ids=(2,))
    checkpoint.write_model(folder, config, random_model(config).state_dict(), torch.float32)
    return folder


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def run_json(folder, *args, ranks=1):
    """The JSON result of a run of generate.py, and the finished process."""
    with tempfile.TemporaryDirectory() as out:
        out = Path(out) / "out.jsonl"
        done = script("generate.py", "--checkpoint", folder, "--json", out, *args, ranks=ranks)
        assert done.returncode == 0, done.stderr
        (line,) = out.read_text().splitlines()
    return json.loads(line), done


# The main job


@pytest.fixture(scope="module")
def greedy(tiny):
    """The greedy tokens of one device, eager, of each wiring, computed once."""
    known = {}

    def tokens(wiring):
        if wiring not in known:
            net = generate.load(
                generate.parse(["--checkpoint", str(tiny)]),
                dataclasses.replace(checkpoint.read_config(tiny), wiring=wiring), WORLD,
            )  # fmt: skip
            tokenizer = generate.tokenizers.load(tiny)
            rows = []
            for prompt in PROMPTS:  # one by one, the whole sequence again for each token
                ids = tokenizer.encode(prompt)
                row = []
                while len(row) < 12:
                    with torch.no_grad():
                        row.append(int(net(torch.tensor([ids + row]))[0, -1].argmax()))
                rows.append(row)
            known[wiring] = rows
        return known[wiring]

    return tokens


@pytest.mark.parametrize(
    "ranks, wiring, flags",
    [
        (1, "standard", []), (1, "ladder", ["--compile", "--compile-prefill", "--prefill-chunk", "7"]),
        (2, "standard", []), (2, "ladder", ["--compile"]), (3, "ladder", []), (4, "ladder", []),
    ],
)  # fmt: skip
def test_the_same_text_for_every_tp(tiny, greedy, ranks, wiring, flags):
    prompts = [arg for prompt in PROMPTS for arg in ("--prompt", prompt)]
    flags = [*flags, "--wiring", wiring, "--temperature", "0", "--max-new-tokens", "12", "--ignore-eos"]
    result, done = run_json(tiny, *prompts, *flags, ranks=ranks)
    assert result["tokens"] == greedy(wiring)
    tokenizer = generate.tokenizers.load(tiny)
    for prompt, row, text in zip(PROMPTS, result["tokens"], result["texts"], strict=True):
        assert tokenizer.decode(tokenizer.encode(prompt) + row) == prompt + text
        assert prompt + text in done.stdout
    expected = {
        "wiring": wiring, "model": tiny.name, "tp": ranks, "batch": 3, "new_tokens": 12, "dtype": "float32",
        "quant": None, "device": "cpu", "link": None, "torch": torch.__version__,
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert list(result) == KEYS.split(", ")
    assert result["prompt_tokens"] == max(len(tokenizer.encode(p)) for p in PROMPTS)
    assert len(result["peak_bytes"]) == ranks and min(result["peak_bytes"]) > 1e7
    assert (result["compile_s"] > 0) == ("--compile" in flags)
    assert result["tok_s"] == pytest.approx(3e3 / result["tpot_ms"]) and result["load_s"] > 0
    assert result["tok_s_user"] == pytest.approx(1e3 / result["tpot_ms"])
    assert result["ttft_ms"] == pytest.approx(1e3 * result["prefill_s"])
    assert result["decode_s"] == pytest.approx(11e-3 * result["tpot_ms"])


def test_step_bytes_are_the_weights_and_the_cache(tiny):
    result, _ = run_json(tiny, "--prompt-ids", "1,5,6", "--max-new-tokens", "7")
    c = checkpoint.read_config(tiny)
    layer = c.dim * c.head_dim * (15 + 2 * 5 + 15) + 3 * c.dim * c.intermediate_size + 2 * c.dim
    weights = c.n_layers * layer + c.dim + c.dim * c.vocab_size
    slot = c.n_layers * 2 * 5 * c.head_dim
    assert result["step_bytes"] == 4 * weights + 4 * slot * (4 + 9) / 2  # from 4 to 9 slots are filled
    assert result["mbu"] == pytest.approx(result["step_bytes"] / result["tpot_ms"] * 1e3 / result["bandwidth"])


def test_a_single_prompt_streams_its_text(tiny):
    result, done = run_json(tiny, "--prompt", PROMPTS[0], "--temperature", "0", "--max-new-tokens", "9")
    assert done.stdout == PROMPTS[0] + result["texts"][0] + "\n"
    assert "tok/s" in done.stderr


def test_prompts_from_a_file_and_repeated_to_a_batch(tiny, tmp_path, greedy):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    flags = ["--temperature", "0", "--max-new-tokens", "12", "--ignore-eos", "--batch", "6"]
    result, _ = run_json(tiny, "--prompts-file", tmp_path / "prompts.txt", *flags)
    assert result["tokens"] == greedy("standard") * 2


def test_synthetic_prompts_and_random_weights(tiny, tmp_path):
    result, _ = run_json(tiny, "--prompt-length", "7", "--batch", "3", "--max-new-tokens", "5", "--ignore-eos")
    assert (result["batch"], result["prompt_tokens"]) == (3, 7)
    assert len({tuple(row) for row in result["tokens"]}) == 3
    context = checkpoint.read_config(tiny).max_seq_len
    result, done = run_json(tiny, "--prompt-length", context - 3, "--ignore-eos")
    assert result["new_tokens"] == 3 and "leaves room for 3 new tokens" in done.stderr


def test_a_named_size_with_random_weights(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(generate.SIZES, "tiny", BASE)
    args = ["--model", "tiny", "--random-weights", "--ladder", "--prompt-length", "5", "--max-new-tokens", "4"]
    generate.main([*args, "--json", str(tmp_path / "o.jsonl")])
    result = json.loads((tmp_path / "o.jsonl").read_text())
    assert (result["model"], result["wiring"], result["dtype"], result["texts"]) == ("tiny", "ladder", "bfloat16", None)
    printed = capsys.readouterr()
    assert "tiny, 3 layers, ladder" in printed.err
    assert printed.out == "--- " + " ".join(map(str, result["tokens"][0])) + "\n"


def test_prefill_chunk_reaches_the_warm_up_and_the_run(monkeypatch):
    monkeypatch.setitem(generate.SIZES, "tiny", BASE)
    chunks, real = [], generate.in_chunks
    monkeypatch.setattr(generate, "in_chunks", lambda *args: chunks.append(args[-1]) or real(*args))
    monkeypatch.setattr(generate, "compiled", lambda model, args: (model, model))
    args = ["--model", "tiny", "--random-weights", "--prompt-length", "5", "--max-new-tokens", "2", "--compile"]
    generate.main([*args, "--prefill-chunk", "3"])
    assert chunks == [3, 3]
    generate.main(args)
    assert chunks[2:] == [generate.CHUNK] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_interactive_goes_on_with_the_text(tiny, ranks):
    flags = ["--checkpoint", tiny, "--interactive", "--temperature", "0", "--max-new-tokens", "6"]
    done = script("generate.py", *flags, ranks=ranks, stdin="Once upon a time\n\nThe dog\n")
    assert done.returncode == 0, done.stderr
    tokenizer = generate.tokenizers.load(tiny)
    net = generate.load(generate.parse(["--checkpoint", str(tiny)]), checkpoint.read_config(tiny), WORLD)
    ids, texts = [], []
    for line in ("Once upon a time", "The dog"):
        ids += tokenizer.encode_plain(line) if ids else tokenizer.encode(line)
        before = tokenizer.decode(ids)
        for _ in range(6):
            with torch.no_grad():
                token = int(net(torch.tensor([ids]))[0, -1].argmax())
            if token == 2:
                break
            ids.append(token)
        texts.append(tokenizer.decode(ids)[len(before) :])
    assert done.stdout.replace("> ", "").split("\n")[:2] == texts


def test_interactive_with_a_chat_template_and_a_full_context(copy):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    flags = ["--checkpoint", copy, "--interactive", "--temperature", "0", "--max-new-tokens", "2", "--context", "60"]
    done = script("generate.py", *flags, "--compile-prefill", stdin="a\nb\n\udcff\n" + "dog " * 50 + "\na\n")
    assert done.returncode == 0, done.stderr
    assert "do not fit the context of 60: starting anew" in done.stderr
    answers = done.stdout.replace("> ", "").split("\n")
    assert answers[0] == answers[2] != "" and len(answers) == 4  # the last turn starts from nothing, as the first did
    single = script("generate.py", *flags[:2], *flags[3:-2], "--chat", "--prompt", "a")
    assert single.stdout == answers[0] + "\n"


def test_the_demo_is_a_ladder_and_tells_the_same_story_on_two_ranks():
    result, done = run_json(ROOT / "demo", "--prompt", "Once upon a time", "--temperature", "0", "--dtype", "float32")
    assert result["wiring"] == "ladder" and len(done.stdout.split()) > 50
    flags = ["--prompt", "Once upon a time", "--temperature", "0", "--dtype", "float32", "--ladder"]
    both, _ = run_json(ROOT / "demo", *flags, ranks=2)
    assert both["texts"] == result["texts"]


def test_two_nodes(tiny, greedy, tmp_path):
    """Two launchers with one rank each, as on two machines."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    flags = ["--checkpoint", tiny, "--ladder", "--temperature", "0", "--max-new-tokens", "12", "--ignore-eos"]
    for bad in (False, True):
        last = ["--json", tmp_path / "out.jsonl", "--batch", "4" if bad else "1"]
        prompts = ["--prompt", PROMPTS[0], *(["--prompt", PROMPTS[1], "--prompt", PROMPTS[2]] if bad else [])]
        script_and_flags = [str(word) for word in (ROOT / "generate.py", *flags, *prompts, *last)]
        nodes = [
            subprocess.Popen([*command, f"--node_rank={r}", *script_and_flags], stderr=subprocess.PIPE, text=True)
            for r in (1, 0)
        ]
        errors = "".join(node.communicate(timeout=HANGS)[1] for node in nodes)
        assert [node.returncode for node in nodes] == [bad, bad], errors
        assert errors.count("generate.py: --batch 4 is not a multiple of the 3 prompts") == bad
        assert 'tp.py", line' not in errors
    assert json.loads((tmp_path / "out.jsonl").read_text())["tokens"] == [greedy("ladder")[0]]


def test_stories260k_on_two_ranks(tmp_path):
    import convert_hf_checkpoint

    bin, model = shared_data("stories260K.bin"), shared_data("tok512.model")
    convert_hf_checkpoint.main([str(bin), "--tokenizer", str(model), "--out", str(tmp_path / "ours")])
    result, done = run_json(
        tmp_path / "ours", "--prompt", "Once upon a time", "--temperature", "0", "--max-new-tokens", "60", ranks=2
    )
    assert done.stdout.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
        "One day, she saw a big, red ball."
    )


# Sampling and stopping


def test_greedy_takes_the_largest():
    logits = torch.randn(5, 40)
    assert generate.make_sampler(0)(logits).tolist() == logits.argmax(-1).tolist()


def frequencies(logits, **settings):
    sample = generate.make_sampler(**settings)
    return torch.bincount(sample(logits.expand(40000, -1)), minlength=len(logits)) / 40000


def test_sampling_follows_the_softmax_at_a_temperature():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(-1)
        assert (frequencies(logits, temperature=temperature) - expected).abs().max() < 0.015


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert (frequencies(logits, temperature=1, top_k=2) - torch.tensor([0, 4 / 7, 0, 3 / 7])).abs().max() < 0.015
    assert (frequencies(logits, temperature=1, top_p=0.65) - torch.tensor([0, 4 / 7, 0, 3 / 7])).abs().max() < 0.015
    assert (frequencies(logits, temperature=1, top_p=0.75) - torch.tensor([0, 4, 2, 3]) / 9).abs().max() < 0.015
    assert frequencies(logits, temperature=1, top_p=0.01)[1] == 1
    assert frequencies(logits, temperature=1, top_k=1)[1] == 1
    assert (frequencies(logits, temperature=1, top_k=99) - logits.exp()).abs().max() < 0.015


def test_extreme_temperatures_are_greedy_or_uniform():
    logits = torch.tensor([100.0, 300.0, -200.0, 299.0])
    assert frequencies(logits, temperature=1e-40)[1] == 1
    assert (frequencies(logits, temperature=1e30) - 0.25).abs().max() < 0.015


def test_equal_seeds_draw_equal_tokens():
    logits = torch.randn(50, 40)
    draws = [generate.make_sampler(1.0, seed=seed)(logits).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("chunk", [1, 3, 6, 12, 26, 27])
def test_a_prefill_in_chunks_equals_one_pass(chunk):
    net = random_model(BASE)
    tokens, lengths = unequal_rows(BASE)
    calls = []

    def prefill(part, *args, **kwargs):
        calls.append(part.shape[1])
        return net(part, *args, **kwargs)

    with torch.no_grad():
        one, many = net.new_cache(3, 12), net.new_cache(3, 12)
        expected = net(tokens, cache=one, select=lengths - 1)[:, 0]
        logits = generate.in_chunks(prefill, tokens, lengths, many, chunk)
    width = max(1, chunk // 3)
    assert calls == [width] * (9 // width) + [9 % width] * (9 % width > 0)
    assert torch.allclose(logits, expected, atol=1e-5)
    for (k, v), (k1, v1) in zip(many, one, strict=True):
        assert torch.allclose(k, k1, atol=1e-5) and torch.allclose(v, v1, atol=1e-5)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_decode_reads_only_the_filled_slots_with_one_graph(compile):
    """What is beyond them holds NaN, which a mask would not keep out of a sum."""
    net = random_model(BASE)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prefill, decode = generate.compiled(net, argparse.Namespace(compile=compile, compile_prefill=False))
    cache = net.new_cache(2, 40)
    for tensor in (t for layer in cache for t in layer):
        tensor[:, :, 9:] = torch.nan
    seen = []

    def sample(logits):
        assert logits.isfinite().all()
        for tensor in (t for layer in cache for t in layer):
            assert tensor[:, :, 9 + len(seen) :].isnan().all()
            tensor[1, :, 9 + len(seen)] = 0  # the next step reads this slot of the shorter row too, behind the mask
        seen.append(1)
        return logits.argmax(-1)

    rows, *_ = generate.generate([[5, 6, 7, 8, 9, 10, 11, 12, 13], [7, 8]], 30, sample, prefill, decode, cache)
    assert len(seen) == len(rows[0]) == 30
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compile)
    again, *_ = generate.generate([[7, 8]], 30, lambda x: x.argmax(-1), net, net, net.new_cache(1, 40))
    assert again[0] == rows[1]


@pytest.mark.parametrize("prompt, new", [(1, 1), (100, 200), (256, 1), (300, 500), (255, 3)])
def test_a_gpu_reads_the_cache_in_buckets_all_of_which_the_warm_up_has_seen(prompt, new, monkeypatch):
    """A model that only writes down what it is asked to read, and tensors that say they are on a GPU."""
    pad, seen = generate.pad, []
    monkeypatch.setattr(generate, "make_sampler", lambda *args, **kwargs: lambda logits: logits.argmax(-1))
    monkeypatch.setattr(generate, "pad", lambda prompts, device: pad(prompts, "cpu"))
    slots = -(-(prompt + new) // generate.BUCKET) * generate.BUCKET + 1
    key = argparse.Namespace(device=torch.device("cuda"), shape=(1, 1, slots, 8))

    def model(tokens, positions=None, cache=None, cache_length=None, select=None):
        if positions is not None:
            assert positions.max() < cache_length < slots and cache_length % generate.BUCKET == 0
            seen.append(cache_length)
        return torch.zeros(1, 1, 4)

    generate.warm_up([[1] * prompt], new, model, model, [(key, key)], chunk=10**6)
    warmed = set(seen)
    seen.clear()
    generate.generate([[1] * prompt], new, lambda x: x.argmax(-1), model, model, [(key, key)], chunk=10**6)
    assert warmed >= set(seen) and max(warmed) <= max([*seen, generate.BUCKET * -(-(prompt + 1) // generate.BUCKET)])


def test_each_row_stops_at_its_own_end():
    """A scripted model: row b emits 10 b + 1, 10 b + 2, ... and the end-of-sequence 9 at its own step."""
    ends, seen = [3, 1, 5], []

    def logits(step):
        ids = torch.tensor([9 if step == end else 10 * b + step + 1 for b, end in enumerate(ends)])
        return torch.nn.functional.one_hot(ids, 40).float()[:, None]

    def prefill(tokens, cache, select):
        assert tokens.tolist() == [[5, 6, 7], [5, 0, 0], [5, 6, 0]] and select.tolist() == [2, 0, 1]
        return logits(0)

    def decode(tokens, positions, cache, slots):
        seen.append((tokens.tolist(), positions.tolist()))
        return logits(len(seen))

    steps = []
    cache = [(torch.zeros(3, 1, 20, 2),) * 2]
    prompts, sample = [[5, 6, 7], [5], [5, 6]], generate.make_sampler(0)
    rows, n, first, rest = generate.generate(prompts, 10, sample, prefill, decode, cache, (9,), steps.append)
    assert rows == [[1, 2, 3], [11], [21, 22, 23, 24, 25]]
    assert n == 6 and len(seen) == 5 and first > 0 and rest > 0
    assert steps[0] == [1, 11, 21] and steps[1] == [2, None, 22] and steps[5] == [None, None, None] and len(steps) == 6
    assert seen[0] == ([[1], [11], [21]], [[3], [1], [2]])
    assert seen[4][1] == [[7], [5], [6]]


def test_max_new_tokens_and_no_end():
    def model(*args, **kwargs):
        return torch.ones(1, 1, 4)

    cache = [(torch.zeros(1, 1, 20, 2),) * 2]
    rows, n, *_ = generate.generate([[1]], 4, generate.make_sampler(0), model, model, cache)
    assert rows == [[0, 0, 0, 0]] and n == 4


# Bad input


def spoil_weights(folder, name, change):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    change(state, name)
    save_file(state, folder / "model.safetensors")


def nan_in_the_last_column(state, name):
    state[name][0, -1] = torch.nan


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


CHECKPOINTS = {  # what happened to the folder, and the line
    "a Hugging Face config": (lambda f: edit_config(f, model_type="gpt2"), "run convert_hf_checkpoint.py"),
    "an unknown key": (lambda f: edit_config(f, n_experts=8), "unknown key 'n_experts'"),
    "a missing key": (lambda f: edit_config(f, dim=None), "no 'dim'"),
    "a bad value": (lambda f: edit_config(f, dim=-1), "config.json: dim is -1"),
    "no config": (lambda f: (f / "config.json").unlink(), "is not a checkpoint folder: it has no config.json"),
    "a truncated file": (truncate, "model.safetensors is truncated"),
    "a lost shard": (lose_a_shard, "model-00001-of-00002.safetensors is missing"),
    "too large for float16": (
        lambda f: spoil_weights(f, "norm.weight", lambda state, name: state.update({name: state[name] * 1e5})),
        "tensor norm.weight holds NaN or infinite values in float16",
    ),
    "NaN": (
        lambda f: spoil_weights(f, "layers.1.attention.wo.weight", nan_in_the_last_column),
        "tensor layers.1.attention.wo.weight holds NaN",
    ),
    "a missing tensor": (
        lambda f: spoil_weights(f, "layers.2.ffn_norm.weight", lambda state, name: state.pop(name)),
        "no tensor layers.2.ffn_norm.weight",
    ),
    "a wrong shape": (lambda f: edit_config(f, intermediate_size=99), r"the config says (99, 48)"),
    "no tokenizer": (lambda f: (f / "tokenizer.model").unlink(), "copy has no tokenizer: use --prompt-ids"),
    "a broken tokenizer": (lambda f: (f / "tokenizer.model").write_text("x"), "tokenizer.model cannot be read"),
    "another vocabulary": (lambda f: edit_config(f, vocab_size=400), "300 tokens, but the model's vocab_size is 400"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_bad_checkpoints_are_one_clear_line(case, copy):
    spoil, message = CHECKPOINTS[case]
    spoil(copy)
    with pytest.raises(InputError) as error:
        generate.main(["--checkpoint", str(copy), "--prompt", "a", *(["--dtype=float16"] if "float16" in case else [])])
    assert message in str(error.value) and "\n" not in str(error.value)


FLAGS = {  # flags: the line
    "": "no prompt: give --prompt",
    "--prompt=": "--prompt is empty",
    "--prompt-ids=": "a prompt has no tokens",
    "--prompt-ids=1,x": "--prompt-ids '1,x' is not a list of numbers",
    "--prompt-ids=1,300": "token id 300 is outside the vocabulary of 300",
    "--prompt-ids=-1": "token id -1 is outside",
    "--prompt-length=64": "--prompt-length 64 leaves no room in the context of 64",
    "--prompt-length=0": "--prompt-length is 0 but must be at least 1",
    "--prompt=a --batch=0": "--batch is 0 but",
    "--prompt=a --prompt=b --batch=3": "--batch 3 is not a multiple of the 2 prompts",
    "--prompt=a --max-new-tokens=-5": "--max-new-tokens is -5 but",
    "--prompt=a --temperature=-1": "--temperature is -1.0 but",
    "--prompt=a --top-p=0": "--top-p is 0.0 but",
    "--prompt=a --seed=-1": "--seed is -1 but must be from 0",
    "--prompt=a --seed=99999999999999999999": "but must be from 0 to 2^63 - 1",
    "--prompt-length=3000000000000": "--prompt-length 3000000000000 leaves no room in the context of 64",
    "--prompt=a\udcff": "is not valid UTF-8",
    "--prompt=a --top-k=0": "--top-k is 0 but",
    "--prompt=a --wiring=laddr": "unknown wiring 'laddr'; known: standard, ladder, hybrid",
    "--prompt=a --wiring=hybrid": "wiring hybrid needs ladder_layers",
    "--prompt=a --ladder --wiring=parallel": "contradict",
    "--prompt=a --ladder-layers=4": "from 1 to 3",
    "--prompt=a --ladder-layers=1,7": "from 0 to 2",
    "--prompt=a --ladder-layers=x": "--ladder-layers 'x' is neither",
    "--prompt=a --ladder-layers=1 --wiring=desync": "does not go with --wiring desync",
    "--prompt=a --desync-period=4": "--desync-period is for --wiring desync",
    "--prompt=a --random-weights": "--random-weights goes with --model",
    "--prompt=a --context=9": "--context is for --interactive",
    "--prompt=a --interactive": "--interactive does not go with --prompt",
    "--interactive --batch=2": "--interactive does not go with --batch",
    "--interactive --json=x": "--interactive does not go with --json",
    "--prompt=a --desync-period=0": "--desync-period is 0 but",
    "--prompt=a --device=tpu": "no such device: tpu; this machine has cpu",
    "--prompt=a --device=cuda:99": "no such device: cuda:99; this machine has cpu",
    "--prompt=a --model=8b": "give either --checkpoint DIR or --model NAME",
    "--prompt=a --chat": "no chat template",
    "--prompt=a --json=/nowhere/x": "--json /nowhere/x cannot be written: No such file",
    "--prompts-file=/nowhere": "--prompts-file /nowhere",
    "--prompt=a --dtype=int3": "--dtype: invalid choice: 'int3'",
    "--prompt=a --no-such-flag": "unrecognized arguments: --no-such-flag",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_flags_are_one_clear_line(flags, tiny):
    with pytest.raises(InputError) as error:
        generate.main(["--checkpoint", str(tiny), *flags.split()])
    assert FLAGS[flags] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--model 9b --random-weights", "unknown model '9b'; known: 1b, 3b, 8b"),
        ("--model 8b", "add --random-weights"),
        ("", "give either"),
        ("--model 8b --random-weights --prompt a", "--model has no tokenizer: use --prompt-ids"),
        ("--checkpoint /nowhere", "/nowhere is no folder"),
    ],
)
def test_bad_models_are_one_clear_line(flags, message):
    with pytest.raises(InputError) as error:
        generate.main(flags.split())
    assert message in str(error.value)


def test_the_process_ends_with_one_line_and_code_2(tiny):
    done = script("generate.py", "--checkpoint", tiny, "--prompt", "a", "--wiring", "laddr")
    assert done.returncode == 2
    assert done.stderr.startswith("generate.py: unknown wiring 'laddr'") and done.stderr.count("\n") == 1
    done = script("generate.py", "--batch", "many")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_bad_input_of_one_node_ends_the_other(tiny):
    """Only node 1 is asked for a device that it does not have, which it finds before the ranks meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    nodes = []
    for node, device in ((0, "cpu"), (1, "cuda")):
        environment = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, ROOT / "generate.py", "--checkpoint", tiny, "--prompt", "a", "--device", device]
        environment = {**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""}
        nodes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = "".join(node.communicate(timeout=HANGS)[1] for node in nodes)
    assert errors == "generate.py: no such device: cuda:1; this machine has cpu\n"
    assert [node.returncode for node in nodes] == [2, 2]


def our_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("generate.py: ")]


def test_a_late_rank_0_still_says_why(tiny, tmp_path):
    """Rank 1 is ready to leave long before rank 0 has even started."""
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(4 * (os.environ.get('RANK') == '0'))\n")
    done = script("generate.py", "--checkpoint", tiny, "--batch", "0", ranks=2, PYTHONPATH=str(tmp_path))
    assert len(our_lines(done)) == 1


def started(tiny, *flags, ranks=2):
    """A running generation, and its output as it comes."""
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(tiny), *flags]
    if ranks > 1:
        command[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


def ends(process):
    """What a process that is to end now still says: no traceback of ours, and no rank that torchrun had to kill."""
    _, errors = process.communicate(timeout=HANGS)
    assert 'tp.py", line' not in errors and "forcefully" not in errors
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_pipe_is_no_traceback_of_ours(tiny, ranks):
    process = started(tiny, "--prompt", "a", ranks=ranks)
    process.stdout.close()
    process.stdout = None
    ends(process)
    assert process.returncode == 1


@pytest.mark.parametrize("to", ["the launcher", "all"])
def test_ctrl_c_ends_a_chat_at_once(tiny, to):
    process = started(tiny, "--interactive", "--max-new-tokens", "2")
    process.stdin.write("Once\n")
    process.stdin.flush()
    assert process.stdout.readline()  # it has answered: both ranks wait for the next line
    (os.kill if to == "the launcher" else os.killpg)(process.pid, signal.SIGINT)
    assert ends(process).count("interrupted") <= 1


def test_a_killed_rank_takes_the_others_with_it(tiny):
    process = started(tiny, "--interactive", "--max-new-tokens", "2")
    process.stdin.write("Once\n")
    process.stdin.flush()
    assert process.stdout.readline()
    children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    ends(process)
    assert process.returncode == 1


@pytest.mark.parametrize("case", ["every rank", "flags", "last rank", "tp"])
def test_many_ranks_end_together_with_one_line(case, copy):
    """torchrun adds a report of its own and ends with 1; the ranks end with 2, and one of them says why."""
    flags, message = [], {
        "every rank": "model.safetensors is truncated", "flags": "--batch is 0 but must be at least 1",
        "last rank": "tensor layers.1.attention.wo.weight holds NaN",
        "tp": "cannot shard n_heads 15: use 1 to 15 ranks",
    }[case]  # fmt: skip
    if case == "every rank":
        truncate(copy)
    if case == "flags":
        flags = ["--batch", "0"]
    if case == "last rank":
        spoil_weights(copy, "layers.1.attention.wo.weight", nan_in_the_last_column)
    ranks = 16 if case == "tp" else 2
    done = script("generate.py", "--checkpoint", copy, "--prompt", "a", *flags, ranks=ranks)
    (line,) = our_lines(done)
    assert message in line
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert 'generate.py", line' not in done.stderr  # no traceback of ours
