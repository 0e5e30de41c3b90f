"""`benchmarks/decode.py`: the part of a decode step that a kernel belongs to, and times as differences."""

import io
import json
import sys
import time
from types import SimpleNamespace

import pytest
from places import ROOT


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import decode

    return decode


# Names as torch's profiler had them on an H200, calls in a step of 28 layers
KERNELS = {
    "products": [
        ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<cutlass::float_e4m3_t, cutlass::bfloat16_t>>", 84),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_bias_TNT", 28),
    ],
    "attention": [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<2>>>", 28),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", 28),
        ("void flash::prepare_varlen_num_blocks_kernel<1, false>", 1),
    ],
    "other": [
        ("triton_red_fused__to_copy_abs_clamp_cutlass_scaled_mm_div_max_mul_silu_2", 28),
        ("triton_poi_fused_4", 27),
    ],
    "head": [("nvjet_sm90_tst_384x8_64x4_2x1_v_bz_TNT", 1)],
    "after": [("_topk_log_softmax_kernel", 1), ("Memcpy DtoH (Device -> Pinned)", 5)],
}


def test_kernels_by_part(decode):
    assert set(KERNELS) == set(decode.PARTS)
    for part, kernels in KERNELS.items():
        for name, calls in kernels:
            assert decode.part_of(name, calls, layers=28) == part, name
    # In a hybrid with 8 layers of attention and 24 others
    assert decode.part_of("triton_poi_fused_4", 8, layers=8) == "other"
    assert decode.part_of("Memcpy DtoH (Device -> Pinned)", 5, layers=8) == "after"


def test_a_step_is_a_difference_of_two_generations(decode, monkeypatch):
    """The prompt's share drops out, as it is in both."""
    now, asked = [0.0], []

    def sample(length: int) -> None:
        asked.append(length)
        now[0] += 100 + 0.5 * length

    monkeypatch.setattr(decode, "CUDA", False)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert decode.decode_step(sample, 64, layers=2) == {"decode": pytest.approx(500)}  # milliseconds
    assert asked == [36, 28, 36]


def test_a_benchmark_that_is_cut_off_keeps_what_it_measured(decode, monkeypatch, tmp_path):
    row = {"8": {"decode": 4.0}}
    lines = iter(["READY\n", "READY\n", f"RESULT {json.dumps(row)}\n", KeyboardInterrupt])

    def next_line(process, wanted: str, until: float) -> str:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        assert line.startswith(wanted)
        return line.removeprefix(wanted)

    engine = SimpleNamespace(Popen=lambda *args, **kwargs: SimpleNamespace(stdin=io.StringIO()), PIPE=None)
    monkeypatch.setattr(decode, "subprocess", engine)
    monkeypatch.setattr(decode, "next_line", next_line)
    monkeypatch.setattr(sys, "argv", ["decode.py", "--kinds", "bf16", "fp8", "--output", str(tmp_path / "new")])
    with pytest.raises(KeyboardInterrupt):
        decode.main()
    (path,) = (tmp_path / "new").iterdir()
    from raw_results import read_results

    assert read_results(path)["results"] == {"bf16": row}
