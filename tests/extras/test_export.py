"""Exported folders in transformers: what they compute, how they load, what they become, and other people's trainers."""

import re
import types

import pytest
import torch
from cases import refused
from configs import BASE, YARN, change
from helpers import ROOT, greedy_tokens, random_model, shared_data, write_model
from hf_folders import (
    FOLDED,
    HF_FAMILIES,
    MULTIMODAL,
    SMALL,
    TOKENS,
    check_parity,
    convert,
    convert_hf,
    hf_model,
    multimodal_model,
)
from running import run_main, run_python, script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import convert_hf_checkpoint
import tp
from extras.export import to_hf, verify
from ladder.checkpoints import checkpoint
from ladder.checkpoints.compare import check_vocabulary
from ladder.errors import InputError
from ladder.sources import huggingface
from ladder.text.tokenizer import load_tokenizer
from model import WIRINGS, Wiring

LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE["original_max_position_embeddings"] = 16.0
SHAPES = {
    "llama3": {"rope_theta": 5000.0, "rope_scaling": LLAMA3_ROPE, "head_dim": 16, "eos_ids": (2, 5)},
    "qwen": {"qkv_bias": True, "n_heads": 5, "n_kv_heads": 5, "bos_id": None, "eos_ids": ()},
    "even": {"n_layers": 4, "wo_bias": True},
    "all": {
        "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "tie_embeddings": True,
        "heads": {"qk_norm": True, "nope_layers": (1,)}, "rope_scaling": YARN,
    },
}  # fmt: skip
CASES = [
    ("ladder", "qwen"), ("ladder:2", "all"), ("ladder:0,1", "llama3"), ("ladder-2:1-2", "all"), ("parallel", "all"),
    ("parallel-ladder:2,0,1", "all"), ("parallel-ladder-2", "even"), ("pair:0,1", "all"), ("pair", "even"),
    ("pair-ladder", "all"), ("standard", "even"), ("standard", "all"),
]  # fmt: skip


def write(folder, **changes):
    """Write a random checkpoint at folder / "ours" and export it; returns (our model, the exported folder)."""
    config = change(BASE, **changes)
    net = random_model(config)
    write_model(folder / "ours", config, net.state_dict())
    run_main(to_hf, folder / "ours", "--out", folder / "hf")
    return net, folder / "hf"


def load(folder, auto=AutoModelForCausalLM, **kwargs):
    return auto.from_pretrained(folder, trust_remote_code=True, **kwargs)


