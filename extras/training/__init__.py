"""What adapt.py trains with: documents as packed windows, weights in shards, runs that go on where they were killed."""


def main():
    """Run adapt.py, which imports this folder by name."""
    from extras.training import adapt

    adapt.main()
