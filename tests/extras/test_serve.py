"""serve.py: its answers are those of generate.py, whoever else asks; what it refuses; how requests and servers end."""

import contextlib
import dataclasses
import functools
import http.client
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import slow_case
from configs import BASE, LINEAR_ATTENTION
from decoding_runs import ASK, answer_in_turns
from file_edits import edit_config, write_lines
from helpers import ALONE, ROOT, greedy_tokens, randn, random_model
from running import command, run_main, run_python, run_ranks

from complete import complete, load
from generate import Runner
from ladder.text import template
from ladder.text.tokenizer import load_tokenizer

pytest.importorskip("uvicorn", reason="uvicorn is not installed: requirements-serve.txt has it")
from starlette.exceptions import HTTPException

from extras.serve import protocol, rows
from extras.serve import server as serving
from extras.serve.protocol import Text
from extras.serve.rows import Rows

slow = pytest.mark.slow


def test_without_its_packages_it_ends_in_one_line():
    code = "import runpy, sys; sys.modules['uvicorn'] = None; runpy.run_path('serve.py', run_name='__main__')"
    ended = run_python("-c", code, "--help")
    assert ended.returncode == 2 and re.fullmatch(r".*uvicorn are missing.*: make serve.*\n", ended.stderr)


class Server:
    """serve.py in processes of its own."""

    def __init__(self, *flags, ranks=1, checkpoint=ROOT / "demo"):
        words = command("serve.py", "--checkpoint", checkpoint, "--port", 0, *flags, ranks=ranks)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LADDER_TIMEOUT": "60"}
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
        for line in self.process.stderr:
            if found := re.search(r"listening at http://127.0.0.1:(\d+)", line):
                break
        self.port = int(found[1])
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    said = property(lambda self: "".join(self.lines))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            for pid in (*self.ranks(), self.process.pid):
                os.kill(pid, signal.SIGKILL) if Path(f"/proc/{pid}").exists() else None

    def ranks(self):
        """The ids of its ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        named = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in pids}
        ranks = {re.search(rb"\0RANK=(\d+)\0", env)[1]: pid for pid, env in named.items() if b"\0RANK=" in env}
        return [ranks[rank] for rank in sorted(ranks)] or [self.process.pid]

    def send(self, path, body=None, **headers):
        """Send a request; returns its HTTPResponse. body: bytes or what becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        response.close_all = lambda: (response.close(), connection.close())
        response.json = lambda: json.loads(response.read())
        return response

    def ask(self, path="/v1/completions", **body):
        """Return (status, answer)."""
        response = self.send(path, body)
        return response.status, response.json()

    def choice(self, **body):
        """Return the first choice of a good answer."""
        status, answer = self.ask(**body)
        assert status == 200, answer
        return answer["choices"][0]

    def text(self, prompt, **body):
        return self.choice(prompt=prompt, **{"temperature": 0, "max_tokens": 12} | body)["text"]

    def requests(self):
        return self.send("/health").json()["requests"]

    def events(self, **body):
        """Yield the server-sent events of a request that streams."""
        response = self.send("/v1/completions", {"stream": True, "temperature": 0, **body})
        for line in iter(response.readline, b""):
            if line.startswith(b"data: "):
                yield line[6:].strip() if line[6:].strip() == b"[DONE]" else json.loads(line[6:])


@pytest.fixture(scope="module")
def server():
    with Server("--dtype", "float32", "--rows", 3, "--queue", 40, ranks=2) as one:
        yield one


@pytest.fixture(scope="module")
def model():
    return load(ROOT / "demo", "cpu", "float32")


def wait_until(happens, seconds=60):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def story(model):
    """A text that the model ends by itself."""
    return "Once upon a time" + complete(*model, ["Once upon a time"], 240, temperature=0.5, seed=8)[0]


def prompts_of(n, seed):
    r = random.Random(seed)
    return r, [[1, *(r.randrange(3, 131) for _ in range(r.randrange(0, 20)))] for _ in range(n)]


BASES = [(BASE, "ladder"), (LINEAR_ATTENTION, "ladder"), slow_case(BASE, "standard")]


@pytest.mark.parametrize("base, wiring", BASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, slow_case(4)])
def test_rows_answer_as_if_alone(ranks, base, wiring):
    config = dataclasses.replace(base, wiring=wiring)
    r, ids = prompts_of(7, 0)
    ids[5] = ids[2] + ids[5]  # finds its beginning in a cache
    passes = [0, 0, 1, 4, 5, 9, 60]
    requests = [(when, {"ids": row, "max_tokens": r.randrange(1, 15)}) for when, row in zip(passes, ids, strict=True)]
    for _, request in requests[1::2]:
        request |= {"echo": True, "logprobs": 1}  # whose prompt is scored
    net = random_model(config)
    expected = [greedy_tokens(net, request["ids"], request["max_tokens"], end=2) for _, request in requests]
    for few_sizes in False, True:
        for answers, sizes in run_ranks(ranks, answer_in_turns, config, requests, 6 if few_sizes else 3, few_sizes):
            assert answers == expected and len({n for n, _ in sizes}) > 1
            assert all(size == (min(m for m in (1, 4, 6) if m >= n) if few_sizes else n) for n, size in sizes)


