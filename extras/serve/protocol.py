"""OpenAI's API of completions (platform.openai.com/docs/api-reference): checks requests, makes the text of answers."""

import contextlib
import functools
import itertools
import json
import math
import random
import reprlib

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols
from starlette.exceptions import HTTPException

from ladder.decoding.batch import Sampler
from ladder.errors import did_you_mean
from ladder.text.template import readable
from ladder.text.tokenizer import TextStream

NUMBER = int, float
COMMON_FIELDS = {  # {a field of a request: (its types, its default)}
    "model": (str, None), "stream": (bool, False), "stream_options": (dict, {}), "temperature": (NUMBER, 1.0),
    "top_k": (int, None), "top_p": (NUMBER, 1.0), "min_p": (NUMBER, 0.0), "repetition_penalty": (NUMBER, 1.0),
    "seed": (int, None), "stop": ((str, list), []), "stop_token_ids": (list, []), "ignore_eos": (bool, False),
    "min_tokens": (int, 0),
}  # fmt: skip
CHAT_FIELDS = COMMON_FIELDS | {
    "messages": (list, []), "logprobs": (bool, False), "top_logprobs": (int, 0), "max_tokens": (int, math.inf),
    "max_completion_tokens": (int, math.inf), "chat_template_kwargs": (dict, {}),
}  # fmt: skip
TEXT_FIELDS = COMMON_FIELDS | {
    "prompt": ((str, list), []), "logprobs": (int, None), "echo": (bool, False), "max_tokens": (int, 16),
}  # fmt: skip
IGNORED_FIELDS = {  # they do not change an answer here
    "user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice",
    "parallel_tool_calls",
}  # fmt: skip
NEUTRAL_VALUES = {  # {a field: values that ask for what is done anyway}
    "n": [1], "best_of": [1], "top_k": [-1, 0], "seed": [-1], "stop": [""], "logprobs": [False], "typical_p": [1],
    "length_penalty": [1], "skip_special_tokens": [True], "modalities": [["text"]],
    "spaces_between_special_tokens": [True], "add_generation_prompt": [True], "response_format": [{"type": "text"}],
}  # fmt: skip
MESSAGE_KEYS = {  # {a key that a message may have besides role and content: what a chat template that heeds it names}
    "reasoning_content": {"reasoning_content"}, "name": {"name"}, "tool_calls": {"tool_calls"},
    "tool_call_id": {"tool", "tool_calls"},
}  # fmt: skip
MAX_STOPS = 16
MAX_LOGPROBS = 20
LONG_TEXT = 2**16  # with more bytes of a body, or characters of a text, a tokenizer takes long


def check(condition, message, status=400, headers=None):
    """Raise HTTPException unless the condition holds."""
    if not condition:
        raise HTTPException(status, message, headers)


def read_fields(data, known):
    """Return {name: value} of the known fields of a body (bytes). null means the default. Raises HTTPException."""
    try:
        given = json.loads(data)
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()  # raises for half of a surrogate pair and NaN
    except (ValueError, RecursionError) as e:
        raise HTTPException(400, f"the body is not JSON: {e}") from None
    check(isinstance(given, dict), "the body is not a JSON object")
    fields = {name: default for name, (_, default) in known.items()}
    for name, value in given.items():
        shown = f"{name[:60]} is {reprlib.repr(value)}"
        neutral = [None, *NEUTRAL_VALUES.get(name, [])]
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
            continue
        if name in known:
            kind = known[name][0]
            valid = isinstance(value, kind) and (kind is bool or type(value) is not bool)
            check(valid, f"{shown}, which is of a wrong type")
            fields[name] = value
        elif name not in IGNORED_FIELDS and (value or name in NEUTRAL_VALUES):
            raise HTTPException(400, f"{shown}, which is not implemented, or unknown{did_you_mean(name[:60], known)}")
    return fields


def check_model(asked, model):
    check(asked == model, f"the model {reprlib.repr(asked)} does not exist: this is {model!r}", 404)


