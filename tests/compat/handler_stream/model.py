from djl_python.async_utils import create_stream_chunk_output


async def handle(inputs):
    count = inputs.get_as_json()["count"]

    async def pieces():
        for number in range(count):
            if number == 3:
                raise RuntimeError("three is too many")
            yield create_stream_chunk_output({"number": number}, last_chunk=number == count - 1)

    return pieces()
