"""Attention over listed tiles against float64 attention under the same mask, written out token by token."""

import sys

import pytest
import torch

from telefuser.kernel.triton import attend_listed_tiles, attention_tiles
from telefuser.kernel.triton.block_sparse_attention import Tiles
from telefuser.ops.attention.block_mask import BlockMask
from tests.kernel.compiling import unable
from tests.kernel.interpreter import multiply_bfloat16_as_hardware_does
from tests.ops.attention.reference import reference
from tests.platforms.simulate import in_fresh_process
from tests.tolerances import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    # The interpreter computes with numpy, which warns of the logarithm of 0.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

TILES = {
    (64, "pointers"): Tiles(64, 64, 4, 2),
    (64, "descriptors"): Tiles(64, 64, 4, 2, True),
    (128, "pointers"): Tiles(128, 64, 8, 2),
    (128, "descriptors"): Tiles(128, 128, 8, 2, True),
}


@pytest.fixture(autouse=True)
def bfloat16_products(device, monkeypatch):
    if device.type == "cpu":
        multiply_bfloat16_as_hardware_does(monkeypatch)


def inputs(device, dtype=torch.float32, batch=2, heads=3, key_heads=None, tokens=333, head_dim=64):
    """q, k, v [B, N, S, D] as strided views of one projection."""
    generator = torch.Generator().manual_seed(0)
    key_heads = key_heads or heads
    packed = torch.randn(batch, tokens, heads + 2 * key_heads, head_dim, generator=generator).to(device, dtype)
    return [t.transpose(1, 2) for t in packed.split((heads, key_heads, key_heads), dim=2)]


def random_mask(device, *leading, block=64, tokens=333, density=0.5):
    blocks = -(-tokens // block)
    keep = torch.rand(*leading, blocks, blocks, generator=torch.Generator().manual_seed(1)) < density
    return BlockMask(keep.to(device), block, tokens)


def check(q, k, v, mask, tiles, scale=0.125):
    if reason := unable("cuda", tma=tiles.tma):
        pytest.skip(reason)
    out, lse = attend_listed_tiles(q, k, v, *mask.lists(tiles.rows, tiles.columns), scale, tiles, return_lse=True)
    wide = mask.by_head.repeat_interleave(mask.block_size, -1).repeat_interleave(mask.block_size, -2)
    seen = wide[..., : mask.tokens, : mask.tokens]
    expected, expected_lse = reference(q, k, v, mask=seen, scale=scale, layout="BNSD")
    assert out.dtype is q.dtype
    assert lse.dtype is torch.float32
    assert_close(out, expected, "attention", q.dtype)
    assert_close(lse, expected_lse, "attention", q.dtype)
    alone, none = attend_listed_tiles(q, k, v, *mask.lists(tiles.rows, tiles.columns), scale, tiles)
    assert none is None
    assert torch.equal(alone, out)
    return out, lse


@pytest.mark.parametrize("tokens", [1, 65, 256, 333])
@pytest.mark.parametrize(("block", "load"), TILES)
def test_equals_masked_attention(block, load, tokens, device):
    dtype = torch.float16 if load == "descriptors" else torch.float32
    q, k, v = inputs(device, dtype, tokens=tokens)
    check(q, k, v, random_mask(device, 2, 3, block=block, tokens=tokens), TILES[block, load])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dtypes_and_head_dims(dtype, head_dim, device):
    q, k, v = inputs(device, dtype, batch=1, heads=2, tokens=150, head_dim=head_dim)
    mask = random_mask(device, tokens=150)
    check(q, k, v, mask, attention_tiles(64, q))
    check(q, k, v, mask, Tiles(64, 64, 4, 2, True))


@pytest.mark.parametrize("leading", [(), (3,), (2, 1), (2, 3)])
def test_masks_for_all_heads_and_for_each(leading, device):
    q, k, v = inputs(device, tokens=200)
    check(q, k, v, random_mask(device, *leading, tokens=200), TILES[64, "pointers"])


def test_a_query_without_keys_gives_zeros(device):
    q, k, v = inputs(device, tokens=250)
    mask = random_mask(device, tokens=250)
    mask.keep[2] = False
    mask.keep[3] = torch.tensor([False, False, False, True])
    for tiles in (TILES[64, "pointers"], TILES[64, "descriptors"]):
        if tiles.tma and unable("cuda", tma=True):
            continue
        out, lse = check(q, k, v, mask, tiles)
        assert out[:, :, 128:192].eq(0).all()
        assert lse[:, :, 128:192].eq(float("-inf")).all()


def test_padding_of_the_last_tile_is_no_key(device):
    """A padded key would have score 0, far above these."""
    q, k, v = inputs(device, tokens=65)
    k = k - 50 * q.mean(dim=2, keepdim=True).sign()
    mask = BlockMask(torch.ones(2, 2, dtype=torch.bool, device=device), 64, 65)
    check(q, k, v, mask, TILES[64, "pointers"])


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.5])
def test_any_scale(scale, device):
    q, k, v = inputs(device, tokens=100)
    check(q, k, v, random_mask(device, tokens=100, density=0.8), TILES[64, "pointers"], scale)


