"""Generation from the command line and below it: greedy texts, sampling, stopping, results, bad input."""

import argparse
import dataclasses
import functools
import itertools
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch
from cases import refused, slow_case
from configs import BASE, YARN, change
from decoding_runs import generate_json, run_generate
from file_edits import change_tensors, edit_config, edit_state, read_json, write_json
from helpers import (
    ALONE,
    ROOT,
    counted_kernels,
    greedy_tokens,
    naive,
    p_value,
    random_model,
    seeded,
    shard,
    stop_using_kernels,
    unequal_rows,
    write_model,
)
from running import HANGS, call_main, command, free_port, run_main, run_ranks, script

import eval
import generate
import tp
from complete import complete, load
from extras.serve.sample_rows import sample_rows
from generate import Runner
from ladder.checkpoints import checkpoint
from ladder.command_line.prompts import read_prompts
from ladder.decoding import fast_sampling
from ladder.decoding.batch import SINGLE_DEVICE, Sampler, make_cache, round_up
from ladder.errors import InputError
from ladder.kernels import registry
from ladder.text.tokenizer import load_tokenizer
from model import SingleDevice

PROMPTS = ["Once upon a time", "The dog ran", "a"]


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


# The main job


@pytest.fixture(scope="module")
def greedy(tiny):
    """A function from a wiring to the greedy tokens of one device, eager, each computed once."""

    @functools.cache
    def tokens(wiring):
        net, tokenizer = load(tiny, wiring=wiring)
        return [greedy_tokens(net, tokenizer.encode(prompt), 12) for prompt in PROMPTS]

    return tokens


MAIN = [
    (1, "standard", ["--batch", "6"], False), (1, "ladder", ["--compile"], False), (2, "standard", [], False),
    (2, "standard", ["--shares", "4,1"], True), (3, "ladder", [], False), (4, "ladder", [], False),
    slow_case(1, "ladder", ["--compile", "all"], False),
    slow_case(2, "ladder", ["--compile"], True),
]  # fmt: skip


