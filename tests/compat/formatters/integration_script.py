NAMES = {"maxOutputToken": "max_new_tokens"}


def rename(payload):
    given = payload.get("parameters", {})
    parameters = {NAMES.get(name, name): value for name, value in given.items()}
    return {"inputs": payload["inputPrompt"], "parameters": parameters}


def stamp(output):
    if isinstance(output, dict):
        output = dict(output)
    else:
        output = output.model_dump()
    return {"custom_formatter_applied": True, "text": output["choices"][0]["text"]}
