"""LMCache's server, a child of ours: started before the engine, stopped after it."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence

import httpx

log = logging.getLogger(__name__)

START_S = 120.0
TERM_S = 1.0  # between SIGTERM and SIGKILL

_MAIN = "from lmcache.cli.main import main; main()"


class CacheServerError(Exception):
    """The cache server did not start. The message says why."""


class CacheServer:
    """A running `lmcache server`. Its output becomes part of our log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._logging = asyncio.create_task(self._log())

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), TERM_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._logging.cancel()

    async def ready(self, http_port: int) -> None:
        """Wait until it answers. Raises CacheServerError when it ends first, or takes too long."""
        url = f"http://127.0.0.1:{http_port}/healthcheck"
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(START_S):
            while self._process.returncode is None:
                try:
                    if (await client.get(url)).status_code == 200:
                        return
                except httpx.TransportError:
                    await asyncio.sleep(0.25)
        raise CacheServerError(f"it ended with exit code {self._process.returncode}")

    async def _log(self) -> None:
        assert self._process.stdout
        async for line in self._process.stdout:
            log.info("%s", line.decode(errors="replace").rstrip())


async def start(
    arguments: Sequence[str], environ: Mapping[str, str], http_port: int
) -> CacheServer:
    """Start it with these arguments of `lmcache` and wait until it answers.

    environ: variables beside our own; they may hold what is secret. Raises CacheServerError.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _MAIN,
        *arguments,
        env={**os.environ, "LMCACHE_DISABLE_BANNER": "1", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us alone
    )
    server = CacheServer(process)
    try:
        await server.ready(http_port)
    except TimeoutError:
        await server.stop()
        raise CacheServerError(f"it does not answer after {START_S:.0f} s") from None
    except BaseException:
        await server.stop()
        raise
    return server
