from djl_python.output_formatter import output_formatter

seen = []


@output_formatter
def fail(output):
    seen.append(output)
    if not isinstance(output, str) or len(seen) % 2 == 0:
        raise RuntimeError("cannot format")
    return "first\n"
