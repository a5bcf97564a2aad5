"""Compiling recorded launches as Triton's JIT would on the GPU, on a machine that need not have one.

The JIT makes a kernel of its own for what it sees in the arguments: their types, whether a pointer or a whole number
is a multiple of 16, numbers that are 1, and on AMD whether a tensor's memory is smaller than 2 GiB, for then its
addresses need 32 bits. What is compiled here has to be what would run, so the same is worked out here.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..common.targets import Target
from ..common.triton import Launch
from . import assembly, occupancy
from .assembly import Compiled

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "u1",
}
_ALIGNED, _WITHIN_2_GIB = ["tt.divisibility", 16], ["tt.pointer_range", 32]
_MOST_INT32 = 2**31 - 1

Attributes = list[list[Any]]


def specialised(
    launch: Launch, target: Target
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Attributes]]:
    """What the JIT makes of a launch's arguments.

    Args:
        launch: with tensors that have real sizes, strides and offsets; memory they need not have.
        target: AMD's have attributes of their own.

    Returns:
        types by parameter, values of compile-time constants by position, attributes by position; as `ASTSource` wants
        them.

    Raises:
        TypeError: the kernel has a parameter without a value, or a value of a type that no kernel takes.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Attributes] = {}
    given = {**launch.arguments, **launch.constants}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if name not in given and not parameter.has_default:
            raise TypeError(f"{_name(launch)} has no value for its parameter {name}")
        value = given.get(name, parameter.default if parameter.has_default else None)
        kind: str = "constexpr"
        found: Attributes | None = []
        if not parameter.is_constexpr:
            kind, found = _specialised(parameter, value, target, f"{_name(launch)}: {name}")
        signature[name] = kind
        if kind == "constexpr":
            constants[index,] = value
        if found is not None:
            attributes[index,] = found
    return signature, constants, attributes


def _specialised(parameter: Any, value: Any, target: Target, where: str) -> tuple[str, Attributes | None]:
    """Type and attributes of one argument; None where the JIT does not look for any."""
    annotated = parameter.annotation_type
    if isinstance(annotated, str) and annotated:
        if parameter.do_not_specialize or annotated == "u1" or annotated.startswith(("fp", "bf")):
            return annotated, None
        kind, found = _by_value(parameter, value, target, where)
        return annotated, None if kind == "constexpr" else found
    return _by_value(parameter, value, target, where)


def _by_value(parameter: Any, value: Any, target: Target, where: str) -> tuple[str, Attributes | None]:
    looks, aligns = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
    if value is None:
        return "constexpr", []
    if isinstance(value, Tensor):
        if value.dtype not in _TYPES:
            raise TypeError(f"{where} is a tensor of {value.dtype}, which no kernel takes")
        kind = ("*k" if parameter.is_const else "*") + _TYPES[value.dtype]
        return kind, _attributes(value, aligns, target) if looks else None
    if isinstance(value, bool):
        return "u1", None
    if isinstance(value, int):
        if value == 1 and looks:
            return "constexpr", []
        kind = "i32" if -(2**31) <= value <= _MOST_INT32 else "i64" if value < 2**63 else "u64"
        return kind, _attributes(value, aligns, target) if looks else None
    if isinstance(value, float):
        return "fp32", None
    raise TypeError(f"{where} is {type(value).__name__}, which no kernel takes")


def _attributes(value: Any, aligns: bool, target: Target) -> Attributes:
    if not isinstance(value, Tensor):
        return [_ALIGNED] if aligns and isinstance(value, int) and value % 16 == 0 else []
    found = []
    # Memory that torch allocates begins at a multiple of 512 bytes.
    if aligns and value.storage_offset() * value.element_size() % 16 == 0:
        found.append(_ALIGNED)
    if target.backend == "hip" and _buffer_operations() and value.untyped_storage().size() <= _MOST_INT32:
        found.append(_WITHIN_2_GIB)
    return found


def _buffer_operations() -> bool:
    """Whether Triton makes buffer loads, which count on 32-bit offsets, of AMD's pointers."""
    return bool(getattr(getattr(triton.knobs, "amd", None), "use_buffer_ops", False))


def gpu_target(target: Target) -> GPUTarget:
    """As Triton names it."""
    arch = int(target.arch.removeprefix("sm_")) if target.backend == "cuda" else target.arch
    return GPUTarget(target.backend, arch, target.wave)


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile a recorded launch, or take it from Triton's cache on disk.

    Raises:
        TypeError: see `specialised`; also where the kernel is one that Triton interprets.
        Exception: what Triton raises on a kernel that it cannot compile.
    """
    kernel = launch.kernel
    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(f"{_name(launch)} is interpreted (TRITON_INTERPRET), and so cannot be compiled")
    signature, constants, attributes = specialised(launch, target)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with contextlib.redirect_stdout(sys.stderr):  # Triton prints a failure of ptxas
        done = triton.compile(source, target=gpu_target(target), options=launch.config.options(target.backend))
    lds, threads = done.metadata.shared, done.metadata.num_warps * target.wave
    if target.backend == "hip":
        compiled = assembly.read_amd(done.asm["amdgcn"], done.asm["hsaco"], lds, threads)
    else:
        binary = done.asm["cubin"]
        compiled = assembly.read_nvidia(done.asm["ptx"], binary, _resources(binary), lds, threads)
    return occupancy.with_occupancy(compiled, target)


def _resources(binary: bytes) -> str | None:
    """What cuobjdump, which Triton brings along, says of an object file; None: it does not run."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
        with tempfile.TemporaryDirectory() as folder:  # it wants a file that it can seek in
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(binary)
            done = subprocess.run([tool, "--dump-resource-usage", str(file)], capture_output=True, check=True)
        return done.stdout.decode()
    except (AttributeError, RuntimeError, OSError, subprocess.CalledProcessError):
        return None


def _name(launch: Launch) -> str:
    return str(getattr(launch.kernel, "__name__", launch.kernel))
