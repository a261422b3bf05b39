import socket

import pytest

from scripts.bench.overhead import server


def test_a_strangers_server_is_not_measured(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as stranger,
        pytest.raises(SystemExit, match="is in use by another program"),
        server(["true"], {}, stranger.getsockname()[1], tmp_path / "log"),
    ):
        pass
