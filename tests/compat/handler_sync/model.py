"""The usual form of LMI's synchronous mode."""


def handle(inputs):
    if inputs.is_empty():
        return None
    return {"custom_handler_used": True}
