"""Which backend runs: availability, fallback, AUTO, and the adapters against stubs with the packages' signatures."""

import logging
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from telefuser import kernel, platforms
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import attention, backends
from telefuser.ops.attention.backends import TABLE, availability, describe_choice
from tests.ops.attention.conftest import ALL_STUBS, FLASH_2, FLASH_3, FLASH_4, SAGE_1, SAGE_2, SPARGE
from tests.ops.attention.reference import qkv, reference
from tests.platforms.simulate import in_fresh_process, install_stubs
from tests.tolerances import assert_close, rel_error

IMPL = AttnImplType
SAGE = (IMPL.SAGE_ATTN_2_8_16, IMPL.SAGE_ATTN_2_8_8, IMPL.SAGE_ATTN_2_8_8_SM90)
FLASH = {
    IMPL.FLASH_ATTN_2: "flash_attn",
    IMPL.FLASH_ATTN_3: "flash_attn_interface",
    IMPL.FLASH_ATTN_4: "flash_attn.cute",
}
EXPLICIT = [impl for impl in IMPL if impl not in (IMPL.AUTO, IMPL.TORCH_SDPA)]


def calls(package):
    return sys.modules[package].calls if package in sys.modules else []


def half_qkv(**shape):
    return qkv(**{"batch": 1, "queries": 130, "heads": 4, "head_dim": 64, "dtype": torch.bfloat16, **shape})


@pytest.fixture
def all_stubs(stub):
    for name, source in ALL_STUBS.items():
        stub(name, source)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Availability


EVERYWHERE = {IMPL.TORCH_SDPA, IMPL.RADIAL_ATTN, IMPL.LOCAL_SPARSE_ATTN}
# What runs on which NVIDIA generation when every package is there, besides these; cuDNN depends on the build.
GENERATIONS = {
    (6, 0): set(),
    (7, 5): set(),
    (8, 0): {IMPL.FLASH_ATTN_2, IMPL.SAGE_ATTN_2_8_16},
    (8, 6): {IMPL.FLASH_ATTN_2, IMPL.SAGE_ATTN_2_8_16},
    (8, 9): {IMPL.FLASH_ATTN_2, IMPL.SAGE_ATTN_2_8_16, IMPL.SAGE_ATTN_2_8_8, IMPL.SPARGE_ATTN},
    (9, 0): {*FLASH, *SAGE, IMPL.SPARGE_ATTN},
    (10, 0): {IMPL.FLASH_ATTN_2, IMPL.FLASH_ATTN_4, IMPL.SAGE_ATTN_2_8_16, IMPL.SAGE_ATTN_2_8_8},
    (12, 0): {IMPL.FLASH_ATTN_2, IMPL.FLASH_ATTN_4, IMPL.SAGE_ATTN_2_8_16, IMPL.SAGE_ATTN_2_8_8},
    (13, 0): set(),
}


@pytest.mark.parametrize("arch", GENERATIONS)
def test_generations_decide_what_is_available(sim_gpu, all_stubs, arch):
    """S051, S052, S253, C15, B46; no kernel is called to find out."""
    sim_gpu(arch)
    answers = availability()
    usable = {impl for impl, reason in answers.items() if reason is None} - {IMPL.TORCH_CUDNN}
    assert usable == {*EVERYWHERE, *GENERATIONS[arch]}
    assert not any(calls(package) for package in ALL_STUBS)
    assert (answers[IMPL.TORCH_CUDNN] is None) == (arch[0] in range(8, 13) and torch.backends.cudnn.is_available())


def test_every_member_has_an_answer_with_a_reason_everywhere(monkeypatch, all_stubs):
    """S050, S055, S058: vendor backends are NVIDIA's, installed or not; our own kernels need a GPU."""
    monkeypatch.setattr(kernel, "HAS_TRITON", True)
    for platform in (platforms.CpuPlatform(), platforms.RocmPlatform(), platforms.NPUPlatform()):
        monkeypatch.setattr(platforms, "current_platform", platform)
        answers = availability()
        assert set(answers) == set(IMPL) - {IMPL.AUTO}
        ours = {IMPL.TRITON_INT8} if platform.device_name == "rocm" else set()
        assert {impl for impl, reason in answers.items() if reason is None} == EVERYWHERE | ours
        assert f"this platform is {platform.device_name}" in answers[IMPL.FLASH_ATTN_2]


