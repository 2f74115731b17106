"""Fixtures of the operator tests."""

from tests.ops.machines import interpreted_cuda

__all__ = ["interpreted_cuda"]
