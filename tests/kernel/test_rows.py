import torch

from telefuser.kernel import jit, tl
from telefuser.kernel.triton.rows import block_of, row_offset, row_views, spread, warps_of


@jit(do_not_specialize=["row", "n1", "n2"])
def _probe_kernel(out, row, n1, n2, s0, s1, s2):
    tl.store(out, row_offset(row + tl.program_id(0), n1, n2, s0, s1, s2))


def test_row_offset_does_not_wrap_at_32_bits(device):
    # B28, S272
    out = torch.zeros(1, dtype=torch.int64, device=device)
    strides = (3 * 2**30, 2**30, 1536)
    for row, (i0, i1, i2) in {0: (0, 0, 0), 13: (0, 2, 3), 47: (2, 0, 7), 59: (2, 3, 4)}.items():
        _probe_kernel[(1,)](out, row, 4, 5, *strides) if row != 47 else _probe_kernel[(1,)](out, row, 2, 10, *strides)
        assert out.item() == i0 * strides[0] + i1 * strides[1] + i2 * strides[2]


def covered(*tensors):
    """How often each element of the first tensor is reached through the views."""
    count = torch.zeros(tensors[0].shape, dtype=torch.int64)
    for views in row_views(count, *tensors):
        assert all(view.dim() <= 4 and view.shape == views[0].shape for view in views)
        views[0].add_(1)
    return count


def test_views_of_few_dimensions_are_the_tensor_itself():
    x = torch.randn(2, 3, 4, 5)
    assert row_views(x)[0][0] is x


def test_contiguous_dimensions_fold_into_one_view():
    x = torch.randn(2, 3, 2, 2, 4, 5)
    assert len(row_views(x)) == 1
    assert torch.equal(row_views(x)[0][0], x.reshape(-1, 5))


def test_views_cover_every_element_once_when_strides_do_not_fold():
    x = torch.randn(5, 2, 3, 2, 4, 2).permute(1, 3, 0, 4, 2, 5)
    assert len(row_views(x)) > 1
    assert covered(x).unique().tolist() == [1]


def test_views_keep_a_broadcast_unexpanded():
    x, row = torch.randn(2, 3, 2, 2, 4), torch.randn(2, 1, 1, 1, 4)
    assert covered(x, row.expand_as(x)).unique().tolist() == [1]
    for _, view in row_views(x, row.expand_as(x)):
        assert view.data_ptr() == row.data_ptr()
        assert 0 in view.stride()


def test_a_vector_is_spread_as_a_view_and_copied_only_for_neighbouring_columns():
    x, apart = torch.empty(2, 5, 8), torch.randn(8, 2).t()
    wanted = apart[:, None].expand(2, 5, 8)
    for dense, strides in ((False, (1, 0, 2)), (True, (8, 0, 1))):
        view = spread(apart, x, dense)
        assert torch.equal(view, wanted)
        assert view.stride() == strides
        assert (view.data_ptr() == apart.data_ptr()) is not dense
    row = torch.randn(2, 1, 8)
    assert spread(row, x, dense=True).data_ptr() == row.data_ptr()


def test_block_holds_the_row_up_to_its_limit():
    assert [block_of(width, 64) for width in (1, 2, 3, 63, 64, 65)] == [1, 2, 4, 64, 64, 64]
    assert [warps_of(elements) for elements in (1, 256, 512, 4096, 8192)] == [1, 1, 2, 8, 8]
