"""Attention behind one door; which backend computes it is a setting."""

from telefuser.ops.attention.attention_impl import attention

__all__ = ["attention"]
