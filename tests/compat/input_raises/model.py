from djl_python.input_parser import input_formatter


@input_formatter
def parse(payload, **kwargs):
    raise ValueError(f"no field named {payload['wanted']!r}")
