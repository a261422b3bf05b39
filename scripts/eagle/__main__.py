# SPDX-License-Identifier: Apache-2.0
"""Train an EAGLE or EAGLE-3 draft for a Llama model, as a folder that vLLM loads."""

import argparse
import sys
from pathlib import Path

from scripts.eagle.options import METHODS, Refused


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/dev train-draft", description=__doc__)
    add = parser.add_argument
    add("target", type=Path, metavar="TARGET", help="the model's folder")
    add("out", type=Path, metavar="OUT", help="the draft's folder")
    add("--method", choices=METHODS, required=True)
    add("--text", type=Path, nargs="+", metavar="FILE", help="Python's documentation by default")
    add("--steps", type=int, metavar="N")
    add("--length", type=int, metavar="L", help="tokens of each text, with the prompt")
    add("--prompt", type=int, metavar="L", help="tokens that the target goes on from")
    add("--batch", type=int, metavar="B", help="texts in a step")
    add("--lr", type=float, metavar="X")
    add("--draft-vocab", type=int, metavar="N", help="guess only the N most frequent tokens")
    add("--speculators", action="store_true", help="write the format of the speculators library")
    add("--seed", type=int, metavar="S")
    add("--depth", type=int, metavar="K", help="tokens that it is trained to guess in a row")
    add("--generated", action="store_true", help="train on what the target writes after the text")
    add("--loss-temperature", type=float, metavar="T", help="of the compared distributions")
    add("--device", metavar="NAME", help="like cpu or cuda:1")
    return parser


def main() -> None:
    options = vars(arguments().parse_args())
    given = {name: value for name, value in options.items() if value is not None}
    from scripts.eagle.train import train  # it takes seconds to import

    try:
        train(given.pop("target"), given.pop("out"), **given)
    except (Refused, OSError) as error:
        sys.exit(f"scripts/dev train-draft: {error}")


if __name__ == "__main__":
    main()
