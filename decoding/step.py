"""The step of plain decoding: one pass of the model gives the next token of each row.

Shape letters: B batch.
"""

import torch


@torch.inference_mode()  # as everything that runs them: to the compiler, other tensors are another graph
def pad(prompts, device):
    """Return (tokens (B, S), lengths (B,)) of prompts of any lengths, padded on the right."""
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


def last_tokens(texts, device):
    """Return the arguments of Runner.decode for texts of which all but the last token is in the cache."""
    tokens = torch.tensor([text[-1:] for text in texts], device=device)
    positions = torch.tensor([len(text) - 1 for text in texts], device=device)
    return tokens, positions, max(map(len, texts))


def next_tokens(runner, texts, sample):
    """Run one pass of the model; returns the next token ids (B,), on the device."""
    return sample(runner.decode(*last_tokens(texts, runner.device))[:, 0], runner.model.comm)


class RunAhead:
    """next_tokens for a GPU, which gets the next pass before the ids of this one are read: it never waits for the host.

    One for each generation. Nobody reads its very last pass.
    """

    def __init__(self):
        self.ahead = None  # (ids, positions) of the pass in flight

    def __call__(self, runner, texts, sample):
        """Return the next token ids (B,), on the CPU. The texts end in those that were returned last."""
        if self.ahead is None:
            self.ahead = next_tokens(runner, texts, sample), last_tokens(texts, runner.device)[1]
        ids, positions = self.ahead
        read, computed = ids.to("cpu", non_blocking=True), torch.cuda.current_stream(runner.device).record_event()
        context = runner.model.config.max_seq_len  # rows that are done stay at its end
        positions, longest = (positions + 1).clamp(max=context - 1), min(max(map(len, texts)) + 1, context)
        token = ids.clamp(min=0)[:, None]  # -1, not finite, ends the generation as soon as it is read
        self.ahead = sample(runner.decode(token, positions, longest)[:, 0], runner.model.comm), positions
        computed.synchronize()
        return read
