"""The plug-in for the TensorFlow that is installed: found in a cache, or compiled.

The C++ ABI of TensorFlow holds for one version of it, so the plug-in is compiled where it runs. Its
file in the cache has a name made of that version and of a digest of all that goes into it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import IO

from pleach._errors import Error

#: Most seconds that compiling may take.
COMPILE_LIMIT_S = 900

_SOURCES = Path(__file__).parent / "plugin"

# Between two looks whether another process compiles no longer.
_LOCK_PAUSE_S = 0.1

# Lines of a compiler's message that an error repeats.
_MESSAGE_LINES = 12

# Folders of headers below TensorFlow's own, for headers that it includes by their own names.
_INCLUDED = ("external/com_github_grpc_grpc/include", "external/farmhash_archive/src")


class PluginError(Error, ImportError):
    """The plug-in of TensorFlow cannot be built, loaded or started; the text says why."""


def plugin(header: str) -> Path:
    """The plug-in for the TensorFlow that is installed. ``header``: that of the C ABI."""
    try:
        import tensorflow
    except ImportError as error:
        raise PluginError(f"TensorFlow cannot be imported: {error}") from error
    command = _command(tensorflow)
    name = f"{tensorflow.__version__}-{_digest(tensorflow, header, command)}"
    folder = _cache()
    path = folder / f"{name}.so"
    if not path.exists():
        # One process compiles; others of the same job wait for it.
        with open(folder / f"{name}.lock", "w") as lock:
            _lock(lock)
            if not path.exists():
                _compile(command, header, path)
    _check_owner(path)
    return path


def _lock(lock: IO[str]) -> None:
    until = time.monotonic() + COMPILE_LIMIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise PluginError(
                    f"another process has held {lock.name} for {COMPILE_LIMIT_S} s: end it, or set "
                    "XDG_CACHE_HOME to another folder"
                ) from None
        time.sleep(_LOCK_PAUSE_S)


def _check_owner(path: Path) -> None:
    """What lies in the cache is loaded into this process: nobody else may have written it."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
        raise PluginError(f"{path} belongs to another user; set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PluginError(f"{path} may be written by other users; take that right from them (chmod go-w)")


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not base.is_absolute():
        raise PluginError(f"XDG_CACHE_HOME={base} is relative to a folder that changes; set a whole path")
    folder = base / "pleach" / "tensorflow"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PluginError(
            f"the cache of the plug-in cannot be made: {error}; set XDG_CACHE_HOME to a folder that can"
        ) from error
    _check_owner(folder)
    return folder


def _command(tensorflow: ModuleType) -> list[str]:
    """The compiler, with all that does not depend on where the output is."""
    version, installed = tensorflow.__version__, Path(str(tensorflow.__file__)).parent
    include = Path(tensorflow.sysconfig.get_include())
    server = include / "tensorflow" / "core" / "distributed_runtime" / "rpc" / "grpc_server_lib.h"
    if not server.exists():
        raise PluginError(
            f"TensorFlow {version} has no {server}; install a wheel of TensorFlow that has its headers"
        )
    if not (installed / "libtensorflow_cc.so.2").exists():
        raise PluginError(
            f"TensorFlow {version} has no {installed / 'libtensorflow_cc.so.2'}; the plug-in needs a "
            "TensorFlow 2 of version 2.18 or later"
        )
    wanted = os.environ.get("CXX", "").split()
    found = wanted or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    if not found or not shutil.which(found[0]):
        raise PluginError(
            f"there is no C++ compiler {' '.join(wanted)}".rstrip()
            + ": the plug-in of TensorFlow is compiled on the machine where it runs; install g++, or "
            "set CXX"
        )
    return [
        *found,
        *tensorflow.sysconfig.get_compile_flags(),
        *(f"-I{include / folder}" for folder in _INCLUDED),
        f'-DPLEACH_TENSORFLOW_VERSION="{version}"',
        # Assertions are compiled or not as in the wheel: the layout of classes may depend on it.
        *("-O1", "-DNDEBUG", "-w", "-fPIC", "-shared"),
        f"-L{installed}",
    ]


def _digest(tensorflow: ModuleType, header: str, command: list[str]) -> str:
    digest = hashlib.sha256()
    parts = [header, Path(__file__).read_text(), *command, tensorflow.version.GIT_VERSION, tensorflow.version.COMPILER_VERSION]
    parts += [path.read_text() for path in sorted(_SOURCES.iterdir())]
    # Hosts with different compilers and C libraries may share the cache.
    parts += [_version_of(command), *platform.libc_ver()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _version_of(command: list[str]) -> str:
    asked = [*command, "--version"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"the compiler {command[0]} does not tell its version: {error}") from error


def _compile(command: list[str], header: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        (Path(folder) / "pleach.h").write_text(header)
        made = Path(folder) / "plugin.so"
        # In this order: where both have a registry, TensorFlow itself uses that of the first.
        libraries = ["-l:libtensorflow_framework.so.2", "-l:libtensorflow_cc.so.2"]
        whole = [*command, f"-I{folder}", "-o", str(made), str(_SOURCES / "plugin.cc"), *libraries]
        try:
            ended = subprocess.run(
                whole, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PluginError(f"the plug-in of TensorFlow cannot be compiled: {error}") from error
        if ended.returncode != 0:
            lines = [line for line in ended.stderr.splitlines() if "error" in line] or [ended.stderr]
            message = "\n".join(lines[:_MESSAGE_LINES])
            raise PluginError(
                f"the plug-in cannot be compiled for this TensorFlow; {command[0]} says:\n{message}"
            )
        made.chmod(0o700)
        os.replace(made, path)
