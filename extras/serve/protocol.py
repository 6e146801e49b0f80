"""OpenAI's completions (platform.openai.com/docs/api-reference): requests, and the text of an answer."""

import functools
import json
import math
import random
import reprlib

from starlette.exceptions import HTTPException

from ladder.checkpoints import compare
from ladder.checkpoints.tokenizer import TextStream
from ladder.decoding.batch import Sampler

NUMBER = int, float
FIELDS = {  # {name: (its types, its default)}
    "model": (str, None), "stream": (bool, False), "stream_options": (dict, {}), "temperature": (NUMBER, 1.0),
    "top_k": (int, None), "top_p": (NUMBER, 1.0), "seed": (int, None), "stop": ((str, list), []),
}  # fmt: skip
CHAT_FIELDS = FIELDS | {
    "messages": (list, []), "logprobs": (bool, False), "top_logprobs": (int, 0), "max_tokens": (int, math.inf),
    "max_completion_tokens": (int, math.inf),
}  # fmt: skip
TEXT_FIELDS = FIELDS | {
    "prompt": ((str, list), []), "logprobs": (int, None), "echo": (bool, False), "max_tokens": (int, 16),
}  # fmt: skip
IGNORED = {
    "user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier", "tool_choice",
    "parallel_tool_calls",
}  # fmt: skip
MAX_STOPS, MAX_LOGPROBS = 16, 20


def check(right, message, status=400):
    if not right:
        raise HTTPException(status, message)


def read_fields(data, known):
    """Return {name: value} of the known fields from a body (bytes); null means missing. Raises HTTPException."""
    try:
        given = json.loads(data)
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()  # raises for half of a surrogate pair and NaN
    except (ValueError, RecursionError) as e:
        raise HTTPException(400, f"the body is not JSON: {e}") from None
    check(isinstance(given, dict), "the body is not a JSON object")
    fields = {name: default for name, (_, default) in known.items()}
    for name, value in given.items():
        shown = f"{name[:60]} is {reprlib.repr(value)}"
        if name in known and value is not None:
            kind = known[name][0]
            right = isinstance(value, kind) and (kind is bool or type(value) is not bool)
            check(right, f"{shown}, which is of a wrong type")
            fields[name] = value
        elif name not in known and name not in IGNORED:  # accepted where it asks for nothing
            default = {"n": 1, "best_of": 1, "response_format": {"type": "text"}}.get(name)
            check(not value or value == default, f"{shown}, which is not implemented, or unknown")
    return fields


def parse(data, chat, model, tokenizer, vocab_size, context, max_prompts):
    """Return the fields of a body with `chat` and `requests`, one for each prompt, as Row takes them.

    data: bytes. chat: whether of /v1/chat/completions. context: tokens of a row. Raises HTTPException and InputError.
    """
    ask = read_fields(data, CHAT_FIELDS if chat else TEXT_FIELDS)
    known = ask["model"] in (None, model)
    check(known, f"the model {reprlib.repr(ask['model'])} does not exist: this is {model!r}", 404)
    stop = [ask["stop"]] if isinstance(ask["stop"], str) else ask["stop"]
    right = len(stop) <= MAX_STOPS and all(s and isinstance(s, str) for s in stop)
    check(right, f"stop must be a text, or up to {MAX_STOPS}, none of them empty")
    logprobs, max_tokens = ask["logprobs"], ask["max_tokens"]
    if chat:
        logprobs = ask["top_logprobs"] if logprobs else None
        max_tokens = min(max_tokens, ask["max_completion_tokens"])
    right = logprobs is None or 0 <= logprobs <= MAX_LOGPROBS
    check(right, f"logprobs are of 0 to {MAX_LOGPROBS} tokens in a place")
    check(max_tokens > 0, f"max_tokens is {max_tokens} but must be at least 1")
    if chat:
        prompts = [read_messages(ask["messages"], tokenizer)]
    else:
        prompts = read_prompts(ask["prompt"], tokenizer, max_prompts)
    check(len(prompts) == 1 or not ask["stream"], "a stream takes one prompt")
    requests = []
    for ids in prompts:
        right = all(type(i) is int and 0 <= i < vocab_size for i in ids)
        check(right, f"token ids are from 0 to {vocab_size - 1}")
        check(0 < len(ids) < context, f"the prompt has {len(ids)} tokens but must have from 1 to {context - 1}")
        seed = random.getrandbits(62) if ask["seed"] is None else ask["seed"]
        sampling = [ask["temperature"], ask["top_k"], ask["top_p"], seed]
        Sampler(*sampling)  # raises InputError
        request = {"ids": ids, "max_tokens": min(max_tokens, context - len(ids)), "sampling": sampling}
        requests.append(request | {"logprobs": logprobs, "echo": ask.get("echo", False)})
    return ask | {"chat": chat, "stop": stop, "requests": requests}


