"""The Wan 2.1 VAE against itself (whole clip, streams, tiles), the official key layout and diffusers' own class."""

import csv
import itertools
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from telefuser.core.wan_keys import vae_config, vae_key_map
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.models.wan_video_vae_blocks import ChannelRMSNorm
from tests.golden import golden_dir
from tests.tolerances import rel_error

MEAN, STD = (0.1, -0.2, 0.3, -0.4), (0.5, 0.75, 1.0, 1.25)
TINY = {"dim": 4, "z_dim": 4, "num_res_blocks": 1, "latents_mean": MEAN, "latents_std": STD}


def random_vae(seed: int = 0, **overrides) -> WanVideoVAE:
    """A tiny VAE with every parameter random: zero-initialised layers would hide a wrong wire."""
    generator = torch.Generator().manual_seed(seed)
    vae = WanVideoVAE(**(TINY | overrides))
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("gamma"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.1 if parameter.ndim == 1 else parameter[0].numel() ** -0.5))
    return vae.eval()


def random_video(frames: int, height: int = 16, width: int = 16, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def random_latents(frames: int, height: int = 2, width: int = 2, seed: int = 2) -> torch.Tensor:
    return torch.randn(1, 4, frames, height, width, generator=torch.Generator().manual_seed(seed))


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made under this mode hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._made = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        alive = [tensor for ref in self._made if (tensor := ref()) is not None]
        self._made = [weakref.ref(tensor) for tensor in alive]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
        self.peak = max(self.peak, sum(storages.values()))
        return out


def test_published_size_has_the_official_keys_and_shapes():
    if golden_dir() is None:
        pytest.skip("reference data is absent: set TELEFUSER_GOLDEN")
    with torch.device("meta"):
        vae = WanVideoVAE()
    with open(golden_dir() / "manifests" / "wan21_vae.tsv") as file:
        official = {row["key"]: row["shape"] for row in csv.DictReader(file, delimiter="\t")}
    assert {key: "x".join(map(str, value.shape)) for key, value in vae.state_dict().items()} == official


def test_whole_clip_is_causal_with_the_first_frame_apart():
    vae, video = random_vae(), random_video(9)
    changed = video.clone()
    changed[:, :, 5:] = 0
    with torch.no_grad():
        (mu, logvar), (mu_changed, _) = vae.encode_moments(video), vae.encode_moments(changed)
        image, _ = vae.encode_moments(video[:, :, :1])
        torch.testing.assert_close(mu_changed[:, :, :2], mu[:, :, :2], rtol=0, atol=1e-6)
        assert not torch.allclose(mu_changed[:, :, 2], mu[:, :, 2], atol=1e-3)
        torch.testing.assert_close(image, mu[:, :, :1], rtol=0, atol=1e-6)
        assert logvar.shape == mu.shape

        frames = vae.decode_raw(mu)
        torch.testing.assert_close(vae.decode_raw(mu[:, :, :2]), frames[:, :, :5], rtol=0, atol=1e-5)


def test_gradient_of_the_whole_clip_matches_finite_differences():
    vae = random_vae(dim_mult=(1, 2, 2), temperal_downsample=(True, True)).double()
    video = random_video(5, 8, 8).double().requires_grad_()

    def loss() -> torch.Tensor:
        mu, logvar = vae.encode_moments(video)
        return vae.decode_raw(mu).square().mean() + (mu.square() + logvar.exp() - logvar).mean()

    loss().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in vae.parameters())
    for tensor in (video, vae.encoder.conv1.weight, vae.decoder.upsamples[2].time_conv.weight):
        direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            tensor += 1e-6 * direction
            above = loss()
            tensor -= 2e-6 * direction
            below = loss()
            tensor += 1e-6 * direction
        expected = ((above - below) / 2e-6).item()
        assert (tensor.grad * direction).sum().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("frames", range(1, 18))
