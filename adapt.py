"""Start extras/training/adapt.py: retrain a model, or train one from scratch. python adapt.py --help"""

import os

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads OpenMP, whose spinning threads stall others
    from extras.training.adapt import main
    from ladder.ranks.launch import run

    run(main)
