"""A vision-language model on the real engine: images in chats."""

import base64
import io

import pytest
import tiny_vision
from PIL import Image

from tests.e2e.conftest import serving


@pytest.fixture(scope="module")
def seeing(tiny_options, tmp_path_factory):
    environ = {
        **tiny_options,
        "OPTION_MODEL_ID": str(tiny_vision.make()),
        "OPTION_MAX_MODEL_LEN": "1024",
        "OPTION_ALLOWED_MEDIA_DOMAINS": "localhost",
    }
    with serving(tmp_path_factory.mktemp("seeing") / "log", **environ) as it:
        it.ready()
        yield it


def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(url):
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, {"type": "text", "text": "import"}]
    body = {"messages": [{"role": "user", "content": content}]}
    return body | {"max_tokens": 5, "temperature": 0}


def test_images_are_seen(seeing):
    answers = [seeing.invoke(chat(png(colour))).json() for colour in ("red", "blue", "red")]
    red, blue, again = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert red == again != blue
    found = seeing.openai.chat.completions.create(model="lmi", **chat(png("red")))
    assert found.choices[0].message.content == red


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://elsewhere.example/a.png", "OPTION_ALLOWED_MEDIA_DOMAINS"),
        ("http://localhost:{port}/ping", "localhost"),  # allowed by its name, but private
        ("file:///etc/passwd", "data:, https: and http: URLs only"),
        ("data:image/png;base64,AAAA", ""),
    ],
)
def test_images_that_cannot_be_had(seeing, url, told):
    answer = seeing.invoke(chat(url.format(port=seeing.port)))
    assert answer.status_code == 424
    assert told in answer.json()["error"]
    assert seeing.invoke(chat(png("red"))).status_code == 200