@pytest.mark.parametrize("ranks, wiring, flags, launched", MAIN)
def test_the_same_text_for_every_tp(tiny, greedy, ranks, wiring, flags, launched, out, tmp_path):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS) + "\n\n")
    flags = [*flags, "--wiring", wiring, "--temperature", "0", "--max-new-tokens", "12"]
    flags += ["--prompt", f"@{tmp_path}/prompts"]
    result, printed, said = generate_json(tiny, *flags, out=out, ranks=ranks, launched=launched)
    prompts = PROMPTS * (2 if "--batch" in flags else 1)
    assert result["tokens"] == (greedy(wiring) * 2)[: len(prompts)]
    other = f"these weights are standard's, and run as {wiring}, a function that they were not trained for: "
    assert said.count(other) == (wiring != "standard")
    tokenizer = load_tokenizer(tiny)
    for prompt, row, text in zip(prompts, result["tokens"], result["texts"], strict=True):
        assert tokenizer.decode(tokenizer.encode(prompt) + row) == prompt + text
        assert prompt + text in printed
    expected = {
        "wiring": wiring, "model": tiny.name, "tp": ranks, "batch": len(prompts), "new_tokens": 12,
        "dtype": "float32", "quant": None, "device": "cpu", "torch": torch.__version__,
        "shares": [4, 1] if "4,1" in flags else [1] * ranks, "comm": "int8" if "int8" in flags else "auto",
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert result["prompt_tokens"] == max(len(tokenizer.encode(p)) for p in PROMPTS)
    assert len(result["peak_bytes"]) == ranks and min(result["peak_bytes"]) > 1e7 and result["load_s"] > 0
    assert (result["compile_s"] > 0) == ("--compile" in flags)
    tpot = result["tpot_ms"] / 1e3
    times = {"tok_s": len(prompts) / tpot, "ttft_ms": 1e3 * result["prefill_s"]}
    times |= {"decode_s": 11 * tpot}
    assert {key: result[key] for key in times} == pytest.approx(times)


def test_texts_that_are_cut_are_told_from_those_that_end(copy, greedy, out):
    rows = greedy("standard")
    edit_config(copy, eos_ids=[end := rows[0][3]])
    flags = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result, _, said = generate_json(copy, *flags, "--temperature", "0", "--max-new-tokens", "12", out=out)
    assert result["tokens"] == [[*itertools.takewhile(lambda i: i != end, row)] for row in rows]
    assert result["finish"] == ["stop" if end in row else "length" for row in rows] and "length" in result["finish"]
    cut = result["finish"].count("length")
    assert f"\n{cut} of 3 texts cut at --max-new-tokens or the end of the context\n" in said


def test_the_functions_of_a_notebook(tiny, greedy):
    """load() and complete(): the text of generate.py, no process group, no end of the process."""
    model, tokenizer = load(str(tiny), dtype="float32")
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    rows = [row[: (row + [2]).index(2)] for row in greedy("standard")]
    texts = [tokenizer.continuation(*pair) for pair in zip(ids, rows, strict=True)]
    assert complete(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=0) == texts
    pieces = complete(model, tokenizer, PROMPTS, 12, temperature=0, stream=True)
    first = next(pieces)
    rest = [*pieces]
    assert len(rest) == 12 and ["".join(row) for row in zip(first, *rest, strict=True)] == texts
    assert not torch.distributed.is_initialized()
    assert complete(model, tokenizer, PROMPTS, 12, temperature=0, draft="ngram", proposals=2) == texts
    drawn = [complete(model, tokenizer, ["a"], 30, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    ladder, _ = load(tiny, dtype="bfloat16", wiring="ladder")
    assert ladder.config.wiring == "ladder" and ladder.norm.weight.dtype == torch.bfloat16
    refused("leaves no room in the context of 64", complete, model, tokenizer, ["dog " * 90])
    for prompts, line in ("a", " is one text"), ([], " is empty"), (["a", ""], r"\[1\] is an empty text"):
        refused(f"prompts{line}", complete, model, tokenizer, prompts)
    bad = {"draft": "ngrm", "max_new_tokens": 3.5, "proposals": 0, "temperature": None, "stream": "no"}
    for name, value in bad.items():
        refused(f"^{name} is {value!r} but must be ", complete, model, tokenizer, ["a"], **{name: value})


def unlike(world, folder, other):
    """What a rank gets that asks load() and complete() for something else than rank 0, in several ways."""
    texts = []
    ways = [{}, {"prompts": ["a", "Once"]}, {"max_new_tokens": 5}, {"temperature": 1}, {"seed": 1}]
    with pytest.MonkeyPatch.context() as m:
        m.setattr("complete.join", lambda device: world)
        m.setenv("RANK", str(world.rank))
        m.setenv("WORLD_SIZE", str(world.tp_size))
        net, tokenizer = load(folder)
        same_config, _ = load(other)
        same_folder, _ = load(folder, dtype="bfloat16")
        ways += [{"top_k": 3}, {"top_p": 0.5}, {"draft": "ngram"}, {"proposals": 2}, {"stream": True}]
        for way in [*ways, {"model": same_config}, {"model": same_folder}]:
            asked = {"model": net, "tokenizer": tokenizer, "prompts": ["Once", "a"], "max_new_tokens": 6}
            asked |= {"temperature": 0} | (way if world.rank else {})
            try:
                texts.append(complete(**asked))
            except InputError as e:
                texts.append(str(e))
        for way in {"folder": other}, {"wiring": "ladder"}, {"dtype": "bfloat16"}:
            texts.append(refused("not started alike", load, **{"folder": folder} | (way if world.rank else {})))
    return texts


def test_ranks_of_a_notebook_that_ask_for_something_else_are_told_the_difference(tiny, tmp_path):
    config = checkpoint.read_config(tiny)
    other = shutil.copytree(tiny, tmp_path / "other")
    write_model(other, config, random_model(config, seed=1).state_dict())
    zero, one = run_ranks(2, unlike, tiny, other)
    assert zero == one and zero[0] == complete(*load(tiny), ["Once", "a"], 6, temperature=0)
    names = "tokens of the prompts", "max_new_tokens", "temperature", "seed", "top_k", "top_p", "draft", "proposals"
    names = *names, "stream", "model", "model", "contents of --checkpoint", "wiring", "dtype"
    for name, text in zip(names, zero[1:], strict=True):
        assert (
            text.startswith(f"the ranks were not started alike: rank 1 with {name} ") and f"rank 0 with {name}" in text
        )


@pytest.mark.slow
def test_the_functions_of_a_notebook_on_two_ranks_from_another_folder(tiny, tmp_path):
    (tmp_path / "mine.py").write_text("""
import sys
from complete import complete, load
from ladder.ranks import launch
from ladder.errors import InputError
def main():
    (model, tokenizer), (draft, _) = load(sys.argv[1]), load(sys.argv[1], wiring="ladder")
    for more in {}, {"draft": draft}:
        pieces = list(complete(model, tokenizer, ["Once upon a time", "a"], 12, temperature=0, stream=True, **more))
        sys.stdout.write(f"{model.comm.tp_size} {[''.join(row) for row in zip(*pieces)]}\\n")
    try:
        load(sys.argv[1], "cpu")
    except InputError as e:
        sys.stdout.write(f"{e}\\n")
    load("/nowhere")
launch.run(main)
""")
    wanted = complete(*load(tiny), ["Once upon a time", "a"], 12, temperature=0)
    done = script(tmp_path / "mine.py", tiny, ranks=2, PYTHONPATH=str(ROOT))
    again = "the ranks have met: name the same device in each load()"
    assert sorted(done.stdout.splitlines()) == [f"2 {wanted}"] * 4 + [again] * 2, done.stderr
    # torchrun's own 20 lines, and a block of one rank that ends with our line; it makes every exit code 1
    line = "mine.py: /nowhere: no such folder"
    lines = done.stderr.splitlines()
    assert lines[0] == line and lines[-2] == f"  traceback : {line}" and len(lines) < 40 and done.returncode == 1


def test_step_bytes_are_the_weights_and_the_cache(tiny, out):
    result, *_ = generate_json(tiny, "--prompt", "ids:1,5,6", "--max-new-tokens", "7", out=out)
    c = checkpoint.read_config(tiny)
    layer = c.dim * c.head_dim * (15 + 2 * 5 + 15) + 3 * c.dim * c.intermediate_size + 2 * c.dim
    weights = c.n_layers * layer + c.dim + c.dim * c.vocab_size
    slot = c.n_layers * 2 * 5 * c.head_dim
    assert result["step_bytes"] == 4 * weights + 4 * slot * (3 + 10) / 2  # the mean of 3 to 10 slots
    assert result["bytes_s"] == pytest.approx(result["step_bytes"] / result["tpot_ms"] * 1e3)


def test_a_config_json_gets_random_weights(tmp_path, out):
    values = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    values |= {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64}
    write_json(tmp_path / "tiny.json", values)
    name = str(tmp_path / "tiny.json")
    args = ["--model", f"{name}:2", "--ladder", "--prompt-length", "5", "--max-new-tokens", "4", "--json", out]
    printed, said = run_generate(*args)
    result = read_json(out)
    assert (result["model"], result["wiring"], result["dtype"], result["texts"]) == (name, "ladder", "bfloat16", None)
    assert "tiny.json, 2 layers, ladder" in said
    assert printed == "--- " + " ".join(map(str, result["tokens"][0])) + "\n"


@pytest.mark.parametrize("ranks", [1, slow_case(2)])
def test_a_line_typed_meanwhile_stops_an_answer(ranks, tiny, tmp_path):
    """It is typed at the third decode step of the first answer, and is the next message."""
    keyboard, terminal = pty.openpty()
    os.mkfifo(now := tmp_path / "now")
    threading.Thread(target=lambda: (now.read_bytes(), os.write(keyboard, b"The dog\n")), daemon=True).start()
    (tmp_path / "chatting.py").write_text(f"""
import os, select, sys
sys.path.insert(0, {str(ROOT)!r})
import generate; from ladder.ranks import launch
from generate import Runner
calls, decode = [], Runner.decode
def typing(self, *args):
    calls.append(1)
    if len(calls) == 3 and os.environ.get("RANK", "0") == "0":
        open({str(now)!r}, "w").close()
        select.select([0], [], [])
    return decode(self, *args)
Runner.decode = typing
launch.run(generate.main)
""")
    flags = ["--checkpoint", tiny, "--chat", "--temperature", "0", "--max-new-tokens", "19"]
    process = subprocess.Popen(
        command(tmp_path / "chatting.py", *flags, ranks=ranks), stdin=terminal, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip

    def check_shown(text):
        assert process.stdout.read(len(text.encode())).decode() == text

    check_shown("> ")
    os.write(keyboard, b"Once upon a time\n")
    net, tokenizer = load(tiny)
    ids = []
    for line, count in ("Once upon a time", 4 if ranks == 1 else 8), ("The dog", 19):
        ids += tokenizer.encode_plain(line) if ids else tokenizer.encode(line)
        row = greedy_tokens(net, ids, count, end=2)
        check_shown(f"{tokenizer.continuation(ids, row)}\n" + "> The dog\n" * (line != "The dog"))
        ids += row
    check_shown("> ")
    os.write(keyboard, b"\4")  # Ctrl-D
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and b"Traceback" not in errors, errors.decode()


CHAT = {"chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"}


def test_a_chat_is_reset_and_shows_answers_alone(copy):
    write_json(copy / "tokenizer_config.json", CHAT)
    flags = ["--checkpoint", copy, "--temperature", "0", "--max-new-tokens", "4", "--chat", "Be brief."]
    first, second = run_generate(*flags, stdin="a\n/reset\na\n")[0].splitlines()
    printed, said = run_generate(*flags, stdin="a\na\n")
    assert first == second != printed.splitlines()[1]
    assert said.startswith("the text of --chat is the system message; to have it answered: --chat --prompt TEXT\n")
    assert run_generate(*flags, "--prompt", "a", "--batch", "2")[0] == f"--- {first}\n" * 2


@pytest.mark.parametrize("flags", [[], slow_case(["--compile", "all"])])
def test_a_chat_with_a_template_and_a_full_context(copy, flags):
    write_json(copy / "tokenizer_config.json", CHAT)
    flags = ["--checkpoint", copy, "--temperature", "0", "--max-new-tokens", "2", "--chat", *flags]
    printed, said = run_generate(*flags, stdin="a\nb\na\na\n")
    texts = printed.split("\n")
    assert "do not fit the context of 64: starting anew with this message" in said
    assert texts[0] in texts[2:4] and texts[0] != texts[1] and "" not in texts[:4]
    again, said = run_generate(*flags, stdin="a\n" + "dog " * 60 + "\n/help\n/quit\nb\na\na\n/exit\na\n")
    assert "tokens leaves no room in the context of 64: shorten it" in said and said.count("/reset begins") == 2
    assert "/quit is no command: /reset begins" in said
    assert again == printed  # a message that is refused leaves the conversation as it was
    assert said.count("(cut at --max-new-tokens)") == 4
    assert run_generate(*flags, "--prompt", "a")[0] == texts[0] + "\n"
    system = ["--chat", "b"]
    assert (
        run_generate(*flags, *system, "--prompt", "a")[0]
        == run_generate(*flags, *system, stdin="a\n")[0]
        != texts[0] + "\n"
    )


def test_what_a_prompt_may_be(tiny, copy):
    """As lists of ids: each is the text that is named, special tokens in it plain."""
    tokenizer = load_tokenizer(tiny)
    config = checkpoint.read_config(tiny)
    (copy / "text").write_text("\ufeffThe <s>\n\ndog\n", encoding="utf-8")
    flags = {"chat": None, "prompt_length": None, "batch": None}
    for given, texts in (
        (f"@{copy}/text", ["The <s>", "dog"]), (f"file:{copy}/text", ["The <s>\n\ndog\n"]),
        ("The <s>", ["The <s>"]), ("dog @@", ["dog @@"]),
    ):  # fmt: skip
        ids = read_prompts(argparse.Namespace(prompt=[given], **flags), config, tokenizer)
        assert ids == [[1, *tokenizer.encode_plain(text)] for text in texts] and all(1 not in row[1:] for row in ids)


@pytest.mark.parametrize("shows, passes", [(True, 9), (True, 8), (False, 9)])
def test_a_long_prefill_on_one_rank_shows_its_progress(shows, passes, monkeypatch):
    """Others have no bar at all, not even a hidden one: a SIGTERM that comes while one is deleted would be lost."""
    net = random_model(dataclasses.replace(BASE, n_layers=1, max_seq_len=9))
    bars = []
    monkeypatch.setattr(generate, "tqdm", lambda starts, *_, **__: bars.append(1) or starts)
    runner = Runner(net, net.new_cache(1, passes + 1))
    runner.chunk_tokens = 1
    runner.shows_progress = shows
    runner.prefill(torch.ones(1, passes, dtype=torch.long), torch.tensor([passes]))
    assert bars == [1] * (passes > 8 and shows)


@pytest.mark.slow
def test_two_nodes(tiny, greedy, out):
    """Two launchers with one rank each, as on two machines."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    flags = ["--checkpoint", tiny, "--ladder", "--temperature", "0", "--max-new-tokens", "12"]
    words = [str(word) for word in (ROOT / "generate.py", *flags, "--prompt", PROMPTS[0], "--json", out)]
    nodes = [subprocess.Popen([*launcher, f"--node_rank={r}", *words], stderr=subprocess.PIPE) for r in (1, 0)]
    errors = [node.communicate(timeout=HANGS)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    met = b"all 2 ranks have met; what they compute is printed at 127.0.0.1"
    assert [met in text for text in errors] == [True, False]
    assert read_json(out)["tokens"] == [greedy("ladder")[0]]


def test_from_a_clone_of_any_name_nothing_is_written_to_it(tmp_path):
    clone = tmp_path / "a 'b \"c standard ladder"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "docs", "tests"))
    paths = {*clone.rglob("*")}
    environment = {k: v for k, v in os.environ.items() if k != "HOME"} | {"PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "generate.py", "--checkpoint", "demo", "--prompt", "Once upon", "--max-new-tokens", "3"]
    done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0 and done.stdout.startswith("Once upon"), done.stderr
    assert {*clone.rglob("*")} == paths


# Sampling and stopping


WAYS = [(t, None, 1.0) for t in (0, 0.8, 1e-6, 1e30)]
WAYS += [(1.0, 5, 1.0), (0.7, 100, 1.0), (3.0, 9999, 1.0), (1.0, None, 0.905), (2.0, 90, 0.605)]
WAYS = [(*way, 0.0) for way in WAYS]  # temperature, top_k, top_p, min_p
WAYS += [(0.9, None, 1.0, 0.02), (1.1, 7, 0.9, 0.01), (1.0, None, 0.97, 1e-4), (3.0, 200, 0.8, 0.3), (1e30, 5, 0.7, 0)]


def chosen_by(way, logits, seed=3, comm=SINGLE_DEVICE):
    """The ids of rows, by one of WAYS, as a list."""
    temperature, top_k, top_p, min_p = way
    return generate.sample(logits, comm, Sampler(temperature, top_k, top_p, seed, min_p=min_p)).tolist()


def hard_to_choose(vocab_size):
    """Logits whose largest ones are equal, few, many, and all of them alike."""
    generator = seeded(0)
    few = 9 * torch.rand(2, vocab_size, generator=generator) ** 9
    equal = torch.randint(3, (2, vocab_size), generator=generator).float()
    return torch.cat((few, equal, few.roll(5) / 50, torch.zeros(2, vocab_size)))


@pytest.mark.parametrize("settings", [
    WAYS[1], *WAYS[4:9],
    (1.0, None, 1.0, 0.01), (1.0, None, 0.6, 1e-3), (2.0, None, 0.5, 1e-3), (1.5, 90, 0.9, 0.05),
], ids=str)  # fmt: skip
def test_many_ids_are_drawn_as_often_as_they_are_likely(settings):
    """Where more ids are kept than a rank sends, and where fewer are."""
    for logits in hard_to_choose(300)[:: 4 if settings[1] else 2]:  # of those that equal the k-th, top_k keeps all
        ids = chosen_by(settings, logits.expand(10000, -1))
        counts = torch.bincount(torch.tensor(ids), minlength=300)
        assert p_value([(counts.tolist(), naive(logits.double(), *settings))]) > 1e-4


def own_logits(world, logits, kernel):
    """(A rank's collectives, its part of these logits), with or without the kernel that stands in for sample."""
    stop_using_kernels()
    if kernel:
        registry.use([fast_sampling.KERNEL])
    assert fast_sampling.is_in_use() == kernel
    config = dataclasses.replace(BASE, vocab_size=logits.shape[-1])
    comm = SingleDevice() if world.alone else tp.TensorParallel(config, world.shares, world.group)
    return comm, logits[..., slice(*tp.vocab_range(logits.shape[-1], world.rank, world.shares))]


def samplers_of(n):
    """Samplers of all kinds, each with settings and a seed of its own."""
    return [Sampler(*way[:3], i, "cpu", *way[3:]) for i, way in zip(range(n), itertools.cycle(WAYS))]  # noqa: B905


def sampled_together(world, logits, kernel=True):
    """What Samplers choose together in some steps, given this rank's part of the logits; how often they gathered."""
    comm, parts = own_logits(world, logits, kernel)
    samplers = samplers_of(logits.shape[1])
    gathers = []
    gather = comm.all_gather
    comm.all_gather = lambda x: gathers.append(x) or gather(x)
    return [sample_rows(samplers, part, comm).tolist() for part in parts], len(gathers)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_that_are_sampled_together_are_chosen_as_if_alone(ranks):
    """In a batch whose rows have other settings and other logits, that are not finite in one."""
    logits = torch.stack([hard_to_choose(700).repeat(3, 1).roll(n, 0) for n in range(4)])
    logits[2, 5, 3] = torch.nan
    alone = samplers_of(24)
    expected = [
        [generate.sample(row[None], SINGLE_DEVICE, sampler).item() for sampler, row in zip(alone, step, strict=True)]
        for step in logits
    ]
    assert expected[2][5] == -1 and len({*map(str, expected)}) == 4
    for ids, gathers in run_ranks(ranks, sampled_together, logits):
        assert ids == expected and gathers <= 2 * len(logits)  # the second of all logits of a few rows
    assert all(ids == expected for ids, _ in run_ranks(ranks, sampled_together, logits, False))


def test_rows_that_are_sampled_together_gather_once():
    logits = torch.cat([hard_to_choose(700)[:2]] * 6)[None]
    [(_, gathers), _] = run_ranks(2, sampled_together, logits)
    assert gathers == 1


def chosen(world, logits, kernel=True):
    """What each way of WAYS chooses, given this rank's part of the logits, by the kernel or by sample as written."""
    comm, part = own_logits(world, logits, kernel)
    assert torch.equal(comm.gather_logits(part), logits) or logits.isnan().any()
    return [chosen_by(way, part, comm=comm) for way in WAYS]


def chosen_without_logits(world, logits):
    """What each way of WAYS chooses by the kernel, and the last dimensions of what is gathered for it."""
    comm, part = own_logits(world, logits, True)
    last_dimensions = set()
    all_gather = comm.all_gather

    def gather(x):
        last_dimensions.add(x.shape[-1])
        return all_gather(x)

    comm.all_gather = gather
    ids = [chosen_by(way, part, comm=comm) for way in WAYS]
    return ids, last_dimensions


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, (1, 9), (5, 2, 1)])
@pytest.mark.parametrize("vocab_size", [17, 131, 700])  # of 17, two of four ranks hold none
def test_every_number_of_ranks_chooses_alike_and_marks_rows_that_are_not_finite(vocab_size, ranks):
    """By the kernel, which exchanges candidates, and by sample as written: the same ids of the same seed."""
    logits = hard_to_choose(vocab_size)
    alone = [chosen_by(way, logits) for way in WAYS]
    assert alone[0] == [row.index(max(row)) for row in logits.tolist()]  # the first of equal ones
    for kernel in True, False:
        assert all(ids == alone for ids in run_ranks(ranks, chosen, logits, kernel)), kernel
    logits[1, -1] = torch.nan
    logits[4, 0] = -torch.inf
    logits[6, 3] = torch.inf
    logits[7] = -torch.inf
    marked = [chosen_by(way, logits) for way in WAYS]
    assert marked == [[-1 if row in (1, 4, 6, 7) else i for row, i in enumerate(ids)] for ids in alone]
    for kernel in True, False:
        assert all(ids == marked for ids in run_ranks(ranks, chosen, logits, kernel)), kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_kernel_draws_what_sample_draws_time_and_again(way, dtype):
    """Of one generator, in steps of many unequal rows, with the vocabulary of a small model."""
    generator = seeded(1)
    steps = (3 * torch.randn(5, 40, 2003, generator=generator)).to(dtype)
    steps[:, ::3] *= torch.rand(5, 14, 1, generator=generator)

    def draw():
        temperature, top_k, top_p, min_p = way
        sampler = Sampler(temperature, top_k, top_p, 11, min_p=min_p)
        return [generate.sample(logits, SINGLE_DEVICE, sampler).tolist() for logits in steps]

    plain = draw()
    registry.use([fast_sampling.KERNEL])
    with counted_kernels() as counts:
        assert draw() == plain
    assert counts["generate.sample"] == len(steps)


@pytest.mark.parametrize(
    "settings", [(t, None, 1.0) for t in (1e-5, 1e-7, 1e-8, 1e-300)] + [(1.0, None, 0), (3.0, 5, 1e-9)]
)
def test_what_approaches_greedy_is_greedy(settings):
    logits = hard_to_choose(700)[[0, 1, 4, 5]]  # without equal ones, among which a temperature draws
    expected = logits.argmax(-1).tolist()
    assert chosen_by((*settings, 0.0), logits) == expected
    registry.use([fast_sampling.KERNEL])
    assert chosen_by((*settings, 0.0), logits) == expected


def test_what_is_likely_enough_is_chosen_without_gathering_logits():
    logits = hard_to_choose(700)[:2] * 3
    alone = [chosen_by(way, logits) for way in WAYS]
    for ids, last_dimensions in run_ranks(2, chosen_without_logits, logits):
        assert ids == alone
        assert last_dimensions == {2}  # pairs of a score and an id, not logits of the vocabulary


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("chunk_tokens", [1, 6, 26, 99])
def test_a_prefill_in_chunks_and_splits_equals_one_pass(chunk_tokens, splits):
    net = random_model(change(BASE, heads={"sliding_window": 3, "window_layers": (0, 2)}))
    tokens, lengths = unequal_rows(BASE)
    runner = Runner(net, net.new_cache(3, 12), splits=splits)
    widths = []

    def prefill(tokens, *args, **kwargs):
        widths.append(tokens.shape[1])
        return net(tokens, *args, **kwargs)

    runner.passes.prefill = prefill
    runner.chunk_tokens = chunk_tokens
    with torch.no_grad():
        one = net.new_cache(3, 12)
        expected = net(tokens, cache=one, last_index=lengths - 1)[:, 0]
        logits = runner.prefill(tokens, lengths)
    assert widths == {1: [1] * 9, 6: [2, 2, 2, 2, 1], 26: [8, 1], 99: [9]}[chunk_tokens]
    assert torch.allclose(logits, expected, atol=1e-5)
    for (k, v), (k1, v1) in zip(runner.cache, one, strict=True):
        assert torch.allclose(k, k1, atol=1e-5) and torch.allclose(v, v1, atol=1e-5)


def test_synthetic_prompts_differ_end_with_the_context_and_are_prefilled_in_two_chunks_if_many(tiny, out):
    flags = ["--prompt-length", 61, "--temperature", 0, "--batch"]
    one, *_ = generate_json(tiny, *flags, 9, out=out)
    two, _, said = generate_json(tiny, *flags, 9, out=out, ranks=2)
    few, *_ = generate_json(tiny, *flags, 8, out=out, ranks=2)
    assert (one["batch"], one["prompt_tokens"], one["new_tokens"]) == (9, 61, 3)
    assert [result["sequence_splits"] for result in (one, two, few)] == [1, 2, 1] and "prefill in 2 parts" in said
    assert one["finish"] == ["length"] * 9 and "9 of 9 texts cut at" in said
    assert one["tokens"] == two["tokens"] and len({tuple(row) for row in one["tokens"]}) == 9


def test_a_prompt_that_names_a_file_is_a_text_and_one_line_says_how_to_read_the_file(tiny, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids:5").touch()
    said = generate_json(tiny, "--prompt", "ids:5", "--max-new-tokens", 1, out=out)[2]
    assert said.count("ids:5 is also the name of a file: --prompt @ids:5 reads a prompt from each of its lines\n") == 1


def test_a_long_prompt_leaves_its_neighbours_their_own_end(tiny, out):
    """Of a context of 64 tokens, each row ends at --max-new-tokens or at 64, as it does alone."""
    prompts = ["ids:5", f"ids:{','.join(['5', '9'] * 31)}"]
    flags = ["--temperature", "0", "--max-new-tokens", "40"]
    flags_of_both = [*flags, "--prompt", prompts[0], "--prompt", prompts[1]]
    both, _, said = generate_json(tiny, *flags_of_both, out=out)
    assert "--max-new-tokens 40: the context of 64 has room for 2 after a prompt of 62 tokens\n" in said
    alone = [generate_json(tiny, *flags, "--prompt", prompt, out=out) for prompt in prompts]
    assert [result["tokens"][0] for result, *_ in alone] == both["tokens"]
    assert [*map(len, both["tokens"])] == [40, 2] and "--max-new-tokens 40" not in alone[0][2]
    drafted, *_ = generate_json(tiny, *flags_of_both, "--draft", "ngram", out=out)
    assert drafted["tokens"] == both["tokens"]


@pytest.mark.parametrize("compile", [False, slow_case(True)], ids=["eager", "compiled"])
def test_decode_reads_only_the_filled_slots_with_one_graph(compile, monkeypatch):
    """What is beyond them holds NaN, which a mask would not keep out of a sum."""
    net = random_model(change(BASE, n_layers=2, heads={"sliding_window": 11, "window_layers": (1,)}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runner = Runner(net, net.new_cache(2, 40), compile)
    tensors = [t for layer in runner.cache for t in layer]
    seen = []
    for tensor in tensors:
        tensor[:, :, 9:] = torch.nan

    def sample(logits, comm, sampler):
        assert logits.isfinite().all()
        for tensor in tensors:
            assert tensor[:, :, 9 + len(seen) :].isnan().all()
            tensor[1, :, 9 + len(seen)] = 0  # the next step reads this slot of the shorter row too, behind the mask
        seen.append(1)
        return logits.argmax(-1)

    prompts = [[*range(5, 14)], [7, 8]]
    monkeypatch.setattr(generate, "sample", sample)
    rows = generate.generate(runner, prompts, 30, Sampler(0)).rows
    assert rows == [greedy_tokens(net, prompt, 30) for prompt in prompts]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compile)


def test_each_row_stops_at_its_own_end_and_whoever_sees_the_tokens_can_stop_all_and_take_time():
    net = random_model(BASE)
    prompts = [[5, 6, 7], [5], [5, 6]]
    seen = []
    whole = [greedy_tokens(net, prompt, 9) for prompt in prompts]
    ends = whole[0][4], whole[1][1]
    expected = [whole[0][:4], whole[1][:1], whole[2]]

    def generation():
        runner = Runner(net, net.new_cache(3, 12))
        return generate.Generation(runner, prompts, 9, Sampler(0), ends)

    done = generation()
    seen += done
    assert (done.finish_reasons, done.new_tokens, done.steps, len(seen)) == (["stop", "stop", "length"], 9, 8, 9)
    assert done.rows == expected == [sum(row, []) for row in zip(*seen, strict=True)]
    done = generation()
    for fresh in done:
        time.sleep(0.5)
        if fresh[1] == []:  # the end of row 1
            break
    assert (done.finish_reasons, done.new_tokens, done.rows) == ([None, "stop", None], 2, [row[:2] for row in expected])
    assert 0 < done.prefill_s < 0.5 and 0 < done.decode_s < 0.5


# Numbers that are not finite end a generation with a line that says where; the same request twice is the same


def test_an_overflow_of_float16_is_named(tmp_path):
    """A bfloat16 checkpoint whose second MLP, its layer 1's, gives more than float16 holds."""
    state = random_model(BASE).state_dict()
    state["layers.1.feed_forward.w2.weight"] *= 1e5
    write_model(tmp_path, BASE, state, torch.bfloat16)
    flags = ["--prompt", "ids:3,4,5", "--prompt", "ids:6,7", "--temperature", "0", "--dtype", "float16"]
    refused("row 0 in step 0 .*--dtype", run_main, generate, "--checkpoint", tmp_path, *flags)
    model = generate.load_model(BASE, str(tmp_path), "float16", ALONE)
    refused("loss of nan .* in float16: .*--dtype", eval.check_finite, torch.nan, str(tmp_path), model)
    assert eval.check_finite(1.5, str(tmp_path), model) == 1.5


@pytest.mark.parametrize("changes, limit", [
    ({}, 5000), ({"rope_scaling": YARN | {"original_max_position_embeddings": 1300}}, 1300),
])  # fmt: skip
def test_slots_of_a_cache_are_rounded_up_to_few_numbers(changes, limit):
    """Never across the context, nor the one before rope_scaling, by which longrope chooses its factors."""
    config = dataclasses.replace(BASE, max_seq_len=5000, **changes)
    sizes = [round_up(length, config) for length in range(1, 5001)]
    assert {*sizes} == {256, 512, 1024, 1536, 2048, 3072, 4096, 5000, limit}
    assert all(length <= size and (length > limit or size <= limit) for length, size in enumerate(sizes, start=1))


def test_a_prompt_of_another_length_compiles_nothing(monkeypatch):
    """The second also has a cache, a Runner and a torch.compile of its own, as in another call of complete()."""
    graphs = []
    compile = torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, fullgraph, **_: compile(model, backend=count, dynamic=False))
    torch._dynamo.reset()
    net = random_model(BASE)
    greedy = Sampler(0)
    for prompt in [3, 4, 5], [6, 7, 8, 9, 10, 11, 12]:
        cache = make_cache(net, 1, len(prompt) + 4, in_buckets=True)
        rows = generate.generate(Runner(net, cache, compile=True), [prompt], 4, greedy).rows
        assert rows == generate.generate(Runner(net, make_cache(net, 1, 12)), [prompt], 4, greedy).rows
    assert len(graphs) == 1


def twice(world, compile):
    """(rows, logits of each step) of a request of unequal rows, the same bits twice."""
    tokens, lengths = unequal_rows(BASE)
    prompts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    net = shard(dataclasses.replace(BASE, wiring="ladder"), world, torch.bfloat16)
    greedy = []
    runs = []

    def sample(logits, comm, sampler):
        runs[-1].append(comm.gather_logits(logits).clone())
        return original(logits, comm, sampler)

    original = generate.sample
    for junk in (0.0, 1e3):  # what memory held before must not matter
        torch.full((2**18,), junk)
        torch._dynamo.reset()
        runs.append([])
        runner = Runner(net, net.new_cache(3, 24), compile)
        runner.chunk_tokens = 12
        with pytest.MonkeyPatch.context() as m:
            m.setattr(generate, "sample", sample)
            greedy.append(generate.generate(runner, prompts, 12, Sampler(0)).rows)
    logits, same = map(torch.stack, runs)
    assert greedy[0] == greedy[1] and torch.equal(logits, same)
    return greedy[0], logits


@pytest.mark.parametrize("ranks, compile", [(3, False), slow_case(2, True)])
def test_the_same_request_twice_gives_the_same_bits(ranks, compile):
    results = run_ranks(ranks, twice, compile)
    for rows, logits in results:
        assert rows == results[0][0] and torch.equal(logits, results[0][1])


# Bad input


WO = "layers.1.attention.wo.weight"


@pytest.mark.parametrize("spoil, message", [
    (lambda folder: change_tensors(folder, {WO: None}), f"no tensor {WO}"),
    (lambda folder: edit_config(folder, intermediate_size=99), "the config says (99, 48)"),
    (lambda folder: edit_config(folder, n_layers=2), "has a tensor layers.2."),
    (lambda folder: (folder / "tokenizer.model").unlink(), "copy has no tokenizer: use --prompt ids:"),
])  # fmt: skip
def test_bad_checkpoints_are_one_clear_line(spoil, message, copy):
    spoil(copy)
    refused(re.escape(message), run_main, generate, "--checkpoint", copy, "--prompt", "a")


def error_of(world, args):
    return refused("holds NaN", call_main, world, generate.main, args)


def test_what_one_rank_alone_finds_wrong_all_ranks_say(copy):
    """Only the last one reads the last column."""
    edit_state(copy, lambda state: state[WO][0, -1].fill_(torch.nan))
    errors = run_ranks(3, error_of, ["--checkpoint", str(copy), "--prompt", "a"])
    assert errors == errors[:1] * 3 and errors[0].startswith(f"tensor {WO} holds NaN")


def test_bad_input_of_one_node_ends_the_other(tiny):
    """Only node 1 is asked for a device that it does not have, which it finds before the ranks meet."""
    nodes = []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank, device in ((0, "cpu"), (1, "cuda")):
        words = command("generate.py", "--checkpoint", tiny, "--prompt", "a", "--device", device)
        env = {**environment, "RANK": str(rank)}
        nodes.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
    errors = "".join(node.communicate(timeout=HANGS)[1] for node in nodes)
    assert errors == "generate.py: no such device: cuda:1; this machine has cpu\n"
    assert [node.returncode for node in nodes] == [2, 2]
