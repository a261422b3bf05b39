"""An attribute set on the response, as a file for one adapter does it."""

from djl_python.output_formatter import output_formatter


@output_formatter
def mark(response):
    if hasattr(response, "model_dump"):
        response.processed_by = "base"
        response.choices[0].seen = len(response.choices)
    return response
