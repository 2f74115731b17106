"""What processes exchange when a token sequence is split over them: tensors in, tensors out, of any sizes.

Callers: `ops/attention/long_context.py` and `ops/sequence_parallel.py`. Shape letters: B batch, S tokens, N query
heads, Nkv key heads, D head dim of q and k, Dv of v. Nothing is padded to make sizes equal: S tokens over P processes
give the first S % P of them one more, and heads are dealt in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from telefuser.distributed.device_mesh import get_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_sizes(total: int, parts: int) -> list[int]:
    """How `total` items are dealt to `parts` processes: in order, sizes that differ by one at most (0 is possible)."""
    size, rest = divmod(total, parts)
    return [size + 1] * rest + [size] * (parts - rest)


def split_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """The same as (start, stop) pairs."""
    sizes = split_sizes(total, parts)
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(parts)]


def gather_numbers(numbers: list[int], device_mesh: DeviceMesh) -> list[list[int]]:
    """The `numbers` (equally many) of every process that shares the token sequence, in the order of their tokens."""
    rows = [numbers]
    for name in ("ulysses", "ring"):
        group = get_group(device_mesh, name)
        if group is not None:
            own = torch.tensor(rows, dtype=torch.int64, device=device_mesh.device_type)
            rows = torch.cat(gather_results(own, group)).tolist()
    return rows


def gather_results(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all processes of `group`, of one shape and dtype, in the order of their ranks."""
    x = x.contiguous()
    gathered = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(gathered, x, group=group)
    return gathered


