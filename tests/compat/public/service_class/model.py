"""A service class with its state, and every error caught."""

import logging
from typing import Optional

from djl_python.encode_decode import decode, encode
from djl_python.inputs import Input
from djl_python.outputs import Output


class TextService(object):
    def __init__(self):
        self.initialized = False
        self.task = None

    def initialize(self, properties: dict):
        self.task = properties.get("task_name", "upper")
        self.device = int(properties.get("device_id", "-1"))
        self.initialized = True

    def inference(self, inputs: Input) -> Output:
        outputs = Output()
        try:
            content_type = inputs.get_property("Content-Type")
            accept = inputs.get_property("Accept")
            if not accept:
                accept = content_type if content_type and content_type.startswith("tensor/") else "application/json"
            elif "*/*" in accept:
                accept = "application/json"
            input_map = decode(inputs, content_type)
            data = input_map.pop("inputs", input_map)
            data = data if isinstance(data, list) else [data]
            encode(outputs, [{"text": getattr(it, self.task)()} for it in data], accept)
        except Exception as e:
            logging.exception("inference failed")
            outputs = Output().error(str(e))
        return outputs


_service = TextService()


def handle(inputs: Input) -> Optional[Output]:
    if not _service.initialized:
        _service.initialize(inputs.get_properties())
    if inputs.is_empty():
        return None
    return _service.inference(inputs)
