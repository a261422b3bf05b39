# SPDX-License-Identifier: Apache-2.0
"""Three small LoRA adapters for a tiny random model, as archives to try endpoint.py with.

    python -m examples.sagemaker.make_adapters FOLDER

FOLDER stands for an S3 bucket. The model's folder, which is made too, is printed.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.models import tiny, tiny_lora


def make(bucket: Path) -> None:
    """Write one.tar.gz, two.tar.gz and three.tar.gz."""
    bucket.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("one", "two", "three"), 1):
        with tempfile.TemporaryDirectory() as folder:
            files = tiny_lora.write(Path(folder), seed).iterdir()
            with tarfile.open(bucket / f"{name}.tar.gz", "w:gz") as archive:
                for file in files:
                    archive.add(file, file.name)  # at the archive's root, as SageMaker wants them


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    print(tiny.make())
