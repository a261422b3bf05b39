"""A format of one's own, with a sibling module."""

from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
from integration_script import rename, stamp


@input_formatter
def custom_input_formatter(decoded_payload: dict, tokenizer=None) -> dict:
    return rename(decoded_payload)


@output_formatter
def custom_output_formatter(output):
    return stamp(output)
