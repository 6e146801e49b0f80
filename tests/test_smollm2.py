"""A real model, SmolLM2-135M-Instruct as the GGUF that `make smollm2` downloads, beside transformers and llama.cpp."""

import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from file_edits import read_json
from helpers import ALONE, ROOT, folder_logits, load_folder
from hf_folders import convert
from running import main_on_ranks, run_ranks
from tokenizers import pre_tokenizers
from torch.nn.functional import cross_entropy

import generate
from ladder.checkpoints import checkpoint
from ladder.memory import weight_bytes
from ladder.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDERS = os.environ.get("LADDER_SMOLLM2"), os.environ.get("LADDER_TEST_DATA"), ROOT / "checkpoints"
STORY = (ROOT / "demo" / "story.txt").read_text()


@pytest.fixture(scope="module")
def gguf_file():
    files = [Path(folder) / NAME for folder in FOLDERS if folder]
    if not any(map(os.path.isfile, files)):
        pytest.skip(f"no {NAME}: make smollm2 downloads it, and LADDER_SMOLLM2 may name its folder")
    return next(filter(os.path.isfile, files))


@pytest.fixture(scope="module")
def folder(gguf_file, tmp_path_factory):
    """Its checkpoint in float32."""
    convert(gguf_file, out := tmp_path_factory.mktemp("smollm2") / "float", "--to-float", "--dtype", "float32")
    return out


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(folder, 49152)


@pytest.fixture(scope="module")
def their_tokenizer(gguf_file):
    """transformers', with the published folder's pre-tokenizer: of a GGUF, 5.23 forgets that digits are split."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    digits = pre_tokenizers.Digits(True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer


@pytest.fixture(scope="module")
def their_model(gguf_file):
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )


PIECES = [  # of nasty texts
    *"aZé0 7\n\t\r'’.…-—/\\\"{}\u00a0\u200b\u200d\ufeff\u0301\u0000\x7f\u202eß漢字かな한국어नमस्ते\U0001f600\U00020000",
    "  ", "\n\n", "\r\n", "2024", "3.14159", "don't", "WE'LL", " the", "Once upon", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<|im_", "<s>", "👩‍👩‍👧‍👦", "e\u0301", "ﬁ", "İ", "１２３", "½", "٣", "    def f(x):\n\treturn x", "https://a.b/?c=d&e",
]  # fmt: skip


def test_ids_of_nasty_texts(ours, their_tokenizer):
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 40)))
        assert ours.encode_markup(text) == their_tokenizer(text).input_ids, repr(text)
        plain = their_tokenizer(text, split_special_tokens=True).input_ids
        assert ours.encode_plain(text) == plain, repr(text)
        assert ours.decode(plain) == their_tokenizer.decode(plain, clean_up_tokenization_spaces=False), repr(text)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_ids_of_the_chat_template(ours, their_tokenizer, system):
    turns = [("user", "In 2024?"), ("assistant", " Yes.\n"), ("user", "Why, <b>friend</b>?")]
    messages = [{"role": role, "content": text} for role, text in [("system", system), *turns] if text]
    expected = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.chat(messages) == expected


@pytest.fixture(scope="module")
def expected_logits(ours, their_model):
    """(tokens (2, 60), lengths, transformers' logits of the last 5 tokens of each row)."""
    tokens = torch.tensor(ours.encode_plain(STORY)[: 2 * 60]).view(2, 60)
    lengths = torch.tensor([60, 45])
    with torch.no_grad():
        logits = their_model(tokens).logits
    return tokens, lengths, torch.stack([row[n - 5 : n] for row, n in zip(logits, lengths.tolist(), strict=True)])


COMPILED = {"compile": True, "compile_prefill": True}  # which takes a minute or two
HOW = [*((ranks, how) for ranks in (1, 2, 3, 4) for how in ({}, {"splits": 2})), (1, COMPILED), (2, {"compile": True})]


@pytest.mark.parametrize("ranks, how", HOW, ids=str)  # 9 heads and 3 KV heads: also uneven, or a KV head on two ranks
def test_logits(ranks, how, folder, expected_logits):
    *prompt, expected = expected_logits
    for logits in run_ranks(ranks, folder_logits, folder, prompt, {"steps": 4, **how}):
        assert (logits - expected).abs().max() < 1e-3 < expected.std()


def test_integers_that_stay_lose_nothing(gguf_file, folder, ours, tmp_path):
    ids = torch.tensor([ours.encode_plain(STORY)[:400]])
    integers = convert(gguf_file, tmp_path / "ours")
    config = integers.config
    assert (config.quant, config.group_size, config.not_quantized) == ("int4", 32, ())
    assert config.int8 == ("tok_embeddings:32",)  # the file has it as Q8_0
    with torch.no_grad():
        losses = [cross_entropy(net(ids)[0, :-1], ids[0, 1:]).item() for net in (load_folder(folder), integers)]
    assert losses[0] < 3 and abs(losses[0] - losses[1]) < 1e-3


@pytest.mark.parametrize("prompt", ["One day, a little dog", "1 2 3 4 1 2 3 4 1 2 3"])
def test_drafts_of_ngrams_leave_the_text(prompt, folder):
    args = "--checkpoint", folder, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", 60
    (plain, _), (drafted, report) = (
        main_on_ranks(2, generate.main, *args, *flags)[0] for flags in ([], ["--draft", "ngram@4"])
    )
    assert plain == drafted and len(plain) > 60
    assert "accepted" in report


GREEDY = read_json(ROOT / "tests" / "greedy_of_llama_cpp.json")["prompt, continuation"]


@pytest.mark.parametrize("prompt", GREEDY)
def test_greedy_tokens_are_those_of_llama_cpp(prompt, folder, ours):
    """Unless two logits are nearer than llama.cpp's errors, since it multiplies by activations in 8 bits."""
    ids, tokens = GREEDY[prompt]
    net = load_folder(folder)
    assert ours.encode(prompt) == ids and len(tokens) == 60
    with torch.no_grad():
        logits = net(torch.tensor([ids + tokens]))[0, len(ids) - 1 : -1]
    assert (logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() < 0.3


def test_a_step_reads_about_the_bytes_of_the_file(gguf_file, tmp_path):
    """Its table, which is the head too, is Q8_0."""
    convert(gguf_file, tmp_path / "integers")
    config = checkpoint.read_config(tmp_path / "integers")
    assert (config.quant, config.group_size, config.int8) == ("int4", 32, ("tok_embeddings:32",))
    net = generate.load_model(config, tmp_path / "integers", "bfloat16", ALONE)
    assert sum(weight_bytes(net, 1).values()) < 1.02 * os.path.getsize(gguf_file)
