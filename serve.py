"""Start extras/serve: answer OpenAI's API over HTTP. python serve.py --help"""

if __name__ == "__main__":
    from extras.serve import main
    from ladder.ranks.launch import run

    run(main)
