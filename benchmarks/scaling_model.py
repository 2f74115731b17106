"""What a step on several GPUs should cost: computing plus what the links cannot hide; and the fit to measured steps.

The formulas stand in docs/parallel.md. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy


@dataclass(frozen=True)
class Work:
    """One video on one model: S tokens, width C, feed-forward width, layers, forward passes a step."""

    tokens: int
    dim: int
    ffn_dim: int
    num_layers: int
    passes: int = 2
    bytes_per_element: int = 2

    @property
    def attention_flops(self) -> float:
        """Of one pass: q @ k and p @ v, 2 S^2 C each."""
        return 4.0 * self.tokens**2 * self.dim * self.num_layers

    @property
    def linear_flops(self) -> float:
        """Of one pass: q, k, v, o, the cross-attention's q and o, and both feed-forward products."""
        return 2.0 * self.tokens * (6 * self.dim**2 + 2 * self.dim * self.ffn_dim) * self.num_layers

    @property
    def weight_bytes(self) -> float:
        return self.bytes_per_element * self.num_layers * (8 * self.dim**2 + 2 * self.dim * self.ffn_dim)


@dataclass(frozen=True)
class Split:
    """cfg x ulysses x ring processes, `per_host` of them on a host; ulysses stays within a host where it fits."""

    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    fsdp: bool = False
    per_host: int = 8

    @property
    def size(self) -> int:
        return self.cfg * self.ulysses * self.ring


@dataclass(frozen=True)
class Costs:
    """Seconds a unit: a FLOP of attention and of the products, a pass's fixed part, a byte within a host and between
    hosts (a process's share, one direction), an exchange's latency."""

    attention: float
    linear: float
    fixed: float
    link: float
    host_link: float
    latency: float


# For the tables of docs/parallel.md until a run on several GPUs gives fitted ones: single-GPU rates measured on an H200
# (570 and 650 TFLOP/s), 300 GB/s of NVLink and 45 GB/s of 400 Gbit/s links a GPU from data sheets. NOT FITTED.
UNFITTED = Costs(1 / 570e12, 1 / 650e12, 4e-3, 1 / 300e9, 1 / 45e9, 20e-6)


def features(work: Work, split: Split) -> tuple[float, ...]:
    """How many units of each of `Costs` one pass takes before anything is hidden, on the critical path."""
    shares, element = split.ulysses * split.ring, work.bytes_per_element
    part = work.tokens / shares * work.dim * element  # bytes of q, k, v or the output on one process
    ulysses = 4 * part * (split.ulysses - 1) / split.ulysses * work.num_layers
    exchanges = 2 * work.num_layers * (split.ulysses > 1)
    within = split.ulysses <= split.per_host
    bytes_within, bytes_between = (ulysses, 0.0) if within else (0.0, ulysses)
    return (
        work.attention_flops / shares,
        work.linear_flops / shares,
        1.0,
        bytes_within,
        bytes_between,
        float(exchanges),
    )


def hidden(work: Work, split: Split, costs: Costs) -> float:
    """Seconds of one pass that the ring and FSDP add where a transfer takes longer than the computing beside it."""
    shares = split.ulysses * split.ring
    exposed = 0.0
    if split.ring > 1:
        block = 2 * work.tokens / split.ring * work.dim / split.ulysses * work.bytes_per_element
        crosses_hosts = split.ulysses * split.ring > split.per_host
        hop = block * (costs.host_link if crosses_hosts else costs.link) + costs.latency
        beside = work.attention_flops / work.num_layers / shares / split.ring * costs.attention
        exposed += work.num_layers * (split.ring - 1) * max(0.0, hop - beside)
    if split.fsdp:
        per_byte = costs.host_link if split.size > split.per_host else costs.link
        gather = work.weight_bytes / work.num_layers * (split.size - 1) / split.size * per_byte + costs.latency
        computing = (work.attention_flops * costs.attention + work.linear_flops * costs.linear) / work.num_layers
        exposed += work.num_layers * max(0.0, gather - computing / shares)
    return exposed


def step_seconds(work: Work, split: Split, costs: Costs) -> float:
    """One step: all passes of one half of the guidance after the other, the halves side by side."""
    one_pass = sum(count * cost for count, cost in zip(features(work, split), astuple(costs)))
    return work.passes / split.cfg * (one_pass + hidden(work, split, costs))


def efficiency(work: Work, split: Split, costs: Costs) -> float:
    """Share of the ideal speed-up: 1 on one process."""
    return step_seconds(work, Split(), costs) / split.size / step_seconds(work, split, costs)


def fit(points: Sequence[tuple[Work, Split, float]], start: Costs = UNFITTED) -> Costs:
    """The costs that fit measured step seconds best (least squares of the relative errors, none below 0).

    What is hidden depends on the costs: strategies that hide nothing are fitted first, then all of them with what the
    last round's costs leave of the ring's and FSDP's transfers subtracted. A cost that no point depends on (such as
    `host_link` on one host) keeps its value of `start`.
    """
    plain = [point for point in points if point[1].ring == 1 and not point[1].fsdp]
    costs = _fit_once(plain, start) if plain else start
    for _ in range(20):
        costs = _fit_once(points, costs)
    return costs


def _fit_once(points: Sequence[tuple[Work, Split, float]], costs: Costs) -> Costs:
    rows = numpy.array([features(work, split) for work, split, _ in points])
    passes = numpy.array([work.passes / split.cfg for work, split, _ in points])
    seconds = numpy.array([found for *_, found in points])
    target = seconds / passes - numpy.array([hidden(work, split, costs) for work, split, _ in points])
    used = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    weight = passes / seconds  # relative: small models count as much as large ones
    values = list(astuple(costs))
    for column, value in zip(used, _non_negative(rows[:, used] * weight[:, None], target * weight)):
        values[column] = float(value)
    return Costs(*values)


def _non_negative(matrix: numpy.ndarray, target: numpy.ndarray) -> numpy.ndarray:
    """Least squares; columns whose factor comes out negative are left out, one after the other."""
    scale = numpy.abs(matrix).max(axis=0)
    kept, result = list(range(matrix.shape[1])), numpy.zeros(matrix.shape[1])
    while kept:
        found = numpy.linalg.lstsq(matrix[:, kept] / scale[kept], target, rcond=None)[0]
        if found.min() >= 0:
            result[kept] = found / scale[kept]
            break
        kept.pop(int(found.argmin()))
    return result
