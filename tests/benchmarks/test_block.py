"""The block's benchmark: its unfused form computes what the block does, and kernels are put into the right part."""

import torch

from benchmarks import block
from tests.tolerances import rel_error, tolerance


def test_the_unfused_form_computes_the_same():
    model, (x, time, rope, *text) = block.inputs({"dim": 48, "ffn_dim": 64, "num_heads": 2}, 24, torch.device("cpu"))
    given = x, time, rope, *(t.float() for t in text)
    model.float()
    with torch.no_grad():
        assert rel_error(block.operator_by_operator(model, *given), model(*given)) < tolerance("matmul", torch.float32)


def test_kernels_of_known_names_are_told_apart():
    names = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0": 0,
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, cutlass::bfloat16_t>>": 0,
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT": 1,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": 1,
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64": 1,
        "triton_poi_fused_addmm_gelu_7": 2,
        "_norm_kernel": 2,
        "_rms_norm_rotary_kernel": 2,
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": 2,
    }
    classes = ["attention", "matrix products", block.REST]
    assert {name: classes.index(block.class_of(name)) for name in names} == names


def test_smoke_runs_and_records_nothing(tmp_path, capsys):
    block.main(["--smoke", "--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert "24 tokens, fused:" in out
    assert "operator by operator:" in out
    assert not list(tmp_path.iterdir())
