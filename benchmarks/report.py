"""Tables and plots of the recorded operators: `python -m benchmarks report` reads the CSV files and measures nothing.

For each device: `<device>_ops.md` and, where matplotlib is installed, `<device>_ops.png`, beside its CSV.
"""

import argparse
import csv
from importlib.util import find_spec
from pathlib import Path

from benchmarks import record


def latest(path: Path, benchmark: str = "ops") -> dict[str, dict[str, dict]]:
    """The newest row of every case and metric: {case: {metric: row}}, in the order of the file."""
    found: dict[str, dict[str, dict]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == benchmark:
                found.setdefault(row["case"], {})[row["metric"]] = row
    return found


def operators(cases: dict) -> list[tuple[str, float, dict[str, float]]]:
    """(case, bytes, {who: milliseconds}) of every measured operator."""
    found = []
    for case, metrics in cases.items():
        if "bytes" in metrics:
            times = {who: float(row["value"]) for who, row in metrics.items() if row["unit"] == "ms"}
            found.append((case, float(metrics["bytes"]["value"]), times))
    return found


def table(cases: dict) -> str:
    """The Markdown page of one device."""
    ceiling = cases["device copy"]["copy"]
    copy = float(ceiling["value"])
    lines = [
        f"# Operators on {ceiling['device']}",
        "",
        f"{ceiling['date']}, commit {ceiling['commit']}, PyTorch {ceiling['torch']}, Triton {ceiling['triton']}. "
        f"Medians with a cold cache; a device copy moved {copy:.2f} TB/s in the same run.",
        "",
        "| operator, rows x width | ms | TB/s | of the copy | rivals: times our time |",
        "|---|---|---|---|---|",
    ]
    for case, moved, times in operators(cases):
        ours = times.pop("ours")
        rivals = ", ".join(f"{who} {ms / ours:.2f}" for who, ms in times.items())
        speed = moved / ours / 1e9
        lines.append(f"| {case} | {ours:.4f} | {speed:.2f} | {speed / copy:.2f} | {rivals} |")
    host = cases.get("host time of a call", {})
    if host:
        lines += ["", "| host time of an eager call | us |", "|---|---|"]
        lines += [f"| {name} | {float(row['value']):.1f} |" for name, row in host.items()]
    return "\n".join(lines) + "\n"


def plot(cases: dict, path: Path) -> None:
    """Bars of TB/s: ours beside the fastest rival, and the copy as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = operators(cases)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    for place, (_, moved, times) in enumerate(rows):
        ours = times.pop("ours")
        axes.barh(place - 0.2, moved / ours / 1e9, 0.4, color="tab:blue", label="TeleFuser" if not place else None)
        if times:
            label = "fastest rival" if not place else None
            axes.barh(place + 0.2, moved / min(times.values()) / 1e9, 0.4, color="tab:gray", label=label)
    copy = cases["device copy"]["copy"]
    axes.axvline(float(copy["value"]), color="black", linestyle="--", label="device copy")
    axes.set_yticks(range(len(rows)), [case for case, _, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TB/s, each input read once and each result written once")
    axes.set_title(copy["device"])
    axes.legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks report", description=__doc__)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    folder = parser.parse_args(arguments).results
    for path in sorted(folder.glob("*.csv")):
        cases = latest(path)
        if "device copy" not in cases:
            continue
        page = path.with_name(f"{path.stem}_ops.md")
        page.write_text(table(cases), encoding="utf-8")
        print(page)
        if find_spec("matplotlib"):
            plot(cases, page.with_suffix(".png"))
            print(page.with_suffix(".png"))
