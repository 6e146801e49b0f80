"""The advisor: its predictions against sums made by hand, its table against WIRINGS, and bad input."""

import dataclasses
import re
import shlex

import pytest
import torch
from cases import refused
from configs import BASE, change, queued
from helpers import ROOT, write_model
from running import run_main

from extras.measure import advise
from extras.measure.advise import Machine, Times
from extras.measure.clock import variants
from extras.measure.link import LINKS
from ladder.checkpoints.random_weights import RandomWeights
from ladder.memory import step_bytes
from ladder.sources.sizes import named_size
from model import WIRINGS, all_wirings, find_wiring
from tp import load_shard

LAYERS = 5
FORM = change(BASE, n_layers=LAYERS)


def alternating(n, attention, feed_forward, all_reduce, head=0.0):
    """n ladder layers after `head` seconds: each but the first sublayer hides an all-reduce."""
    pairs = max(feed_forward, all_reduce) * n + max(attention, all_reduce) * (n - 1)
    return head + attention + pairs + all_reduce


def by_hand(a, m, c):
    """{wiring: seconds of 5 layers}, of sublayers of a and m seconds and all-reduces of c."""
    both = a + m
    n = LAYERS
    seam = (n - 2) * both + (2 * (n - 2) - 1) * c  # three standard layers, without their last all-reduce
    return {
        "standard": n * (both + 2 * c), "ladder": alternating(n, a, m, c), "delayed": alternating(n, a, m, c),
        "parallel": n * (both + c), "spd": n * (both + c), "upper-bound": n * both,
        "parallel-ladder": both + (n - 1) * max(both, c) + c, "spd-ladder": both + (n - 1) * max(both, c) + c,
        "desync:2": n * both + 5 * c, "desync:4": n * both + 3 * c,  # of ten: the fourth, eighth and last
        "ladder:2": seam + max(a, c) + 2 * max(m, c) + max(a, c) + c,
        "pair:1-2": n * both + 8 * c, "pair-ladder": both + c + 2 * max(2 * a, c) + 2 * max(2 * m, c) + c,
        "delayed-4": queued([a, m] * n, c, [4] * 2 * n),
    }  # fmt: skip


@pytest.mark.parametrize("all_reduce", [0.5, 2.0, 3.5, 9.0])
def test_a_step_is_the_sum_made_by_hand(all_reduce):
    times = Times(1.0, 3.0, 0.25, all_reduce, 0.125)
    sums = by_hand(1.0, 3.0, all_reduce)
    for name in variants(FORM):
        seconds, n, hidden = advise.step_seconds(change(FORM, wiring=name), times)
        assert seconds == pytest.approx(sums[name] + 0.375), name
        exposed = sums[name] - sums["upper-bound"]
        assert hidden == (pytest.approx(1 - exposed / (n * all_reduce)) if n else None), name
    assert {*variants(FORM)} == {*sums}


def test_by_tcp_latencies_run_at_once():
    ladder = change(FORM, wiring="ladder")
    times = Times(1.0, 1.0, 0.0, 3.0, 0.0)
    # two sublayers an all-reduce and a sublayer, where otherwise each takes an all-reduce
    assert [advise.step_seconds(ladder, times._replace(flight=f))[0] for f in (0.0, 3.0)] == [31.0, 5 * (3 + 1) + 1]


def test_norms_of_all_heads_wait_for_the_sums_in_flight():
    """Two layers as a ladder: the second layer's norms wait for the sum of the first layer's MLP."""
    times = Times(1.0, 1.0, 0.0, 3.0, 0.0, norm_sum=0.5)
    olmo = change(BASE, n_layers=2, heads={"qk_norm": True, "whole_qk_norm": True})
    assert advise.step_seconds(olmo, times)[0] == 2 * (1 + 0.5 + 3 + 1 + 3)
    # sums start at 1.5, 4.5 and, after the norms' at 7.5 to 8 and half an attention, at 8.5 and 11.5
    assert advise.step_seconds(change(olmo, wiring="ladder"), times)[0] == 14.5
    assert "parallel" in variants(olmo) and "spd" not in variants(olmo)
    summed = change(BASE, n_layers=2, postnorm={})
    assert variants(summed) == ["standard", "ladder", "ladder:1", "upper-bound"]


