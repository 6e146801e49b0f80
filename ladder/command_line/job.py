"""The Job that generate.py's flags ask for."""

import os
import zlib

from ladder.command_line.draft_flag import read_draft
from ladder.command_line.flags import read_config, read_dtype, warn_of_wiring, with_wiring
from ladder.command_line.prompts import fit, is_chat, read_prompts
from ladder.command_line.shares import choose_shares
from ladder.decoding.batch import Sampler
from ladder.memory import warn_of_memory
from ladder.text.tokenizer import load_tokenizer

CHAT_CONTEXT = 4096  # tokens of a chat's cache, at most


class Job:
    """What generate.py's flags ask for, checked on all ranks before one of them loads weights. Raises InputError."""

    def __init__(self, args, world):
        self.args = args
        self.world = world
        with world.together():
            if args.compile:
                from ladder.kernels import compiling

                compiling.prepare(world.device)
            self.sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed, world.device)
            self.name, stored = read_config(args)
            self.config = config = with_wiring(stored, args)
        choose_shares(args, world, config)
        with world.together():
            self.tokenizer = args.checkpoint and load_tokenizer(args.checkpoint, config.vocab_size)
            if args.checkpoint and world.rank == 0:
                warn_of_wiring(stored, config, world.shares)
            for text in filter(os.path.isfile, args.prompt or []):
                world.say(f"{text} is also the name of a file: --prompt @{text} reads a prompt from each of its lines")
            chats = is_chat(args)
            self.prompts = read_prompts(args, config, self.tokenizer)
            context = min(CHAT_CONTEXT, config.max_seq_len) if chats else config.max_seq_len
            self.max_new_tokens, self.slots = fit(args.max_new_tokens, self.prompts, context)
            longest = max(map(len, self.prompts))
            if chats:
                self.slots = context
                if args.chat:
                    world.say("the text of --chat is the system message; to have it answered: --chat --prompt TEXT")
            elif longest + args.max_new_tokens > context:
                room = f"the context of {context} has room for {context - longest} after a prompt of {longest} tokens"
                world.say(f"--max-new-tokens {args.max_new_tokens}: {room}")
            self.draft_source = None
            if args.draft:
                self.draft_source = read_draft(args.draft, config, args.checkpoint)
            warn_of_memory(world, config, read_dtype(args), len(self.prompts), self.slots)
        source = self.draft_source
        contents = {"tokens of the prompts": zlib.crc32(str(self.prompts).encode())}
        contents["--draft"] = source and (source.name, source.count)
        world.agree(contents, checkpoint=args.checkpoint, draft=source and source.folder)  # raises where ranks differ
