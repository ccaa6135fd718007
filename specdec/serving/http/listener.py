"""The listening socket: takes a few connections at a time, and none that there is no room for, or whose client the door
is shut to. asyncio's event loop calls `accept` where connections wait.
"""

import errno
import socket
import time
from contextlib import suppress
from typing import Any

from specdec.serving.http.connections import HEAD_READ, Accepted, Connections, plain_answer
from specdec.serving.http.pacing import LOOKED_AT

AT_ONCE = 16
"""Connections taken in one turn of the event loop; streams go on between two turns."""
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """A listening socket. `connections` is set when there are any to count; without it, it is as any other."""

    connections: Connections | None = None
    secure: bool = False
    _left = AT_ONCE
    _spare: socket.socket | None = None  # a descriptor to give up where there are no more

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts like socket.accept. Raises BlockingIOError where there is nothing to take, and now and then where
        there is: the event loop asks again in its next turn."""
        connections = self.connections
        if connections is None:
            return super().accept()
        if self._spare is None:
            self._keep_spare()
        while self._left:
            self._left -= 1
            try:
                taken, address = super().accept()
            except OSError as error:
                if error.errno not in NO_FILES:
                    self._left = AT_ONCE
                    raise
                self._turn_one_away(error)
                continue
            begin = first_bytes(taken)
            if begin is None:
                taken.close()
                continue
            if connections.door is not None and connections.door.turns_away(begin, address[0], time.monotonic()):
                self._turn_away(taken)
                continue
            accepted = Accepted(taken.family, taken.type, taken.proto, fileno=taken.detach())
            accepted.connections, accepted.began = connections, time.monotonic()
            if connections.make_room():
                connections.add(accepted)
                return accepted, address
            self._refuse(accepted, 503, "as many connections are open as may be; try again later")
        self._left = AT_ONCE
        raise BlockingIOError

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()
        super().close()

    def _turn_one_away(self, error: OSError) -> None:
        """No file is left: close one connection unanswered, or it would be reported as waiting over and over."""
        assert self.connections is not None
        self.connections.warn("no connection can be taken: %s; raise the limit of open files", error.strerror)
        if self._spare is None:
            self._left = 0
            raise error  # the event loop tries again in a second
        self._spare.close()
        with suppress(OSError):
            super().accept()[0].close()
        self._keep_spare()

    def _keep_spare(self) -> None:
        try:
            self._spare = socket.socket()
        except OSError:
            self._spare = None

    def _turn_away(self, taken: socket.socket) -> None:
        assert self.connections is not None
        self.connections.warn("a client for whom as many refusals wait as may is turned away (429)")
        with suppress(OSError):
            taken.recv(HEAD_READ)  # a small request is read, so that its client gets an answer and no reset
        self._refuse(taken, 429, "as many of your requests were refused as may wait; send fewer at a time")

    def _refuse(self, taken: socket.socket, status: int, message: str) -> None:
        """Say why where that takes no handshake, and close."""
        taken.setblocking(False)
        with suppress(OSError):
            if not self.secure:
                taken.send(plain_answer(status, message, retry=1))
        taken.close()


def first_bytes(taken: socket.socket) -> bytes | None:
    """What a client has sent, as far as the door looks at it, left to be read. None: it has closed its half, or reset,
    before it sent anything; no request can come, so no protocol is made."""
    try:
        taken.setblocking(False)
        return taken.recv(LOOKED_AT, socket.MSG_PEEK) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