# ---- What a rank has to do -------------------------------------------------------------------------------------------

H = 32
MIXTURE = {"mixture": {
    "n_experts": 5, "experts_per_token": 2, "expert_size": 48, "shared_expert_size": 40, "shared_expert_gate": True,
}}  # fmt: skip


def counted_mlp(mlp, batch):
    """Bytes that a step of so many rows reads on average, and products for a token."""
    if not hasattr(mlp, "experts"):
        return sum(p.nbytes for p in mlp.parameters()), 3 * 64 * mlp.w1.out_features
    experts = sum(p.nbytes for p in mlp.experts.parameters())
    others = sum(p.nbytes for p in mlp.parameters()) - experts
    return others + experts * (1 - 0.6**batch), (others + experts * 0.4) / 2  # 2 of 5 experts, bfloat16


@pytest.mark.parametrize("tp_size", [2, 3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"quant": "int8"}, {"quant": "int4", "group_size": 32},
        {"qkv_bias": True, "wo_bias": True, "mlp_bias": True, "heads": {"qk_norm": True}}, {"n_kv_heads": 2}, MIXTURE,
        {**MIXTURE, "wiring": "farskip"},
    ],
)  # fmt: skip
def test_the_work_is_that_of_the_largest_shard(tp_size, changes):
    """Bytes and operations of loaded shards, counted by their own tensors."""
    base = change(BASE, n_heads=8, n_kv_heads=4, head_dim=H, dim=64, intermediate_size=192)
    config = change(base, n_layers=2, tie_embeddings=True, **changes)
    batch = 3
    context = 7
    counted = {"attention": [], "feed_forward": [], "rest": []}
    for rank in range(tp_size):
        net = load_shard(config, RandomWeights(config, "cpu"), torch.bfloat16, "cpu", rank, (1,) * tp_size)
        cache = net.new_cache(batch, context)
        norms = sum(p.nbytes for n, p in net.layers.named_parameters() if "_norm" in n) / 2
        layer = net.layers[0]
        mlp, products = counted_mlp(layer.feed_forward, batch)
        rest = sum(p.nbytes for p in net.output.parameters()) + net.norm.weight.nbytes
        whole = step_bytes(net, cache, context)
        heads = layer.attention.wo.in_features // H
        flops = 4 * batch * context * heads * H + 2 * batch * 64 * (layer.attention.wqkv.out_features + heads * H)
        counted["attention"].append(((whole - rest) / 2 - norms - mlp, flops))
        counted["feed_forward"].append((mlp, 2 * batch * products))
        counted["rest"].append((rest + batch * 64 * 2, 2 * batch * 64 * net.output.out_features))
    work = advise.decode_work(config, torch.bfloat16, tp_size, batch, context)
    assert work == {place: pytest.approx(max(of_ranks)) for place, of_ranks in counted.items()}


def test_times_are_bytes_or_operations_over_their_rate():
    machine = Machine("m", 1e12, 1e14)
    config = named_size("70b")
    work = advise.decode_work(config, torch.bfloat16, 8, 1, 1000)
    weights = 2 * 8192 * 10 * 128 + 2 * 8192 * 8 * 128
    assert work["attention"].n_bytes == weights + 2 * 2 * 128 * 1000
    works = [(batch, advise.decode_work(config, torch.bfloat16, 8, batch, 1000)) for batch in (1, 1024)]
    one, many = (advise.times_of(config, w, torch.bfloat16, 8, batch, machine, LINKS["pcie"]) for batch, w in works)
    assert one.feed_forward == pytest.approx(2 * 3 * 8192 * 3584 / 1e12)
    assert many.feed_forward == pytest.approx(2 * 1024 * 3 * 8192 * 3584 / 1e14)
    assert one.all_reduce == pytest.approx(57e-6 + 1.75 * 8192 * 16 / 224e9)
    rounded = advise.times_of(config, works[0][1], torch.bfloat16, 8, 1, machine, LINKS["pcie"], "int8")
    assert rounded == one._replace(all_reduce=pytest.approx(57e-6 + 1.75 * 8192 * 8.5 / 224e9))
    assert many.gather == pytest.approx(57e-6 + 0.875 * 1024 * 8 * 16 * 8 / 224e9)  # a logit and an id of each rank
    assert one.rest == pytest.approx(2 * 8192 * (128256 / 8 + 2) / 1e12)


