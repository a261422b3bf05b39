"""A formatter that is configured by the deployment's own options."""

from djl_python.input_parser import input_formatter


@input_formatter
def custom_input_formatter(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    prefix = kwargs.get("prompt_prefix", "")
    decoded_payload["inputs"] = f"{prefix}{decoded_payload.pop('query')}"
    decoded_payload.setdefault("parameters", {}).setdefault("max_new_tokens", int(kwargs["default_new_tokens"]))
    decoded_payload["parameters"]["seed"] = len(kwargs["model_id"])
    return decoded_payload
