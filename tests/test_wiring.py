"""Every wiring against an independent float64 reference, and the order of collectives in compiled code."""

import itertools
import re

import pytest
import torch
from cases import refused, slow_case
from collective_order import eager_order, generated_code, order_in_code, squeeze
from configs import BASE, GEMMA, ONE_EACH, WIRED, change, parse_wiring, table_entry, variants, wired_id
from helpers import random_model, unequal_rows
from parity import check_against_the_reference

import generate
import model
from ladder.architectures.heads import Heads
from ladder.checkpoints import checkpoint, writing
from ladder.command_line import flags
from ladder.lanes.lanes import LaneWiring
from ladder.wiring_text import wiring_name
from model import WIRINGS, Wiring

STANDARD_ALONE = [c for c in WIRED if flags.is_standard_in_one_lane(change(BASE, **c).named_wiring)]


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_matches_the_naive_float64_reference(changes):
    for shape in {"qkv_bias": True, "tie_embeddings": True}, {"heads": {"qk_norm": True}, "n_kv_heads": 6}:
        check_against_the_reference(change(BASE, **changes, **shape))


def logits_of(changes):
    """Of the same weights in any wiring, as far as it has them."""
    net = random_model(change(BASE, **changes))
    net.load_state_dict(random_model(BASE).state_dict(), strict=False)
    with torch.no_grad():
        return net(unequal_rows(BASE)[0])


def test_the_wirings_are_different_functions_but_those_that_are_standard_in_one_lane():
    """So that none of the comparisons can pass by accident."""
    seen = {wired_id(changes): logits_of(changes) for changes in WIRED if changes not in STANDARD_ALONE}
    assert {"standard", "spd-ladder", "parallel-ladder:1,"} <= seen.keys()
    for a, b in itertools.combinations(seen, 2):
        assert (seen[a] - seen[b]).abs().max() > 0.1, (a, b)
    for changes in STANDARD_ALONE:
        assert table_entry(changes).reads_partials and torch.allclose(logits_of(changes), seen["standard"], atol=1e-5)


def test_one_function_is_one_however_it_is_spelled():
    spelled = ["ladder", "ladder:3", "ladder:2,0,1", "ladder:2", "ladder:2,1", "ladder:0,2", "desync", "desync:2"]
    functions = [change(BASE, wiring=name).layer_wirings for name in [*spelled, "desync:3"]]
    assert [functions.index(f) for f in functions] == [0, 0, 0, 3, 3, 5, 6, 6, 8]