def parse(data, chat, model, tokenizer, vocab_size, context, max_prompts):
    """Return the fields of a body (bytes), and with them `chat`, `requests` as Row takes them, and their `echoes`.

    There is a request, and an echo, for each prompt. chat: whether the path is /v1/chat/completions. context: tokens of
    a row. Raises HTTPException and InputError.
    """
    ask = read_fields(data, CHAT_FIELDS if chat else TEXT_FIELDS)
    check_model(ask["model"] or model, model)
    stop = [ask["stop"]] if isinstance(ask["stop"], str) else ask["stop"]
    valid = len(stop) <= MAX_STOPS and all(s and isinstance(s, str) for s in stop)
    check(valid, f"stop must be a text, or up to {MAX_STOPS}, none of them empty")
    logprobs = ask["logprobs"]
    max_tokens = ask["max_tokens"]
    if chat:
        logprobs = ask["top_logprobs"] if logprobs else None
        max_tokens = min(max_tokens, ask["max_completion_tokens"])
    valid = logprobs is None or 0 <= logprobs <= MAX_LOGPROBS
    check(valid, f"logprobs are of 0 to {MAX_LOGPROBS} tokens in a place")
    scores_only = max_tokens == 0 and ask.get("echo", False)  # an echo alone: what is sampled is not sent
    check(max_tokens > 0 or scores_only, f"max_tokens is {max_tokens} but must be at least 1, or 0 with echo")
    valid = 0 <= ask["min_tokens"] <= max_tokens
    check(valid, f"min_tokens is {ask['min_tokens']} but must be from 0 to max_tokens, {max_tokens}")
    valid = 0.01 <= ask["repetition_penalty"] <= 100
    check(valid, f"repetition_penalty is {ask['repetition_penalty']} but must be a number from 0.01 to 100")
    valid = all(type(i) is int and 0 <= i < vocab_size for i in ask["stop_token_ids"])
    check(valid, f"stop_token_ids must be a list of token ids from 0 to {vocab_size - 1}")
    if chat:
        prompts = [read_messages(ask["messages"], tokenizer, context, ask["chat_template_kwargs"])]
    else:
        prompts = read_prompts(ask["prompt"], tokenizer, context, max_prompts)
    check(len(prompts) == 1 or not ask["stream"], "a stream takes one prompt")
    requests = []
    echoes = []
    for text, ids in prompts:
        valid = all(type(i) is int and 0 <= i < vocab_size for i in ids)
        check(valid, f"token ids are from 0 to {vocab_size - 1}")
        most = context - 1 + scores_only
        check(0 < len(ids) <= most, f"the prompt has {len(ids)} tokens but must have from 1 to {most}")
        seed = random.getrandbits(62) if ask["seed"] is None else ask["seed"]
        sampling = {name: ask[name] for name in ("temperature", "top_k", "top_p", "min_p")} | {"seed": seed}
        Sampler(**sampling)  # raises InputError
        request = {"ids": ids, "max_tokens": min(max(1, max_tokens), context - len(ids)), "sampling": sampling}
        request |= {name: ask[name] for name in ("repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens")}
        requests.append(request | {"logprobs": logprobs, "echo": ask.get("echo", False)})
        echoes.append(echo(text, ids, tokenizer) if requests[-1]["echo"] else ("", []))
    return ask | {"chat": chat, "stop": stop, "requests": requests, "echoes": echoes}


@functools.cache
def longest_token(tokenizer):
    """Return how many characters a token has at most, with a space at the beginning that a decoder may drop."""
    texts = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size))
    return max(map(len, itertools.chain(texts, tokenizer.special))) + 1


def check_length(text, tokenizer, context):
    """Raise HTTPException for a text that cannot fit the context, before a tokenizer spends seconds on it."""
    if len(text) > LONG_TEXT:
        least = len(" ".join(text.split())) // longest_token(tokenizer)  # since spaces may become a single one
        check(least < context, f"the prompt has {least} tokens or more but must have from 1 to {context - 1}")


def encode(text, tokenizer):
    """Return the ids of a text that may contain names of special tokens, after the tokenizer's prefix, once."""
    ids = tokenizer.encode_markup(text)
    return ids if ids[: len(tokenizer.prefix)] == tokenizer.prefix else tokenizer.prefix + ids


def echo(text, ids, tokenizer):
    """Return (a prompt's text, the offset in it at which each token begins). text: as it came; None if ids came."""
    stream = TextStream(tokenizer)
    names = hidden_names(tokenizer)
    shown = ""
    offsets = []
    for i in ids:
        offsets.append(len(shown))
        shown += stream.push([i])
        name = names.get(i, "")
        shown += name if text is None or text.startswith(name, len(shown)) else ""  # not a BOS that was added here
    return shown + stream.flush() if text is None else text, offsets


def read_prompts(prompt, tokenizer, context, max_prompts):
    """Return (text or None, ids) for each prompt of a text, a list of ids, or a list of texts or of lists of ids."""
    if isinstance(prompt, str) or not prompt or not all(isinstance(p, str | list) for p in prompt):
        prompt = [prompt]
    check(len(prompt) <= max_prompts, f"there are {len(prompt)} prompts but at most {max_prompts} may wait")
    for text in prompt:
        check_length(text if isinstance(text, str) else "", tokenizer, context)
    return [(p, encode(p, tokenizer)) if isinstance(p, str) else (None, p) for p in prompt]


