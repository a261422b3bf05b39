"""Does what it is told to, and all of it is wrong."""

import os
import sys
import time

from djl_python.input_parser import input_formatter


@input_formatter
def parse(payload, tokenizer=None):
    order = payload.get("do")
    if order == "block":
        time.sleep(1000)
    if order == "spin":
        while True:
            pass
    if order == "allocate":
        bytearray(2**29)
    if order == "die":
        os._exit(7)
    if order == "exit":
        sys.exit("enough")
    if order == "print":
        print("the token is", os.environ["HF_TOKEN"])
        raise ValueError(os.environ["HF_TOKEN"])
    return {"none": None, "list": [1], "set": {"prompt": {1}}}.get(order, payload)