def test_missing_packages_are_named_with_how_to_get_them(sim_gpu):
    sim_gpu((9, 0))
    answers = availability()
    assert "package flash_attn is not installed (pip install flash-attn" in answers[IMPL.FLASH_ATTN_2]
    assert "flash-attn-4" in answers[IMPL.FLASH_ATTN_4]
    assert "hopper folder" in answers[IMPL.FLASH_ATTN_3]
    assert "sageattention" in answers[IMPL.SAGE_ATTN_2_8_8]
    assert "tf_kernel" in answers[IMPL.SAGE_ATTN_2_8_8]


def test_flash_attention_4_alone_is_not_taken_for_2(sim_gpu, stub, tmp_path):
    stub("flash_attn.cute", FLASH_4)
    assert not (tmp_path / "flash_attn" / "__init__.py").exists()
    sim_gpu((9, 0))
    answers = availability()
    assert answers[IMPL.FLASH_ATTN_4] is None
    assert "flash_attn is not installed" in answers[IMPL.FLASH_ATTN_2]


def test_a_build_without_the_kernels_is_told_at_the_probe(sim_gpu, stub):
    """B44."""
    stub("sageattention", SAGE_2 + "\nSM90_ENABLED = False\n")
    sim_gpu((9, 0))
    assert "SM90_ENABLED is False" in availability()[IMPL.SAGE_ATTN_2_8_8_SM90]
    assert availability()[IMPL.SAGE_ATTN_2_8_8] is None


def test_sage_comes_from_either_package(sim_gpu, stub):
    """S053."""
    stub("tf_kernel", SAGE_2)
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    out = attention(q, k, v, attn_impl=IMPL.SAGE_ATTN_2_8_8_SM90)
    assert [call["name"] for call in calls("tf_kernel")] == ["fp8_cuda_sm90"]
    assert_close(out, reference(q, k, v)[0], "attention", torch.bfloat16)


def test_importing_tells_presence_and_asks_no_device(tmp_path):
    """S046, B10: SIM-CUDA in a fresh process where a question about the capability fails."""
    install_stubs(tmp_path, ("flash_attn", "sageattention", "spas_sage_attn"), "raise SystemExit('imported')")
    code = """
import torch, types
torch.version.cuda, torch.version.hip = "13.0", None
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
def fail(*args): raise AssertionError("asked for the device")
torch.cuda.get_device_capability = torch.cuda.get_device_properties = torch.cuda.current_device = fail
from telefuser.ops.attention import backends as b
print(b.FLASH_ATTN_2_AVAILABLE, b.FLASH_ATTN_3_AVAILABLE, b.FLASH_ATTN_4_AVAILABLE, b.SAGE_ATTN_AVAILABLE,
      b.SPARGE_ATTN_AVAILABLE, b.SDPA_AVAILABLE)
from telefuser.ops.attention import attention
q = torch.randn(1, 4, 2, 8)
attention(q, q, q, attn_impl="fa2")
attention(q, q, q)
"""
    printed = in_fresh_process(code, path=[tmp_path])
    assert "True False False True True True" in printed
    assert printed.count("FLASH_ATTN_2 cannot be used: the tensors are on cpu") == 1


