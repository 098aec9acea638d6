"""The command: ``python -m pleach run -n 4 script.py``, and ``pleach``."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the command that the wheel carries. A script that ends in .py is run by this Python."""
    arguments = sys.argv[1:]
    command = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "pleach")
    if not os.access(command, os.X_OK):
        found = shutil.which("pleach")
        # The script of this package would call itself.
        if found is None or os.path.samefile(found, sys.argv[0]) or found.endswith(".py"):
            sys.exit("error: no command: this build of the package carries none; install the wheel")
        command = found
    if arguments[:1] == ["run"]:
        arguments = _with_python(arguments)
    os.execv(command, ["pleach", *arguments])


def _with_python(arguments: list[str]) -> list[str]:
    """The arguments of ``run`` with this Python before a script."""
    for place, argument in enumerate(arguments):
        if argument.endswith(".py"):
            is_command = arguments[place - 1] == "--" or not any(
                word == "--" for word in arguments[:place]
            )
            before = arguments[:place] if "--" in arguments[:place] else [*arguments[:place], "--"]
            if is_command:
                return [*before, sys.executable, *arguments[place:]]
            break
        if argument == "--" and not arguments[place + 1 : place + 2][0:1] == []:
            if not arguments[place + 1].endswith(".py"):
                break
    return arguments


if __name__ == "__main__":
    main()
