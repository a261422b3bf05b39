import os
import time

from serving.start import read_ahead


def cached(path):
    """Whether the file's last page is in memory: to read it then needs no waiting (preadv2(2))."""
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
    return True


def test_weights_are_read_from_the_disk_ahead(tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.write(os.urandom(32 * 1024**2))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not cached(weights)
    read_ahead(tmp_path)
    deadline = time.monotonic() + 30
    while not cached(weights):
        assert time.monotonic() < deadline
        time.sleep(0.01)
