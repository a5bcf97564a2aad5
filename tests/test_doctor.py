"""`zaya doctor` on machines that are not here: ROCm, and versions outside the supported range."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zaya_hf import doctor, rocm_checks, supported_versions
from zaya_hf.rocm_checks import Finding, Machine, Node

KFD = Node("/dev/kfd", True, "render")
RENDERS = [Node(f"/dev/dri/renderD{128 + i}", True, "render") for i in range(8)]
MI300X = "gfx942:sramecc+:xnack-"
HEALTHY: dict[str, Any] = {
    "hip": "7.2.26015",
    "architectures": [MI300X] * 8,
    "compiled_for": ["gfx90a", "gfx942", "gfx950", "gfx1100"],
    "environment": {"PATH": "/usr/bin"},
    "kfd": KFD,
    "renders": RENDERS,
    "shm": 64 << 30,
    "triton": {"triton-rocm": "3.7.1"},
}


def lines(**changes: Any) -> dict[str, list[str]]:
    """Findings by level for the healthy machine with `changes`."""
    found: dict[str, list[str]] = {"ok": [], "note": [], "problem": []}
    for finding in rocm_checks.findings(Machine(**{**HEALTHY, **changes})):
        found[finding.level].append(finding.text)
    return found


def test_a_healthy_machine_has_no_problem() -> None:
    found = lines()
    assert found["problem"] == found["note"] == []
    assert found["ok"] == [
        "torch is built for ROCm (HIP 7.2.26015)",
        "/dev/kfd and /dev/dri/renderD128 to /dev/dri/renderD135 are accessible",
        "8 x gfx942 (CDNA3: MI300X, MI300A, MI325X)",
        "triton-rocm 3.7.1",
    ]


@pytest.mark.parametrize(("cuda", "build"), [(None, "CPUs"), ("13.0", "CUDA 13.0")])
def test_another_build_of_torch(cuda: str | None, build: str) -> None:
    plain = rocm_checks.findings(Machine(cuda=cuda))
    assert plain == [Finding("ok", f"not used: torch is built for {build}, and there is no AMD GPU driver (/dev/kfd)")]
    (beside,) = rocm_checks.findings(Machine(cuda=cuda, kfd=KFD))
    assert beside.level == "problem"
    assert f"torch is built for {build}" in beside.text
    assert "docs/rocm.md" in beside.text


# (what is changed about the healthy machine, the level, words of the one line that is added)
CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"kfd": None}, "problem", ["/dev/kfd is missing", "amdgpu kernel driver"]),
    ({"kfd": None, "container": True}, "problem", ["/dev/kfd is missing", "--device=/dev/kfd"]),
    ({"renders": []}, "problem", ["no /dev/dri/renderD*", "dmesg"]),
    ({"renders": [], "container": True}, "problem", ["no /dev/dri/renderD*", "--device=/dev/dri"]),
    ({"kfd": KFD._replace(usable=False)}, "problem", ["/dev/kfd", "usermod -a -G render $USER"]),
    (
        {"kfd": KFD._replace(usable=False, group="109"), "container": True},
        "problem",
        ["/dev/kfd", "--group-add 109", "host"],
    ),
    (
        {"renders": [*RENDERS[:6], *(node._replace(usable=False, group="video") for node in RENDERS[6:])]},
        "problem",
        ["/dev/dri/renderD134, /dev/dri/renderD135", "usermod -a -G video"],
    ),
    ({"architectures": ["gfx90a"]}, "note", ["gfx90a (CDNA2", "plain PyTorch"]),
    ({"architectures": ["gfx1250"], "compiled_for": []}, "note", ["gfx1250 (not known to zaya_hf)"]),
    ({"architectures": ["unknown"]}, "note", ["1 x unknown (not known to zaya_hf)"]),
    ({"compiled_for": ["gfx90a", "gfx1100"]}, "problem", ["no code for gfx942", "gfx1100, gfx90a", "hipErrorNoBinary"]),
    ({"architectures": []}, "problem", ["torch sees no device", "rocminfo"]),
    (
        {"architectures": [], "environment": {"HIP_VISIBLE_DEVICES": ""}},
        "problem",
        ["torch sees no device", "unset HIP_VISIBLE_DEVICES"],
    ),
    (
        {"architectures": [], "environment": {"CUDA_VISIBLE_DEVICES": "-1"}},
        "problem",
        ["torch sees no device", "unset CUDA_VISIBLE_DEVICES"],
    ),
    ({"environment": {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}}, "problem", ["10.3.0", "gfx942", "unset it"]),
    ({"environment": {"HSA_OVERRIDE_GFX_VERSION": "gfx942"}}, "problem", ["no version", "unset it"]),
    (
        {"environment": {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "2,3"}},
        "problem",
        ["HIP_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3", "the first wins"],
    ),
    (
        {"environment": {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4,5"}},
        "note",
        ["ROCR_VISIBLE_DEVICES=4,5", "from 0"],
    ),
    (
        {"environment": {"CUDA_VISIBLE_DEVICES": "4", "ROCR_VISIBLE_DEVICES": "4,5"}},
        "problem",
        ["CUDA_VISIBLE_DEVICES=4", "from 0"],
    ),
    (
        {"environment": {"PYTORCH_HIP_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}},
        "problem",
        ["PYTORCH_HIP_ALLOC_CONF=a:1, PYTORCH_ALLOC_CONF=b:1", "keep PYTORCH_ALLOC_CONF"],
    ),
    ({"environment": {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}}, "note", ["by rocBLAS"]),
    ({"environment": {"TORCH_BLAS_PREFER_HIPBLASLT": "1"}}, "note", ["by hipBLASLt"]),
    ({"environment": {"TORCH_BLAS_PREFER_HIPBLASLT": "no"}}, "problem", ["give 0 (rocBLAS) or 1 (hipBLASLt)"]),
    (
        {"environment": {"HIP_LAUNCH_BLOCKING": "1", "AMD_LOG_LEVEL": "4", "AMD_SERIALIZE_KERNEL": "0"}},
        "note",
        ["HIP_LAUNCH_BLOCKING=1, AMD_LOG_LEVEL=4: for debugging"],
    ),
    ({"shm": 64 << 20}, "problem", ["/dev/shm has 64 MiB", "remount"]),
    ({"shm": 64 << 20, "container": True}, "problem", ["--ipc=host"]),
    ({"triton": {}}, "note", ["Triton is not installed", "triton>=3.6", "triton-rocm"]),
    ({"triton": {"triton": "3.1.0"}}, "problem", ["triton 3.1.0: supported is triton>=3.6"]),
    (
        {"triton": {"triton": "3.9.0", "triton-rocm": "3.7.1"}},
        "problem",
        ["triton 3.9.0, triton-rocm 3.7.1", "pip uninstall triton, then"],
    ),
    ({"environment": {"TRITON_INTERPRET": "1"}}, "problem", ["TRITON_INTERPRET", "unset it"]),
    ({"environment": {"TRITON_CACHE_DIR": "/dev/null/cache"}}, "problem", ["/dev/null/cache cannot be written"]),
    (
        {"environment": {"TRITON_HIP_USE_ASYNC_COPY": "1", "TRITON_CACHE_DIR": "/tmp"}},
        "note",
        ["set for Triton: TRITON_HIP_USE_ASYNC_COPY=1"],
    ),
]


@pytest.mark.parametrize(("changes", "level", "words"), CASES, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_one_line_with_the_remedy(changes: dict[str, Any], level: str, words: list[str]) -> None:
    found = lines(**changes)
    assert len(found["problem"]) + len(found["note"]) == 1, found
    (text,) = found[level]
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    "environment",
    [
        {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"},
        {"ROCR_VISIBLE_DEVICES": "0,1"},
        {"PYTORCH_HIP_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:1"},
        {"HSA_OVERRIDE_GFX_VERSION": ""},
        {"TRITON_INTERPRET": "0", "CUDA_LAUNCH_BLOCKING": "0"},
    ],
    ids=str,
)
def test_what_contradicts_nothing_is_not_mentioned(environment: dict[str, str]) -> None:
    found = lines(environment=environment)
    assert found["problem"] == found["note"] == []


def test_a_folder_that_does_not_exist_yet_can_be_the_cache(tmp_path: Path) -> None:
    assert lines(environment={"TRITON_CACHE_DIR": str(tmp_path / "a" / "b")})["problem"] == []


def test_different_devices_are_counted_apart() -> None:
    found = lines(architectures=[MI300X, MI300X, "gfx1100"])
    assert "2 x gfx942 (CDNA3: MI300X, MI300A, MI325X)" in found["ok"]
    assert found["note"][0].startswith("1 x gfx1100 (RDNA3")


def test_no_access_at_all_is_one_line_for_all_files() -> None:
    found = lines(kfd=KFD._replace(usable=False), renders=[n._replace(usable=False, group="video") for n in RENDERS])
    assert found["problem"] == [
        "no read and write access to /dev/kfd to /dev/dri/renderD135: "
        "`sudo usermod -a -G render,video $USER`, then log in again"
    ]


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "10.3.0")
    machine = rocm_checks.look()
    assert (machine.hip, machine.cuda) == (torch.version.hip, torch.version.cuda)
    assert machine.environment["HSA_OVERRIDE_GFX_VERSION"] == "10.3.0"
    assert (machine.kfd is None) == (not Path("/dev/kfd").is_char_device())
    assert machine.shm is None or machine.shm > 0
    if torch.version.hip is None:
        assert machine.architectures == machine.compiled_for == []


def test_a_device_file_is_read(tmp_path: Path) -> None:
    node = rocm_checks._node(Path("/dev/null"))
    assert node is not None
    assert (node.path, node.usable) == ("/dev/null", True)
    assert node.group
    assert rocm_checks._node(tmp_path / "missing") is None
    assert rocm_checks._node(tmp_path) is None


def test_the_report_has_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    sick = Machine(**{**HEALTHY, "shm": 64 << 20, "environment": {"AMD_LOG_LEVEL": "4"}})
    monkeypatch.setattr(rocm_checks, "look", lambda: sick)
    report = doctor.collect()
    assert json.loads(json.dumps(report))["rocm"][0] == {
        "level": "ok",
        "text": "torch is built for ROCm (HIP 7.2.26015)",
    }
    text = doctor.describe(report)
    assert "ROCm         torch is built for ROCm (HIP 7.2.26015)\n" in text
    assert "             PROBLEM: /dev/shm has 64 MiB" in text
    assert "             note: AMD_LOG_LEVEL=4" in text


def test_versions_outside_the_ranges_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9.1", "transformers": "5.31.0", "peft": "0.5", "trl": "weird", "numpy": "2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    report = doctor.collect()
    states = {about["name"]: about["state"] for about in report["versions"]}
    assert states["torch"] == states["peft"] == "too old"
    assert states["accelerate"] == "not installed"
    text = doctor.describe(report)
    assert f"torch 2.9.1 is too old: pip install 'torch{supported_versions.REQUIRED['torch']}'" in text
    assert f"peft 0.5 is too old: pip install 'peft{supported_versions.OPTIONAL['peft']}'" in text
    assert "transformers 5.31.0 is newer than the newest tested, 5.24" in text
    assert "trl weird: no version that can be compared" in text
    assert "numpy 2.0" not in text.split("versions")[1].split("ROCm")[0]
    assert "accelerate" not in text.split("versions")[1].split("ROCm")[0]


def test_all_versions_in_range_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0+rocm7.2", "transformers": "5.24.0.dev0"}.get)
    assert "versions     all installed packages are in the supported ranges\n" in doctor.describe(doctor.collect())


def test_a_device_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are listed all the same, on either build."""

    def properties(index: int) -> Any:
        if index == 0:
            raise RuntimeError("CUDA error: busy\nor unavailable")
        return SimpleNamespace(name="MI300X", gcnArchName="gfx942", major=9, minor=4, total_memory=2**30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942"])
    broken, healthy = doctor._devices()
    assert broken["name"] == "FAILS: CUDA error: busy or unavailable"
    assert healthy["architecture"] == "gfx942"
    assert rocm_checks.look().architectures == ["unknown", "gfx942"]
    monkeypatch.setattr(doctor, "_device_kinds", lambda: ["cpu"])
    lines = doctor.describe(doctor.collect()).splitlines()
    assert any(line.endswith("cuda:0: FAILS: CUDA error: busy or unavailable") for line in lines)
    assert any(line.endswith("cuda:1: MI300X, gfx942, 1.0 GiB") for line in lines)
