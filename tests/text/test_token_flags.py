"""Flags and types of added tokens: in prompts, in templates and in printed text, whatever file names them.

The references are transformers and, for GGUF, the same tokens in settings of Hugging Face, which is how llama.cpp
treats USER_DEFINED and CONTROL.
"""

import functools
import itertools
import re

import pytest
import transformers
from cases import refused, slow_case
from file_edits import read_json, write_json
from helpers import gguf_types, train_tokenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ladder.sources import gguf_tokenizer
from ladder.text.tokenizer import FLAGS, load_tokenizer

SIZE = 300
MARK, OTHER = "<mark>", "<other>"  # MARK has the flags that are tried
TEXTS = [
    f"{MARK}dog", f"a {MARK} dog", f"a{MARK}dog", f" {MARK}\n {MARK} dog{OTHER} upon{MARK}", f"dog\n{OTHER}{MARK}\n\na",
    f"once{MARK}a {MARK}", "<s>dog</s> a <unk> dog", f"x{MARK}",
]  # fmt: skip


def token(text, **flags):
    return {"content": text, **dict.fromkeys(FLAGS, False), "special": True, **flags}


def settings(mark, first=SIZE, **more):
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    base = {} if first == 256 else {str(i): token(text) for i, text in enumerate(("<unk>", "<s>", "</s>"))}
    added = {**base, str(first): mark, str(first + 1): token(OTHER)}
    return {**named, "added_tokens_decoder": added, **more}


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    train_tokenizer(["Once upon a time there was a little dog in 2024. "] * 30, SIZE, path)
    return path


def write_sentencepiece(folder, model, mark, **more):
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    values = settings(mark, tokenizer_class="LlamaTokenizer", **{"legacy": False, "add_bos_token": True, **more})
    write_json(folder / "tokenizer_config.json", values)


def byte_level():
    model = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return model


def write_pipeline(folder, _, mark):
    """A tokenizer.json that has the tokens with other flags: those of the settings count."""
    model = byte_level()
    model.add_tokens([AddedToken(MARK, normalized=False), AddedToken(OTHER, normalized=False, special=True)])
    model.save(str(folder / "tokenizer.json"))
    values = settings(mark, 256, tokenizer_class="PreTrainedTokenizerFast")
    write_json(folder / "tokenizer_config.json", values | {f"{n}_token": None for n in ("bos", "eos", "unk")})


def write_pairs(folder, _, mark):
    write_json(folder / "vocab.json", byte_level().get_vocab())
    (folder / "merges.txt").write_text("#version: 0.2\n")
    values = settings(
        mark, 256, tokenizer_class="GPT2Tokenizer", **{f"{n}_token": OTHER for n in ("bos", "eos", "unk")}
    )
    write_json(folder / "tokenizer_config.json", values)


PATHS = {
    "tokenizer.json": write_pipeline, "vocab.json": write_pairs,
    "SentencePiece": write_sentencepiece,
    "SentencePiece, legacy": functools.partial(write_sentencepiece, legacy=True),
    "SentencePiece, no space": functools.partial(write_sentencepiece, add_prefix_space=False),
}  # fmt: skip


