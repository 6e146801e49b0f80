"""extras/sources: pickled checkpoints, also those of strangers."""

import json
import os

import pytest
import torch
from test_convert import check_parity, convert, hf_model, take_state
from test_hostile import check_index, refused

from extras.sources import PickledWeights

PICKLED = "pytorch_model.bin"


def bin_shards(folder):
    """As three pickled shards and their index; q, k and v end up in different ones."""
    state = take_state(folder)
    weight_map = {n: f"pytorch_model-{i % 3 + 1:05d}-of-00003.bin" for i, n in enumerate(sorted(state))}
    for file in set(weight_map.values()):
        torch.save({n: state[n] for n, f in weight_map.items() if f == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def old_bin(folder):
    """As PyTorch wrote files before 1.6."""
    torch.save(take_state(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("rewrite", [bin_shards, old_bin])
def test_pickled_sources(rewrite, tmp_path):
    theirs = hf_model("llama3.2-tied")
    theirs.save_pretrained(tmp_path / "hf")
    rewrite(tmp_path / "hf")
    check_parity(convert(tmp_path / "hf", tmp_path / "ours"), theirs)


def test_an_index_names_files_of_its_own_folder_alone(tmp_path):
    check_index(PickledWeights, "pytorch_model.bin.index.json", tmp_path)


def test_truncated_weights(tmp_path):
    torch.save({"a": torch.zeros(1000)}, path := tmp_path / PICKLED)
    os.truncate(path, path.stat().st_size - 1000)
    refused("pytorch_model.bin is missing, truncated", PickledWeights, tmp_path)


class Called:
    """Calls a function when its pickle is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_pickle_holds_tensors_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in Called(os.mkdir, "ran"), {"a": Called(os.mkdir, "ran")}:
        for zipped in True, False:
            torch.save(value, PICKLED, _use_new_zipfile_serialization=zipped)
            refused("pytorch_model.bin", PickledWeights, tmp_path)
    assert not (tmp_path / "ran").exists()