@functools.cache
def names_in(template):
    """Return the attributes and texts that a chat template's code names: of m.role == "user", {"role", "user"}."""
    try:
        tree = Environment(extensions=[loopcontrols]).parse(readable(template))
    except (TemplateSyntaxError, RecursionError):  # it cannot be rendered either, which is said then
        return set()
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def read_message(place, message, template):
    """Return a message as a chat template takes it. place: what error messages call it. Raises HTTPException."""
    check(isinstance(message, dict), f"{place} is {reprlib.repr(message)}, but must be an object with role and content")
    given = {name: value for name, value in message.items() if value}
    role = given.pop("role", None)
    content = given.pop("content", "")
    calls = given.get("tool_calls", [])
    check(isinstance(role, str), f"{place} has the role {reprlib.repr(role)}, which must be a text, such as user")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    texts_only = f"{place} has the content {reprlib.repr(content)}, which must be a text, or parts with a text each"
    check(all(isinstance(text, str) for text in texts), texts_only)
    unread = [reprlib.repr(name) for name in given if not MESSAGE_KEYS.get(name, set()) & names_in(template)]
    check(not unread, f"{place} has {', '.join(unread)}, which the chat template does not read")
    valid = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    check(valid, f"{place} has the tool_calls {reprlib.repr(calls)}, which must be a list of objects")
    for call in calls:  # arguments are a text of JSON, which a template writes itself
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {"role": role, "content": "".join(texts)} | given


def read_messages(messages, tokenizer, context, variables):
    """Return (None, ids) of a conversation, by the chat template or, without one, of its texts one after another.

    variables: further ones of the template. Raises HTTPException.
    """
    check(messages, "messages must be a list of objects, at least one")
    template = tokenizer.template or ""
    conversation = [read_message(f"messages[{i}]", message, template) for i, message in enumerate(messages)]
    asked = "".join(message["content"] for message in conversation if not template or message["role"] != "assistant")
    check_length(asked, tokenizer, context)  # without answers, of which a template may leave out the reasoning
    if tokenizer.template is None:
        return None, encode(asked, tokenizer)
    return None, tokenizer.chat(conversation, variables=variables)


class Text:
    """Makes the text of an answer as its tokens arrive. Characters and stop strings may extend over several tokens.

    The text does not show special tokens, but a stop string may name them. So a character for private use stands for
    each of these, in the text and in the stop string.
    """

    def __init__(self, tokenizer, ids, stops, min_tokens=0):
        hidden = hidden_names(tokenizer)
        self.marks = {i: chr(0xF0000 + n) for n, i in enumerate(hidden) if any(hidden[i] in stop for stop in stops)}
        for i, mark in self.marks.items():
            stops = [stop.replace(hidden[i], mark) for stop in stops]
        self.unmarked = str.maketrans("", "", "".join(self.marks.values()))
        self.stream = TextStream(tokenizer, ids)
        self.stops = stops
        self.longest = max(map(len, stops), default=1)
        self.withheld = ""  # text in which a stop string may have begun
        self.size = 0  # characters so far
        self.early_tokens = min_tokens  # in which no stop string may end
        self.early = 0  # characters of these tokens in `withheld`

    def push(self, ids, finish):
        """Return (the text that no stop string can change any more, why the answer ends or None)."""
        for i in ids:
            new = self.stream.push([i])
            self.withheld += new + self.marks.get(i, "")
            self.size += len(new)
            if self.early_tokens > 0:
                self.early_tokens -= 1
                self.early = len(self.withheld)
        self.withheld += self.stream.flush() if finish else ""
        end = len(self.withheld) if finish else max(0, len(self.withheld) - self.longest + 1)
        starts = {stop: max(0, self.early - len(stop) + 1) for stop in self.stops}
        if cuts := [i for stop in self.stops if (i := self.withheld.find(stop, starts[stop])) >= 0]:
            end = min(cuts)
            finish = "stop"
        text, self.withheld, self.early = self.withheld[:end], self.withheld[end:], max(0, self.early - end)
        return text.translate(self.unmarked), finish


encode_letter = functools.cache(lambda tokenizer: tokenizer.encode_plain("a"))  # decoders drop a space at the start


@functools.cache
def hidden_names(tokenizer):
    """Return {id: name} of the special tokens that do not appear in a decoded text."""
    after = encode_letter(tokenizer)
    return {i: name for name, i in tokenizer.special.items() if not tokenizer.continuation(after, [i])}


@functools.cache
def token_text(tokenizer, i):
    """Return a token's text as it follows other text, a special one's name, or token_id:N for a part of a character."""
    text = hidden_names(tokenizer).get(i) or tokenizer.continuation(encode_letter(tokenizer), [i])
    return f"token_id:{i}" if "\ufffd" in text else text


def logprobs_of(tokens, offsets, chat, tokenizer):
    """Return the field `logprobs` of a choice. tokens: its Tokens, which begin at these offsets in its text."""
    text = functools.partial(token_text, tokenizer)
    if not chat:
        own = {"tokens": [text(t.id) for t in tokens], "token_logprobs": [t.logprob for t in tokens]}
        likeliest_last = [t.top and sorted((p, i) for i, p in (t.top | {t.id: t.logprob}).items()) for t in tokens]
        tops = [each and {text(i): p for p, i in each} for each in likeliest_last]  # of equal texts the likelier stays
        return own | {"top_logprobs": tops, "text_offset": offsets}
    content = []
    for t in tokens:
        own, *tops = ({"token": text(i), "logprob": p} for i, p in ((t.id, t.logprob), *t.top.items()))
        content.append(own | {"top_logprobs": tops})
    return {"content": content}
