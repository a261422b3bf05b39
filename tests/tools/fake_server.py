# SPDX-License-Identifier: Apache-2.0
"""Our server with the fake engine, as the container of a SageMaker endpoint."""

import asyncio
import os
import signal
import socket

from lmi_config.options.declared import Settings
from serving.server.server import Server
from serving.server.startup import Runtime
from tests.fake_engine import FakeEngine


async def main():
    listener = socket.create_server(("127.0.0.1", int(os.environ["SAGEMAKER_BIND_TO_PORT"])))
    settings = Settings(endpoint_name=os.environ.get("OPTION_ENDPOINT_NAME"))
    engine = FakeEngine(settings.model_names)

    async def start(note):
        return Runtime(engine=engine, adapters=None, code=None, cache=None)

    server = Server(listener, settings, start)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    await server.run()


if __name__ == "__main__":
    asyncio.run(main())
