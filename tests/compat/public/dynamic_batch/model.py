"""Written for the server's batches: it goes through what may be several requests."""

from djl_python import Input, Output


def handle(inputs: Input):
    if inputs.is_empty():
        return None
    outputs = Output()
    batch = inputs.get_batches()
    for i, item in enumerate(batch):
        try:
            prompt = item.get_as_json().get("prompt")
            result = {"generated": prompt[::-1], "size": inputs.get_batch_size()}
            outputs.add_as_json(result, key=inputs.get_content().key_at(i), batch_index=i)
        except Exception as e:
            outputs.set_code(400).set_message("bad item").add({"error": str(e)}, batch_index=i)
    return outputs