def test_rocm_offers_what_pytorch_computes_and_loads_nothing_else(tmp_path):
    """S055, S056, S068, S073, B02: an AMD (9, 4) is no Hopper."""
    names = ("tf_kernel", "flash_attn", "flash_attn_interface", "sageattention", "spas_sage_attn")
    install_stubs(tmp_path, names, "raise SystemExit('imported')")
    code = f"""
import sys, torch
torch.version.cuda, torch.version.hip = None, "7.2.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda *a: (9, 4)
from telefuser.platforms import current_platform
from telefuser.ops.attention import attention, backends
import telefuser.kernel
telefuser.kernel.HAS_TRITON = True
print(current_platform.device_name, [i.name for i, reason in backends.availability().items() if reason is None])
q, k, v = torch.randn(3, 1, 8, 2, 16).unbind(0)
expected = attention(q, k, v, attn_impl="TORCH_SDPA")
print(all(torch.equal(attention(q, k, v, attn_impl="FLASH_ATTN_2"), expected) for _ in range(3)))
print([name for name in {names} if name in sys.modules], backends.FLASH_ATTN_2_AVAILABLE)
"""
    printed = in_fresh_process(code, path=[tmp_path])
    assert "rocm ['TORCH_SDPA', 'RADIAL_ATTN', 'LOCAL_SPARSE_ATTN', 'TRITON_INT8']" in printed
    assert "True\n[] False" in printed
    assert printed.count("FLASH_ATTN_2 cannot be used") == 1


def test_our_int8_kernel_is_taken_when_asked_for_and_never_else(triton_gpu, caplog):
    """B48, B50: head dims between its own keep their scale; one query; other keys than queries; grouped heads."""
    triton_gpu((8, 0))
    config = AttentionConfig(IMPL.TRITON_INT8, strict=True)
    for shape in ({}, {"queries": 1, "keys": 257, "head_dim": 72}, {"batch": 2, "queries": 77, "key_heads": 2}):
        q, k, v = half_qkv(**shape)
        out, lse = attention(q, k, v, config, scale=0.2, return_lse=True)
        expected, expected_lse = reference(q, k, v, scale=0.2)
        assert 1e-3 < rel_error(out, expected) < 2e-2
        assert rel_error(lse, expected_lse) < 1e-2
        assert_close(attention(q, k, v, scale=0.2), expected, "attention")
    assert IMPL.TRITON_INT8 not in backends.auto_order()
    attention(q, k, v, attn_impl=IMPL.SAGE_ATTN_2_8_16)
    assert [("SAGE_ATTN_2_8_16" in text, "TORCH_SDPA" in text) for text in messages(caplog)] == [(True, True)]


def test_our_int8_kernel_leaves_the_keys_as_they_are(triton_gpu):
    triton_gpu((9, 0))
    q, k, v = half_qkv()
    before = k.clone()
    attention(q, k, v, attn_impl=IMPL.TRITON_INT8)
    assert torch.equal(k, before)


# Fallback


@pytest.mark.parametrize("impl", [i for i in EXPLICIT if not i.takes_sparse_config], ids=lambda impl: impl.name)
def test_an_absent_backend_gives_way_with_one_warning(impl, caplog):
    """S047, S048, S049, S050, S244, B42: result, scale, mask, causal and layouts are those of TORCH_SDPA."""
    q, k, v = qkv(queries=16, keys=12)
    options = {"attn_mask": torch.rand(16, 12) > 0.3, "scale": 0.3, "is_causal": True, "output_layout": "BNSD"}
    expected = attention(q, k, v, attn_impl=IMPL.TORCH_SDPA, **options)
    config = AttentionConfig(impl)
    for _ in range(3):
        assert torch.equal(attention(q, k, v, config, **options), expected)
    assert len(messages(caplog)) == 1
    assert impl.name in messages(caplog)[0]
    assert "TORCH_SDPA" in messages(caplog)[0]


@pytest.mark.parametrize("impl", EXPLICIT, ids=lambda impl: impl.name)
def test_strict_raises_what_the_warning_says(impl, caplog):
    q, k, v = qkv()
    attention(q, k, v, AttentionConfig(impl))
    with pytest.raises(ValueError, match=impl.name) as raised:
        attention(q, k, v, AttentionConfig(impl, strict=True))
    assert str(raised.value) == messages(caplog)[0]


def test_a_sparse_config_without_state_is_dense_with_one_warning(caplog):
    """S223."""
    q, k, v = qkv()
    for _ in range(2):
        out = attention(q, k, v, AttentionConfig.radial_attention(dense_timesteps=40))
    assert_close(out, reference(q, k, v)[0], "attention")
    assert len(messages(caplog)) == 1
    assert "no sparse_state" in messages(caplog)[0]


