"""Load a checkpoint and generate, from Python: no process group, no exit. Run it from the repository's root."""

from generate import complete, load

model, tokenizer = load("demo")  # a ladder; load("demo", wiring="standard") would wire its weights otherwise
prompts = ["Once upon a time", "The dog ran to"]
for prompt, text in zip(prompts, complete(model, tokenizer, prompts, max_new_tokens=60, seed=1), strict=True):
    print(prompt + text, end="\n\n")
