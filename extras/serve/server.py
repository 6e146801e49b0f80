"""Answer OpenAI's API over HTTP, with any number of ranks: rank 0 has the socket, the others get its requests.

python serve.py --checkpoint demo
torchrun --standalone --nproc_per_node=2 serve.py --checkpoint checkpoints/8b --compile
"""

import argparse
import asyncio
import collections
import contextlib
import hmac
import json
import os
import signal
import socket
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
from runtime import cli, launch, watch
from runtime.errors import InputError

MAX_BODY = 2**22
DRAIN = 10  # seconds that requests get after SIGTERM
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Answer:
    """The answer to a request, made of the events that the main thread sends."""

    first = finish = None  # when the first token came; why it ended
    count, cancelled = 0, False

    def __init__(self, ask, front):
        self.ask, self.request, self.front, self.arrived = ask, ask["request"], front, time.perf_counter()
        self.events, self.text = asyncio.Queue(), Text(front.tokenizer, self.request["ids"], ask["stop"])
        kind = "chat.completion" + ".chunk" * ask["stream"] if ask["chat"] else "text_completion"
        name = ("chatcmpl-" if ask["chat"] else "cmpl-") + os.urandom(12).hex()
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": ask["model"]}

    async def parts(self):
        """Yield (text, Tokens) until the answer has finished. Ends the request, whatever happens."""
        shown, tokens = "", []
        try:
            while not self.finish:
                event = await self.events.get()
                if isinstance(event, Exception):
                    raise event
                token, finish, self.last, scored, cached = event
                if finish == "error":
                    raise Refused(500, "the logits are NaN or infinite: see --dtype")
                if self.first is None:
                    self.first, self.cached, tokens = self.last, cached, scored
                    shown = self.front.tokenizer.decode(self.request["ids"]) if self.request["echo"] else ""
                new = [token] * (finish != "stop")  # else it is end-of-sequence
                self.count += len(new)
                tokens += new
                text, self.finish = self.text.push([token.id for token in new], finish)
                shown += text
                if shown or self.finish:
                    yield shown, tokens
                    shown, tokens = "", []
        finally:
            self.cancelled = True
            self.front.open.discard(self)

    def choices(self, content, text, tokens):
        """Return `choices`; content: what a chat calls the text, "message" or "delta"."""
        shown = {content: {"role": "assistant", "content": text}} if self.ask["chat"] else {"text": text}
        asked = self.request["logprobs"] is not None
        logprobs = logprobs_of(tokens, self.ask["chat"], self.front.tokenizer) if asked else None
        return {"choices": [{"index": 0, **shown, "logprobs": logprobs, "finish_reason": self.finish}]}

    def totals(self):
        prompt, seconds = len(self.request["ids"]), self.last - self.first
        usage = {"prompt_tokens": prompt, "completion_tokens": self.count, "total_tokens": prompt + self.count}
        rate = (self.count - 1) / seconds if seconds else None
        timings = {"first_token_s": self.first - self.arrived, "tokens_per_s": rate}  # an extension
        return {"usage": usage | {"prompt_tokens_details": {"cached_tokens": self.cached}}, "timings": timings}

    async def whole(self):
        texts, tokens = zip(*[part async for part in self.parts()], strict=True)
        return self.head | self.choices("message", "".join(texts), sum(tokens, [])) | self.totals()

    async def stream(self, parts, part):
        """Yield server-sent events. part: the first of the parts."""
        with contextlib.suppress(ClientDisconnect):
            try:
                while part:
                    timings = {"timings": self.totals()["timings"]} if self.finish else {}
                    yield event(self.head | self.choices("delta", *part) | timings)
                    part = await anext(parts, None)
                if self.ask["stream_options"].get("include_usage"):
                    yield event(self.head | {"choices": []} | self.totals())
                yield "data: [DONE]\n\n"
            except Refused as e:
                yield event(error(e))

    async def await_disconnect(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait(ClientDisconnect())


def event(value):
    return f"data: {json.dumps(value)}\n\n"


def error(e):
    """Return OpenAI's error object of an HTTPException."""
    status, more = e.status_code, {"param": getattr(e, "param", None), "code": getattr(e, "code", None)}
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": e.detail, "type": kind, **more}}


class Front:
    """The HTTP server, in a thread of rank 0. The main thread takes `waiting` answers, and sends them events."""

    deadline = None  # until when what runs may end, after SIGTERM

    def __init__(self, args, setup, listener):
        self.model, self.tokenizer, config = setup.name, setup.tokenizer, setup.runner.model.config
        self.parsing = setup.name, setup.tokenizer, config.vocab_size, setup.max_new_tokens + 1
        self.api_key, self.most = args.api_key or os.environ.get("LADDER_API_KEY"), args.rows + args.queue
        self.open, self.waiting, self.rows, self.wake = set(), collections.deque(), {}, threading.Event()
        self.encoding = asyncio.Lock()  # neither a tokenizer nor the process of the chat template serves several
        page = (Path(__file__).parent / "page.html").read_text()
        page = HTMLResponse(page, headers={"Content-Security-Policy": POLICY})
        routes = [Route("/", lambda _: page), Route("/health", self.health), Route("/v1/models", self.models)]
        routes += [Route(f"/v1/{chat}completions", self.complete, methods=["POST"]) for chat in ("", "chat/")]
        handlers = {
            HTTPException: lambda _, e: JSONResponse(error(e), e.status_code),
            ClientDisconnect: lambda *_: Response(),
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        quiet = {"lifespan": "off", "log_config": None, "log_level": "error", "access_log": False}
        self.server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **quiet))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.run, args=[listener], daemon=True)
        self.thread.start()
        watch.at_end.append(self.close)

    def run(self, listener):
        self.loop.run_until_complete(self.server.serve([listener]))

    # ---- In its own thread

    def check(self, key=None):
        """Raise Refused for another key than the server's, or when it is stopping."""
        if key is not None and self.api_key:
            right = f"Bearer {self.api_key}".encode()
            check(hmac.compare_digest(key.encode("latin-1"), right), "Incorrect API key", None, 401, "invalid_api_key")
        check(not self.deadline, "the server is stopping", None, 503)

    async def health(self, request):
        self.check()
        return JSONResponse({"status": "ok", "requests": len(self.open)})

    async def models(self, request):
        self.check(request.headers.get("authorization", ""))
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "ladder-fast"}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(self, request):
        self.check(request.headers.get("authorization", ""))
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            check(len(data) <= MAX_BODY, f"the body has more than {MAX_BODY} bytes", None, 413)
        try:
            async with self.encoding:
                ask = await asyncio.to_thread(parse, bytes(data), "chat" in request.url.path, *self.parsing)
        except InputError as e:
            raise Refused(400, str(e)) from None
        self.check()
        check(len(self.open) < self.most, f"{len(self.open)} requests run or wait: try again later", None, 429)
        answer = Answer(ask, self)
        self.open.add(answer)
        self.waiting.append(answer)
        self.wake.set()
        answer.gone = asyncio.create_task(answer.await_disconnect(request.receive))
        if not ask["stream"]:
            return JSONResponse(await answer.whole())
        parts = answer.parts()
        return StreamingResponse(answer.stream(parts, await anext(parts)), media_type="text/event-stream")

    def fail(self):
        for answer in self.open:
            answer.events.put_nowait(Refused(503, "the server has stopped"))

    # ---- In the main thread

    def close(self):
        self.deadline = 1
        self.loop.call_soon_threadsafe(self.fail)
        self.server.should_exit = True
        self.thread.join(3)

    def news(self, rows):
        """Return what the ranks do before the next pass: {"end": True}, {"stop": numbers of rows, "start": [number,
        request] or None}, or None. Waits for some while all rows are free."""
        while True:
            self.wake.clear()
            stop, start = [i for i, row in enumerate(rows) if row.request and self.rows[i].cancelled], None
            free = [i for i, row in enumerate(rows) if not row.request or i in stop]
            while self.waiting and self.waiting[0].cancelled:
                self.waiting.popleft()
            idle = len(free) == len(rows) and not self.waiting
            if self.deadline and (idle or time.monotonic() > self.deadline):
                return {"end": True}
            if free and self.waiting:  # in the row that has most of it in its cache, or was last used long ago
                answer = self.waiting.popleft()
                i = max(free, key=lambda i: (rows[i].cached(answer.request["ids"]), -rows[i].used))
                self.rows[i], start = answer, [i, answer.request]
            if stop or start:
                return {"stop": stop, "start": start}
            if rows.busy:
                return None
            self.wake.wait(0.2)  # a signal's handler cannot set it safely

    def post(self, taken, scored=(), cached=0):
        """Send the answers what Rows returned."""
        now = time.perf_counter()
        events = [(self.rows[i].events, (token, finish, now, scored, cached)) for i, token, finish in taken]
        self.loop.call_soon_threadsafe(lambda: [queue.put_nowait(event) for queue, event in events])


