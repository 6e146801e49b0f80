"""The three kinds of tokenizer behind one interface, chat templates, streaming."""

import base64
import json
import random
import shutil

import pytest
from cases import refused
from file_edits import read_json, write_json
from helpers import shared_data

from ladder.text import rendering, tiktoken_ranks
from ladder.text.tokenizer import TextStream, load_tokenizer

TEXTS = ["Once upon a time", " two  spaces, and\nlines\n", "naïve 🙂 日本", "1234 <s> </s>", "x"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


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
    write_json(folder / "tokenizer_config.json", settings)
    return folder


@pytest.fixture(scope="module")
def fallback_folder(tmp_path_factory):
    """As Llama 2's tokenizer.json: a character that is no piece is one token a byte, and </s> is "normalized"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    folder = tmp_path_factory.mktemp("fallback")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    model = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)
    model.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=True)])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["tiny", "tiktoken_folder", "json_folder", "fallback_folder"])
def any_tokenizer(request, monkeypatch):
    monkeypatch.setattr(tiktoken_ranks, "LLAMA3_RANKS", 263)  # as many as tiktoken_folder has
    return load_tokenizer(request.getfixturevalue(request.param))


def test_text_survives_the_round_trip_and_special_tokens_come_from_markup_alone(any_tokenizer):
    for text in TEXTS:
        ids = any_tokenizer.encode(text)
        assert ids[:1] == any_tokenizer.prefix and any_tokenizer.decode(ids) == text
        assert all(0 <= i < any_tokenizer.vocab_size for i in ids)
    name, special = next(iter(any_tokenizer.special.items()))
    assert special not in any_tokenizer.encode_plain(f"a {name} b")
    ids = any_tokenizer.encode_markup(f"a{name}b{name}")
    assert ids.count(special) == 2 and any_tokenizer.decode(ids).replace(" ", "") == "ab"
    ids = any_tokenizer.encode_plain("time")
    for hidden in [*any_tokenizer.special.values(), any_tokenizer.vocab_size]:  # the last of a padded embedding
        assert any_tokenizer.decode([hidden, *ids, hidden]) == "time"


@pytest.mark.parametrize("step", [1, 5])
def test_a_stream_is_the_text_in_pieces(step, any_tokenizer):
    rng = random.Random(0)
    text = " ".join(rng.choice([*TEXTS, "time and time", "🙂🙂"]) for _ in range(120))
    text += "从前有一个小女孩…饕餮魑魅魍魉囍龘靐齉爩鱻麤龖" * 3  # to some of them single bytes
    ids = any_tokenizer.encode(text)
    stream = TextStream(any_tokenizer)
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)] + [stream.flush()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(pieces) / 3  # it really streams


TRAINED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}\n{% generation %}\n{% set x = m['content'] %}\n"
    "{{ x }}</s>{%- endgeneration -%}{% else %}{{ m['content'] }}{% endif %}{% endfor %}[{{ x }}]{{ messages|tojson }}"
)


@pytest.mark.parametrize("template", [TEMPLATE, TRAINED])
def test_chat_matches_transformers(template, json_folder):
    from transformers import PreTrainedTokenizerFast

    file = str(json_folder / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>", chat_template=template)
    messages = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "yes"}]
    messages.append({"role": "user", "content": "upon\n a time "})
    ours = load_tokenizer(json_folder)
    ours.template = template
    assert ours.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_chat_with_sentencepiece_and_named_or_filed_templates(tiny, tmp_path):
    shutil.copy(tiny / "tokenizer.model", tmp_path)
    refused("no chat template", load_tokenizer(tmp_path).chat, [])
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}A</s>"}]
    settings = {"bos_token": "<s>", "chat_template": named, "added_tokens_decoder": {"300": {"content": "<|im_end|>"}}}
    write_json(tmp_path / "tokenizer_config.json", settings)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ bos_token }}C"}')
    ours = load_tokenizer(tmp_path)
    assert ours.chat([]) == [1, *ours.encode_plain("A"), 2]
    write_json(tmp_path / "tokenizer_config.json", {**settings, "chat_template": None})
    ours = load_tokenizer(tmp_path)
    assert ours.chat([]) == [1, *ours.encode_plain("C")]
    (tmp_path / "chat_template.jinja").write_text("B<|im_end|>")
    ours = load_tokenizer(tmp_path)
    assert ours.chat([]) == [*ours.encode_plain("B"), 300]
    assert ours.decode([*ours.encode_plain("B"), 300]) == "B"


CHAT = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['content'] }}<think>x{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("older", [True, False])
def test_a_chat_has_tokens_that_only_the_settings_name(older, json_folder, tmp_path):
    from transformers import AutoTokenizer

    size = load_tokenizer(json_folder).vocab_size
    shutil.copy(json_folder / "tokenizer.json", tmp_path)
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "additional_special_tokens": ["<|im_start|>"]}
    tokens = {size + 1: {"content": "<think>", "special": False}, size: {"content": "<|im_start|>", "special": True}}
    settings = {**named, "eos_token": "</s>", "added_tokens_decoder": tokens}
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": CHAT, **({} if older else settings)})
    if older:
        write_json(tmp_path / "special_tokens_map.json", named)
        write_json(tmp_path / "added_tokens.json", {"<think>": size + 1, "<|im_start|>": size})
    messages = [{"role": "user", "content": "a dog"}]
    ours = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.chat(messages)
    assert ids == theirs.apply_chat_template(messages, return_dict=False)
    assert (ids[:2], ids[-1]) == ([0, size], 1)
    assert ours.decode(ids) == "a dog<think>x"
    assert {size, size + 1} & {*ours.encode("<|im_start|><think>")} == {size + 1}  # a prompt cannot name special ones
    assert size + 1 not in load_tokenizer(tmp_path, size + 1).chat(messages)  # the model has no row for it


def test_an_added_token_has_the_id_of_the_settings(json_folder, tmp_path):
    shutil.copy(json_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"900": {"content": "im_end"}}}')
    refused("'im_end' is 900, but after tokenizer.json's tokens it is", load_tokenizer, tmp_path)


@pytest.mark.parametrize("legacy", [None, False])
def test_legacy_says_whether_text_behind_a_special_token_gets_a_space(legacy, tiny, tmp_path):
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from transformers import LlamaTokenizer

    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {} if legacy is None else {"legacy": legacy}
    write_json(tmp_path / "tokenizer_config.json", settings)
    shutil.copy(tiny / "tokenizer.model", tmp_path)
    ours = load_tokenizer(tmp_path)
    proto = sentencepiece_model_pb2.ModelProto.FromString((tmp_path / "tokenizer.model").read_bytes())
    proto.normalizer_spec.add_dummy_prefix = False
    bare = SentencePieceProcessor(model_proto=proto.SerializeToString()).encode
    behind = ours.encode_plain if legacy is None else bare
    for text in ("dog", " a  dog", "\n\nthe park", "🙂 日本", "▁x "):
        assert ours.encode_markup(f"<s>{text}</s>{text}") == [1, *behind(text), 2, *behind(text)]
    if legacy is False:  # transformers 5.23 takes that for the default, and merges two spaces in another order
        text = "<s>The dog</s>\nplayed<s>all day"
        theirs = LlamaTokenizer.from_pretrained(tmp_path)
        assert ours.encode_markup(text) == theirs.encode(text, add_special_tokens=False)


def test_only_what_stands_before_the_text_is_its_prefix(json_folder, tmp_path):
    from tokenizers import Tokenizer, processors

    model = Tokenizer.from_file(str(json_folder / "tokenizer.json"))
    for around, prefix in ("$A </s>", []), ("</s> $A </s>", [1]), ("</s> <s> $A", [1, 0]):
        special = [("</s>", 1), ("<s>", 0)]
        model.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
        model.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        assert ours.encode("dog") == prefix + ours.encode_plain("dog")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert load_tokenizer(tmp_path).prefix == []


def test_an_embedding_may_be_padded(tiny):
    assert load_tokenizer(tiny, 310).vocab_size == 300
    for vocab_size in 299, 320:
        refused(f"has 300 tokens, but the model's vocab_size is {vocab_size}", load_tokenizer, tiny, vocab_size)


def test_added_tokens_beyond_the_embedding_are_plain_text(json_folder, tmp_path):
    """In a tokenizer.json, in its vocabulary too or in the settings alone; but not if they stand before each text."""
    from tokenizers import Tokenizer, processors

    plain = load_tokenizer(json_folder)
    model = Tokenizer.from_file(str(json_folder / "tokenizer.json"))
    size = plain.vocab_size
    text = "a <image> b [PAD]"
    file = tmp_path / "tokenizer.json"
    model.add_special_tokens(["<image>"])
    values = json.loads(model.to_str())
    values["model"]["vocab"]["<image>"] = size
    write_json(
        tmp_path / "tokenizer_config.json",
        {"added_tokens_decoder": {size: {"content": "<image>"}, size + 1: {"content": "[PAD]"}}},
    )
    for content in model.to_str(), json.dumps(values):
        file.write_text(content)
        assert load_tokenizer(tmp_path).encode_markup(text)[-1] == size + 1
        ours = load_tokenizer(tmp_path, size)
        assert (ours.left_out, ours.vocab_size) == (("<image>", "[PAD]"), size)
        assert ours.encode_markup(text) == plain.encode_plain(text)
    model.post_processor = processors.TemplateProcessing(single="<image> $A", special_tokens=[("<image>", size)])
    model.save(str(file))
    refused(f"has {size + 1} tokens, but the model's vocab_size is {size}", load_tokenizer, tmp_path, size)


def test_as_many_ranks_as_llama_3s_are_another_familys_where_a_file_says_so(tiktoken_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken_ranks, "LLAMA3_RANKS", 263)  # as many as tiktoken_folder has
    folder = shutil.copytree(tiktoken_folder, tmp_path / "labelled")
    for name, settings, is_llama in (
        ("tokenizer_config.json", {"tokenizer_class": "QWenTokenizer"}, False),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ("config.json", {"model_type": "deepseek_v3"}, False),
        ("config.json", {"model_type": "llama"}, True),
    ):
        write_json(folder / name, settings)
        if is_llama:
            assert "<|eot_id|>" in load_tokenizer(folder).special
            continue
        [(key, value)] = settings.items()
        refused(f"as Llama 3's, but {name} says {key} '{value}': give a tokenizer.json", load_tokenizer, folder)


def test_a_file_of_ranks_is_not_taken_for_llama_3s(tiktoken_folder, tmp_path):
    """Kimi's splits Han from other letters, and names its own special tokens. Of others neither is known."""
    words = "tokenizer.model has 263 ranks, not Llama 3's 128000, nor has it settings"
    refused(words, load_tokenizer, tiktoken_folder)
    ranks = {bytes([i]): i for i in range(256)}
    for text in "\u6587", "\u4e2d", "\u4e2d\u6587", "\u6587E", "\u4e2d\u6587En", "English", " don't":
        data = text.encode()
        for n in range(2, len(data) + 1):
            ranks.setdefault(data[:n], len(ranks))
    lines = [base64.b64encode(data) + f" {i}\n".encode() for data, i in ranks.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    n = len(ranks)
    added = {n: "[BOS]", n + 1: "[EOS]", n + 2: "<|im_end|>"}
    settings = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    settings["added_tokens_decoder"] = {i: {"content": text, "special": True} for i, text in added.items()}
    write_json(tmp_path / "tokenizer_config.json", settings)
    ours = load_tokenizer(tmp_path, n + 256)
    assert ours.encode("\u4e2d\u6587English don't") == [
        ranks[text.encode()] for text in ("\u4e2d\u6587", "English", " don't")
    ]
    assert ours.encode_markup("[BOS]English<|im_end|>") == [n, ranks[b"English"], n + 2]
    assert ours.decode([n, ranks[b"English"], n + 2, n + 9]) == "English" and ours.end_tokens == {"[EOS]": n + 1}
    assert ours.special.keys() >= {*added.values(), f"<|reserved_token_{n + 3}|>"} and "<|eot_id|>" not in ours.special
    refused(f"has {n} ranks", load_tokenizer, tmp_path / "tiktoken.model")  # the file alone


def test_the_end_is_the_eos_token_and_what_the_template_writes_after_an_answer(json_folder, tiny, tmp_path):
    """An end that is in the vocabulary like any text, and only named by the settings, is a special token too."""
    values = read_json(json_folder / "tokenizer.json")
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != "</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8-sig")  # with a BOM
    added = {"288": {"content": "<|im_end|>"}, "289": {"content": "<|im_start|>"}, "290": {"content": "<|im_end|>2"}}
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "added_tokens_decoder": added}
    write_json(tmp_path / "tokenizer_config.json", settings)
    ours = load_tokenizer(tmp_path)
    assert ours.end_tokens == {"</s>": 1}
    assert ours.encode_markup("a</s>")[-1] == 1 and ours.decode([1]) == ""
    assert load_tokenizer(tiny).end_tokens == {"</s>": 2}
    turn = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    asks = "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    for template, end in [
        (turn + " <|im_end|>\n{% endfor %}<s>", {"<|im_end|>": 288}),
        (turn + "<|im_end|>2{% endfor %}", {"<|im_end|>2": 290}),
        (turn + "{% endfor %}", {}), (turn + " bye<|im_end|>{% endfor %}", {}), ("{{ raise_exception('no') }}", {}),
        (TEMPLATE, {"</s>": 1}), (None, {}), (turn + asks, {"<|im_end|>": 288}),
        (turn.replace(" {{", "<message>{{") + asks, {}),  # as gpt-oss's: an answer writes a header of its own
    ]:  # fmt: skip
        ours.template = template
        assert rendering.turn_end(ours) == end, template


