"""The page served from a thread of a process with other work: a run that trains here, or a notebook's kernel.

The port is open at once, so that its link can be shown. The server itself is loaded when somebody first calls, because
a run whose page nobody opens should not wait for it.
"""

from __future__ import annotations

import asyncio
import html
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

log = logging.getLogger(__name__)

END_WITHIN_S = 3.0
HEIGHT_PX = 700


class BackgroundPage:
    """The page of the runs in folders `paths`, until `close`, or until this process ends. A notebook shows it in a
    frame."""

    def __init__(self, paths: Sequence[Path], *, is_framed: bool = False):
        self.paths = [path.absolute() for path in paths]
        self._is_framed, self._token = is_framed, secrets.token_urlsafe(24)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_over, self._over = socket.socketpair()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._serve, name="offbeat-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Link to the page, with its token."""
        port = self._listener.getsockname()[1]
        return f"http://127.0.0.1:{port}" + (f"/{self._token}/" if self._is_framed else f"/?token={self._token}")

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the page; its link leads nowhere from then on."""
        if self._thread.is_alive():
            with suppress(OSError):
                self._over.send(b".")
            if self._server is not None:
                self._server.should_exit = True
            self._thread.join(END_WITHIN_S)
        self._listener.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            waiting.register(self._is_over, selectors.EVENT_READ)
            called = [key.fileobj for key, _ in waiting.select()]
        if self._is_over in called:
            return
        try:
            from offbeat.tools.page.server import BESIDE_SHARE, PageApp, server_of

            app = PageApp(self.paths, self._token, share=BESIDE_SHARE, is_framed=self._is_framed)
            self._server = server_of(app)
            asyncio.run(self._server.serve([self._listener]))
        except Exception:
            log.exception("the page ended by an error")

    def __repr__(self) -> str:
        return f"<page of {', '.join(path.name for path in self.paths)}: {self.url}>"

    def _repr_html_(self) -> str:
        names = html.escape(", ".join(path.name for path in self.paths))
        # On another machine than the browser, 127.0.0.1 is not this one, and the frame stays empty: hence the line.
        return (
            f'<iframe src="{self.url}" title="{names}" width="100%" height="{HEIGHT_PX}" style="border: 0"></iframe>'
            f'<p style="font-size: small">The page of {names}: <a href="{self.url}" target="_blank">in a window of its '
            "own</a>. If the kernel is on another machine, the frame is empty: forward its port "
            f"{self._listener.getsockname()[1]} to yours, or write a file with offbeat page --out.</p>"
        )
