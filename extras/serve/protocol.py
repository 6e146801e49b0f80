"""OpenAI's completions (platform.openai.com/docs/api-reference): requests, and the text of an answer."""

import json
import random

from starlette.exceptions import HTTPException

from decoding.sampling import Sampler
from formats.tokenizer import TextStream

FIELDS = {  # and their types
    "model": str, "stream": bool, "stream_options": dict, "max_tokens": int, "temperature": (int, float), "top_k": int,
    "top_p": (int, float), "seed": int, "stop": (str, list),
}  # fmt: skip
CHAT_FIELDS = {"messages": list, "max_completion_tokens": int, "logprobs": bool, "top_logprobs": int}
TEXT_FIELDS = {"prompt": (str, list), "logprobs": int, "echo": bool}
IGNORED = {"user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier", "parallel_tool_calls"}
ONLY = {  # fields that are taken with these values alone, which change nothing
    "n": [1], "best_of": [1], "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}], "suffix": [""],
    "response_format": [{"type": "text"}], "tools": [[]], "tool_choice": ["none", "auto"],
}  # fmt: skip
MOST_STOPS, MOST_LOGPROBS = 16, 20


class Refused(HTTPException):
    """An answer that is an error object."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(status, message)
        self.param, self.code = param, code


def check(right, message, param=None, status=400, code=None):
    if not right:
        raise Refused(status, message, param, code)


def no_constant(text):
    raise ValueError(f"{text} is no number")


def read_fields(data, kinds):
    """Return the fields of a body, bytes; null is as good as missing. Raises Refused."""
    try:
        fields = json.loads(data, parse_constant=no_constant)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is not JSON: {e}") from None
    check(isinstance(fields, dict), "the body is not a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    for name, value in fields.items():
        name, shown, kind = name[:60], f"{name[:60]} is {json.dumps(value)[:60]}", kinds.get(name, object)
        check(name in kinds or name in ONLY, f"Unrecognized request argument supplied: {name}", name)
        check(value in ONLY.get(name, [value]), f"{shown}, which is not implemented", name)
        right = isinstance(value, kind) and (type(value) is not bool or kind in (bool, object))
        check(right, f"{shown}, which is of a wrong type", name)
    return fields


def parse(data, chat, model, tokenizer, vocab_size, context):
    """Return what a body asks for: its fields and `request`, as a Row takes it. Raises Refused and InputError."""
    ask = {"model": model, "stop": [], "stream_options": {}, "stream": False}
    ask |= read_fields(data, FIELDS | (CHAT_FIELDS if chat else TEXT_FIELDS))
    words = f"the model {ask['model']!r} does not exist: this is {model!r}"
    check(ask["model"] == model, words, "model", 404, "model_not_found")
    unknown = [*ask["stream_options"].keys() - {"include_usage", "include_obfuscation"}]
    check(not unknown, f"stream_options has unknown fields: {unknown}", "stream_options")
    stop = ask["stop"] = [ask["stop"]] if isinstance(ask["stop"], str) else ask["stop"]
    right = len(stop) <= MOST_STOPS and all(s and isinstance(s, str) for s in stop)
    check(right, f"stop must be a text, or up to {MOST_STOPS}, none of them empty", "stop")
    n = ask.get("logprobs")
    if chat:
        check(n or "top_logprobs" not in ask, "top_logprobs needs logprobs: true", "top_logprobs")
        n = ask.get("top_logprobs", 0) if n else None
    check(n is None or 0 <= n <= MOST_LOGPROBS, f"logprobs are of 0 to {MOST_LOGPROBS} tokens in a place", "logprobs")
    most = ask.get("max_completion_tokens", ask.get("max_tokens", context if chat else 16))
    check(most > 0, f"max_tokens is {most} but must be at least 1", "max_tokens")
    sampling = [*map(ask.get, ("temperature", "top_k", "top_p", "seed"), (1.0, None, 1.0, random.getrandbits(62)))]
    Sampler(*sampling)  # raises InputError
    what, read = ("messages", read_messages) if chat else ("prompt", read_prompt)
    ids = read(ask.get(what), tokenizer)
    check(all(type(i) is int and 0 <= i < vocab_size for i in ids), f"token ids are from 0 to {vocab_size - 1}", what)
    words = f"the prompt has {len(ids)} tokens but must have from 1 to {context - 1}"
    check(0 < len(ids) < context, words, what, code="context_length_exceeded")
    request = {"ids": ids, "max_tokens": min(most, context - len(ids)), "logprobs": n, "sampling": sampling}
    return ask | {"chat": chat, "request": request | {"echo": ask.get("echo", False)}}


def encode(text, tokenizer):
    """Return the ids of a text, in which special tokens may stand by name, after one BOS if the tokenizer has one."""
    check(not any("\ud800" <= c <= "\udfff" for c in text), "a text has half of a surrogate pair")
    ids = tokenizer.encode_markup(text)
    return ids if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]


def read_prompt(prompt, tokenizer):
    """Return the ids of a text or a list of ids, which may be the only one of a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    right = isinstance(prompt, str) or isinstance(prompt, list) and not any(isinstance(p, str | list) for p in prompt)
    check(right, "prompt must be one text, or one list of token ids: make a request of each", "prompt")
    return encode(prompt, tokenizer) if isinstance(prompt, str) else prompt


