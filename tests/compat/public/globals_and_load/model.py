"""Globals, a load_model(properties) that looks where the weights are, and one call at a time."""

import logging
import os

from djl_python import Input, Output

model = None
busy = []


def load_model(properties):
    tensor_parallel = int(properties["tensor_parallel_degree"])
    model_location = properties["model_dir"]
    if "model_id" in properties:
        model_location = properties["model_id"]
    logging.info(f"Loading model in {model_location}")
    assert os.path.isdir(properties["model_dir"])
    return {"location": model_location, "tp": tensor_parallel}


def handle(inputs: Input):
    global model
    if not model:
        model = load_model(inputs.get_properties())
    if inputs.is_empty():
        # the server makes an empty call to warm the model up
        return None
    busy.append(1)
    data = inputs.get_as_json()
    text, params = data["text"], data.get("parameters", {})
    at_once = len(busy)
    outputs = {"outputs": [text[: params.get("max_length", 100)]], "at_once": at_once, **model}
    busy.pop()
    return Output().add_as_json(outputs)