def advised(capsys, *flags):
    capsys.readouterr()
    run_main(advise, *flags)
    return capsys.readouterr().out


def test_the_machine_is_the_one_that_is_given(capsys, tiny):
    flags = ["--checkpoint", tiny, "--tp", 2, "--link", "5us"]
    given = [["--bandwidth-gbs", 0.001], ["--bandwidth-gbs", 0.002], ["--bandwidth-gbs", 1, "--tflops", 1e-6]]
    shown = [advised(capsys, *flags, *machine) for machine in given]
    assert "float32" in shown[0] and "as given: 0.0 GB/s a rank\n\n5us; in us: " in shown[0]
    one, two, slow = (float(text.partition("in us: attention ")[2].partition(",")[0]) for text in shown)
    assert one == pytest.approx(2 * two, abs=0.2) and slow > 1000


# ---- The table and the advice ----------------------------------------------------------------------------------------


def rows(shown):
    """{wiring: its cells} of the first table that was printed."""
    table = shown.split("\n\n")[2].splitlines()[2:]
    return {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in table}


H100 = ["--model", "8b", "--tp", 8, "--gpu", "h100"]


def test_the_table_is_that_of_the_wirings(monkeypatch, capsys):
    monkeypatch.setitem(WIRINGS, "own", dataclasses.replace(WIRINGS["parallel-ladder"], about="my own"))
    monkeypatch.setitem(WIRINGS, "lossy", dataclasses.replace(find_wiring("spd"), about="another"))
    shown = advised(capsys, *H100, "--link", "pcie")
    found = rows(shown)
    wanted = {"standard": "no", "own": "yes", "lossy": "yes, in 8 lanes", "(bound: upper-bound)": "no model"}
    wanted |= {"ladder:16": "yes", "pair:8-23": "yes"}
    wanted |= dict.fromkeys(["desync:2", "desync:4", "delayed-4"], "yes, in 8 lanes")
    for name, wiring in all_wirings().items():
        if name not in ("desync", "upper-bound", "laneformer", "pair", *wanted) and not name.startswith("farskip"):
            wanted[name] = "yes" + ", in 8 lanes" * wiring.reads_partials
    assert {name: cells[-1] for name, cells in found.items()} == wanted
    assert [*found][-1] == "(bound: upper-bound)"  # apart
    steps = [float(cells[0]) for cells in found.values()]
    assert steps[:-1] == sorted(steps[:-1]) and steps[-1] <= steps[0]
    assert found["own"][:4] == found["parallel-ladder"][:4]
    assert f"at most {float(found['standard'][0]) / steps[-1]:.2f} times as fast.\n" in shown
    assert found["standard"][1:4] == ["1.00", "64", "0 %"] and found["parallel"][2] == "32"


