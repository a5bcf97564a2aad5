"""Every kernel compiled for the GPUs that it is made for, on a machine that need not have one: nothing spills, shared
memory suffices, products are done by matrix instructions; what is compiled is what Triton's JIT would compile; and a
kernel that is wrong in one of these ways is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zaya_hf import kernel_table
from zaya_hf.ops.common.configs import KernelConfig, config
from zaya_hf.ops.common.targets import TARGETS, Target
from zaya_hf.ops.common.workloads import Workload

pytestmark = pytest.mark.compile_only

MI300X = TARGETS["gfx942"]


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is taken from another run's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def cases(dtype: str, all_configs: bool) -> list[Any]:
    """(operator, number of its workload, number of a configuration): every one, or the first of each kernel."""
    found, seen = [], set()
    for operator in kernel_table.operators():
        for index, workload in enumerate(kernel_table.workloads(operator, dtype)):
            for place, chosen in enumerate(workload.configs):
                key = (operator, workload.kernel)
                if all_configs or key not in seen:
                    seen.add(key)
                    name = f"{operator}-{workload.kernel}-{workload.size}-{kernel_table.label(chosen)}"
                    found.append(pytest.param(operator, index, place, id=re.sub(r"[^\w=-]+", "_", name)))
    return found


def assert_within_limits(found: dict[str, Any]) -> None:
    assert found["over"] == [], found
    assert found["error"] is None


#: what a test goes through
CASES = {
    "test_bf16_on_gfx942_in_every_configuration": ("bf16", True),
    "test_fp32_on_gfx942": ("fp32", False),
    "test_bf16_on_other_targets": ("bf16", False),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases are listed only in a run that compiles them: listing them imports Triton and the kernels."""
    name = metafunc.function.__name__
    if name in CASES:
        chosen = metafunc.config.option.markexpr
        selected = not chosen or ("compile_only" in chosen and "not compile_only" not in chosen)
        metafunc.parametrize(("operator", "index", "place"), cases(*CASES[name]) if selected else [])


def test_bf16_on_gfx942_in_every_configuration(operator: str, index: int, place: int) -> None:
    found = kernel_table.row(kernel_table.Job(operator, "bf16", index, place, "gfx942"))
    assert_within_limits(found)
    facts = found["facts"]
    assert facts["vgpr_spills"] == facts["sgpr_spills"] == facts["scratch_bytes"] == 0
    assert facts["lds_bytes"] <= 65_536
    assert facts["threads"] == 64 * found["options"]["num_warps"] <= 1024
    assert facts["waves_per_unit"] >= found["options"]["num_warps"]
    if found["flops"]:
        assert sum(number for name, number in facts["matrix"].items() if name.startswith("v_mfma_f32_")) > 0


def test_fp32_on_gfx942(operator: str, index: int, place: int) -> None:
    assert_within_limits(kernel_table.row(kernel_table.Job(operator, "fp32", index, place, "gfx942")))


@pytest.mark.parametrize("arch", ["gfx950", "sm_90"])
def test_bf16_on_other_targets(operator: str, index: int, place: int, arch: str) -> None:
    assert_within_limits(kernel_table.row(kernel_table.Job(operator, "bf16", index, place, arch)))


def test_every_workload_has_sizes_and_configurations() -> None:
    for operator in kernel_table.operators():
        found = [workload for dtype in kernel_table.DTYPES for workload in kernel_table.workloads(operator, dtype)]
        assert found, operator
        for workload in found:
            assert workload.configs, workload
            assert workload.bytes > 0 <= workload.flops
            assert workload.dtype in kernel_table.DTYPES


# ----------------------------------------------------------------------------------------- as Triton's JIT would do it
def recorded(workload: Workload, chosen: KernelConfig) -> Any:
    from zaya_hf.ops.common.triton import recording

    with recording() as launches:
        workload.launch(chosen)
    return launches[0]


