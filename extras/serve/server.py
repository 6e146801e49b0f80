"""Answer OpenAI's API over HTTP with any number of ranks. Rank 0 has the socket and passes requests on to the others.

python serve.py --checkpoint demo
torchrun --standalone --nproc_per_node=2 serve.py --checkpoint checkpoints/8b --compile
"""

import argparse
import asyncio
import hmac
import json
import logging
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h11
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

import generate
from extras.serve.protocol import LONG_TEXT, Text, check, check_model, logprobs_of, parse, token_text
from extras.serve.rows import Rows
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.command_line.job import CHAT_CONTEXT, Job
from ladder.errors import InputError, ProcessLost
from ladder.progress import progress
from ladder.ranks import ending, launch
from ladder.text.tokenizer import load_tokenizer

MAX_BODY_BYTES = 2**22  # of a request
DRAIN_SECONDS = 10  # for which requests may go on after SIGTERM
CONTINUE_AT = 1, 2, 4, 8, 16  # the looks after a client that has only half closed at which it is sent 100 Continue
HALF_CLOSED_SECONDS = 2  # after which it is asked whether a client that sends nothing more has gone
IDLE_SECONDS = 10  # after which a connection ends whose client sends nothing
RESERVED_FILES = 12  # open files of the process that connections may not use up
LOG = logging.getLogger("uvicorn.error")  # uvicorn writes all of its messages there, not only errors
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def error(e):
    """Return an HTTPException as OpenAI's error object, in JSON."""
    kind = "invalid_request_error" if e.status_code < 500 else "server_error"
    return json.dumps({"error": {"message": e.detail, "type": kind, "param": None, "code": None}})


class Listener(socket.socket):
    """A listening socket that closes new connections at once if they would use up the files of the process."""

    warned = False

    def accept(self):
        connection, address = super().accept()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES
        if connection.fileno() < most:  # a new file gets the lowest free number
            return connection, address
        connection.close()
        if not self.warned:
            LOG.error("connections are refused while %d files are open: see ulimit -n", most)
        self.warned = True
        raise ConnectionAbortedError  # asyncio waits for the next one


class Connection(H11Protocol):
    """uvicorn's connection, but it also ends if it sends nothing for a while before a request is complete.

    And a client that ends only its own direction gets its answers (RFC 9112 9.6). One that has gone sends the same, but
    resets the connection when something reaches it: until the answer begins, that is 100 Continue, which any client of
    HTTP/1.1 skips (RFC 9110 15.2). Go's takes at most five of them, so these are sent after 0.5, 1, 2 and 4 s more.
    """

    def connection_made(self, transport):
        super().connection_made(transport)
        self.end_if_idle()

    def data_received(self, data):
        super().data_received(data)
        self.end_if_idle()

    def end_if_idle(self):
        if self.timeout_keep_alive_task is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.timeout_keep_alive_task = self.loop.call_later(IDLE_SECONDS, self.transport.close)

    def eof_received(self):
        if self.cycle is None or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            return False  # nothing is to be answered: the connection ends
        self.cycle.keep_alive = self.conn.trailing_data[0] != b""  # there may be another request already
        self.loop.call_later(HALF_CLOSED_SECONDS, self.probe)
        return True

    def probe(self, count=1):
        """End a connection whose client has gone, or which has answered all; else see to it that a reset would come.

        count: how many looks there were, this one included; one follows every 0.5 s.
        """
        if self.transport.is_closing():
            return
        events = select.poll()
        events.register(self.transport.get_extra_info("socket").fileno(), 0)  # a reset is always reported
        if events.poll(0) or self.cycle.response_complete:
            self.transport.abort() if events.poll(0) else self.transport.close()
            return
        waits = not self.cycle.response_started and self.scope["http_version"] == "1.1"
        if waits and count in CONTINUE_AT:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(0.5, self.probe, count + 1)