TEXTS = ["ladder:2", "ladder-3:0,2", "spd:1,/4", "desync:4", "desync:4/2", "delayed-4/8", "My2_Loop-3:1-2", "spd:7-2"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_name_is_read_as_it_is_written(text, monkeypatch):
    for name in "My2_Loop", "my2":
        monkeypatch.setitem(WIRINGS, name, WIRINGS["ladder"])
    assert wiring_name(*parse_wiring(text)) == text
    refused("'my2' is no name for a wiring: names end in a letter", parse_wiring, "my2")


# ---------------------------------------------------------------------------------------------------------------------
# The order of computing, starts and waits


ORDERS = [  # wiring, layers, splits, order
    ("standard", 2, 1, "c start1 wait1 c start2 wait2 c start3 wait3 c start4 wait4"),
    ("ladder", 2, 1, "c start1 c start2 wait1 c start3 wait2 c start4 wait3 wait4"),
    ("ladder:1", 2, 1, "c start1 wait1 c start2 c start3 wait2 c start4 wait3 wait4"),
    ("ladder:0,", 2, 1, "c start1 c start2 wait1 wait2 c start3 wait3 c start4 wait4"),
    ("ladder-2", 2, 1, "c start1 c start2 c start3 wait1 c start4 wait2 wait3 wait4"),
    ("ladder-3:1", 2, 1, "c start1 wait1 c start2 c start3 c start4 wait2 wait3 wait4"),
    ("parallel", 2, 1, "c start1 wait1 c start2 wait2"),
    ("parallel-ladder", 2, 1, "c start1 c start2 wait1 wait2"),
    ("pair-ladder", 2, 1, "c start1 c start2 wait1 wait2"),
    ("spd:0,", 2, 1, "c start1 wait1 c start2 wait2 c start3 wait3"),
    ("delayed-3", 2, 1, "c start1 c start2 c start3 c start4 wait1 wait2 wait3 wait4"),
    ("desync:2", 2, 1, "c c start1 wait1 c c start2 wait2"),
    ("desync:3", 2, 1, "c c c start1 wait1 c start2 wait2"),
    ("upper-bound", 2, 1, "c c c c"),
    # other splits compute between a chunk's start and its wait, so a standard model in two has a ladder's order
    ("standard", 1, 2, "c start1 c start2 wait1 c start3 wait2 c start4 wait3 wait4"),
    ("standard", 1, 3, "c start1 c start2 c start3 wait1 c start4 wait2 c start5 wait3 c start6 wait4 wait5 wait6"),
    ("ladder", 1, 2, "c start1 c start2 c start3 c start4 wait1 wait3 wait2 wait4"),
    ("desync:2", 1, 2, "c c start1 c c start2 wait1 wait2"),
]


@pytest.mark.parametrize("wiring, n_layers, splits, order", ORDERS)
def test_order_of_the_plain_loop(wiring, n_layers, splits, order):
    assert eager_order(change(BASE, n_layers=n_layers, wiring=wiring), splits) == order


def check_compiled_order(changes, world, length=1, dtype=torch.float32):
    """Each ladder sum is waited for behind the next sublayer's matmuls and the start of its all-reduce, not before."""
    n_layers = 3 if ":" in changes["wiring"] else 2  # seams on both sides
    n_layers = 4 if parse_wiring(changes["wiring"]).stale else n_layers  # else no wait could come too early
    config = change(BASE, head_dim=64, n_layers=n_layers, **changes)
    code = generated_code(config, world, 2, length, dtype)
    events = order_in_code(code)
    order = eager_order(config).split()
    kernels = re.findall(r"(\w+) = async_compile.*?\'\'\'(.*?)\'\'\'", code, re.DOTALL)
    calls_of_cos = sum(code.count(f"  {name}(") for name, source in kernels if "cos(" in source)
    assert 0 < calls_of_cos <= 1 + bool(getattr(config.find(Heads), "window_rope_theta", None))  # not one a layer
    assert events.count("c") > len(order) / 3
    assert squeeze(events) == squeeze([*order, "c"])  # and the output head


PASSES = {"decode": (1, torch.float32), "prefill": (5, torch.float32), "decode with skinny_gemm": (1, torch.bfloat16)}
NORMED = {**GEMMA, "heads": {**GEMMA["heads"], "window_layers": (0,)}}  # of sums
FAST = [({"wiring": "ladder:1,"}, "decode", 0, 2), ({"wiring": "delayed-2"}, "decode with skinny_gemm", 0, 2)]
SLOW = [({"wiring": "ladder"}, "prefill", 0, 2), ({**NORMED, "wiring": "ladder:1,"}, "prefill", 0, 2)]
SLOW += [({**NORMED, "wiring": wiring}, "decode", 0, 2) for wiring in ("standard", "ladder")]
SLOW += [(changes, name, 0, 2) for changes in ONE_EACH for name in PASSES]
SLOW += [
    ({"wiring": wiring}, "decode", rank, tp_size)
    for wiring in ("standard", "ladder:1,", "delayed-3:1-2") for rank, tp_size in ((1, 2), (0, 3), (0, 4))
]  # fmt: skip
ALL = FAST + [slow_case(*case) for case in SLOW]


@pytest.mark.parametrize("changes, name, rank, tp_size", ALL, ids=lambda x: x["wiring"] if type(x) is dict else None)
def test_compiled_code_keeps_the_order_of_the_loop(changes, name, rank, tp_size, fake_world):
    check_compiled_order(changes, fake_world(rank, tp_size), *PASSES[name])


# ---------------------------------------------------------------------------------------------------------------------
# Which wiring runs, and what is said of it


def chosen(own, words):
    """Return the config that generate.py runs with these flags."""
    return flags.with_wiring(own, generate.parse_generation_flags("", ["--checkpoint", "x", *words.split()]))


def test_flags_choose_a_wiring():
    spd = change(BASE, wiring="spd:1,/2")
    assert chosen(BASE, "--ladder").wiring == "ladder"
    assert chosen(spd, "") == spd and chosen(spd, "--wiring delayed-2/4").wiring == "delayed-2/4"


@pytest.mark.parametrize("own, wiring, ranks, words", [
    ("standard", "standard", 2, ""),
    ("spd/2", "spd:3/2", 4, ""),
    ("spd/2", "spd:3/4", 4, "spd/2's, and run as spd:3/4, a function that they were not"),
    ("standard", "spd", 1, "these weights are standard's, and run as spd, which is the same in one lane"),
    ("standard", "delayed-4/2", 1, "run as delayed-4/2, a function that they were not"),
    ("standard", "desync", 2, "for: adapt.py retrains them; eval.py --checkpoint DIR --wiring desync --compare DIR --"),
    ("standard", "upper-bound", 2, "not trained for: eval.py --checkpoint DIR --wiring upper-bound --compare DIR --t"),
    ("ladder:2", "ladder-2:2", 2, "a function that they were not"),
    ("spd", "spd", 2, "these weights name no lanes: spd is another function on"),
])  # fmt: skip
def test_weights_of_another_wiring_are_said_to_be_that(own, wiring, ranks, words, capsys):
    own, config = (change(BASE, wiring=text) for text in (own, wiring))
    flags.warn_of_wiring(own, config, (1,) * ranks)
    warning = capsys.readouterr().err
    assert words in warning and warning.count("\n") == bool(words)
    one_norm = LaneWiring("", (model.attention_plus_mlp,), norms=("attention_norm",))
    assert not flags.is_standard_in_one_lane(one_norm)  # it is parallel there


# ---------------------------------------------------------------------------------------------------------------------
# A new wiring is one line of the table


def test_a_loop_that_cannot_run_the_layers_left_out_is_refused(monkeypatch):
    class LeavesOut(Wiring):
        def left_out(self):
            return model.find_wiring(self.about)

    for other in "pair", "spd", "desync", "ladder":
        monkeypatch.setitem(WIRINGS, "mine", LeavesOut(other, stale=1))
        if other == "ladder":
            assert change(BASE, wiring="mine:2").layer_wirings[0] == WIRINGS["ladder"]
            continue
        refused("wiring mine:2: its loop cannot run layers that are ", change, BASE, wiring="mine:2")


def test_a_new_line_is_a_new_model_in_the_flags_and_the_files(monkeypatch, tmp_path, capsys):
    new = Wiring("both", (model.attention_plus_mlp,), stale=1, norms=("attention_norm",))
    monkeypatch.setitem(WIRINGS, "own-wiring", new)
    config = change(BASE, wiring="own-wiring")
    assert variants("own-wiring") == [{"wiring": "own-wiring"}, {"wiring": "own-wiring:1,"}]
    check_against_the_reference(config)  # which knows its parts
    assert eager_order(config) == "c start1 c start2 wait1 c start3 wait2 wait3"
    with pytest.raises(SystemExit):
        chosen(BASE, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "own-wiring: both" in shown.replace("- ", "-")  # lines may break there
    assert chosen(BASE, "--wiring own-wiring") == config
    writing.write_config(tmp_path, config)
    assert checkpoint.read_config(tmp_path) == config