def what_the_jit_makes(launched: Any, target: Target) -> tuple[Any, ...]:
    """Signature, constants and attributes by Triton's own code; it needs a backend, not a driver."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from zaya_hf.ops.compiling.triton import gpu_target

    kernel, backend = launched.kernel, make_backend(gpu_target(target))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = launched.config.options(target.backend)
    given, specialisation, options = binder(*launched.arguments.values(), **launched.constants, **options)
    _, signature, constants, attributes = kernel._pack_args(backend, options, given, specialisation, options)
    return signature, constants, attributes


def assert_as_the_jit(launched: Any, target: Target) -> None:
    from zaya_hf.ops.compiling.triton import specialised

    assert specialised(launched, target) == what_the_jit_makes(launched, target)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


POINTERS = {
    "whole": meta(64, 64),
    "not at a multiple of 16 bytes": meta(64, 64)[:, 3:],
    "at one": meta(64, 64)[:, 8:],
    "2 GiB": meta(2**30),
    "a byte less than 2 GiB": meta(2**31 - 1, dtype=torch.uint8),
    "small, of 4 GiB": meta(2**31)[:16],
    "empty": meta(0),
    "bool": meta(3, dtype=torch.bool),
    "parameter": torch.nn.Parameter(meta(4, 4)),
    "real": torch.ones(64),
    "real, odd": torch.ones(64)[3:],
    **{str(dtype): meta(8, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)},
    **{str(dtype): meta(8, dtype=dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)},
}
INTEGERS = (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**33, 2**63 - 1, 2**63, 2**64 - 16)
OTHERS = (None, True, False, 0.0, 1.0, 0.5)


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_arguments_are_specialised_as_by_the_jit(arch: str) -> None:
    from bad_kernels import many_parameters

    from zaya_hf.ops.common.triton import Launch

    names, constants = many_parameters.arg_names[:6], {"N": 8}
    values = [*POINTERS.values(), *INTEGERS, *OTHERS]
    for index, value in enumerate(values):
        number = INTEGERS[index % len(INTEGERS)]
        for arguments in (
            (value, value, value, value, number, 0.5),
            (POINTERS["whole"], number, value, value, number, 1),
        ):
            launched = Launch(many_parameters, (1,), config(), dict(zip(names, arguments, strict=True)), constants)
            assert_as_the_jit(launched, TARGETS[arch])


@pytest.mark.parametrize("operator", kernel_table.operators())
def test_launches_are_specialised_as_by_the_jit(operator: str) -> None:
    for dtype in kernel_table.DTYPES:
        for workload in kernel_table.workloads(operator, dtype):
            for chosen in workload.configs:
                for target in TARGETS.values():
                    assert_as_the_jit(recorded(workload, chosen), target)


def test_a_value_that_no_kernel_takes_is_named() -> None:
    from bad_kernels import many_parameters

    from zaya_hf.ops.common.triton import Launch
    from zaya_hf.ops.compiling.triton import specialised

    with pytest.raises(TypeError, match=r"many_parameters: pointer is a tensor of torch\.complex64"):
        specialised(Launch(many_parameters, (1,), config(), {"pointer": meta(3, dtype=torch.complex64)}), MI300X)
    with pytest.raises(TypeError, match="many_parameters has no value for its parameter pointer"):
        specialised(Launch(many_parameters, (1,), config(), {}), MI300X)


# ------------------------------------------------------------------------------------------------ bad ones are found
def product_row(arch: str = "gfx942", dtype: torch.dtype = torch.bfloat16, **options: int) -> dict[str, Any]:
    from bad_kernels import product_workload

    chosen = config(**options)
    return kernel_table.describe("test", product_workload(chosen, dtype=dtype), chosen, TARGETS[arch])


def test_a_good_product_passes() -> None:
    found = product_row(BM=128, BN=128, BK=32, num_warps=8, num_stages=2, matrix_instr_nonkdim=16)
    assert_within_limits(found)
    assert set(found["facts"]["matrix"]) == {"v_mfma_f32_16x16x16_bf16"}
    assert found["facts"]["lds_bytes"] == (128 + 128) * 32 * 2
    assert found["facts"]["wide_loads"] == found["facts"]["loads"] > 0
    assert found["programs"] == 1024
    assert found["bound_by"] == "products"
    assert found["floor_us"] == pytest.approx(2 * 4096**3 / 708e12 * 1e6, rel=1e-3)


def test_a_kernel_that_spills_is_found() -> None:
    found = product_row(BM=256, BN=256, BK=64, num_warps=4, num_stages=2, waves_per_eu=2)
    assert found["facts"]["vgpr_spills"] > 0
    assert found["facts"]["scratch_bytes"] > 0
    assert found["over"][0].startswith("spills ")
    assert "bytes of scratch memory" in " ".join(found["over"])


def test_a_stack_on_nvidia_is_found() -> None:
    found = product_row("sm_90", BM=256, BN=256, BK=64, num_warps=8, num_stages=2)
    assert found["facts"]["scratch_bytes"] > 0
    assert "bytes of scratch memory" in " ".join(found["over"])


def test_too_much_shared_memory_is_found() -> None:
    found = product_row(BM=128, BN=128, BK=128, num_warps=8, num_stages=3)
    assert found["facts"]["lds_bytes"] == 2 * (128 + 128) * 128 * 2
    assert found["over"] == ["131,072 bytes of shared memory, of 65,536"]
    assert found["facts"]["waves_per_unit"] == 0
    assert product_row("gfx950", BM=128, BN=128, BK=64, num_warps=8, num_stages=2)["over"] == []


def test_products_without_a_matrix_instruction_are_found() -> None:
    from bad_kernels import vector_workload

    chosen = config(BM=16, BK=256)
    for arch in TARGETS:
        found = kernel_table.describe("test", vector_workload(chosen), chosen, TARGETS[arch])
        assert found["over"] == ["products, and no matrix instruction"], arch


def test_fp32_products_need_a_matrix_instruction_where_there_is_one() -> None:
    options = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    amd = product_row(dtype=torch.float32, **options)
    assert {name.rpartition("_")[2] for name in amd["facts"]["matrix"]} == {"f32"}
    nvidia = product_row("sm_90", dtype=torch.float32, **options)
    assert nvidia["facts"]["matrix_instructions"] == 0
    assert amd["over"] == nvidia["over"] == []


def test_too_many_threads_are_found() -> None:
    found = product_row(BM=256, BN=256, BK=32, num_warps=32)
    assert found["over"]
    assert found["facts"] is None or found["facts"]["threads"] == 2048


def test_a_kernel_that_does_not_compile_is_a_row() -> None:
    found = product_row(BM=96, BN=64, BK=32)  # a block that is no power of two
    assert found["facts"] is None
    assert found["over"] == [f"does not compile: {found['error']}"]
    assert "\n" not in found["error"]


@pytest.mark.parametrize(
    "options", [{"BM": 64, "BN": 64}, {"BM": 128, "BN": 128}, {"BM": 128, "BN": 256}, {"BM": 32, "BN": 32}]
)
def test_waves_are_those_that_llvm_counts(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from zaya_hf.ops.compiling import assembly

    texts = []
    read = assembly.read_amd
    monkeypatch.setattr(assembly, "read_amd", lambda text, *others: texts.append(text) or read(text, *others))
    facts = product_row(**options, BK=32, num_warps=4, num_stages=2)["facts"]
    (occupancy,) = re.findall(r"^; Occupancy: (\d+)", texts[0], re.MULTILINE)
    (size,) = re.findall(r"^; codeLenInByte = (\d+)", texts[0], re.MULTILINE)
    assert facts["waves_per_simd"] == int(occupancy)
    assert facts["code_bytes"] == int(size)


def test_several_processes_give_what_one_gives(capfd: pytest.CaptureFixture[str]) -> None:
    wanted = kernel_table.jobs(kernel_table.operators()[:1], ["bf16"], ["gfx942"])[:2]
    assert os.environ["TRITON_INTERPRET"] == "0"
    assert kernel_table.build(wanted, 2) == kernel_table.build(wanted, 1)
    assert capfd.readouterr().err == ""