def encode(text, tokenizer):
    """Return the ids of a text, in which special tokens may stand by name, after the tokenizer's prefix, once."""
    ids = tokenizer.encode_markup(text)
    return ids if ids[: len(tokenizer.prefix)] == tokenizer.prefix else tokenizer.prefix + ids


def read_prompts(prompt, tokenizer, max_prompts):
    """Return a list of ids for each prompt of a text, a list of ids, or a list of texts or of lists of ids."""
    if isinstance(prompt, str) or not prompt or not all(isinstance(p, str | list) for p in prompt):
        prompt = [prompt]
    check(len(prompt) <= max_prompts, f"there are {len(prompt)} prompts but at most {max_prompts} may wait")
    return [encode(p, tokenizer) if isinstance(p, str) else p for p in prompt]


def read_messages(messages, tokenizer):
    """Return the ids of a conversation in the chat template; without one, of the plain texts one after another."""
    check(messages, "messages must be a list of objects, at least one")
    plain = []
    for message in messages:
        try:
            given = {name: value for name, value in message.items() if value}
            content = given.pop("content", "")
            texts = [part["text"] for part in content] if isinstance(content, list) else [content]
            plain.append({"role": "" + given.pop("role"), "content": "".join(texts)})
        except (AttributeError, KeyError, TypeError):
            given = True
        check(not given, "a message must be an object with role and content, of text, and nothing else")
    if tokenizer.template is None:
        return encode("".join(message["content"] for message in plain), tokenizer)
    return tokenizer.chat(plain)


class Text:
    """The text of an answer as its tokens arrive: characters and stop strings may lie across tokens."""

    def __init__(self, tokenizer, ids, stops):
        self.stream, self.stops, self.held = TextStream(tokenizer, ids), stops, ""  # held: a stop may begin there
        self.longest = max(map(len, stops), default=1)

    def push(self, ids, finish):
        """Return (the text that is certain now, why it ends or None)."""
        self.held += self.stream.push(ids) + (self.stream.flush() if finish else "")
        if cuts := [i for stop in self.stops if (i := self.held.find(stop)) >= 0]:
            return self.held[: min(cuts)], "stop"
        end = len(self.held) if finish else max(0, len(self.held) - self.longest + 1)
        text, self.held = self.held[:end], self.held[end:]
        return text, finish


@functools.cache
def token_text(tokenizer, i):
    """Return the text of a token, a special one's name."""
    special = {i: text for text, i in tokenizer.special.items()}
    return special.get(i) or compare.token_text(tokenizer, i)


def logprobs_of(tokens, chat, tokenizer):
    """Return `logprobs` of a choice from Tokens."""
    text = functools.partial(token_text, tokenizer)
    if not chat:
        tops = [t.top and {text(i): p for i, p in (t.top | {t.id: t.logprob}).items()} for t in tokens]
        own = {"tokens": [text(t.id) for t in tokens], "token_logprobs": [t.logprob for t in tokens]}
        return own | {"top_logprobs": tops}
    content = []
    for t in tokens:
        own, *tops = ({"token": text(i), "logprob": p} for i, p in ((t.id, t.logprob), *t.top.items()))
        content.append(own | {"top_logprobs": tops})
    return {"content": content}
