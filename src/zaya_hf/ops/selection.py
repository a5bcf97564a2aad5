"""Which implementation of the operators runs: the fastest that is known, Triton's kernels, or the definitions.

The environment variable ``ZAYA_OPS`` says it for a process, `use` for a block of code. Either may single out operators:
``ZAYA_OPS=auto,experts=reference``. What is asked for and cannot be had is said once, and something else runs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

#: "auto": Triton's kernels on GPUs that they are made for, on a CPU what is fastest there, else the definition;
#: "triton": the kernels wherever they can run, else as "auto" without them; "reference": the definition.
CHOICES = ("auto", "reference", "triton")
#: operators that can be singled out
OPERATORS = ("cca_mix", "cca_step", "experts", "linear", "linear_cross_entropy", "residual_norm", "router")


class _Choice:
    """What was asked for: one way for all operators, and another for some."""

    def __init__(self, default: str, singled_out: dict[str, str]):
        self.default, self.singled_out = default, singled_out
        self.of = {name: singled_out.get(name, default) for name in OPERATORS}

    def __str__(self) -> str:
        return ",".join([self.default, *(f"{name}={how}" for name, how in self.singled_out.items())])


def _parsed(text: str) -> _Choice:
    """Of "auto", or "auto,experts=reference,router=triton"; without a word for all, those left out are "auto".

    Raises:
        ValueError: for an unknown word or operator.
    """
    default, singled_out = "auto", {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, how = (word.strip() for word in part.partition("="))
        if not equals:
            name, how = "", name
        elif name not in OPERATORS:
            raise ValueError(f"ZAYA_OPS names the operator {name!r}; there are: {', '.join(OPERATORS)}.")
        if how not in CHOICES:
            raise ValueError(
                f"ZAYA_OPS is {text!r}; expected one of: {', '.join(CHOICES)}, for all, or operator=one of them."
            )
        if name:
            singled_out[name] = how
        else:
            default = how
    return _Choice(default, singled_out)


_chosen = _parsed(os.environ.get("ZAYA_OPS") or "auto")


def requested(operator: str) -> str:
    """What was asked for an operator, one of `CHOICES`."""
    return _chosen.of[operator]


def description() -> str:
    """All that was asked for, as ``ZAYA_OPS`` would say it."""
    return str(_chosen)


def is_default() -> bool:
    """Whether nothing was asked for: every operator runs as fast as is known."""
    return all(how == "auto" for how in _chosen.of.values())


def reference_only(operator: str) -> bool:
    """Whether an operator has to run its definition."""
    return _chosen.of[operator] == "reference"


@contextmanager
def use(name: str, **singled_out: str) -> Iterator[None]:
    """Run the operators in one way inside a ``with`` block, in all threads of the process.

    Args:
        name: "auto", "triton" or "reference", see `CHOICES`; or what ``ZAYA_OPS`` may be.
        singled_out: another way for an operator: ``use("auto", experts="reference")``.

    Raises:
        ValueError: for another name.
    """
    global _chosen
    text = ",".join([name, *(f"{operator}={how}" for operator, how in singled_out.items())])
    before, _chosen = _chosen, _parsed(text)
    try:
        yield
    finally:
        _chosen = before


def is_eager() -> bool:
    """Whether no trace, compilation, transform of torch.func or forward-mode derivative is on: these cannot look into
    functions that have their gradient written out, or operators that are not torch's usual ones."""
    return not torch.compiler.is_compiling() and not torch._C._get_tracing_state() and transforms_decline() is None


def is_exporting() -> bool:
    """Whether a program is being made that has to run without this package, and on values that are not known yet."""
    return torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and bool(torch._C._get_tracing_state()))


#: in a trace a module's buffer has a type of its own
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all are torch's own strided tensors or parameters, no subclass that has its own idea of operators."""
    return all(t is None or (type(t) in _PLAIN and t.layout == torch.strided) for t in tensors)


def wants_triton(operator: str, device: torch.device) -> bool:
    """Whether an operator's kernels are to be tried for tensors on `device`. On a CPU "auto" never does: there they
    can only be interpreted, for tests."""
    how = _chosen.of[operator]
    return how != "reference" and (device.type == "cuda" or how == "triton")


