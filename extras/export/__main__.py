from extras.export.to_hf import main
from ladder.ranks import launch

if __name__ == "__main__":
    launch.run(main)