def test_streamed_encode_equals_the_whole_clip(frames):
    vae, video = random_vae(), random_video(frames, batch=2)
    whole = vae.encode(video, streaming=False)
    assert whole.shape == (2, 4, 1 + (frames - 1) // 4, 2, 2)
    for chunk_size in (1, 2, 3):
        torch.testing.assert_close(vae.encode(video, chunk_size=chunk_size), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_latents", range(1, 6))
def test_streamed_decode_equals_the_whole_clip(num_latents):
    vae, latents = random_vae(), random_latents(num_latents)
    whole = vae.decode(latents, streaming=False)
    assert whole.shape == (1, 3, 1 + (num_latents - 1) * 4, 16, 16)
    with torch.no_grad():
        raw = vae.decode_raw(vae.denormalize(latents))
    torch.testing.assert_close(whole, raw.clamp(-1, 1), rtol=0, atol=1e-6)
    for chunk_size in (1, 2, 3):
        torch.testing.assert_close(vae.decode(latents, chunk_size=chunk_size), whole, rtol=0, atol=1e-5)


def test_interleaved_streams_do_not_disturb_each_other():
    vae = random_vae()
    first, second = random_latents(4), random_latents(4, 2, 3, seed=5)
    video = random_video(9)
    expected_first, expected_second, expected_latents = vae.decode(first), vae.decode(second), vae.encode(video)

    pairs = []
    for pair in itertools.zip_longest(vae.decode_chunks(first), vae.decode_chunks(second, chunk_size=2)):
        pairs.append(pair)
        assert torch.equal(vae.encode(video), expected_latents)
    assert torch.equal(torch.cat([frames for frames, _ in pairs], dim=2), expected_first)
    got_second = torch.cat([frames for _, frames in pairs if frames is not None], dim=2)
    torch.testing.assert_close(got_second, expected_second, rtol=0, atol=1e-5)


def test_memory_of_a_stream_does_not_grow_with_the_frames():
    vae = random_vae()
    decode_peaks, encode_peaks = [], []
    for num_latents in (2, 3, 11):  # 5, 9 and 41 frames
        latents, video = random_latents(num_latents, 4, 4), random_video(num_latents * 4 - 3, 32, 32)
        with PeakBytes() as decoding:
            for frames in vae.decode_chunks(latents):
                assert not frames.requires_grad
            del frames
        with PeakBytes() as encoding:
            vae.encode(video)
        decode_peaks.append(decoding.peak)
        encode_peaks.append(encoding.peak - video.nbytes)
    # The last caches fill with the third latent frame.
    assert decode_peaks[2] == decode_peaks[1] <= 1.1 * decode_peaks[0]
    assert encode_peaks[2] <= encode_peaks[0] + 2 * random_latents(11, 4, 4).nbytes  # the result itself grows


@pytest.mark.parametrize(
    ("height", "width", "tile_size", "tile_stride"),
    [
        (24, 40, (16, 16), (12, 12)),  # overlap 4: tiles read 5 more cells a side than their size
        (13, 9, (8, 7), (3, 5)),  # odd everywhere; the last tiles move back
        (9, 17, (4, 17), (4, 17)),  # no overlap
        (3, 2, (2, 1), (1, 1)),  # smaller than the surroundings a tile reads
    ],
)
def test_tiled_decode_has_no_seams(height, width, tile_size, tile_stride):
    """B118: the same video as untiled, at the seams too."""
    vae, latents = random_vae(), random_latents(5 if height == 24 else 2, height, width)
    untiled = vae.decode(latents)
    for streaming in (True, False):
        tiled = vae.decode(latents, streaming=streaming, tiled=True, tile_size=tile_size, tile_stride=tile_stride)
        torch.testing.assert_close(tiled, untiled, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 9), (0, 8)), ((9, 17), (8, 15)), ((0, 17), (7, 8)), ((5, 6), (0, 15))]
)
def test_a_part_of_the_area_is_that_part_of_the_video(rows, columns):
    """B108: what one of several processes decodes; at borders, and at cells with surroundings on all sides."""
    vae, latents = random_vae(), random_latents(3, 17, 15)
    (top, bottom), (left, right) = (tuple(8 * cell for cell in cells) for cells in (rows, columns))
    for chunk_size in (1, 2):
        part = torch.cat(list(vae.decode_part_chunks(latents, rows, columns, chunk_size)), dim=2)
        torch.testing.assert_close(part, vae.decode(latents)[..., top:bottom, left:right], rtol=0, atol=1e-5)


def test_a_list_of_latents_is_refused_with_the_way_out():
    """B108."""
    vae = random_vae()
    part = partial(vae.decode_part_chunks, rows=(0, 1), columns=(0, 1))
    for call in (vae.decode, vae.decode_chunks, part):
        with pytest.raises(ValueError, match=r"one tensor.*got list: stack the videos"):
            call([random_latents(1)])


