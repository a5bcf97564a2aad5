"""What `ops.selection` reads, and what follows from it on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

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
    assert selection.said("router") == ["of a test"]
    assert selection.said("linear") == []
