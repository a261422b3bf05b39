async def handle(inputs):
    raise RuntimeError("not today")