class Answer:
    """The answer to one prompt. The main thread sends it what Rows returns, and the client's task reads that."""

    count = cached = 0  # its tokens, end-of-sequence included; tokens of its prompt that were cached
    finish = None  # why it has ended

    def __init__(self, front, ask, index, receive):
        self.front = front
        self.ask = ask
        self.index = index
        self.request = ask["requests"][index]
        self.start = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.events = asyncio.Queue()
        self.watcher = asyncio.create_task(self.end_with_client(receive))

    def send(self, event):
        """Send (Token, why it ends, the prompt's Tokens, how many were cached), as in Rows.step, or an exception."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def end_with_client(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.front.open.pop(self, None)
        self.send(HTTPException(499, "the client has gone"))

    async def choices(self):
        """Yield entries of `choices`: for a stream whenever there is new text, else one. At the end, free the row."""
        request = self.request
        chat = self.ask["chat"]
        stream = self.ask["stream"]
        tokenizer = self.front.tokenizer
        text = Text(tokenizer, request["ids"], self.ask["stop"], request["min_tokens"])
        tokens = []
        role = {"role": "assistant"}
        new, offsets = self.ask["echoes"][self.index]
        begin = len(new)
        try:
            while not self.finish:
                event = await self.events.get()
                if isinstance(event, Exception):
                    raise event
                token, finish, scored, cached = event
                check(finish != "error", "the logits are NaN or infinite: see --dtype", 500)
                answer, finish = ([token], finish) if self.ask["max_tokens"] else ([], "length")
                self.count += len(answer)
                self.cached += cached
                tokens += [*scored, *answer]
                offsets += [begin + text.size] * len(answer)
                ids = [each.id for each in answer if finish != "stop"]  # end-of-sequence has no text
                more, self.finish = text.push(ids, finish)
                new += more
                if self.finish or (new and stream):
                    message = {"delta" if stream else "message": role | {"content": new}}
                    logprobs = None if request["logprobs"] is None else logprobs_of(tokens, offsets, chat, tokenizer)
                    said = message if chat else {"text": new}
                    yield {"index": self.index, **said, "logprobs": logprobs, "finish_reason": self.finish}
                    # a delta has only what is new: clients join them
                    new = ""
                    tokens = []
                    offsets = []
                    role = {}
        finally:
            self.front.open.pop(self, None)
            times = time.monotonic() - self.start, self.finish or "cut"
            LOG.info("answer to %d tokens: %d tokens in %.2f s, %s", len(request["ids"]), self.count, *times)

    async def stream(self, head):
        """Yield server-sent events."""
        try:
            async for choice in self.choices():
                yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
            if self.ask["stream_options"].get("include_usage"):
                yield f"data: {json.dumps(head | {'choices': [], 'usage': usage([self])})}\n\n"
            yield "data: [DONE]\n\n"
        except HTTPException as e:
            yield f"data: {error(e)}\n\n"


def usage(answers):
    counts = [(len(answer.request["ids"]), answer.count, answer.cached) for answer in answers]
    prompt, count, cached = map(sum, zip(*counts, strict=True))
    tokens = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    return tokens | {"prompt_tokens_details": {"cached_tokens": cached}}


class Front:
    """The HTTP server, in a thread of rank 0. The main thread takes answers from `open` and sends them tokens."""

    deadline = None  # after SIGTERM: until when requests may go on
    tokenizer = None  # until the model is loaded

    def __init__(self, args, listener):
        self.model = args.name or os.path.basename(os.path.abspath(args.checkpoint))
        self.api_key = args.api_key or os.environ.get("LADDER_API_KEY")
        self.max_open = args.rows + args.queue
        self.origins = args.allow_origin
        self.address = address, port = listener.getsockname()[:2]
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        local = address == "::1" or address.startswith("127.")
        self.hosts = {"localhost", address, args.host.lower()} if local and not self.api_key else None
        self.open = {}  # {answer that waits or runs: None}, in order
        self.rows = {}  # {number of a row: its last answer}
        self.wake = threading.Event()
        headers = {"Content-Security-Policy": CONTENT_POLICY}
        page = HTMLResponse(Path(__file__).with_name("page.html").read_text(), headers=headers)
        routes = [Route("/", lambda _: page), Route("/health", self.health)]
        routes += [Route(f"/v1/models{name}", self.models) for name in ("", "/{name:path}")]
        routes += [Route(f"/v1/{chat}completions", self.complete, methods=["POST"]) for chat in ("", "chat/")]
        handlers = {
            HTTPException: lambda _, e: Response(error(e), e.status_code, e.headers, "application/json"),
            ClientDisconnect: lambda *_: Response(),
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        if args.allow_origin:
            app.add_middleware(CORSMiddleware, allow_origins=args.allow_origin, allow_methods="*", allow_headers="*")
        if args.log:
            logging.basicConfig(format="%(asctime)s %(message)s")
        quiet = {"lifespan": "off", "log_config": None, "log_level": "info" if args.log else "error"}
        quiet |= {"access_log": args.log, "http": Connection, "timeout_graceful_shutdown": 1}
        self.server = uvicorn.Server(uvicorn.Config(app, **quiet))
        self.thread = threading.Thread(target=self.server.run, args=[[listener]], daemon=True)
        self.thread.start()
        ending.at_end.append(self.close)

    def ready(self, job):
        """Begin to answer: the model is loaded."""
        self.limits = job.config.vocab_size, job.max_new_tokens + 1, self.max_open
        # a tokenizer encodes one text at a time, so long texts have another one
        tokenizers = job.tokenizer, load_tokenizer(job.args.checkpoint, job.config.vocab_size)
        self.encoders = [(tokenizer, ThreadPoolExecutor(1)) for tokenizer in tokenizers]
        token_text(job.tokenizer, 0)  # fills its cache before the first request
        self.tokenizer = job.tokenizer

    # ---- In its own thread

    def admit(self, request, key=True):
        """Raise HTTPException for a wrong key, a foreign web page, or a server that is loading or stopping."""
        if self.hosts:  # no key, so a foreign page could send requests, and read answers if its name resolves here
            site = request.headers.get("sec-fetch-site")
            host = request.headers.get("host", "localhost")  # HTTP/1.0, which browsers do not speak, may have none
            host = re.fullmatch(r"\[?(.*?)\]?(:\d*)?", host)[1].lower()
            known = site != "cross-site" or {"*", request.headers.get("origin")} & {*self.origins}
            words = f"a web page elsewhere and the name {host!r} need a server with --api-key"
            check(host in self.hosts and known, f"{words}, and such a page --allow-origin", 403)
        if key and self.api_key:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.lstrip(" ").encode("latin-1"), self.api_key.encode())
            check(right and scheme.lower() == "bearer", "Incorrect API key", 401, {"WWW-Authenticate": "Bearer"})
        check(not self.deadline, "the server is stopping", 503)
        check(self.tokenizer, "loading: the model is not ready yet", 503)

    async def health(self, request):
        self.admit(request, key=False)
        return JSONResponse({"status": "ok", "requests": len(self.open)})

    async def models(self, request):
        self.admit(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "ladder-fast"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        check_model(request.path_params["name"], self.model)
        return JSONResponse(model)

    async def complete(self, request):
        self.admit(request)
        data = bytearray()
        chat = "chat" in request.scope["path"]
        try:
            async for chunk in request.stream():
                data += chunk
                check(len(data) <= MAX_BODY_BYTES, f"the body has more than {MAX_BODY_BYTES} bytes", 413)
            tokenizer, thread = self.encoders[len(data) > LONG_TEXT]
            body = bytes(data), chat, self.model, tokenizer, *self.limits
            ask = await asyncio.get_running_loop().run_in_executor(thread, parse, *body)
        except InputError as e:
            raise HTTPException(400, str(e)) from None
        except ProcessLost as e:
            LOG.error("%s", e)
            raise HTTPException(500, str(e)) from None
        full = len(self.open) + len(ask["requests"]) > self.max_open
        check(not full, f"{len(self.open)} requests run or wait: try again later", 429)
        answers = [Answer(self, ask, index, request.receive) for index in range(len(ask["requests"]))]
        self.open |= dict.fromkeys(answers)
        self.wake.set()
        kind = "chat.completion" + ".chunk" * ask["stream"] if chat else "text_completion"
        head = {"id": os.urandom(12).hex(), "object": kind, "created": int(time.time()), "model": self.model}
        if ask["stream"]:
            return StreamingResponse(answers[0].stream(head), media_type="text/event-stream")
        choices = await asyncio.gather(*(anext(answer.choices()) for answer in answers))
        return JSONResponse(head | {"choices": choices, "usage": usage(answers)})

    # ---- In the main thread

    def close(self):
        self.deadline = 1
        for answer in [*self.open]:
            answer.send(HTTPException(503, "the server has stopped"))
        self.server.should_exit = True
        self.thread.join(3)

    def changes(self, rows):
        """Return the changes before the next pass, [(number of a row, a request to start, or None to end its own)].

        Return None to end the server. Waits while all rows are free.
        """
        while True:
            self.wake.clear()
            waiting = [answer for answer in [*self.open] if answer not in self.rows.values()]
            changes = [(i, None) for i, row in enumerate(rows) if row.request and self.rows[i] not in self.open]
            free = [i for i, row in enumerate(rows) if not row.request or (i, None) in changes]
            idle = len(free) == len(rows) and not waiting
            if self.deadline and (idle or time.monotonic() > self.deadline):
                return None
            if free and waiting:  # in the row with most of its prompt cached, else the one unused for longest
                answer = waiting[0]
                i = max(free, key=lambda i: (rows[i].cached(answer.request["ids"]), -rows[i].used))
                self.rows[i] = answer
                changes.append((i, answer.request))
            if changes or rows.busy:
                return changes
            self.wake.wait(0.2)  # with a timeout, since a signal's handler cannot safely set it

    def post(self, taken):
        """Send the answers what Rows returned."""
        for i, token, finish, scored, cached in taken:
            if finish:
                self.open.pop(self.rows[i], None)
            self.rows[i].send((token, finish, scored, cached))


@torch.inference_mode()
def serve(world, rows, front):
    """Serve until SIGTERM, on all ranks. front: None but on rank 0."""
    post = front.post if front else lambda *_: None
    while True:
        shares_changes = not rows.busy
        if shares_changes:
            progress.at("the wait for a request", timed=world.rank > 0)  # on other ranks it ends when rank 0 goes on
        changes = front.changes(rows) if front else []
        if rows.busy and not world.alone:  # most passes change nothing, and a flag is gathered faster than a text
            flag = torch.tensor([changes != []], dtype=torch.int32, device=world.device)
            shares_changes = bool(rows.runner.model.comm.all_gather(flag)[0])
        if shares_changes:
            changes = world.gather(changes)[0]
        if changes is None:
            return
        for i, request in changes:
            if request:
                rows.start(i, request)
            else:
                rows[i].request = None
        if rows.busy:
            post(rows.step())


def parse_flags(argv):
    p = flags.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder of weights with a tokenizer, e.g. demo")
    g.add_argument("--dtype", **flags.one_of(checkpoint.DTYPES), help="default: the checkpoint's own")
    g.add_argument("--compile", action="store_const", const="decode", help="torch.compile; needs a C++ compiler")
    flags.add_rank_flags(g, sharded=True)
    flags.add_wiring_flags(p)
    g = p.add_argument_group("server")
    g.add_argument("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0: of all networks")
    g.add_argument("--port", type=flags.number(int, 0, 65535), default=8000, help="0 for any that is free")
    g.add_argument("--rows", type=flags.count, default=4, metavar="N", help="requests that are decoded at once")
    g.add_argument("--context", type=flags.number(int, 2), default=CHAT_CONTEXT, metavar="N", help="tokens of a row")
    g.add_argument("--queue", type=flags.number(int, 0), default=64, metavar="N", help="requests that wait for a row")
    g.add_argument("--api-key", metavar="TEXT", help="what clients must send; unseen by ps: LADDER_API_KEY")
    g.add_argument("--name", metavar="TEXT", help="of the model, for clients; default: the checkpoint's folder")
    words = "a web page's, e.g. https://chat.example, whose scripts may read answers; * for any; may be repeated"
    plain = {"type": lambda text: text.rstrip("/"), "metavar": "ORIGIN"}  # as browsers send it
    g.add_argument("--allow-origin", action="append", default=[], **plain, help=words)
    g.add_argument("--log", action="store_true", help="a line on stderr for each request, without its text")
    return p.parse_args(argv)


def main(argv=None):
    args = parse_flags(argv)
    world = launch.join(args.device, {name: value for name, value in vars(args).items() if name != "api_key"})
    with world.together():
        try:
            family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
            listener = socket.create_server((args.host, args.port), family=family) if world.rank == 0 else None
        except OSError as e:
            raise InputError(f"--host {args.host} --port {args.port}: {e}") from None
    front = Front(args, Listener(fileno=listener.detach())) if listener else None
    with world.together():
        context = min(args.context, checkpoint.read_config(args.checkpoint).max_seq_len)
    batch = f"--prompt ids:0 --batch {args.rows} --max-new-tokens {max(1, context - 1)} --checkpoint".split()
    batch = vars(generate.parse_generation_flags(None, [*batch, args.checkpoint])) | vars(args)
    job = Job(argparse.Namespace(**batch), world)  # as for such a batch
    if job.tokenizer is None:
        raise InputError(f"{args.checkpoint} has no tokenizer")
    world.say(f"loading {args.checkpoint} ...")
    runner, _ = generate.make_runner(job)
    rows = Rows(runner, job.config.eos_ids)
    if args.compile:
        from ladder.kernels import compiling

        for size in [size for size in rows.runners if size < args.rows]:
            compiling.warm_up(rows.runners[size], [[0]] * size, job.max_new_tokens, job.sampler)

    def drain(number, frame):
        signal.signal(signal.SIGTERM, ending.terminate)  # a second one ends at once
        if front:
            front.deadline = time.monotonic() + DRAIN_SECONDS

    signal.signal(signal.SIGTERM, drain)
    if front:
        sys.setswitchinterval(5e-5)  # seconds: a pass must not wait for the thread that sends the token before
        front.ready(job)
        world.say(f"listening at {front.url}")
    with runner.passes.unguarded():
        serve(world, rows, front)
    LOG.info("the end, after SIGTERM: %d requests are cut", len(front.open) if front else 0)
