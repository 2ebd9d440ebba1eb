"""A server that does little but answer /health, for tests of how processes are started and ended.

    standin_server.py --uds PATH | --port N | --socket PATH [--child] [--deaf] [--stubborn] [--say TEXT --exit STATUS]
                      [--killed-at-first FILE]

--child: starts another process, as engines do, and prints which. --deaf: never listens. --stubborn: ignores SIGTERM.
--killed-at-first: unless there is such a file, is killed as soon as it has made one. All other options are ignored.
With --socket it speaks frames, as our vLLM process does, and says that it is no vLLM.
At a port it is as SGLang is: /v1/models wants a key, and has a name, which are both in its environment.
"""

import argparse
import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


async def serve(uds: str | None, port: int | None) -> None:
    from aiohttp import web

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {os.environ['OFFBEAT_SERVER_KEY']}":
            return web.Response(status=401)
        return web.json_response({"data": [{"id": os.environ["OFFBEAT_SERVER_NAME"]}]})

    app = web.Application()
    app.router.add_get("/health", health)
    if port is not None:
        app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await (web.UnixSite(runner, uds) if uds else web.TCPSite(runner, "127.0.0.1", port)).start()
    await asyncio.Event().wait()


async def serve_frames(path: str) -> None:
    from offbeat_frames import Answer, Frames, frame, to_engine

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames()
        while piece := await reader.read(2**16):
            for asked in map(to_engine.decode, frames.feed(piece)):
                error = "it is no vLLM" if asked.name == "facts" else ""
                writer.write(frame(Answer(asked.number, "", error)))

    await asyncio.start_unix_server(answer, path)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--socket")
    parser.add_argument("--port", type=int)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--say", default="")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--killed-at-first", type=pathlib.Path)
    arguments, _ = parser.parse_known_args()
    print(f"server {os.getpid()} on {arguments.uds or arguments.socket or arguments.port}", flush=True)
    if arguments.child:
        child = subprocess.Popen([sys.executable, "-c", SLEEPER])
        print(f"child {child.pid}", flush=True)
    if arguments.say:
        print(arguments.say, flush=True)
    if arguments.exit is not None:
        sys.exit(arguments.exit)
    if arguments.killed_at_first and not arguments.killed_at_first.exists():
        arguments.killed_at_first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.deaf:
        time.sleep(600)
    asyncio.run(serve_frames(arguments.socket) if arguments.socket else serve(arguments.uds, arguments.port))


if __name__ == "__main__":
    main()
