"""How large the project is, in how many places each idea stands, and whether either has grown: make size.

benchmarks/size.json holds the numbers that were last agreed on. Where one has grown, the exit code is 1: look first
for what the new thing makes superfluous, and for the one file where it belongs. `python -m benchmarks.size --agree`
writes today's numbers; numbers that grow are a commit of their own, which gives the reason.

Tokens are counted, not lines, so that nothing is gained by squeezing two statements into a line; comments and
docstrings do not count. An idea's places are the files, tests aside, whose code names it: not their comments,
docstrings and messages.
"""

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import generate
from model import Config

ROOT = Path(__file__).parents[1]
AGREED = ROOT / "benchmarks" / "size.json"
IDEAS = {  # {an idea: what names it in code}
    # architectures
    "mixture": r"Mixture|n_experts|\w*shared_expert\w*|expert_groups|experts_per_token|expert_size",
    "latent": r"Latent|latent_attention|LatentAttention|latent_dim|query_rank",
    "linear": r"LinearAttention|linear_attention|GatedDeltaNet|linear_layers",
    "heads": r"Heads|qk_norm|whole_qk_norm|score_cap|window_layers|nope_layers|query_scale|llama4_beta",
    "postnorm": r"PostNorm|PostNormSums|POST_NORMS",
    # wirings
    "farskip": r"\w*farskip\w*|FARSKIP\w*",
    "own partials": r"reads_partials|fixed_shards",
    "lanes": r"LaneWiring|Lanes|LaneSums|lanes_of_rank|load_lanes|fixed_lanes|depends_on_lanes",
    "laneformer": r"\w*[Ll]aneformer\w*|LANEFORMER\w*",
    # what a checkpoint is converted from
    "GGUF": r"\w*gguf\w*|\w*GGUF\w*",
    "GPTQ": r"\w*gptq\w*|\w*GPTQ\w*",
    "MXFP4": r"\w*mxfp4\w*|\w*MXFP4\w*",
    "SentencePiece": r"\w*sentencepiece\w*|\w*SentencePiece\w*",
    # quantization and kernels
    "int4": r"\w*int4\w*|\w*INT4\w*",
    "fp8": r"\w*fp8\w*|\w*FP8\w*|float8_e4m3fn",
    "skinny_gemm": r"skinny_gemm",
    "CUDA graphs": r"cuda_graphs|Graphs|is_current_stream_capturing",
}
LAYOUT = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def tokens(path):
    """Return the tokens of a Python file as texts, without comments, layout and docstrings."""
    result = []
    before = tokenize.NEWLINE
    with open(ROOT / path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            starts_statement = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
            is_docstring = token.type == tokenize.STRING and starts_statement
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                before = token.type
            if token.type not in (*LAYOUT, tokenize.ENCODING) and not is_docstring:
                result.append(token.string)
    return result


def places(code):
    """Return {idea: how many of the files name it}. code: {path: its tokens}.

    A text that is no message, so one word, counts as a name does: a key of config.json, or a kind of quantization.
    """
    words = {path: {text.strip("\"'") for text in texts} for path, texts in code.items()}
    return {
        f"files that name {idea}": sum(any(re.fullmatch(names, word) for word in own) for own in words.values())
        for idea, names in IDEAS.items()
    }


def sizes():
    """Return {what: number}."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    code = {path: tokens(path) for path in listed if path.endswith(".py")}
    cpp = [path for path in listed if path.endswith((".cpp", ".h"))]

    def count(*beginnings):
        return sum(len(own) for path, own in code.items() if path.startswith(beginnings))

    shown = subprocess.check_output([sys.executable, "generate.py", "--help"], cwd=ROOT, text=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        generate.main(["--checkpoint", str(ROOT / "demo"), "--prompt", "Once", "--max-new-tokens", "2"])
    files = {Path(getattr(module, "__file__", None) or "/") for module in [*sys.modules.values()]}
    own = {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)} & code.keys()
    imported = {name for name in own if not name.startswith("benchmarks/") and code[name]}
    tests = count("tests/")
    return {
        "tokens of model.py, tp.py and generate.py": count("model.py", "tp.py", "generate.py"),
        "tokens that a plain prompt imports": sum(len(code[name]) for name in imported),
        "files that a plain prompt imports": len(imported),
        "tokens of extras": count("extras/"),
        "tokens of benchmarks": count("benchmarks/"),
        "tokens that are no test": count("") - tests,
        "tokens of tests": tests,
        "words and signs of C++": sum(len(re.findall(r"\w+|[^\w\s]", (ROOT / path).read_text())) for path in cpp),
        "fields of Config": len(dataclasses.fields(Config)),
        "flags of generate.py": shown.count("\n  --"),
        **places({path: texts for path, texts in code.items() if not path.startswith(("tests/", "benchmarks/size"))}),
    }


def main():
    now = sizes()
    agreed = json.loads(AGREED.read_text()) if AGREED.is_file() else {}
    if "--agree" in sys.argv:
        AGREED.write_text(json.dumps(now, indent=2) + "\n")
    for what, number in now.items():
        print(f"{what:42} {number:7,} {number - agreed.get(what, 0):+7,}")
    grown = [what for what, number in now.items() if number > agreed.get(what, 0)]
    if grown and "--agree" not in sys.argv:
        sys.exit(f"grown: {', '.join(grown)}. See benchmarks/size.py for what to do.")


if __name__ == "__main__":
    main()
