"""extras/lm_eval: the answers are those of lm-eval's own model, in any wiring, with any number of ranks."""

import json

import numpy as np
import pytest
from helpers import ROOT, run_ranks, script
from test_eval import evaluated

import eval as evaluate
import generate
import quantize
from complete import load
from evaluation import score
from extras.export import to_hf
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from model import rewired
from runtime.errors import InputError


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: requirements-peers.txt has it")
    from extras.lm_eval import harness

    return harness


def answers(world, folder, wiring, batch, asked):
    """Returns what the adapter answers on this rank: a list for each (kind, questions)."""
    from lm_eval.api.instance import Instance

    from extras.lm_eval import harness

    config = rewired(checkpoint.read_config(folder), wiring)
    lm = harness.Model(generate.load_model(config, folder, "float32", world), load_tokenizer(folder), batch)
    return [getattr(lm, kind)([Instance(kind, {}, q, i) for i, q in enumerate(qs)]) for kind, qs in asked]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Returns a folder of task files and their documents, and the names of its tasks."""
    folder, documents = tmp_path_factory.mktemp("tasks"), []
    for i in range(24):
        name = ("Tim", "Lily", "Sue", "Ben")[i % 4]
        story = f"Once upon a time, there was a little {('girl', 'boy')[i % 2]} named {name}. "
        seen = ["a cat", "the big dog", "a red ball", "her mom", "the sun"][: i % 6]
        story += " ".join(f"{name} saw {what}." for what in seen)
        ends = [" the.", f" {name} went to the park.", f" {name}", " It was a big dog. He ran."]
        story *= 8 if i % 7 == 6 else 1  # some are longer than the demo's context
        documents.append({"story": story, "ends": ends, "right": i % 4, "last": " the park"})
    (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    kinds = {
        "choices": "output_type: multiple_choice\ndoc_to_choice: ends\ndoc_to_target: right\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]\nnum_fewshot: 1\n",
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_target: '{{story}}'\n"
        "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n",
        "last": "output_type: loglikelihood\ndoc_to_target: last\ntarget_delimiter: ''\n"
        "metric_list: [{metric: perplexity}]\n",  # whose error bar is bootstrapped
        "writing": "output_type: generate_until\ndoc_to_target: ', but he was happy'\n"
        "generation_kwargs: {until: ['.', ' and'], max_gen_toks: 30}\nmetric_list: [{metric: exact_match}]\n",
    }
    for name, lines in kinds.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: train\nfewshot_split: train\n{lines}"
            f"dataset_kwargs: {{data_files: '{folder}/documents.jsonl', cache_dir: '{folder}/cache'}}\n"
            f"doc_to_text: '{'' if name == 'rolling' else '{{story}}'}'\n"
        )
    return folder, list(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_the_answers_are_those_of_lm_evals_own_model(wiring, tasks, harness, tmp_path, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(score, "MAX_LOGITS", 3000)  # two rows at a time, on one rank
    folder, names = tasks
    to_hf.main([str(ROOT / "demo"), "--wiring", wiring, "--dtype", "float32", "--out", str(tmp_path / "hf")])
    theirs = HFLM(
        pretrained=str(tmp_path / "hf"), dtype="float32", device="cpu", batch_size=3,
        trust_remote_code=wiring == "ladder", logits_cache=False,
    )  # fmt: skip
    asked = {}
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        answer = getattr(theirs, kind)
        setattr(theirs, kind, lambda r, k=kind, a=answer: asked.setdefault(k, (r, a(r)))[1])
    model, tokenizer = load(ROOT / "demo", "cpu", "float32", wiring)
    one, other = (
        harness.run(lm, harness.load_tasks(names, str(folder)))[0]["tasks"]
        for lm in (theirs, harness.Model(model, tokenizer, batch=5))
    )
    assert one.keys() == other.keys()
    for name, metrics in one.items():
        assert metrics == pytest.approx(other[name], rel=1e-5), name
    assert len(set(asked["generate_until"][1])) > 3
    written = [(request.args[0], text) for request, text in zip(*asked["generate_until"], strict=True) if text]
    written = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(written)]
    more, (requests, result) = HFLM.loglikelihood(theirs, written), asked["loglikelihood"]
    # what greedy decoding wrote, where the tokenizer splits it again as it was written
    assert wiring == "ladder" or any(greedy for _, greedy in more)
    asked["loglikelihood"] = [*requests, *written], [*result, *more]
    questions = [(kind, [r.args for r in requests]) for kind, (requests, _) in asked.items()]
    for ranks, batch in (1, None), (2, 3), (3, 1):
        first, *others = run_ranks(ranks, answers, ROOT / "demo", wiring, batch, questions)
        assert others == [first] * (ranks - 1)
        for (kind, asks), result in zip(questions, first, strict=True):
            expected = asked[kind][1]
            assert len(result) == len(asks) >= 24
            if kind == "generate_until":
                assert result == expected
            else:
                np.testing.assert_allclose(np.array(result, float), np.array(expected, float), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tasks_from_the_command_line_with_any_tp(tasks, harness, tmp_path, capsys):
    folder, names = tasks
    quantize.main(["--checkpoint", str(ROOT / "demo"), "--mode", "int8", "--out", str(tmp_path / "int8")])
    capsys.readouterr()
    flags = ["--checkpoint", tmp_path / "int8", "--tasks", ",".join(names), "--task-folder", folder, "--limit", "7"]
    flags += ["--dtype", "float32", "--json", tmp_path / "out"]
    one, stderr = evaluated(capsys, *flags)
    assert one == json.loads((tmp_path / "out").read_text()) and one["limit"] == 7 and one["wiring"] == "ladder"
    assert one["num_fewshot"] == dict.fromkeys(names, 0) | {"choices": 1} and list(one["tasks"]) == names
    assert "|choices" in stderr and one["tasks"]["last"]["perplexity_stderr,none"] > 0
    done = script("eval.py", *flags, "--batch", "3", ranks=2)
    assert done.returncode == 0 and done.stderr.count("|choices") == 1, done.stderr
    two = json.loads(done.stdout)  # one line, of rank 0
    for name in names:
        assert two["tasks"][name] == pytest.approx(one["tasks"][name], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_an_unknown_task_is_one_line(tiny, harness, tmp_path, monkeypatch):
    manager = harness.TaskManager  # lm-eval's own tasks take a minute to read
    monkeypatch.setattr(harness, "TaskManager", lambda **how: manager(**how | {"include_defaults": False}))
    flags = ["--checkpoint", str(tiny), "--task-folder", str(tmp_path), "--tasks"]
    with pytest.raises(InputError, match="--tasks choises: .*'choises' is not a registered task/group/tag name"):
        evaluate.main([*flags, "choises"])
    with pytest.raises(InputError, match="a task asks for num_beams in generating"):
        beams = ("generate_until", [("a", {"max_gen_toks": 8, "num_beams": 3})])
        run_ranks(1, answers, tiny, "standard", None, [beams])
