"""Folders that bring Python files along: our classes read them, their code is not run, and ours is never sent along."""

from __future__ import annotations

import builtins
import json
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers import (
    ZayaForCausalLM as NativeZaya,
)

import zaya_hf
from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import differing, edit_config, files, tiny_model
from zaya_hf import ZayaConfig, ZayaForCausalLM, ZayaForSequenceClassification, ZayaModel

AUTO_MAP = {
    "AutoConfig": "configuration_zaya.ZayaConfig",
    "AutoModel": "modeling_zaya.ZayaModel",
    "AutoModelForCausalLM": "modeling_zaya.ZayaForCausalLM",
    "AutoModelForSequenceClassification": "modeling_zaya.ZayaForSequenceClassification",
    "AutoTokenizer": ["tokenization_zaya.ZayaTokenizer", None],
}
CLASSES = {
    AutoModel: ZayaModel,
    AutoModelForCausalLM: ZayaForCausalLM,
    AutoModelForSequenceClassification: ZayaForSequenceClassification,
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *a: pytest.fail("somebody was asked a question"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        warnings.filterwarnings("ignore", message=".*newly initialised.*")
        yield


@pytest.fixture(params=["combined", "original"])
def folder(request, tmp_path) -> Path:
    """A folder with code; each file leaves a mark when it runs."""
    model = tiny_model(num_hidden_layers=2, skip_expert="identity")
    place = tmp_path / "model"
    if request.param == "combined":
        model.save_pretrained(place)
    else:
        write_checkpoint(place, original_tensors(model), original_config(model.config))
    edit_config(place, auto_map=AUTO_MAP)
    for name in ("configuration_zaya", "modeling_zaya", "tokenization_zaya"):
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise RuntimeError('ran')\n")
    return place


@pytest.mark.parametrize("trust", [None, False, True])
def test_code_in_a_folder_is_not_run(folder, trust):
    model = tiny_model(num_hidden_layers=2, skip_expert="identity")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    assert type(config) is ZayaConfig
    assert type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust)) is ZayaForCausalLM
    for auto_class, ours in CLASSES.items():
        loaded = auto_class.from_pretrained(folder, trust_remote_code=trust)
        assert type(loaded) is ours
    for loaded in (
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust),
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, config=config),
        ZayaForCausalLM.from_pretrained(folder, trust_remote_code=trust),
    ):
        assert differing(loaded, model) == []
    assert not (folder.parent / "ran").exists()
    assert not any(name.startswith("transformers_modules") and "zaya" in name for name in sys.modules)


def test_a_saved_folder_does_not_point_at_code_that_it_lacks(folder, tmp_path):
    for number, loaded in enumerate(
        (AutoModelForCausalLM.from_pretrained(folder), ZayaForCausalLM.from_pretrained(folder))
    ):
        out = tmp_path / str(number)
        loaded.save_pretrained(out)
        assert "auto_map" not in json.loads((out / "config.json").read_text())
        assert not [name for name in files(out) if name.endswith(".py")]
        # where zaya_hf is not imported, trusting remote code changes nothing either
        zaya_hf.unregister()
        try:
            native = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
        finally:
            zaya_hf.register()
        assert type(native) is NativeZaya
        assert torch.equal(native.model.norm.weight, loaded.model.norm.weight)


@pytest.mark.parametrize("folder", ["combined"], indirect=True)  # transformers' own class reads no other
def test_a_config_of_transformers_own_class_loses_the_pointers_too(folder):
    zaya_hf.unregister()
    try:
        native = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    finally:
        zaya_hf.register()
    assert native.auto_map == AUTO_MAP
    assert not hasattr(ZayaConfig.from_native(native), "auto_map")


@pytest.mark.parametrize("cls", [ZayaConfig, ZayaModel, ZayaForCausalLM, ZayaForSequenceClassification])
def test_our_own_classes_are_not_sent_along(tmp_path, cls):
    for arguments in ((), ("AutoModelForCausalLM",)):
        with pytest.raises(ValueError) as error:
            cls.register_for_auto_class(*arguments)
        said = str(error.value)
        assert said.startswith(f"{cls.__name__}.register_for_auto_class: a saved folder needs no code")
        assert "\n" not in said
    assert cls._auto_class is None
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    assert not [name for name in files(tmp_path) if name.endswith(".py")]


def test_a_class_of_the_user_s_own_is(tmp_path, monkeypatch):
    """Its file imports zaya_hf by name, so it works where that is installed."""
    (tmp_path / "with_a_twist.py").write_text(
        textwrap.dedent("""
            from zaya_hf import ZayaConfig, ZayaForCausalLM

            class TwistedConfig(ZayaConfig):
                model_type = "twisted_zaya"

            class Twisted(ZayaForCausalLM):
                config_class = TwistedConfig
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import with_a_twist

    with_a_twist.Twisted.register_for_auto_class("AutoModelForCausalLM")
    with_a_twist.TwistedConfig.register_for_auto_class()
    config: Any = with_a_twist.TwistedConfig(**tiny_model(num_hidden_layers=1).config.to_dict() | {"model_type": "x"})
    model = with_a_twist.Twisted(config)
    model.save_pretrained(tmp_path / "out")
    assert "with_a_twist.py" in files(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["auto_map"]["AutoModelForCausalLM"] == "with_a_twist.Twisted"
    assert ZayaForCausalLM._auto_class is None
