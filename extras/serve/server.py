"""Answer OpenAI's API over HTTP, with any number of ranks: rank 0 has the socket, the others get its requests.

python serve.py --checkpoint demo
torchrun --standalone --nproc_per_node=2 serve.py --checkpoint checkpoints/8b --compile
"""

import argparse
import asyncio
import hmac
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import generate
from extras.serve.protocol import Refused, Text, check, logprobs_of, parse
from extras.serve.rows import Rows
from formats import checkpoint
from runtime import cli, launch, place, signals
from runtime.errors import InputError

MAX_BODY, BODY_SECONDS = 2**22, 30
DRAIN = 10  # seconds that requests get after SIGTERM
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Answer:
    """The answer to one prompt of a Completion, made of the tokens that the main thread sends."""

    started, first, finish = False, None, None  # whether it has a row; when its first token came; why it ended
    count = length = 0  # of its tokens and characters

    def __init__(self, ask, index, front):
        self.ask, self.index, self.request, self.front = ask, index, ask["requests"][index], front
        self.choices, self.text = asyncio.Queue(), Text(front.tokenizer, self.request["ids"], ask["stop"])

    def end(self, error=None):
        """Free the row, or do without one. error: an exception for whoever reads the choices."""
        self.front.open.pop(self, None)
        if error:
            self.choices.put_nowait(error)

    def take(self, token, finish, now, scored, cached):
        """Take a Token of Rows, and queue what is certain of the text as a choice. scored, cached: of the first one."""
        check(finish != "error", "the logits are NaN or infinite: see --dtype", status=500)
        if self.first is None:
            self.first, self.cached, self.tokens = now, cached, [*scored]
            self.new = self.front.tokenizer.decode(self.request["ids"]) if self.request["echo"] else ""
        new, self.last = [token] * (finish != "stop"), now  # without end-of-sequence
        self.count, self.tokens = self.count + len(new), self.tokens + new
        text, self.finish = self.text.push([token.id for token in new], finish)
        self.new += text
        if self.finish or self.new and self.ask["stream"]:
            self.choices.put_nowait(self.choice())
            self.length, self.new, self.tokens = self.length + len(self.new), "", []
        if self.finish:
            self.end()

    def choice(self):
        """Return an entry of `choices`: the text and the Tokens since the last one."""
        content, logprobs, chat = "delta" if self.ask["stream"] else "message", None, self.ask["chat"]
        text = {content: {"role": "assistant", "content": self.new}} if chat else {"text": self.new}
        if self.request["logprobs"] is not None:
            logprobs = logprobs_of(self.tokens, chat, self.front.tokenizer, self.length)
        return {"index": self.index, **text, "logprobs": logprobs, "finish_reason": self.finish}


