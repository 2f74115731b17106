"""UMT5 encoder beyond the stored references (tests/golden): transformers' own class, padding, gradients, dtypes."""

import math

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from telefuser.core.wan_keys import text_encoder_key_map
from telefuser.core.wan_layout import text_encoder_shapes
from telefuser.models.wan_video_text_encoder import WanTextEncoder, relative_position_buckets
from tests.tolerances import assert_close, rel_error

SIZES = {
    "vocab": 50, "dim": 24, "dim_attn": 32, "dim_ffn": 40, "num_heads": 4, "num_layers": 3, "num_buckets": 32,
    "shared_pos": False,
}  # fmt: skip


def random_encoder(**sizes) -> WanTextEncoder:
    torch.manual_seed(0)
    encoder = WanTextEncoder(**{**SIZES, **sizes}).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return encoder


@pytest.fixture(scope="module")
def encoder() -> WanTextEncoder:
    return random_encoder()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (2, 150), generator=torch.Generator().manual_seed(1))


def test_agrees_with_transformers_through_the_key_map(encoder, ids):
    config = UMT5Config(
        vocab_size=50,
        d_model=24,
        d_kv=8,
        d_ff=40,
        num_layers=3,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    theirs = UMT5EncoderModel(config).eval()
    key_map = text_encoder_key_map()
    translated = {key_map.to_diffusers(key): value for key, value in encoder.state_dict().items()}
    translated["encoder.embed_tokens.weight"] = translated["shared.weight"]
    result = theirs.load_state_dict(translated, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"encoder.embed_tokens.weight"}
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.no_grad():
        reference = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
        assert_close(encoder(ids, mask)[mask.bool()], reference[mask.bool()], "model")


@pytest.mark.parametrize("shared_pos", [False, True])
def test_keys_and_shapes_are_the_official_ones(shared_pos):
    shapes = {key: tuple(value.shape) for key, value in random_encoder(shared_pos=shared_pos).state_dict().items()}
    assert shapes == text_encoder_shapes({**SIZES, "shared_pos": shared_pos})


def test_padding_tokens_do_not_reach_valid_rows(encoder, ids):
    """B128: neither the ids under the padding nor its amount changes a prompt's rows."""
    mask = torch.zeros_like(ids)
    mask[:, :9] = 1
    other = ids.clone()
    other[:, 9:] = 0
    with torch.no_grad():
        rows = encoder(ids, mask)[:, :9]
        assert torch.equal(rows, encoder(other, mask)[:, :9])
        torch.testing.assert_close(rows, encoder(ids[:, :9]), atol=2e-6, rtol=0)
        # A mask with nothing valid still gives numbers.
        assert torch.isfinite(encoder(ids, torch.zeros_like(ids))).all()


def test_position_matters_and_direction_too(encoder):
    forward = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert rel_error(encoder(forward), encoder(forward.flip(1)).flip(1)) > 1e-2


@pytest.mark.parametrize("num_buckets", [8, 32])
def test_buckets_are_exact_near_and_logarithmic_far(num_buckets):
    """Against the definition, in exact integer arithmetic where a bucket begins: n^2 >= 64 * 2^k for 32 buckets."""
    length = 400
    buckets = relative_position_buckets(length, num_buckets)
    half, exact = num_buckets // 2, num_buckets // 4
    for distance in range(length):
        if distance < exact:
            expected = distance
        else:
            steps = half - exact
            # distance >= exact * (128 / exact)^(k / steps), raised to the power `steps` to stay in integers.
            k = max(k for k in range(steps + 1) if distance**steps * exact**k >= exact**steps * 128**k)
            expected = min(exact + k, half - 1)
        assert buckets[length - 1 - distance] == expected, distance
        if distance:
            assert buckets[length - 1 + distance] == expected + half, distance


def test_every_parameter_gets_a_gradient(ids):
    encoder = random_encoder(dropout=0.1).train()
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0
    encoder(ids, mask)[mask.bool()].square().mean().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_position_bias_gradient_equals_a_finite_difference():
    """The bias goes in as an attention mask; a backend that treats masks as constants would lose its gradient."""
    encoder = random_encoder(num_layers=1).double()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    weight = encoder.blocks[0].pos_embedding.embedding.weight
    target = torch.randn(1, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss():
        return (encoder(ids) * target).sum()

    loss().backward()
    with torch.no_grad():
        for bucket, head in ((0, 0), (1, 3), (17, 2)):
            values = []
            for step in (1e-6, -2e-6):
                weight[bucket, head] += step
                values.append(loss().item())
            weight[bucket, head] += 1e-6
            assert weight.grad[bucket, head].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-9)


def test_dropout_is_off_in_eval_and_on_in_training(ids):
    encoder = random_encoder(dropout=0.5)
    with torch.no_grad():
        assert torch.equal(encoder(ids), encoder(ids))
        encoder.train()
        assert not torch.equal(encoder(ids), encoder(ids))


def test_half_precision_runs_stay_close_and_finite(encoder, ids):
    with torch.no_grad():
        reference = encoder(ids)
        for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float16, 5e-3)):
            half = random_encoder().to(dtype)
            assert half(ids).dtype == dtype
            assert rel_error(half(ids).float(), reference) < limit
        # A residual stream beyond float16's 65504, as UMT5-XXL has.
        large = random_encoder().half()
        for block in large.blocks:
            block.ffn.fc2.weight.mul_(3e4)
        assert torch.isfinite(large(ids)).all()


def test_initial_output_has_unit_scale(ids):
    """Training starts from here: unit rows, whatever the depth."""
    torch.manual_seed(0)
    encoder = WanTextEncoder(vocab=50, dim=64, dim_attn=64, dim_ffn=128, num_heads=4, num_layers=8).eval()
    with torch.no_grad():
        out = encoder(ids)
    assert out.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.05)
    assert math.isfinite(out.abs().max())


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="30 is no multiple of num_heads 4"):
        WanTextEncoder(vocab=10, dim=16, dim_attn=30, dim_ffn=16, num_heads=4, num_layers=1)
