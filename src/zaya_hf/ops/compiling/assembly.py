"""Reading what compilers put out: AMD's assembly, NVIDIA's PTX, and the object files of both."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. None: the tools at hand do not say it.

    Attributes:
        vgprs: vector registers of a thread, those for accumulators (`agprs`) among them; NVIDIA: all registers.
        sgprs: scalar registers of a wave (AMD).
        vgpr_spills, sgpr_spills: registers that did not fit and went to memory.
        scratch_bytes: of private memory per thread (NVIDIA: the stack, spills included).
        lds_bytes: shared memory of a workgroup.
        threads: of a workgroup.
        matrix: matrix instructions in the code, how many of each; in PTX for NVIDIA.
        loads: instructions in the code that load from global memory, `wide_loads` those of 16 bytes per thread.
        code_bytes: of the kernel's instructions.
        waves_per_simd: waves that registers and `threads` allow on one SIMD, at most.
        waves_per_unit: waves on a compute unit when `lds_bytes` is counted too.
    """

    vgprs: int | None
    agprs: int | None
    sgprs: int | None
    vgpr_spills: int | None
    sgpr_spills: int | None
    scratch_bytes: int | None
    lds_bytes: int
    threads: int
    matrix: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    wide_loads: int = 0
    code_bytes: int = 0
    waves_per_simd: int | None = None
    waves_per_unit: int | None = None

    @property
    def matrix_instructions(self) -> int:
        """How many there are in the code, of all kinds."""
        return sum(self.matrix.values())


_AMD_MATRIX = re.compile(r"^\s+(v_s?mfmac?_\w+)", re.MULTILINE)
_AMD_LOAD = re.compile(r"^\s+(?:buffer|global|flat)_load_(?:lds_)?(\w+)", re.MULTILINE)
_PTX_MATRIX = re.compile(r"^\s+(?:@%?\w+\s+)?((?:wgmma\.mma_async|mma)\.sync\S*)", re.MULTILINE)
_PTX_LOAD = re.compile(r"^\s+(?:@!?%?\w+\s+)?(ld\.global\S*|cp\.async\.c[ag]\.\S*)([^;]*);", re.MULTILINE)

# of ELF
_SYMBOLS, _DYNAMIC_SYMBOLS, _FUNCTION = 2, 11, 2


def read_amd(assembly: str, binary: bytes, lds_bytes: int, threads: int) -> Compiled:
    """What LLVM's assembly of one kernel says of it.

    Args:
        assembly: text; `binary`: the code object (ELF).
        lds_bytes, threads: as Triton launches it; the assembly does not know the former.

    Raises:
        ValueError: the assembly lacks a figure.
    """

    def figure(name: str) -> int:
        found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)$", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"the assembly says nothing of .{name}; is it of another compiler?")
        return int(found[1])

    widths = [match[1] for match in _AMD_LOAD.finditer(assembly)]
    return Compiled(
        vgprs=figure("vgpr_count"),
        agprs=figure("agpr_count"),
        sgprs=figure("sgpr_count"),
        vgpr_spills=figure("vgpr_spill_count"),
        sgpr_spills=figure("sgpr_spill_count"),
        scratch_bytes=figure("private_segment_fixed_size"),
        lds_bytes=lds_bytes,
        threads=threads,
        matrix=_counted(match[1] for match in _AMD_MATRIX.finditer(assembly)),
        loads=len(widths),
        wide_loads=sum("dwordx4" in width or "b128" in width for width in widths),
        code_bytes=code_bytes(binary),
    )


def read_nvidia(ptx: str, binary: bytes, resources: str | None, lds_bytes: int, threads: int) -> Compiled:
    """What PTX and its object file say of one kernel.

    Args:
        ptx: text; `binary`: the object file (ELF).
        resources: what ``cuobjdump --dump-resource-usage`` prints of it; None: there is no such tool.
        lds_bytes, threads: as Triton launches it.
    """
    registers = re.search(r"\bREG:(\d+)\b", resources or "")
    stack = re.search(r"\bSTACK:(\d+)\b", resources or "")
    scratch = None if stack is None else int(stack[1])
    loads = [match[1] + match[2] for match in _PTX_LOAD.finditer(ptx)]
    wide = (".v4.b32", ".v4.u32", ".v4.f32", ".v2.b64", ".v2.u64", ".v8.b16", "0x10", ", 16")
    return Compiled(
        vgprs=None if registers is None else int(registers[1]),
        agprs=None,
        sgprs=None,
        vgpr_spills=0 if scratch == 0 else None,  # what is spilled lies on the stack
        sgpr_spills=None,
        scratch_bytes=scratch,
        lds_bytes=lds_bytes,
        threads=threads,
        matrix=_counted(match[1] for match in _PTX_MATRIX.finditer(ptx)),
        loads=len(loads),
        wide_loads=sum(any(mark in load for mark in wide) for load in loads),
        code_bytes=code_bytes(binary),
    )


def code_bytes(binary: bytes) -> int:
    """Size of the functions in a 64-bit little-endian ELF file.

    Raises:
        ValueError: it is no such file.
    """
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (sections,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    functions: dict[tuple[int, int], int] = {}
    for index in range(count):
        _, kind, _, _, start, length, _, _, _, entry = struct.unpack_from(
            "<IIQQQQIIQQ", binary, sections + index * size
        )
        if kind not in (_SYMBOLS, _DYNAMIC_SYMBOLS):
            continue
        for place in range(start, start + length, entry):
            _, about, _, section, address, code = struct.unpack_from("<IBBHQQ", binary, place)
            if about & 15 == _FUNCTION:
                functions[section, address] = code
    return sum(functions.values())


def _counted(found: Iterable[str]) -> dict[str, int]:
    return dict(Counter(found).most_common())
