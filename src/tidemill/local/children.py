"""Child processes that do not outlive this one, however it ends."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# PR_SET_PDEATHSIG is 1, SIGKILL 9. Done by a process of its own that becomes the program, and not by code between
# fork and exec: gRPC's threads do not survive a fork, and now and then take the child with them.
_CODE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[2:])"


def dying_with_parent(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | Path = "."
) -> list[str]:
    """`command`, to be run in `cwd`, such that it is killed when this process ends. On Linux only; elsewhere it is
    the same command.

    Raises FileNotFoundError when the program is not on the PATH of `env`, or not at its path.
    """
    path = (os.environ if env is None else env).get("PATH")
    # A name is looked for, a path is a path.
    name = str(Path(cwd, command[0])) if "/" in command[0] else command[0]
    program = shutil.which(name, path=path)
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return [program, *command[1:]]
    return [sys.executable, "-I", "-S", "-c", _CODE, program, *command]