def measured(page, column):
    """{wiring: percent} of a column of a page's table, whose cells end in ", +2.0%"."""
    lines = [line.strip("| ").split(" | ") for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    [head] = [line for line in lines if column in line and line[0] == "wiring"]
    cells = {line[0]: line[head.index(column)] for line in lines if len(line) == len(head)}
    return {name: cell.rpartition(", ")[2] for name, cell in cells.items() if cell.endswith("%")}


def losses(shown):
    """{wiring: the loss, retrained} of those that are known."""
    return {name: cells[-2] for name, cells in rows(shown).items() if cells[-2] not in ("unknown", "")}


@pytest.mark.parametrize("tp_size", [4, 8])
def test_measured_losses_are_those_of_the_page_and_choose_what_is_recommended(tp_size, capsys):
    page = measured("benchmarks/quality.md", "retrained on 20%")
    names = {"ladder": "ladder", "ladder:4": "ladder:16", "parallel-ladder": "parallel-ladder", "pair:2-5": "pair:8-23"}
    names |= {"spd/4": "spd", "delayed/4": "delayed"} if tp_size == 4 else {}  # nobody knows of other numbers of lanes
    wanted = {new: page[name].replace("%", " %") for name, new in names.items()} | {"standard": "+0.0 %"}
    shown = advised(capsys, "--model", "8b", "--tp", tp_size, "--gpu", "4090", "--link", "pcie-host")
    assert losses(shown) == wanted
    faster = [name for name in rows(shown) if float(wanted.get(name, "9 %").split()[0]) <= 2]
    assert faster[0] == "ladder" and "\nRecommended: ladder, once retrained (adapt.py): the fastest in which" in shown
    assert "lost at most 2 %" in shown and "eval.py --checkpoint DIR --wiring NAME --compare DIR" in shown
    sandwiched = advised(capsys, "--model", "gemma3-12b", "--tp", tp_size, "--gpu", "4090", "--link", "pcie-host")
    assert losses(sandwiched)["ladder"] == wanted["ladder"] and "pair" not in sandwiched  # which it cannot have
    mixture = advised(capsys, "--model", "30b-a3b", "--tp", 2, "--gpu", "a100", "--link", "pcie")
    assert losses(mixture) == {"standard": "+0.0 %", "ladder": "+3.4 %"} and "standard, as it is: " in mixture
    assert "(benchmarks/quality.md)" in shown and "(benchmarks/experts.md)" in mixture


def test_only_the_wirings_that_are_asked_for_and_what_all_reduces_cost(capsys):
    shown = advised(capsys, *H100, "--link", "0.5us", "--wirings", "parallel:3,5", "ladder:32", "desync:4")
    found = rows(shown)
    assert {*found} == {"standard", "parallel:3,5", "ladder:32", "desync:4"} and found["parallel:3,5"][2] == "62"
    share = 64 * 0.5e-3 / float(found["standard"][0])
    line = f"The all-reduces are {100 * share:.0f} % of the standard step: at most {1 / (1 - share):.2f} times as fast."
    assert shown.splitlines()[-4] == line


def test_a_checkpoint_s_own_wiring_needs_no_training(tmp_path, capsys):
    config = change(BASE, wiring="ladder:0,2")
    write_model(tmp_path / "m", config, dtype=torch.bfloat16)
    flags = ["--checkpoint", tmp_path / "m", "--tp", 2, "--bandwidth-gbs", 1, "--link", "pcie"]
    found = rows(shown := advised(capsys, *flags))
    assert {name for name, cells in found.items() if cells[-1] == "no"} == {"ladder:0,2"}
    assert found["standard"][-1] == found["ladder:1"][-1] == "yes" and found["spd"][-1] == "yes, in 2 lanes"
    assert losses(shown) == {"ladder:0,2": "+0.0 %"} and "ladder:0,2, as it is: no other" in shown
    halves = [change(FORM, wiring=f"ladder:{layers}") for layers in ("2", "3,4", "4,3")]
    assert [advise.retraining(halves[0], other, 2) for other in halves] == ["no"] * 3
    assert {len(advise.distinct_configs(own, ["ladder:2"], 2)) for own in halves} == {2}
    assert len(advise.distinct_configs(change(config, wiring="spd/2"), ["spd", "spd/2"], 2)) == 2
    refused("the 3 lanes of wiring spd/3 do not fit 2 ranks", advise.distinct_configs, config, ["spd/3"], 2)
    laned = change(config, wiring="spd/2")
    others = [change(laned, wiring=wiring) for wiring in ("spd:3/2", "spd:3/4", "spd")]
    assert [advise.retraining(laned, other, 3) for other in others] == ["no", "yes, in 4 lanes", "yes, in 3 lanes"]


def test_copies_of_a_mixture_stand_beside_the_shared_out_model(capsys):
    """Two rows: on two copies a step reads the whole model for one row; shared out, half of it for two, and sums."""
    advise.main(shlex.split("--model 30b-a3b --tp 2 --bandwidth-gbs 1000 --link 41us+1000gbps --wirings ladder"))
    said = re.search(
        r"2 rows on 2 whole copies of 61.1 GB, 1 each: ([\d.]+) ms \(([\d,]+) tokens/s\); "
        r"shared out, 30.9 GB each: (.*)\n",
        capsys.readouterr().out,
    )
    config = named_size("30b-a3b")
    alone, half = (
        sum(n * work.n_bytes for n, work in zip((48, 48, 1), works.values(), strict=True)) / 1e12
        for works in (advise.decode_work(config, torch.bfloat16, tp_size, tp_size, 1024) for tp_size in (1, 2))
    )
    assert float(said[1]) == pytest.approx(1e3 * alone, abs=0.01) and float(said[2]) == pytest.approx(2 / alone, abs=1)
    standard = float(re.match(r"standard ([\d.]+) ms", said[3])[1])
    assert standard == pytest.approx(1e3 * half + 96 * 41e-3 + 41e-3, rel=0.02)
    assert re.search(r", ladder [\d.]+ ms \(\d+\)$", said[3])


@pytest.mark.parametrize("name, said", [("1ms+0.02gbps", True), ("1ms+1gbps", False), ("1ms", False)])
def test_whole_layers_are_named_over_a_slow_link(name, said, capsys):
    advise.main(["--model", "1b:2:int4", "--tp", "2", "--bandwidth-gbs", "12", "--wirings", "ladder", "--link", name])
    assert (advise.WHOLE_LAYERS in capsys.readouterr().out) == said


def test_a_table_for_each_link(capsys):
    shown = advised(capsys, "--model", "8b:4:int8", *H100[2:], "--batch", 2)
    assert shown.count("| standard |") == len(LINKS) - 1
    assert shown.startswith("PREDICTED: 8b, 4 layers, int8, tp 8, batch 2, 1024 filled slots\n70 % of the H100")
    assert rows(shown)["ladder:2"][2] == "8" and [line for line in shown.splitlines() if line.startswith("pcie; in us")]
    assert shown.count(advise.PCIE) == 1
    *_, summary, _ = shown.split("\n\n")
    first, *gains = summary.splitlines()
    assert first == "Recommended over each link:" and len(gains) == len(LINKS) - 1
    for gain, table in zip(gains, shown.split("; in us: ")[1:], strict=True):
        wiring, factor = re.fullmatch(r"[\w-]+: (\S+), ([\d.]+) times as fast as standard", gain).groups()
        assert rows(f"\n\n{table}")[wiring][1] == factor and f"Recommended: {wiring}, " in table


# ---- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, message", [
    ("--model 8b --tp 8 --gpu b300 --link pcie", "--gpu: 'b300' is none of "),
    ("--model 8b", "the following arguments are required: --tp"),
    ("--model 8b --tp 8 --link pcie", "one of the arguments --gpu --bandwidth-gbs is required"),
    ("--model 8b --tp 33 --gpu h100 --link pcie", "33 ranks or lanes cannot shard n_heads 32: use 1 to 32"),
    ("--model 8b --tp 8 --bandwidth-gbs 0", "--bandwidth-gbs: '0' is not a number above 0"),
    ("--model 8b --tp 8 --gpu h100 --link carrier", "--link: 'carrier' is none of free, nvlink,"),
    ("--model 8b --tp 8 --gpu h100 --link pcie --wirings ladder:33", "--wirings: wiring ladder:33 does not fit"),
    ("--checkpoint /nowhere --tp 2 --gpu h100 --link pcie", "/nowhere"),
])  # fmt: skip
def test_bad_input_is_one_clear_line(flags, message):
    refused(f"^{re.escape(message)}", advise.main, shlex.split(flags))