@pytest.mark.parametrize("rows", [(0, 0), (-1, 4), (3, 18)])
def test_a_part_outside_the_area_is_refused(rows):
    with pytest.raises(ValueError, match="within the 17 latent cells"):
        random_vae().decode_part_chunks(random_latents(1, 17, 15), rows, (0, 15))


@pytest.mark.parametrize(("num_res_blocks", "context"), [(1, 5), (2, 7)])
def test_surroundings_of_a_tile_are_what_its_pixels_see_and_no_more(num_res_blocks, context):
    """NaN spreads as far as pixels see: a cell further out would be wasted, one less would show."""
    vae, features = random_vae(num_res_blocks=num_res_blocks), torch.zeros(1, 16, 1, 1, 16)
    features[..., 0] = float("nan")
    with torch.no_grad():
        reached = vae.decoder.expand(features)[0, 0, 0].isnan().any(dim=0)
    assert vae.decoder.context == context
    assert 8 + (context - 1) * 8 < reached.sum() <= 8 + context * 8


def test_tile_as_large_as_the_image_is_exactly_the_untiled_decode():
    vae, latents = random_vae(), random_latents(3, 5, 7)  # B118
    untiled = vae.decode(latents)
    for size, stride in (((5, 7), (5, 7)), ((34, 34), (18, 16))):
        assert torch.equal(vae.decode(latents, tiled=True, tile_size=size, tile_stride=stride), untiled)