def check_back(folder, back):
    """That a Hugging Face folder becomes the checkpoint folder / "ours" again, bit by bit."""
    run_main(convert_hf_checkpoint, folder, "--out", back)
    ours = back.parent / "ours"
    assert checkpoint.read_config(back) == checkpoint.read_config(ours)
    before, after = (load_file(f / "model.safetensors") for f in (ours, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


PROMPTS = [[5, 90, 7, 33, 120, 64, 9], [44, 3, 71], [12]]


def check_logits(theirs, ours):
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-4


def padded(prompts):
    """Return (tokens, attention mask), both (B, S), padded on the left."""
    S = max(map(len, prompts))
    rows = [([0] * (S - len(p)) + p, [0] * (S - len(p)) + [1] * len(p)) for p in prompts]
    return (torch.tensor(part) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("wiring, shape", CASES)
def test_an_exported_folder_computes_our_logits_and_comes_back(wiring, shape, tmp_path):
    ours, folder = write(tmp_path, **SHAPES[shape], wiring=wiring)
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
    expected = [greedy_tokens(ours, prompt, 6) for prompt in PROMPTS]
    assert out[:, tokens.shape[1] :].tolist() == expected
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    assert theirs.generate(tokens[1:2, -3:], **how)[0, 3:].tolist() == expected[1]
    check_back(folder, tmp_path / "back")


def test_what_transformers_saves_has_the_code_needs_it_and_comes_back(tmp_path):
    ours, folder = write(tmp_path, rope_scaling=LLAMA3_ROPE, wiring="ladder", tie_embeddings=True, eos_ids=())
    load(folder).save_pretrained(tmp_path / "saved")
    check_back(tmp_path / "saved", tmp_path / "back")
    with pytest.raises(ValueError, match="contains custom code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    check_logits(load(tmp_path / "saved"), ours)


REFUSED_FAMILIES = {
    "phi3, long": "rotary_dim 6", "phi3, short": "rotary_dim 6", "glm": "rotary_dim 8", "glm4, yarn": "rotary_dim 12",
    "stablelm, parallel": "rotary_dim 2",
}  # fmt: skip


@pytest.mark.parametrize("family", [*HF_FAMILIES, *FOLDED])
def test_transformers_own_families_come_back(family, tmp_path):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "hf")
    ours = convert_hf(tmp_path, "ours")
    if family in REFUSED_FAMILIES:
        words = f"^{REFUSED_FAMILIES[family]} has no Hugging Face form here"
        refused(words, run_main, to_hf, tmp_path / "ours", "--out", tmp_path / "back")
        return
    run_main(to_hf, tmp_path / "ours", "--out", tmp_path / "back", "--shard-gb", "1e-4")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    how = {"attn_implementation": theirs.config._attn_implementation}
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **how).eval()
    if family in FOLDED:
        assert back.config.model_type == ("mistral" if "windowed" in family else "llama")
        check_parity(ours, back)
    else:
        for name, weight in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[name], weight), name
        with torch.no_grad():
            assert torch.equal(back(TOKENS).logits, theirs(TOKENS).logits)


WINDOW = {"heads": {"sliding_window": 4, "window_layers": (0, 1, 2)}}


REFUSED = [
    ({"wiring": "spd/2"}, "wiring spd/2 has no Hugging Face form: only standard, ladder, "),
    ({"wiring": "own"}, "wiring own has no Hugging Face form"),
    ({"wiring": "ladder", **WINDOW}, "sliding_window 4 has no Hugging Face form here"),
    ({"wo_bias": True, **WINDOW}, "sliding_window 4 has no Hugging Face form here"),
]


def test_what_has_no_form_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(WIRINGS, "own", Wiring("", stale=1))
    for changes, words in REFUSED:
        config = change(BASE, **changes)
        write_model(tmp_path / "ours", config)
        refused(words, run_main, to_hf, tmp_path / "ours", "--out", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    line = "quant 'int8' has no Hugging Face form here, only None has one"
    refused(line, to_hf.config_to_hf, change(BASE, quant="int8"), torch.float32)


TEXTS = ["Once upon a time", "", " ", " a", "two  spaces   three", "  a\n\n b \n", "naïve 🙂 日本  é", "1▁▁", "▁ x▁ "]


@pytest.mark.parametrize("name", ["demo", "llama2-tokenizer.model"])
def test_transformers_reads_texts_as_the_same_tokens(name, tmp_path):
    source = ROOT / "demo" / "tokenizer.model" if name == "demo" else shared_data(name)
    ours = load_tokenizer(source)
    to_hf.convert_tokenizer(tmp_path, ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    back = load_tokenizer(tmp_path)
    size = types.SimpleNamespace(vocab_size=ours.vocab_size)
    check_vocabulary(size, source, size, tmp_path, "the exported one")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == back.encode(text) == ids
        decoded = theirs.decode(ids, skip_special_tokens=True), back.decode(ids), ours.decode(ids)
        assert len({text.strip() for text in decoded}) == 1
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


# What a converted checkpoint computes, held against transformers


def converted(folder, dtype="float32"):
    """A random folder of transformers' Llama, and what the converter makes of it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(folder / "source")
    convert(folder / "source", folder / "converted", "--dtype", dtype)
    return str(folder / "source"), str(folder / "converted")


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_verify_tells_rounding_from_a_mistake(dtype, tmp_path, capsys, monkeypatch):
    verify.main(converted(tmp_path, dtype))
    *_, result, token = capsys.readouterr().out.splitlines()
    assert result.startswith(f"verified: it differs from transformers in logits of 64 tokens in {dtype} by up to ")
    assert re.fullmatch(r"next token: \d+, in transformers \d+", token)
    for i, (module, name, broken) in enumerate([
        (huggingface, "our_values", lambda values: {**values, "rope_theta": 400.0}),
        (convert_hf_checkpoint, "group", lambda w: torch.cat((-w[:24], w[24:]))),  # the queries of one KV head
        (verify, "expected", lambda logits: logits * torch.nan),
    ]):  # fmt: skip
        right = getattr(module, name)
        with monkeypatch.context() as m, pytest.raises(InputError, match="^the converted .* differs from [^\n]*$"):
            m.setattr(module, name, lambda *args, right=right, broken=broken, **how: broken(right(*args, **how)))
            verify.main(converted(tmp_path / str(i), dtype))


def test_verify_runs_the_code_of_a_folder_only_if_told_to_and_reads_its_tokenizer(tmp_path, capsys):
    hf = str(tmp_path / "hf")
    back = str(tmp_path / "back")
    run_main(to_hf, ROOT / "demo", "--out", hf)
    convert_hf_checkpoint.main([hf, "--out", back, "--dtype", "float32"])
    refused("transformers cannot run .* --trust-remote-code ", verify.main, [hf, back])
    verify.main([hf, back, "--trust-remote-code"])
    assert re.search(r"next token: (\d+), in transformers \1\n", capsys.readouterr().out)
    run_main(convert_hf_checkpoint, hf, "--out", tmp_path / "other", "--wiring", "standard")
    refused("transformers runs .*/hf as ladder, not as standard", run_main, verify, hf, tmp_path / "other")


@pytest.mark.parametrize("family", ["gemma2", "glm4, yarn", "olmo3", *MULTIMODAL])
def test_verify_runs_every_family(family, tmp_path, capsys):
    theirs = (
        multimodal_model(*MULTIMODAL[family], tie_word_embeddings=False) if family in MULTIMODAL else hf_model(family)
    )
    theirs.save_pretrained(tmp_path / "hf")
    convert_hf(tmp_path, "ours")
    run_main(verify, tmp_path / "hf", tmp_path / "ours")
    assert "verified: it differs from transformers in logits of 64 tokens" in capsys.readouterr().out


# Other people's trainers, and transformers' own tensor parallelism


@pytest.mark.slow
def test_the_page_shows_code_that_runs(tmp_path):
    for library in ("accelerate", "datasets", "peft", "trl"):
        pytest.importorskip(library, reason=f"{library} (requirements-peers.txt) is not installed")
    run_main(to_hf, ROOT / "demo", "--out", tmp_path / "hf" / "demo")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "extras" / "export" / "README.md").read_text(), re.DOTALL)
    done = run_python("-c", "".join(blocks), cwd=tmp_path)
    assert done.returncode == 0 and "Once upon a time" in done.stdout, done.stderr
    run_main(convert_hf_checkpoint, tmp_path / "hf" / "tuned", "--out", tmp_path / "tuned")
    assert checkpoint.read_config(tmp_path / "tuned") == checkpoint.read_config(ROOT / "demo")
    before, after = (checkpoint.Weights(folder) for folder in (ROOT / "demo", tmp_path / "tuned"))
    name = "layers.0.attention.wqkv.weight"
    assert not torch.equal(before.read(name).float(), after.read(name).float())
    ours = tp.load_shard(checkpoint.read_config(ROOT / "demo"), after, torch.float32, "cpu")
    check_logits(load(tmp_path / "hf" / "tuned"), ours)


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
def test_transformers_own_tensor_parallelism(tmp_path):
    _, folder = write(tmp_path, wiring="parallel-ladder:0,1", heads={"qk_norm": True}, qkv_bias=True)
    (tmp_path / "two.py").write_text(ON_TWO_RANKS)
    done = script(tmp_path / "two.py", folder, ranks=2)
    assert done.returncode == 0, done.stderr
