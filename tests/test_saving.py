"""Saving: the folder holds one save, whatever happens and whoever else is saving.

The promise under test is the one at the head of `zaya_hf.saving`: a load gives the old model, the new one or an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import PreTrainedModel

from saved_models import contents, differing, files, tiny_model
from zaya_hf import ZayaForCausalLM, saving, temporary_folders


@pytest.fixture(autouse=True)
def _no_stock_warning():
    """Redrawn models have trained skip biases, so each save would warn; `test_loading.py` tests the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        yield


# --- what a save leaves -----------------------------------------------------------------------------------------------


def test_no_file_of_an_earlier_save_survives(tmp_path):
    old, new = tiny_model(1), tiny_model(2)
    old.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 17
    (tmp_path / "notes.txt").write_text("kept")
    (tmp_path / "training.safetensors").write_text("kept")
    new.save_pretrained(tmp_path)
    common = ["config.json", "generation_config.json", "model.safetensors", "notes.txt", "training.safetensors"]
    assert files(tmp_path) == common
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path), new) == []
    # The other way round: a whole file would win over newer shards.
    old.save_pretrained(tmp_path, max_shard_size="100KB")
    assert "model.safetensors" not in files(tmp_path)
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path), old) == []
    new.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 17
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path), new) == []


def test_variants_are_kept_apart(tmp_path):
    plain, variant = tiny_model(1), tiny_model(2)
    plain.save_pretrained(tmp_path, max_shard_size="40KB")
    variant.save_pretrained(tmp_path, variant="other", max_shard_size="40KB")
    variant.save_pretrained(tmp_path, variant="other")
    assert not list(tmp_path.glob("model.other-*")) + list(tmp_path.glob("*index.other.json"))
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path), plain) == []
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path, variant="other"), variant) == []


def test_saving_over_the_folder_that_a_model_was_loaded_from(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path, max_shard_size="40KB")
    assert differing(loaded, model) == []
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path), model) == []