def penalized_tokens(net, request):
    """What is greedily chosen with a repetition penalty and a least number of tokens, one naive step at a time."""
    ids = list(request["ids"])
    stops = {*request["stop_token_ids"]}
    penalty = request["repetition_penalty"]
    eos_ids = {*net.config.eos_ids}
    while (n := len(ids) - len(request["ids"])) < request["max_tokens"]:
        logits = net(torch.tensor([ids]))[0, -1].double().tolist()
        for i in {*ids}:
            logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
        allowed = [i for i in range(len(logits)) if n >= request["min_tokens"] or i not in stops | eos_ids]
        ids.append(max(allowed, key=lambda i: logits[i]))
        if ids[-1] in stops or (ids[-1] in eos_ids and not request["ignore_eos"]):
            return ids[len(request["ids"]) : -1]
    return ids[len(request["ids"]) :]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_requests_with_settings_of_their_own_are_answered_as_if_alone(ranks):
    """Greedy ones as a naive loop says, and sampled ones as in a single row, by their seeds."""
    config = dataclasses.replace(BASE, eos_ids=tuple(range(60, 131)))
    r, ids = prompts_of(12, 1)
    requests = []
    net = random_model(config)
    for i, prompt in enumerate(ids):
        request = {"ids": prompt, "max_tokens": 9 + i, "repetition_penalty": (1.0, 0.8, 1.4)[i % 3]}
        request |= {"min_tokens": (5, 9, 7)[i // 2 % 3], "ignore_eos": i % 4 == 1}
        request["stop_token_ids"] = r.sample(range(131), 90) if i % 2 else []
        ways = [(0,), (1.0,), (0.9, 5, 0.95, 0.0), (1.1, None, 1.0, 0.2), (2.0, None, 0.9, 0.0), (0,)]
        names = "temperature", "top_k", "top_p", "min_p"
        request["sampling"] = dict(zip(names, ways[i % 6], strict=False)) | {"seed": i}
        requests.append((i // 2, ASK | request))
    alone, _ = answer_in_turns(ALONE, config, requests, 1)
    with torch.inference_mode():
        for (_, request), answer in zip(requests, alone, strict=True):
            if not request["sampling"]["temperature"]:
                assert answer == penalized_tokens(net, request)
    assert len({*map(len, alone)} & {5, 7, 9}) > 1 and len({*map(str, alone)}) == 12  # some end as early as they may
    for answers, sizes in run_ranks(ranks, answer_in_turns, config, requests, 5):
        assert answers == alone and max(sizes) == (5, 5)


def two_rows():
    """A model, and its Rows without an end-of-sequence."""
    net = random_model(BASE)
    return net, Rows(Runner(net, net.new_cache(2, 64)), ())


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones():
    """Which a greedy choice does not show: a negative one is hardly ever the largest."""
    _, rows = two_rows()
    rows.start(0, ASK | {"ids": [5, 6, 7, 5], "max_tokens": 4, "repetition_penalty": 1.5})
    logits = randn(1, BASE.vocab_size)
    expected = logits.double()
    for i in 5, 6, 7:
        expected[0, i] *= 1 / 1.5 if expected[0, i] > 0 else 1.5
    assert len({*logits[0, 5:8].sign().tolist()}) == 2  # both cases
    torch.testing.assert_close(rows.adjusted(rows[:1], logits).double(), expected)


def test_a_row_that_is_not_finite_ends_alone_and_leaves_nothing_behind():
    net, rows = two_rows()
    ask = ASK | {"max_tokens": 4}
    with torch.inference_mode():
        for i in range(2):
            rows.start(i, ask | {"ids": [5, 6, 7, 8 + i]})
        assert [[i for i, *_ in rows.step()] for _ in range(2)] == [[0], [1, 0]]
        rows.caches[rows[0].slot][0][1].fill_(torch.nan)
        assert [(i, finish) for i, _, finish, *_ in rows.step()] == [(0, "error"), (1, None)]
        rows.start(0, ask | {"ids": [9]})
        ids = [token.id for _ in range(3) for i, token, *_ in rows.step() if i == 0]
    assert ids == greedy_tokens(net, [9], 3) and rows[1].ids[4:] == greedy_tokens(net, [5, 6, 7, 9], 4)


def test_a_long_prompt_is_prefilled_between_the_steps_of_others(monkeypatch):
    monkeypatch.setattr(rows, "SHORT_CHUNK", 4)
    net, two = two_rows()
    ask = ASK | {"max_tokens": 30}
    with torch.inference_mode():
        two.start(0, ask | {"ids": [5, 6, 7]})
        two.step()
        two.start(1, ask | {"ids": [*range(3, 43)]})
        steps = [[i for i, *_ in two.step()] for _ in range(11)]
    assert steps == [[0]] * 9 + [[1, 0], [0, 1]] and two[1].ids[40:] == greedy_tokens(net, [*range(3, 43)], 2)


def test_text_lies_across_tokens():
    tokenizer = load_tokenizer(ROOT / "demo")
    ids = tokenizer.encode("Lily said: \u00e9\u4f60 \U0001f600! The end. The dog")
    parts = Text(tokenizer, ids[:1], [])
    shown = [parts.push([i], None)[0] for i in ids[1:]]
    assert "".join(shown).strip() == "Lily said: \u00e9\u4f60 \U0001f600! The end. The dog" and "" in shown
    assert not any("\ufffd" in part for part in shown)
    for stops, end in ([" The dog", "dogma"], " The end."), (["\U0001f600!"], "\u4f60 "), (["dogs", "xy"], " The dog"):
        parts = Text(tokenizer, ids[:1], stops)
        shown = ""
        finish = None
        for i in ids[1:]:
            if not finish:
                text, finish = parts.push([i], "length" if i == ids[-1] else None)
                shown += text
                assert not any(stop in shown for stop in stops)
        assert shown.endswith(end) and finish == ("length" if "dogs" in stops else "stop")
    for stops, end in (["<s>"], "Lily"), (["<s> said"], "Lily"), (["s"], "Lily "), (["x<s>"], "Lily said"):
        parts = Text(tokenizer, [1], stops)  # special tokens are no text, but stop strings may name them
        text, finish = parts.push([*tokenizer.encode_plain("Lily"), 1, *tokenizer.encode_plain("said")], "length")
        assert text == end and finish == ("length" if "x<s>" in stops else "stop")
    held = Text(tokenizer, ids[:1], [])
    cut = next(n for n in range(len(ids)) if tokenizer.decode(ids[: n + 1]).endswith("\ufffd"))
    assert held.push(ids[1 : cut + 1], "length")[0].endswith("\ufffd")  # half a character, but it is the end
    assert "Lily" not in Text(tokenizer, ids[: cut + 1], []).push(ids[cut + 1 :], "length")[0]  # which the prompt has


def test_a_stop_string_may_not_end_in_the_first_min_tokens():
    tokenizer = load_tokenizer(ROOT / "demo")
    _, c, a, b, *_ = tokenizer.encode_plain("abcabc")
    ids = [a, b, c] * 3
    whole = "abcabcabc"
    for min_tokens, stop in itertools.product((0, 2, 3, 5, 9), ("c", "bc", "abcab")):
        ends = (end for end in range(min_tokens + 1, 10) if whole[:end].endswith(stop))
        parts = Text(tokenizer, [1, c], [stop], min_tokens)
        shown = ""
        finish = None
        for i in ids:
            if not finish:
                text, finish = parts.push([i], "length" if len(shown) + len(parts.withheld) == 8 else None)
                shown += text
        assert shown == whole[: next(ends, 9 + len(stop)) - len(stop)], (min_tokens, stop)


def test_what_load_generators_send(server, model, story):
    count = len(model[1].encode(story)) - 5
    ask = {"prompt": story, "max_tokens": 9, "temperature": 0}

    def choice(**more):
        answer = server.ask(**ask | more)[1]
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    assert 20 < count < 230 and choice() == ("stop", 1) and choice(ignore_eos=True) == ("length", 9)
    assert choice(min_tokens=4)[1] >= 4 and choice(min_tokens=9) == ("length", 9)
    [text] = complete(*model, ["Once upon a time"], 30, temperature=0)
    ids = model[1].encode(f"Once upon a time{text}")
    end = next(i for i in ids[10:] if i not in ids[:10])
    answer = server.ask(prompt="Once upon a time", max_tokens=30, temperature=0, stop_token_ids=[end])[1]
    assert answer["choices"][0]["finish_reason"] == "stop" and text.startswith(answer["choices"][0]["text"])
    assert answer["usage"]["completion_tokens"] == ids.index(end) - 4  # as end-of-sequence, it is counted
    likeliest = {"temperature": 1.5, "seed": 3, "min_p": 1.0}
    assert server.text("One day", **likeliest) == server.text("One day") == server.text("One day", top_k=1, seed=4)
    texts = {server.text("One day", max_tokens=60, repetition_penalty=penalty) for penalty in (1, 1.5)}
    assert len(texts) == 2


def test_an_answer_is_that_of_generate(server, model):
    ask = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    [text] = complete(*model, [ask["prompt"]], 30, temperature=0)
    status, answer = server.ask(**ask)
    assert status == 200
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    counts = {"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35}
    assert counts.items() <= answer["usage"].items()
    *events, last, done = server.events(**ask, stream_options={"include_usage": True})
    assert done == b"[DONE]" and "".join(e["choices"][0]["text"] for e in events) == text and len(events) > 20
    assert events[-1]["choices"][0]["finish_reason"] == "length" and counts.items() <= last["usage"].items()
    longer = ask["prompt"] + text
    answer = server.ask(prompt=longer, max_tokens=3, temperature=0)[1]
    assert answer["choices"][0]["text"] == complete(*model, [longer], 3, 0)[0]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 25
    stop = text[9:17]
    for more in {"stop": ["zzz", stop]}, {"stop": stop, "stream": True}:
        events = [*server.events(**ask, **more)] if "stream" in more else [server.ask(**ask, **more)[1], b""]
        choices = [event["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"
    prompts = [ask["prompt"], [1, 403], "One day"]
    answer = server.ask(prompt=prompts, max_tokens=12, temperature=0, stop=stop)[1]
    assert [choice["text"] for choice in answer["choices"]] == [server.text(prompt, stop=[stop]) for prompt in prompts]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and answer["usage"]["prompt_tokens"] == 10
    one, two = server.ask(prompt=["One day"] * 2, max_tokens=30)[1]["choices"]  # without a seed
    assert one["text"] != two["text"]
    one, two, other = (server.text("One day", temperature=1, seed=seed, top_k=40, top_p=0.9) for seed in (5, 5, 6))
    assert one == two != other


def log_probabilities(net, ids):
    with torch.inference_mode():
        return net(torch.tensor([ids]))[0].float().log_softmax(-1)


@pytest.mark.parametrize("prompt", [[1], "Tim saw a big dog. " * 12], ids=len)  # one token, and nearly the context
def test_logprobs_are_those_of_the_model(prompt, server, model):
    net, tokenizer = model
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "logprobs": 3, "echo": True}
    choice = server.choice(**body)
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    ids = ids + greedy_tokens(net, ids, 2)
    logp = log_probabilities(net, ids)
    logprobs = choice["logprobs"]
    own = logprobs["token_logprobs"]
    tops = logprobs["top_logprobs"]
    text = choice["text"].removeprefix("<s>")
    assert (text != choice["text"]) == (prompt == [1])  # an echo shows what was sent
    assert "".join(logprobs["tokens"][1:]).strip() == text.strip() == tokenizer.decode(ids).strip()
    for token, at in [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)][2:]:
        assert choice["text"][at:].startswith(token)
    assert own[0] is None is tops[0] and len(own) == len(tops) == len(ids)
    for at in range(1, len(ids)):
        assert own[at] == pytest.approx(float(logp[at - 1, ids[at]]), abs=1e-3)
        assert max(tops[at].values()) == pytest.approx(float(logp[at - 1].max()), abs=1e-3) and len(tops[at]) >= 3


def test_a_harness_may_drop_the_last_entry_also_if_it_is_end_of_sequence(server, story):
    ask = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    ended, longer = (server.ask(prompt=f"{story}{more}", **ask)[1] for more in ("", " Then"))
    own, other = (answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (ended, longer))
    assert ended["choices"][0]["text"] == story and ended["choices"][0]["finish_reason"] == "stop"
    assert len(own) == ended["usage"]["total_tokens"] and own[1:-1] == pytest.approx(other[1 : len(own) - 1], abs=1e-3)


def test_of_equal_texts_the_likelier_stays_and_bytes_have_names(model):
    tokenizer = model[1]
    twins = {}
    for i in range(3, 1024):
        twins.setdefault(protocol.token_text(tokenizer, i), []).append(i)
    unlikely, likely = next(ids for ids in twins.values() if len(ids) > 1)  # a byte, and a token of that character
    byte = tokenizer.encode_plain("\u4f60")[-1]
    tokens = [rows.Token(unlikely, -9.0, {likely: -1.0}), rows.Token(byte, -3.0, {likely: -1.0, byte + 1: -2.0})]
    logprobs = protocol.logprobs_of(tokens, [0, 1], False, tokenizer)
    text = protocol.token_text(tokenizer, likely)
    parts = {f"token_id:{byte}": -3.0, f"token_id:{byte + 1}": -2.0}
    assert logprobs["tokens"] == [text, f"token_id:{byte}"] and logprobs["top_logprobs"] == [
        {text: -1.0}, {text: -1.0} | parts,
    ]  # fmt: skip


def test_logprobs_of_a_chat(server, model):
    chat = {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 2, "temperature": 0, "logprobs": True}
    answer = server.choice(path="/v1/chat/completions", **chat, top_logprobs=2)
    first, second = answer["logprobs"]["content"]
    assert len(first["top_logprobs"]) == len(second["top_logprobs"]) == 2 and first["token"] == " a"
    best = float(log_probabilities(model[0], model[1].encode("Once upon"))[-1].max())
    assert first["logprob"] == first["top_logprobs"][0]["logprob"] == pytest.approx(best, abs=1e-3)


OK = {"prompt": "One day", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
REFUSED = [  # a body, or what it has besides OK; words of the message
    (b"{", "is not JSON"), (b'{"prompt": NaN}', "is not JSON"), (b"[" * 99999, "is not JSON"),
    (b"\xff\xfe", "is not JSON"), (b"[1]", "is not a JSON object"), (b"", "is not JSON"), (b"{}", "has 0 tokens"),
    ({"prompt": ["a"] * 44}, "44 prompts but at most 43"), ({"prompt": ["a", 1]}, "token ids are"),
    ({"prompt": [["a"]]}, "token ids are"), (b'{"\\ud800": 1}', "surrogates not allowed"),
    ({"prompt": "\ud800"}, "surrogates not allowed"), ({"prompt": [1.5]}, "token ids are"),
    ({"prompt": [True]}, "token ids are"), ({"prompt": [1024]}, "from 0 to 1023"), ({"prompt": []}, "has 0 tokens"),
    ({"prompt": [5] * 256}, "has 256 tokens but must have from 1 to 255"), ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": "3"}, "max_tokens is '3'"), ({"temperature": -1}, "temperature is -1"),
    ({"temperature": True}, "temperature is True"), ({"top_p": 7}, "top_p is 7"),
    ({"seed": 2**64}, "seed is 18446744073709551616 but"), ({"top_k": -2}, "top_k is -2"),
    ({"skip_special_tokens": False}, "is not implemented"), ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"min_p": 1.5}, "min_p is 1.5"), ({"min_tokens": 3}, "min_tokens is 3 but must be from 0 to"),
    ({"ignore_eos": 1}, "ignore_eos is 1"), ({"stop_token_ids": [1024]}, "stop_token_ids must be"),
    ({"stop_token_ids": "a"}, "of a wrong type"), ({"presence_penalty": 1}, "is not implemented"),
    ({"stop": [""]}, "stop must"), ({"stop": ["a"] * 17}, "stop must"), ({"stop": [3]}, "stop must"),
    ({"logprobs": 99}, "logprobs are of 0 to 20"), ({"echo": 1}, "echo is 1"),
    ({"n": 2}, "n is 2, which is not implemented"), ({"top_a": 1}, "top_a is 1, which is not"),
    ({"max_token": 3}, "or unknown; did you mean max_tokens?"),
    ({"messages": [1]}, "messages is [1], which is not"), ({"model": "gpt-5"}, "this is 'demo'"),
    ({"prompt": "x" * 2**22}, "more than 4194304 bytes"),
    ({"prompt": ["a", "b"], "stream": True}, "a stream takes one prompt"),
]  # fmt: skip
REFUSED_CHATS = [  # what a body has besides CHAT; words of the message
    ({"logprobs": 0}, "wrong type"), ({"messages": []}, "messages must be"),
    ({"messages": [3]}, "messages[0] is 3, but must"),
    ({"messages": [{"role": "user"}, {"content": "x"}]}, "messages[1] has the role None, which must be a"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url'}], which must be a"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "y"}]}, "has 'tool_call_id', which"),
    ({"logprobs": 1}, "wrong type"), ({"tools": [{"type": "function"}]}, "tools is"),
]  # fmt: skip
STATUSES = {"this is 'demo'": 404, "more than 4194304 bytes": 413}  # the others' is 400


@pytest.mark.parametrize("path, body, words", [
    *(("completions", more if isinstance(more, bytes) else OK | more, words) for more, words in REFUSED),
    *(("chat/completions", CHAT | more, words) for more, words in REFUSED_CHATS),
], ids=str)  # fmt: skip
def test_bad_requests_are_error_objects(server, path, body, words):
    response = server.send(f"/v1/{path}", body)
    error = response.json()["error"]
    assert response.status == STATUSES.get(words, 400) and words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_asks_for_nothing_passes(server):
    neutral = {"repetition_penalty": 1.0, "top_k": -1, "seed": -1, "n": 1, "logit_bias": {}, "stop": "", "best_of": 1}
    neutral |= {"min_p": 0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": []}
    neutral |= {"skip_special_tokens": True, "logprobs": False, "presence_penalty": 0.0, "suffix": None, "tools": []}
    assert server.choice(**OK, **neutral)["logprobs"] is None
    assert server.choice(**OK | {"logprobs": 0})["logprobs"]["token_logprobs"]


def test_what_clients_send_for_greedy_and_any_seed_of_64_bits(server):
    for ask in {"temperature": 1e-8}, {"temperature": 1e-300}, {"temperature": 1, "top_p": 0}:
        assert server.text("One day", **ask) == server.text("One day")
    seeds = -5, 2**63 - 1, -(2**63), 7, 7 + 2**32
    texts = [server.text("One day", temperature=1, seed=seed, max_tokens=20) for seed in (*seeds, *seeds)]
    assert texts[:5] == texts[5:] and len({*texts}) == 5


def test_a_history_has_what_the_chat_template_reads():
    tokenizer = load_tokenizer(ROOT / "demo")
    tokenizer.template = (
        "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments.city }}{% endfor %}{% endfor %}{{ enable_thinking }}"
    )
    calls = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}]
    asked = [
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls, "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Sunny"}]},
    ]
    text, ids = protocol.read_messages(asked, tokenizer, 99, {"enable_thinking": False, "messages": "none"})
    assert tokenizer.decode(ids) == "assistant: Hm.Rometool: SunnyFalse" and text is None
    for calls in 3, ["f"]:
        with pytest.raises(HTTPException, match=r"messages\[0\] has the tool_calls .*, which must be a list"):
            protocol.read_messages([asked[0] | {"tool_calls": calls}], tokenizer, 99, {})
    tokenizer.template = "reasoning_content tool_calls {% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(HTTPException, match="has 'reasoning_content', 'tool_calls', which the chat template does not"):
        protocol.read_messages(asked, tokenizer, 99, {})


def test_what_a_chat_template_names_in_its_code():
    """Not in its text, such as SmolLM2's "a helpful AI assistant named SmolLM"."""
    source = "name{% generation %}{{ m['content'] + m.get('role') }}{% endgeneration %}{% if m.tool %}x{% endif %}"
    assert protocol.names_in(source) == {"content", "role", "get", "tool"}
    assert protocol.names_in("{% if %}") == protocol.names_in("{{ " + "(" * 9999) == set()


def test_a_long_text_is_refused_before_it_is_tokenized(monkeypatch):
    tokenizer = load_tokenizer(ROOT / "demo")
    for prompt in "a" * 200_000, ["One day", "a b " * 90_000]:
        with monkeypatch.context() as patch, pytest.raises(HTTPException, match="tokens or more but must have"):
            patch.setattr(tokenizer, "encode_markup", None)
            protocol.read_prompts(prompt, tokenizer, 256, 9)
    assert protocol.read_prompts("a" + " " * 200_000, tokenizer, 256, 9)[0][1]  # spaces that may be one token


def test_an_origin_is_written_as_browsers_send_it():
    flags = ["--checkpoint", "x", "--allow-origin", "https://a.example/", "--allow-origin", "*"]
    assert serving.parse_flags(flags).allow_origin == ["https://a.example", "*"]


@contextlib.contextmanager
def new_front(monkeypatch, address="127.0.0.1", api_key=None):
    """A Front that still loads."""
    args = {"name": "org/demo", "api_key": api_key, "rows": 1, "queue": 1, "host": address, "log": False}
    args = SimpleNamespace(**args, allow_origin=["https://a.example"], checkpoint=ROOT / "demo")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    monkeypatch.setattr(serving.ending, "at_end", [])
    front = serving.Front(args, serving.Listener(fileno=listener.detach()))
    front.args, front.send = args, functools.partial(Server.send, SimpleNamespace(port=front.address[1]))
    try:
        yield front
    finally:
        front.close()


def make_ready(front, model):
    net, tokenizer = model
    front.ready(SimpleNamespace(config=net.config, max_new_tokens=99, tokenizer=tokenizer, args=front.args))


@contextlib.contextmanager
def loaded_front(monkeypatch, model, *args, **more):
    with new_front(monkeypatch, *args, **more) as front:
        make_ready(front, model)
        yield front


def test_a_server_that_loads_says_so_and_then_names_its_model(monkeypatch, model):
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0.5)
    with new_front(monkeypatch) as front:
        send = front.send
        for path in "/health", "/v1/models":
            response = send(path)
            assert response.status == 503 and "loading" in response.json()["error"]["message"]
        make_ready(front, model)
        assert send("/v1/models/org/demo").json()["id"] == "org/demo" and send("/v1/models/x").status == 404
        for origin, status in ("https://a.example", 200), ("https://b.example", 403):
            response = send("/health", None, **{"Origin": origin, "Sec-Fetch-Site": "cross-site"})
            allowed = response.headers["Access-Control-Allow-Origin"]
            assert (response.status, allowed) == (status, origin if status == 200 else None)
        for begun in b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{":
            with socket.create_connection(front.address) as idle:
                idle.settimeout(5)
                idle.sendall(begun)
                assert idle.recv(1) == b""  # it was ended


def raw(address, *requests, half=True):
    """What comes back for requests [(method, path, headers, body)] of a client that then ends its own direction."""
    with socket.create_connection(address, timeout=60) as client:
        for first, headers, body in requests:
            lines = [first, *({"Host": "localhost", "Content-Length": str(len(body))} | headers).items()]
            client.sendall("\r\n".join(map(": ".join, [[lines[0]], *lines[1:]])).encode() + b"\r\n\r\n" + body)
        if half:
            client.shutdown(socket.SHUT_WR)
        return b"".join(iter(functools.partial(client.recv, 2**16), b""))


def test_a_client_that_ends_its_own_direction_gets_its_answers(server):
    address = ("127.0.0.1", server.port)
    first = "POST /v1/completions HTTP/1.1"
    for stream, count in itertools.product((False, True), (1, 40)):
        ask = {"prompt": "Once", "max_tokens": count, "temperature": 0, "stream": stream}
        request = first, {}, json.dumps(ask).encode()
        plain = raw(address, (request[0], {"Connection": "close"}, request[2]), half=False)
        texts = [re.findall(rb'"text": ?"(.*?)"', data) for data in (plain, raw(address, request))]
        assert texts[0] == texts[1] != []
    assert raw(address, request, request).count(b"HTTP/1.1 200 OK") == 2
    assert raw(address, (first, {"Content-Length": "9"}, b"{")) == b""  # incomplete
    assert raw(address) == b""


def test_a_client_that_waits_long_is_sent_few_interim_answers():
    """Go's client of HTTP takes at most five."""
    sent = []
    calls = []
    ours = object.__new__(serving.Connection)
    with socket.socket() as open_socket:
        ours.scope = {"http_version": "1.1"}
        ours.cycle = SimpleNamespace(response_complete=False, response_started=False)
        ours.loop = SimpleNamespace(call_later=lambda seconds, *call: calls.append((seconds, call)))
        get = {"socket": open_socket}.get
        # one that listens: the poll of a socket that never was connected reports a hang-up
        open_socket.bind(("127.0.0.1", 0))
        open_socket.listen()
        ours.transport = SimpleNamespace(is_closing=lambda: False, get_extra_info=get, write=sent.append)
        calls.append((0, (ours.probe,)))
        now = 0
        times = []
        for _ in range(1000):
            seconds, (call, *args) = calls.pop()
            now += seconds
            before = len(sent)
            call(*args)
            times += [now] * (len(sent) - before)
    assert times == [0, 0.5, 1.5, 3.5, 7.5]


def test_a_renderer_that_others_end_is_not_the_clients_fault(monkeypatch, model, caplog):
    def end(*_):
        raise ChildProcessError("the process was ended")

    monkeypatch.setattr(template.renderer, "render", end)
    with loaded_front(monkeypatch, model) as front:
        monkeypatch.setattr(model[1], "template", "{{ messages }}")
        ask = {"messages": [{"role": "user", "content": "Hi"}]}
        response = front.send("/v1/chat/completions", ask)
        error = response.json()["error"]
        assert (response.status, error["type"], error["message"]) == (500, "server_error", "the process was ended")
    assert "the process was ended" in caplog.text


def test_a_client_that_has_gone_is_told_from_one_that_only_ended_its_own_direction(monkeypatch, model):
    monkeypatch.setattr(serving, "HALF_CLOSED_SECONDS", 0.1)
    body = json.dumps(OK).encode()

    def waiting(version, gone):
        """(Connection of a client, its Answer, which nobody computes yet)."""
        client = socket.create_connection(front.address, timeout=5)
        head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: front.open)
        client.close() if gone else client.shutdown(socket.SHUT_WR)
        return client, [*front.open][0]

    with loaded_front(monkeypatch, model) as front:
        waiting("1.1", True)
        wait_until(lambda: not front.open, 3)
        for version in "1.1", "1.0":
            client, answer = waiting(version, False)
            time.sleep(1)
            answer.send((rows.Token(5), "length", [], 0))
            data = b"".join(iter(functools.partial(client.recv, 2**16), b""))
            proceeds, last = data.split(b"HTTP/1.1 200 OK\r\n")
            assert b'"finish_reason":"length"' in last and not front.open
            count, rest = divmod(len(proceeds), len(b"HTTP/1.1 100 Continue\r\n\r\n"))
            assert rest == 0 and (count > 0) == (version == "1.1")


