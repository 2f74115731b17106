"""`python -m benchmarks COMMAND ...`, each with its own options (`--help`); `scaling` is run by torchrun instead."""

import importlib
import sys

COMMANDS = ("ops", "block", "attention", "sparse_wan", "fp8", "report")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(COMMANDS)}}} ...")
    importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
