"""Start extras/training/adapt.py: retrain a model, or train one from scratch. python adapt.py --help"""

if __name__ == "__main__":
    from extras.training.adapt import main
    from ladder.ranks.launch import run

    run(main)