def triton_declines(device: torch.device) -> str | None:
    """Why no kernel of ours can run now for tensors on `device`, whatever the operator; None: they can."""
    if is_exporting():
        return "a program is being exported, which has to run without this package"
    if torch.compiler.is_compiling():
        return _device_declines(device.type, device.index)
    why = transforms_decline() or _device_declines(device.type, device.index)
    if why is not None:
        _of_any_operator.add(why)
    return why


def _constant_in_traces(function: Callable[..., str | None]) -> Callable[..., str | None]:
    """As `torch.compiler.assume_constant_result`, which would import the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_in_traces
def transforms_decline() -> str | None:
    """Why functions whose gradient is written out, and operators that are not torch's, cannot be used now; None: they
    can. Inside a compiled graph, too."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is on"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives are on"
    return None


def is_interpreting_asked_for() -> bool:
    """Whether TRITON_INTERPRET is set, as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@_constant_in_traces
def _device_declines(kind: str, index: int | None) -> str | None:
    return _look_at_device(kind, index)


@functools.cache
def _look_at_device(kind: str, index: int | None) -> str | None:
    if kind not in ("cpu", "cuda"):
        return f"kernels do not run on the device {kind!r}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install zaya_hf[kernels])"
    if kind == "cpu" and not is_interpreting_asked_for():
        return "kernels run on a CPU only when interpreted (TRITON_INTERPRET=1)"
    try:
        from .common import triton as kernels
    except Exception as error:  # a broken installation may raise anything
        return f"triton cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    found = kernels.version()
    if found < kernels.OLDEST:
        return f"triton is {'.'.join(map(str, found))}; kernels need {'.'.join(map(str, kernels.OLDEST))} or newer"
    if kind == "cpu":
        late = "TRITON_INTERPRET=1 was set after Triton had been imported; set it before Python starts"
        return None if kernels.is_interpreted() else late
    if kernels.INTERPRETED.value:
        return "TRITON_INTERPRET=1 is for tensors on a CPU"
    about = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = about.gcnArchName.partition(":")[0]
        return (
            None if arch.startswith(("gfx94", "gfx95")) else f"kernels are made for gfx942 and gfx950, not for {arch}"
        )
    return None if about.major >= 8 else f"kernels are made for sm_80 and newer, not for sm_{about.major}{about.minor}"


def outcome(
    operator: str, device: torch.device, otherwise: tuple[str, str], declined: str | None = None
) -> tuple[str, str]:
    """What runs, and why, as reports say it.

    Args:
        operator, device: which operator, and where its tensors are.
        otherwise: what runs without Triton's kernels, and why.
        declined: why the kernels do not take these shapes or dtypes; None: they do.
    """
    if reference_only(operator):
        return "reference", f"ZAYA_OPS={description()}"
    if not wants_triton(operator, device):
        return otherwise
    why_not = triton_declines(device) or declined
    if why_not is None:
        return "triton", "on a GPU" if requested(operator) == "auto" else f"ZAYA_OPS={description()}"
    return otherwise[0], f"{otherwise[1]}; not triton, since {why_not}"


def say_once(operator: str, why: str) -> None:
    """Tell the user that the kernels of `operator` were to run and cannot, once for each `why`. Not inside a trace,
    which would have to be cut for it."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or why in _said.setdefault(operator, []):
        return
    everywhere = why in _of_any_operator
    known = everywhere and any(why in others for others in _said.values())
    _said[operator].append(why)
    if not known:
        name = "zaya_hf.ops" if everywhere else f"zaya_hf.ops.{operator}"
        logger.warning(f"{name}: not Triton's kernels, since {why}.")


_said: dict[str, list[str]] = {}
#: reasons that have nothing to do with an operator: they are said once for all
_of_any_operator: set[str] = set()


def said(operator: str) -> list[str]:
    """Why calls of an operator in this process went without its kernels, although they were to run."""
    return list(_said.get(operator, []))
