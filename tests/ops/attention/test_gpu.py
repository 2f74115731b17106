"""`attention` on an NVIDIA GPU: PyTorch's own kernels at real shapes, and whichever vendor packages are installed."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import MaskMap, SparseAttentionState, attention, block_sparse
from telefuser.ops.attention.backends import TABLE, availability
from telefuser.ops.attention.block_mask import BlockMask
from telefuser.ops.attention.block_sparse import TABLE as SPARSE_TABLE
from telefuser.ops.attention.block_sparse import SparseExecutor, block_sparse_attention
from telefuser.ops.attention.dense_backend import Call
from tests.ops.attention.reference import qkv, reference
from tests.tolerances import assert_close, rel_error

pytestmark = pytest.mark.gpu

IMPL = AttnImplType
DENSE = [impl for impl in IMPL if TABLE.record(impl) is not None and TABLE.record(impl).is_exact]
SAGE = [impl for impl in IMPL if impl.name.startswith("SAGE") or impl is IMPL.TRITON_INT8]
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def gpu_qkv(**shape):
    return qkv(**{"queries": 200, "heads": 4, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda", **shape})


def installed(impl):
    reason = availability()[impl]
    if reason is not None:
        pytest.skip(f"{impl.name}: {reason}")
    return AttentionConfig(impl, strict=True)


SHAPES = {
    "self": {},
    "cross": {"queries": 200, "keys": 77},
    "one query": {"queries": 1, "keys": 257},
    "one of each": {"queries": 1},
    "odd": {"batch": 1, "queries": 1128, "heads": 3},
    "head dim 128": {"head_dim": 128},
    "head dim 72": {"head_dim": 72},
    "head dim 36": {"head_dim": 36},
    "head dim 20": {"head_dim": 20, "keys": 33},
}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("impl", [IMPL.AUTO, *DENSE], ids=lambda impl: impl.name)
def test_exact_backends_equal_the_formula(impl, dtype, shape, return_lse):
    """S051, S239, B50: where the backend does not take the call, TORCH_SDPA answers."""
    if impl is not IMPL.AUTO:
        installed(impl)
    q, k, v = gpu_qkv(dtype=dtype, **SHAPES[shape])
    result = attention(q, k, v, attn_impl=impl, return_lse=return_lse)
    expected, expected_lse = reference(q, k, v)
    assert_close(result[0] if return_lse else result, expected, "attention", dtype)
    if return_lse:
        assert result[1].shape == expected_lse.shape
        assert_close(result[1], expected_lse, "attention", dtype)


@pytest.mark.parametrize(("queries", "keys"), [(200, 200), (120, 200), (200, 120)])
@pytest.mark.parametrize("impl", [IMPL.AUTO, *DENSE], ids=lambda impl: impl.name)
def test_causal_starts_at_the_top_left(impl, queries, keys):
    """S239."""
    if impl is not IMPL.AUTO:
        installed(impl)
    q, k, v = gpu_qkv(queries=queries, keys=keys)
    out, lse = attention(q, k, v, attn_impl=impl, is_causal=True, return_lse=True)
    expected, expected_lse = reference(q, k, v, is_causal=True)
    assert_close(out, expected, "attention", torch.bfloat16)
    assert_close(lse, expected_lse, "attention", torch.bfloat16)
    assert_close(attention(q, k, v, attn_impl=impl, is_causal=True), expected, "attention", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("impl", [IMPL.AUTO, IMPL.TORCH_SDPA, IMPL.TORCH_CUDNN], ids=lambda impl: impl.name)
def test_masks_and_rows_that_see_nothing(impl, dtype):
    """B56, B58, B60: 393 is not a multiple of 8; the bias is float32 beside half-precision q."""
    q, k, v = gpu_qkv(batch=1, queries=393, heads=2, dtype=dtype)
    bias = torch.zeros(393, 393, device="cuda").masked_fill(torch.rand(393, 393, device="cuda") > 0.6, float("-inf"))
    bias[5] = float("-inf")
    bias[7] = torch.finfo(torch.float32).min
    bias[9, 3:] = torch.finfo(torch.float32).min
    effective = bias.masked_fill(bias < -1e30, float("-inf"))
    for mask, meaning in ((bias, effective), (bias == 0, bias == 0), (effective.to(dtype), effective)):
        out = attention(q, k, v, attn_impl=impl, attn_mask=mask)
        assert out.isfinite().all()
        assert (out[:, [5, 7]] == 0).all()
        assert_close(out, reference(q, k, v, meaning)[0], "attention", dtype)
    causal = attention(q, k, v, attn_impl=impl, attn_mask=bias == 0, is_causal=True)
    assert_close(causal, reference(q, k, v, bias == 0, is_causal=True)[0], "attention", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("keys", [33, 65])
def test_broadcast_keys_and_values(dtype, keys):
    """B60: stride 0 along the batch, and a key length that leaves 1 over 32."""
    q = torch.randn(4, 33, 8, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, keys, 8, 64, device="cuda", dtype=dtype).expand(4, -1, -1, -1) for _ in range(2))
    mask = torch.rand(4, 1, 33, keys, device="cuda") > 0.2
    assert_close(attention(q, k, v, attn_mask=mask), reference(q, k, v, mask)[0], "attention", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_grouped_key_heads_allocate_no_score_matrix(dtype):
    """B64: 8 heads x 8192 x 8192 scores would be at least 1 GiB."""
    q, k, v = gpu_qkv(batch=1, queries=8192, heads=8, key_heads=2, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
    rows = slice(4000, 4016)
    assert_close(out[:, rows], reference(q[:, rows], k, v)[0], "attention", dtype)


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_formula_is_chunked_where_only_it_is_left(return_lse):
    """B136: the whole matrix would be 2 GiB."""
    q, k, v = gpu_qkv(batch=1, queries=8192, heads=8, dtype=torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with sdpa_kernel([SDPBackend.MATH]):
        result = attention(q, k, v, return_lse=return_lse)
    assert torch.cuda.max_memory_allocated() - before < 2**30
    rows = slice(4000, 4016)
    expected, expected_lse = reference(q[:, rows], k, v)
    assert_close((result[0] if return_lse else result)[:, rows], expected, "attention")
    if return_lse:
        assert_close(result[1][..., rows], expected_lse, "attention")


def test_the_wan_shape_agrees_in_every_available_backend():
    """S253: 480p, 33 frames, 12 heads of 128."""
    q, k, v = gpu_qkv(batch=1, queries=14_040, heads=12, head_dim=128)
    rows = slice(7000, 7032)
    expected = reference(q[:, rows], k, v)[0]
    for impl, reason in availability().items():
        record = TABLE.record(impl)
        if record is not None and reason is None and (record.is_exact or impl in SAGE):
            out = attention(q, k, v, AttentionConfig(impl, strict=True))
            assert_close(out[:, rows], expected, "attention" if record.is_exact else "attention_int8", torch.bfloat16)


def test_strided_projections_are_read_in_place():
    """S245, S246: no copy of q, k or v, so the peak is the output and what the kernel itself needs."""
    packed = torch.randn(1, 8192, 3, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    attention(q, k, v, attn_impl=IMPL.TORCH_SDPA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, attn_impl=IMPL.TORCH_SDPA)
    one = q.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < 2 * one
    rows = slice(0, 16)
    assert_close(out[:, rows], reference(q[:, rows], k, v)[0], "attention", torch.bfloat16)


@pytest.mark.parametrize("impl", [IMPL.AUTO, *DENSE], ids=lambda impl: impl.name)
def test_gradients_equal_those_of_the_formula(impl):
    if impl is not IMPL.AUTO:
        installed(impl)
    q, k, v = (t.requires_grad_() for t in gpu_qkv(batch=1, queries=64))

    def grads(out):
        out.float().square().sum().backward()
        result = [t.grad.clone() for t in (q, k, v)]
        q.grad = k.grad = v.grad = None
        return result

    scores = torch.einsum("bqnd,bknd->bnqk", q.double(), k.double()) * 64**-0.5
    expected = grads(torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v.double()))
    for got, wanted in zip(grads(attention(q, k, v, attn_impl=impl)), expected):
        assert rel_error(got, wanted) < 2e-2


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_equals_eager(needs_grad, masked):
    """S109, S114, C11: Inductor, whole graph, inference and training."""
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_(needs_grad) for t in gpu_qkv(queries=96))
    mask = torch.rand(96, 96, device="cuda") > 0.3 if masked else None

    def step(attend):
        out = attend(q, k, v, attn_mask=mask)
        if not needs_grad:
            return [out]
        out.float().square().sum().backward()
        result = [out.detach(), *(t.grad.clone() for t in (q, k, v))]
        q.grad = k.grad = v.grad = None
        return result

    for got, wanted in zip(step(torch.compile(attention, fullgraph=True)), step(attention)):
        assert rel_error(got, wanted) < 2e-2


def test_the_node_can_be_captured_in_a_cuda_graph():
    """B112: no synchronisation inside."""
    q, k, v = gpu_qkv()
    mask = torch.rand(200, 200, device="cuda") > 0.3
    for options in ({}, {"attn_mask": mask}, {"return_lse": True}):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            attention(q, k, v, **options)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(q, k, v, **options)
        graph.replay()
        expected = attention(q, k, v, **options)
        pair = isinstance(captured, tuple)
        assert torch.equal(captured[0] if pair else captured, expected[0] if pair else expected)


def test_cpu_tensors_beside_a_gpu_stay_on_the_cpu():
    """S086, B16."""
    q, k, v = qkv()
    for impl in (IMPL.AUTO, IMPL.FLASH_ATTN_2, IMPL.TORCH_CUDNN):
        out = attention(q, k, v, attn_impl=impl)
        assert out.device.type == "cpu"
        assert_close(out, reference(q, k, v)[0], "attention")
    with pytest.raises(RuntimeError, match="device"):
        attention(q.cuda(), k, v)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("impl", SAGE, ids=lambda impl: impl.name)
def test_quantised_backends_stay_near_the_formula(impl, head_dim, dtype):
    """B48: head dims between 64 and 128 keep their own scale; larger ones go to TORCH_SDPA."""
    installed(impl)
    for queries in (1, 77, 300):
        q, k, v = gpu_qkv(batch=1, queries=queries, keys=257, heads=8, head_dim=head_dim, dtype=dtype)
        out = attention(q, k, v, attn_impl=impl)
        assert_close(out, reference(q, k, v)[0], "attention_int8", dtype)


@pytest.mark.parametrize("impl", SAGE, ids=lambda impl: impl.name)
def test_a_value_channel_of_zeros_stays_zero(impl):
    """B78."""
    installed(impl)
    q, k, v = gpu_qkv(batch=1, queries=256, head_dim=128)
    v[..., 7] = 0
    out = attention(q, k, v, attn_impl=impl)
    assert out.isfinite().all()
    assert (out[..., 7] == 0).all()


@pytest.mark.parametrize("impl", [IMPL.SAGE_ATTN_2_8_8, IMPL.SAGE_ATTN_2_8_8_SM90], ids=lambda impl: impl.name)
def test_quantised_values_near_their_length_limit(impl):
    """B68."""
    config = installed(impl)
    q, k, v = gpu_qkv(batch=1, queries=131_072, heads=1, head_dim=128)
    rows = torch.arange(0, 131_072, 2048, device="cuda")
    out = attention(q, k, v, config)
    assert_close(out[:, rows], reference(q[:, rows], k, v)[0], "attention_int8", torch.bfloat16)


@pytest.mark.multi_gpu
def test_tensors_on_a_second_gpu():
    """B32, S271: the current GPU is another one, and stays so."""
    torch.cuda.set_device(0)
    for impl, reason in availability(torch.device("cuda", 1)).items():
        if reason is not None or impl is IMPL.SPARGE_ATTN:
            continue
        q, k, v = gpu_qkv(batch=1, queries=2904, heads=10, head_dim=128, device="cuda:1")
        out = attention(q, k, v, attn_impl=impl)
        assert torch.cuda.current_device() == 0
        assert_close(out, reference(q, k, v)[0], "attention_int8" if impl in SAGE else "attention", torch.bfloat16)


def executor_or_skip(executor):
    reason = SPARSE_TABLE.reason(executor, torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"{executor.name}: {reason}")
    return SPARSE_TABLE.record(executor), SPARSE_TABLE.probe(executor, torch.device("cuda"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("leading", [(), (2, 4)])
@pytest.mark.parametrize("executor", SparseExecutor, ids=lambda executor: executor.name)
def test_sparse_executors_equal_masked_attention(executor, leading, block, head_dim, dtype):
    record, entry = executor_or_skip(executor)
    tokens = 1000
    blocks = -(-tokens // block)
    keep = torch.rand(*leading, blocks, blocks, device="cuda") < 0.4
    keep.diagonal(dim1=-2, dim2=-1)[:] = True
    keep[..., 1, :] &= not record.has_lse
    mask = BlockMask(keep, block, tokens)
    q, k, v = gpu_qkv(queries=tokens, head_dim=head_dim, dtype=dtype)
    call = Call(*(t.transpose(1, 2) for t in (q, k, v)), None, head_dim**-0.5, return_lse=record.has_lse)
    if (reason := block_sparse.refusal(record, call, mask)) is not None:
        pytest.skip(f"{executor.name}: {reason}")
    out, lse = block_sparse.run(record, entry, call, mask)
    seen = mask.by_head.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :tokens, :tokens]
    expected, expected_lse = reference(q, k, v, mask=seen)
    assert_close(out.transpose(1, 2), expected, "attention" if record.is_exact else "attention_int8", dtype)
    if record.has_lse:
        assert_close(lse, expected_lse, "attention", dtype)


def test_sparse_attention_above_65536_tokens():
    """B76: no limit of a launch grid, no offset of 32 bits; the last block is cut off."""
    tokens, block = 70_001, 128
    blocks = -(-tokens // block)
    keep = torch.eye(blocks, dtype=torch.bool, device="cuda")
    keep[:, [0, -1]] = True
    q, k, v = gpu_qkv(batch=1, queries=tokens, heads=1)
    out, _ = block_sparse_attention(
        Call(*(t.transpose(1, 2) for t in (q, k, v)), None, 0.125), BlockMask(keep, block, tokens)
    )
    rows = torch.tensor([0, 127, 128, 35_000, 69_887, 69_888, 70_000], device="cuda")
    seen = keep[rows // block].repeat_interleave(block, -1)[:, :tokens]
    expected, _ = reference(q[:, rows], k, v, mask=seen)
    assert_close(out.transpose(1, 2)[:, rows], expected, "attention", torch.bfloat16)


@pytest.mark.parametrize("impl", [IMPL.RADIAL_ATTN, IMPL.TRITON_INT8], ids=lambda impl: impl.name)
def test_our_kernels_can_be_captured_in_a_cuda_graph(impl):
    """B112: lists and launch settings are made before, and nothing waits for the device."""
    q, k, v = gpu_qkv(batch=1, queries=1280)
    options = {"attn_impl": impl}
    if impl is IMPL.RADIAL_ATTN:
        config = AttentionConfig.radial_attention(dense_timesteps=0)
        options = {"attention_config": config, "sparse_state": SparseAttentionState(config, MaskMap(1280, 4))}
    expected = attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, **options)
    graph.replay()
    assert torch.equal(captured, expected)