@torch.inference_mode()
def serve(world, rows, front):
    """Serve until SIGTERM, on all ranks. front: None but on rank 0."""
    post = front.post if front else lambda *_: None
    while True:
        idle = tells = not rows.busy
        if idle:
            watch.at("the wait for a request", timed=world.rank > 0)  # of the others only until rank 0 goes on
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
    words = "torch.compile the decode step; needs a C++ compiler"
    g.add_argument("--compile", action="store_const", const="decode", help=words)
    cli.add_rank_flags(g, sharded=True)
    cli.add_wiring_flags(p)
    g = p.add_argument_group("server")
    g.add_argument("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0: of all networks")
    g.add_argument("--port", type=cli.number(int, 0, 65535), default=8000, help="0 for any that is free")
    g.add_argument("--rows", type=cli.count, default=4, metavar="N", help="requests that are decoded at once")
    words = f"tokens of a row, prompt and answer; default: the model's, up to {cli.CHAT_CONTEXT}"
    g.add_argument("--context", type=cli.number(int, 2), metavar="N", help=words)
    g.add_argument("--queue", type=cli.number(int, 0), default=64, metavar="N", help="requests that wait for a row")
    words = "what clients must send; where others see command lines, set LADDER_API_KEY instead"
    g.add_argument("--api-key", metavar="TEXT", help=words)
    return p.parse_args(argv)


def main(argv=None):
    args = parse_flags(argv)
    world = launch.join(args.device, {name: value for name, value in vars(args).items() if name != "api_key"})
    with world.together():
        most = cli.read_config(args)[1].max_seq_len
        context = args.context or min(cli.CHAT_CONTEXT, most)
        if context > most:
            raise InputError(f"--context {context} is above the model's {most}")
        if args.api_key == "":
            raise InputError("--api-key is empty")
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

    def drain(number, frame):  # a second SIGTERM, or one by the verdict of the ranks' watch, ends at once
        ranks = launch.several_ranks()
        if draining or (ranks and ranks.verdict()):
            watch.terminate(number, frame)
        draining.append(number)
        if front:
            front.deadline = time.monotonic() + DRAIN

    signal.signal(signal.SIGTERM, drain)
    if world.rank == 0:
        front = Front(args, setup, listener)
        world.say("listening at http://{}:{}".format(*listener.getsockname()))
    with setup.runner.unguarded():
        serve(world, rows, front)
