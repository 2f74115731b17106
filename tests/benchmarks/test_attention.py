"""The benchmark of attention, run small, and the blocks that its rival gets."""

import torch

from benchmarks import attention
from telefuser.ops.attention.block_mask import BlockMask


def test_smoke_prints_each_decay_and_records_nothing(tmp_path, capsys):
    attention.main(["--smoke", "--results", str(tmp_path)])
    text = capsys.readouterr().out
    assert "320 tokens, 2 heads of 128: AUTO" in text
    assert "320 over 512 tokens, 2 heads of 128: AUTO" in text
    for decay in attention.DECAYS:
        assert f"radial decay {decay}: density 0." in text
    assert text.count("TORCH_BLOCKED") == len(attention.DECAYS)
    assert "Error" not in text
    assert not list(tmp_path.iterdir())


def test_flex_attention_gets_the_blocks_of_the_mask():
    keep = torch.rand(3, 3) < 0.5
    assert torch.equal(attention.flex_mask(BlockMask(keep, 128, 333)).to_dense()[0, 0].bool(), keep)
