"""Files that are written or edited, by hand or by chance."""

import contextlib
import io
import json
import random
import time

from safetensors.torch import load_file, save_file

from ladder.errors import InputError


def read_json(path):
    return json.loads(path.read_text())


def write_json(path, value):
    path.write_text(json.dumps(value))


def read_lines(path):
    """Return the values of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def edit_config(folder, **changes):
    path = folder / "config.json"
    write_json(path, {**read_json(path), **changes})


def take_state(folder):
    """Return the state dict of a folder, whose file goes."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return state


def edit_state(folder, edit):
    """Write a folder's state dict again, as a function has edited it."""
    state = take_state(folder)
    edit(state)
    save_file(state, folder / "model.safetensors")


def change_tensors(folder, changes):
    """Add or replace tensors {name: tensor}, or drop one with None."""
    state = take_state(folder) | changes
    save_file({name: value for name, value in state.items() if value is not None}, folder / "model.safetensors")


# ---------------------------------------------------------------------------------------------------------------------
# By chance: each change is drawn with a fixed seed


SECONDS = 1.2  # of changes in a fast test
NUMBERS = [0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64, 10**30]
NAMES = ["", "..", "../x", "/etc/passwd", "a" * 5000, "\0", "\x1b[31m", "\ud800", "x\ny", "10**(10**10)"]
VALUES = [None, True, 0.5, -0.5, 1e300, float("nan"), *NUMBERS, *NAMES, [], {}, [[]], {"": None}, [99, -1], ["2"]]


def changed_bytes(draw, data):
    """Change, remove, insert or double some bytes, mostly early ones."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(min(len(data), draw.choice([32, 2**10, 2**30])) + 1)
        n = draw.choice([1, 2, 8, 100])
        number = draw.choice(NUMBERS).to_bytes(16, "little", signed=True)[:8]
        piece = draw.choice([b"", draw.randbytes(n), bytes(n), data[at : at + n] * 2, number])
        data[at : at + (len(piece) if draw.random() < 0.5 else n)] = piece
    return bytes(data if draw.random() < 0.9 else data[: draw.randrange(len(data) + 1)])


def changed_json(draw, data):
    """Change, remove, double or rename one value."""
    value = part = json.loads(data)
    while True:
        key = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if not isinstance(part[key], dict | list) or not part[key] or draw.random() < 0.3:
            break
        part = part[key]
    how = draw.randrange(6)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(part, dict):
        part[draw.choice([*NAMES, *part])] = part.pop(key)
    elif how == 2 and isinstance(part, list):
        part.insert(key, part[key])
    else:
        part[key] = draw.choice(VALUES)
    return json.dumps(value).encode()


def check_changes(read, files, folder, seconds):
    """Read a folder again and again, the first of its files changed each time."""
    for file, data in files.items():
        (folder / file).write_bytes(data)
    (file, good), *_ = files.items()
    read(folder)
    works = refusals = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or min(works, refusals) == 0:
        draw = random.Random(works + refusals)
        change = changed_json if file.endswith(".json") and draw.random() < 0.85 else changed_bytes
        (folder / file).write_bytes(change(draw, good))
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                read(folder)
            works += 1
        except InputError as e:
            assert "\n" not in str(e)
            refusals += 1
