import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import telefuser.kernel.triton as kernels
from telefuser.ops.rotary import apply_rotary_emb, rms_norm_rotary
from telefuser.platforms import NPUPlatform
from tests.golden import golden_dir
from tests.ops.machines import on_cpu, use
from tests.ops.rounding import assert_rounded_once
from tests.tolerances import assert_close

B, S, H, D = 2, 7, 3, 16


def tables(*shape, dtype=torch.float64):
    angles = torch.rand(shape, dtype=torch.float64) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def formula(x, cos, sin):
    """Rotation of neighbouring pairs as a complex product in float64; cos and sin broadcast to [..., D/2]."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float64])
def test_agrees_with_the_complex_product(dtype, table_dtype):
    # S273: half precision is rounded once
    x, (cos, sin) = torch.randn(B, S, H, D).to(dtype), tables(S, D // 2, dtype=table_dtype)
    out = apply_rotary_emb(x, (cos, sin))
    assert out.dtype == dtype
    assert_close(out, formula(x, cos[:, None], sin[:, None]))


def test_float64_tables_are_not_rounded_for_float32_input():
    x, (cos, sin) = torch.randn(B, S, H, 128), tables(S, 64)
    wanted = formula(x, cos[:, None], sin[:, None])
    assert torch.equal(apply_rotary_emb(x, (cos, sin)), wanted.float())


@pytest.mark.parametrize(
    "shape",
    [(S, D // 2), (S, 1, D // 2), (S, 1, 1, D // 2), (1, S, 1, D // 2), (S, D), (S, 1, D), (S, 1, 1, D)],
    ids=str,
)
def test_every_shape_of_the_tables(shape, interpreted_cuda, monkeypatch):
    x, half = torch.randn(B, S, H, D), tables(S, D // 2, dtype=torch.float32)
    wanted = formula(x, *(t[:, None] for t in half))
    # Full-width tables hold each value twice.
    freqs = tuple((t.repeat_interleave(2, -1) if shape[-1] == D else t).reshape(shape) for t in half)
    assert_close(apply_rotary_emb(x, freqs), wanted)
    monkeypatch.setattr(interpreted_cuda, "op_keys", ())
    assert_close(apply_rotary_emb(x, freqs), wanted)


@pytest.mark.parametrize(("batch", "tokens"), [(2, 7), (2, 1), (1, 1), (1, 7), (7, 7)])
def test_tables_of_each_batch_item(batch, tokens):
    x, (cos, sin) = torch.randn(batch, tokens, H, D), tables(batch, tokens, 1, D // 2)
    assert_close(apply_rotary_emb(x, (cos, sin)), formula(x, cos, sin))
    full_width = tuple(t.repeat_interleave(2, -1) for t in (cos, sin))
    assert_close(apply_rotary_emb(x, full_width), formula(x, cos, sin))


@pytest.mark.parametrize("sequence_dim", [0, 1, 2, -2, -3, -4])
@pytest.mark.parametrize("per_item", [True, False])
def test_tokens_in_any_dimension(sequence_dim, per_item, interpreted_cuda, monkeypatch):
    x, freqs = torch.randn(B, S, H, D), tables(B if per_item else 1, S, 1, D // 2, dtype=torch.float32)
    wanted = formula(x, *freqs)
    for _ in range(2):
        out = apply_rotary_emb(x.movedim(1, sequence_dim), freqs, sequence_dim=sequence_dim)
        assert_close(out, wanted.movedim(1, sequence_dim))
        monkeypatch.setattr(interpreted_cuda, "op_keys", ())


def test_strided_input_and_tables(interpreted_cuda):
    # B30
    q = torch.randn(B, S, 3, H, D).unbind(2)[0]
    cos, sin = torch.rand(S, 2, D // 2).unbind(1)
    for x in (q, torch.randn(1, S, H, D).expand(B, -1, -1, -1), torch.randn(B, S, H, 2 * D)[..., ::2]):
        before = x.clone()
        out = apply_rotary_emb(x, (cos, sin))
        assert torch.equal(out, apply_rotary_emb(x.contiguous(), (cos.contiguous(), sin.contiguous())))
        assert_close(out, formula(x, cos[:, None], sin[:, None]))
        assert torch.equal(x, before)


def test_no_tokens():
    # B26
    out = apply_rotary_emb(torch.empty(2, 0, H, D).bfloat16(), tables(0, D // 2))
    assert out.shape == (2, 0, H, D)
    assert out.dtype == torch.bfloat16


def test_uses_no_complex_numbers(monkeypatch):
    # B36: an NPU cannot index them

    class NoComplex(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            assert not any(t.is_complex() for t in (*args, out) if isinstance(t, torch.Tensor))
            return out

    use(monkeypatch, on_cpu(NPUPlatform))
    x, (cos, sin) = torch.randn(1, 7, 2, 16), tables(7, 8, dtype=torch.float32)
    with NoComplex():
        out = apply_rotary_emb(x, (cos, sin))
    assert (out - formula(x, cos[:, None], sin[:, None])).abs().max() <= 1e-6


def test_launches_its_kernel(interpreted_cuda, monkeypatch):
    launched, launch = [], kernels.apply_rotary_embedding

    def record(*args, **options):
        launched.append(options)
        return launch(*args, **options)

    monkeypatch.setattr(kernels, "apply_rotary_embedding", record)
    apply_rotary_emb(torch.randn(B, S, H, D), tables(S, D // 2))
    assert launched == [{"interleaved": True}]
    apply_rotary_emb(torch.randn(B, S, H, D).double(), tables(S, D // 2))
    apply_rotary_emb(torch.randn(B, S, H, D, requires_grad=True), tables(S, D // 2))
    assert len(launched) == 1


def test_gradient():
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    freqs = tables(3, 2)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb(x, freqs), (x,))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradient_of_the_compiled_operator(backend):
    x = torch.randn(B, S, H, D, dtype=torch.float64, requires_grad=True)
    freqs, weight = tables(S, D // 2), torch.randn(B, S, H, D, dtype=torch.float64)

    def loss(x):
        return (apply_rotary_emb(x, freqs) * weight).sum()

    (wanted,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(x), x)
    assert_close(got, wanted)


def test_gradient_of_the_tables_survives_compilation():
    # The opaque form has none for them, so tables that need one are traced.
    x, freqs = torch.randn(B, S, H, D), tuple(t.requires_grad_() for t in tables(S, D // 2))

    def loss(cos, sin):
        return apply_rotary_emb(x, (cos, sin)).square().sum() + cos.sum()

    wanted = torch.autograd.grad(loss(*freqs), freqs)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*freqs), freqs)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)


def test_registered_operator_is_well_formed():
    # S104: schema, fake result, autograd and compilation, each checked by PyTorch's own tool
    x, (cos, sin) = torch.randn(B, S, H, D, requires_grad=True), tables(1, S, 1, D // 2, dtype=torch.float32)
    for view in (x, x.transpose(1, 2)):
        torch.library.opcheck(torch.ops.telefuser.apply_rotary_emb.default, (view, cos[:, :1], sin[:, :1]))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((S - 1, D // 2), r"cos holds 6 positions and x has 7 tokens"),
        ((S + 1, 1, D // 2), r"cos holds 8 positions and x has 7 tokens"),
        ((S + 1, 1, 1, D // 2), r"cos holds 8 positions"),
        ((S, D // 4), r"cos of shape \(7, 4\) does not fit x of shape \(2, 7, 3, 16\)"),
        ((S, H, D // 2), r"does not fit"),
        ((B + 1, S, 1, D // 2), r"does not fit"),
        ((D // 2,), r"does not fit"),
    ],
)
def test_refuses_tables_that_do_not_fit(shape, message):
    with pytest.raises(ValueError, match=message):
        apply_rotary_emb(torch.randn(B, S, H, D), (torch.rand(shape), torch.rand(shape)))


def test_refuses_other_input():
    cos, sin = tables(S, D // 2)
    with pytest.raises(ValueError, match=r"\[B, S, H, D\] tensor, got torch\.float32 of shape \(7, 3, 16\)"):
        apply_rotary_emb(torch.randn(S, H, D), (cos, sin))
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        apply_rotary_emb(torch.ones(B, S, H, D, dtype=torch.int64), (cos, sin))
    with pytest.raises(ValueError, match="must be even, not 15"):
        apply_rotary_emb(torch.randn(B, S, H, 15), (cos, sin))
    with pytest.raises(ValueError, match="sequence_dim is 3"):
        apply_rotary_emb(torch.randn(B, S, H, D), (cos, sin), sequence_dim=3)
    with pytest.raises(ValueError, match=r"not torch\.complex128"):
        apply_rotary_emb(torch.randn(B, S, H, D), (torch.complex(cos, sin), sin))


def test_refuses_what_is_no_pair_of_tables():
    cos, sin = tables(S, D // 2)
    x = torch.randn(B, S, H, D)
    # Two stacked tables would unpack as well, and so would a complex table of two tokens.
    for freqs in (torch.complex(cos, sin), torch.stack((cos, sin)), (cos, sin, cos), (cos,), (cos, None), None):
        with pytest.raises(ValueError, match="freqs must be the pair"):
            apply_rotary_emb(x, freqs)
        with pytest.raises(ValueError, match="freqs must be the pair"):
            rms_norm_rotary(x.flatten(2), x.flatten(2), None, None, freqs, H)
    for sequence_dim in (1.0, "1", None):
        with pytest.raises(TypeError, match=f"sequence_dim must be an int, not {sequence_dim!r}"):
            apply_rotary_emb(x, (cos, sin), sequence_dim=sequence_dim)


@pytest.mark.skipif(golden_dir() is None, reason="the reference data (TELEFUSER_GOLDEN) is not here")
@pytest.mark.parametrize("interpreted", [False, True])
def test_agrees_with_the_official_rotation(interpreted, request):
    import json

    from safetensors.torch import load_file

    if interpreted:
        request.getfixturevalue("interpreted_cuda")
    data = load_file(golden_dir() / "wan" / "rope.safetensors")
    for case in json.loads((golden_dir() / "wan" / "rope.json").read_text())["applies"]:
        x, wanted = data[f"{case['tensor']}.x"], data[f"{case['tensor']}.out"]
        width = x.shape[-1]
        cos, sin = data[f"table_d{width}.cos"], data[f"table_d{width}.sin"]
        # Columns of the table: frame first, then height and width with a third of the pairs each.
        parts = [width // 2 - 2 * (width // 6), width // 6, width // 6]
        for item, (frames, height, columns) in enumerate(case["grid_sizes"]):
            grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(columns))
            freqs = tuple(
                torch.cat([part[grid[:, axis]] for axis, part in enumerate(t.split(parts, dim=1))], dim=1)
                for t in (cos, sin)
            )
            tokens = len(grid)
            out = apply_rotary_emb(x[item : item + 1, :tokens], freqs)
            assert (out - wanted[item, :tokens]).abs().max() <= 1e-6


# Behind the norm of queries and keys


def normed(x, weight, heads):
    x = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (x if weight is None else x * weight.double()).unflatten(-1, (heads, -1))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norm_and_rotation_agree_with_the_float64_formula(dtype, interpreted, request):
    if interpreted:
        request.getfixturevalue("interpreted_cuda")
    qkv = torch.randn(2, 5, 3, 36).to(dtype)
    weights = torch.randn(2, 36)
    angles = torch.rand(5, 6, dtype=torch.float64) * 6
    wide = angles.cos(), angles.sin()
    tables = wide if dtype is torch.float64 else tuple(t.float() for t in wide)
    for q_weight, k_weight in (weights, (None, None)):
        outs = rms_norm_rotary(*qkv.unbind(2)[:2], q_weight, k_weight, tables, 3)
        for out, x, weight in zip(outs, qkv.unbind(2), (q_weight, k_weight)):
            assert out.shape == (2, 5, 3, 12)
            assert out.dtype == dtype
            wanted = apply_rotary_emb(normed(x, weight, 3), wide)
            assert_close(out, wanted)
            if dtype in (torch.float16, torch.bfloat16):
                assert_rounded_once(out, wanted)


def test_norm_and_rotation_pass_gradients_on():
    q, k = (torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = [torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    angles = torch.rand(3, 2, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    assert torch.autograd.gradcheck(lambda q, k, *w: rms_norm_rotary(q, k, *w, tables, 2), (q, k, *weights))


def test_norm_and_rotation_refuse_what_does_not_fit():
    x, tables = torch.randn(2, 5, 36), (torch.randn(5, 6), torch.randn(5, 6))
    with pytest.raises(ValueError, match=r"alike, got \(2, 5, 36\) and \(2, 1, 36\)"):
        rms_norm_rotary(x, x[:, :1], None, None, tables, 3)
    for heads in (0, 5, 4):
        with pytest.raises(ValueError, match=f"36 is not {heads} heads of an even width"):
            rms_norm_rotary(x, x, None, None, tables, heads)
    with pytest.raises(ValueError, match=r"k_weight has shape \(12,\), q and k are 36 wide"):
        rms_norm_rotary(x, x, None, torch.ones(12), tables, 3)
    with pytest.raises(ValueError, match="cos holds 4 positions"):
        rms_norm_rotary(x, x, None, None, (tables[0][:4], tables[1]), 3)
