"""Exported folders in transformers: what they compute, how they load, what they become, and other people's trainers."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from helpers import ANY_TP, BASE, ROOT, YARN, random_model, shared_data, wired_id
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import convert_hf_checkpoint
import tp
from formats import checkpoint
from formats.export import config_to_hf
from formats.exported.configuration_ladder import LadderConfig
from formats.exported.modeling_ladder import LadderForCausalLM
from formats.huggingface import config_from_hf
from model import WIRINGS, InputError, Wiring
from runtime import writing

LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16.0,
}  # fmt: skip
SHAPES = {
    "llama": {},
    "llama3": {"rope_theta": 5000.0, "rope_scaling": LLAMA3_ROPE, "head_dim": 16, "eos_ids": (2, 5)},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True, "n_heads": 5, "n_kv_heads": 5, "norm_eps": 1e-3},
    "qwen3": {"qk_norm": True, "head_dim": 16, "bos_id": None, "eos_ids": ()},
    "all": {
        "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "qk_norm": True, "tie_embeddings": True,
        "nope_layers": (1,), "rope_scaling": YARN,
    },
}  # fmt: skip
# no form has blocks of two kinds
OURS = [c for c in ANY_TP if c["wiring"] in ("ladder", "hybrid") or ("parallel" in c["wiring"] and len(c) == 1)]
LADDER = {"wiring": "ladder"}


def write(folder, **changes):
    """A random checkpoint of ours at folder / "ours" and what --to-hf makes of it; returns (our model, the folder)."""
    config = dataclasses.replace(BASE, **changes)
    net = random_model(config)
    with writing.new_folder(folder / "ours") as out:
        checkpoint.write_model(out, config, net.state_dict(), torch.float32)
    convert_hf_checkpoint.main([str(folder / "ours"), "--to-hf", str(folder / "hf")])
    return net, folder / "hf"


def load(folder, auto=AutoModelForCausalLM, **kwargs):
    return auto.from_pretrained(folder, trust_remote_code=True, **kwargs)


def check_back(folder, back):
    """That a Hugging Face folder becomes the checkpoint folder / "ours" again, bit by bit."""
    convert_hf_checkpoint.main([str(folder), "--out", str(back)])
    ours = back.parent / "ours"
    ours_config, back_config = checkpoint.read_config(ours), checkpoint.read_config(back)
    assert back_config.function == ours_config.function
    unwired = {"wiring": "standard", "ladder_layers": None}
    assert dataclasses.replace(back_config, **unwired) == dataclasses.replace(ours_config, **unwired)
    before, after = (load_file(f / "model.safetensors") for f in (ours, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


PROMPTS = [[5, 90, 7, 33, 120, 64, 9], [44, 3, 71], [12]]


def padded(prompts):
    """(tokens, attention mask), both (B, S), padded on the left."""
    S = max(map(len, prompts))
    return torch.tensor([[0] * (S - len(p)) + p for p in prompts]), torch.tensor(
        [[0] * (S - len(p)) + [1] * len(p) for p in prompts]
    )


@torch.no_grad()
def greedy(net, ids, steps):
    for _ in range(steps):
        ids = [*ids, int(net(torch.tensor([ids]))[0, -1].argmax())]
    return ids[-steps:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("changes", OURS, ids=wired_id)
def test_an_exported_folder_computes_our_logits_and_comes_back(changes, shape, tmp_path):
    ours, folder = write(tmp_path, **SHAPES[shape], **changes)
    theirs, report = load(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.dtype == torch.float32 and type(theirs).__name__ == "LadderForCausalLM"
    tokens, mask = padded(PROMPTS)
    with torch.no_grad():
        logits = theirs(tokens, attention_mask=mask).logits
        for row, prompt in zip(logits, PROMPTS, strict=True):
            expected = ours(torch.tensor([prompt]))[0]
            assert expected.std() > 0.1
            assert (row[-len(prompt) :] - expected).abs().max() < 1e-4
    theirs.generation_config.eos_token_id = None
    out = theirs.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = [greedy(ours, prompt, 6) for prompt in PROMPTS]
    assert out[:, tokens.shape[1] :].tolist() == expected
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    assert theirs.generate(tokens[1:2, -3:], **how)[0, 3:].tolist() == expected[1]
    check_back(folder, tmp_path / "back")


TINY = {
    "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 131,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
PEERS = {  # of the features that make no difference to the wiring: what in transformers has them, the keys it shares
    "LlamaConfig": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "rope_parameters": YARN},
    "SeedOssConfig": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "SmolLM3Config": {"no_rope_layers": [1, 0, 1], "attention_bias": False},
    "Qwen3Config": {"qk_norm": True, "attention_bias": False},
}


@pytest.mark.parametrize("peer", PEERS)
def test_without_a_ladder_it_is_transformers_own_model(peer):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(getattr(transformers, peer)(**{**TINY, **PEERS[peer]})).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5) if name.endswith("weight") else weight.normal_()
    ours = LadderForCausalLM(LadderConfig(**{**TINY, **PEERS[peer]})).eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert theirs(tokens).logits.std() > 0.1
        assert (ours(tokens).logits - theirs(tokens).logits).abs().max() < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations_and_recorded_outputs(attention, tmp_path):
    ours, folder = write(tmp_path, wiring="hybrid", ladder_layers=(0, 2))
    theirs = load(folder, attn_implementation=attention)
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        out = theirs(tokens, output_hidden_states=True, output_attentions=attention == "eager")
        assert (out.logits - ours(tokens)).abs().max() < 1e-4
        assert torch.equal(
            load(folder, AutoModel, attn_implementation=attention)(tokens).last_hidden_state, out.hidden_states[-1]
        )
    assert [tuple(x.shape) for x in out.hidden_states] == [(1, 7, BASE.dim)] * 4
    if attention == "eager":
        assert [tuple(x.shape) for x in out.attentions] == [(1, 6, 7, 7)] * 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("changes", [LADDER, {"wiring": "hybrid", "ladder_layers": 1}], ids=wired_id)
def test_gradients_are_ours_with_checkpointing_too(changes, reentrant, tmp_path):
    ours, folder = write(tmp_path, qk_norm=True, **changes)
    theirs = load(folder).train()
    theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    tokens = torch.tensor(PROMPTS[:1])
    theirs(tokens, labels=tokens).loss.backward()
    torch.nn.functional.cross_entropy(ours(tokens)[0, :-1], tokens[0, 1:]).backward()
    names = {"model.layers.0.mlp.up_proj": "layers.0.feed_forward.w3", "model.layers.2.self_attn.o_proj":
             "layers.2.attention.wo", "model.layers.1.self_attn.k_norm": "layers.1.attention.k_norm",
             "model.embed_tokens": "tok_embeddings"}  # fmt: skip
    for theirs_name, our_name in names.items():
        expected = ours.get_parameter(our_name + ".weight").grad
        gradient = theirs.get_parameter(theirs_name + ".weight").grad
        assert expected.abs().max() > 1e-3
        assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max().clamp(min=1)


LOAD = """
import sys, torch, transformers
how = {"trust_remote_code": True} if sys.argv[2:] else {}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **how)
print(type(model).__name__, *model(torch.tensor([[5, 90, 7]])).logits[0, -1].tolist())
"""


def load_elsewhere(folder, *args):
    """In another process, which has neither this project nor a terminal."""
    command = [sys.executable, "-c", LOAD, str(folder), *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_without_its_code_an_exported_folder_does_not_load(tmp_path):
    ours, folder = write(tmp_path, wiring="hybrid", ladder_layers=2)
    done = load_elsewhere(folder)
    assert done.returncode == 1 and "contains custom code" in done.stderr and "trust_remote_code=True" in done.stderr
    for path in folder.glob("*.py"):
        path.unlink()
    hf = json.loads((folder / "config.json").read_text())
    del hf["auto_map"]
    (folder / "config.json").write_text(json.dumps(hf))
    done = load_elsewhere(folder)
    assert done.returncode == 1 and "ladder_residual" in done.stderr


@pytest.mark.parametrize(
    "changes", [{"wiring": "parallel", "qkv_bias": True}, {**LADDER, "tie_embeddings": True, "eos_ids": ()}]
)
def test_what_transformers_saves_has_the_code_and_comes_back(changes, tmp_path):
    ours, folder = write(tmp_path, rope_scaling=LLAMA3_ROPE, **changes)
    load(folder).save_pretrained(tmp_path / "saved")
    check_back(tmp_path / "saved", tmp_path / "back")
    done = load_elsewhere(tmp_path / "saved", "trust")
    assert done.stdout.startswith("LadderForCausalLM"), done.stderr
    logits = torch.tensor([float(word) for word in done.stdout.split()[1:]])
    with torch.no_grad():
        assert (logits - ours(torch.tensor([[5, 90, 7]]))[0, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_a_standard_model_is_one_of_transformers_own_where_it_has_one(shape, tmp_path):
    ours, folder = write(tmp_path, **SHAPES[shape])
    hf = json.loads((folder / "config.json").read_text())
    assert hf["model_type"] == {"llama3": "llama", "all": "ladder_residual"}.get(shape, shape)
    own = hf["model_type"] != "ladder_residual"
    assert own == ("auto_map" not in hf) == (not list(folder.glob("*.py"))) == ("ladder_layers" not in hf)
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=not own)
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-4
    check_back(folder, tmp_path / "back")


@pytest.mark.parametrize("layers", [3, (2, 0, 1)])
@pytest.mark.parametrize("wiring", ["parallel", "parallel-ladder"])
def test_all_layers_by_number_are_all_layers(wiring, layers, tmp_path):
    ours, folder = write(tmp_path, wiring=wiring, ladder_layers=layers)
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert (load(folder)(tokens).logits - ours(tokens)).abs().max() < 1e-4
    check_back(folder, tmp_path / "back")


@pytest.mark.parametrize("wiring", ["parallel", "parallel-ladder"])
def test_blocks_of_two_kinds_have_no_such_form(wiring, tmp_path):
    with pytest.raises(InputError, match=f"wiring {wiring} in some layers alone has no Hugging Face form"):
        write(tmp_path, wiring=wiring, ladder_layers=(1,))


@pytest.mark.parametrize("wiring", ["desync", "upper-bound", "bound", "spd", "spd:2"])
def test_what_depends_on_the_number_of_ranks_is_refused(wiring, tmp_path, monkeypatch):
    wiring, *layers = wiring.split(":")
    monkeypatch.setitem(WIRINGS, "bound", Wiring("", stale=True, tp_bound=True))
    with pytest.raises(InputError, match=rf"wiring {wiring} has no .* --wiring standard or --ladder") as error:
        write(tmp_path, wiring=wiring, ladder_layers=int(layers[0]) if layers else None)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    convert_hf_checkpoint.main([str(tmp_path / "ours"), "--to-hf", str(tmp_path / "hf"), "--ladder"])
    assert load(tmp_path / "hf").config.ladder_layers == 3


@pytest.mark.parametrize("ladder, kept", [(2, 2), ([0, 2], [0, 2]), (3, 3), ([0, 1, 2], 3)])
def test_published_ladders_come_in_and_go_out_as_ladders(ladder, kept, tmp_path):
    ours, folder = write(tmp_path)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "model_type": "llamaLadder", "ladder_layers": ladder}))
    convert_hf_checkpoint.main([str(folder), "--out", str(tmp_path / "in")])
    convert_hf_checkpoint.main([str(tmp_path / "in"), "--to-hf", str(tmp_path / "out")])
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (out["model_type"], out["ladder_layers"]) == ("ladder_residual", kept)
    config = checkpoint.read_config(tmp_path / "in")
    net = tp.load_shard(config, checkpoint.Weights(tmp_path / "in"), torch.float32, "cpu")
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        logits = load(tmp_path / "out")(tokens).logits
        assert (logits - net(tokens)).abs().max() < 1e-4
        assert (logits - ours(tokens)).abs().max() > 0.1


def test_the_published_config_goes_out_as_a_ladder(tmp_path):
    path = shared_data("../configs/llama3_1_8b_instruct_ladder_last16.json")
    config = config_from_hf(path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, torch.bfloat16)))
    assert config_from_hf(tmp_path / "config.json") == config
    theirs, published = (json.loads(p.read_text()) for p in (tmp_path / "config.json", path))
    same = published.keys() & theirs.keys() - {"model_type", "architectures", "auto_map"}
    assert {"ladder_layers", "rope_scaling", "rope_theta", "eos_token_id"} <= same
    assert {k: theirs[k] for k in same} == {k: published[k] for k in same}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parallel_blocks": True}, "ladder_layers 2 with parallel_blocks is no wiring"),
        ({"parallel_blocks": "yes"}, "parallel_blocks is 'yes' but must be true or false"),
        ({"ladder_layers": [7]}, "from 0 to 2"),
        ({"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
        ({"qk_norm": 1}, "qk_norm is 1 but must be true or false"),
    ],
)
def test_bad_configs_of_our_own_type_are_one_clear_line(changes, message, tmp_path):
    _, folder = write(tmp_path, wiring="hybrid", ladder_layers=2)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=message):
        convert_hf_checkpoint.main([str(folder), "--out", str(tmp_path / "back")])
    assert not (tmp_path / "back").exists()


def test_stories260k_as_a_hybrid_has_our_nats_and_not_the_standard_ones(tmp_path):
    args = [shared_data("stories260K.bin"), "--tokenizer", shared_data("tok512.model"), "--ladder-layers", 2]
    convert_hf_checkpoint.main([str(a) for a in [*args, "--out", tmp_path / "ours"]])
    convert_hf_checkpoint.main([str(tmp_path / "ours"), "--to-hf", str(tmp_path / "hf")])
    config = checkpoint.read_config(tmp_path / "ours")
    ours = tp.load_shard(config, checkpoint.Weights(tmp_path / "ours"), torch.float32, "cpu")
    theirs, tokenizer = load(tmp_path / "hf"), load(tmp_path / "hf", AutoTokenizer)
    stories = shared_data("tinystories-10k-lines.txt").read_text(encoding="utf-8").split("<|endoftext|>")[:200]
    nats, count = torch.zeros(2, dtype=torch.float64), 0
    with torch.no_grad():
        for story in stories:
            tokens = tokenizer(story.strip(), return_tensors="pt").input_ids[:, :512]
            for i, logits in enumerate([theirs(tokens).logits, ours(tokens)]):
                nats[i] += torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
            count += tokens.shape[1] - 1
    of_theirs, of_ours = (nats / count).tolist()
    assert abs(of_theirs - of_ours) < 1e-5
    assert abs(of_theirs - 1.6408) < 0.001  # the standard model has 1.3097


# Other people's trainers, and transformers' own tensor parallelism

STORY = "Once upon a time there was a little dog. The dog ran to the park."


@pytest.fixture
def exported(tiny, tmp_path):
    """(folder, a model and a tokenizer of it), with a hybrid that has a tokenizer."""
    convert_hf_checkpoint.main([str(tiny), "--to-hf", str(tmp_path / "hf"), "--ladder-layers", "2"])
    tokenizer = load(tmp_path / "hf", AutoTokenizer)
    tokenizer.pad_token = tokenizer.unk_token
    return tmp_path / "hf", load(tmp_path / "hf"), tokenizer


def three_steps(out, **kwargs):
    return dict(
        output_dir=str(out), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none",
        use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True, **kwargs,
    )  # fmt: skip


def check_trained(trainer, folder, tmp_path):
    """That the loss fell, and that what is written becomes a checkpoint of ours, in its wiring, with its logits."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.1
    convert_hf_checkpoint.main([str(folder), "--out", str(tmp_path / "trained")])
    config = checkpoint.read_config(tmp_path / "trained")
    assert (config.wiring, config.ladder_layers) == ("hybrid", 2)
    net = tp.load_shard(config, checkpoint.Weights(tmp_path / "trained"), torch.float32, "cpu")
    tokens = torch.tensor(PROMPTS[:1])
    before, after = (load(f).eval() for f in (tmp_path / "hf", folder))
    with torch.no_grad():
        assert (after(tokens).logits - net(tokens)).abs().max() < 1e-4
        assert (after(tokens).logits - before(tokens).logits).abs().max() > 0.01


