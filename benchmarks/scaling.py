"""One sampling step on several GPUs: checked against one GPU, then its time, efficiency, exchange and memory.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.scaling --size T2V-14B --resolution 480p
    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaling --smoke --device cpu      tiny; records nothing
    python -m benchmarks.scaling --report        table, plot and fitted cost model of what was recorded

Random weights, 81 frames, both passes of guidance. One GPU's time is measured in the same run, on every GPU at
once, so that efficiency compares like with like. "without exchange" is the same step with every transfer left out: the
difference is the communication that computing does not hide. A strategy that does not agree is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.report import latest
from benchmarks.scaling_model import Costs, Split, Work, efficiency, fit
from telefuser import platforms
from telefuser.core.config import ParallelConfig
from telefuser.distributed import Job, comm, create_device_mesh_from_config, shard_model
from telefuser.distributed.parallelize import spreads_on_cpu
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.pipelines import denoise as denoise_module
from telefuser.pipelines.decode import decode_frames
from telefuser.pipelines.denoise import denoise
from telefuser.pipelines.parallel_decode import decode_shared
from telefuser.schedulers import make_scheduler

RESOLUTIONS = {"480p": (832, 480), "720p": (1280, 720)}
FRAMES = 81
SMOKE_SIZE = {"dim": 96, "ffn_dim": 128, "num_heads": 4, "num_layers": 2, "text_dim": 32, "freq_dim": 32}
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclass
class Bench:
    """What the strategies of one model share: the model, its input, and the device it runs on."""

    model: WanModel
    noise: torch.Tensor
    contexts: list
    device: torch.device

    def step(self, mesh) -> torch.Tensor:
        """One step with guidance; with a mesh on all processes."""
        self.model.device_mesh = mesh
        # The work is that of any guidance. 5 would make the check five times as strict as the limit for the model says.
        return denoise(self.model, make_scheduler("euler", 1, 5.0), self.noise, *self.contexts, 2.0, device_mesh=mesh)

    def seconds(self, call: Callable[[], object], repeats: int, together: bool) -> float:
        """Median over the repeats of the slowest process (of this one where not `together`)."""
        platform, found = platforms.platform_of(self.device), []
        call()
        for _ in range(repeats):
            if together:
                dist.barrier()
            platform.synchronize(self.device)
            start = time.perf_counter()
            call()
            platform.synchronize(self.device)
            found.append(time.perf_counter() - start)
        return largest(statistics.median(found), self.device) if together else statistics.median(found)


def largest(number: float, device: torch.device) -> float:
    """The largest of all processes' numbers."""
    if not dist.is_initialized():
        return number
    own = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.item()


