"""Operators against the memory's own speed and against rivals: accuracy first, then medians with a cold cache.

    python -m benchmarks ops                      every operator on the shapes of Wan 2.1, appended to the results
    python -m benchmarks ops --sweep              the best launch settings of each kernel, to be put into launch.py
    python -m benchmarks ops --sweep --tuned      both: measure with the settings that the sweep found
    python -m benchmarks ops --smoke              tiny shapes, to see that it runs; records nothing

TB/s count every input once and every result once; "of copy" is their share of a device copy in the same run.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import record
from benchmarks.op_cases import OPS, SHAPES, SHAPES_OF, Case
from benchmarks.timing import Timer
from telefuser.kernel.triton import activation, launch
from telefuser.kernel.triton.launch import Launch
from telefuser.ops import RMSNorm, add_layer_norm_modulate, apply_rotary_emb, layer_norm_modulate, rms_norm_rotary
from telefuser.ops.activations import GELUTanh
from telefuser.platforms import current_platform

SMOKE_SHAPES = [(24, 48), (24, 64)]
# Relative L2 error to float64: one rounding of the result, or float32 arithmetic.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
# Three digits of e4m3: half a step is 1/16 of a power of two at most, and the mean of its square a third of that's.
LIMITS |= {torch.float8_e4m3fn: 3e-2, torch.float8_e4m3fnuz: 3e-2}
SWEPT = {
    ("rms_norm", 2): ["rms_norm"],
    ("norm", 2): ["layer_norm", "layer_norm_modulate bf16"],
    ("norm", 4): ["layer_norm_modulate fp32 to bf16"],
    ("norm_fp8", 4): ["layer_norm_modulate fp32 to fp8"],
    ("add_norm", 2): ["add_layer_norm_modulate bf16"],
    ("add_norm", 4): ["add_layer_norm_modulate fp32 stream"],
    ("add_norm_fp8", 4): ["add_layer_norm_modulate fp32 stream to fp8"],
    ("norm_rotary", 2): ["rms_norm_rotary q and k"],
    ("rotary", 2): ["apply_rotary_emb"],
    ("quantize", 2): ["quantize_rows fp8"],
    ("quantize_activated", 2): ["gelu_tanh to fp8"],
}
THREADS = (32, 64, 128, 256, 512)
ROWS = (1, 2, 4, 8, 16)
TILES = (1, 2, 4)
# Elements of a tile for a thread: fewer make short accesses, more do not fit its registers.
PER_THREAD = (8, 160)
FLAT = list(itertools.product((1024, 2048, 4096, 8192), (128, 256)))


def error(case: Case) -> float:
    """The largest relative L2 error of our results on rows from the start, the middle and the end."""
    outs = case.call(case.ours)
    dtypes = [out.dtype for out in outs]
    if outs[-1].shape[-1] == 1:
        *others, values, scales = outs
        outs, dtypes = (*others, values.float() * scales), dtypes[:-1]
    rows = case.tensors[0].shape[1]
    worst = 0.0
    for start in {0, rows // 2, max(rows - 64, 0)}:
        part = slice(start, start + 64)
        inputs = [t[:, part].double() for t in case.tensors]
        others = [t[part] if t.dim() == 2 and t.shape[0] == rows else t for t in case.others]
        exact = case.exact(*inputs, *(t.double() for t in others))
        for out, dtype, wanted in zip(outs, dtypes, exact if isinstance(exact, tuple) else (exact,)):
            got = out[:, part].double()
            distance = ((got - wanted).norm() / wanted.norm()).item() / LIMITS[dtype]
            worst = max(worst, distance if distance == distance else float("inf"))
    return worst


def measure(name: str, rows: int, width: int, timer: Timer, ceiling: float, is_compiled: bool) -> list[dict]:
    """The rows to record of one operator on one shape; raises where our result is wrong."""
    case = OPS[name](rows, width, timer.device)
    wrong = error(case)
    if not wrong <= 1:
        raise ValueError(f"{name} {rows}x{width}: error is {wrong:.2f} of its limit, so its speed means nothing")
    functions = {"ours": case.ours, **case.rivals}
    if is_compiled:
        torch._dynamo.reset()
        functions["Inductor"] = torch.compile(case.rivals.get("eager", next(iter(case.rivals.values()))), dynamic=False)
    moved = case.bytes()
    label = f"{name} {rows}x{width}"
    settings = ""
    if case.kernel and case.kernel != "gelu":
        settings = "threads {} rows {} tile {}".format(*launch.launch_of(case.kernel, width, case.tensors[0]))
    found = [{"case": label, "metric": "bytes", "value": moved, "unit": "B", "note": f"error {wrong:.2f} of its limit"}]
    line = f"{label:52}"
    for who, function in functions.items():
        try:
            ms = timer.milliseconds(lambda function=function: case.call(function))
        except Exception as failure:  # noqa: BLE001
            # A rival that another version broke is left out; ours has run already.
            print(f"    {who} fails: {type(failure).__name__} {str(failure)[:100]}", flush=True)
            continue
        found.append({"case": label, "metric": who, "value": f"{ms:.5f}", "unit": "ms"})
        if who == "ours":
            found[-1]["note"] = settings
        speed = moved / ms / 1e9
        line += f" {who} {ms:.4f} ms {speed:.2f} TB/s ({speed / ceiling:.2f})"
    print(line, flush=True)
    return found


def host_costs(timer: Timer) -> list[dict]:
    """Microseconds that the host spends on an eager call of a small tensor."""
    device = timer.device
    x, w = torch.randn(1, 8, 128, device=device).bfloat16(), torch.randn(128, device=device).bfloat16()
    stream, vectors = x.float(), torch.randn(1, 3, 1, 128, device=device).unbind(1)
    norm = RMSNorm(128, device=device, dtype=torch.bfloat16).requires_grad_(False)
    angles, heads, gelu = tuple(torch.rand(2, 8, 32, device=device)), x.view(1, 8, 2, 64), GELUTanh()
    calls = {
        "F.rms_norm": lambda: F.rms_norm(x, (128,), w),
        "rms_norm": lambda: norm(x),
        "layer_norm_modulate": lambda: layer_norm_modulate(stream, *vectors[:2], out_dtype=torch.bfloat16),
        "add_layer_norm_modulate": lambda: add_layer_norm_modulate(stream, x, *vectors),
        "rms_norm_rotary": lambda: rms_norm_rotary(x, x, w, w, angles, 2),
        "apply_rotary_emb": lambda: apply_rotary_emb(heads, angles),
        "gelu_tanh": lambda: gelu(x),
    }
    found = []
    for name, call in calls.items():
        microseconds = timer.host_microseconds(call)
        print(f"host time of {name}: {microseconds:.1f} us", flush=True)
        found.append({"case": "host time of a call", "metric": name, "value": f"{microseconds:.2f}", "unit": "us"})
    return found


def sweep(timer: Timer, shapes: list[tuple[int, int]] | None = None, kernels: list | None = None) -> dict:
    """Try launch settings; print and return the best table of each (kernel, bytes an element)."""
    regular = launch.launch_of
    tables = {}
    try:
        for (kernel, itemsize), names in SWEPT.items():
            if kernels and kernel not in kernels:
                continue
            table = []
            for rows, width in shapes or sorted({s for name in names for s in SHAPES_OF[name] if s[0] == 32760}):
                cases = [OPS[name](rows, width, timer.device) for name in names]
                times = {}
                for threads, tile, each in itertools.product(THREADS, TILES, ROWS):
                    if not PER_THREAD[0] <= width * tile / threads <= PER_THREAD[1] or each < tile:
                        continue
                    settings = Launch(threads, each, tile)
                    launch.launch_of = lambda *_, settings=settings: settings
                    launch._REPLAYS.clear()
                    times[settings] = _times(cases, timer)
                launch.launch_of = regular
                launch._REPLAYS.clear()
                best = _report_sweep(kernel, itemsize, rows, width, times, _times(cases, timer))
                table.append((width, best))
            tables[kernel, itemsize] = _widths_apart(table)
            print(f"    {_source(kernel, itemsize, tables[kernel, itemsize], timer.device)}", flush=True)
    finally:
        launch.launch_of = regular
    return tables


def _times(cases: list[Case], timer: Timer) -> float:
    """Milliseconds of all cases together; infinite, and a line, where the settings do not compile or fit."""
    try:
        return sum(timer.milliseconds(lambda case=case: case.call(case.ours)) for case in cases)
    except Exception as failure:  # noqa: BLE001
        # One setting must not end the whole search; Triton's errors have no common class.
        print(f"    fails: {type(failure).__name__} {str(failure)[:100]}", flush=True)
        return float("inf")


def _report_sweep(kernel, itemsize, rows, width, times: dict, present: float) -> Launch:
    ranked = sorted(times, key=times.get)
    first = ", ".join(f"{tuple(s)} {times[s]:.4f}" for s in ranked[:4])
    print(f"sweep {kernel} {itemsize} {rows}x{width}: {first}; now {present:.4f} ms", flush=True)
    return ranked[0]


def _widths_apart(found: list[tuple[int, Launch]]) -> tuple:
    """Settings of measured widths as a table: narrower rows stay as they are, each measured width holds up to twice
    its own, the last one for all beyond."""
    by_width = dict(found)
    widths = sorted(by_width)
    limits = [min(2 * width, wider - 1) for width, wider in itertools.pairwise(widths)] + [1 << 62]
    narrower = tuple(entry for entry in launch.SAFE if entry[0] < widths[0])
    return narrower + tuple((limit, by_width[width]) for limit, width in zip(limits, widths))


def _source(kernel: str, itemsize: int, table: tuple, device: torch.device) -> str:
    """The line for `launch.MEASURED`."""
    family = "cpu" if device.type == "cpu" else launch.family()
    parts = ", ".join(f"({'1 << 62' if limit == 1 << 62 else limit}, Launch{tuple(best)})" for limit, best in table)
    return f'("{kernel}", "{family}", {itemsize}): ({parts}),'


def sweep_flat(shape: tuple[int, int], timer: Timer) -> None:
    """The block and threads of the flat activation."""
    case = OPS["gelu_tanh"](*shape, timer.device)
    present = activation.FLAT_BLOCK, activation.FLAT_THREADS
    times = {}
    for settings in FLAT:
        activation.FLAT_BLOCK, activation.FLAT_THREADS = settings
        times[settings] = _times([case], timer)
    activation.FLAT_BLOCK, activation.FLAT_THREADS = present
    print("sweep gelu:", ", ".join(f"{s} {times[s]:.4f}" for s in sorted(times, key=times.get)), "now", present)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, nothing recorded")
    parser.add_argument("--sweep", action="store_true", help="search launch settings")
    parser.add_argument("--tuned", action="store_true", help="after --sweep, measure with what it found")
    parser.add_argument("--kernels", nargs="*", help="of the sweep")
    parser.add_argument("--only", nargs="*", choices=sorted(OPS), help="these operators")
    parser.add_argument("--no-inductor", action="store_true", help="skip the rivals that take seconds to compile")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device(current_platform.default_device())
    timer = Timer(device, options.repeats)
    with torch.inference_mode():
        ceiling = timer.copy_ceiling(16 if options.smoke else 2048)
        print(f"{record.device_name()}: copy {ceiling:.2f} TB/s", flush=True)
        if options.sweep:
            tables = sweep(timer, SMOKE_SHAPES if options.smoke else None, options.kernels)
            sweep_flat((SMOKE_SHAPES if options.smoke else SHAPES)[0], timer)
            if not options.tuned:
                return
            if device.type != "cpu":
                family = launch.family()
                launch.MEASURED.update({(kernel, family, size): table for (kernel, size), table in tables.items()})
                launch._launch_of.cache_clear()
        keep = _recorder(None if options.smoke else options.results)
        # Before a compiler fills the process: what its caches and the collector of garbage cost is not an operator's.
        keep(host_costs(timer))
        keep([{"case": "device copy", "metric": "copy", "value": f"{ceiling:.4f}", "unit": "TB/s"}])
        failed = []
        chosen = [(name, shape) for name in options.only or OPS for shape in SHAPES_OF[name]]
        if options.smoke:
            chosen = itertools.product(options.only or OPS, SMOKE_SHAPES)
        for name, (count, width) in chosen:
            try:
                keep(measure(name, count, width, timer, ceiling, not (options.no_inductor or options.smoke)))
            except Exception as failure:  # noqa: BLE001
                # The others are still worth their time on the device; the exit status tells.
                print(f"{name} {count}x{width} FAILS: {type(failure).__name__} {str(failure)[:200]}", flush=True)
                failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _recorder(folder: Path | None):
    """Appends rows as they are measured, so that a run which is cut short leaves what it has."""
    return lambda rows: None if folder is None else record.append("ops", rows, folder)


if __name__ == "__main__":
    main()