def read_messages(messages, tokenizer):
    """Return the ids of a conversation in the chat template; without one, of the plain texts one after another."""
    check(messages and all(isinstance(m, dict) for m in messages), "messages must be a list of objects", "messages")
    plain = []
    for message in messages:
        message = {"content": ""} | {name: value for name, value in message.items() if value not in (None, [])}
        parts = message["content"] if isinstance(message["content"], list) else []
        if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            message["content"] = "".join(str(part.get("text")) for part in parts)
        right = message.keys() == {"role", "content"} and all(isinstance(value, str) for value in message.values())
        check(right, "a message must have role and content, of text, and nothing else", "messages")
        plain.append(message)
    if tokenizer.template is None:
        return encode("".join(message["content"] for message in plain), tokenizer)
    return tokenizer.chat(plain)


class Text:
    """The text of an answer as its tokens arrive: characters and stop strings may lie across tokens."""

    def __init__(self, tokenizer, ids, stops):
        self.stream, self.stops, self.held = TextStream(tokenizer), stops, ""  # held: a stop string may begin there
        self.stream.push(ids)

    def push(self, ids, finish):
        """Return (the text that is certain now, why it ends or None)."""
        self.held += self.stream.push(ids) + (self.stream.flush() if finish else "")
        if cuts := [i for stop in self.stops if (i := self.held.find(stop)) >= 0]:
            return self.held[: min(cuts)], "stop"
        begins = (i for i in range(len(self.held)) if any(stop.startswith(self.held[i:]) for stop in self.stops))
        end = len(self.held) if finish or not self.stops else next(begins, len(self.held))
        text, self.held = self.held[:end], self.held[end:]
        return text, finish


def logprobs_of(tokens, chat, tokenizer):
    """Return `logprobs` of a choice from Tokens."""
    special, context = {i: text for text, i in tokenizer.special.items()}, tokenizer.encode_plain("a")

    def text(i):  # after other text: a decoder drops a space at the beginning
        return special.get(i) or tokenizer.continuation(context, [i])

    def entry(i, p):
        return {"token": text(i), "logprob": p, "bytes": None if "\ufffd" in text(i) else [*text(i).encode()]}

    if chat:
        tops = [{"top_logprobs": [*map(entry, t.top, t.top.values())]} for t in tokens]
        return {"content": [entry(t.id, t.logprob) | top for t, top in zip(tokens, tops, strict=True)]}
    tops = [t.top and {text(i): p for i, p in (t.top | {t.id: t.logprob}).items()} for t in tokens]
    return {"tokens": [text(t.id) for t in tokens], "token_logprobs": [t.logprob for t in tokens], "top_logprobs": tops}
