"""What `zaya doctor` looks at on a machine for ROCm: the facts (`look`), and what follows from them (`findings`).

Each check takes the facts as arguments and touches nothing, so it can be tried for machines that are not here. What the
variables do, and where that is documented, is in `docs/rocm.md`.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .supported_versions import OPTIONAL, installed_version, state_of

# Architecture -> what it is. The first two are those that the operators are written for.
INSTINCT = {
    "gfx942": "CDNA3: MI300X, MI300A, MI325X",
    "gfx950": "CDNA4: MI350X, MI355X",
}
OTHERS = {
    "gfx908": "CDNA: MI100",
    "gfx90a": "CDNA2: MI210, MI250, MI250X",
    "gfx1030": "RDNA2",
    "gfx1100": "RDNA3: RX 7900, W7900",
    "gfx1101": "RDNA3",
    "gfx1102": "RDNA3",
    "gfx1151": "RDNA3.5",
    "gfx1200": "RDNA4",
    "gfx1201": "RDNA4",
}
_UNKNOWN = "unknown"  # a build of torch that does not tell
# The distributions that bring the module `triton`: PyPI's, and those that torch's ROCm wheels ask for.
TRITON_PACKAGES = ("triton", "triton-rocm", "pytorch-triton-rocm")
_LEAST_SHM = 1 << 30  # Docker gives 64 MiB; RCCL and the workers of a DataLoader put their buffers there
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # in the order that torch asks


class Finding(NamedTuple):
    """One line of the report. `level`: "ok", "note" (worth knowing) or "problem"; `text` ends with what to do."""

    level: str
    text: str


class Node(NamedTuple):
    """A device file: who may use it.

    Attributes:
        path: such as /dev/kfd.
        usable: whether this process may read and write it.
        group: name of its group, or the number where it has no name here.
    """

    path: str
    usable: bool
    group: str


@dataclass(frozen=True)
class Machine:
    """The facts that the checks need.

    Attributes:
        hip: `torch.version.hip`, None for another build.
        cuda: `torch.version.cuda`, likewise.
        architectures: of every device that torch sees, such as "gfx942:sramecc+:xnack-".
        compiled_for: architectures in the build of torch.
        environment: of the process.
        kfd: the compute device of the driver, None if it is not there.
        renders: /dev/dri/renderD*.
        shm: bytes of /dev/shm, None where there is none.
        container: whether this looks like the inside of a container.
        triton: distributions that bring Triton, with versions.
    """

    hip: str | None = None
    cuda: str | None = None
    architectures: Sequence[str] = ()
    compiled_for: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kfd: Node | None = None
    renders: Sequence[Node] = ()
    shm: int | None = None
    container: bool = False
    triton: Mapping[str, str] = field(default_factory=dict)


def look() -> Machine:
    """The facts of this machine."""
    sees = torch.cuda.is_available()
    count = torch.cuda.device_count() if sees and torch.version.hip else 0
    versions = {name: installed_version(name) for name in TRITON_PACKAGES}
    return Machine(
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        architectures=[_architecture(index) for index in range(count)],
        compiled_for=torch.cuda.get_arch_list() if torch.version.hip and sees else [],
        environment=dict(os.environ),
        kfd=_node(Path("/dev/kfd")),
        renders=[node for path in sorted(Path("/dev/dri").glob("renderD*")) if (node := _node(path))],
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        triton={name: version for name, version in versions.items() if version},
    )


def _architecture(index: int) -> str:
    try:
        return getattr(torch.cuda.get_device_properties(index), "gcnArchName", "") or _UNKNOWN
    except RuntimeError:  # `zaya doctor` shows it with the devices
        return _UNKNOWN


def _node(path: Path) -> Node | None:
    try:
        about = path.stat()
    except OSError:
        return None
    if not stat.S_ISCHR(about.st_mode):
        return None
    try:
        group = path.group()
    except (KeyError, NotImplementedError):
        group = str(about.st_gid)
    return Node(str(path), os.access(path, os.R_OK | os.W_OK), group)


def findings(machine: Machine) -> list[Finding]:
    """Everything to say about ROCm here; one line where neither torch nor the machine has anything to do with it."""
    if machine.hip is None:
        return [*_other_build(machine)]
    return [
        Finding("ok", f"torch is built for ROCm (HIP {machine.hip})"),
        *device_files(machine.kfd, machine.renders, machine.container),
        *architectures(machine.architectures, machine.compiled_for, machine.environment),
        *environment(machine.environment, machine.architectures),
        *shared_memory(machine.shm, machine.container),
        *triton(machine.triton, machine.environment),
    ]


def _other_build(machine: Machine) -> list[Finding]:
    build = f"CUDA {machine.cuda}" if machine.cuda else "CPUs"
    if machine.kfd is None:
        return [Finding("ok", f"not used: torch is built for {build}, and there is no AMD GPU driver (/dev/kfd)")]
    remedy = "install torch from PyTorch's index for your ROCm version (docs/rocm.md)"
    text = f"an AMD GPU driver is here (/dev/kfd), but torch is built for {build} and does not use it: {remedy}"
    return [Finding("problem", text)]


def device_files(kfd: Node | None, renders: Sequence[Node], container: bool) -> list[Finding]:
    """/dev/kfd and /dev/dri: present, readable and writable."""
    found = []
    if kfd is None:
        inside = "start the container with --device=/dev/kfd --device=/dev/dri"
        outside = "install the amdgpu kernel driver, and see that `lsmod` lists amdgpu"
        found.append(Finding("problem", f"/dev/kfd is missing: {inside if container else outside}"))
    if not renders:
        inside = "start the container with --device=/dev/dri"
        outside = "see that the amdgpu kernel driver is loaded (`dmesg | grep amdgpu`)"
        found.append(Finding("problem", f"no /dev/dri/renderD*: {inside if container else outside}"))
    closed = [node for node in (kfd, *renders) if node is not None and not node.usable]
    if closed:
        groups = sorted({node.group for node in closed})
        inside = " ".join(f"--group-add {group}" for group in groups)
        outside = f"`sudo usermod -a -G {','.join(groups)} $USER`, then log in again"
        remedy = f"start the container with {inside} (numbers of the host, if names differ)" if container else outside
        found.append(Finding("problem", f"no read and write access to {_listed([n.path for n in closed])}: {remedy}"))
    if not found:
        assert kfd is not None
        found.append(Finding("ok", f"{kfd.path} and {_listed([n.path for n in renders])} are accessible"))
    return found


def architectures(names: Sequence[str], compiled_for: Sequence[str], env: Mapping[str, str]) -> list[Finding]:
    """The devices that torch sees: known here, and in the build of torch."""
    if not names:
        hiding = [name for name in _VISIBLE if env.get(name, "?").strip() in ("", "-1")]
        remedy = f"unset {hiding[0]}, which hides them" if hiding else "see the lines on /dev, and `rocminfo`"
        return [Finding("problem", f"torch sees no device: {remedy}")]
    found = []
    counts: dict[str, int] = {}
    for name in names:
        short = name.split(":")[0]
        counts[short] = counts.get(short, 0) + 1
    built = {name.split(":")[0] for name in compiled_for}
    for name, count in counts.items():
        many = f"{count} x {name}"
        if name in INSTINCT:
            found.append(Finding("ok", f"{many} ({INSTINCT[name]})"))
        else:
            what = OTHERS.get(name, "not known to zaya_hf")
            found.append(Finding("note", f"{many} ({what}): plain PyTorch should run; nothing here is made for it"))
        if built and name not in built and name != _UNKNOWN:
            missing = f"torch has no code for {name}, only for {', '.join(sorted(built))}"
            text = f"{missing}: kernels fail with hipErrorNoBinaryForGpu; install a build of torch that lists it"
            found.append(Finding("problem", text))
    return found


_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def environment(env: Mapping[str, str], names: Sequence[str]) -> list[Finding]:
    """Variables that change what runs, or that contradict each other."""
    return [*_override(env, names), *_visible(env), *_allocator(env), *_products(env), *_debugging(env)]


def _override(env: Mapping[str, str], names: Sequence[str]) -> list[Finding]:
    variable = "HSA_OVERRIDE_GFX_VERSION"
    value = env.get(variable)
    if not value:
        return []
    if not re.fullmatch(r"\d+\.\d+\.[0-9a-f]+", value):
        return [Finding("problem", f"{variable}={value} is no version such as 10.3.0: unset it")]
    shown = ", ".join(sorted({name.split(":")[0] for name in names})) or "no device"
    text = f"{variable}={value} makes ROCm run code for another GPU (torch reports {shown})"
    remedy = "MI200, MI300 and MI350 need none, and wrong code crashes or computes wrongly: unset it"
    return [Finding("problem", f"{text}: {remedy}")]


def _visible(env: Mapping[str, str]) -> list[Finding]:
    found = []
    hip, cuda, rocr = env.get("HIP_VISIBLE_DEVICES"), env.get("CUDA_VISIBLE_DEVICES"), env.get("ROCR_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        text = f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ, and the first wins: set one of them"
        found.append(Finding("problem", text))
    inner = hip if hip is not None else cuda
    if rocr is not None and inner is not None:
        name = "HIP_VISIBLE_DEVICES" if hip is not None else "CUDA_VISIBLE_DEVICES"
        text = f"{name}={inner} numbers the devices that ROCR_VISIBLE_DEVICES={rocr} leaves, from 0: set one of them"
        beyond = [int(n) for n in inner.split(",") if n.strip().isdigit() and int(n) >= len(rocr.split(","))]
        found.append(Finding("problem" if beyond else "note", text))
    return found


def _allocator(env: Mapping[str, str]) -> list[Finding]:
    values = {name: env[name] for name in _ALLOCATOR if env.get(name)}
    if len(set(values.values())) < 2:
        return []
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return [Finding("problem", f"{shown}: torch reads one of them only; keep PYTORCH_ALLOC_CONF, its present name")]


def _products(env: Mapping[str, str]) -> list[Finding]:
    """Which library multiplies matrices."""
    value = env.get("TORCH_BLAS_PREFER_HIPBLASLT")
    if value is None:
        return []
    if value not in ("0", "1"):
        return [Finding("problem", f"TORCH_BLAS_PREFER_HIPBLASLT={value}: give 0 (rocBLAS) or 1 (hipBLASLt)")]
    library = "hipBLASLt" if value == "1" else "rocBLAS"
    return [Finding("note", f"TORCH_BLAS_PREFER_HIPBLASLT={value}: matrix products by {library}; unset, torch chooses")]


def _debugging(env: Mapping[str, str]) -> list[Finding]:
    """What belongs to a debugging session and is expensive when it stays behind."""
    slow = (
        "AMD_SERIALIZE_KERNEL",
        "AMD_SERIALIZE_COPY",
        "HIP_LAUNCH_BLOCKING",
        "CUDA_LAUNCH_BLOCKING",
        "AMD_LOG_LEVEL",
    )
    on = [f"{name}={env[name]}" for name in slow if env.get(name) not in (None, "", "0")]
    return [Finding("note", f"{', '.join(on)}: for debugging, slows everything down; unset for work")] if on else []


def shared_memory(size: int | None, container: bool) -> list[Finding]:
    """/dev/shm, which RCCL and DataLoader workers use."""
    if size is None or size >= _LEAST_SHM:
        return []
    remedy = "start the container with --ipc=host or --shm-size=16g" if container else "remount it larger"
    return [Finding("problem", f"/dev/shm has {size >> 20} MiB, too little for RCCL and DataLoader workers: {remedy}")]


def triton(packages: Mapping[str, str], env: Mapping[str, str]) -> list[Finding]:
    """Triton is there, once, recent enough, and not switched to its interpreter."""
    found = []
    shown = ", ".join(f"{name} {version}" for name, version in packages.items())
    if not packages:
        text = f"Triton is not installed: torch.compile and Triton kernels need triton{OPTIONAL['triton']}, which comes"
        found.append(Finding("note", f"{text} with torch's ROCm wheels (triton-rocm)"))
    elif len(packages) > 1:
        extra = " ".join(name for name in packages if name != "triton-rocm")
        text = f"{shown} all install the module `triton`, and the last one wins: pip uninstall {extra or shown}"
        found.append(Finding("problem", f"{text}, then reinstall the one that torch asks for"))
    else:
        (version,) = packages.values()
        state = state_of("triton", version, OPTIONAL["triton"])
        old = state == "too old"
        text = f"{shown}: supported is triton{OPTIONAL['triton']}, use a newer torch" if old else shown
        found.append(Finding("problem" if old else "ok", text))
    if env.get("TRITON_INTERPRET") not in (None, "", "0"):
        text = "TRITON_INTERPRET is set: Triton kernels run in Python on the CPU; unset it"
        found.append(Finding("problem", text))
    cache = env.get("TRITON_CACHE_DIR")
    if cache and not _writable(cache):
        found.append(Finding("problem", f"TRITON_CACHE_DIR={cache} cannot be written to: choose another folder"))
    known = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    others = [f"{k}={v}" for k, v in sorted(env.items()) if k.startswith("TRITON_") and k not in known]
    if others:
        found.append(Finding("note", f"set for Triton: {', '.join(others)}"))
    return found


def _writable(folder: str) -> bool:
    """Whether a folder, or the nearest one above it that exists, can be written to."""
    path = Path(folder).expanduser()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def _listed(paths: Sequence[str]) -> str:
    """Few names in full, many as "first to last"."""
    return ", ".join(paths) if len(paths) <= 2 else f"{paths[0]} to {paths[-1]}"


def as_json(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """For the report."""
    return [finding._asdict() for finding in found]
