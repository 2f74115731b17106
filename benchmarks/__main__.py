"""`python -m benchmarks ops | block | report`, each with its own options (`--help`)."""

import sys

from benchmarks import block, ops, report

COMMANDS = {"ops": ops.main, "block": block.main, "report": report.main}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(COMMANDS)}}} ...")
    COMMANDS[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
