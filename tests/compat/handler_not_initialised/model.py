"""It loads a model of its own in the initialising call, and cannot."""

model = None


async def handle(inputs):
    global model
    if model is None:
        model = open(inputs.get_property("model_dir") + "/no_such_weights")
    return {"custom_handler_used": True}