def test_tiled_decode_needs_less_memory_and_grows_by_the_result_only():
    vae = random_vae()
    peaks = {}
    for num_latents, tiled in ((3, False), (3, True), (6, True)):
        latents = random_latents(num_latents, 48, 2)
        with PeakBytes() as decoding:
            video = vae.decode(latents, tiled=tiled, tile_size=(12, 2), tile_stride=(6, 2))
        features = latents.nbytes // 4 * vae.decoder.feature_dim if tiled else 0
        peaks[num_latents, tiled] = decoding.peak - video.nbytes - features
    assert peaks[3, True] < 0.5 * peaks[3, False]
    assert peaks[6, True] <= 1.1 * peaks[3, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_close_to_float32(dtype):
    vae, video = random_vae(dim=8), random_video(9)
    latents = vae.encode(video)
    expected = vae.decode(latents)
    vae = vae.to(dtype)
    assert rel_error(vae.encode(video), latents) < 2e-2
    assert rel_error(vae.decode(latents), expected) < 2e-2
    assert torch.equal(vae.normalize(latents), random_vae().normalize(latents))  # mean and std are not rounded


def test_low_precision_norm_is_computed_in_float32_and_has_a_floor():
    norm = ChannelRMSNorm(8)
    x = torch.randn(1, 8, 2, 3, 3, generator=torch.Generator().manual_seed(4))
    x[..., 0] = 0
    # Squares of 300 do not fit into float16; squares of 1e-4 vanish in it.
    for scale in (300.0, 1e-4):
        half = (x * scale).half()
        expected = F.normalize(half.double(), dim=1, eps=1e-12) * 8**0.5
        torch.testing.assert_close(norm(half).double(), expected, rtol=1e-3, atol=1e-7)


def test_config_takes_the_official_keys_and_refuses_foreign_ones():
    config = {
        "_class_name": "WanVAE",
        **{"dim": 4, "z_dim": 2, "dim_mult": [1, 2], "num_res_blocks": 1, "attn_scales": []},
        **{"temperal_downsample": [True], "dropout": 0.0, "latents_mean": [0.5, 1], "latents_std": [1, 2]},
    }
    vae = WanVideoVAE.from_config(config)
    assert (vae.spatial_factor, vae.temporal_factor, vae.latents_mean, vae.latents_std) == (2, 2, (0.5, 1), (1, 2))
    assert vae.encode(random_video(3, 6, 4)).shape == (1, 2, 2, 3, 2)
    with pytest.raises(ValueError, match=r"unknown VAE settings \['is_residual'\]"):
        WanVideoVAE.from_config({**config, "is_residual": True})


def test_diffusers_class_gives_the_same_numbers():
    """Weights travel through the key map, the configuration through its translation."""
    diffusers = pytest.importorskip("diffusers")
    ours = random_vae(num_res_blocks=2)
    settings = {"base_dim": 4, "z_dim": 4, "num_res_blocks": 2, "latents_mean": MEAN, "latents_std": STD}
    theirs = diffusers.AutoencoderKLWan(**settings).eval()
    to_diffusers = vae_key_map().to_diffusers
    theirs.load_state_dict({to_diffusers(key): value for key, value in ours.state_dict().items()})

    translated = WanVideoVAE.from_config(vae_config(dict(theirs.config)))
    assert (translated.latents_mean, translated.state_dict().keys()) == (MEAN, ours.state_dict().keys())
    video, latents = random_video(9, 16, 24), random_latents(3, 2, 3)
    with torch.no_grad():
        moments = torch.cat(ours.encode_moments(video), dim=1)
        torch.testing.assert_close(moments, theirs.encode(video).latent_dist.parameters, rtol=0, atol=1e-5)
        decoded = theirs.decode(ours.denormalize(latents)).sample
    torch.testing.assert_close(ours.decode(latents), decoded, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda vae: vae.encode(torch.zeros(1, 3, 5, 20, 16)), "16x20 must be divisible by 8"),
        (lambda vae: vae.encode(torch.zeros(3, 5, 16, 16)), r"\[B, 3, F, H, W\].*\(3, 5, 16, 16\)"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 5, 16, 16, dtype=torch.uint8)), "uint8"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 0, 16, 16)), r"\(1, 3, 0, 16, 16\)"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 5, 16, 16), chunk_size=0), "chunk_size must be at least 1"),
        (lambda vae: vae.decode(torch.zeros(1, 16, 2, 2, 2)), r"\[B, 4, F, H, W\].*\(1, 16, 2, 2, 2\)"),
        (lambda vae: vae.decode_chunks(torch.zeros(4, 2, 2, 2)), r"\(4, 2, 2, 2\)"),
        (lambda vae: vae.decode_chunks(torch.zeros(1, 4, 2, 2, 2), chunk_size=-1), "got -1"),
        (
            lambda vae: WanVideoVAE(dim=4, z_dim=4, latents_mean=(0.0,) * 16),
            "one value for each of the 4 latent channels, got 16",
        ),
        (lambda vae: vae.decode(torch.zeros(1, 4, 1, 2, 2), tiled=True, tile_size=(34,)), r"\(H, W\) in latent cells"),
        (lambda vae: vae.decode(torch.zeros(1, 4, 1, 2, 2), tiled=True, tile_size=(0, 4)), "stride 18 for size 0"),
        (lambda vae: vae.decode(torch.zeros(1, 4, 1, 2, 2), tiled=True, tile_stride=(18, 35)), "stride 35 for size 34"),
        (lambda vae: vae.decode(torch.zeros(1, 4, 1, 2, 2), tiled=True, tile_stride=(0, 16)), "stride 0 for size 34"),
        (lambda vae: WanVideoVAE(dim=4, z_dim=2, latents_std=(1.0, 0.0)), "latents_std must be positive"),
        (lambda vae: WanVideoVAE(dim=4, dim_mult=(1, 2)), "2 stages need 1 temperal_downsample"),
        (lambda vae: WanVideoVAE(dim=0), "at least 1"),
        (lambda vae: WanVideoVAE(dim=4, attn_scales=(0.5,)), "attn_scales"),
    ],
)
def test_bad_input_is_refused_with_a_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_vae())


def test_whole_clip_trains_compiled_without_a_graph_break():
    vae, video = random_vae(dim_mult=(1, 2), temperal_downsample=(True,)), random_video(3, 4, 4)

    def loss(video: torch.Tensor) -> torch.Tensor:
        mu, logvar = vae.encode_moments(video)
        return (vae.decode_raw(mu) - video).square().mean() + logvar.exp().mean()

    torch._dynamo.reset()
    weight = vae.encoder.conv1.weight
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, expected = (torch.autograd.grad(function(video), weight)[0] for function in (compiled, loss))
    torch._dynamo.reset()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_normalising_latents_does_not_wait_for_the_gpu():
    vae, latents = random_vae(), random_latents(2).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        back = vae.normalize(vae.denormalize(latents))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(back, latents, rtol=0, atol=1e-5)