@pytest.mark.slow
def test_three_steps_of_the_trainer(exported, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate (requirements-peers.txt) is not installed")
    folder, model, tokenizer = exported
    ids = tokenizer(STORY).input_ids
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**three_steps(tmp_path / "run", gradient_checkpointing=True)),
        train_dataset=[{"input_ids": ids}] * 8,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    check_trained(trainer, tmp_path / "saved", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_three_steps_of_trl(lora, exported, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL (requirements-peers.txt) is not installed")
    peft = pytest.importorskip("peft", reason="PEFT (requirements-peers.txt) is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets (requirements-peers.txt) is not installed")
    folder, model, tokenizer = exported
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**three_steps(tmp_path / "run", max_length=32)),
        train_dataset=datasets.Dataset.from_list([{"text": STORY}] * 8),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.train()
    if lora:
        trainer.save_model(tmp_path / "adapter")
        adapted = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
        adapted.merge_and_unload().save_pretrained(tmp_path / "saved")
    else:
        trainer.save_model(tmp_path / "saved")
    check_trained(trainer, tmp_path / "saved", tmp_path)


@pytest.mark.slow
def test_the_page_shows_code_that_runs(tmp_path):
    for library in ("accelerate", "datasets", "peft", "trl"):
        pytest.importorskip(library, reason=f"{library} (requirements-peers.txt) is not installed")
    convert_hf_checkpoint.main([str(ROOT / "demo"), "--to-hf", str(tmp_path / "hf" / "demo")])
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "huggingface.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", "".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Once upon a time" in done.stdout, done.stderr
    convert_hf_checkpoint.main([str(tmp_path / "hf" / "tuned"), "--out", str(tmp_path / "tuned")])
    assert checkpoint.read_config(tmp_path / "tuned") == checkpoint.read_config(ROOT / "demo")


ON_TWO_RANKS = """
import sys, torch, transformers
from transformers.distributed import DistributedConfig
torch.distributed.init_process_group("gloo")
load, how = transformers.AutoModelForCausalLM.from_pretrained, {"trust_remote_code": True}
model = load(sys.argv[1], **how, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape == (24, 48)
tokens = torch.tensor([[5, 90, 7, 33], [4, 8, 100, 2]])
with torch.no_grad():
    assert (model(tokens).logits - load(sys.argv[1], **how)(tokens).logits).abs().max() < 1e-4
"""


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{**LADDER, "qk_norm": True}, {"wiring": "parallel", "qkv_bias": True}])
def test_transformers_own_tensor_parallelism(changes, tmp_path):
    _, folder = write(tmp_path, **changes)
    (tmp_path / "two.py").write_text(ON_TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*command, str(tmp_path / "two.py"), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