REFUSED = {
    "float32": (IMPL.FLASH_ATTN_2, {"dtype": torch.float32}, {}, "float32"),
    "mask": (IMPL.FLASH_ATTN_2, {}, {"attn_mask": torch.ones(130, dtype=torch.bool)}, "mask"),
    "head dim": (IMPL.FLASH_ATTN_2, {"head_dim": 264}, {}, "264 is above its limit of 256"),
    "sage head dim": (IMPL.SAGE_ATTN_2_8_8, {"head_dim": 160}, {}, "160 is above its limit of 128"),
    "few queries": (IMPL.SAGE_ATTN_2_8_8, {"queries": 1, "keys": 257}, {}, "1 queries are below its block of 128"),
    "causal over other keys": (IMPL.FLASH_ATTN_3, {"keys": 200}, {"is_causal": True}, "130 and 200"),
    "sparge causal": (IMPL.SPARGE_ATTN, {}, {"is_causal": True}, "no causal"),
    "sparge lse": (IMPL.SPARGE_ATTN, {}, {"return_lse": True}, "log-sum-exp"),
    "sparge grouped": (IMPL.SPARGE_ATTN, {"key_heads": 2}, {}, "2 and 4"),
    "sage grouped lse": (IMPL.SAGE_ATTN_2_8_16, {"key_heads": 2}, {"return_lse": True}, "do not go together"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_a_backend_does_not_take_goes_to_sdpa(sim_gpu, all_stubs, caplog, case):
    """S244, B48, B50, B60: one warning for each kind of reason."""
    impl, shape, options, words = REFUSED[case]
    sim_gpu((9, 0))
    q, k, v = half_qkv(**shape)
    for _ in range(2):
        result = attention(q, k, v, attn_impl=impl, **options)
    out = result[0] if isinstance(result, tuple) else result
    assert_close(out, reference(q, k, v, is_causal="is_causal" in options)[0], "attention", v.dtype)
    assert len(messages(caplog)) == 1
    assert words in messages(caplog)[0]
    assert not any(calls(package) for package in ALL_STUBS)
    with pytest.raises(ValueError, match="cannot be used"):
        attention(q, k, v, AttentionConfig(impl, strict=True), **options)


def test_quantised_values_stop_at_a_documented_length(sim_gpu, all_stubs, caplog):
    """B68: noise was seen above 160,000 tokens."""
    sim_gpu((9, 0))
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 1, 131_073, 64)
    call = backends.Call(q, q, q, None, 0.125)
    refusal = backends.unsuitable(TABLE.record(IMPL.SAGE_ATTN_2_8_8_SM90), TABLE.probe(IMPL.SAGE_ATTN_2_8_8_SM90), call)
    assert refusal.kind == "max_keys"
    assert "131072" in refusal.text
    assert backends.unsuitable(TABLE.record(IMPL.FLASH_ATTN_3), TABLE.probe(IMPL.FLASH_ATTN_3), call) is None


def test_a_backend_without_a_backward_pass_gives_way_when_one_is_needed(sim_gpu, all_stubs, caplog):
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    q.requires_grad_()
    attention(q, k, v, attn_impl=IMPL.SAGE_ATTN_2_8_16).sum().backward()
    assert q.grad.isfinite().all()
    assert "no backward pass" in messages(caplog)[0]
    with torch.no_grad():
        attention(q, k, v, attn_impl=IMPL.SAGE_ATTN_2_8_16)
    assert len(calls("sageattention")) == 1


def test_a_log_sum_exp_that_needs_a_gradient_comes_from_sdpa(sim_gpu, all_stubs, caplog):
    """The packages return it without one, and nothing would say so."""
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    q.requires_grad_()
    _, lse = attention(q, k, v, attn_impl=IMPL.FLASH_ATTN_2, return_lse=True)
    lse.sum().backward()
    assert q.grad.abs().sum() > 0
    assert "log-sum-exp carries no gradient" in messages(caplog)[0]
    attention(q, k, v, attn_impl=IMPL.FLASH_ATTN_2)
    assert len(calls("flash_attn")) == 1


def test_a_sparse_kernel_leaves_cross_attention_to_sdpa_without_a_word(sim_gpu, all_stubs, caplog):
    """B52: the text's attention is dense by design."""
    sim_gpu((9, 0))
    q, k, v = half_qkv(keys=16)
    assert_close(attention(q, k, v, attn_impl=IMPL.SPARGE_ATTN), reference(q, k, v)[0], "attention", torch.bfloat16)
    assert messages(caplog) == []
    assert calls("spas_sage_attn") == []


# Adapters


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("impl", [*FLASH, *SAGE], ids=lambda impl: impl.name)
def test_adapters_speak_the_packages_signatures(sim_gpu, all_stubs, caplog, impl, is_causal, return_lse):
    """S239, S253: out and log-sum-exp, scale, causal, grouped heads and cross-attention as the formula has them."""
    sim_gpu((9, 0))
    for shape in ({}, {"key_heads": 2}, {"keys": 40}):
        if (is_causal and "keys" in shape) or (return_lse and "key_heads" in shape and impl in SAGE):
            continue
        q, k, v = half_qkv(**shape)
        result = attention(q, k, v, attn_impl=impl, is_causal=is_causal, return_lse=return_lse, scale=0.2)
        expected, expected_lse = reference(q, k, v, scale=0.2, is_causal=is_causal)
        assert_close(result[0] if return_lse else result, expected, "attention", torch.bfloat16)
        if return_lse:
            assert_close(result[1], expected_lse, "attention", torch.bfloat16)
    assert messages(caplog) == []
    assert calls(FLASH.get(impl, "sageattention"))


@pytest.mark.parametrize("impl", FLASH, ids=lambda impl: impl.name)
def test_flash_takes_the_strided_tensors_as_they_are(sim_gpu, all_stubs, impl):
    """S246."""
    sim_gpu((9, 0))
    q, k, v = torch.randn(1, 130, 3, 4, 64).bfloat16().unbind(2)
    attention(q, k, v, attn_impl=impl)
    (call,) = calls(FLASH[impl])
    assert [call[name].data_ptr() for name in "qkv"] == [t.data_ptr() for t in (q, k, v)]
    assert call["q"].stride() == q.stride()


@pytest.mark.parametrize(
    ("impl", "given", "wide"),
    [(IMPL.SAGE_ATTN_2_8_8, d, w) for d, w in ((40, 64), (72, 128), (80, 128), (96, 128), (128, 128))]
    + [(IMPL.FLASH_ATTN_2, 36, 40), (IMPL.SPARGE_ATTN, 80, 128)],
)
def test_padded_head_dims_keep_the_scale_of_the_original(sim_gpu, all_stubs, impl, given, wide):
    """B48."""
    sim_gpu((9, 0))
    q, k, v = half_qkv(head_dim=given)
    out = attention(q, k, v, attn_impl=impl)
    package = {IMPL.FLASH_ATTN_2: "flash_attn", IMPL.SPARGE_ATTN: "spas_sage_attn"}.get(impl, "sageattention")
    (call,) = calls(package)
    assert call["q"].shape[-1] == wide
    assert out.shape == q.shape
    assert_close(out, reference(q, k, v)[0], "attention", torch.bfloat16)


def test_sage_version_1_stands_in_and_leaves_k_alone(sim_gpu, stub):
    """1.0.6, the one on PyPI, subtracts k's mean in place and has no log-sum-exp."""
    stub("sageattention", SAGE_1)
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    before = k.clone()
    out = attention(q, k, v, attn_impl=IMPL.SAGE_ATTN_2_8_16)
    assert torch.equal(k, before)
    (call,) = calls("sageattention")
    assert call["extra"] == {}
    assert_close(out, reference(q, k, v)[0], "attention_int8", torch.bfloat16)
    assert "no function sageattn_qk_int8_pv_fp8_cuda" in availability()[IMPL.SAGE_ATTN_2_8_8]
    attention(q, k, v, attn_impl=IMPL.SAGE_ATTN_2_8_16, return_lse=True)
    assert len(calls("sageattention")) == 1


@pytest.mark.parametrize(("arch", "granularity"), [((8, 9), "per_thread"), ((12, 0), "per_warp")])
def test_sage_quantises_by_warp_on_consumer_blackwell(sim_gpu, all_stubs, arch, granularity):
    sim_gpu(arch)
    attention(*half_qkv(), attn_impl=IMPL.SAGE_ATTN_2_8_8)
    assert calls("sageattention")[0]["qk_quant_gran"] == granularity


@pytest.mark.parametrize(
    "source",
    [
        "def flash_attn_func(q, k, v, softmax_scale=None, causal=0): return attend(q, k, v, softmax_scale)[0].half()",
        "def flash_attn_func(q, k, v, dropout_p=0.0): return q",
        "def another_name(q, k, v): return q",
        "raise OSError('undefined symbol')",
    ],
)
def test_other_signatures_cost_at_most_one_warning_in_fifty_calls(sim_gpu, stub, caplog, source):
    """B44, B54."""
    stub("flash_attn", source)
    sim_gpu((8, 0))
    q, k, v = half_qkv(queries=16, dtype=torch.float16)
    expected = reference(q, k, v)[0]
    for _ in range(50):
        out = attention(q, k, v, attn_impl=IMPL.FLASH_ATTN_2)
    assert_close(out, expected, "attention")
    assert len(messages(caplog)) <= 1


def test_flash_attention_3_before_it_could_be_asked_for_the_log_sum_exp(sim_gpu, stub):
    """Its builds of 2024 always returned a pair."""
    source = """
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        out, lse = attend(q, k, v, softmax_scale, causal)
        return out.to(q.dtype), lse
    """
    stub("flash_attn_interface", source)
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    assert_close(attention(q, k, v, attn_impl="fa3"), reference(q, k, v)[0], "attention", torch.bfloat16)


def test_the_tensors_gpu_is_the_current_one_while_a_package_runs(sim_gpu, stub, monkeypatch):
    """B32: and not afterwards, whatever the package did."""
    platform = sim_gpu((9, 0))
    events = []

    class Context:
        def __enter__(self):
            events.append("enter")

        def __exit__(self, *error):
            events.append("exit")

    monkeypatch.setattr(type(platform), "device_ctx", classmethod(lambda cls, device: Context()))
    stub("flash_attn", FLASH_2)
    attention(*half_qkv(), attn_impl=IMPL.FLASH_ATTN_2)
    assert events == ["enter", "exit"]


# AUTO


@pytest.mark.parametrize(
    ("arch", "installed", "used"),
    [
        ((9, 0), ("flash_attn", "flash_attn.cute", "flash_attn_interface", "sageattention"), "flash_attn.cute"),
        ((9, 0), ("flash_attn", "flash_attn_interface", "sageattention"), "flash_attn_interface"),
        ((9, 0), ("flash_attn", "sageattention"), "flash_attn"),
        ((10, 0), ("flash_attn", "flash_attn.cute"), "flash_attn.cute"),
        ((8, 0), ("flash_attn", "flash_attn.cute", "sageattention"), "flash_attn"),
        ((12, 0), ("flash_attn", "flash_attn.cute"), "flash_attn"),
        ((7, 5), ("flash_attn",), None),
        ((9, 0), ("sageattention", "spas_sage_attn"), None),
    ],
)
def test_auto_takes_the_fastest_exact_backend(sim_gpu, stub, caplog, arch, installed, used):
    """Quantised and sparse backends are never taken unasked."""
    for name in installed:
        stub(name, ALL_STUBS[name])
    sim_gpu(arch)
    q, k, v = half_qkv()
    assert_close(attention(q, k, v), reference(q, k, v)[0], "attention", torch.bfloat16)
    assert [name for name in installed if calls(name)] == ([used] if used else [])
    assert messages(caplog) == []


@pytest.mark.parametrize(
    "options", [{"attn_mask": torch.ones(130, 130, dtype=torch.bool).tril()}, {}, {"is_causal": True}]
)
def test_auto_routes_what_no_kernel_takes_without_a_word(sim_gpu, all_stubs, caplog, options):
    sim_gpu((9, 0))
    q, k, v = half_qkv(dtype=torch.float32)
    mask = options.get("attn_mask")
    expected = reference(q, k, v, mask, is_causal="is_causal" in options)[0]
    assert_close(attention(q, k, v, **options), expected, "attention")
    assert messages(caplog) == []


def test_auto_outlives_a_package_that_fails_when_called(sim_gpu, stub, caplog):
    """Nobody asked for that package by name; somebody who did gets its error."""
    stub("flash_attn.cute", FLASH_4.replace("calls.append", "raise RuntimeError('no kernel image'); calls.append"))
    stub("flash_attn_interface", FLASH_3)
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    with pytest.raises(RuntimeError, match="no kernel image"):
        attention(q, k, v, attn_impl=IMPL.FLASH_ATTN_4)
    for tokens in (130, 130, 140, 150):
        q, k, v = half_qkv(queries=tokens)
        assert_close(attention(q, k, v), reference(q, k, v)[0], "attention", torch.bfloat16)
    assert len(calls("flash_attn_interface")) == 4
    # One call may ask for what it cannot do; after a second kind it is taken for broken.
    first, second = messages(caplog)
    assert "FLASH_ATTN_4 is left out for q (1, 4, 130, 64)" in first
    assert "FLASH_ATTN_4 is left out: it failed when called: no kernel image" in second
    assert "no kernel image" in TABLE.reason(IMPL.FLASH_ATTN_4)


def test_auto_does_not_hide_that_memory_ran_out(sim_gpu, stub):
    stub("flash_attn", FLASH_2.replace("calls.append", "raise torch.OutOfMemoryError('out of memory'); calls.append"))
    sim_gpu((8, 0))
    with pytest.raises(torch.OutOfMemoryError):
        attention(*half_qkv())
    assert TABLE.reason(IMPL.FLASH_ATTN_2) is None


@pytest.mark.parametrize("takes", [True, False])
def test_auto_asks_cudnn_for_each_call(sim_gpu, monkeypatch, takes):
    sim_gpu((9, 0))
    ran = []
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(backends.sdpa, "can_use_cudnn", lambda *a: takes)

    def kernel(q, k, v, mask, scale, is_causal, return_lse):
        ran.append(q.shape)
        return backends.sdpa.torch_sdpa(q, k, v, mask, scale, is_causal, 0.0, return_lse)

    monkeypatch.setattr(backends.sdpa, "cudnn_sdpa", kernel)
    q, k, v = half_qkv()
    assert_close(attention(q, k, v), reference(q, k, v)[0], "attention", torch.bfloat16)
    assert bool(ran) is takes
    ran.clear()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        attention(q, k, v)
    assert not ran


# Descriptions


def test_the_choice_is_described_in_one_line(sim_gpu, stub):
    assert describe_choice() == "AUTO: TORCH_SDPA"
    assert (
        describe_choice("fa2")
        == "TORCH_SDPA (FLASH_ATTN_2 cannot be used: it needs an NVIDIA GPU and this platform is cpu)"
    )
    stub("flash_attn", FLASH_2)
    sim_gpu((8, 0))
    line = describe_choice(AttentionConfig())
    assert line.startswith("AUTO: FLASH_ATTN_2")
    assert "TORCH_SDPA where it does not take the inputs" in line
    assert describe_choice(IMPL.FLASH_ATTN_2) == "FLASH_ATTN_2"
    assert "\n" not in line


def test_who_returns_the_log_sum_exp():
    assert backends.supports_return_lse(IMPL.FLASH_ATTN_3)
    assert backends.supports_return_lse("TORCH_SDPA")
    assert not backends.supports_return_lse(IMPL.SPARGE_ATTN)
    assert backends.supports_return_lse(IMPL.RADIAL_ATTN)
    assert backends.get_lse_fallback_impl() is IMPL.TORCH_SDPA


def test_sparge_gets_its_layout(sim_gpu, stub):
    """C16."""
    stub("spas_sage_attn", SPARGE)
    sim_gpu((9, 0))
    q, k, v = half_qkv()
    out = attention(q, k, v, attn_impl=IMPL.SPARGE_ATTN)
    assert_close(out, reference(q, k, v)[0], "attention", torch.bfloat16)
    assert calls("spas_sage_attn")[0]["q"].shape == (1, 4, 130, 64)
