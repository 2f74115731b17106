"""`choose_parallel_config`: how a number of processes is divided among guidance, heads and the ring."""

from __future__ import annotations

from telefuser.core.config import ParallelConfig


def choose_parallel_config(
    num_processes: int,
    num_heads: int,
    has_guidance: bool,
    *,
    cfg_degree: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    allow_ring: bool = True,
    enable_fsdp: bool = False,
    timeout: int = 600,
) -> ParallelConfig:
    """The degrees for `num_processes`; each that is None is chosen, in this order:

    cfg: 2 with guidance and an even rest, because its one exchange a step is the cheapest there is. Ulysses: the
    largest divisor of the rest that also divides `num_heads`, so that no process has a head more than another. Ring:
    what is left.
    Without `allow_ring` (sparse patterns see whole sequences) Ulysses takes all of the rest, evenly or not.

    Raises ValueError for degrees that do not multiply to `num_processes`.
    """
    given = {"cfg": cfg_degree, "ulysses": ulysses_degree, "ring": ring_degree}
    for name, degree in given.items():
        if degree is not None and (not isinstance(degree, int) or degree < 1):
            raise ValueError(f"{name} degree is {degree!r}; give a number of processes, at least 1")
    if not allow_ring:
        if (ring_degree or 1) > 1:
            raise ValueError(f"ring degree {ring_degree}: a sparse pattern does not work on a ring; use ulysses")
        ring_degree = 1
    rest = num_processes // _product(cfg_degree, ulysses_degree, ring_degree)
    if cfg_degree is None:
        cfg_degree = 2 if has_guidance and rest % 2 == 0 and rest else 1
        rest //= cfg_degree
    if ulysses_degree is None:
        fitting = [n for n in range(1, rest + 1) if rest % n == 0 and num_heads % n == 0]
        ulysses_degree = max(fitting, default=1) if ring_degree is None else max(rest, 1)
        rest //= ulysses_degree
    if ring_degree is None:
        ring_degree = max(rest, 1)
    if cfg_degree * ulysses_degree * ring_degree != num_processes:
        asked = ", ".join(f"{name} {degree}" for name, degree in given.items() if degree is not None)
        raise ValueError(
            f"{num_processes} process(es) cannot be divided as asked ({asked or 'nothing'}): the cfg, ulysses and ring "
            f"degrees must multiply to {num_processes}; start it with `torchrun --nproc-per-node N` for another number"
        )
    return ParallelConfig(
        cfg_degree=cfg_degree,
        sp_ulysses_degree=ulysses_degree,
        sp_ring_degree=ring_degree,
        enable_fsdp=enable_fsdp,
        timeout=timeout,
    )


def _product(*degrees: int | None) -> int:
    product = 1
    for degree in degrees:
        product *= degree or 1
    return product
