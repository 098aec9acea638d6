"""The command: ``python -m pleach run -n 4 script.py``, and ``pleach``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the command that the wheel carries. This Python runs a script that ends in .py."""
    command = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "pleach")
    if not os.path.exists(command):
        sys.exit("error: no command: this build of the package carries none; install the wheel")
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        arguments = with_python(arguments)
    os.execv(command, ["pleach", *arguments])


def with_python(arguments: list[str]) -> list[str]:
    """The arguments of ``run``, with this Python before a script that stands in the command's place."""
    for place, argument in enumerate(arguments):
        if argument == "--":
            place += 1
            if place < len(arguments) and arguments[place].endswith(".py"):
                return [*arguments[:place], sys.executable, *arguments[place:]]
            return arguments
        if argument.endswith(".py"):
            return [*arguments[:place], "--", sys.executable, *arguments[place:]]
    return arguments


if __name__ == "__main__":
    main()