class Completion:
    """The answers to the prompts of one HTTP request, and the object or the events that hold them."""

    def __init__(self, ask, front):
        self.ask, self.arrived = ask, time.perf_counter()
        self.answers = [Answer(ask, index, front) for index in range(len(ask["requests"]))]
        kind = "chat.completion" + ".chunk" * ask["stream"] if ask["chat"] else "text_completion"
        name = ("chatcmpl-" if ask["chat"] else "cmpl-") + os.urandom(12).hex()
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": ask["model"]}

    async def end_with_client(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        for answer in self.answers:
            answer.end(ClientDisconnect())

    async def choices(self):
        """Yield the choices, one answer after another. Frees the rows, whatever happens."""
        try:
            for answer in self.answers:
                choice = {"finish_reason": None}
                while not choice["finish_reason"]:
                    choice = await answer.choices.get()
                    if isinstance(choice, Exception):
                        raise choice
                    yield choice
        finally:
            for answer in self.answers:
                answer.end()

    def totals(self):
        """Return `usage` and, an extension of the API, `timings` in seconds."""
        counts = [(len(answer.request["ids"]), answer.count, answer.cached) for answer in self.answers]
        prompt, count, cached = map(sum, zip(*counts, strict=True))
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        first, last = min(answer.first for answer in self.answers), max(answer.last for answer in self.answers)
        timings = {"first_token_s": first - self.arrived}
        timings["tokens_per_s"] = (count - 1) / (last - first) if last > first else None
        return {"usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}, "timings": timings}

    async def stream(self, choices, choice):
        """Yield server-sent events. choice: the first of the choices."""
        try:
            while choice:
                ends = choice["finish_reason"] and choice["index"] == len(self.answers) - 1
                timings = {"timings": self.totals()["timings"]} if ends else {}
                yield f"data: {json.dumps(self.head | {'choices': [choice]} | timings)}\n\n"
                choice = await anext(choices, None)
            if self.ask["stream_options"].get("include_usage"):
                yield f"data: {json.dumps(self.head | {'choices': []} | self.totals())}\n\n"
            yield "data: [DONE]\n\n"
        except Refused as e:
            yield f"data: {error(e)}\n\n"
        except ClientDisconnect:
            pass


def error(e):
    """Return OpenAI's error object of an HTTPException, as JSON: ASCII, whatever half characters its message has."""
    status, more = e.status_code, {"param": getattr(e, "param", None), "code": getattr(e, "code", None)}
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return json.dumps({"error": {"message": e.detail, "type": kind, **more}})


class Front:
    """The HTTP server, in a thread of rank 0. The main thread takes the `open` answers, and sends them tokens."""

    deadline = None  # until when what runs may end, after SIGTERM

    def __init__(self, args, setup, listener):
        self.model, self.tokenizer, config = setup.name, setup.tokenizer, setup.runner.model.config
        self.api_key, self.max_open = args.api_key or os.environ.get("LADDER_API_KEY"), args.rows + args.queue
        self.limits = config.vocab_size, setup.max_new_tokens + 1, self.max_open
        address = ipaddress.ip_address(listener.getsockname()[0])
        self.hosts = None if self.api_key or not address.is_loopback else {"localhost", str(address), args.host}
        self.open, self.rows = {}, {}  # {answer that waits or runs: None}, in order; {number of a row: its last answer}
        self.wake, self.encoding = threading.Event(), asyncio.Lock()  # a tokenizer serves one at a time
        headers = {"Content-Security-Policy": POLICY}
        page = HTMLResponse(Path(__file__).with_name("page.html").read_text(), headers=headers)
        routes = [Route("/", lambda _: page), Route("/health", self.health), Route("/v1/models", self.models)]
        routes += [Route(f"/v1/{chat}completions", self.complete, methods=["POST"]) for chat in ("", "chat/")]
        handlers = {
            HTTPException: lambda _, e: Response(error(e), e.status_code, media_type="application/json"),
            ClientDisconnect: lambda *_: Response(),
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        quiet = {"lifespan": "off", "log_config": None, "log_level": "error", "access_log": False}
        self.server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **quiet))
        self.loop = asyncio.new_event_loop()
        serving = self.server.serve([listener])
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=[serving], daemon=True)
        self.thread.start()
        launch.at_end.append(self.close)

    # ---- In its own thread

    def admit(self, request, key=True):
        """Raise Refused for a wrong key, for a web page of strangers, or if the server is stopping."""
        if self.hosts:  # without a key: a browser lets a page send requests, and read answers if its name resolves here
            site, host = request.headers.get("sec-fetch-site"), request.url.hostname
            right = host in self.hosts and site != "cross-site"
            check(right, f"a web page elsewhere and the name {host!r} need a server with --api-key", status=403)
        if key and self.api_key:
            given, right = request.headers.get("authorization", ""), f"Bearer {self.api_key}".encode()
            right = hmac.compare_digest(given.encode("latin-1"), right)
            check(right, "Incorrect API key", status=401, code="invalid_api_key")
        check(not self.deadline, "the server is stopping", status=503)

    async def health(self, request):
        self.admit(request, key=False)
        return JSONResponse({"status": "ok", "requests": len(self.open)})

    async def models(self, request):
        self.admit(request)
        models = [{"id": self.model, "object": "model", "created": 0, "owned_by": "ladder-fast"}]
        return JSONResponse({"object": "list", "data": models})

    async def complete(self, request):
        self.admit(request)
        data, chat = bytearray(), "chat" in request.url.path
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    data += chunk
                    check(len(data) <= MAX_BODY, f"the body has more than {MAX_BODY} bytes", status=413)
            async with self.encoding:
                ask = await asyncio.to_thread(parse, bytes(data), chat, self.model, self.tokenizer, *self.limits)
        except TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_SECONDS} s") from None
        except InputError as e:
            raise Refused(400, str(e)) from None
        self.admit(request)
        full = len(self.open) + len(ask["requests"]) > self.max_open
        check(not full, f"{len(self.open)} requests run or wait: try again later", status=429)
        completion = Completion(ask, self)
        self.open |= dict.fromkeys(completion.answers)
        self.wake.set()
        completion.watcher = asyncio.create_task(completion.end_with_client(request.receive))
        choices = completion.choices()
        if not ask["stream"]:
            whole = {"choices": [choice async for choice in choices]}
            return JSONResponse(completion.head | whole | completion.totals())
        return StreamingResponse(completion.stream(choices, await anext(choices)), media_type="text/event-stream")

    def deliver(self, answer, *event):
        if answer in self.open:  # else its client has gone, or a stop string has ended it
            try:
                answer.take(*event)
            except Exception as e:  # for the reader, who else would wait for ever
                answer.end(e)

    # ---- In the main thread

    def close(self):
        self.deadline = 1
        stopped = Refused(503, "the server has stopped")
        self.loop.call_soon_threadsafe(lambda: [answer.end(stopped) for answer in [*self.open]])
        self.server.should_exit = True
        self.thread.join(3)

    def news(self, rows):
        """Return what the ranks do before the next pass: {"end": True}, {"stop": numbers of rows, "start": [number,
        request] or None}, or None. Waits for some while all rows are free."""
        while True:
            self.wake.clear()
            waiting = [answer for answer in [*self.open] if not answer.started]
            stop, start = [i for i, row in enumerate(rows) if row.request and self.rows[i] not in self.open], None
            free = [i for i, row in enumerate(rows) if not row.request or i in stop]
            idle = len(free) == len(rows) and not waiting
            if self.deadline and (idle or time.monotonic() > self.deadline):
                return {"end": True}
            if free and waiting:  # in the row that has most of it in its cache, or was last used long ago
                answer = waiting[0]
                i = max(free, key=lambda i: (rows[i].cached(answer.request["ids"]), -rows[i].used))
                self.rows[i], answer.started, start = answer, True, [i, answer.request]
            if stop or start:
                return {"stop": stop, "start": start}
            if rows.busy:
                return None
            self.wake.wait(0.2)  # a signal's handler cannot set it safely

    def post(self, taken, scored=(), cached=0):
        """Send the answers what Rows returned."""
        now = time.perf_counter()
        for i, token, finish in taken:
            self.loop.call_soon_threadsafe(self.deliver, self.rows[i], token, finish, now, scored, cached)