def splits(num_processes: int) -> list[Split]:
    """Every way to divide them: guidance or not, then all pairs of Ulysses and Ring."""
    found = []
    for cfg in (2, 1):
        rest, odd = divmod(num_processes, cfg)
        if not odd:
            found += [Split(cfg, n, rest // n) for n in range(rest, 0, -1) if rest % n == 0]
    return found


def name_of(split: Split) -> str:
    words = [f"{name} {n}" for name, n in (("cfg", split.cfg), ("ulysses", split.ulysses), ("ring", split.ring))]
    return " x ".join([word for word in words if not word.endswith(" 1")] or ["one GPU"]) + " + FSDP" * split.fsdp


def mesh_of(split: Split, device: torch.device):
    return _mesh_of(split.cfg, split.ulysses, split.ring, device.type)


@functools.cache  # every mesh makes groups of its own, which hold memory on the device
def _mesh_of(cfg: int, ulysses: int, ring: int, device_type: str):
    config = ParallelConfig(cfg_degree=cfg, sp_ulysses_degree=ulysses, sp_ring_degree=ring)
    return create_device_mesh_from_config(config, device_type)


def make_bench(size: dict, latent: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Bench:
    """Weights and input are drawn alike on all processes."""
    with torch.device("meta"):
        model = WanModel(**size).eval()
    # Before there is memory behind them: the 14B takes 56 GB in float32.
    for name, parameter in model.named_parameters():
        is_wide = any(part in name for part in WanModel.FP32_PARAMETERS)
        parameter.data = parameter.data.to(torch.float32 if is_wide else dtype)
    model = model.to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device=device).manual_seed(0)
    for name, parameter in model.named_parameters():
        std = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.02
        parameter.normal_(0.0, std, generator=generator)
        if ".norm" in name and name.endswith("weight"):
            parameter.add_(1.0)
    text = torch.randn(2, 77, model.text_dim, generator=torch.Generator().manual_seed(1)).to(device)
    noise = torch.randn(1, model.in_dim, *latent, generator=torch.Generator().manual_seed(2)).to(device)
    return Bench(model, noise, [model.prepare_context(rows[None]) for rows in text], device)


def rel_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@contextlib.contextmanager
def no_exchange() -> Iterator[None]:
    """Transfers are left out: each process goes on with numbers of its own, in the shapes it would have received."""
    saved = dist.all_to_all_single, comm.gather_results, comm.Ring.start, comm.Ring.finish

    def keep(received, packed, *_, **__):
        shared = min(len(received), len(packed))
        received[:shared].copy_(packed[:shared])

    def start(ring, block):
        ring._pending = block

    def own(x, group):
        return [x.contiguous()] * group.size()

    users = comm, denoise_module
    dist.all_to_all_single = keep
    comm.Ring.start, comm.Ring.finish = start, lambda ring: ring._pending
    for module in users:
        module.gather_results = own
    try:
        yield
    finally:
        dist.all_to_all_single, _, comm.Ring.start, comm.Ring.finish = saved
        for module in users:
            module.gather_results = saved[1]


def measure(bench: Bench, split: Split, want: torch.Tensor, one: float, repeats: int, limit: float) -> list[tuple]:
    """(metric, value, unit) of one strategy; SystemExit where its result is not that of one GPU."""
    platform = platforms.platform_of(bench.device)
    mesh = mesh_of(split, bench.device)
    if split.fsdp:
        shard_model(bench.model, bench.device.type)
    error = largest(rel_error(bench.step(mesh), want), bench.device)
    if not error <= limit:
        raise ValueError(f"{name_of(split)} differs from one GPU by {error:.1e}, the limit is {limit:.0e}: not timed")
    platform.empty_cache()
    platform.reset_peak_memory_stats(bench.device)
    seconds = bench.seconds(lambda: bench.step(mesh), repeats, together=True)
    peak = largest(platform.max_memory_allocated(bench.device), bench.device)
    rows = [
        ("relative error to one GPU", error, ""),
        ("step", seconds, "s"),
        ("efficiency", one / seconds / split.size, ""),
        ("peak memory", peak / 2**30, "GiB"),
    ]
    if not split.fsdp:
        with no_exchange():
            alone = bench.seconds(lambda: bench.step(mesh), repeats, together=True)
        rows.insert(3, ("exposed communication", max(seconds - alone, 0.0), "s"))
    return rows


def measure_decoding(latent: tuple[int, ...], device: torch.device, smoke: bool, repeats: int) -> list[tuple]:
    """Seconds of the VAE's decoding by one process and shared by all, and the largest difference in levels of 255."""
    torch.manual_seed(0)
    sizes = {"dim": 4, "dim_mult": (1, 2, 2, 2), "num_res_blocks": 1} if smoke else {}
    vae = WanVideoVAE(**sizes).eval().to(device)
    latents = torch.randn(16, *latent, generator=torch.Generator().manual_seed(3)).to(device)
    bench = Bench(None, latents, [], device)
    mesh = mesh_of(Split(ulysses=dist.get_world_size()), device)
    shared, whole = decode_shared(vae, latents, mesh), decode_frames(vae, latents)
    if shared is None:
        return []
    difference = largest((shared.int() - whole.int()).abs().max().item(), device)
    one = bench.seconds(lambda: decode_frames(vae, latents), repeats, together=True)
    many = bench.seconds(lambda: decode_shared(vae, latents, mesh), repeats, together=True)
    return [
        ("decoding: largest difference", difference, "levels"),
        ("decoding: one GPU", one, "s"),
        ("decoding: shared", many, "s"),
    ]


def run(options: argparse.Namespace, job: Job) -> list[dict]:
    """Measure all strategies that fit the number of processes; the rows to record."""
    small = make_bench(SMOKE_SIZE, (5, 10, 14), torch.float32, job.device)
    want = small.step(None)
    for split in splits(job.size) if job.size > 1 else []:
        error = largest(rel_error(small.step(mesh_of(split, job.device)), want), job.device)
        if not error <= LIMITS[torch.float32]:
            raise ValueError(f"{name_of(split)} in float32 differs from one GPU by {error:.1e}, the limit is 1e-5")
        tell(job, f"float32, small: {name_of(split):>24} agrees, {error:.1e}")
    width, height = RESOLUTIONS[options.resolution]
    latent = (5, 10, 14) if options.smoke else ((FRAMES - 1) // 4 + 1, height // 8, width // 8)
    dtype = torch.float32 if options.smoke else torch.bfloat16
    bench = make_bench(SMOKE_SIZE if options.smoke else WAN_DIT_SIZES[options.size], latent, dtype, job.device)
    case = f"{'smoke' if options.smoke else options.size}, {options.resolution}, {FRAMES} frames"
    rows: list[dict] = []

    def keep(split: Split, found: list[tuple]) -> None:
        for metric, value, unit in found:
            label = f"{case}, {job.size} GPUs, {name_of(split)}"
            rows.append({"case": label, "metric": metric, "value": f"{value:.6g}", "unit": unit})
            tell(job, f"{label:<70} {metric:>28} {value:10.4g} {unit}")

    want = bench.step(None)
    # Every process runs it, so that no GPU is cool and fast while the first one measures.
    one = bench.seconds(lambda: bench.step(None), options.repeats, together=job.size > 1)
    keep(Split(), [("step", one, "s")])
    ways = splits(job.size) if job.size > 1 else []
    # Last, because it cuts the model up; with the strategy that the pipeline chooses.
    spread = ways[:1] if bench.device.type != "cpu" or spreads_on_cpu() else []
    for split in [*ways, *(Split(way.cfg, way.ulysses, way.ring, fsdp=True) for way in spread)]:
        keep(split, measure(bench, split, want, one, options.repeats, LIMITS[dtype]))
    if job.size > 1:
        area = (2, 24, 24) if options.smoke else latent
        keep(Split(ulysses=job.size), measure_decoding(area, job.device, options.smoke, options.repeats))
    return rows


def tell(job: Job, line: str) -> None:
    if job.is_first:
        print(line, flush=True)


def points(path: Path) -> list[tuple[Work, Split, float]]:
    """The measured steps of a device's file, for `fit`."""
    found = []
    for case, metrics in latest(path, "scaling").items():
        size, resolution, _, _, name = case.split(", ")
        if "step" not in metrics or size not in WAN_DIT_SIZES:
            continue
        width, height = RESOLUTIONS[resolution]
        model = WAN_DIT_SIZES[size]
        tokens = ((FRAMES - 1) // 4 + 1) * (height // 16) * (width // 16)
        degrees = dict(word.split() for word in name.removesuffix(" + FSDP").split(" x ") if word != "one GPU")
        split = Split(**{key: int(n) for key, n in degrees.items()}, fsdp=name.endswith("FSDP"))
        work = Work(tokens, model["dim"], model["ffn_dim"], model["num_layers"])
        found.append((work, split, float(metrics["step"]["value"])))
    return found


def report(folder: Path) -> None:
    """For each device with measured steps: the fitted costs, and a plot where matplotlib is installed."""
    for path in sorted(folder.glob("*.csv")):
        measured = points(path)
        if not measured:
            continue
        costs = fit(measured)
        print(f"{path.stem}: {costs}")
        if find_spec("matplotlib"):
            print(plot(measured, costs, path.with_name(f"{path.stem}_scaling.png")))


def plot(measured: list[tuple[Work, Split, float]], costs: Costs, path: Path) -> Path:
    """Efficiency over the number of GPUs, a panel for each model and size: points measured, crosses by the model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name_of(split) for _, split, _ in measured})
    works = list(dict.fromkeys(work for work, _, _ in measured))
    figure, panels = pyplot.subplots(1, len(works), figsize=(5 * len(works), 4), squeeze=False)
    for work, panel in zip(works, panels[0]):
        steps = {split: seconds for other, split, seconds in measured if other == work}
        for split, seconds in steps.items():
            share = steps[Split()] / seconds / split.size
            color = f"C{names.index(name_of(split)) % 10}"
            panel.plot(split.size, share, "o", color=color, label=name_of(split))
            panel.plot(split.size, efficiency(work, split, costs), "x", color=color)
        panel.set(title=f"width {work.dim}, {work.tokens} tokens", xlabel="GPUs", ylabel="efficiency", ylim=(0, 1.1))
        panel.set_xscale("log", base=2)
        panel.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(WAN_DIT_SIZES), default="T2V-14B")
    parser.add_argument("--resolution", choices=sorted(RESOLUTIONS), default="480p")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smoke", action="store_true", help="tiny, nothing recorded")
    parser.add_argument("--report", action="store_true", help="measure nothing; fit and plot what was recorded")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args(arguments)
    if options.report:
        report(options.results)
        return
    with Job(options.device) as job, torch.no_grad():
        rows = run(options, job)
        if job.is_first and not options.smoke:
            print(record.append("scaling", rows, options.results))


if __name__ == "__main__":
    main()