@pytest.mark.parametrize("most", [2, slow_case(len(FLAGS))])
@pytest.mark.parametrize("path", PATHS)
def test_every_flag_is_as_in_transformers(path, most, sentencepiece_model, tmp_path):
    """Each pair of flags, or all combinations. most: how many are set at once."""
    no_space = {"SentencePiece": "^ ", "SentencePiece, legacy": "^ |> "}.get(path, "(?!)")
    count = 0
    combinations = [each for each in itertools.product((False, True), repeat=len(FLAGS)) if sum(each) <= most]
    for values in combinations:
        mark = token(MARK, **dict(zip(FLAGS, values, strict=True)))
        PATHS[path](tmp_path, sentencepiece_model, mark)
        ours = load_tokenizer(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in TEXTS:
            if re.search(no_space, text):  # before a space transformers puts no other one, but SentencePiece does
                continue
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode_markup(text) == ids, (mark, text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), (mark, text)
            ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode_plain(text) == ids, (mark, text)
            count += 3
    assert count > len(combinations) * len(TEXTS) and len(combinations) >= 16


EXTRA = {"additional_special_tokens": [MARK]}
END = {"eos_token": MARK}
PLACES = [  # flags of MARK in tokenizer.json, in added_tokens_decoder, and what else names it
    (None, {"special": False}, EXTRA), ({"special": False}, {"special": False}, EXTRA),
    ({"special": False}, None, EXTRA), ({"special": False}, {}, {}),
    ({"special": False, "rstrip": True}, None, END), ({}, {"special": False}, {}),
    ({}, {"lstrip": True}, {}), (None, {"special": False, "normalized": True}, END), ({"rstrip": True}, {}, {}),
    (None, {"rstrip": True, "special": False}, {"tool_token": MARK}),
]  # fmt: skip


@pytest.mark.parametrize("own, other, named", PLACES)
def test_flags_in_several_places_are_joined_as_in_transformers(own, other, named, tmp_path):
    model = byte_level()
    model.add_tokens([AddedToken(**token(MARK, **own))] if own is not None else [])
    model.save(str(tmp_path / "tokenizer.json"))
    added = {} if other is None else {"added_tokens_decoder": {"256": token(MARK, **other)}}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **added}
    write_json(tmp_path / "tokenizer_config.json", values)
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # transformers forgets no token that tokenizer.json calls special; from other files it prints such a token, too
    hides = not (own == {} and other == {"special": False})
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_markup(text) == ids and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=hides)
        assert ours.encode_plain(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


def write_gguf(folder, model, kind, name="a model", architecture="llama", mark=MARK, **more):
    """The files that are made of a GGUF file whose tokens are those of `model`, then a mark and OTHER of types."""
    pieces = SentencePieceProcessor(model_file=str(model))
    own = {
        "model": "llama", "tokens": [*map(pieces.id_to_piece, range(SIZE)), mark, OTHER],
        "token_type": [*gguf_types(pieces), kind, 3],
        "scores": [*map(pieces.get_score, range(SIZE)), -1000.0, -1000.0],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more,
    }  # fmt: skip
    values = {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    gguf_tokenizer.write_tokenizer(values | {"general.name": name, "general.architecture": architecture}, folder)


@pytest.mark.parametrize("kind, special", [(gguf_tokenizer.CONTROL, True), (gguf_tokenizer.USER_DEFINED, False)])
@pytest.mark.parametrize("architecture, name", [("llama", "a model"), ("phi3", "a model"), ("llama", "Phi-3 mini")])
@pytest.mark.parametrize("space", [True, False])
def test_types_of_gguf_are_flags(kind, special, architecture, name, space, sentencepiece_model, tmp_path):
    """After Phi-3's tokens spaces go, as in its settings and in llama.cpp. A space is put after the others, too."""
    for folder in "gguf", "settings":
        (tmp_path / folder).mkdir()
    write_gguf(tmp_path / "gguf", sentencepiece_model, kind, name, architecture, add_space_prefix=space)
    ours = load_tokenizer(tmp_path / "gguf")
    phi3 = "hi" in name or "phi" in architecture
    mark = token(MARK, special=special, rstrip=phi3)
    write_sentencepiece(tmp_path / "settings", sentencepiece_model, mark, legacy=True, add_prefix_space=space)
    values = read_json(tmp_path / "settings" / "tokenizer_config.json")
    for i in 2, SIZE + 1:
        values["added_tokens_decoder"][str(i)]["rstrip"] = phi3
    write_json(tmp_path / "settings" / "tokenizer_config.json", values)
    theirs = load_tokenizer(tmp_path / "settings")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "settings")
    for text in TEXTS:
        ids = ours.encode_markup(text)
        assert ids == theirs.encode_markup(text) and ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids), text
        if not re.search("^ |> ", text):
            assert ids == peer.encode(text, add_special_tokens=False), text
            assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("kind", [gguf_tokenizer.NORMAL, gguf_tokenizer.USER_DEFINED])
def test_an_end_in_a_gguf_file_is_special_whatever_its_type(kind, sentencepiece_model, tmp_path):
    write_gguf(tmp_path, sentencepiece_model, kind, mark="<|im_end|>")
    ours = load_tokenizer(tmp_path)
    assert ours.encode_markup("dog<|im_end|>")[-1] == SIZE and SIZE not in ours.encode("dog<|im_end|>")
    assert ours.decode([*ours.encode("dog"), SIZE]) == "dog"


def test_an_ordinary_token_that_a_gguf_file_names_for_padding_is_printed(sentencepiece_model, tmp_path):
    dog = load_tokenizer(sentencepiece_model).encode("dog")[-1]
    write_gguf(tmp_path, sentencepiece_model, gguf_tokenizer.CONTROL, padding_token_id=dog, seperator_token_id=SIZE)
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode("dog")) == "dog"
    assert ours.template_variables == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": MARK}