@torch.inference_mode()
def serve(world, rows, front):
    """Serve until SIGTERM, on all ranks. front: None but on rank 0."""
    post = front.post if front else lambda *_: None
    while True:
        idle = tells = not rows.busy
        if idle:
            place.at("the wait for a request", timed=world.rank > 0)  # of the others only until rank 0 goes on
        news = front.news(rows) if front else None
        if not idle and not world.alone:
            flag = torch.tensor([news is not None], dtype=torch.int32, device=world.device)
            tells = bool(rows.runner.model.comm.all_gather(flag)[0])
        if tells:
            news = world.tell(news)
        if news:
            if "end" in news:
                return
            for i in news["stop"]:
                rows[i].request = None
            if news["start"]:
                post(*rows.start(*news["start"]))
        if rows.busy:
            post(rows.step())


def parse_flags(argv):
    p = cli.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder of weights with a tokenizer, e.g. demo")
    g.add_argument("--dtype", choices=checkpoint.DTYPES, help="default: the checkpoint's own")
    about = "torch.compile the decode step; needs a C++ compiler"
    g.add_argument("--compile", action="store_const", const="decode", help=about)
    cli.add_rank_flags(g, sharded=True)
    cli.add_wiring_flags(p)
    g = p.add_argument_group("server")
    g.add_argument("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0: of all networks")
    g.add_argument("--port", type=cli.number(int, 0, 65535), default=8000, help="0 for any that is free")
    g.add_argument("--rows", type=cli.count, default=4, metavar="N", help="requests that are decoded at once")
    about = f"tokens of a row, prompt and answer; default: the model's, up to {cli.CHAT_CONTEXT}"
    g.add_argument("--context", type=cli.number(int, 2), metavar="N", help=about)
    g.add_argument("--queue", type=cli.number(int, 0), default=64, metavar="N", help="requests that wait for a row")
    about = "what clients must send; where others see command lines, set LADDER_API_KEY instead"
    g.add_argument("--api-key", metavar="TEXT", help=about)
    return p.parse_args(argv)


def main(argv=None):
    args = parse_flags(argv)
    world = launch.join(args.device, {name: value for name, value in vars(args).items() if name != "api_key"})
    with world.together():
        most = cli.read_config(args)[1].max_seq_len
        context = args.context or min(cli.CHAT_CONTEXT, most)
        if context > most:
            raise InputError(f"--context {context} is above the model's {most}")
        try:
            family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
            listener = socket.create_server((args.host, args.port), family=family) if world.rank == 0 else None
        except OSError as e:
            raise InputError(f"--host {args.host} --port {args.port}: {e}") from None
    p = cli.Parser(None)
    generate.add_flags(p)
    batch = f"--prompt ids:0 --batch {args.rows} --max-new-tokens {context - 1} --checkpoint".split()
    batch = vars(p.parse_args([*batch, args.checkpoint])) | vars(args)
    setup = generate.set_up(argparse.Namespace(**batch), world)  # as for such a batch
    if setup.tokenizer is None:
        raise InputError(f"{args.checkpoint} has no tokenizer")
    rows, front, draining = Rows(setup.runner, setup.eos_ids), None, []
    if args.compile and args.rows > 1 and world.device.type == "cpu":
        from runtime import compiling

        compiling.warm_up(rows[0].runner, [[0]], context - 1, rows.greedy)

    def drain(number, frame):  # a second SIGTERM ends at once
        if draining:
            signals.terminate(number, frame)
        draining.append(number)
        if front:
            front.deadline = time.monotonic() + DRAIN

    signal.signal(signal.SIGTERM, drain)
    if world.rank == 0:
        sys.setswitchinterval(5e-5)  # seconds: a pass must not wait for the thread that sends the token before
        front = Front(args, setup, listener)
        world.say("listening at http://{}:{}".format(*listener.getsockname()))
    with setup.runner.unguarded():
        serve(world, rows, front)
