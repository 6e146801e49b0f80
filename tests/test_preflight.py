"""What a run takes of the memory, said before it starts: the sum, against real runs, and what would fit."""

import dataclasses
import time

import pytest
import torch
from helpers import BASE, YARN, run_ranks, script

import eval
import generate
from formats import checkpoint
from measure import preflight, report
from measure.preflight import Request, memory, weight_bytes
from measure.sweep import NO_MEMORY
from model import InputError
from runtime import launch
from tp import load_shard

CPU = torch.device("cpu")
ALONE = launch.World(0, 1, CPU)
SMALL = dataclasses.replace(BASE, n_heads=15, n_kv_heads=5, head_dim=16, dim=192, intermediate_size=256, vocab_size=301)
CONFIGS = {
    "uneven": (SMALL, torch.float32),
    "tied": (dataclasses.replace(SMALL, tie_embeddings=True, wiring="ladder", rope_scaling=YARN), torch.bfloat16),
    "biases": (dataclasses.replace(SMALL, qkv_bias=True, wo_bias=True, mlp_bias=True, qk_norm=True), torch.bfloat16),
    "int8": (dataclasses.replace(SMALL, quant="int8", tie_embeddings=True), torch.bfloat16),
    "int4": (dataclasses.replace(SMALL, n_heads=24, n_kv_heads=4, quant="int4", group_size=64), torch.bfloat16),
    "kept": (dataclasses.replace(SMALL, quant="int8", kept=("output", "w2")), torch.float16),
}


