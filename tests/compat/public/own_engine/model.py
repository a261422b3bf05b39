"""An engine of its own, made in the initialising call and tried there: the answer is not None."""

from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output
from djl_python.encode_decode import decode

llm = None


class Engine:
    def __init__(self, model, tensor_parallel_size):
        self.model = model

    def generate(self, prompts):
        return [prompt.upper() for prompt in prompts]


async def handle(inputs: Input):
    global llm
    if llm is None:
        properties = inputs.get_properties()
        model_id = properties.get("model_id", "gpt2")
        llm = Engine(model=model_id, tensor_parallel_size=int(properties.get("tensor_parallel_degree", "1")))
    raw_request = inputs.get_batches()[0]
    decoded_payload = decode(raw_request, raw_request.get_property("Content-Type"))
    prompt = decoded_payload.get("inputs", "Hello")
    if not prompt or prompt.strip() == "":
        prompt = "Hello"
    return create_non_stream_output({"custom_handler_used": True, "generated_text": llm.generate([prompt])[0]})
