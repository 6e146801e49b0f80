"""Start extras/serve: answer OpenAI's API over HTTP. python serve.py --help"""

import os

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads OpenMP, whose spinning threads stall others
    from extras.serve import main
    from ladder.ranks.launch import run

    run(main)