def held(tensors):
    """Bytes of tensors, those of one memory once."""
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in sorted(tensors, key=lambda t: t.nbytes)}.values())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rank", "tp_size"), [(0, 1), (1, 2), (2, 4), (5, 7)])
def test_weights_and_cache_are_what_a_rank_will_hold(name, rank, tp_size):
    config, dtype = CONFIGS[name]
    model = load_shard(config, checkpoint.RandomWeights(config, CPU), dtype, CPU, rank, tp_size)
    parameters = [p for n, p in model.named_parameters() if not (config.tie_embeddings and n.startswith("output."))]
    assert weight_bytes(config, dtype, rank, tp_size) == held(parameters)
    need = memory(Request(config, dtype, rows=3, prompt=20, new=5), rank, tp_size)
    assert need["cache"] == sum(t.nbytes for layer in generate.make_cache(model, 3, 25) for t in layer)


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free memory."""
    return lambda size: monkeypatch.setattr(report, "free_bytes", lambda device: size)


def refusal(*args):
    with pytest.raises(InputError) as error:
        preflight.check(*args)
    assert "\n" not in str(error.value) and NO_MEMORY.search(str(error.value))  # as a sweep looks for it
    return str(error.value)


NAMES = {"rows": "--batch {}", "new": "--max-new-tokens {}", "prompt": "prompts of {} tokens", "quant": "--quant {}"}


def test_what_would_fit_fits_and_one_more_does_not(free):
    request = Request(SMALL, torch.float32, rows=64, prompt=40, new=20, chunk=64)
    total = sum(memory(request).values())
    free(total)
    preflight.check(ALONE, request, NAMES)
    free(total - 1)
    line = refusal(ALONE, request, NAMES)
    assert "int8" in line
    for field, before in ("rows", "--batch "), ("new", "--max-new-tokens "), ("prompt", "prompts of "):
        n = int(line.partition(before)[2].split()[0].rstrip(","))
        assert n < getattr(request, field)
        preflight.check(ALONE, request._replace(**{field: n}), NAMES)
        refusal(ALONE, request._replace(**{field: n + 1}), NAMES)
    ranks = int(line.partition(" ranks, 1 on each machine")[0].split()[-1])
    assert ranks > 1 and sum(memory(request, 0, ranks).values()) < total
    free(weight_bytes(SMALL, torch.float32) // 200)
    assert refusal(ALONE, request, NAMES).endswith("no smaller run fits")
    assert "--batch" not in refusal(ALONE, request, {})


def test_int4_is_named_where_int8_does_not_fit(free):
    config = dataclasses.replace(SMALL, n_heads=16, n_kv_heads=4)
    request, names = Request(config, torch.bfloat16, rows=1, prompt=1, new=1), {"quant": "as {}"}
    sums = [
        sum(memory(request._replace(config=dataclasses.replace(config, quant=q, group_size=g))).values())
        for q, g in ((None, None), ("int8", None), ("int4", 64))
    ]
    for room, said in (sums[0] - 1, "as int8"), (sums[1], "as int8"), (sums[1] - 1, "as int4"), (sums[2], "as int4"):
        free(room)
        assert said in refusal(ALONE, request, names)
    free(sums[2] - 1)
    assert "as int" not in refusal(ALONE, request, names)


def test_ranks_of_one_machine_share_its_memory(free, monkeypatch):
    request = Request(SMALL, torch.float32, rows=2, prompt=8, new=8)
    sums = [sum(memory(request, rank, 4).values()) for rank in range(4)]
    for local, rank, total in (4, 2, sum(sums)), (2, 3, sums[2] + sums[3]), (1, 1, sums[1]):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        world = launch.World(rank, 4, CPU)
        free(total)
        preflight.check(world, request, NAMES)
        free(total - 1)
        assert f"it takes {preflight.in_words(total)} (" in refusal(world, request, NAMES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    simulated = launch.World(0, 4, CPU, simulated=True)  # which is here alone
    free(sums[0])
    preflight.check(simulated, request, NAMES)


def test_generate_refuses_before_it_builds_anything(free, monkeypatch, capsys):
    monkeypatch.setattr(generate, "load_model", lambda *_: pytest.fail("it has begun"))
    start = time.process_time()
    for flags, said in (
        (("--model", "405b", "--prompt-length", 10), r"it takes 8\d\d\.\d\d GB \(weights 811\.\d\d GB, cache 0"),
        (("--model", "70b", "--prompt-length", 10), "what fits is --quant int4, or 4 ranks, 1 on each machine"),
        (
            ("--model", "1b", "--prompt-length", 100, "--batch", 4096),
            r"what fits is --batch 3\d\d\d, or --max-new-tokens 1\d\d, or .* or 2 ranks",
        ),
        (("--model", "8b", "--prompt-length", 130000, "--batch", 64), r"prompts of \d\d\d\d tokens"),
        (("--model", "1b", "--prompt-length", 8, "--max-new-tokens", 10**5, "--batch", 50), "--max-new-tokens "),
    ):
        free(45 * 10**9)
        with pytest.raises(InputError, match=said):
            generate.main(["--random-weights", *map(str, flags)])
    assert time.process_time() - start < 5  # seconds, of five runs


def test_a_chat_names_its_context(free, tiny, monkeypatch):
    monkeypatch.setattr(generate, "load_model", lambda *_: pytest.fail("it has begun"))
    config = checkpoint.read_config(tiny)
    request, names = preflight.generation(
        generate.parse(["--checkpoint", str(tiny), "--interactive"]), config, torch.float32, [], config.max_seq_len
    )
    free(sum(memory(request).values()) - 1)
    said = rf"the same weights in int8 \(quantize.py\), or 2 ranks|--interactive {config.max_seq_len - 1}"
    assert names["new"] == "--interactive {}"
    with pytest.raises(InputError, match=said):
        generate.main(["--checkpoint", str(tiny), "--interactive"])


def test_eval_refuses_too_many_rows(free, tiny, tmp_path):
    (tmp_path / "text").write_text("Once upon a time there was a little dog. " * 300)
    free(10**7)
    with pytest.raises(InputError, match=r"what fits is --batch \d+, or --window \d+"):
        eval.main(["--checkpoint", str(tiny), "--text", str(tmp_path / "text"), "--batch", "1000"])


def refused(world, folder):
    with pytest.MonkeyPatch.context() as m, pytest.raises(InputError) as error:
        m.setattr(launch, "join", lambda device, flags: world)
        m.setattr(report, "free_bytes", lambda device: 10**4 if world.rank == 1 else 10**9)  # as one finds it
        generate.main(["--checkpoint", folder, "--prompt", "Once"])
    return str(error.value)


def test_ranks_end_alike(tiny):
    first, second = run_ranks(2, refused, str(tiny))
    assert first == second and first.startswith("this would run out of memory: it takes ")


@pytest.mark.slow
def test_one_rank_says_it():
    done = script("generate.py", "--model", "405b", "--random-weights", "--prompt-length", 5, ranks=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("generate.py: this would run out of memory")]
    assert len(lines) == 1 and "InputError" not in done.stderr and done.returncode == 1


GROUPS = {  # the line of /proc/self/cgroup, the files of groups, and what they leave
    "version 2": ("0::/a/b", {"a/b": ("1000", "400", "inactive_file 30\nactive_file 70\n")}, [700]),
    "version 2, in a container": ("0::/", {"": ("900", "400", "inactive_file 0\nactive_file 50\n")}, [550]),
    "the parent's limit": (
        "0::/a/b",
        {"a/b": ("max", "1", "inactive_file 0\nactive_file 0\n"), "a": ("50", "9", "inactive_file 1\nactive_file 0\n")},
        [42],
    ),
    "version 1": (
        "4:cpu,memory:/x",
        {"memory/x": ("1000", "400", "inactive_file 9\ntotal_inactive_file 30\ntotal_active_file 70\n")},
        [700],
    ),
    "version 1, a folder out of sight": (
        "4:memory:/docker/1",
        {"memory": ("1000", "400", "total_inactive_file 0\ntotal_active_file 0\n")},
        [600],
    ),
    "another controller": ("4:cpu:/x", {"x": ("1", "1", "")}, []),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_control_group_limits_the_memory(case, tmp_path):
    line, folders, left = GROUPS[case]
    (tmp_path / "cgroup").write_text(f"{line}\n")
    for name, texts in folders.items():
        folder = tmp_path / "sys" / name
        folder.mkdir(parents=True, exist_ok=True)
        names = report.CGROUP_1[:2] if "memory" in line else report.CGROUP_2[:2]
        for file, text in zip((*names, "memory.stat"), texts, strict=True):
            (folder / file).write_text(text)
    assert report.group_bytes(tmp_path / "cgroup", tmp_path / "sys") == left


def test_the_smallest_of_machine_and_groups_is_free(monkeypatch):
    whole = report.free_bytes(CPU)
    assert 2**26 < whole < 2**50
    monkeypatch.setattr(report, "group_bytes", lambda: [2**40, 12345])
    assert report.free_bytes(CPU) == 12345
