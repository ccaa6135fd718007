"""Workers of `pytest -n` are forks of one process that has imported torch, transformers and the package.

    python forked_workers.py -u -c PROGRAM          what execnet starts in the place of `python -u -c PROGRAM`

Each worker, and the process whose forks run commands for its tests, would import all that by itself: four times in two
workers. A plugin of conftest.py in the process that hands out tests, where there is no GPU, and where forks are safe.
"""

import json
import os
import shlex
import socket
import sys
from typing import Any

SHARED = "PYTEST_FORK_SERVER"  # the variable with the socket of the process that all workers of a run ask


def become_a_fork(arguments: list[str]) -> int:
    """Has the program run in a fork with the streams of this process, and waits for its end."""
    report, its_report = socket.socketpair()
    request = {"arguments": arguments, "env": dict(os.environ), "cwd": os.getcwd(), "terminal": False}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.connect(os.environ[SHARED])
        socket.send_fds(door, [json.dumps(request).encode()], [its_report.fileno(), 0, 1, 2])
        its_report.close()
        for descriptor in (0, 1):  # at their end the worker's must be the last
            os.close(descriptor)
        with report, report.makefile() as lines:
            lines.readline()  # which process it is
            return int(lines.readline() or 1) & 0xFF


def pytest_xdist_setupnodes(config: Any, specs: list[Any]) -> None:
    """Before workers are started."""
    import tempfile

    from processes import start_server

    folder = tempfile.TemporaryDirectory(prefix="fork-server-")
    os.environ[SHARED] = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ[SHARED])
        listener.listen()
        door, server = start_server(listener)

    def end() -> None:
        door.close()
        server.wait(60)
        folder.cleanup()

    config.add_cleanup(end)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([sys.executable, "-S", "-E", __file__])


if __name__ == "__main__":
    try:
        code = become_a_fork(sys.argv[2:])
    except KeyboardInterrupt:  # the worker has got it, too
        code = 130
    os._exit(code)
