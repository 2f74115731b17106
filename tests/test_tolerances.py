import math

import pytest
import torch

from tests.tolerances import assert_close, rel_error


def test_error_is_the_same_at_every_scale():
    b = torch.randn(50, dtype=torch.float64)
    for scale in (1e-12, 1.0, 1e12):
        assert rel_error(scale * b * 1.01, scale * b) == pytest.approx(0.01)


def test_nan_and_infinity_on_one_side_count_as_wrong():
    b = torch.ones(3)
    assert rel_error(torch.tensor([1.0, math.nan, 1.0]), b) == math.inf
    assert rel_error(b, torch.tensor([1.0, math.inf, 1.0])) == math.inf
    assert rel_error(torch.ones(2), torch.zeros(2)) == math.inf


def test_equal_empty_and_matching_infinities_are_no_error():
    assert rel_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert rel_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0
    assert rel_error(torch.tensor([-math.inf, 2.0]), torch.tensor([-math.inf, 2.0])) == 0.0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match="shapes differ"):
        rel_error(torch.ones(1, 3), torch.ones(3))


def test_one_rounding_passes_and_two_steps_fail():
    x = torch.randn(4096, dtype=torch.float64)
    assert_close(x.bfloat16(), x)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close((x * 1.01).bfloat16(), x)


@pytest.mark.usefixtures("poison_empty")
def test_empty_memory_is_nan_while_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
    assert torch.ones(2).new_empty(4).isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