NASTY = ["Don't  I'LL", " x\n\n y\t\r\n", "e\u0301\ufb01 naïve", "# # 12345", "日本🙂\u200d", " a</s>b<s>"]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2TokenizerFast", "LlamaTokenizer"])
def test_pairs_in_two_files(name, json_folder, tmp_path):
    import transformers

    model = read_json(json_folder / "tokenizer.json")["model"]
    write_json(tmp_path / "vocab.json", model["vocab"] | {"12": len(model["vocab"])})
    merges = ["#version: 0.2", *map(" ".join, model["merges"]), "1 2"]  # Qwen 2 takes each digit for a word
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, **named})
    if name == "LlamaTokenizer":
        refused("tokenizer_class is LlamaTokenizer, but only for GPT2Tokenizer, GPTNeoX", load_tokenizer, tmp_path)
        return
    ours = load_tokenizer(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    for text in NASTY:
        assert ours.encode_markup(text) == theirs.encode(text), text
        assert ours.decode(ours.encode_plain(text)) == theirs.decode(ours.encode_plain(text)), text


# The real ones


def test_llama2():
    ours = load_tokenizer(shared_data("llama2-tokenizer.model"))
    assert (ours.vocab_size, ours.prefix) == (32000, [1])
    assert ours.encode("Hello world") == [1, 15043, 3186]


def test_a_stream_keeps_several_spaces():
    """Some SentencePiece models drop all spaces at the beginning of what they decode."""
    ours = load_tokenizer(shared_data("tok512.model"))
    space = ours.model.piece_to_id("▁")
    ids = [*ours.encode("a"), space, space, space, *ours.encode_plain("b")]
    stream = TextStream(ours)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == ours.decode(ids) == "a    b"
