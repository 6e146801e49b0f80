"""The three kinds of tokenizer behind one interface, chat templates, streaming."""

import base64
import json
import random

import pytest
from helpers import shared_data

import tokenizer
from model import InputError

TEXTS = ["Once upon a time", " two  spaces, and\nlines\n", "naïve 🙂 日本", "1234 <s> </s>", "x"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    from training.data import train_tokenizer

    folder = tmp_path_factory.mktemp("sp")
    documents = ["Once upon a time there was a little dog. " * 3, "The dog ran to the park,\nand played all day."] * 20
    train_tokenizer(documents, 320, folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def tiktoken_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tt")
    ranks = [bytes([i]) for i in range(256)] + [b"ti", b"im", b"me", b"time", b" time", b"on", b"ce"]
    lines = [base64.b64encode(token) + f" {i}\n".encode() for i, token in enumerate(ranks)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("json")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    model.train_from_iterator(["Once upon a time there was a little dog"] * 9, trainer)
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(params=["sentencepiece_folder", "tiktoken_folder", "json_folder"])
def any_tokenizer(request):
    return tokenizer.load_tokenizer(request.getfixturevalue(request.param))


def test_text_survives_the_round_trip(any_tokenizer):
    for text in TEXTS:
        ids = any_tokenizer.encode(text)
        assert ids[0] == any_tokenizer.bos_id
        assert any_tokenizer.decode(ids) == text
        assert all(0 <= i < any_tokenizer.vocab_size for i in ids)


def test_plain_text_never_becomes_special_tokens_but_markup_does(any_tokenizer):
    name, special_id = next(iter(any_tokenizer.special.items()))
    assert special_id not in any_tokenizer.encode_plain(f"a {name} b")
    ids = any_tokenizer.encode_markup(f"a{name}b{name}")
    assert ids.count(special_id) == 2
    assert any_tokenizer.decode(ids).replace(" ", "") == "ab"


def test_a_stream_is_the_text_in_pieces(any_tokenizer):
    rng = random.Random(0)
    text = " ".join(rng.choice([*TEXTS, "time and time", "🙂🙂"]) for _ in range(120))
    ids, pieces = any_tokenizer.encode(text), []
    stream = tokenizer.TextStream(any_tokenizer)
    for i in ids:
        pieces.append(stream.push([i]))
        assert "\ufffd" not in pieces[-1]
    assert "".join(pieces) + stream.flush() == text
    assert sum(bool(p) for p in pieces) > len(pieces) / 3  # it really streams


def test_a_stream_gives_up_bytes_that_never_become_a_character(tiktoken_folder):
    stream = tokenizer.TextStream(tokenizer.load_tokenizer(tiktoken_folder))
    assert stream.push([ord("a"), 0xF0]) == ""
    assert stream.flush() == "a\ufffd"


def test_chat_matches_transformers(json_folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(json_folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    messages = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "yes"}]
    messages.append({"role": "user", "content": "upon\n a time "})
    ours = tokenizer.load_tokenizer(json_folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages) == expected
    with pytest.raises(InputError, match="unknown role"):
        ours.chat([{"role": "robot", "content": ""}])


def test_chat_with_sentencepiece_and_named_or_filed_templates(sentencepiece_folder, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.load_tokenizer(tmp_path).chat([])
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}A</s>"}]
    settings = {"bos_token": "<s>", "chat_template": named, "added_tokens_decoder": {"320": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = tokenizer.load_tokenizer(tmp_path)
    assert ours.chat([]) == [1, *ours.encode_plain("A"), 2]
    (tmp_path / "chat_template.jinja").write_text("B<|im_end|>")
    ours = tokenizer.load_tokenizer(tmp_path)
    assert ours.chat([]) == [*ours.encode_plain("B"), 320]
    assert ours.decode([*ours.encode_plain("B"), 320]) == "B"


def test_bos_can_be_switched_off(json_folder, tmp_path):
    for file in json_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    ours = tokenizer.load_tokenizer(tmp_path)
    assert ours.encode("dog") == ours.encode_plain("dog")


def test_ids_of_a_padded_embedding_have_no_text(any_tokenizer):
    ids = any_tokenizer.encode("dog")
    assert any_tokenizer.decode([*ids, any_tokenizer.vocab_size, any_tokenizer.vocab_size + 1]) == "dog"


def test_no_tokenizer_is_none(tmp_path):
    assert tokenizer.load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("vocab_size", [319, 330, 32000])
def test_another_vocabulary_is_refused(sentencepiece_folder, vocab_size):
    with pytest.raises(InputError, match=f"has 320 tokens, but the model's vocab_size is {vocab_size}"):
        tokenizer.load_tokenizer(sentencepiece_folder, vocab_size)
    assert tokenizer.load_tokenizer(sentencepiece_folder, 323).vocab_size == 320  # a padded embedding


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"aGVsbG8= 0\nnonsense\n"])
def test_a_broken_file_is_one_clear_line(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} cannot be read") as error:
        tokenizer.load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


# The real ones


def real(name, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(shared_data(name).read_bytes())
    return tokenizer.load_tokenizer(tmp_path)


def test_llama3(tmp_path):
    ours = real("llama3-tokenizer.model", tmp_path)
    assert ours.encode("Hello world") == [128000, 9906, 1917]
    assert ours.vocab_size == 128256
    special = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006}
    special |= {"<|end_header_id|>": 128007, "<|eot_id|>": 128009, "<|reserved_special_token_0|>": 128002}
    special |= {
        "<|python_tag|>": 128010,
        "<|reserved_special_token_3|>": 128011,
        "<|reserved_special_token_247|>": 128255,
    }
    assert {name: ours.special[name] for name in special} == special
    assert ours.encode_markup("<|start_header_id|>user<|end_header_id|>\n\nHello") == [128006, 882, 128007, 271, 9906]
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


def test_llama2(tmp_path):
    ours = real("llama2-tokenizer.model", tmp_path)
    assert (ours.vocab_size, ours.bos_id) == (32000, 1)
    assert ours.encode("Hello world") == [1, 15043, 3186]
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
