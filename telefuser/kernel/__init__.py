"""Triton kernels for `telefuser.ops`, and the one door to Triton itself.

`HAS_TRITON`, `jit`, `tl` and `constexpr` are looked up on first use, so that importing TeleFuser neither needs Triton
nor pays its 0.3 s.
"""

import logging

logger = logging.getLogger(__name__)


class _NeedsTriton:
    """Stands where a kernel would stand without Triton: its module imports, a launch says what is missing."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason

    def __getitem__(self, grid):
        raise RuntimeError(
            f"kernel {self.name} needs Triton, which cannot be imported here ({self.reason}); "
            "use the operator's forward_native"
        )


def _load() -> dict:
    try:
        import triton
        import triton.language as tl
    except ModuleNotFoundError as error:
        reason = str(error)
    except (ImportError, OSError, RuntimeError) as error:
        # Installed but unusable (wrong LLVM, missing libcuda symbol): the operators still work, natively.
        reason = f"{type(error).__name__}: {error}"
        logger.warning("Triton is installed but cannot be imported (%s)", reason)
    else:
        return {"HAS_TRITON": True, "jit": triton.jit, "tl": tl, "constexpr": tl.constexpr}

    def jit(fn=None, **options):
        return _NeedsTriton(fn.__name__, reason) if fn is not None else lambda fn: _NeedsTriton(fn.__name__, reason)

    return {"HAS_TRITON": False, "jit": jit, "tl": None, "constexpr": None}


def __getattr__(name: str):
    if name not in ("HAS_TRITON", "jit", "tl", "constexpr"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _load()
    for key, value in found.items():
        globals().setdefault(key, value)
    return globals()[name]
