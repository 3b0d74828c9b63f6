"""Command line: `python -m ts_ops COMMAND`.

A command is a module with `add_arguments(parser)` and `run(arguments) -> int`, the exit status. Its name is the
module's, its summary the first line of the module's docstring.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("doctor", "warmup")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ts_ops", description="MLA attention operators: tools.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"ts_ops.{name}")
        summary = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help(sys.stderr)
        return 2
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
