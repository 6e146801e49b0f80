"""OpenAI's completions (platform.openai.com/docs/api-reference): requests, and the text of an answer."""

import functools
import itertools
import json
import random
import reprlib

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
MAX_STOPS, MAX_LOGPROBS = 16, 20


class Refused(HTTPException):
    """An answer that is an error object."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(status, message)
        self.param, self.code = param, code


def check(right, message, param=None, status=400, code=None):
    if not right:
        raise Refused(status, message, param, code)


def read_fields(data, kinds):
    """Return the fields of a body (bytes) that matter; null means missing. kinds: {field: type}. Raises Refused."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is not JSON: {e}") from None
    check(isinstance(fields, dict), "the body is not a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    for name, value in fields.items():
        name, shown, kind = name[:60], f"{name[:60]} is {reprlib.repr(value)}", kinds.get(name, object)
        check(name in kinds or name in ONLY, f"Unrecognized request argument supplied: {name}", name)
        check(value in ONLY.get(name, [value]), f"{shown}, which is not implemented", name)
        right = isinstance(value, kind) and (type(value) is not bool or kind in (bool, object))
        check(right, f"{shown}, which is of a wrong type", name)
    return fields


def parse(data, chat, model, tokenizer, vocab_size, context, max_prompts):
    """Return the fields of a body with `requests`, one for each prompt, as Row takes them.

    data: bytes. chat: whether of /v1/chat/completions. context: tokens of a row. Raises Refused and InputError.
    """
    ask = {"model": model, "stop": [], "stream_options": {}, "stream": False, "echo": False, "seed": None, "chat": chat}
    ask |= read_fields(data, FIELDS | (CHAT_FIELDS if chat else TEXT_FIELDS))
    message = f"the model {reprlib.repr(ask['model'])} does not exist: this is {model!r}"
    check(ask["model"] == model, message, "model", 404, "model_not_found")
    unknown = [*ask["stream_options"].keys() - {"include_usage", "include_obfuscation"}]
    check(not unknown, f"stream_options has unknown fields: {reprlib.repr(unknown)}", "stream_options")
    stop = ask["stop"] = [ask["stop"]] if isinstance(ask["stop"], str) else ask["stop"]
    right = len(stop) <= MAX_STOPS and all(s and isinstance(s, str) for s in stop)
    check(right, f"stop must be a text, or up to {MAX_STOPS}, none of them empty", "stop")
    logprobs = ask.get("logprobs")
    if chat:
        check(logprobs or "top_logprobs" not in ask, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = ask.get("top_logprobs", 0) if logprobs else None
    right = logprobs is None or 0 <= logprobs <= MAX_LOGPROBS
    check(right, f"logprobs are of 0 to {MAX_LOGPROBS} tokens in a place", "logprobs")
    max_tokens = ask.get("max_completion_tokens", ask.get("max_tokens", context if chat else 16))
    check(max_tokens > 0, f"max_tokens is {max_tokens} but must be at least 1", "max_tokens")
    name, requests = "messages" if chat else "prompt", []
    for ids in (
        [read_messages(ask.get(name), tokenizer)] if chat else read_prompts(ask.get(name), tokenizer, max_prompts)
    ):
        right = all(type(i) is int and 0 <= i < vocab_size for i in ids)
        check(right, f"token ids are from 0 to {vocab_size - 1}", name)
        message = f"the prompt has {len(ids)} tokens but must have from 1 to {context - 1}"
        check(0 < len(ids) < context, message, name, code="context_length_exceeded")
        seed = random.getrandbits(62) if ask["seed"] is None else ask["seed"]
        sampling = [ask.get("temperature", 1.0), ask.get("top_k"), ask.get("top_p", 1.0), seed]
        Sampler(*sampling)  # raises InputError
        request = {"ids": ids, "max_tokens": min(max_tokens, context - len(ids)), "sampling": sampling}
        requests.append(request | {"logprobs": logprobs, "echo": ask["echo"]})
    return ask | {"requests": requests}


def encode(text, tokenizer):
    """Return the ids of a text, in which special tokens may stand by name, after one BOS if the tokenizer has one."""
    check(not any("\ud800" <= c <= "\udfff" for c in text), "a text has half of a surrogate pair")
    ids = tokenizer.encode_markup(text)
    return ids if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]


def read_prompts(prompt, tokenizer, max_prompts):
    """Return a list of ids for each prompt of a text, a list of ids, or a list of texts or of lists of ids."""
    right = isinstance(prompt, str | list)
    check(right, "prompt must be a text or a list of token ids, or a list of these", "prompt")
    if isinstance(prompt, str) or not prompt or not all(isinstance(p, str | list) for p in prompt):
        prompt = [prompt]
    check(len(prompt) <= max_prompts, f"there are {len(prompt)} prompts but at most {max_prompts} may wait", "prompt")
    return [encode(p, tokenizer) if isinstance(p, str) else p for p in prompt]


def read_messages(messages, tokenizer):
    """Return the ids of a conversation in the chat template; without one, of the plain texts one after another."""
    check(messages and all(isinstance(m, dict) for m in messages), "messages must be a list of objects", "messages")
    plain = []
    for message in messages:
        message = {"content": ""} | {name: value for name, value in message.items() if value not in (None, [])}
        if isinstance(message["content"], list):
            texts = [part.get("text") for part in message["content"] if isinstance(part, dict)]
            right = len(texts) == len(message["content"]) and all(isinstance(text, str) for text in texts)
            message["content"] = "".join(texts) if right else None
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


@functools.cache
def token_text(tokenizer, i):
    """Return the text of a token after other text: a decoder drops a space at the beginning."""
    special = {i: text for text, i in tokenizer.special.items()}
    return special.get(i) or tokenizer.continuation(tokenizer.encode_plain("a"), [i])


def logprobs_of(tokens, chat, tokenizer, offset):
    """Return `logprobs` of a choice from Tokens. offset: characters of its text before them."""

    def entry(i, p):
        text = token_text(tokenizer, i)
        return {"token": text, "logprob": p, "bytes": None if "\ufffd" in text else [*text.encode()]}

    if chat:
        tops = [{"top_logprobs": [*map(entry, t.top, t.top.values())]} for t in tokens]
        return {"content": [entry(t.id, t.logprob) | top for t, top in zip(tokens, tops, strict=True)]}
    texts = [token_text(tokenizer, t.id) for t in tokens]
    offsets = [*itertools.accumulate(map(len, texts), initial=offset)][:-1]
    tops = [t.top and {token_text(tokenizer, i): p for i, p in (t.top | {t.id: t.logprob}).items()} for t in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
