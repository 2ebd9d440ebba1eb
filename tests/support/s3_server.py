"""A real S3-compatible server as a process of its own, and ways to make it slow, full or unwilling.

Run as a script it serves until its standard input ends, so that it never outlives its test. What it is to do wrong is
told to it by a PUT to /faults; a GET of /faults answers how often each method was called since.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request

KEY, SECRET = "a-key-id", "a-very-secret-key"
ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
FULL = ERROR.format("XMinioStorageFull", "Storage backend has reached its minimum free drive threshold.")
BUSY = ERROR.format("InternalError", "Something went wrong.")


class S3Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        port = int(self._process.stdout.readline() or 0)
        assert port, "the server did not start"
        self.endpoint = f"http://127.0.0.1:{port}"

    def make_bucket(self, name: str) -> None:
        self._call(f"/{name}", b"")

    def break_(self, **faults: float) -> None:
        """`delay_s`: every answer takes so long; `num_busy`: calls that fail; `is_full`: nothing more can be put;
        `hang_s`: how long the next call gets no answer."""
        self._call("/faults", json.dumps(faults).encode())

    def num_calls(self, method: str) -> int:
        with urllib.request.urlopen(f"{self.endpoint}/faults", timeout=30) as answer:
            return json.load(answer).get(method, 0)

    def _call(self, path: str, body: bytes) -> None:
        request = urllib.request.Request(self.endpoint + path, data=body, method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


class Faults:
    """Stands before an S3 server's application."""

    def __init__(self, application):
        self._application = application
        self._faults, self._calls = {}, {}
        self._lock = threading.Lock()

    def __call__(self, environ, start_response):
        method = environ["REQUEST_METHOD"]
        if environ["PATH_INFO"] == "/faults":
            return self._told(method, environ, start_response)
        with self._lock:
            self._calls[method] = self._calls.get(method, 0) + 1
            faults = dict(self._faults)
            self._faults["num_busy"] = faults.get("num_busy", 0) - 1
            self._faults["hang_s"] = 0
        time.sleep(faults.get("delay_s", 0) + faults.get("hang_s", 0))
        if faults.get("num_busy", 0) > 0:
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [] if method == "HEAD" else [BUSY.encode()]
        if faults.get("is_full") and method == "PUT":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("507 Insufficient Storage", [("Content-Type", "application/xml")])
            return [FULL.encode()]
        return self._application(environ, start_response)

    def _told(self, method, environ, start_response):
        with self._lock:
            if method == "PUT":
                self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self._calls = {}
            body = json.dumps(self._calls).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


def serve() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, Faults(DomainDispatcherApplication(create_backend_app)), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve()