@pytest.mark.parametrize("host, known", [
    ("localhost", True), ("127.0.0.1:1", True), ("LOCALHOST", True), ("a{b.evil.example", False), ("a`b.evil", False),
    ('"x.evil.example', False), ("evil.example/", False), ("evil.example, localhost", False), ("", False),
    ("evil.example:99999", False), ("u@evil.example", False), ("u@localhost", False), ("localhost:80:80", False),
    ("localhost.evil.example", False), ("[::2]:80", False), ("[evil", False), ("[::1]", False),
])  # fmt: skip
def test_only_names_of_this_machine_are_its_hosts(host, known, monkeypatch, model):
    """Also where a browser takes for a name what RFC 3986 does not."""
    with loaded_front(monkeypatch, model) as front:
        data = raw(front.address, ("GET /health HTTP/1.1", {"Host": host, "Connection": "close"}, b""))
        assert data.startswith(b"HTTP/1.1 200" if known else b"HTTP/1.1 403"), data
        assert raw(front.address, ("GET /health HTTP/1.0", {}, b"")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("address, url", [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_where_it_listens_is_a_url(address, url, monkeypatch, model):
    if address == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with loaded_front(monkeypatch, model, address) as front:
        assert front.url.startswith(url)
        for host in front.url.removeprefix("http://"), "localhost":
            with urllib.request.urlopen(urllib.request.Request(f"{front.url}/health", headers={"Host": host})) as got:
                assert got.status == 200


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize("header, status", [
    ("Bearer k 1", 200), ("bearer k 1", 200), ("BEARER   k 1", 200), ("Bearer K 1", 401), ("Basic k 1", 401),
    ("Bearer", 401), ("k 1", 401), ("Bearerk 1", 401), (None, 401),
])  # fmt: skip
def test_a_key_follows_its_scheme_in_any_case(header, status, monkeypatch, model):
    with loaded_front(monkeypatch, model, api_key="k 1") as front:
        headers = {} if header is None else {"Authorization": header}
        response = front.send("/v1/models", **headers)
        assert (response.status, response.headers["WWW-Authenticate"]) == (status, "Bearer" if status == 401 else None)


def test_a_wrong_method_is_told_the_right_ones(server):
    for path, method, right in ("/v1/completions", None, {"POST"}), ("/health", OK, {"GET", "HEAD"}):
        response = server.send(path, method)
        assert (response.status, {*response.headers["Allow"].split(", ")}) == (405, right)


def test_a_prompt_alone_is_scored(server, model):
    for more in {}, {"stream": True}:
        ask = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1, **more}
        one = server.choice(**ask | {"max_tokens": 1, "stream": False})["logprobs"]
        events = [*server.events(**ask)] if more else [server.ask(**ask)[1]]
        [choice] = events[0]["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
        assert len(events) == (2 if more else 1)
        for name, values in choice["logprobs"].items():
            assert values == one[name][:-1] and len(values) == 5
        counts = {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
        assert more or counts.items() <= events[0]["usage"].items()
    choice = server.choice(prompt=[5, 6] * 128, max_tokens=0, echo=True, logprobs=0)  # as long as the context
    own = choice["logprobs"]["token_logprobs"]
    logp = log_probabilities(model[0], [5, 6] * 128)
    assert own[0] is None
    assert own[1:] == pytest.approx([float(row[6 - i % 2]) for i, row in enumerate(logp[:-1])], abs=1e-3)
    answer = server.ask(prompt=["One day", "a"], max_tokens=0, echo=True)[1]
    assert [(choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [("One day", None), ("a", None)]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions"])
def test_a_web_page_of_strangers_is_refused(server, path):
    body = OK if "completions" in path else None
    for name, value in (
        ("Host", "evil.example"),
        ("Host", "127.0.0.1.evil.example:80"),
        ("Sec-Fetch-Site", "cross-site"),
    ):
        response = server.send(path, body, **{name: value})
        assert response.status == 403 and "--api-key" in response.json()["error"]["message"]
        assert not response.headers["Access-Control-Allow-Origin"]  # which only --allow-origin sends
    for host in "localhost", "127.0.0.1:80", "LOCALHOST:8000":
        assert server.send(path, body, Host=host).status == 200


def memory(pids):
    """The bytes that processes have in memory."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for pid in pids)


@pytest.mark.parametrize("each", [5, slow_case(25)])
def test_eight_clients_at_once_get_their_answers(server, model, each):
    r = random.Random(each)
    words = ["the", "dog", "ran", "to", "big", "park", "and", "saw", "Lily", "red"]
    asked = [(" ".join(r.choices(words, k=r.randrange(1, 60))), r.randrange(1, 40)) for _ in range(8 * each)]
    answers = {}
    sizes = []

    def client(number):
        for i in range(number, len(asked), 8):
            prompt, most = asked[i]
            if i % 2:
                events = [*server.events(prompt=prompt, max_tokens=most)][:-1]  # without [DONE]
                answers[i] = "".join(event["choices"][0]["text"] for event in events)
            else:
                answers[i] = server.text(prompt, max_tokens=most)
            sizes.append(memory(server.ranks()))

    clients = [threading.Thread(target=client, args=[number]) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert len(answers) == len(asked) and server.requests() == 0
    for i, (prompt, most) in enumerate(asked):
        assert answers[i] == complete(*model, [prompt], most, temperature=0)[0], i
    assert each < 25 or sizes[-1] < sizes[len(sizes) // 4] + 2**24, sizes  # of 0.6 GB


def test_a_client_that_goes_frees_its_row_and_others_go_on(server):
    body = OK | {"max_tokens": 250, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_until(server.requests)
    connection.close()  # before it is answered, which would take seconds
    wait_until(lambda: not server.requests(), 6)  # while it might have ended its own direction alone
    streams = [server.send("/v1/completions", body | {"stream": True}) for _ in range(3)]  # as many as rows
    for stream in streams:
        stream.readline()
    for stream in streams[:2]:
        stream.close_all()
    assert len(server.text("The dog", max_tokens=8)) > 8
    assert "[DONE]" in streams[2].read().decode()
    wait_until(lambda: not server.requests())


def test_keys_queues_and_the_end():
    with Server("--rows", 1, "--queue", 1, "--api-key", "caf\u00e9", "--log") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (60, 60))
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(80)]
        wait_until(lambda: "see ulimit" in server.said, 20)
        for connection in idle:
            connection.close()
        time.sleep(0.2)
        send = server.send
        key = {"Authorization": "Bearer caf\u00e9".encode()}
        for headers in {}, {"Authorization": "Bearer cafe"}:
            assert send("/v1/completions", OK, **headers).status == send("/v1/models", **headers).status == 401
        assert send("/v1/models", **key).json()["data"][0]["id"] == "demo"
        assert send("/nothing").status == 404 and send("/v1/completions").status == 405 and send("/").status == 200
        body = {"prompt": "Once", "max_tokens": 250, "stream": True, "temperature": 0}
        running = send("/v1/completions", body, **key)
        waits = http.client.HTTPConnection("127.0.0.1", server.port)
        waits.request("POST", "/v1/completions", json.dumps(OK), key)
        wait_until(lambda: server.requests() == 2)
        full = send("/v1/completions", OK, **key)
        assert full.status == 429 and "2 requests run or wait" in full.read().decode()
        server.process.terminate()
        time.sleep(0.3)
        assert send("/health").status == send("/v1/completions", OK, **key).status == 503
        assert running.read().decode().rstrip().endswith("[DONE]") and waits.getresponse().status == 200
        assert server.process.wait(20) == 0
    said = server.said
    assert '"POST /v1/completions HTTP/1.1" 401' in said and "the end, after SIGTERM: 0 requests are cut" in said
    assert re.search(r"answer to \d+ tokens: 2 tokens in \d+\.\d\d s, length", said) and said.count("ulimit") == 1


@pytest.mark.slow
def test_a_stream_of_a_rank_that_dies_ends_in_an_error():
    with Server("--rows", 1, ranks=2) as server:
        running = server.send("/v1/completions", {"prompt": "Once", "max_tokens": 250, "stream": True, "seed": 3})
        running.readline()
        start = time.monotonic()
        os.kill(server.ranks()[1], signal.SIGKILL)
        error = json.loads(running.read().decode().split("data: ")[-1])["error"]
        assert error["message"] == "the server has stopped" and server.process.wait(60) != 0
        assert time.monotonic() - start < 8 and "rank 1 of 2 has died" in server.said


def endless_demo(tmp_path):
    """Return a copy of the demo that has a long context and no end-of-sequence."""
    folder = shutil.copytree(ROOT / "demo", tmp_path / "demo")
    edit_config(folder, max_seq_len=32768, eos_ids=[])
    return folder


@slow
def test_what_runs_too_long_after_sigterm_is_cut(tmp_path):
    with Server("--context", 32768, checkpoint=endless_demo(tmp_path)) as server:
        running = server.send("/v1/completions", {"prompt": "Once", "max_tokens": 32000, "stream": True})
        running.readline()
        start = time.monotonic()
        server.process.terminate()
        *tokens, last = running.read().decode().split("data: ")
        assert "the server has stopped" in last and time.monotonic() - start > 9
        assert len(tokens) < 16000  # it was cut long before its end, however busy the machine is
        assert server.process.wait(60) == 0 and server.said == ""


def test_the_official_client(server):
    openai = pytest.importorskip("openai", reason="openai is not installed: requirements-peers.txt has it")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    ask = {"model": "demo", "messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0}
    answer = client.chat.completions.create(**ask, max_tokens=20, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert text == server.text("Once upon a time", max_tokens=20) and answer.usage.completion_tokens == 20
    assert "".join(token.token for token in answer.choices[0].logprobs.content) == text
    more = {"max_completion_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ask, **more)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text and last.usage.total_tokens == 25
    assert chunks[-1].choices[0].finish_reason == "length"
    with client.chat.completions.stream(**ask, stop=text[30:]) as stream:  # it joins the strings of all deltas
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", text[:30])
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(**ask | {"model": "other"})
    with client.chat.completions.create(**ask, stream=True) as stream:
        next(stream)
    wait_until(lambda: not server.requests())


@slow
def test_lm_evals_client_gets_what_its_own_model_answers(tmp_path, story):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: requirements-peers.txt has it")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from extras.export import to_hf

    run_main(to_hf, ROOT / "demo", "--dtype", "float32", "--out", tmp_path / "hf")
    lines = []
    for i in range(12):
        name = ("Tim", "Lily", "Sue", "Ben")[i % 4]
        told = f"Once upon a time, there was a girl named {name}. " + f"{name} saw the big dog. " * (i % 6)
        told *= 8 if i % 7 == 6 else 1  # longer than the context
        lines.append({"story": told, "ends": [" the.", f" {name} went to the park.", f" {name}"], "right": i % 3})
    begun, _, end = story.rpartition(" ")
    lines.append({"story": begun, "ends": [f" {end}", end[-1], " park."], "right": 0})
    write_lines(tmp_path / "lines.jsonl", lines)
    tasks = {
        "choices": "output_type: multiple_choice\ndoc_to_choice: ends\ndoc_to_target: right\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\nnum_fewshot: 1\n",
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_target: '{{story}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n",
        "writing": "output_type: generate_until\ndoc_to_target: ' He'\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {until: ['.', ' and'], max_gen_toks: 30}\n",
    }
    for name, text in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: train\nfewshot_split: train\n{text}"
            f"dataset_kwargs: {{data_files: '{tmp_path}/lines.jsonl', cache_dir: '{tmp_path}'}}\n"
            f"doc_to_text: '{'' if name == 'rolling' else '{{story}}'}'\n"
        )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)  # its own take a minute to read

    def answers(kind, **args):
        done = simple_evaluate(kind, model_args=args, tasks=[*tasks], task_manager=manager, bootstrap_iters=0)
        return [[doc["filtered_resps"] for doc in done["samples"][task]] for task in tasks]

    own = {"dtype": "float32", "device": "cpu", "trust_remote_code": True}
    expected = answers("hf", pretrained=str(tmp_path / "hf"), logits_cache=False, **own)  # the cache picks wrong ones
    with Server("--dtype", "float32", ranks=2) as server:
        url = {"base_url": f"http://127.0.0.1:{server.port}/v1/completions", "tokenizer": str(tmp_path / "hf")}
        result = answers("local-completions", model="demo", max_length=256, add_bos_token=True, **url)
    for task, one, other in zip(tasks, result, expected, strict=True):
        if task == "writing":
            one, other = ([text.lstrip() for [text] in texts] for texts in (one, other))  # hf drops a first space
            assert one == other and len({*one}) > 2
        else:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-4)


@slow
def test_the_page_streams_and_stops(tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: requirements-peers.txt")
    wait = pytest.importorskip("selenium.webdriver.support.wait")
    browser = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
    for flag in (*flags.split(), "disable-component-update", f"user-data-dir={tmp_path}/profile"):
        options.add_argument(f"--{flag}")
    folder = endless_demo(tmp_path)  # else an answer may end by itself before the browser stops it
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with Server("--api-key", "k", checkpoint=folder) as server:
        page = webdriver.Chrome(options, webdriver.ChromeService(driver))
        try:
            page.get(f"http://127.0.0.1:{server.port}/")
            find = lambda name: page.find_element("css selector", name)  # noqa: E731
            until = wait.WebDriverWait(page, 60, 0.01).until
            find("#text").send_keys("Once upon\n")
            until(lambda _: "Incorrect API key" in find(".error").text)
            find("#key").send_keys("k")
            find("#most").send_keys("4000")
            lengths = []
            said = "<img src=x onerror=document.title='harmed'>Once upon a time"
            find("#text").send_keys(said + "\n")
            answer = page.find_elements("css selector", ".assistant")[-1]
            until(lambda _: lengths.append(len(answer.text)) or len({*lengths}) > 5 and lengths[-1] > 20)
            find("#stop").click()
            until(lambda _: find("#state").text == "stopped")
            shown = answer.text
            until(lambda _: server.requests() == 0)
            assert answer.text == shown and lengths == sorted(lengths)
            assert page.find_elements("css selector", ".user")[-1].text == said and page.title != "harmed"
            find("#clear").click()  # what is sampled, of any length, may otherwise fill the context
            find("#most").clear()
            find("#most").send_keys("9")
            find("#text").send_keys(" The dog\n")
            until(lambda _: re.match("(length|stop), .* tokens/s", find("#state").text), find("#state").text)
            assert page.get_log("browser") == [] or all("401" in line["message"] for line in page.get_log("browser"))
        finally:
            page.quit()
