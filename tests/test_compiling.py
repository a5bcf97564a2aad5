"""What is read out of compiled kernels, and how many waves that leaves room for; nothing is compiled here."""

from __future__ import annotations

import struct

import pytest

from zaya_hf.ops.common.targets import TARGETS
from zaya_hf.ops.compiling.assembly import Compiled, code_bytes, read_amd, read_nvidia
from zaya_hf.ops.compiling.occupancy import waves_per_simd, waves_per_unit, with_occupancy

MI300X, MI355X, H100 = TARGETS["gfx942"], TARGETS["gfx950"], TARGETS["sm_90"]

AMD = """
\tglobal_load_dwordx4 v[2:5], v[0:1], off
\tbuffer_load_dwordx4 v[8:11], v1, s[4:7], 0 offen
\tbuffer_load_dword v1, v2, s[0:3], 0 offen lds
\tbuffer_load_ushort v1, v2, s[0:3], 0 offen
\tbuffer_store_dwordx4 v[0:3], v1, s[4:7], 0 offen
\tds_read_b128 v[0:3], v1
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[4:5], v[6:7], a[0:3]
\tv_mfma_f32_32x32x8_bf16 v[0:15], v[4:5], v[6:7], v[0:15]
; v_mfma_f32_4x4x4_bf16 in a comment
  - .agpr_count:     16
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 44
    .sgpr_count:     30
    .sgpr_spill_count: 3
    .vgpr_count:     120
    .vgpr_spill_count: 10
"""
PTX = """
\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\tld.global.b16 { %rs1 }, [ %rd2 + 0 ];
\tcp.async.cg.shared.global [ %r24 + 0 ], [ %rd10 + 0 ], 0x10, %r25;
\tcp.async.ca.shared.global [ %r24 + 0 ], [ %rd10 + 0 ], 0x4;
\tcp.async.wait_group 0;
\tst.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd42, %rd43, %p11, 1, 1, 0, 0;
\t@%p2 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
\twgmma.fence.sync.aligned;
"""
RESOURCES = "Resource usage:\n Function mm:\n  REG:103 STACK:{stack} SHARED:1024 LOCAL:0 CONSTANT[0]:600"


def object_file(*sizes: int) -> bytes:
    """A 64-bit ELF file with one function of each size, in both of its symbol tables, and one piece of data."""
    symbols = [(18, 256 * place, size) for place, size in enumerate(sizes)] + [(17, 0, 9999)]
    table = b"".join(struct.pack("<IBBHQQ", 0, about, 0, 1, address, size) for about, address, size in symbols)
    start = 64 + 3 * 64
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 224, 1, 0, 0, 64, 0, 64, 0, 0, 64, 3, 0)
    )
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, start, length, 0, 0, 8, 24)
        for kind, length in ((1, 0), (2, len(table)), (11, len(table)))
    ]
    return header + b"".join(sections) + table


def test_amd_assembly_is_read() -> None:
    found = read_amd(AMD, object_file(1000), lds_bytes=32768, threads=512)
    assert (found.vgprs, found.agprs, found.sgprs) == (120, 16, 30)
    assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (10, 3, 44)
    assert (found.lds_bytes, found.threads, found.code_bytes) == (32768, 512, 1000)
    assert found.matrix == {"v_mfma_f32_16x16x16_bf16": 2, "v_mfma_f32_32x32x8_bf16": 1}
    assert found.matrix_instructions == 3
    assert (found.loads, found.wide_loads) == (4, 2)


def test_assembly_without_a_figure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"says nothing of \.vgpr_spill_count"):
        read_amd(AMD.replace(".vgpr_spill_count", ".other"), object_file(1), 0, 64)


def test_nvidia_code_is_read() -> None:
    found = read_nvidia(PTX, object_file(10, 20), RESOURCES.format(stack=0), lds_bytes=65536, threads=256)
    assert (found.vgprs, found.agprs, found.sgprs) == (103, None, None)
    assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, None, 0)
    assert found.matrix == {
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": 1,
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 1,
    }
    assert (found.loads, found.wide_loads, found.code_bytes) == (4, 2, 30)


def test_a_stack_on_nvidia_may_hold_spills() -> None:
    found = read_nvidia(PTX, object_file(1), RESOURCES.format(stack=96), 0, 128)
    assert (found.vgpr_spills, found.scratch_bytes) == (None, 96)


def test_without_cuobjdump_registers_are_not_known() -> None:
    found = with_occupancy(read_nvidia(PTX, object_file(1), None, 0, 128), H100)
    assert found.vgprs is found.vgpr_spills is found.scratch_bytes is found.waves_per_simd is None


@pytest.mark.parametrize("binary", [b"", b"\x7fELF\x01\x01", b"MZ"])
def test_other_files_have_no_code_size(binary: bytes) -> None:
    with pytest.raises(ValueError, match="not a 64-bit"):
        code_bytes(binary)


@pytest.mark.parametrize(
    ("vgprs", "waves"),
    [
        (1, 8),
        (64, 8),
        (65, 7),
        (72, 7),
        (80, 6),
        (96, 5),
        (97, 4),
        (128, 4),
        (129, 3),
        (168, 3),
        (169, 2),
        (256, 2),
        (512, 1),
    ],
)
def test_steps_of_waves_by_vector_registers(vgprs: int, waves: int) -> None:
    for target in (MI300X, MI355X):
        assert waves_per_simd(target, vgprs, 40, 256) == waves


def test_many_scalar_registers_cost_the_eighth_wave() -> None:
    assert waves_per_simd(MI300X, 32, 100, 256) == 8
    assert waves_per_simd(MI300X, 32, 101, 256) == 7
    assert waves_per_simd(MI300X, 168, 106, 256) == 3


@pytest.mark.parametrize(
    ("vgprs", "lds", "threads", "simd", "unit"),
    [
        (64, 0, 256, 8, 32),
        (64, 0, 64, 8, 32),
        (168, 0, 512, 2, 8),  # three waves, of which a workgroup of eight takes two
        (128, 32768, 512, 4, 16),
        (128, 32769, 512, 4, 8),
        (128, 65536, 256, 4, 4),
        (128, 65537, 256, 4, 0),
        (256, 0, 1024, 0, 0),  # sixteen waves where eight fit
        (72, 8192, 256, 7, 28),
        (96, 24576, 256, 5, 8),
    ],
)
def test_workgroups_share_a_unit(vgprs: int, lds: int, threads: int, simd: int, unit: int) -> None:
    found = with_occupancy(Compiled(vgprs, 0, 30, 0, 0, 0, lds, threads), MI300X)
    assert (found.waves_per_simd, found.waves_per_unit) == (simd, unit)


def test_shared_memory_of_other_targets() -> None:
    assert waves_per_unit(MI355X, 128, 30, 65536, 256) == 8
    assert waves_per_unit(H100, 64, None, 65536, 128) == 12  # 64 KiB and the 1 KiB that NVIDIA keeps, three times
    assert waves_per_unit(H100, 255, None, 0, 128) == 8
    assert waves_per_unit(H100, 32, None, 0, 128) == 64
