"""Gives back what it gets, by its content type: an author's first test of a container."""

from djl_python import Input, Output


def handle(inputs: Input) -> Output:
    if inputs.is_empty():
        return None
    content_type = inputs.get_property("content-type")
    if content_type == "tensor/ndlist":
        return Output().add_as_numpy(np_list=inputs.get_as_numpy())
    if content_type == "tensor/npz":
        return Output().add_as_npz(np_list=inputs.get_as_npz())
    if content_type == "application/json":
        return Output().add_as_json(inputs.get_as_json())
    if content_type is not None and content_type.startswith("text/"):
        return Output().add(inputs.get_as_string())
    return Output().add(inputs.get_as_bytes())
