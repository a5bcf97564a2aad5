"""What `ops.selection` reads, and what follows from it on a machine without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from zaya_hf import ops
from zaya_hf.ops import selection

CPU = torch.device("cpu")
OTHERWISE = ("fused", "few passes")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", {}),
        ("triton", dict.fromkeys(ops.OPERATORS, "triton")),
        ("experts=reference", {"experts": "reference"}),
        (" auto , experts = reference,router=triton ", {"experts": "reference", "router": "triton"}),
        ("reference,cca_mix=auto", dict.fromkeys(set(ops.OPERATORS) - {"cca_mix"}, "reference")),
    ],
)
def test_what_is_asked_for(text: str, expected: dict[str, str]) -> None:
    with selection.use(text):
        assert {name: selection.requested(name) for name in ops.OPERATORS} == dict.fromkeys(
            ops.OPERATORS, "auto"
        ) | expected
        assert selection.is_default() == (not expected)
        with selection.use(selection.description()):  # what is described can be asked for
            assert {name: selection.requested(name) for name in ops.OPERATORS} == dict.fromkeys(
                ops.OPERATORS, "auto"
            ) | expected
    assert selection.is_default()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fastest", "ZAYA_OPS is 'fastest'; expected one of: auto, reference, triton"),
        ("auto,expert=reference", "ZAYA_OPS names the operator 'expert'; there are: cca_mix, cca_step"),
        ("router=", "expected one of"),
        ("router=fast", "expected one of"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), selection.use(text):
        pass
    assert selection.is_default()


def test_a_wrong_environment_variable_is_one_line() -> None:
    environment = os.environ | {"ZAYA_OPS": "router=fast", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", "import zaya_hf.ops"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("ValueError: ZAYA_OPS is 'router=fast'; expected one of")


def test_without_a_gpu_kernels_are_declined_with_the_reason() -> None:
    assert not selection.wants_triton("cca_mix", CPU)
    assert selection.outcome("cca_mix", CPU, OTHERWISE) == OTHERWISE
    with selection.use("triton"):
        assert selection.wants_triton("cca_mix", CPU)
        backend, why = selection.outcome("cca_mix", CPU, OTHERWISE)
    assert backend == "fused"
    assert "TRITON_INTERPRET=1" in why
    with selection.use("auto", cca_mix="reference"):
        assert not selection.wants_triton("cca_mix", CPU)
        assert selection.outcome("cca_mix", CPU, OTHERWISE) == ("reference", "ZAYA_OPS=auto,cca_mix=reference")
    assert "'meta'" in str(selection.triton_declines(torch.device("meta")))


def test_a_transform_of_torch_func_declines() -> None:
    seen = []
    torch.func.grad(lambda x: seen.append(selection.triton_declines(CPU)) or x.sum())(torch.ones(2))
    assert "torch.func" in seen[0]


def test_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(selection.logger, "warning", said.append)
    monkeypatch.setattr(selection, "_said", {})
    for _ in range(3):
        selection.say_once("router", "of a test")
        selection.say_once("experts", "of a test")
    assert said == [f"zaya_hf.ops.{name}: not Triton's kernels, since of a test." for name in ("router", "experts")]
    assert selection.said("router") == selection.said("experts") == ["of a test"]
    monkeypatch.setattr(selection, "_of_any_operator", {"of the machine"})
    for name in ("router", "experts"):
        selection.say_once(name, "of the machine")
        assert "of the machine" in selection.said(name)
    assert said[2:] == ["zaya_hf.ops: not Triton's kernels, since of the machine."]
    selection.say_once("router", "of the machine")
    assert len(said) == 3
    assert selection.said("linear") == []


class TestTritonThatCannotRun:
    """Without a GPU, asked for interpreted kernels: declined with the reason, and nothing raises."""

    @pytest.fixture(autouse=True)
    def _asked(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip("triton")
        importlib.import_module("zaya_hf.ops.common.triton")  # as long as nothing is to be interpreted
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        selection._look_at_device.cache_clear()
        yield
        selection._look_at_device.cache_clear()

    def decided(self) -> tuple[str, str]:
        with selection.use("triton"):
            return selection.outcome("cca_mix", CPU, OTHERWISE)

    def test_asked_for_too_late(self) -> None:
        backend, why = self.decided()
        assert (backend, "was set after Triton had been imported" in why) == ("fused", True), why

    def test_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = importlib.import_module("zaya_hf.ops.common.triton")
        monkeypatch.setattr(kernels, "version", lambda: (3, 5))
        backend, why = self.decided()
        assert (backend, "triton is 3.5; kernels need 3.6 or newer" in why) == ("fused", True), why

    def test_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(importlib.import_module("zaya_hf.ops.common"), "triton", raising=False)
        monkeypatch.setitem(sys.modules, "zaya_hf.ops.common.triton", None)
        backend, why = self.decided()
        assert (backend, "triton cannot be imported (" in why) == ("fused", True), why

    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        backend, why = self.decided()
        assert (backend, "pip install zaya_hf[kernels]" in why) == ("fused", True), why
