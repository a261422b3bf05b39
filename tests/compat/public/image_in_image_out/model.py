"""Pictures: a warm-up that is answered with an empty Output, raw bytes as the answer."""

import io
import json
import logging

from djl_python import Input, Output


def handle(inputs: Input):
    try:
        if inputs.content.size() == 0:
            logging.info("warm-up call")
            return Output()
        image = inputs.get_as_image("data")
        image = image.resize((image.width * 2, image.height))
        buf = io.BytesIO()
        image.save(buf, format="PNG")
        outputs = Output().add_property("Content-Type", "image/png")
        outputs.add(buf.getvalue(), "data")
        return outputs
    except Exception as e:
        logging.error("Error in handle function: " + str(e))
        outputs = Output()
        outputs.add(json.dumps({"error": str(e)}), "data")
        return outputs