def test_grouped_key_heads(device):
    q, k, v = inputs(device, heads=4, key_heads=2, tokens=100)
    check(q, k, v, random_mask(device, 4, tokens=100), TILES[64, "pointers"])


def test_nothing_is_copied_and_the_output_lies_token_by_token(device):
    """Views of one projection with 16-byte steps go to the tensor memory accelerator as they are."""
    q, k, v = inputs(device, torch.float16, tokens=100)
    out, _ = check(q, k, v, random_mask(device, tokens=100), TILES[64, "descriptors"])
    assert out.transpose(1, 2).is_contiguous()


def test_steps_that_the_accelerator_does_not_take_are_read_by_pointers(device):
    packed = torch.randn(1, 100, 2, 67).to(device, torch.float16)
    q, k, v = (packed[..., i : i + 64].transpose(1, 2) for i in (0, 1, 3))
    check(q, k, v, random_mask(device, tokens=100), TILES[64, "descriptors"])


def test_settings_fit_the_blocks_and_the_device(device, monkeypatch):
    x = torch.empty(1, dtype=torch.bfloat16, device=device)
    for block in (64, 128):
        for like in (x, x.float()):
            tiles = attention_tiles(block, like)
            assert block % tiles.rows == block % tiles.columns == 0
    assert not attention_tiles(128, x.float()).tma


def test_refuses_what_it_would_compute_wrongly(device):
    tiles = TILES[64, "pointers"]
    for dtype, head_dim, words in ((torch.float64, 64, "float64"), (torch.float32, 48, "48")):
        q, k, v = inputs(device, dtype, tokens=70, head_dim=head_dim)
        with pytest.raises(ValueError, match=words):
            attend_listed_tiles(q, k, v, *random_mask(device, tokens=70).lists(64, 64), 0.1, tiles)


COMPILE = """
from telefuser.kernel.triton.block_sparse_attention import _block_sparse_attention_kernel as kernel
from telefuser.kernel.triton.block_sparse_attention import _tiles
from tests.kernel.compiling import compile_kernel

*target, family = TARGET
for block, itemsize, dtype in ((128, 2, "bf16"), (64, 2, "fp16")):
    tiles = _tiles(block, itemsize, family)
    constants = {"HEAD_DIM": 128, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "TAIL": True, "TMA": tiles.tma}
    constants |= {"STAGES": tiles.stages, "lse": None}
    named = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | dict.fromkeys(("counts", "indices", "order"), "*i32")
    if tiles.tma:
        named |= dict.fromkeys(("k", "v"), f"tensordesc<{dtype}[1,1,{tiles.columns},128]>")
    options = {"num_warps": tiles.warps * 32 // target[2] or 1}
    if tiles.registers:
        options["maxnreg"] = tiles.registers
    built = compile_kernel(kernel, target, {**named, "scale": "fp32", "q0": "i64"}, constants, **options)
    print(built.metadata.shared)
"""
TARGETS = {
    "sm90": ("cuda", "90", 32, "sm90", 227),
    "sm86": ("cuda", "86", 32, "sm86", 99),
    "gfx942": ("hip", "gfx942", 64, "amd64", 64),
    "gfx1201": ("hip", "gfx1201", 32, "amd32", 64),
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come with its Linux wheels")
@pytest.mark.parametrize("name", TARGETS)
def test_compiles_within_the_shared_memory_of_the_device(name, tmp_path):
    *target, kib = TARGETS[name]
    if (reason := unable(target[0])) is not None:
        pytest.skip(reason)
    code = COMPILE.replace("TARGET", repr(tuple(target)))
    shared = in_fresh_process(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).split()
    assert len(shared) == 2
    assert max(map(int, shared)) <= kib * 1024
