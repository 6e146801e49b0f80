"""Print what llama.cpp continues prompts with, greedily, for test_smollm2.py. It needs llama-cpp-python.

python tests/greedy_of_llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf > tests/greedy_of_llama_cpp.json
"""

import itertools
import json
import sys

import llama_cpp

PROMPTS = "One day, a little dog", "The capital of France is"
model = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
result = {}
for prompt in PROMPTS:
    ids = model.tokenize(prompt.encode(), add_bos=False)
    result[prompt] = ids, list(itertools.islice(model.generate(ids, temp=0.0), 60))
print(json.dumps({"llama_cpp": llama_cpp.__version__, "prompt, continuation": result}))
