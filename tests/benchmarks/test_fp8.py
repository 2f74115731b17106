"""The FP8 benchmark: it runs, it puts kernels into the right part, and it gives a wrong layer no speed."""

import pytest
import torch

from benchmarks import fp8
from benchmarks.timing import Timer
from telefuser.models.wan_video_dit import WanModel
from telefuser.ops.quantized_linear import LinearFP8


def test_kernels_of_known_names_are_told_apart():
    names = {
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel": 1,
        "_scaled_mm_fp8_kernel": 1,
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT": 1,
        "_per_token_quant_fp8_kernel": 2,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0": 0,
        "triton_red_fused__to_copy_abs_amax_clamp_mul_quant_3": 3,
        "_norm_kernel": 3,
    }
    parts = ["attention", "matrix products", fp8.QUANTISING, fp8.REST]
    assert {name: parts.index(fp8.part_of(name)) for name in names} == names


def test_the_random_model_is_as_the_loader_leaves_it():
    size = {"dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 1, "text_dim": 32}
    model = fp8.random_model(size, torch.device("cpu"), fp8.AttnImplType.TORCH_SDPA)
    for name, parameter in model.named_parameters():
        wide = any(part in name for part in WanModel.FP32_PARAMETERS)
        assert parameter.dtype is (torch.float32 if wide else torch.bfloat16), name
        assert parameter.isfinite().all()
        assert 0 < parameter.float().std() < 1


def test_smoke_runs_and_records_nothing(tmp_path, capsys):
    fp8.main(["--smoke", "--no-rivals", "--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert "NATIVE" in out
    assert "24x48 to 32: bfloat16" in out
    assert "smoke block without attention, 24 tokens: bfloat16" in out
    assert "smoke forward" in out
    assert "relative error of FP8 to bfloat16" in out
    assert not list(tmp_path.iterdir())


def test_attention_is_left_out_of_a_block_and_comes_back():
    attention, q = fp8.wan_video_dit.attention, torch.randn(1, 3, 2, 4)
    with fp8.without_attention():
        assert fp8.wan_video_dit.attention(q, q + 1, q + 2, attention_config=None) is q
    assert fp8.wan_video_dit.attention is attention


def test_a_layer_that_computes_something_else_has_no_speed(monkeypatch):
    class Wrong(LinearFP8):
        def forward(self, x):
            return super().forward(x) * 1.1

    monkeypatch.setattr(fp8, "LinearFP8", Wrong)
    with pytest.raises(SystemExit, match=r"relative error 0\.1"):
        fp8.layer(48, 32, 24, Timer(torch.device("cpu")), rivals=False)