def test_a_gguf_file_ends_texts_at_what_it_names_and_at_known_names():
    def ends(*tokens, **named):
        names = {f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()}
        return gguf_tokenizer.end_token_ids({"tokenizer.ggml.tokens": [*tokens], **names})

    assert ends("a", "<|im_end|>", "</s>", eos=2) == [2, 1]
    assert ends("a", "<|eom_id|>", "b", "c", eos=2, eot=3) == [2, 3, 1]
    assert ends("<|end|>", "<|return|>", "a", eos=1) == [1, 0]
    assert ends("<|end|>", "<|return|>", "<|call|>", eos=1) == [1, 2]  # gpt-oss's, whose <|end|> ends a message


def train_user_defined(folder, **options):
    SentencePieceTrainer.train(
        sentence_iterator=iter(["Once upon a time there was a little dog in 2024. "] * 30), vocab_size=SIZE,
        model_prefix=str(folder / "tokenizer"), model_type="bpe", byte_fallback=True, control_symbols=[OTHER],
        user_defined_symbols=[MARK, "\n\n"], normalization_rule_name="identity", minloglevel=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}])
def test_a_bare_sentencepiece_file_is_read_as_by_sentencepiece(options, tmp_path):
    train_user_defined(tmp_path, **options)
    path = tmp_path / "tokenizer.model"
    ours = load_tokenizer(path)
    theirs = SentencePieceProcessor(model_file=str(path))
    for text in (text for text in TEXTS if OTHER not in text and "<s>" not in text):
        ids = theirs.encode(text)
        assert ours.encode_plain(text) == ids and ours.encode_markup(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


def test_user_defined_pieces_of_sentencepiece_are_added_tokens(tmp_path):
    """As in transformers, and unlike SentencePiece, which puts its space before such a token."""
    train_user_defined(tmp_path, remove_extra_whitespaces=False)
    values = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "bos_token": "<s>", "eos_token": "</s>"}
    write_json(tmp_path / "tokenizer_config.json", {**values, "unk_token": "<unk>"})
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special.keys() == {"<unk>", "<s>", "</s>", MARK, OTHER, "\n\n"}
    for text in TEXTS:
        if not re.search("^ |> ", text):
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode_markup(text) == ids, text
            assert ours.decode(ids).split() == theirs.decode(ids, skip_special_tokens=True).split(), text
            assert MARK in ours.decode(ids) or MARK not in text


NAMED = [  # settings, and the variables that a template has of them
    ({"bos_token": "<s>", "eos_token": token("</s>", __type="AddedToken")}, {"bos_token": "<s>", "eos_token": "</s>"}),
    ({"sep_token": MARK, "cls_token": OTHER, "mask_token": MARK}, {"sep_token", "cls_token", "mask_token"}),
    ({"tool_token": MARK, "extra_special_tokens": {"image_token": OTHER}}, {"tool_token", "image_token"}),
    ({"bos_token": None, "add_bos_token": True, "extra_special_tokens": [MARK]}, set()),
]


@pytest.mark.parametrize("named, right", NAMED)
def test_a_template_has_the_tokens_that_are_named_and_no_others(named, right, tmp_path):
    model = byte_level()
    model.add_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>", MARK, OTHER)])
    model.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    variables = load_tokenizer(tmp_path).template_variables
    assert variables == transformers.AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    assert variables.keys() == set(right)


def test_sentencepiece_has_the_names_that_its_file_has_unless_the_settings_say_otherwise(sentencepiece_model, tmp_path):
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert load_tokenizer(sentencepiece_model).template_variables == own
    write_sentencepiece(tmp_path, sentencepiece_model, token(MARK), bos_token=MARK, eos_token=None)
    ours = load_tokenizer(tmp_path)
    assert ours.template_variables == {"bos_token": MARK, "unk_token": "<unk>"} and ours.prefix == [SIZE]
    write_sentencepiece(tmp_path, sentencepiece_model, token(MARK), bos_token=None)
    assert load_tokenizer(tmp_path).prefix == [] and load_tokenizer(tmp_path).end_tokens == {"</s>": 2}


@pytest.mark.parametrize("key", ["add_eos_token", "split_special_tokens"])
def test_settings_whose_effect_is_not_computed_are_refused(key, sentencepiece_model, tmp_path):
    write_sentencepiece(tmp_path, sentencepiece_model, token(MARK), **{key: False})
    load_tokenizer(tmp_path)
    write_sentencepiece(tmp_path, sentencepiece_model, token(MARK), **{key: True})
    refused(f"tokenizer_config.json: {key} is not supported, since .*: set it to false$", load_tokenizer, tmp_path)
