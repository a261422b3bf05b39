import asyncio

from djl_python.async_utils import create_stream_chunk_output

left = []


async def handle(inputs):
    if inputs.is_empty():
        return None
    request = inputs.get_as_json()

    async def pieces():
        try:
            for number in range(request["count"]):
                if number == 3:
                    raise RuntimeError("three is too many")
                yield create_stream_chunk_output({"number": number})
                if request.get("wait"):
                    await asyncio.sleep(1000)
        except asyncio.CancelledError:
            left.append(request)
            raise
        if "wait" in request:
            yield create_stream_chunk_output({"left": len(left)}, last_chunk=True)

    return pieces()
