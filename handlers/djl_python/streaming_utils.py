# SPDX-License-Identifier: Apache-2.0
"""Streams of a Hugging Face model that a handler has loaded itself."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_ENGINES = ("Accelerate",)


class HFStreamer:
    """A queue between `generate()`, which writes tokens, and a reader of text: each step is a list
    with a text for each prompt.
    """

    def __init__(self, tokenizer: Any, **decode_kwargs: Any) -> None:
        self._tokenizer = tokenizer
        self._decode_kwargs = decode_kwargs
        self._texts: queue.Queue[Any] = queue.Queue()

    def put(self, value: Any) -> None:
        """Take a step's tokens, one for each prompt, or the prompts' tokens, a list for each."""
        rows = [[token] for token in value.tolist()] if value.ndim == 1 else value.tolist()
        self._texts.put([self._tokenizer.decode(row, **self._decode_kwargs) for row in rows])

    def put_text(self, value: Any) -> None:
        self._texts.put(value)

    def end(self) -> None:
        self._texts.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        texts = self._texts.get()
        if texts is None:
            raise StopIteration
        return texts


class StreamingUtils:
    """Makes streams for Output.add_stream_content()."""

    DEFAULT_MAX_NEW_TOKENS = 50

    @staticmethod
    def use_hf_default_streamer(
        model: Any, tokenizer: Any, inputs: Sequence[str], device: Any, **kwargs: Any
    ) -> HFStreamer:
        """Return the texts of `model.generate()`, which runs in a thread: first the prompts, then
        each step. A failure is the last item. kwargs: generate()'s.
        """
        streamer = HFStreamer(tokenizer, skip_special_tokens=True)
        _generate(model, tokenizer, inputs, device, streamer, kwargs)
        return streamer

    @staticmethod
    def get_stream_generator(execution_engine: str) -> Callable[..., Iterator[list[str]]]:
        """Return a function of (model, tokenizer, inputs, device, **parameters). Its iterator has a
        list of texts for each step, one for each of the inputs, without the prompts.

        execution_engine: "Accelerate". Raises ValueError for another.
        """
        if execution_engine not in _ENGINES:
            raise ValueError(
                f"{execution_engine!r} cannot stream here; {' or '.join(_ENGINES)} can, which is "
                "any model with generate()"
            )
        return _steps


def _steps(
    model: Any, tokenizer: Any, inputs: Sequence[str], device: Any = None, **parameters: Any
) -> Iterator[list[str]]:
    streamer = HFStreamer(tokenizer, skip_special_tokens=True)
    defaults = {"max_new_tokens": StreamingUtils.DEFAULT_MAX_NEW_TOKENS}
    _generate(model, tokenizer, inputs, device, streamer, defaults | parameters)
    next(streamer, None)  # the prompts
    yield from streamer


def _generate(
    model: Any,
    tokenizer: Any,
    inputs: Sequence[str],
    device: Any,
    streamer: HFStreamer,
    parameters: dict[str, Any],
) -> None:
    """Generate in a thread; the tokens go to the streamer."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokens = tokenizer(list(inputs), padding=True, return_tensors="pt")
    tokens = tokens.to(model.device if device is None else device)

    def run() -> None:
        try:
            model.generate(**tokens, streamer=streamer, **parameters)
        except Exception as error:
            logging.getLogger(__name__).exception("generate() failed")
            streamer.put_text(str(error))
        finally:
            streamer.end()

    threading.Thread(target=run, daemon=True).start()