def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    model, other = tiny_model(1), tiny_model(2)
    model.save_pretrained(tmp_path / "out", max_shard_size="40KB")
    before = contents(tmp_path / "out")

    calls = []

    def full_disk(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no space left")
        return save_file(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
        with pytest.raises(OSError, match="no space left"):
            other.save_pretrained(tmp_path / "out", max_shard_size="40KB")
    assert contents(tmp_path / "out") == before
    other.config.num_experts = 0
    with pytest.raises(ValueError, match="num_experts=0"):
        other.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        model.save_pretrained(tmp_path / "file")


def test_push_happens_after_the_folder_is_complete(tmp_path, monkeypatch):
    pushed = []

    def push(self, repo_id, **kwargs):
        pushed.append((repo_id, kwargs, files(tmp_path / "out")))

    monkeypatch.setattr(ZayaForCausalLM, "push_to_hub", push)
    tiny_model().save_pretrained(tmp_path / "out", push_to_hub=True, commit_message="first", token="secret")
    arguments = {"commit_message": "first", "token": "secret", "max_shard_size": "50GB"}
    assert pushed == [("out", arguments, ["config.json", "generation_config.json", "model.safetensors"])]


# --- several processes ------------------------------------------------------------------------------------------------


def test_only_the_main_process_touches_the_folder(tmp_path, monkeypatch):
    tiny_model(1).save_pretrained(tmp_path / "out")
    before, places = contents(tmp_path / "out"), []
    stock = PreTrainedModel.save_pretrained

    def spy(self, save_directory, *args, **kwargs):
        places.append(Path(save_directory))
        assert kwargs["is_main_process"] is False
        return stock(self, save_directory, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", spy)
    for folder in (tmp_path / "out", tmp_path / "new" / "inner"):
        tiny_model(2).save_pretrained(folder, is_main_process=False, max_shard_size="40KB")
    # It ran, because gathering the tensors of a sharded model needs all processes, and elsewhere.
    assert len(places) == 2
    assert not any(place.exists() or tmp_path in place.parents for place in places)
    assert contents(tmp_path / "out") == before
    assert files(tmp_path) == ["out"]


def test_other_processes_in_between_change_nothing(tmp_path, monkeypatch):
    """The others' whole save runs at the worst moment of the main one's: its folder is there, and still empty."""
    model, folder = tiny_model(1), tmp_path / "out"
    real, asked = tempfile.mkdtemp, []

    def mkdtemp(*args, **kwargs):
        if kwargs.get("dir") == folder and not asked:
            asked.append(files(folder))
            tiny_model(2).save_pretrained(folder, is_main_process=False)
        return real(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    model.save_pretrained(folder)
    assert asked == [[]]
    assert differing(ZayaForCausalLM.from_pretrained(folder), model) == []


def test_a_folder_that_disappears_does_not_hide_the_error(tmp_path):
    def save(aside):
        shutil.rmtree(tmp_path / "out")
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        saving.save_aside(tmp_path / "out", None, save)


# --- a save that does not finish --------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process: whatever would still change the disk raises it again."""


class Disk:
    """Counts the changes that a save makes to the disk and fails at the given one."""

    def __init__(self, monkeypatch, fail_at, error):
        self.count, self.fail_at, self.error, self.failed = 0, fail_at, error, False
        for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, real):
        def change(*args, **kwargs):
            self.count += 1
            if self.count == self.fail_at or (self.failed and self.error is Killed):
                self.failed = True
                raise self.error("stopped here")
            return real(*args, **kwargs)

        return change


THETA = {"hybrid": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}}
# What the new save changes beside the weights. Other angles or settings fit the old tensors: nothing but the order of
# the moves keeps such a mix from loading.
CHANGES = {"weights": {}, "angles": {"rope_parameters": THETA}, "depth": {"num_hidden_layers": 2}, "settings": {}}
SIZES = {"single": "5GB", "sharded": "60KB", "other shards": "100KB"}
FORMS = [
    ("single", "single"),
    ("single", "sharded"),
    ("sharded", "single"),
    ("sharded", "sharded"),
    ("sharded", "other shards"),
]


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Folders and models of old and new saves: (which, what it changes, size) -> (folder, model)."""
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, changes in CHANGES.items():
            for seed, which in ((1, "old"), (2, "new")):
                model = tiny_model(seed, **{"num_hidden_layers": 1, **(changes if which == "new" else {})})
                if what == "settings" and which == "new":
                    model.generation_config.max_new_tokens = 7
                for form, size in SIZES.items():
                    folder = tmp_path_factory.mktemp("saved")
                    model.save_pretrained(folder, max_shard_size=size)
                    made[which, what, form] = folder, model
    return made


def found(folder, models):
    """Which of the models a folder loads as; "error" if it says that it is not whole. Anything else fails."""
    if not (folder / "config.json").exists():
        with pytest.raises(FileNotFoundError, match=r"has no config\.json(; a save into it did not finish .*)?$"):
            ZayaForCausalLM.from_pretrained(folder)
        return "error"
    loaded = ZayaForCausalLM.from_pretrained(folder)
    for which, model in models.items():
        one, other = loaded.state_dict(), model.state_dict()
        if set(one) == set(other) and all(one[name].shape == other[name].shape for name in one):
            same_rope = loaded.config.rope_parameters["hybrid"] == model.config.rope_parameters["hybrid"]
            if not differing(one, other) and same_rope:
                assert loaded.generation_config.max_new_tokens == model.generation_config.max_new_tokens, (
                    "settings of the other save"
                )
                return which
    raise AssertionError(f"a mix of two saves loads: {files(folder)}")


def copy_into(source):
    return lambda aside: [shutil.copy(path, aside) for path in source.iterdir()]


@pytest.mark.parametrize("error", [Killed, OSError])
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(("before", "after"), FORMS, ids=[" to ".join(form) for form in FORMS])
def test_a_save_that_stops_anywhere_leaves_no_mix(tmp_path, saves, before, after, what, error):
    old_folder, old = saves["old", what, before]
    new_folder, new = saves["new", what, after]
    models, outcomes = {"old": old, "new": new}, []
    while True:
        folder = tmp_path / str(len(outcomes))
        shutil.copytree(old_folder, folder)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, len(outcomes) + 1, error)
            try:
                saving.save_aside(folder, None, copy_into(new_folder))
            except error:
                assert disk.failed
        outcomes.append(found(folder, models))
        if error is OSError and outcomes[-1] == "old" and disk.failed:
            # Put back, but for the index that an old single file outranks.
            left = contents(folder)
            assert {name: left[name] for name in files(old_folder)} == contents(old_folder)
        if not disk.failed:
            break
        if error is OSError:
            continue
        # Whatever was left, the next save makes it whole and removes what is not its own.
        temporary_folders._IN_USE.clear()  # the killed process is gone
        saving.save_aside(folder, None, copy_into(new_folder))
        assert found(folder, models) == "new"
        assert not any(name.startswith(".") for name in files(folder))
        assert len(files(folder)) == len(files(new_folder))
    assert outcomes[-1] == "new"
    assert len(outcomes) > 3
    assert outcomes == sorted(outcomes, key=["old", "error", "new"].index), "in the order old, error, new"
    # Only where more than the weights changes is there a moment without a model, and it is short.
    moments = outcomes.count("error")
    assert moments == 0 if what == "weights" else moments <= (6 if error is Killed else 1)


def test_a_first_save_that_stops_leaves_nothing_that_loads(tmp_path, saves):
    new_folder, new = saves["new", "weights", "sharded"]
    assert len(list(new_folder.glob("model-*"))) > 2
    for fail_at in range(1, 30):
        folder = tmp_path / str(fail_at)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, fail_at, Killed)
            try:
                saving.save_aside(folder, None, copy_into(new_folder))
            except Killed:
                assert found(folder, {"new": new}) in ("error", "new")
        if not disk.failed:
            break
    assert not disk.failed
    assert contents(folder) == contents(new_folder)


def test_shards_never_fill_names_that_an_old_index_lists(tmp_path, saves):
    old_folder, _ = saves["old", "weights", "sharded"]
    new_folder, new = saves["new", "weights", "sharded"]
    folder = tmp_path / "out"
    shutil.copytree(old_folder, folder)
    gone = list(folder.glob("model-*"))
    for path in gone:
        path.unlink()
    saving.save_aside(folder, None, copy_into(new_folder))
    assert len(gone) == len(list(folder.glob("model-*"))) > 2
    assert not any(path.exists() for path in gone)
    assert found(folder, {"new": new}) == "new"
    # The plain names come back with the save after it.
    saving.save_aside(folder, None, copy_into(new_folder))
    assert contents(folder) == contents(new_folder)


def test_leftovers_of_processes_that_are_gone_are_removed(tmp_path):
    prefix = temporary_folders.host_prefix(".saving")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, own = f"{prefix}{ended.pid}-abc", f"{prefix}{os.getpid()}-abc"
    kept = [f"{prefix}{os.getppid()}-abc", f".saving-another_host-{ended.pid}-abc", ".saving-notes"]
    for name in (gone, own, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("")
    during = []
    saving.save_aside(tmp_path, None, lambda aside: during.extend([*files(tmp_path), aside.name]))
    assert files(tmp_path) == sorted(kept)
    assert re.fullmatch(re.escape(prefix) + rf"{os.getpid()}-\w+", during[-1])
    assert gone not in during
    assert own not in during


def test_two_saves_of_one_process_leave_each_other_s_files(tmp_path):
    """As from two threads: the second one starts and ends while the first is writing."""

    def save(aside):
        (aside / "config.json").write_text("{}")
        saving.save_aside(tmp_path, None, lambda inner: None)
        assert files(aside) == ["config.json"]
        raise ValueError("done")

    with pytest.raises(ValueError, match="done"):
        saving.save_aside(tmp_path, None, save)


def test_places_that_cannot_be_a_folder_are_refused_with_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = files(tmp_path)
    for name, message in (
        ("file", "file is a file; give a folder to save into"),
        ("file/inner", "file is a file; .*/file/inner would lie inside it"),
        ("file/inner/deep", "file is a file; .*/file/inner/deep would lie inside it"),
        ("link", "link is a link to .*/nowhere, which does not exist"),
        ("link/inner", "link is a link to .*/nowhere, which does not exist; .*/link/inner would lie inside it"),
    ):
        for main in (True, False):
            with pytest.raises(NotADirectoryError) as caught:
                tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / name, is_main_process=main)
            text = str(caught.value)
            assert "\n" not in text
            assert re.search(message.replace("; .*/", r"; .*\(.*/"), text), text
    assert files(tmp_path) == before
    (tmp_path / "nowhere").mkdir()
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "link")
    assert "config.json" in files(tmp_path / "nowhere")