def gather_tokens(x: torch.Tensor, dim: int, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all processes of `group`, `counts[i]` long in `dim`, put together; the same on each of them.

    Backends gather equal sizes only, so shorter parts (by a token) travel with a tail that nobody reads.
    """
    x = x.movedim(dim, 0)
    missing = max(counts) - len(x)
    own = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
    return torch.cat([part[:count] for part, count in zip(gather_results(own, group), counts)]).movedim(0, dim)


def _send_and_receive(
    pieces: list[list[torch.Tensor]], shapes: list[list[tuple]], group: dist.ProcessGroup
) -> list[list[torch.Tensor]]:
    """Send `pieces[i]` to process i of `group` in one message and return what came from each, as `shapes[i]` says.

    `all_to_all_single`, because gloo has no form of it that takes lists.
    """
    send_sizes = [sum(piece.numel() for piece in to_one) for to_one in pieces]
    packed = pieces[0][0].new_empty(sum(send_sizes))
    flat = [piece for to_one in pieces for piece in to_one]
    for place, piece in zip(packed.split([piece.numel() for piece in flat]), flat):
        place.view(piece.shape).copy_(piece)
    lengths = [[torch.Size(shape).numel() for shape in from_one] for from_one in shapes]
    receive_sizes = [sum(row) for row in lengths]
    received = packed.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, packed, receive_sizes, send_sizes, group=group)
    places = iter(received.split([length for row in lengths for length in row]))
    return [[next(places).view(shape) for shape in from_one] for from_one in shapes]


class _Exchange(torch.autograd.Function):
    """`_send_and_receive` of flat lists, as many tensors for each process; its backward sends the gradients back."""

    @staticmethod
    def forward(ctx, group, shapes, *pieces):
        each = len(shapes) // group.size()
        ctx.group, ctx.shapes = group, _rows([tuple(piece.shape) for piece in pieces], each)
        received = _send_and_receive(_rows(pieces, each), _rows(shapes, each), group)
        return tuple(part for row in received for part in row)

    @staticmethod
    def backward(ctx, *grads):
        back = _send_and_receive(_rows(grads, len(ctx.shapes[0])), ctx.shapes, ctx.group)
        return None, None, *(part for row in back for part in row)


def _exchange(pieces: list[list[torch.Tensor]], shapes: list[list[tuple]], group) -> list[tuple[torch.Tensor, ...]]:
    flat = _Exchange.apply(group, [shape for row in shapes for shape in row], *(t for row in pieces for t in row))
    return _rows(flat, len(shapes[0]))


def _rows(items, each: int) -> list:
    return [items[start : start + each] for start in range(0, len(items), each)]


def scatter_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    q_counts: list[int],
    kv_counts: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All heads of this process's tokens for all tokens of this process's heads, in one exchange (Ulysses,
    arXiv:2309.14509).

    q [B, S_own, N, D], k [B, S_own, Nkv, D], v [B, S_own, Nkv, Dv], one dtype; `q_counts[i]` and `kv_counts[i]` are the
    tokens of process i. Returns q [B, S, n, D], k and v [B, S, n_kv, D or Dv] with n = `split_sizes(N, P)[own]`, which
    is 0 for the last processes where N < P. A key head is sent to every process whose query heads read it; n_kv is n
    where these heads begin or end inside a group.
    """
    batch, _, num_heads, head_dim = q.shape
    group_size = num_heads // k.shape[2]
    q_ranges = split_ranges(num_heads, group.size())
    kv_ranges = [(start // group_size, -(-stop // group_size)) if stop > start else (0, 0) for start, stop in q_ranges]
    pieces = [
        [q[:, :, q_range[0] : q_range[1]], k[:, :, kv_range[0] : kv_range[1]], v[:, :, kv_range[0] : kv_range[1]]]
        for q_range, kv_range in zip(q_ranges, kv_ranges)
    ]
    (start, stop), (kv_start, kv_stop) = q_ranges[group.rank()], kv_ranges[group.rank()]
    num_kv = kv_stop - kv_start
    shapes = [
        [
            (batch, q_count, stop - start, head_dim),
            (batch, kv_count, num_kv, head_dim),
            (batch, kv_count, num_kv, v.shape[3]),
        ]
        for q_count, kv_count in zip(q_counts, kv_counts)
    ]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*_exchange(pieces, shapes, group)))
    wanted = [head // group_size - kv_start for head in range(start, stop)]
    if num_kv and (len(wanted) % num_kv or wanted != [i * num_kv // len(wanted) for i in range(len(wanted))]):
        # `attention` wants equally many query heads for each key head.
        index = torch.tensor(wanted, device=k.device)
        k, v = k.index_select(2, index), v.index_select(2, index)
    return q, k, v


def gather_heads(x: torch.Tensor, group: dist.ProcessGroup, counts: list[int], num_heads: int) -> torch.Tensor:
    """The way back: [B, S, n, Dv] of this process's heads -> [B, S_own, N, Dv] of its tokens."""
    batch, own_tokens, dim = x.shape[0], counts[group.rank()], x.shape[3]
    pieces = [[part] for part in x.split(counts, dim=1)]
    shapes = [[(batch, own_tokens, heads, dim)] for heads in split_sizes(num_heads, group.size())]
    return torch.cat([part for (part,) in _exchange(pieces, shapes, group)], dim=2)


class Ring:
    """Passes a tensor of one size to the next process of `group` and takes the one of the process before.

    `start` returns at once, so that the transfer runs while the block at hand is computed with; `finish` waits.
    """

    def __init__(self, group: dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self._next, self._previous = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]
        self._pending = None

    def start(self, block: torch.Tensor) -> None:
        """Begin to send `block`, which must stay unchanged until `finish`."""
        received = torch.empty_like(block)
        transfers = [
            dist.P2POp(dist.isend, block, self._next, self.group),
            dist.P2POp(dist.irecv, received, self._previous, self.group),
        ]
        # The sent block is kept alive here: its memory may be reused only after the transfer.
        self._pending = dist.batch_isend_irecv(transfers), block, received

    def finish(self) -> torch.Tensor:
        """The tensor of the process before."""
        works, _, received = self._pending
        for work in works:
            work.wait()
        self._pending = None
        return received
