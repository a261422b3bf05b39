"""A generation in a thread, read by a generator that is the answer's stream."""

import json
import os
from queue import Queue
from threading import Thread

from djl_python import Input, Output

done = []


def generate(prompt, streamer):
    for word in prompt.split():
        streamer.put(word)
    streamer.put(None)


def stream_items(prompt):
    streamer = Queue()
    thread = Thread(target=generate, args=(prompt, streamer))
    thread.start()
    while (text := streamer.get()) is not None:
        if text == "fail":
            raise RuntimeError("the stream broke")
        yield {"outputs": [text]}
    thread.join()


def release(name):
    done.append(name)


def as_line(item):
    return json.dumps(item) + "\n"


def handle(inputs: Input) -> Output:
    if inputs.is_empty():
        return None
    data = inputs.get_as_json()
    outputs = Output().add_property("content-type", "application/jsonlines")
    if data.get("released"):
        return outputs.add_as_json(done)
    outputs.add_stream_content(stream_items(data["inputs"]), output_formatter=as_line)
    outputs.finalize(release, data["inputs"])
    return outputs
